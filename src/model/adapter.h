/* The insides of hr_lora, which only the model room sees. */
#ifndef HR_MODEL_ADAPTER_H
#define HR_MODEL_ADAPTER_H

#include "model/layout.h"

/* The pair of one module. Linear: a is packed like a weight, [rank][in]. Embedding: a is a dense
 * table [in][16 * n_leaves] of compute elements, zero beyond rank, since only rows are read. b:
 * hr_pack_lora_b.
 *
 * The A's of modules that read the same x (q, k, v; gate, up) lie side by side, in the order of
 * their ids and with nothing between them: together they are one packed matrix, which one product
 * shrinks. Modules that the adapter leaves alone take no place in it. */
typedef struct hr_lora_module {
    char *a, *b;       /* NULL: the adapter leaves this module alone */
    uint32_t rank;     /* 0 where a is NULL */
    uint32_t n_leaves; /* of rank; for a linear also the panels of A */
    float scale;
} hr_lora_module;

struct hr_lora {
    hr_lora_module *modules; /* by module id, n_modules of the model */
    uint32_t max_rank, max_leaves;
    char *arena;
    size_t arena_bytes; /* in use */
    hr_page_pool *pages;
    size_t pages_bytes; /* taken there */
};

#endif
