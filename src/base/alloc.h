/* Memory through a small struct, so that tests can refuse any allocation of an object. */
#ifndef HR_BASE_ALLOC_H
#define HR_BASE_ALLOC_H

#include <stdint.h>
#include <stdlib.h>

/* alloc returns zeroed bytes or NULL; free takes what alloc returned, or NULL. Thread-safe. */
typedef struct hr_alloc {
    void *(*alloc)(void *self, size_t bytes);
    void (*free)(void *self, void *memory);
    void *self;
} hr_alloc;

/* Room for n elements; NULL also when the product overflows. n = 0 gives a pointer to free. */
static inline void *hr_alloc_array(const hr_alloc *a, size_t n, size_t size) {
    if (size != 0 && n > SIZE_MAX / size)
        return NULL;
    return a->alloc(a->self, n * size > 0 ? n * size : 1);
}

static inline void hr_alloc_free(const hr_alloc *a, void *memory) {
    a->free(a->self, memory);
}

static inline void *hr_alloc_system_alloc(void *self, size_t bytes) {
    (void)self;
    return calloc(1, bytes);
}

static inline void hr_alloc_system_free(void *self, void *memory) {
    (void)self;
    free(memory);
}

static inline hr_alloc hr_alloc_system(void) {
    return (hr_alloc){hr_alloc_system_alloc, hr_alloc_system_free, NULL};
}

#endif
