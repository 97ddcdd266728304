/* The scheduler's state, and what its parts do for each other. The parts are one idea each:
 * schedule_lists.c (who waits and who runs), schedule_pages.c (KV pages), schedule_end.c (endings),
 * schedule_versions.c (weights that change), schedule_admit.c, schedule_retract.c, schedule_plan.c
 * and schedule_deliver.c (a step in its order); scheduler.c puts them together. Private to them. */
#ifndef HR_ENGINE_SCHEDULER_PARTS_H
#define HR_ENGINE_SCHEDULER_PARTS_H

#include "engine/scheduler.h"

struct hr_scheduler {
    hr_scheduler_config c;
    hr_kv_pages *pages;
    hr_prefix_cache *cache;
    hr_plan plan;
    hr_request *queue_head, *queue_tail;
    hr_request **running; /* [max_running], by (adapter_id, serial) */
    uint32_t n_running, n_queued;
    uint64_t next_serial;
    bool closed;
    hr_version_label *label;  /* the weight version now */
    uint64_t renewed;         /* changes of the store that waiting requests know of */
    hr_sampler_space *spaces; /* [n_workers] */
    hr_scheduler_stats stats; /* the counters that only grow */
};

/* ---- schedule_lists.c: the queue, a list in order of arrival; and the running set, an array
 * sorted by adapter ---- */

void hr_schedule_queue_push_back(hr_scheduler *s, hr_request *r);
void hr_schedule_queue_push_front(hr_scheduler *s, hr_request *r);
void hr_schedule_queue_remove(hr_scheduler *s, hr_request *r);
void hr_schedule_running_insert(hr_scheduler *s, hr_request *r);
void hr_schedule_running_remove(hr_scheduler *s, const hr_request *r);
/* The last to arrive. Somebody must be running. */
hr_request *hr_schedule_running_youngest(const hr_scheduler *s);

/* ---- schedule_pages.c ---- */

/* Pages that are free, or free as soon as the prefix cache gives them up. */
uint32_t hr_schedule_pages_at_hand(const hr_scheduler *s);
/* n pages for a request, of those at hand; false, and none, when there are fewer. */
bool hr_schedule_take_pages(hr_scheduler *s, uint32_t n, uint32_t *out);
/* Gives all pages of r back; it has computed nothing then. */
void hr_schedule_give_pages(hr_scheduler *s, hr_request *r);
/* Pages of r's ids that need not be computed when they are known: the last id is computed to have
 * its logits, and so are the rows that give the prompt logprobs still wanted. */
uint32_t hr_schedule_reusable_pages(const hr_scheduler *s, const hr_request *r);
/* Whether r's pages and known ones are of the same weights. */
bool hr_schedule_may_share(const hr_scheduler *s, const hr_request *r);
/* Makes the full pages of r known. */
void hr_schedule_share_pages(hr_scheduler *s, hr_request *r);
/* Skips what became known since r was last looked at: r stands before a page of its own that it has
 * not begun. */
void hr_schedule_skip_known(hr_scheduler *s, hr_request *r);

static inline const uint32_t *hr_schedule_page_ids(const hr_request *r, uint32_t page) {
    return r->ids + (size_t)page * HR_KV_PAGE_TOKENS;
}

/* ---- schedule_end.c ---- */

/* Ends a request that is in no list and holds no pages; times, counts and spans are filled in. */
void hr_schedule_end(hr_scheduler *s, hr_request *r, hr_finish f);
/* Takes it out of the queue, or of the running set with its pages, and ends it. */
void hr_schedule_end_queued(hr_scheduler *s, hr_request *r, hr_finish f);
void hr_schedule_end_running(hr_scheduler *s, hr_request *r, hr_finish f);

/* ---- schedule_versions.c ---- */

/* Whether r has ever run: tokens of it may be made by the versions that its spans name. */
static inline bool hr_schedule_has_begun(const hr_request *r) {
    return r->n_spans > 0;
}

/* A waiting request goes over to what its adapter's name stands for now, if it may; it ends when
 * the name is gone. */
void hr_schedule_renew(hr_scheduler *s, hr_request *r);
/* What waits is no longer bound to the version that it began with. */
void hr_schedule_release_versions(hr_scheduler *s);

/* ---- a step, in this order ---- */

/* schedule_admit.c: moves from the queue to the running set whoever fits. */
void hr_schedule_admit(hr_scheduler *s);
/* schedule_retract.c: every running request gets the page that its last id needs, or is
 * retracted. */
void hr_schedule_secure_pages(hr_scheduler *s);
/* schedule_plan.c: which rows of whom the step computes. */
void hr_schedule_plan(hr_scheduler *s);
/* schedule_deliver.c: on every worker of the pool, an hr_logits_fn whose ctx is the scheduler;
 * scores and draws. Then, on the scheduler's thread, hands the results out. */
void hr_schedule_on_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                           void *scratch, unsigned worker, unsigned n_workers);
void hr_schedule_deliver(hr_scheduler *s);

#endif
