/* What a parsed /generate body owns: the JSON tree its strings point into and the arrays made from
 * it, freed together. */
#ifndef HR_SERVER_GENERATE_MEMORY_H
#define HR_SERVER_GENERATE_MEMORY_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stdlib.h>

struct hr_generate_block {
    struct hr_generate_block *next;
    max_align_t data[];
};

struct hr_generate_memory {
    cJSON *tree;
    struct hr_generate_block *blocks;
};

/* Zeroed memory for n elements of size bytes (also for n 0). ERR_NO_MEMORY. */
hr_status hr_generate_alloc(struct hr_generate_memory *memory, size_t n, size_t size, void *out,
                            hr_error *err);

void hr_generate_memory_free(struct hr_generate_memory *memory);

#endif
