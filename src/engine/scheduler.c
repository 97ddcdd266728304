/* The scheduler's state machine. */
#include "engine/scheduler.h"

#include <stdio.h>
#include <string.h>

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

static bool space_create(hr_sampler_space *space, uint32_t n_vocab, const hr_alloc *alloc) {
    space->ids = hr_alloc_array(alloc, n_vocab, sizeof *space->ids);
    space->values = hr_alloc_array(alloc, n_vocab, sizeof *space->values);
    space->ranked_ids = hr_alloc_array(alloc, n_vocab, sizeof *space->ranked_ids);
    space->ranked_values = hr_alloc_array(alloc, n_vocab, sizeof *space->ranked_values);
    return space->ids != NULL && space->values != NULL && space->ranked_ids != NULL &&
           space->ranked_values != NULL;
}

static void space_destroy(hr_sampler_space *space, const hr_alloc *alloc) {
    hr_alloc_free(alloc, space->ids);
    hr_alloc_free(alloc, space->values);
    hr_alloc_free(alloc, space->ranked_ids);
    hr_alloc_free(alloc, space->ranked_values);
}

hr_status hr_scheduler_create(const hr_scheduler_config *config, hr_scheduler **out,
                              hr_error *err) {
    const hr_alloc *alloc = &config->alloc;
    hr_scheduler *s = hr_alloc_array(alloc, 1, sizeof *s);
    if (s == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the scheduler");
    s->c = *config;
    if (s->c.max_overtaken == 0)
        s->c.max_overtaken = 4 * config->max_running;
    hr_status status = hr_version_label_create(config->weight_version, alloc, &s->label, err);
    if (status != HR_OK)
        goto fail;
    status = hr_kv_pages_create(config->n_pages, alloc, &s->pages, err);
    if (status != HR_OK)
        goto fail;
    status = hr_prefix_cache_create(s->pages, alloc, &s->cache, err);
    if (status != HR_OK)
        goto fail;
    status = hr_plan_create(config->limits.chunked_prefill_size + config->max_running,
                            config->max_running, alloc, &s->plan, err);
    if (status != HR_OK)
        goto fail;
    s->running = hr_alloc_array(alloc, config->max_running, sizeof(hr_request *));
    s->spaces = hr_alloc_array(alloc, config->n_workers, sizeof *s->spaces);
    bool ok = s->running != NULL && s->spaces != NULL;
    for (uint32_t w = 0; ok && w < config->n_workers; w++)
        ok = space_create(&s->spaces[w], config->limits.vocab_size, alloc);
    if (!ok) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a scheduler of %u requests",
                         config->max_running);
        goto fail;
    }
    *out = s;
    return HR_OK;

fail:
    hr_scheduler_destroy(s);
    return status;
}

void hr_scheduler_destroy(hr_scheduler *s) {
    if (s == NULL)
        return;
    HR_ASSERT(s->n_running == 0 && s->n_queued == 0);
    hr_alloc alloc = s->c.alloc;
    for (uint32_t w = 0; s->spaces != NULL && w < s->c.n_workers; w++)
        space_destroy(&s->spaces[w], &alloc);
    hr_alloc_free(&alloc, s->spaces);
    hr_alloc_free(&alloc, s->running);
    hr_plan_destroy(&s->plan, &alloc);
    hr_prefix_cache_destroy(s->cache);
    hr_kv_pages_destroy(s->pages);
    hr_version_label_release(s->label, &alloc);
    hr_alloc_free(&alloc, s);
}

/* ---- the queue: a list ---- */

static void queue_push_back(hr_scheduler *s, hr_request *r) {
    r->next = NULL;
    r->prev = s->queue_tail;
    *(s->queue_tail != NULL ? &s->queue_tail->next : &s->queue_head) = r;
    s->queue_tail = r;
    s->n_queued++;
}

static void queue_push_front(hr_scheduler *s, hr_request *r) {
    r->prev = NULL;
    r->next = s->queue_head;
    *(s->queue_head != NULL ? &s->queue_head->prev : &s->queue_tail) = r;
    s->queue_head = r;
    s->n_queued++;
}

static void queue_remove(hr_scheduler *s, hr_request *r) {
    *(r->prev != NULL ? &r->prev->next : &s->queue_head) = r->next;
    *(r->next != NULL ? &r->next->prev : &s->queue_tail) = r->prev;
    r->prev = r->next = NULL;
    s->n_queued--;
}

/* ---- the running set: a sorted array ---- */

static bool runs_before(const hr_request *a, const hr_request *b) {
    return a->adapter_id != b->adapter_id ? a->adapter_id < b->adapter_id : a->serial < b->serial;
}

static void running_insert(hr_scheduler *s, hr_request *r) {
    uint32_t i = s->n_running++;
    for (; i > 0 && runs_before(r, s->running[i - 1]); i--)
        s->running[i] = s->running[i - 1];
    s->running[i] = r;
}

static void running_remove(hr_scheduler *s, const hr_request *r) {
    uint32_t i = 0;
    while (s->running[i] != r)
        i++;
    s->n_running--;
    memmove(s->running + i, s->running + i + 1, (s->n_running - i) * sizeof(hr_request *));
}

static hr_request *youngest_running(const hr_scheduler *s) {
    hr_request *youngest = s->running[0];
    for (uint32_t i = 1; i < s->n_running; i++)
        if (s->running[i]->serial > youngest->serial)
            youngest = s->running[i];
    return youngest;
}

/* ---- pages ---- */

static uint32_t pages_at_hand(const hr_scheduler *s) {
    return hr_kv_pages_free(s->pages) + hr_prefix_cache_unheld(s->cache);
}

static bool take_pages(hr_scheduler *s, uint32_t n, uint32_t *out) {
    if (n > pages_at_hand(s))
        return false;
    while (hr_kv_pages_free(s->pages) < n)
        HR_ASSERT(hr_prefix_cache_evict(s->cache));
    return hr_kv_pages_take(s->pages, n, out);
}

static void give_pages(hr_scheduler *s, hr_request *r) {
    hr_prefix_cache_release(s->cache, r->n_shared, r->pages);
    hr_kv_pages_give(s->pages, r->n_pages - r->n_shared, r->pages + r->n_shared);
    r->n_pages = r->n_shared = r->n_clear_pages = r->n_computed = 0;
}

/* Pages of r's ids that need not be computed when they are known: the last id is computed to have
 * its logits, and so are the rows that give the prompt logprobs still wanted. */
static uint32_t reusable_pages(const hr_scheduler *s, const hr_request *r) {
    if (s->c.disable_prefix_cache)
        return 0;
    uint32_t positions = r->n_ids - 1;
    if (r->want_prompt && r->next_prompt_pos < r->n_prompt) {
        uint32_t first_scored = r->next_prompt_pos > 0 ? r->next_prompt_pos - 1 : 0;
        positions = first_scored < positions ? first_scored : positions;
    }
    return positions / HR_KV_PAGE_TOKENS;
}

static const uint32_t *tokens_of_page(const hr_request *r, uint32_t page) {
    return r->ids + (size_t)page * HR_KV_PAGE_TOKENS;
}

/* The known page that continues r's shared ones. */
static uint32_t find_next_page(const hr_scheduler *s, const hr_request *r) {
    uint32_t parent = r->n_shared > 0 ? r->pages[r->n_shared - 1] : HR_PREFIX_NONE;
    return hr_prefix_cache_find(s->cache, r->adapter_id, parent, tokens_of_page(r, r->n_shared));
}

static bool may_share(const hr_scheduler *s, const hr_request *r) {
    return !s->c.disable_prefix_cache && r->cache_epoch == hr_prefix_cache_epoch(s->cache);
}

/* Makes the full pages of r known. Where another sequence was first, r takes over its page: the
 * bits are the same. */
static void share_pages(hr_scheduler *s, hr_request *r) {
    while (may_share(s, r) && (r->n_shared + 1) * HR_KV_PAGE_TOKENS <= r->n_computed) {
        uint32_t *page = &r->pages[r->n_shared], known = find_next_page(s, r);
        if (known == HR_PREFIX_NONE) {
            uint32_t parent = r->n_shared > 0 ? page[-1] : HR_PREFIX_NONE;
            hr_prefix_cache_insert(s->cache, r->adapter_id, parent, tokens_of_page(r, r->n_shared),
                                   *page);
        } else {
            hr_prefix_cache_hold(s->cache, known);
            hr_kv_pages_give(s->pages, 1, page);
            *page = known;
        }
        r->n_shared++;
    }
}

/* Skips what became known since r was last looked at: r stands before a page of its own that it has
 * not begun. */
static void skip_known(hr_scheduler *s, hr_request *r) {
    uint32_t most = reusable_pages(s, r), before = r->n_shared, known;
    if (!may_share(s, r) || r->n_computed != r->n_shared * HR_KV_PAGE_TOKENS)
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

/* ---- ending ---- */

/* The last span ends here; one without tokens is left out. */
static void report_versions(const hr_scheduler *s, hr_request *r, hr_finish *f) {
    f->spans = r->spans;
    f->n_spans = r->n_spans;
    if (f->n_spans > 0 && r->spans[f->n_spans - 1].start == f->completion_tokens)
        f->n_spans--;
    if (f->n_spans > 0)
        r->spans[f->n_spans - 1].end = f->completion_tokens;
    uint32_t last = f->n_spans > 0 ? (uint32_t)f->n_spans : r->n_spans;
    f->weight_version = last > 0 ? r->labels[last - 1]->text : s->label->text;
}

/* The request is in no list and holds no pages. */
static void finish(hr_scheduler *s, hr_request *r, hr_finish f) {
    uint64_t now = hr_now_ns(&s->c.clock);
    f.message = f.message != NULL ? f.message : "";
    f.prompt_tokens = r->n_prompt;
    f.completion_tokens = r->n_ids - r->n_prompt;
    f.cached_tokens = r->cached_tokens;
    f.retractions = r->retractions;
    f.adapter_id = r->adapter_id;
    report_versions(s, r, &f);
    f.queue_ns = (r->admit_ns != 0 ? r->admit_ns : now) - r->submit_ns;
    f.first_token_ns = r->first_token_ns != 0 ? r->first_token_ns - r->submit_ns : 0;
    f.e2e_ns = now - r->submit_ns;
    s->c.finish(s->c.finish_self, r, &f);
}

static void finish_running(hr_scheduler *s, hr_request *r, hr_finish f) {
    running_remove(s, r);
    give_pages(s, r);
    finish(s, r, f);
}

static hr_finish ending_of(const hr_request *r, int ending, bool queued) {
    hr_finish f = {.type = HR_FINISH_ABORT, .status = HR_ERR_CANCELLED};
    if (ending == HR_ENDING_STOP) {
        f.status = HR_ERR_STOPPING;
        f.message = "the engine is stopping";
    } else {
        f.message = queued && r->retractions == 0 ? "Abort in waiting queue" : "Aborted";
    }
    return f;
}

void hr_scheduler_reap(hr_scheduler *s) {
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        int ending = atomic_load(&r->ending);
        if (ending == HR_ENDING_NOT)
            continue;
        queue_remove(s, r);
        finish(s, r, ending_of(r, ending, true));
    }
    for (uint32_t i = s->n_running; i-- > 0;) {
        hr_request *r = s->running[i];
        int ending = atomic_load(&r->ending);
        if (ending != HR_ENDING_NOT)
            finish_running(s, r, ending_of(r, ending, false));
    }
}

void hr_scheduler_fail_all(hr_scheduler *s, hr_status status, const char *message) {
    hr_finish f = {.type = HR_FINISH_ERROR, .status = status, .message = message};
    while (s->n_running > 0)
        finish_running(s, s->running[s->n_running - 1], f);
    while (s->queue_head != NULL) {
        hr_request *r = s->queue_head;
        queue_remove(s, r);
        finish(s, r, f);
    }
}

/* ---- weights that change ---- */

static hr_finish no_memory_for_versions(void) {
    return (hr_finish){.type = HR_FINISH_ERROR,
                       .status = HR_ERR_NO_MEMORY,
                       .message = "no memory to note the weight version of this request"};
}

static bool has_begun(const hr_request *r) {
    return r->n_spans > 0;
}

/* The name is gone: who never ran is refused, who was paused ends as if aborted. */
static void end_without_adapter(hr_scheduler *s, hr_request *r) {
    char message[HR_ADAPTER_NAME_MAX + 120];
    snprintf(message, sizeof message, "LoRA adapter '%s' is not loaded: it was unloaded while %s",
             hr_adapter_lease_name(&r->lease),
             has_begun(r) ? "this request was paused" : "this request waited");
    hr_finish f = {.type = HR_FINISH_ERROR, .status = HR_ERR_ADAPTER_UNKNOWN, .message = message};
    if (has_begun(r))
        f = (hr_finish){
            .type = HR_FINISH_ABORT, .status = HR_ERR_ADAPTER_UNKNOWN, .message = message};
    queue_remove(s, r);
    finish(s, r, f);
}

/* A waiting request that may go over to another version of its adapter. */
static void renew(hr_scheduler *s, hr_request *r) {
    if (r->keeps_version)
        return;
    hr_lease_state state = hr_adapter_store_renew(s->c.store, &r->lease);
    if (state == HR_LEASE_UNLOADED) {
        end_without_adapter(s, r);
    } else if (state == HR_LEASE_RENEWED) {
        hr_request_set_adapter(r, r->lease);
        if (has_begun(r) && !hr_request_note_version(r, s->label, &s->c.alloc)) {
            queue_remove(s, r);
            finish(s, r, no_memory_for_versions());
        }
    }
}

bool hr_scheduler_is_outdated(const hr_scheduler *s) {
    return s->n_queued > 0 && s->renewed != hr_adapter_store_changes(s->c.store);
}

void hr_scheduler_renew_waiting(hr_scheduler *s) {
    s->renewed = hr_adapter_store_changes(s->c.store);
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        renew(s, r);
    }
}

void hr_scheduler_add(hr_scheduler *s, hr_request *r) {
    r->serial = s->next_serial++;
    queue_push_back(s, r);
    renew(s, r); /* its adapter may have changed since it was leased */
}

/* Frozen requests go on with what their adapters' names stand for now. Their KV is of both
 * versions, so it is theirs alone. */
static void renew_running(hr_scheduler *s) {
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        if (hr_adapter_store_renew(s->c.store, &r->lease) != HR_LEASE_RENEWED)
            continue;
        hr_request_set_adapter(r, r->lease);
        r->cache_epoch = HR_REQUEST_OWN_KV;
    }
    uint32_t n = s->n_running;
    for (s->n_running = 0; s->n_running < n;)
        running_insert(s, s->running[s->n_running]);
}

/* A request whose adapter has changed under it is still made by the older version. */
static bool is_of_new_version(hr_scheduler *s, const hr_request *r, bool base) {
    return has_begun(r) && (base || hr_adapter_store_is_current(s->c.store, &r->lease));
}

static void note_label(hr_scheduler *s, bool base) {
    for (uint32_t i = s->n_running; i-- > 0;) {
        hr_request *r = s->running[i];
        if (is_of_new_version(s, r, base) && !hr_request_note_version(r, s->label, &s->c.alloc))
            finish_running(s, r, no_memory_for_versions());
    }
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        if (is_of_new_version(s, r, base) && !hr_request_note_version(r, s->label, &s->c.alloc)) {
            queue_remove(s, r);
            finish(s, r, no_memory_for_versions());
        }
    }
}

/* What waits is no longer bound to the version that it began with. */
static void release_versions(hr_scheduler *s) {
    s->renewed = UINT64_MAX; /* whatever was not renewed so far is now */
    for (hr_request *r = s->queue_head; r != NULL; r = r->next)
        r->keeps_version = false;
}

void hr_scheduler_changed(hr_scheduler *s, const hr_scheduler_change *change) {
    HR_ASSERT(!change->base || change->frozen || hr_scheduler_begun(s) == 0);
    if (change->base || change->flush)
        hr_prefix_cache_clear(s->cache);
    if (change->label != NULL) {
        hr_version_label_release(s->label, &s->c.alloc);
        s->label = change->label;
    }
    if (change->frozen) {
        release_versions(s);
        renew_running(s);
    }
    hr_scheduler_renew_waiting(s);
    note_label(s, change->base);
}

void hr_scheduler_close(hr_scheduler *s, bool closed) {
    s->closed = closed;
}

uint32_t hr_scheduler_begun(const hr_scheduler *s) {
    uint32_t n = s->n_running;
    for (const hr_request *r = s->queue_head; r != NULL; r = r->next)
        n += r->keeps_version;
    return n;
}

/* ---- admission ---- */

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
    uint32_t at_hand = pages_at_hand(s), needed = hr_kv_pages_for(r->n_ids) + s->n_running;
    uint32_t most = reusable_pages(s, r), page = HR_PREFIX_NONE;
    for (uint32_t i = 0; i < most; i++) {
        page = hr_prefix_cache_find(s->cache, r->adapter_id, page, tokens_of_page(r, i));
        if (page == HR_PREFIX_NONE)
            break;
        needed--;
        at_hand -= !hr_prefix_cache_is_held(s->cache, page);
    }
    return at_hand >= needed;
}

/* Takes r from the queue into the running set; when memory is short it ends instead. */
static void start(hr_scheduler *s, hr_request *r) {
    queue_remove(s, r);
    r->keeps_version = false;
    if (!hr_request_prepare(r, &s->c.limits, &s->c.alloc) ||
        (!has_begun(r) && !hr_request_note_version(r, s->label, &s->c.alloc))) {
        finish(s, r,
               (hr_finish){.type = HR_FINISH_ERROR,
                           .status = HR_ERR_NO_MEMORY,
                           .message =
                               "no memory to run this request; ask for fewer tokens or logprobs"});
        return;
    }
    r->cache_epoch = hr_prefix_cache_epoch(s->cache);
    skip_known(s, r);
    r->n_pages = hr_kv_pages_for(r->n_ids);
    HR_ASSERT(take_pages(s, r->n_pages - r->n_shared, r->pages + r->n_shared));
    if (r->admit_ns == 0) {
        r->admit_ns = hr_now_ns(&s->c.clock);
        s->stats.prompt_tokens += r->n_prompt;
    }
    running_insert(s, r);
}

static void admit(hr_scheduler *s) {
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

/* ---- planning ---- */

static void retract(hr_scheduler *s, hr_request *r) {
    running_remove(s, r);
    give_pages(s, r);
    r->retractions++;
    s->stats.retractions++;
    r->keeps_version = true;
    queue_push_front(s, r);
}

void hr_scheduler_retract_all(hr_scheduler *s) {
    while (s->n_running > 0)
        retract(s, youngest_running(s));
    release_versions(s);
}

/* Every running request gets the page its last id needs; terminates because each round takes a page
 * or shrinks the running set, and one request alone always fits (hr_request_max_ids). */
static void secure_pages(hr_scheduler *s) {
    uint32_t i = 0;
    while (i < s->n_running) {
        hr_request *r = s->running[i];
        if (r->n_pages >= hr_kv_pages_for(r->n_ids)) {
            i++;
        } else if (take_pages(s, 1, &r->pages[r->n_pages])) {
            r->n_pages++;
        } else {
            HR_ASSERT(s->n_running > 1);
            retract(s, youngest_running(s));
            i = 0;
        }
    }
}

static uint32_t rows_left(const hr_request *r) {
    return r->n_ids - r->n_computed;
}

/* What n rows of a prompt take of a chunk: at least n. */
static uint32_t cost_of(const hr_scheduler *s, const hr_request *r, uint32_t n) {
    uint64_t depth = s->c.attention_depth;
    return depth == 0 ? n : (uint32_t)(n * (depth + r->n_computed) / depth);
}

/* The most rows that cost no more than the budget, but one at least. */
static uint32_t affordable(const hr_scheduler *s, const hr_request *r, uint32_t budget) {
    uint64_t depth = s->c.attention_depth;
    uint32_t n = depth == 0 ? budget : (uint32_t)(budget * depth / (depth + r->n_computed));
    return n > 0 ? n : 1;
}

/* A chunk must not score more rows than the request has results for. */
static uint32_t chunk_of(const hr_scheduler *s, const hr_request *r, uint32_t budget) {
    uint32_t n = affordable(s, r, budget);
    n = rows_left(r) < n ? rows_left(r) : n;
    if (!r->want_prompt || r->next_prompt_pos >= r->n_prompt)
        return n;
    uint32_t first_scored = r->next_prompt_pos > 0 ? r->next_prompt_pos - 1 : 0; /* row of it */
    uint32_t plain = first_scored > r->n_computed ? first_scored - r->n_computed : 0;
    uint32_t most = plain + r->result_rows;
    return n < most ? n : most;
}

/* The page that r would compute next is computed in this step for another request, who makes it
 * known: r is better off waiting for it. */
static bool has_twin(const hr_scheduler *s, const hr_request *r) {
    uint32_t at = r->n_shared * HR_KV_PAGE_TOKENS;
    if (!may_share(s, r) || r->n_computed != at || r->n_shared >= reusable_pages(s, r))
        return false;
    for (uint32_t i = 0; i < s->n_running; i++) {
        const hr_request *p = s->running[i];
        if (p->step_rows > 0 && p->adapter_id == r->adapter_id && may_share(s, p) &&
            p->n_shared == r->n_shared && p->n_computed + p->step_rows >= at + HR_KV_PAGE_TOKENS &&
            (at == 0 || p->pages[r->n_shared - 1] == r->pages[r->n_shared - 1]) &&
            memcmp(tokens_of_page(p, r->n_shared), tokens_of_page(r, r->n_shared),
                   HR_KV_PAGE_TOKENS * sizeof *r->ids) == 0)
            return true;
    }
    return false;
}

typedef bool (*goes_first)(const hr_request *a, const hr_request *b);

static bool is_older(const hr_request *a, const hr_request *b) {
    return a->serial < b->serial;
}

static bool is_shorter(const hr_request *a, const hr_request *b) {
    return rows_left(a) != rows_left(b) ? rows_left(a) < rows_left(b) : is_older(a, b);
}

/* The first, by that order, of the prompts that are not planned yet. One that waits for a twin is
 * planned without rows. */
static hr_request *plan_next(const hr_scheduler *s, goes_first order) {
    for (;;) {
        hr_request *first = NULL;
        for (uint32_t i = 0; i < s->n_running; i++) {
            hr_request *r = s->running[i];
            if (!r->planned && (first == NULL || order(r, first)))
                first = r;
        }
        if (first == NULL)
            return NULL;
        first->planned = true;
        if (!has_twin(s, first))
            return first;
    }
}

/* Plans a prompt's next rows; returns what they cost. */
static uint32_t take_chunk(const hr_scheduler *s, hr_request *r, uint32_t budget) {
    r->step_rows = chunk_of(s, r, budget);
    uint32_t cost = cost_of(s, r, r->step_rows);
    return cost < budget ? cost : budget;
}

static void share_rows(hr_scheduler *s) {
    uint32_t chunk = s->c.limits.chunked_prefill_size, generating = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        skip_known(s, r);
        r->planned = rows_left(r) == 1;
        r->step_rows = r->planned ? 1 : 0;
        generating += r->step_rows;
    }
    uint32_t budget = generating > 0 ? (chunk + 3) / 4 : chunk;
    hr_request *oldest = plan_next(s, is_older), *r;
    if (oldest == NULL)
        return;
    uint32_t sure = take_chunk(s, oldest, (budget + 3) / 4);
    budget -= sure;
    while (budget > 0 && (r = plan_next(s, is_shorter)) != NULL)
        budget -= take_chunk(s, r, budget);
    take_chunk(s, oldest, sure + budget);
}

static void clear_pages(hr_scheduler *s, hr_request *r) {
    uint32_t needed = hr_kv_pages_for((uint64_t)r->n_computed + r->step_rows);
    for (; r->n_clear_pages < needed; r->n_clear_pages++)
        s->c.executor.clear_page(s->c.executor.self, r->pages[r->n_clear_pages]);
}

static void build_plan(hr_scheduler *s) {
    share_rows(s);
    hr_plan_clear(&s->plan);
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        if (r->step_rows == 0)
            continue;
        clear_pages(s, r);
        hr_plan_add(&s->plan, r);
    }
}

/* ---- logits: on every worker of the pool ---- */

static void run_task(hr_scheduler *s, const hr_plan_task *task, float *logits, void *scratch,
                     unsigned worker) {
    hr_request *r = task->request;
    hr_row_result *result = &r->results[task->result];
    uint32_t n_vocab = s->c.limits.vocab_size;
    if (!task->draw) {
        hr_sampler_score(s->c.kernels, logits, n_vocab, r->ids[task->position + 1], &r->wish,
                         result, scratch);
        return;
    }
    bool masked = r->n_ids - r->n_prompt < r->min_new_tokens;
    hr_sampler_draw(s->c.kernels, &r->sampler, logits, n_vocab, task->position + 1, masked,
                    &r->wish, result, &s->spaces[worker], scratch);
}

static void on_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                      void *scratch, unsigned worker, unsigned n_workers) {
    hr_scheduler *s = ctx;
    for (uint32_t i = worker; i < n; i += n_workers)
        run_task(s, &s->plan.tasks[first + i], logits + i * ld, scratch, worker);
}

/* ---- delivery ---- */

static hr_position_logprobs position_of(const hr_request *r, uint32_t token,
                                        const hr_row_result *result) {
    hr_position_logprobs p = {.token = token};
    if (!r->wish.any || result == NULL)
        return p;
    p.has_logprob = true;
    p.logprob = result->logprob;
    p.n_top = r->wish.n_top;
    p.top_ids = result->top_ids;
    p.top_logprobs = result->top_logprobs;
    p.n_ids = r->wish.n_ids;
    p.ids_logprobs = result->ids_logprobs;
    return p;
}

static hr_finish not_finite(const hr_row_result *result) {
    if (result->overflowed)
        return (hr_finish){
            .type = HR_FINISH_ERROR,
            .status = HR_ERR_INVALID,
            .message = "the temperature, penalties and logit_bias of this request push its logits "
                       "beyond the largest float; use less extreme ones"};
    return (hr_finish){
        .type = HR_FINISH_ERROR,
        .status = HR_ERR_INTERNAL,
        .message =
            "the logits of this request are not finite (NaN or infinity); check the weights of "
            "the model and of the adapter"};
}

/* Hands over the prompt positions whose rows are computed now; false when the request ended. */
static bool deliver_prompt(hr_scheduler *s, hr_request *r) {
    if (!r->want_prompt || r->next_prompt_pos >= r->n_prompt)
        return true;
    if (r->next_prompt_pos == 0) {
        hr_position_logprobs first = position_of(r, r->ids[0], NULL);
        r->on_prompt_logprobs(r->ctx, 0, 1, &first);
        r->next_prompt_pos = 1;
    }
    uint32_t n = 0;
    while (r->next_prompt_pos + n < r->n_prompt && r->next_prompt_pos + n <= r->n_computed) {
        if (!r->results[n].finite) {
            finish_running(s, r, not_finite(&r->results[n]));
            return false;
        }
        r->positions[n] = position_of(r, r->ids[r->next_prompt_pos + n], &r->results[n]);
        n++;
    }
    if (n > 0)
        r->on_prompt_logprobs(r->ctx, r->next_prompt_pos, n, r->positions);
    r->next_prompt_pos += n;
    return true;
}

static bool contains(const uint32_t *ids, uint32_t n, uint32_t id) {
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* Length first, as SGLang has it. */
static bool is_over(const hr_scheduler *s, const hr_request *r, uint32_t token,
                    hr_token_verdict verdict, hr_finish *f) {
    *f = (hr_finish){.type = HR_FINISH_LENGTH};
    if (r->n_ids >= hr_request_max_len(r, &s->c.limits))
        return true;
    *f = (hr_finish){.type = HR_FINISH_STOP_TOKEN, .matched_token = token};
    uint32_t skip = r->ignore_eos ? r->n_eos_ids : 0;
    if (contains(r->stop_ids + skip, r->n_stop_ids - skip, token))
        return true;
    *f = (hr_finish){.type = HR_FINISH_STOP_CALLER};
    return verdict == HR_TOKEN_STOP;
}

static void deliver_token(hr_scheduler *s, hr_request *r) {
    const hr_row_result *result = &r->results[r->result_rows];
    if (!result->finite) {
        finish_running(s, r, not_finite(result));
        return;
    }
    uint32_t token = result->token;
    r->ids[r->n_ids++] = token;
    if (r->sampler.counts != NULL)
        r->sampler.counts[token]++;
    if (r->first_token_ns == 0)
        r->first_token_ns = hr_now_ns(&s->c.clock);
    s->stats.generated_tokens++;
    hr_position_logprobs position = position_of(r, token, result);
    hr_token_verdict verdict = r->on_token(r->ctx, &position);
    hr_finish f;
    if (is_over(s, r, token, verdict, &f))
        finish_running(s, r, f);
}

static void deliver(hr_scheduler *s) {
    uint32_t n = s->plan.view.n_seqs;
    for (uint32_t i = 0; i < n; i++) {
        hr_request *r = s->plan.requests[i];
        r->n_computed += r->step_rows;
        share_pages(s, r);
        if (!deliver_prompt(s, r) || r->n_computed < r->n_ids)
            continue;
        if (r->max_new_tokens == 0)
            finish_running(s, r, (hr_finish){.type = HR_FINISH_LENGTH});
        else
            deliver_token(s, r);
    }
}

bool hr_scheduler_step(hr_scheduler *s) {
    admit(s);
    secure_pages(s);
    build_plan(s);
    if (s->plan.view.n_rows == 0)
        return false;
    s->c.executor.step(s->c.executor.self, &s->plan.view, on_logits, s);
    s->stats.steps++;
    deliver(s);
    return true;
}

/* ---- looking ---- */

bool hr_scheduler_has_work(const hr_scheduler *s) {
    return s->n_running > 0 || s->n_queued > 0;
}

hr_scheduler_stats hr_scheduler_stats_of(const hr_scheduler *s) {
    hr_scheduler_stats stats = s->stats;
    stats.running = s->n_running;
    stats.queued = s->n_queued;
    stats.kv_pages = hr_kv_pages_total(s->pages);
    stats.kv_pages_free = hr_kv_pages_free(s->pages);
    stats.kv_pages_cached = hr_prefix_cache_unheld(s->cache);
    return stats;
}

const hr_request *hr_scheduler_running(const hr_scheduler *s, uint32_t i) {
    return i < s->n_running ? s->running[i] : NULL;
}

const hr_request *hr_scheduler_queue(const hr_scheduler *s) {
    return s->queue_head;
}
