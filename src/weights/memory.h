/* Memory of a receiver: whatever the options give, not zeroed, so that a stash of gigabytes is
 * touched once. */
#ifndef HR_WEIGHTS_MEMORY_H
#define HR_WEIGHTS_MEMORY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct hr_memory {
    void *(*alloc)(void *self, size_t bytes);
    void (*free)(void *self, void *memory);
    void *self;
} hr_memory;

/* NULL also when the product overflows; n = 0 gives a pointer to free. */
static inline void *hr_memory_array(const hr_memory *m, size_t n, size_t size) {
    if (size != 0 && n > SIZE_MAX / size)
        return NULL;
    return m->alloc(m->self, n * size > 0 ? n * size : 1);
}

static inline void *hr_memory_zeroed(const hr_memory *m, size_t n, size_t size) {
    void *memory = hr_memory_array(m, n, size);
    if (memory != NULL)
        memset(memory, 0, n * size);
    return memory;
}

/* NULL is allowed. */
static inline void hr_memory_free(const hr_memory *m, void *memory) {
    if (memory != NULL)
        m->free(m->self, memory);
}

#endif
