/* Pages of the KV arena: a stack of free page numbers and one mark per page. */
#include "engine/kv_cache.h"

struct hr_kv_pages {
    hr_alloc alloc;
    uint32_t total, n_free;
    uint32_t *free; /* the last is taken first */
    bool *taken;
};

hr_status hr_kv_pages_create(uint32_t n_pages, const hr_alloc *alloc, hr_kv_pages **out,
                             hr_error *err) {
    hr_kv_pages *pages = hr_alloc_array(alloc, 1, sizeof *pages);
    if (pages == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the table of KV pages");
    pages->alloc = *alloc;
    pages->total = pages->n_free = n_pages;
    pages->free = hr_alloc_array(alloc, n_pages, sizeof *pages->free);
    pages->taken = hr_alloc_array(alloc, n_pages, sizeof *pages->taken);
    if (pages->free == NULL || pages->taken == NULL) {
        hr_kv_pages_destroy(pages);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a table of %u KV pages", n_pages);
    }
    for (uint32_t i = 0; i < n_pages; i++)
        pages->free[i] = n_pages - 1 - i;
    *out = pages;
    return HR_OK;
}

void hr_kv_pages_destroy(hr_kv_pages *pages) {
    if (pages == NULL)
        return;
    hr_alloc alloc = pages->alloc;
    hr_alloc_free(&alloc, pages->taken);
    hr_alloc_free(&alloc, pages->free);
    hr_alloc_free(&alloc, pages);
}

bool hr_kv_pages_take(hr_kv_pages *pages, uint32_t n, uint32_t *out) {
    if (n > pages->n_free)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = pages->free[--pages->n_free];
        pages->taken[out[i]] = true;
    }
    return true;
}

void hr_kv_pages_give(hr_kv_pages *pages, uint32_t n, const uint32_t *taken) {
    for (uint32_t i = n; i-- > 0;) {
        HR_ASSERT(taken[i] < pages->total && pages->taken[taken[i]]);
        pages->taken[taken[i]] = false;
        pages->free[pages->n_free++] = taken[i];
    }
}

uint32_t hr_kv_pages_total(const hr_kv_pages *pages) {
    return pages->total;
}

uint32_t hr_kv_pages_free(const hr_kv_pages *pages) {
    return pages->n_free;
}

hr_status hr_kv_size(const hr_kv_sizing *sizing, uint32_t *n_pages, const char **source,
                     hr_error *err) {
    uint64_t pages = sizing->memory_bytes / sizing->page_bytes;
    const char *why = sizing->memory_source;
    if (pages == 0)
        return hr_fail(
            err, HR_ERR_NO_MEMORY,
            "no memory is left for the KV cache beside the weights: a page of %d positions needs "
            "%llu "
            "bytes, %llu may be used (%s); raise --mem-fraction-static or give more memory",
            HR_KV_PAGE_TOKENS, (unsigned long long)sizing->page_bytes,
            (unsigned long long)sizing->memory_bytes, sizing->memory_source);
    uint64_t most =
        (uint64_t)sizing->max_running_requests * hr_kv_pages_for(sizing->context_length);
    if (most < pages) {
        pages = most;
        why = "--max-running-requests x --context-length";
    }
    uint64_t wish = sizing->max_total_tokens / HR_KV_PAGE_TOKENS;
    if (sizing->max_total_tokens > 0 && wish < pages) {
        pages = wish > 0 ? wish : 1;
        why = "--max-total-tokens";
    }
    if (pages > UINT32_MAX / HR_KV_PAGE_TOKENS)
        pages = UINT32_MAX / HR_KV_PAGE_TOKENS;
    *n_pages = (uint32_t)pages;
    *source = why;
    return HR_OK;
}
