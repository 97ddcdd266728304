/* KV pages of requests: taken, shared through the prefix cache, given back. */
#include "engine/scheduler_parts.h"

uint32_t hr_schedule_pages_at_hand(const hr_scheduler *s) {
    return hr_kv_pages_free(s->pages) + hr_prefix_cache_unheld(s->cache);
}

bool hr_schedule_take_pages(hr_scheduler *s, uint32_t n, uint32_t *out) {
    if (n > hr_schedule_pages_at_hand(s))
        return false;
    while (hr_kv_pages_free(s->pages) < n)
        HR_ASSERT(hr_prefix_cache_evict(s->cache));
    return hr_kv_pages_take(s->pages, n, out);
}

void hr_schedule_give_pages(hr_scheduler *s, hr_request *r) {
    hr_prefix_cache_release(s->cache, r->n_shared, r->pages);
    hr_kv_pages_give(s->pages, r->n_pages - r->n_shared, r->pages + r->n_shared);
    r->n_pages = r->n_shared = r->n_clear_pages = r->n_computed = 0;
}

uint32_t hr_schedule_reusable_pages(const hr_scheduler *s, const hr_request *r) {
    if (s->c.disable_prefix_cache)
        return 0;
    uint32_t positions = r->n_ids - 1;
    if (r->want_prompt && r->next_prompt_pos < r->n_prompt) {
        uint32_t first_scored = r->next_prompt_pos > 0 ? r->next_prompt_pos - 1 : 0;
        positions = first_scored < positions ? first_scored : positions;
    }
    return positions / HR_KV_PAGE_TOKENS;
}

/* The known page that continues r's shared ones. */
static uint32_t find_next_page(const hr_scheduler *s, const hr_request *r) {
    uint32_t parent = r->n_shared > 0 ? r->pages[r->n_shared - 1] : HR_PREFIX_NONE;
    return hr_prefix_cache_find(s->cache, r->adapter_id, parent,
                                hr_schedule_page_ids(r, r->n_shared));
}

bool hr_schedule_may_share(const hr_scheduler *s, const hr_request *r) {
    return !s->c.disable_prefix_cache && r->cache_epoch == hr_prefix_cache_epoch(s->cache);
}

/* Where another sequence was first, r takes over its page: the bits are the same. */
void hr_schedule_share_pages(hr_scheduler *s, hr_request *r) {
    while (hr_schedule_may_share(s, r) && (r->n_shared + 1) * HR_KV_PAGE_TOKENS <= r->n_computed) {
        uint32_t *page = &r->pages[r->n_shared], known = find_next_page(s, r);
        if (known == HR_PREFIX_NONE) {
            uint32_t parent = r->n_shared > 0 ? page[-1] : HR_PREFIX_NONE;
            hr_prefix_cache_insert(s->cache, r->adapter_id, parent,
                                   hr_schedule_page_ids(r, r->n_shared), *page);
        } else {
            hr_prefix_cache_hold(s->cache, known);
            hr_kv_pages_give(s->pages, 1, page);
            *page = known;
        }
        r->n_shared++;
    }
}

void hr_schedule_skip_known(hr_scheduler *s, hr_request *r) {
    uint32_t most = hr_schedule_reusable_pages(s, r), before = r->n_shared, known;
    if (!hr_schedule_may_share(s, r) || r->n_computed != r->n_shared * HR_KV_PAGE_TOKENS)
        return;
    while (r->n_shared < most && (known = find_next_page(s, r)) != HR_PREFIX_NONE) {
        hr_prefix_cache_hold(s->cache, known);
        if (r->n_shared < r->n_pages)
            hr_kv_pages_give(s->pages, 1, &r->pages[r->n_shared]);
        r->pages[r->n_shared++] = known;
    }
    r->n_computed = r->n_shared * HR_KV_PAGE_TOKENS;
    r->n_clear_pages = r->n_shared;
    if (r->retractions == 0) {
        uint32_t skipped = (r->n_shared - before) * HR_KV_PAGE_TOKENS;
        r->cached_tokens += skipped;
        s->stats.cached_prompt_tokens += skipped;
    }
}

void hr_scheduler_flush_cache(hr_scheduler *s) {
    HR_ASSERT(s->n_running == 0);
    hr_prefix_cache_clear(s->cache);
}

void hr_scheduler_forget_adapter(hr_scheduler *s, uint64_t adapter_id) {
    hr_prefix_cache_forget(s->cache, adapter_id);
}
