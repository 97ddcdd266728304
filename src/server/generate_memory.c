/* What a parsed /generate body owns. */
#include "server/generate_memory.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

hr_status hr_generate_alloc(struct hr_generate_memory *memory, size_t n, size_t size, void *out,
                            hr_error *err) {
    struct hr_generate_block *block =
        n > (SIZE_MAX - sizeof *block) / size ? NULL : calloc(1, sizeof *block + n * size);
    if (block == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the request");
    block->next = memory->blocks;
    memory->blocks = block;
    void *data = block->data;
    memcpy(out, &data, sizeof data); /* out is the address of a pointer of any type */
    return HR_OK;
}

void hr_generate_memory_free(struct hr_generate_memory *memory) {
    if (memory == NULL)
        return;
    while (memory->blocks != NULL) {
        struct hr_generate_block *block = memory->blocks;
        memory->blocks = block->next;
        free(block);
    }
    cJSON_Delete(memory->tree);
    free(memory);
}
