/* Admission: who may run beside those that do. */
#include "engine/scheduler_parts.h"

static bool adapter_fits(const hr_scheduler *s, const hr_request *r) {
    uint32_t distinct = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        if (s->running[i]->adapter_id == r->adapter_id)
            return true;
        distinct += i == 0 || s->running[i]->adapter_id != s->running[i - 1]->adapter_id;
    }
    return distinct < s->c.max_adapters;
}

/* Known pages of r need no room of their own, but cannot be evicted to make room either. */
static bool pages_fit(const hr_scheduler *s, const hr_request *r) {
    uint32_t at_hand = hr_schedule_pages_at_hand(s),
             needed = hr_kv_pages_for(r->n_ids) + s->n_running;
    uint32_t most = hr_schedule_reusable_pages(s, r), page = HR_PREFIX_NONE;
    for (uint32_t i = 0; i < most; i++) {
        page = hr_prefix_cache_find(s->cache, r->adapter_id, page, hr_schedule_page_ids(r, i));
        if (page == HR_PREFIX_NONE)
            break;
        needed--;
        at_hand -= !hr_prefix_cache_is_held(s->cache, page);
    }
    return at_hand >= needed;
}

/* Takes r from the queue into the running set; when memory is short it ends instead. */
static void start(hr_scheduler *s, hr_request *r) {
    hr_schedule_queue_remove(s, r);
    r->keeps_version = false;
    if (!hr_request_prepare(r, &s->c.limits, &s->c.alloc) ||
        (!hr_schedule_has_begun(r) && !hr_request_note_version(r, s->label, &s->c.alloc))) {
        hr_schedule_end(
            s, r,
            (hr_finish){.type = HR_FINISH_ERROR,
                        .status = HR_ERR_NO_MEMORY,
                        .message =
                            "no memory to run this request; ask for fewer tokens or logprobs"});
        return;
    }
    r->cache_epoch = hr_prefix_cache_epoch(s->cache);
    hr_schedule_skip_known(s, r);
    r->n_pages = hr_kv_pages_for(r->n_ids);
    HR_ASSERT(hr_schedule_take_pages(s, r->n_pages - r->n_shared, r->pages + r->n_shared));
    if (r->admit_ns == 0) {
        r->admit_ns = hr_now_ns(&s->c.clock);
        s->stats.prompt_tokens += r->n_prompt;
    }
    hr_schedule_running_insert(s, r);
}

void hr_schedule_admit(hr_scheduler *s) {
    hr_request *blocked = NULL; /* the oldest that waits for a place for its adapter */
    if (hr_scheduler_is_outdated(s))
        hr_scheduler_renew_waiting(s);
    for (hr_request *r = s->queue_head, *next; r != NULL && s->n_running < s->c.max_running;
         r = next) {
        next = r->next;
        if (s->closed && !r->keeps_version)
            continue;
        if (!adapter_fits(s, r)) {
            blocked = blocked != NULL ? blocked : r;
            continue;
        }
        if (!pages_fit(s, r) || (blocked != NULL && blocked->overtaken >= s->c.max_overtaken))
            return;
        if (blocked != NULL)
            blocked->overtaken++;
        start(s, r);
    }
}
