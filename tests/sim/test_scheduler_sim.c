/* The production scheduler, driven through thousands of random states with a fake model.
 *
 * Each run draws a world (batch size, adapter cap, chunk, a KV cache too small for comfort or large
 * enough to keep many prefixes), then lets requests with common prefixes arrive, be aborted in
 * whatever state they are, be frozen and be retracted, adapters come, go, change and come back
 * under their name, base weights and the weight version change, the cache be flushed, and
 * allocations fail. After every step the books must balance; every request must end exactly once,
 * with the tokens and logprobs, to the bit, of a run alone under the weights that the rules of
 * versions give it at every token, and with spans that say so. Argument: number of runs (default
 * 200; nightly 1000). */
#include "fake_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_CASES = 80, N_NAMES = 8, N_FAMILIES = 3, CONTEXT = 150 };

/* ---- allocation that fails when told ---- */

typedef struct failing_alloc {
    int64_t live;      /* allocations not freed */
    int64_t countdown; /* the n-th from now fails; < 0: none */
    bool failed;
} failing_alloc;

static void *failing_get(void *self, size_t bytes) {
    failing_alloc *f = self;
    if (f->countdown >= 0 && f->countdown-- == 0) {
        f->failed = true;
        return NULL;
    }
    f->live++;
    return calloc(1, bytes);
}

static void failing_free(void *self, void *memory) {
    failing_alloc *f = self;
    f->live -= memory != NULL;
    free(memory);
}

static uint64_t fake_now(void *self) {
    return *(uint64_t *)self += 1000;
}

/* ---- the world ---- */

typedef struct world {
    uint64_t random, now;
    failing_alloc memory;
    hr_alloc alloc;
    fake_model model;
    hr_adapter_store *store;
    hr_scheduler *scheduler;
    hr_scheduler_config config;
    uint64_t next_adapter_value;
    fake_case *cases;            /* [MAX_CASES] */
    hr_request *live[MAX_CASES]; /* NULL: not submitted, or ended */
    char rids[MAX_CASES][16];
    uint32_t stop_ids[MAX_CASES][2], bias_ids[MAX_CASES][2], wish_ids[MAX_CASES][3];
    float bias[MAX_CASES][2];
    bool aborted[MAX_CASES], may_vanish[MAX_CASES];
    uint64_t adapter_now[MAX_CASES], base_now[MAX_CASES]; /* what computes its next row */
    uint64_t unloads[N_NAMES], unloads_then[MAX_CASES];   /* of a name; when its request came */
    uint32_t retractions[MAX_CASES];                      /* that are noted as events */
    uint32_t label, n_labels; /* number of the weight version now, and of the last one made */
    bool frozen;
    uint32_t n_cases, n_ended;
} world;

/* What the runs met, over all worlds. */
static uint64_t n_runs = 200, seen_retractions, seen_finish[8], seen_half_scored, seen_cached;
static uint64_t seen_crowd_reloads, seen_full_caches, seen_flushes, seen_shared_pages;
static uint64_t seen_kept_kv, seen_vanished, seen_stale, seen_spans, seen_bases, seen_renewals;

static uint32_t roll(world *w, uint32_t n) {
    return (uint32_t)((hr_sampler_mix(w->random++) >> 32) % n);
}

static void end_case(void *self, hr_request *r, const hr_finish *finish) {
    world *w = self;
    fake_case *c = r->ctx;
    size_t i = (size_t)(c - w->cases);
    assert_ptr_equal(w->live[i], r);
    w->live[i] = NULL;
    w->n_ended++;
    hr_adapter_store_release(w->store, &r->lease);
    r->on_finish(r->ctx, finish);
    hr_request_destroy(r, &w->alloc);
}

static void adapter_gone(void *self, uint64_t id);

static void world_open(world *w, uint64_t seed) {
    w->random = seed << 32;
    w->memory = (failing_alloc){.countdown = -1};
    w->alloc = (hr_alloc){failing_get, failing_free, &w->memory};
    w->next_adapter_value = 1;
    w->cases = calloc(MAX_CASES, sizeof *w->cases);
    assert_non_null(w->cases);
    static const uint32_t eos[] = {FAKE_EOS};
    uint32_t n_pages = 2 + roll(w, roll(w, 2) == 0 ? 8 : 50);
    w->config = (hr_scheduler_config){
        .limits = {.vocab_size = FAKE_VOCAB,
                   .context_length = CONTEXT,
                   .kv_tokens = n_pages * HR_KV_PAGE_TOKENS,
                   .chunked_prefill_size = 1 + roll(w, roll(w, 2) == 0 ? 4 : 50),
                   .eos_ids = eos,
                   .n_eos_ids = 1,
                   .enable_lora = true},
        .max_running = 1 + roll(w, 7),
        .max_adapters = 1 + roll(w, 3),
        .max_overtaken = 1 + roll(w, 6),
        .attention_depth = roll(w, 2) * (1 + roll(w, 40)),
        .n_pages = n_pages,
        .n_workers = 1,
        .disable_prefix_cache = roll(w, 8) == 0,
        .kernels = hr_kernels_tier(0),
        .clock = {fake_now, &w->now},
        .alloc = w->alloc,
        .weight_version = "v0",
        .finish = end_case,
        .finish_self = w,
    };
    fake_model_init(&w->model, n_pages, NULL);
    w->config.executor = fake_model_executor(&w->model);
    hr_adapter_store_limits limits = {.max_loaded = roll(w, 2) * 3, .max_per_batch = 3};
    assert_int_equal(hr_adapter_store_create(&limits, &w->alloc, &w->store, NULL), HR_OK);
    w->config.store = w->store;
    assert_int_equal(hr_scheduler_create(&w->config, &w->scheduler, NULL), HR_OK);
    hr_adapter_store_watch(w->store, adapter_gone, w);
}

static void world_close(world *w) {
    hr_adapter_store_watch(w->store, NULL, NULL);
    hr_scheduler_destroy(w->scheduler);
    hr_adapter_store_destroy(w->store);
    fake_model_free(&w->model);
    assert_int_equal(w->memory.live, 0);
    free(w->cases);
}

/* ---- what can happen ---- */

static const char *const names[N_NAMES] = {"a", "b", "c", "d", "e", "f", "g", "h"};

static void load_some(world *w) {
    hr_adapter_reservation *reservation;
    const char *name = names[roll(w, N_NAMES)];
    if (hr_adapter_store_reserve(w->store, name, "/nowhere", roll(w, 4) == 0, &reservation, NULL) !=
        HR_OK)
        return;
    if (roll(w, 5) == 0) {
        hr_adapter_store_cancel(w->store, reservation);
        return;
    }
    hr_adapter_payload payload = fake_lora_payload(w->next_adapter_value++);
    hr_adapter_store_publish(w->store, reservation, &payload);
}

static uint32_t index_of(const char *name) {
    uint32_t n = 0;
    while (strcmp(names[n], name) != 0)
        n++;
    return n;
}

static bool unload_name(world *w, const char *name) {
    w->unloads[index_of(name)]++;
    return hr_adapter_store_unload(w->store, name, NULL) == HR_OK;
}

/* Its name was unloaded since request i came; what the name stands for now is another adapter. */
static bool was_unloaded(const world *w, uint32_t i) {
    const char *name = w->cases[i].params.lora_name;
    return name != NULL && w->unloads[index_of(name)] != w->unloads_then[i];
}

/* As a trainer does each step: unload and load under the same name; true when the name was there.
 */
static bool reload(world *w, const char *name) {
    bool there = unload_name(w, name);
    hr_adapter_reservation *reservation;
    if (hr_adapter_store_reserve(w->store, name, "/nowhere", false, &reservation, NULL) != HR_OK)
        return false;
    hr_adapter_payload payload = fake_lora_payload(w->next_adapter_value++);
    hr_adapter_store_publish(w->store, reservation, &payload);
    return there;
}

/* ---- what the rules of versions foretell ---- */

static bool is_running(const hr_request *r) {
    return r->n_pages > 0;
}

static bool has_begun(const hr_request *r) {
    return r->admit_ns > 0;
}

/* Value of the adapter that a name stands for; 0: none. */
static uint64_t value_of_name(world *w, const char *name) {
    hr_adapter_lease lease = {0};
    if (hr_adapter_store_acquire(w->store, name, &lease, NULL) != HR_OK)
        return 0;
    uint64_t value = ((const fake_lora *)hr_adapter_lease_data(&lease))->value;
    hr_adapter_store_release(w->store, &lease);
    return value;
}

static void push_event(world *w, uint32_t i, uint32_t kept) {
    fake_case *c = &w->cases[i];
    assert_true(c->n_events < FAKE_MAX_EVENTS);
    c->events[c->n_events++] = (fake_event){.at_token = c->n_tokens,
                                            .at_prompt = w->live[i]->next_prompt_pos,
                                            .kept = kept,
                                            .adapter = w->adapter_now[i],
                                            .base = w->base_now[i]};
    seen_kept_kv += kept > 0;
}

/* From now on case i is computed by what its name stands for, and the base weights, of now; its KV
 * is kept up to a position. An evicted adapter stays what it is; one that was unloaded ends a
 * request that does not run. */
static void foretell_newest(world *w, uint32_t i, uint32_t kept) {
    const char *name = w->cases[i].params.lora_name;
    uint64_t adapter = w->adapter_now[i];
    if (was_unloaded(w, i))
        w->may_vanish[i] = true;
    else if (name != NULL && hr_adapter_store_state(w->store, name) == HR_ADAPTER_LOADED)
        adapter = value_of_name(w, name);
    else if (name != NULL && hr_adapter_store_state(w->store, name) == HR_ADAPTER_UNKNOWN)
        w->may_vanish[i] = true; /* it gave way so long ago that it is forgotten */
    if (adapter == w->adapter_now[i] && w->model.base == w->base_now[i])
        return;
    if (adapter != w->adapter_now[i]) {
        w->cases[i].label = w->label;
        seen_renewals++;
    }
    w->adapter_now[i] = adapter;
    w->base_now[i] = w->model.base;
    push_event(w, i, kept);
}

static bool is_current(world *w, uint32_t i) {
    const char *name = w->cases[i].params.lora_name;
    if (name == NULL)
        return true;
    if (was_unloaded(w, i))
        return false;
    hr_adapter_state state = hr_adapter_store_state(w->store, name);
    return state == HR_ADAPTER_EVICTED ||
           (state == HR_ADAPTER_LOADED && value_of_name(w, name) == w->adapter_now[i]);
}

/* A step is about to be made, or waiting requests are about to be looked at. */
static void foretell_waiting(world *w) {
    for (uint32_t i = 0; i < w->n_cases; i++) {
        const hr_request *r = w->live[i];
        if (r == NULL || is_running(r) || r->keeps_version)
            continue;
        foretell_newest(w, i, 0);
        if (!has_begun(r))
            w->cases[i].label = w->label;
    }
}

/* Who was retracted is computed again, with the weights it has. */
static void note_retractions(world *w) {
    for (uint32_t i = 0; i < w->n_cases; i++) {
        const hr_request *r = w->live[i];
        if (r == NULL || r->retractions == w->retractions[i])
            continue;
        w->retractions[i] = r->retractions;
        push_event(w, i, 0);
    }
}

static void check_weights(world *w) {
    for (uint32_t i = 0; i < w->n_cases; i++) {
        const fake_lora *lora =
            w->live[i] != NULL ? (const fake_lora *)(const void *)w->live[i]->lora : NULL;
        if (lora != NULL && is_running(w->live[i]))
            assert_true(lora->value == w->adapter_now[i]);
    }
}

static bool step(world *w) {
    foretell_waiting(w);
    bool stepped = hr_scheduler_step(w->scheduler);
    note_retractions(w);
    check_weights(w);
    return stepped;
}

/* ---- weights that change ---- */

typedef struct change {
    const char *names[2]; /* adapters that get new weights; NULL: none */
    bool base, version, flush;
} change;

static bool publish(world *w, const change *c) {
    hr_adapter_publication items[2] = {{0}};
    size_t n = 0;
    for (; n < 2 && c->names[n] != NULL; n++) {
        items[n] = (hr_adapter_publication){.name = c->names[n], .path = "/nowhere"};
        if (hr_adapter_store_reserve_streamed(w->store, c->names[n], "/nowhere", false, false,
                                              &items[n].reservation, NULL) != HR_OK)
            goto refused;
    }
    if (hr_adapter_store_prepare(w->store, items, n, NULL) != HR_OK)
        goto refused;
    for (size_t i = 0; i < n; i++)
        items[i].payload = fake_lora_payload(w->next_adapter_value++);
    hr_adapter_store_publish_all(w->store, items, n);
    return true;

refused:
    while (n-- > 0)
        hr_adapter_store_cancel(w->store, items[n].reservation);
    return false;
}

/* At a change: who is computed with what from now on, and which version its tokens have. */
static void foretell_change(world *w, bool base) {
    for (uint32_t i = 0; i < w->n_cases; i++) {
        const hr_request *r = w->live[i];
        if (r == NULL)
            continue;
        if (w->frozen || (!is_running(r) && !r->keeps_version))
            foretell_newest(w, i, r->n_computed);
        if (base || !has_begun(r) || is_current(w, i))
            w->cases[i].label = w->label;
        else
            seen_stale++;
    }
}

/* A base change waits until nobody runs, unless frozen; nobody begins meanwhile. */
static void wait_until_nobody_runs(world *w) {
    hr_scheduler_close(w->scheduler, true);
    uint64_t begun = 0;
    for (uint32_t i = 0; i < w->n_cases; i++)
        begun += w->live[i] != NULL && has_begun(w->live[i]);
    while (hr_scheduler_begun(w->scheduler) > 0) {
        assert_true(step(w));
        uint64_t now = 0;
        for (uint32_t i = 0; i < w->n_cases; i++)
            now += w->live[i] != NULL && has_begun(w->live[i]);
        assert_true(now <= begun);
    }
    hr_scheduler_close(w->scheduler, false);
}

static void make_change(world *w, const change *c) {
    hr_version_label *label = NULL;
    char text[24];
    snprintf(text, sizeof text, "v%u", w->n_labels + 1);
    if (c->version && hr_version_label_create(text, &w->alloc, &label, NULL) != HR_OK)
        return;
    if (c->base && !w->frozen)
        wait_until_nobody_runs(w);
    if (!publish(w, c)) {
        hr_version_label_release(label, &w->alloc);
        return;
    }
    if (c->base)
        w->model.base++;
    if (label != NULL)
        w->label = ++w->n_labels;
    seen_bases += c->base;
    hr_scheduler_change made = {c->base, w->frozen, c->flush, label};
    foretell_change(w, c->base);
    hr_scheduler_changed(w->scheduler, &made);
    check_weights(w);
}

static void change_some(world *w) {
    uint32_t n = roll(w, N_NAMES);
    change c = {.base = roll(w, 4) == 0, .version = roll(w, 2) == 0, .flush = roll(w, 6) == 0};
    if (roll(w, 3) != 0) {
        c.names[0] = names[n];
        c.names[1] = roll(w, 2) == 0 ? names[(n + 1) % N_NAMES] : NULL;
    }
    make_change(w, &c);
}

static void unload_some(world *w) {
    (void)unload_name(w, names[roll(w, N_NAMES)]);
}

static void draw_sampling(world *w, uint32_t i, hr_sampling_params *s) {
    *s = hr_sampling_params_default();
    s->max_new_tokens = roll(w, 4) == 0 ? roll(w, 3) : roll(w, 120);
    s->min_new_tokens =
        s->max_new_tokens > 0 ? roll(w, s->max_new_tokens < 9 ? s->max_new_tokens : 9) : 0;
    s->temperature = roll(w, 3) == 0 ? 0 : 0.25f * (float)(1 + roll(w, 8));
    s->top_k = roll(w, 2) == 0 ? -1 : (int32_t)(1 + roll(w, 50));
    s->top_p = roll(w, 2) == 0 ? 1 : 0.1f * (float)(1 + roll(w, 10));
    s->min_p = roll(w, 2) == 0 ? 0 : 0.1f * (float)roll(w, 8);
    if (roll(w, 3) == 0) {
        s->frequency_penalty = 0.25f * (float)roll(w, 8);
        s->presence_penalty = 0.25f * (float)roll(w, 8);
        s->repetition_penalty = 0.5f + 0.25f * (float)roll(w, 6);
    }
    s->ignore_eos = roll(w, 2) == 0;
    s->stop_token_ids = w->stop_ids[i];
    s->n_stop_token_ids = roll(w, 3) == 0 ? roll(w, 3) : 0;
    s->logit_bias_ids = w->bias_ids[i];
    s->logit_bias = w->bias[i];
    s->n_logit_bias = roll(w, 3);
    for (uint32_t j = 0; j < 2; j++) {
        w->stop_ids[i][j] = roll(w, FAKE_VOCAB);
        w->bias_ids[i][j] = roll(w, FAKE_VOCAB);
        w->bias[i][j] = (float)roll(w, 9) - 4;
    }
    s->has_seed = true;
    s->seed = roll(w, 1000);
}

static void draw_case(world *w, uint32_t i) {
    fake_case *c = &w->cases[i];
    hr_request_params *p = &c->params;
    draw_sampling(w, i, &p->sampling);
    uint32_t most = hr_request_max_ids(&w->config.limits) - 1;
    p->n_input_ids = 1 + roll(w, roll(w, 3) == 0 ? most : 20);
    /* A prompt begins as its family does, up to some point; the families differ in the first page
     * and are alike after it. */
    uint32_t family = roll(w, N_FAMILIES), common = roll(w, 4) * 40;
    for (size_t j = 0; j < p->n_input_ids; j++)
        do
            c->prompt[j] = j < common ? (uint32_t)(j * j + (j < HR_KV_PAGE_TOKENS ? family : 0)) % 7
                                      : roll(w, FAKE_VOCAB);
        while (j == 0 && c->prompt[0] == FAKE_POISON && roll(w, 4) != 0);
    snprintf(w->rids[i], sizeof w->rids[i], "r%u", i);
    p->rid = w->rids[i];
    if (roll(w, 2) == 0) {
        p->return_logprob = true;
        p->logprob_start_len = (int64_t)roll(w, (uint32_t)p->n_input_ids + 2) - 1;
        p->top_logprobs_num = roll(w, 2) * roll(w, FAKE_VOCAB + 1);
        p->token_ids_logprob = w->wish_ids[i];
        p->n_token_ids_logprob = roll(w, 4);
        for (uint32_t j = 0; j < 3; j++)
            w->wish_ids[i][j] = roll(w, FAKE_VOCAB);
    }
    p->lora_name = roll(w, 4) == 0 ? NULL : names[roll(w, N_NAMES)];
    c->stop_at = roll(w, 5) == 0 ? 1 + roll(w, 30) : 0;
    fake_case_record(c);
}

static void submit_some(world *w) {
    if (w->n_cases == MAX_CASES)
        return;
    uint32_t i = w->n_cases;
    fake_case *c = &w->cases[i];
    memset(c, 0, sizeof *c);
    draw_case(w, i);
    hr_adapter_lease lease = {0};
    if (c->params.lora_name != NULL &&
        hr_adapter_store_acquire(w->store, c->params.lora_name, &lease, NULL) != HR_OK)
        return;
    const fake_lora *lora = hr_adapter_lease_data(&lease);
    c->adapter = w->adapter_now[i] = lora != NULL ? lora->value : 0;
    c->base = w->base_now[i] = w->model.base;
    if (c->params.lora_name != NULL)
        w->unloads_then[i] = w->unloads[index_of(c->params.lora_name)];
    hr_request *r = NULL;
    if (hr_request_create(&c->params, &w->config.limits, 0, &w->alloc, &r, NULL) != HR_OK) {
        assert_true(w->memory.failed); /* the only reason */
        hr_adapter_store_release(w->store, &lease);
        return;
    }
    hr_request_set_adapter(r, lease);
    r->submit_ns = fake_now(&w->now);
    w->live[i] = r;
    w->aborted[i] = w->may_vanish[i] = false;
    w->retractions[i] = 0;
    w->n_cases++;
    hr_scheduler_add(w->scheduler, r);
}

static void abort_some(world *w) {
    if (w->n_cases == 0)
        return;
    uint32_t i = roll(w, w->n_cases);
    if (w->live[i] == NULL)
        return;
    atomic_store(&w->live[i]->ending, HR_ENDING_ABORT);
    w->aborted[i] = true;
    hr_scheduler_reap(w->scheduler);
    assert_null(w->live[i]);
}

/* What a pause in mode retract does; sometimes the cache is flushed then. */
static void retract_all(world *w) {
    hr_scheduler_retract_all(w->scheduler);
    note_retractions(w);
    assert_null(hr_scheduler_running(w->scheduler, 0));
    if (roll(w, 2) == 0)
        return;
    hr_scheduler_flush_cache(w->scheduler);
    hr_scheduler_stats stats = hr_scheduler_stats_of(w->scheduler);
    assert_int_equal(stats.kv_pages_free, stats.kv_pages);
    seen_flushes++;
}

static void adapter_gone(void *self, uint64_t id) {
    hr_scheduler_forget_adapter(((world *)self)->scheduler, id);
}

/* ---- the books ---- */

static void check_books(world *w) {
    hr_scheduler_stats stats = hr_scheduler_stats_of(w->scheduler);
    bool owned[64] = {false}, shared[64] = {false};
    seen_full_caches += stats.kv_pages_cached > 0 && stats.kv_pages_free == 0;
    uint32_t n_owned = 0, n_distinct = 0, n_queued = 0, n_leases = 0;
    const hr_request *r, *before = NULL;
    for (uint32_t i = 0; (r = hr_scheduler_running(w->scheduler, i)) != NULL; i++, before = r) {
        n_distinct += before == NULL || before->adapter_id != r->adapter_id;
        assert_true(before == NULL || before->adapter_id <= r->adapter_id);
        assert_true(r->n_pages <= hr_kv_pages_for(r->n_ids) &&
                    r->n_pages >= hr_kv_pages_for(r->n_computed));
        for (uint32_t p = 0; p < r->n_pages; p++) {
            uint32_t page = r->pages[p];
            assert_true(page < w->config.n_pages);
            assert_true(p < r->n_shared ? !owned[page] || shared[page] : !owned[page]);
            n_owned += !owned[page];
            seen_shared_pages += owned[page];
            owned[page] = true;
            shared[page] = p < r->n_shared;
        }
    }
    assert_int_equal(n_owned + stats.kv_pages_free + stats.kv_pages_cached, w->config.n_pages);
    assert_true(n_distinct <= w->config.max_adapters);
    assert_true(stats.running <= w->config.max_running);
    for (r = hr_scheduler_queue(w->scheduler); r != NULL; r = r->next, n_queued++) {
        assert_true(r->n_pages == 0 && r->n_computed == 0);
        seen_half_scored += r->want_prompt && r->retractions > 0 && r->next_prompt_pos > 1 &&
                            r->next_prompt_pos < r->n_prompt;
    }
    assert_int_equal(n_queued, stats.queued);
    for (uint32_t i = 0; i < w->n_cases; i++)
        n_leases += w->live[i] != NULL && w->live[i]->lease.version != NULL;
    assert_int_equal(stats.running + stats.queued, w->n_cases - w->n_ended);
    hr_adapter_store_stats store;
    hr_adapter_store_stats_get(w->store, &store);
    assert_int_equal(store.leases_acquired - store.leases_released, n_leases);
}

/* The spans are contiguous, and every token has the version that was foretold. */
static void check_spans(const fake_case *c) {
    char want[24];
    uint32_t at = 0;
    for (uint32_t s = 0; s < c->n_spans; s++) {
        assert_int_equal(c->spans[s].start, at);
        assert_true(c->spans[s].end > at);
        for (; at < c->spans[s].end; at++) {
            snprintf(want, sizeof want, "v%u", c->labels[at]);
            assert_string_equal(c->spans[s].version, want);
        }
        assert_true(s == 0 || strcmp(c->spans[s].version, c->spans[s - 1].version) != 0);
    }
    assert_int_equal(at, c->n_tokens);
    if (c->n_spans > 0)
        assert_string_equal(c->weight_version, c->spans[c->n_spans - 1].version);
    seen_spans += c->n_spans > 1;
}

static void check_case(world *w, uint32_t i) {
    const fake_case *c = &w->cases[i];
    static fake_case alone;
    assert_true(c->finished);
    seen_finish[c->type]++;
    seen_retractions += c->retractions;
    seen_cached += c->cached_tokens;
    assert_true(c->cached_tokens < c->params.n_input_ids);
    assert_true(c->cached_tokens == 0 || !w->config.disable_prefix_cache);
    if (c->params.return_logprob && c->params.logprob_start_len >= 0 &&
        c->params.logprob_start_len < (int64_t)c->params.n_input_ids)
        assert_true(c->cached_tokens == 0 || c->cached_tokens < c->params.logprob_start_len);
    fake_oracle(c, &w->config.limits, &alone);
    check_spans(c);
    bool vanished = c->status == HR_ERR_ADAPTER_UNKNOWN;
    bool cut = vanished || c->type == HR_FINISH_ABORT ||
               (c->type == HR_FINISH_ERROR && c->status == HR_ERR_NO_MEMORY);
    if (vanished) {
        assert_true(w->may_vanish[i]);
        assert_int_equal(c->type,
                         c->n_spans > 0 || c->retractions > 0 ? HR_FINISH_ABORT : HR_FINISH_ERROR);
        seen_vanished++;
    } else if (c->type == HR_FINISH_ABORT)
        assert_true(w->aborted[i]);
    else if (cut)
        assert_true(w->memory.failed);
    else
        assert_int_equal(c->type, alone.type);
    /* A poisoned request may have prompt positions less: a chunk is delivered whole or not at all.
     */
    if (cut || c->type == HR_FINISH_ERROR) {
        assert_true(c->n_tokens <= alone.n_tokens && c->n_prompt_seen <= alone.n_prompt_seen);
    } else {
        assert_int_equal(c->n_tokens, alone.n_tokens);
        assert_int_equal(c->n_prompt_seen, alone.n_prompt_seen);
    }
    assert_memory_equal(c->tokens, alone.tokens, c->n_tokens * sizeof c->tokens[0]);
    assert_memory_equal(c->logprobs, alone.logprobs, c->n_tokens * sizeof c->logprobs[0]);
    assert_memory_equal(c->top0, alone.top0, c->n_tokens * sizeof c->top0[0]);
    if (c->n_prompt_seen > 0) {
        uint32_t first = c->next_prompt - c->n_prompt_seen;
        assert_memory_equal(c->prompt_logprobs + first, alone.prompt_logprobs + first,
                            c->n_prompt_seen * sizeof c->prompt_logprobs[0]);
    }
}

/* ---- runs ---- */

static void act(world *w) {
    switch (roll(w, 16)) {
    case 0:
    case 1:
    case 2:
        submit_some(w);
        break;
    case 3:
        load_some(w);
        break;
    case 4:
        if (roll(w, 8) == 0)
            unload_some(w);
        break;
    case 5:
        if (roll(w, 4) == 0)
            abort_some(w);
        break;
    case 6:
        if (roll(w, 10) == 0)
            retract_all(w);
        break;
    case 7:
        if (roll(w, 6) == 0)
            w->memory.countdown = roll(w, 40);
        break;
    case 8:
        if (roll(w, 3) == 0)
            change_some(w);
        break;
    case 9:
        if (roll(w, 6) == 0)
            w->frozen = !w->frozen;
        break;
    default:
        if (!w->frozen)
            step(w);
    }
    check_books(w);
}

static void end_all(world *w, bool kill) {
    for (uint32_t i = 0; kill && i < w->n_cases; i++)
        if (w->live[i] != NULL) {
            atomic_store(&w->live[i]->ending, HR_ENDING_STOP);
            w->aborted[i] = true;
        }
    hr_scheduler_reap(w->scheduler);
    w->frozen = false;
    uint32_t steps = 0;
    while (hr_scheduler_has_work(w->scheduler)) {
        assert_true(step(w) || !hr_scheduler_has_work(w->scheduler));
        assert_true(steps++ < 1000000);
        check_books(w);
    }
    assert_int_equal(w->n_ended, w->n_cases);
}

static void run_world(uint64_t seed, uint32_t n_actions, bool kill) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    world_open(w, seed);
    for (uint32_t a = 0; a < n_actions; a++)
        act(w);
    end_all(w, kill);
    for (uint32_t i = 0; i < w->n_cases; i++)
        check_case(w, i);
    world_close(w);
    free(w);
}

static void run_crowd(uint64_t seed) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    world_open(w, seed);
    while (w->n_cases < 64) {
        uint32_t dice = roll(w, 16);
        if (dice < 6) {
            submit_some(w);
        } else if (dice < 8) {
            seen_crowd_reloads += reload(w, names[roll(w, N_NAMES)]);
        } else if (dice == 8) {
            abort_some(w);
        } else if (dice == 9 && roll(w, 8) == 0) {
            retract_all(w);
        } else {
            step(w);
        }
        check_books(w);
    }
    end_all(w, false);
    for (uint32_t i = 0; i < w->n_cases; i++)
        check_case(w, i);
    world_close(w);
    free(w);
}

static void every_request_ends_once_and_as_if_it_had_run_alone(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= n_runs; seed++)
        run_world(seed, 600, false);
    /* The runs must have met what they are for. */
    assert_true(seen_retractions > 20);
    assert_true(seen_finish[HR_FINISH_LENGTH] > 20 && seen_finish[HR_FINISH_STOP_TOKEN] > 20);
    assert_true(seen_finish[HR_FINISH_STOP_CALLER] > 20 && seen_finish[HR_FINISH_ABORT] > 20);
    assert_true(seen_finish[HR_FINISH_ERROR] > 5);
    assert_true(seen_cached > 1000 && seen_full_caches > 100 && seen_flushes > 20);
    assert_true(seen_shared_pages > 100);
    assert_true(seen_kept_kv > n_runs / 4 && seen_vanished > n_runs / 4 && seen_stale > n_runs / 4);
    assert_true(seen_spans > n_runs / 4 && seen_bases > n_runs / 4 && seen_renewals > n_runs / 4);
}

static void stopping_at_any_moment_leaves_nothing_behind(void **state) {
    (void)state;
    for (uint32_t n_actions = 0; n_actions < 150; n_actions++)
        run_world(1000 + n_actions % 7, n_actions, true);
}

/* ---- directed scenes ---- */

/* A world with nothing in it, but this batch. */
static world *open_deep_scene(uint32_t max_running, uint32_t max_adapters, uint32_t n_pages,
                              uint32_t chunk, uint32_t attention_depth) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    world_open(w, 77);
    hr_scheduler_destroy(w->scheduler);
    fake_model_free(&w->model);
    fake_model_init(&w->model, n_pages, NULL);
    w->config.n_pages = n_pages;
    w->config.limits.kv_tokens = n_pages * HR_KV_PAGE_TOKENS;
    w->config.limits.chunked_prefill_size = chunk;
    w->config.max_adapters = max_adapters;
    w->config.max_running = max_running;
    w->config.max_overtaken = 8;
    w->config.attention_depth = attention_depth;
    w->config.disable_prefix_cache = false;
    assert_int_equal(hr_scheduler_create(&w->config, &w->scheduler, NULL), HR_OK);
    for (uint32_t n = 0; n < 2; n++) {
        hr_adapter_reservation *reservation;
        assert_int_equal(
            hr_adapter_store_reserve(w->store, names[n], "/nowhere", false, &reservation, NULL),
            HR_OK);
        hr_adapter_payload payload = fake_lora_payload(w->next_adapter_value++);
        hr_adapter_store_publish(w->store, reservation, &payload);
    }
    return w;
}

static world *open_scene(uint32_t max_running, uint32_t max_adapters, uint32_t n_pages,
                         uint32_t chunk) {
    return open_deep_scene(max_running, max_adapters, n_pages, chunk, 0);
}

static void close_scene(world *w) {
    end_all(w, false);
    for (uint32_t i = 0; i < w->n_cases; i++)
        check_case(w, i);
    world_close(w);
    free(w);
}

/* The next case: adapter 1 or 2 ("a" or "b") or 0, greedy, to its full length. */
static fake_case *submit_fixed(world *w, uint32_t n_prompt, uint32_t max_new, uint32_t adapter,
                               bool score) {
    uint32_t i = w->n_cases++;
    fake_case *c = &w->cases[i];
    c->params.sampling = hr_sampling_params_default();
    c->params.sampling.temperature = 0;
    c->params.sampling.max_new_tokens = max_new;
    c->params.sampling.ignore_eos = true;
    c->params.n_input_ids = n_prompt;
    for (uint32_t p = 0; p < n_prompt; p++)
        c->prompt[p] = (p * p + i + 1) % FAKE_VOCAB;
    if (c->prompt[0] == FAKE_POISON)
        c->prompt[0] = 0;
    c->params.return_logprob = score;
    c->adapter = w->adapter_now[i] = adapter == 0 ? 0 : value_of_name(w, names[adapter - 1]);
    c->base = w->base_now[i] = w->model.base;
    snprintf(w->rids[i], sizeof w->rids[i], "r%u", i);
    c->params.rid = w->rids[i];
    fake_case_record(c);
    hr_adapter_lease lease = {0};
    c->params.lora_name = adapter == 0 ? NULL : names[adapter - 1];
    w->unloads_then[i] = adapter == 0 ? 0 : w->unloads[adapter - 1];
    if (adapter != 0)
        assert_int_equal(hr_adapter_store_acquire(w->store, c->params.lora_name, &lease, NULL),
                         HR_OK);
    assert_int_equal(
        hr_request_create(&c->params, &w->config.limits, 0, &w->alloc, &w->live[i], NULL), HR_OK);
    hr_request_set_adapter(w->live[i], lease);
    hr_scheduler_add(w->scheduler, w->live[i]);
    return c;
}

/* One request of adapter "b" among an endless stream of "a", with room for one adapter: it runs
 * soon. */
static void no_adapter_starves(void **state) {
    (void)state;
    world *w = open_scene(4, 1, 16, 64);
    const uint32_t the_b = 5;
    uint32_t ended_before_b = 0;
    for (uint32_t i = 0; i < 40 || w->live[the_b] != NULL; i++) {
        if (i < 40)
            submit_fixed(w, 3, 4, i == the_b ? 2 : 1, false);
        step(w);
        check_books(w);
        if (w->live[the_b] != NULL || i < the_b)
            ended_before_b = w->n_ended;
    }
    assert_true(ended_before_b <= the_b + w->config.max_overtaken);
    close_scene(w);
}

/* Two requests outgrow the cache while a third is half through scoring its prompt, one row a step.
 */
static void a_prompt_retracted_half_scored_is_delivered_once(void **state) {
    (void)state;
    world *w = open_scene(4, 2, 8, 1);
    submit_fixed(w, 1, 110, 1, true);
    submit_fixed(w, 1, 110, 2, true);
    step(w);
    fake_case *scored = submit_fixed(w, 100, 0, 1, true);
    uint64_t before = seen_half_scored;
    while (w->live[2] != NULL) {
        assert_true(step(w));
        check_books(w);
    }
    assert_true(seen_half_scored > before && scored->retractions > 0);
    assert_int_equal(scored->n_prompt_seen, 100);
    close_scene(w);
}

/* A prompt of the scored kind that needs many steps, and short ones that come one after another
 * while others generate. */
static void a_long_scored_prompt_neither_stalls_others_nor_stands_still(void **state) {
    (void)state;
    world *w = open_scene(8, 2, 48, 64); /* 16 prompt rows a step while any request generates */
    submit_fixed(w, 2, 100, 1, false);   /* generates all the time */
    step(w);
    fake_case *old = submit_fixed(w, 140, 0, 1, true);
    const hr_request *old_request = w->live[1];
    for (uint32_t i = 0; !old->finished; i++) {
        uint32_t before = old_request->n_computed, generated = w->cases[0].n_tokens;
        bool alone = hr_scheduler_stats_of(w->scheduler).running == 2;
        fake_case *young = i > 0 ? submit_fixed(w, 9, 2, 1 + i % 2, false) : NULL;
        assert_true(step(w));
        check_books(w);
        assert_int_equal(w->cases[0].n_tokens, generated + 1);
        if (young != NULL)
            assert_int_equal(young->n_tokens, 1); /* its first token comes with the next step */
        if (old->finished)
            break;
        uint32_t rows = old_request->n_computed - before;
        assert_true(rows >= 4); /* a quarter of those */
        if (alone && young == NULL)
            assert_int_equal(rows, 16);
        assert_true(i < 40);
    }
    close_scene(w);
}

/* Attention over 20 positions costs a row as much as all else. */
static void far_into_a_prompt_a_step_takes_fewer_rows(void **state) {
    (void)state;
    world *w = open_deep_scene(2, 1, 48, 16, 20);
    fake_case *c = submit_fixed(w, 140, 0, 1, true);
    static const uint32_t rows[] = {16, 8, 7, 6, 5, 5, 4, 4};
    const hr_request *r = w->live[0];
    for (uint32_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint32_t before = r->n_computed;
        assert_true(step(w));
        assert_int_equal(r->n_computed - before, rows[i]);
    }
    while (!c->finished)
        assert_true(step(w));
    close_scene(w);
}

/* Many samples of one prompt, at once: it is computed once. */
static void samples_of_one_prompt_share_its_computation(void **state) {
    (void)state;
    world *w = open_scene(8, 2, 48, 256);
    const uint32_t n = 8, n_prompt = 70;
    for (uint32_t i = 0; i < n; i++) {
        fake_case *c = &w->cases[w->n_cases];
        submit_fixed(w, n_prompt, 5, 1, false);
        for (uint32_t p = 0; p < n_prompt; p++)
            c->prompt[p] = w->live[i]->ids[p] = p % FAKE_VOCAB;
    }
    uint64_t rows = 0;
    while (w->n_ended < n) {
        uint32_t before = 0, after = 0;
        const hr_request *r;
        for (uint32_t i = 0; (r = hr_scheduler_running(w->scheduler, i)) != NULL; i++)
            before += r->n_computed - r->cached_tokens;
        step(w);
        check_books(w);
        for (uint32_t i = 0; (r = hr_scheduler_running(w->scheduler, i)) != NULL; i++)
            after += r->n_computed - r->cached_tokens;
        rows += after > before ? after - before : 0;
    }
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(w->cases[i].cached_tokens, i == 0 ? 0 : 64);
    assert_true(rows <= n_prompt + (n - 1) * (n_prompt - 64) + n * 5);
    assert_int_equal(hr_scheduler_stats_of(w->scheduler).cached_prompt_tokens, (n - 1) * 64);
    close_scene(w);
}

/* What a retracted request had computed is still there when it returns, unless it was needed. */
static void a_retracted_request_finds_its_pages_again(void **state) {
    (void)state;
    world *w = open_scene(4, 2, 48, 64);
    fake_case *c = submit_fixed(w, 100, 40, 1, false);
    while (c->n_tokens < 30)
        step(w);
    hr_scheduler_retract_all(w->scheduler);
    note_retractions(w);
    check_books(w);
    uint64_t steps = hr_scheduler_stats_of(w->scheduler).steps;
    step(w);
    assert_int_equal(c->n_tokens, 31); /* 129 ids: four pages known, one row */
    assert_int_equal(hr_scheduler_stats_of(w->scheduler).steps, steps + 1);
    end_all(w, false);
    assert_int_equal(c->cached_tokens, 0);
    close_scene(w);
}

/* Requests of two adapters and of the base run, one waits, and one of a prompt that takes many
 * steps is under way; after n steps they are frozen, retracted or left alone, and this changes. */
static void run_change_after(uint32_t n, uint32_t mode, const change *c, bool unload) {
    world *w = open_scene(4, 3, 48, 8);
    submit_fixed(w, 5, 20, 1, true);
    submit_fixed(w, 40, 30, 2, true);
    submit_fixed(w, 3, 25, 0, false);
    submit_fixed(w, 90, 10, 1, true);
    submit_fixed(w, 7, 12, 1, true); /* waits */
    for (uint32_t s = 0; s < n && hr_scheduler_has_work(w->scheduler); s++)
        step(w);
    w->frozen = mode > 0;
    if (mode == 2) {
        hr_scheduler_retract_all(w->scheduler);
        note_retractions(w);
    }
    if (unload) {
        assert_true(unload_name(w, names[0]));
        foretell_waiting(w);
        hr_scheduler_renew_waiting(w->scheduler);
        for (uint32_t i = 0; i < w->n_cases; i++) /* who waits for it ends at once */
            assert_true(w->live[i] == NULL || is_running(w->live[i]) || w->cases[i].adapter != 1);
    } else {
        make_change(w, c);
    }
    check_books(w);
    close_scene(w);
}

static void a_change_between_any_two_steps_follows_the_rules(void **state) {
    (void)state;
    static const change changes[] = {{.names = {"a"}},
                                     {.names = {"a"}, .version = true},
                                     {.names = {"a", "b"}, .base = true, .version = true},
                                     {.base = true},
                                     {.base = true, .version = true},
                                     {.version = true, .flush = true}};
    for (uint32_t n = 0; n < 40; n++)
        for (uint32_t mode = 0; mode < 3; mode++) {
            for (uint32_t c = 0; c < sizeof changes / sizeof changes[0]; c++)
                run_change_after(n, mode, &changes[c], false);
            run_change_after(n, mode, NULL, true);
        }
}

/* A page that is begun under one version of an adapter and filled under the next is nobody else's,
 * even where another request asks for exactly its tokens. */
static void kept_kv_is_found_by_nobody(void **state) {
    (void)state;
    for (uint32_t base = 0; base < 2; base++) {
        world *w = open_scene(4, 2, 48, 64);
        const fake_case *kept = submit_fixed(w, 10, 60, 1, false);
        while (kept->n_tokens < 5)
            step(w);
        w->frozen = true;
        make_change(w, &(change){.names = {base ? NULL : names[0]}, .base = base});
        w->frozen = false;
        while (kept->n_tokens < 59)
            step(w);
        fake_case *same = submit_fixed(w, 60, 20, 1, false);
        memcpy(same->prompt, w->live[0]->ids, 60 * sizeof *same->prompt);
        memcpy(w->live[1]->ids, w->live[0]->ids, 60 * sizeof *same->prompt);
        end_all(w, false);
        assert_int_equal(same->cached_tokens, 0);
        close_scene(w);
    }
}

/* A cache that is too small sends a running request back to the queue, where its adapter changes,
 * or loses its name: it was not paused, so it ends with the version that it began with. */
static void a_request_that_the_cache_sent_back_keeps_its_version(void **state) {
    (void)state;
    for (uint32_t unload = 0; unload < 2; unload++) {
        world *w = open_scene(4, 2, 6, 64);
        submit_fixed(w, 5, 110, 1, false);
        const fake_case *young = submit_fixed(w, 5, 110, 1, false);
        while (!w->live[1]->keeps_version)
            assert_true(step(w));
        if (unload)
            assert_true(unload_name(w, names[0]));
        else
            make_change(w, &(change){.names = {names[0]}, .version = true});
        uint64_t made_by = w->adapter_now[1];
        end_all(w, false);
        assert_int_equal(w->adapter_now[1], made_by);
        assert_int_equal(young->type, HR_FINISH_LENGTH);
        assert_int_equal(young->n_spans, 1);
        assert_string_equal(young->weight_version, "v0");
        close_scene(w);
    }
}

/* Sixty-four requests over eight adapters and the base, which are loaded again all the time under
 * their names, joining and leaving a small batch at random. */
static void a_crowd_over_eight_adapters_that_are_reloaded(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= n_runs; seed++)
        run_crowd(5000 + seed);
    assert_true(seen_crowd_reloads > 50 * n_runs / 10);
}

int main(int argc, char **argv) {
    if (argc > 1)
        n_runs = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_request_ends_once_and_as_if_it_had_run_alone),
        cmocka_unit_test(stopping_at_any_moment_leaves_nothing_behind),
        cmocka_unit_test(no_adapter_starves),
        cmocka_unit_test(a_prompt_retracted_half_scored_is_delivered_once),
        cmocka_unit_test(a_long_scored_prompt_neither_stalls_others_nor_stands_still),
        cmocka_unit_test(far_into_a_prompt_a_step_takes_fewer_rows),
        cmocka_unit_test(samples_of_one_prompt_share_its_computation),
        cmocka_unit_test(a_retracted_request_finds_its_pages_again),
        cmocka_unit_test(a_change_between_any_two_steps_follows_the_rules),
        cmocka_unit_test(kept_kv_is_found_by_nobody),
        cmocka_unit_test(a_request_that_the_cache_sent_back_keeps_its_version),
        cmocka_unit_test(a_crowd_over_eight_adapters_that_are_reloaded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
