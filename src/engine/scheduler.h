/* The scheduler: which requests run, and what each step computes. A state machine without threads,
 * clocks or model of its own, so that simulations can drive it through every state.
 *
 * queued -> running -> finished; running -> queued again (retracted) when the KV cache runs short.
 *
 * Admission is first come, first served, subject to max_running, to KV pages (the whole sequence so
 * far, and one page in reserve for every other running request) and to max_adapters distinct
 * adapters in the batch (base counts as one). A request whose adapter has no place may be
 * overtaken, but only max_overtaken times: then nobody is admitted before it, so no adapter
 * starves.
 *
 * A step computes one row of every request that generates, and up to chunk prompt rows of the
 * others: a quarter of that while any request generates, so that its tokens keep coming (either is
 * enough rows to compute at full speed). When several prompts wait, the oldest is sure of a quarter
 * of these rows and takes what the others leave; the rest goes to the prompts with the fewest rows
 * left. So a long prompt never stands still and never makes a short one wait for its end. Far into
 * a long prompt a row costs more, since it attends to all before it, so it gets fewer rows there
 * and the step takes no longer.
 *
 * Full pages of every sequence are shared through the prefix cache while it runs and stay there
 * afterwards; pages that nobody holds count as free. A prompt begins behind its longest known
 * prefix, but its last id is always computed, and so is every row whose logprob is wanted. A prompt
 * whose next page another one computes in this step waits for that page.
 *
 * A generating request that finds no free page retracts the youngest running one: that one returns
 * to the front of the queue, to be computed again from its ids, as far as its pages are needed
 * meanwhile. By the arithmetic promise its bits are the same; what was delivered is not delivered
 * again.
 *
 * Weights change between two steps (hr_scheduler_changed). Every request remembers which weight
 * version its tokens were made under. A request that waits without having begun, or because it was
 * paused, is served by what its adapter's name stands for when it runs; one that runs keeps the
 * version it began with, unless it was frozen when its adapter changed.
 *
 * Everything here is called by one thread. Callbacks of requests run inside hr_scheduler_step and
 * _reap. */
#ifndef HR_ENGINE_SCHEDULER_H
#define HR_ENGINE_SCHEDULER_H

#include "base/clock.h"
#include "engine/kv_cache.h"
#include "engine/plan.h"
#include "engine/prefix_cache.h"
#include "engine/request.h"

/* Who computes steps: the model, or a fake. */
typedef struct hr_executor {
    void *self;
    /* hr_model_forward on the pool; on_logits as model/view.h says. */
    void (*step)(void *self, const hr_view *view, hr_logits_fn on_logits, void *ctx);
    /* Zeroes a page before its new owner first writes it. */
    void (*clear_page)(void *self, uint32_t page);
} hr_executor;

typedef struct hr_scheduler_config {
    hr_request_limits limits;
    uint32_t max_running, max_adapters;
    uint32_t max_overtaken; /* 0 = 4 * max_running */
    /* Positions that cost a row as much to attend to as all its linear layers; 0 = attention is not
     * counted. */
    uint32_t attention_depth;
    uint32_t n_pages, n_workers;
    bool disable_prefix_cache;
    const hr_kernels *kernels; /* for logprobs and sampling */
    hr_executor executor;
    hr_clock clock;
    hr_alloc alloc;
    const char *weight_version; /* the first one; copied */
    hr_adapter_store *store;    /* of the requests' leases */
    /* A request has ended and holds no pages: the owner returns its lease, calls on_finish and
     * frees it. */
    void (*finish)(void *self, hr_request *request, const hr_finish *finish);
    void *finish_self;
} hr_scheduler_config;

typedef struct hr_scheduler_stats {
    uint32_t running, queued;
    uint32_t kv_pages, kv_pages_free;
    uint32_t kv_pages_cached; /* held by the prefix cache alone */
    uint64_t steps, prompt_tokens, cached_prompt_tokens, generated_tokens, retractions;
} hr_scheduler_stats;

typedef struct hr_scheduler hr_scheduler;

hr_status hr_scheduler_create(const hr_scheduler_config *config, hr_scheduler **out, hr_error *err);
/* No request may be left. NULL is allowed. */
void hr_scheduler_destroy(hr_scheduler *scheduler);

/* Queues a request; the scheduler holds it until finish is called with it. */
void hr_scheduler_add(hr_scheduler *scheduler, hr_request *request);

/* Ends every request whose ending is asked for. */
void hr_scheduler_reap(hr_scheduler *scheduler);

/* Every running request goes back to the queue, in order of arrival; its pages stay in the prefix
 * cache as long as nobody needs them. What waits is from now on computed with the weights that are
 * there when it runs. */
void hr_scheduler_retract_all(hr_scheduler *scheduler);

/* Empties the prefix cache. No request may be running. */
void hr_scheduler_flush_cache(hr_scheduler *scheduler);

/* An adapter is gone for good: nobody will look for its pages again. */
void hr_scheduler_forget_adapter(hr_scheduler *scheduler, uint64_t adapter_id);

/* While closed nobody is admitted who has not begun yet. */
void hr_scheduler_close(hr_scheduler *scheduler, bool closed);
/* Requests that have begun and hold on to the weights they began with: those that run, and those
 * that the KV cache sent back to the queue. */
uint32_t hr_scheduler_begun(const hr_scheduler *scheduler);

/* The weights have just changed. */
typedef struct hr_scheduler_change {
    bool base;               /* base weights: pages of before are never found again */
    bool frozen;             /* by a pause: what runs goes on with its KV and the new weights */
    bool flush;              /* empty the prefix cache in any case */
    hr_version_label *label; /* the weight version from now on, the scheduler's; NULL: unchanged */
} hr_scheduler_change;
/* Adapters are looked up in the store. Requests for whose version span no memory is left end with
 * HR_ERR_NO_MEMORY; waiting ones whose adapter is gone end too. */
void hr_scheduler_changed(hr_scheduler *scheduler, const hr_scheduler_change *change);

/* Names of adapters have changed since waiting requests were last looked at. */
bool hr_scheduler_is_outdated(const hr_scheduler *scheduler);
/* Waiting requests lease what their names stand for now; those whose names are gone end. */
void hr_scheduler_renew_waiting(hr_scheduler *scheduler);

/* Ends every request with this error; message lives during the call. */
void hr_scheduler_fail_all(hr_scheduler *scheduler, hr_status status, const char *message);

/* Admits what fits and computes one step; false when there was nothing to do. */
bool hr_scheduler_step(hr_scheduler *scheduler);

bool hr_scheduler_has_work(const hr_scheduler *scheduler);
hr_scheduler_stats hr_scheduler_stats_of(const hr_scheduler *scheduler);

/* For checks: the i-th running request, sorted by adapter, NULL past the last; and the head of the
 * queue. */
const hr_request *hr_scheduler_running(const hr_scheduler *scheduler, uint32_t i);
const hr_request *hr_scheduler_queue(const hr_scheduler *scheduler);

#endif
