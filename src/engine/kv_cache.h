/* Which pages of the KV arena belong to whom, and how many there are.
 *
 * A page holds HR_KV_PAGE_TOKENS positions of one sequence over all layers. This object hands out
 * page numbers only; the arena belongs to whoever runs the model. Used by the scheduler thread
 * alone. */
#ifndef HR_ENGINE_KV_CACHE_H
#define HR_ENGINE_KV_CACHE_H

#include "base/alloc.h"
#include "base/error.h"
#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

static inline uint32_t hr_kv_pages_for(uint64_t positions) {
    return (uint32_t)((positions + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS);
}

typedef struct hr_kv_pages hr_kv_pages;

hr_status hr_kv_pages_create(uint32_t n_pages, const hr_alloc *alloc, hr_kv_pages **out,
                             hr_error *err);
void hr_kv_pages_destroy(hr_kv_pages *pages); /* NULL is allowed */

/* Takes n pages into out, or none: false when fewer are free. Pages given back last are taken
 * first, so that the memory in use stays small. What a page holds is unknown: clear it before it is
 * read. */
bool hr_kv_pages_take(hr_kv_pages *pages, uint32_t n, uint32_t *out);
/* Gives taken pages back; giving a free page back is internal corruption. */
void hr_kv_pages_give(hr_kv_pages *pages, uint32_t n, const uint32_t *taken);

uint32_t hr_kv_pages_total(const hr_kv_pages *pages);
uint32_t hr_kv_pages_free(const hr_kv_pages *pages);

/* How large the cache shall be. */
typedef struct hr_kv_sizing {
    uint64_t page_bytes;
    uint64_t memory_bytes;                         /* what KV may take */
    const char *memory_source;                     /* static text: what bounds memory_bytes */
    uint64_t max_total_tokens;                     /* asked for; 0 = no wish */
    uint32_t max_running_requests, context_length; /* more than their product is never needed */
} hr_kv_sizing;

/* Pages: the least of the three bounds; *source says which it was. HR_ERR_NO_MEMORY when not even
 * one page fits. */
hr_status hr_kv_size(const hr_kv_sizing *sizing, uint32_t *n_pages, const char **source,
                     hr_error *err);

#endif
