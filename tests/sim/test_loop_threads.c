/* The engine's loop under threads: eight submitters, aborts from threads and from callbacks, and
 * hammers of loads, unloads, upserts, base and version changes, pauses and flushes, against the
 * fake model on a real pool. Everything ends once, tokens are those of a run alone, and every count
 * returns to zero. Meant to run under the thread sanitizer too. */
#include "fake_model.h"

#include "engine/loop.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_SUBMITTERS = 8, N_REQUESTS = 40, N_PAGES = 24 };

static const uint32_t eos[] = {FAKE_EOS};

typedef struct stand {
    hr_pool *pool;
    fake_model model;
    hr_adapter_store *store;
    hr_loop *loop;
    hr_request_limits limits;
} stand;

static void stand_open(stand *s, uint32_t max_queued) {
    assert_int_equal(hr_pool_create(2, &s->pool, NULL), HR_OK);
    fake_model_init(&s->model, N_PAGES, s->pool);
    hr_alloc alloc = hr_alloc_system();
    hr_adapter_store_limits store = {.max_loaded = 3, .max_per_batch = 2};
    assert_int_equal(hr_adapter_store_create(&store, &alloc, &s->store, NULL), HR_OK);
    s->limits = (hr_request_limits){.vocab_size = FAKE_VOCAB,
                                    .context_length = 150,
                                    .kv_tokens = N_PAGES * HR_KV_PAGE_TOKENS,
                                    .chunked_prefill_size = 16,
                                    .eos_ids = eos,
                                    .n_eos_ids = 1,
                                    .enable_lora = true};
    hr_loop_config config = {
        .scheduler = {.limits = s->limits,
                      .max_running = 6,
                      .max_adapters = 2,
                      .n_pages = N_PAGES,
                      .n_workers = 2,
                      .kernels = hr_kernels_tier(0),
                      .executor = fake_model_executor(&s->model),
                      .clock = hr_clock_monotonic(),
                      .alloc = alloc,
                      .weight_version = "test"},
        .store = s->store,
        .max_queued = max_queued,
    };
    assert_int_equal(hr_loop_create(&config, &s->loop, NULL), HR_OK);
}

static void stand_close(stand *s) {
    hr_loop_destroy(s->loop);
    hr_adapter_store_stats store;
    hr_adapter_store_stats_get(s->store, &store);
    assert_int_equal(store.leases_acquired, store.leases_released);
    assert_int_equal(store.versions, store.loaded);
    hr_adapter_store_destroy(s->store);
    fake_model_free(&s->model);
    hr_pool_destroy(s->pool);
}

/* Waits for the end of one case; the callback is on another thread. */
typedef struct waiter {
    fake_case c;
    stand *s;
    void (*finish)(void *, const hr_finish *);
    hr_token_verdict (*token)(void *, const hr_position_logprobs *);
    bool abort_in_callback;
    _Atomic uint32_t slow_us; /* a token, so that it still runs when the test looks */
    char rid[32];
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool is_done;
} waiter;

static void waiter_finish(void *ctx, const hr_finish *finish) {
    waiter *w = ctx;
    w->finish(&w->c, finish);
    pthread_mutex_lock(&w->lock);
    w->is_done = true;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
}

static hr_token_verdict waiter_token(void *ctx, const hr_position_logprobs *token) {
    waiter *w = ctx;
    hr_token_verdict verdict = w->token(&w->c, token);
    if (w->slow_us > 0)
        usleep(w->slow_us);
    if (w->abort_in_callback && w->c.n_tokens == 3)
        hr_loop_abort(w->s->loop, w->rid);
    return verdict;
}

static void waiter_prompt(void *ctx, uint32_t first, uint32_t n,
                          const hr_position_logprobs *positions) {
    (void)first;
    (void)n;
    (void)positions;
    HR_ASSERT(!((waiter *)ctx)->c.finished);
}

static void waiter_open(waiter *w, stand *s, const char *rid) {
    memset(w, 0, sizeof *w);
    w->s = s;
    snprintf(w->rid, sizeof w->rid, "%s", rid);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->done, NULL);
    fake_case_record(&w->c);
    w->finish = w->c.params.on_finish;
    w->token = w->c.params.on_token;
    w->c.params.rid = w->rid;
    w->c.params.ctx = w;
    w->c.params.on_finish = waiter_finish;
    w->c.params.on_token = waiter_token;
    w->c.params.on_prompt_logprobs = waiter_prompt;
    w->c.params.sampling = hr_sampling_params_default();
    w->c.params.sampling.has_seed = true;
    w->c.prompt[0] = 1;
    w->c.params.n_input_ids = 1;
}

static void waiter_wait(waiter *w) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 120;
    pthread_mutex_lock(&w->lock);
    while (!w->is_done)
        HR_ASSERT(pthread_cond_timedwait(&w->done, &w->lock, &until) == 0);
    pthread_mutex_unlock(&w->lock);
}

static void waiter_close(waiter *w) {
    pthread_cond_destroy(&w->done);
    pthread_mutex_destroy(&w->lock);
}

/* ---- the hammer ---- */

static const char *const names[] = {"a", "b", "c", "d", "e"};

static void load(stand *s, const char *name, uint64_t value) {
    hr_adapter_reservation *reservation;
    if (hr_adapter_store_reserve(s->store, name, "/nowhere", false, &reservation, NULL) != HR_OK)
        return;
    hr_adapter_payload payload = fake_lora_payload(value);
    hr_adapter_store_publish(s->store, reservation, &payload);
}

/* Adapters that change between two steps, as an update session publishes them. */
typedef struct upsert {
    stand *s;
    hr_adapter_publication item;
    bool base; /* the base weights change too, to this version */
    uint64_t base_version;
} upsert;

static void apply_upsert(void *self) {
    upsert *u = self;
    if (u->item.name != NULL)
        hr_adapter_store_publish_all(u->s->store, &u->item, 1);
    if (u->base)
        u->s->model.base = u->base_version;
}

/* name NULL: only what change says. */
static hr_status change_weights(stand *s, const char *name, uint64_t value, hr_loop_change change,
                                uint64_t base_version, hr_error *err) {
    upsert u = {.s = s, .base = change.base, .base_version = base_version};
    size_t n = name != NULL;
    if (name != NULL) {
        u.item = (hr_adapter_publication){.name = name, .path = "/nowhere"};
        HR_TRY(hr_adapter_store_reserve_streamed(s->store, name, "/nowhere", false, false,
                                                 &u.item.reservation, err));
        u.item.payload = fake_lora_payload(value);
    }
    change.self = &u;
    change.apply = apply_upsert;
    HR_ASSERT(hr_adapter_store_prepare(s->store, &u.item, n, NULL) == HR_OK);
    hr_status status = hr_loop_change_apply(s->loop, &change, err);
    if (status != HR_OK && name != NULL) {
        hr_adapter_store_unprepare(s->store, &u.item, n);
        hr_adapter_store_cancel(s->store, u.item.reservation);
        u.item.payload.destroy(u.item.payload.data);
    }
    return status;
}

typedef struct hammer {
    stand *s;
    _Atomic bool stop;
    bool may_abort; /* pausing in mode abort too */
} hammer;

/* Every adapter of one name has one value, so that a request's tokens do not depend on which
 * version it met. */
static void *hammer_main(void *arg) {
    hammer *h = arg;
    for (uint32_t i = 0; !atomic_load(&h->stop); i++) {
        uint32_t n = (uint32_t)hr_sampler_mix(i) % 5;
        if (i % 3 == 0)
            (void)hr_adapter_store_unload(h->s->store, names[n], NULL);
        else
            load(h->s, names[n], 100 + n);
        if (i % 4 == 1) {
            char version[16];
            snprintf(version, sizeof version, "h%u", i);
            hr_loop_change change = {.base = i % 16 == 1,
                                     .weight_version = i % 8 == 1 ? version : NULL,
                                     .flush_cache = i % 12 == 1,
                                     .timeout_ms = 30000};
            const char *name = i % 32 == 1 ? NULL : names[(n + 1) % 5];
            hr_status status = change_weights(h->s, name, 100 + (n + 1) % 5, change, 0, NULL);
            HR_ASSERT(status == HR_OK || status == HR_ERR_ADAPTER_EXISTS || status == HR_ERR_LIMIT);
        }
        hr_engine_stats stats;
        hr_loop_stats_get(h->s->loop, &stats);
        HR_ASSERT(stats.requests_started ==
                  stats.requests_finished + stats.requests_aborted + stats.running + stats.queued);
        usleep(300);
    }
    return NULL;
}

/* Pauses in every mode, flushes and goes on, while everybody else goes on submitting. */
static void *pauser_main(void *arg) {
    hammer *h = arg;
    for (uint32_t i = 0; !atomic_load(&h->stop); i++) {
        uint64_t dice = hr_sampler_mix(i + 99);
        hr_pause_mode mode = h->may_abort ? (hr_pause_mode)(dice % 3)
                             : dice % 2   ? HR_PAUSE_RETRACT
                                          : HR_PAUSE_IN_PLACE;
        HR_ASSERT(hr_loop_pause(h->s->loop, mode, 30000, NULL) == HR_OK);
        hr_status flushed = hr_loop_flush_cache(h->s->loop, dice >> 8 & 1, NULL);
        HR_ASSERT(flushed == HR_OK || flushed == HR_ERR_BUSY);
        if (dice >> 9 & 1)
            HR_ASSERT(hr_loop_pause(h->s->loop, HR_PAUSE_RETRACT, 30000, NULL) == HR_OK);
        hr_loop_continue(h->s->loop);
        usleep(500);
    }
    return NULL;
}

typedef struct submitter {
    stand *s;
    uint32_t index;
    bool may_abort;
    uint32_t n_ended, n_refused, n_aborted;
} submitter;

static void check_waiter(const waiter *w, const hr_request_limits *limits, bool may_abort) {
    fake_case *alone = malloc(sizeof *alone);
    HR_ASSERT(alone != NULL && w->c.finished);
    fake_oracle(&w->c, limits, alone);
    if (w->c.status == HR_ERR_ADAPTER_UNKNOWN) { /* unloaded while it waited */
        HR_ASSERT(w->c.params.lora_name != NULL && w->c.n_tokens <= alone->n_tokens);
    } else if (w->c.type == HR_FINISH_ABORT) {
        HR_ASSERT(may_abort && w->c.n_tokens <= alone->n_tokens);
    } else {
        HR_ASSERT(w->c.type == alone->type && w->c.n_tokens == alone->n_tokens);
    }
    HR_ASSERT(memcmp(w->c.tokens, alone->tokens, w->c.n_tokens * sizeof w->c.tokens[0]) == 0);
    HR_ASSERT(memcmp(w->c.logprobs, alone->logprobs, w->c.n_tokens * sizeof w->c.logprobs[0]) == 0);
    free(alone);
}

static void *submitter_main(void *arg) {
    submitter *me = arg;
    waiter *w = malloc(sizeof *w);
    HR_ASSERT(w != NULL);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        uint64_t dice = hr_sampler_mix(me->index * 1000 + i);
        char rid[32];
        snprintf(rid, sizeof rid, "%u-%u", me->index, i);
        waiter_open(w, me->s, rid);
        hr_request_params *p = &w->c.params;
        p->n_input_ids = 1 + dice % 60;
        for (size_t j = 1; j < p->n_input_ids; j++) /* the first page is common to many */
            w->c.prompt[j] = (uint32_t)hr_sampler_mix((j < 40 ? dice & 1 : dice) + j) % FAKE_VOCAB;
        p->sampling.max_new_tokens = 1 + dice / 64 % 40;
        p->sampling.ignore_eos = dice & 1;
        p->sampling.seed = dice;
        p->return_logprob = true;
        p->logprob_start_len = dice & 2 ? 0 : -1;
        uint32_t adapter = dice >> 40 & 7;
        p->lora_name = adapter < 5 ? names[adapter] : NULL;
        w->c.adapter = adapter < 5 ? 100 + adapter : 0;
        w->abort_in_callback = (dice >> 50 & 7) == 0;
        bool abort_outside = (dice >> 50 & 7) == 1;
        hr_status status = hr_loop_submit(me->s->loop, p, NULL);
        if (status == HR_OK) {
            if (abort_outside)
                hr_loop_abort(me->s->loop, rid);
            waiter_wait(w);
            HR_ASSERT(!hr_loop_abort(me->s->loop, rid));
            check_waiter(w, &me->s->limits, w->abort_in_callback || abort_outside || me->may_abort);
            me->n_ended++;
            me->n_aborted += w->c.type == HR_FINISH_ABORT;
        } else {
            HR_ASSERT(status == HR_ERR_ADAPTER_UNKNOWN && !w->c.finished);
            me->n_refused++;
        }
        waiter_close(w);
    }
    free(w);
    return NULL;
}

/* n_pausers threads pause and flush beside the hammer of loads. */
static void run_hammers(uint32_t n_pausers, bool may_abort) {
    stand s;
    stand_open(&s, 100);
    hammer h = {.s = &s, .may_abort = may_abort};
    pthread_t hammer_thread, pausers[2], threads[N_SUBMITTERS];
    submitter submitters[N_SUBMITTERS];
    for (uint32_t n = 0; n < 3; n++)
        load(&s, names[n], 100 + n);
    assert_int_equal(pthread_create(&hammer_thread, NULL, hammer_main, &h), 0);
    for (uint32_t i = 0; i < n_pausers; i++)
        assert_int_equal(pthread_create(&pausers[i], NULL, pauser_main, &h), 0);
    for (uint32_t i = 0; i < N_SUBMITTERS; i++) {
        submitters[i] = (submitter){.s = &s, .index = i, .may_abort = may_abort};
        assert_int_equal(pthread_create(&threads[i], NULL, submitter_main, &submitters[i]), 0);
    }
    uint32_t ended = 0, refused = 0, aborted = 0;
    for (uint32_t i = 0; i < N_SUBMITTERS; i++) {
        pthread_join(threads[i], NULL);
        ended += submitters[i].n_ended;
        refused += submitters[i].n_refused;
        aborted += submitters[i].n_aborted;
    }
    atomic_store(&h.stop, true);
    pthread_join(hammer_thread, NULL);
    for (uint32_t i = 0; i < n_pausers; i++)
        pthread_join(pausers[i], NULL);
    assert_int_equal(ended + refused, N_SUBMITTERS * N_REQUESTS);
    assert_true(ended > N_SUBMITTERS * N_REQUESTS / 4 && aborted > 0);
    hr_engine_stats stats;
    assert_int_equal(hr_loop_flush_cache(s.loop, 1000, NULL), HR_OK);
    hr_loop_stats_get(s.loop, &stats);
    assert_int_equal(stats.requests_started, ended);
    assert_int_equal(stats.requests_aborted, aborted);
    assert_int_equal(stats.leases, 0);
    assert_int_equal(stats.kv_pages_free, N_PAGES);
    assert_int_equal(stats.kv_pages_cached, 0);
    assert_false(stats.paused);
    stand_close(&s);
}

static void submitters_aborts_and_loads_at_once(void **state) {
    (void)state;
    run_hammers(0, false);
}

static void pauses_and_flushes_between_them_change_no_bit(void **state) {
    (void)state;
    run_hammers(2, false);
}

static void pauses_that_abort_between_them_lose_nothing_else(void **state) {
    (void)state;
    run_hammers(1, true);
}

/* A request that would run for long. */
static void long_request(waiter *w, stand *s, const char *rid) {
    waiter_open(w, s, rid);
    w->c.params.sampling.max_new_tokens = 140;
    w->c.params.sampling.ignore_eos = true;
}

static void a_rid_is_taken_while_it_lives_and_free_afterwards(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w = malloc(2 * sizeof *w);
    assert_non_null(w);
    hr_error err;
    /* Six requests fill the batch, so that the seventh is surely alive when its rid comes again. */
    waiter *others = malloc(6 * sizeof *others);
    assert_non_null(others);
    for (uint32_t i = 0; i < 6; i++) {
        char rid[16];
        snprintf(rid, sizeof rid, "o%u", i);
        long_request(&others[i], &s, rid);
        assert_int_equal(hr_loop_submit(s.loop, &others[i].c.params, &err), HR_OK);
    }
    long_request(&w[0], &s, "same");
    long_request(&w[1], &s, "same");
    assert_int_equal(hr_loop_submit(s.loop, &w[0].c.params, &err), HR_OK);
    assert_int_equal(hr_loop_submit(s.loop, &w[1].c.params, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "still running"));
    waiter_wait(&w[0]);
    assert_int_equal(hr_loop_submit(s.loop, &w[1].c.params, &err), HR_OK);
    waiter_wait(&w[1]);
    for (uint32_t i = 0; i < 6; i++) {
        waiter_wait(&others[i]);
        waiter_close(&others[i]);
    }
    waiter_close(&w[0]);
    waiter_close(&w[1]);
    free(others);
    free(w);
    stand_close(&s);
}

static void a_full_queue_says_busy(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 2);
    waiter *w = malloc(64 * sizeof *w);
    assert_non_null(w);
    uint32_t n = 0;
    hr_status status = HR_OK;
    hr_error err;
    for (; n < 64 && status == HR_OK; n++) {
        char rid[16];
        snprintf(rid, sizeof rid, "q%u", n);
        long_request(&w[n], &s, rid);
        status = hr_loop_submit(s.loop, &w[n].c.params, &err);
    }
    assert_int_equal(status, HR_ERR_BUSY);
    assert_non_null(strstr(err.message, "queue is full"));
    hr_loop_abort_all(s.loop);
    for (uint32_t i = 0; i + 1 < n; i++)
        waiter_wait(&w[i]);
    for (uint32_t i = 0; i < n; i++)
        waiter_close(&w[i]);
    free(w);
    stand_close(&s);
}

static void draining_refuses_new_requests_and_ends_the_old_ones(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w = malloc(12 * sizeof *w);
    assert_non_null(w);
    hr_error err;
    for (uint32_t i = 0; i < 10; i++) {
        char rid[16];
        snprintf(rid, sizeof rid, "d%u", i);
        long_request(&w[i], &s, rid);
        assert_int_equal(hr_loop_submit(s.loop, &w[i].c.params, &err), HR_OK);
    }
    hr_loop_drain(s.loop, 0);
    for (uint32_t i = 0; i < 10; i++)
        assert_true(w[i].is_done); /* without waiting: drain returned after every on_finish */
    long_request(&w[10], &s, "late");
    assert_int_equal(hr_loop_submit(s.loop, &w[10].c.params, &err), HR_ERR_STOPPING);
    assert_int_equal(hr_loop_check(s.loop, &w[10].c.params, &err), HR_ERR_STOPPING);
    for (uint32_t i = 0; i < 11; i++)
        waiter_close(&w[i]);
    free(w);
    stand_close(&s);
}

/* ---- pausing ---- */

static const hr_pause_mode all_modes[] = {HR_PAUSE_ABORT, HR_PAUSE_RETRACT, HR_PAUSE_IN_PLACE};

static hr_engine_stats stats_of(stand *s) {
    hr_engine_stats stats;
    hr_loop_stats_get(s->loop, &stats);
    HR_ASSERT(stats.leases == stats.leases_acquired - stats.leases_released);
    HR_ASSERT(stats.requests_started ==
              stats.requests_finished + stats.requests_aborted + stats.running + stats.queued);
    return stats;
}

static void pause_loop(stand *s, hr_pause_mode mode) {
    hr_error err = {0};
    if (hr_loop_pause(s->loop, mode, 10000, &err) != HR_OK)
        fail_msg("%s", err.message);
    assert_true(stats_of(s).paused);
}

static waiter *start_request(stand *s, const char *rid, const char *lora) {
    waiter *w = malloc(sizeof *w);
    HR_ASSERT(w != NULL);
    long_request(w, s, rid);
    w->slow_us = 5000;
    w->c.params.return_logprob = true;
    w->c.params.logprob_start_len = -1;
    w->c.params.lora_name = lora;
    w->c.adapter = lora != NULL ? 100 : 0;
    hr_error err = {0};
    if (hr_loop_submit(s->loop, &w->c.params, &err) != HR_OK)
        fail_msg("%s", err.message);
    return w;
}

/* Ended for length, as if nothing had happened to it. */
static void end_undisturbed(waiter *w, stand *s) {
    w->slow_us = 0;
    waiter_wait(w);
    check_waiter(w, &s->limits, false);
    assert_int_equal(w->c.type, HR_FINISH_LENGTH);
    waiter_close(w);
    free(w);
}

static void wait_running(stand *s, uint32_t n, uint64_t generated) {
    for (int i = 0; i < 10000; i++) {
        hr_engine_stats stats = stats_of(s);
        if (stats.running == n && stats.generated_tokens >= generated)
            return;
        usleep(500);
    }
    fail_msg("the requests did not begin to run");
}

static void an_idle_engine_pauses_in_every_mode_and_answers_everything(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    hr_loop_continue(s.loop); /* without a pause */
    for (int m = 0; m < 3; m++) {
        char rid[16];
        snprintf(rid, sizeof rid, "m%d", m);
        pause_loop(&s, all_modes[m]);
        pause_loop(&s, all_modes[m]);
        assert_int_equal(hr_loop_flush_cache(s.loop, 0, NULL), HR_OK);
        waiter *w = start_request(&s, rid, NULL);
        waiter *unwanted = start_request(&s, "unwanted", NULL);
        assert_true(hr_loop_abort(s.loop, "unwanted"));
        waiter_wait(unwanted);
        assert_int_equal(unwanted->c.type, HR_FINISH_ABORT);
        waiter_close(unwanted);
        free(unwanted);
        load(&s, "a", 100);
        assert_int_equal(hr_adapter_store_unload(s.store, "a", NULL), HR_OK);
        usleep(5000);
        assert_int_equal(stats_of(&s).queued, 1);
        assert_int_equal(w->c.n_tokens, 0);
        assert_int_equal(hr_loop_flush_cache(s.loop, 0, NULL), HR_OK); /* who waits holds no KV */
        hr_loop_continue(s.loop);
        hr_loop_continue(s.loop);
        end_undisturbed(w, &s);
        assert_false(stats_of(&s).paused);
    }
    stand_close(&s);
}

static void paused_in_place_requests_stand_still_with_their_kv(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *a = start_request(&s, "a", NULL), *b = start_request(&s, "b", NULL);
    wait_running(&s, 2, 6);
    pause_loop(&s, HR_PAUSE_IN_PLACE);
    hr_engine_stats before = stats_of(&s);
    assert_int_equal(before.running, 2);
    assert_int_equal(hr_loop_flush_cache(s.loop, 20, NULL), HR_ERR_BUSY);
    usleep(20000);
    hr_engine_stats after = stats_of(&s);
    assert_int_equal(before.generated_tokens, after.generated_tokens);
    assert_int_equal(before.steps, after.steps);
    hr_loop_continue(s.loop);
    waiter_wait(a);
    assert_int_equal(a->c.retractions, 0);
    end_undisturbed(a, &s);
    end_undisturbed(b, &s);
    stand_close(&s);
}

static void paused_by_retraction_requests_wait_without_kv(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *a = start_request(&s, "a", NULL), *b = start_request(&s, "b", NULL);
    wait_running(&s, 2, 6);
    pause_loop(&s, HR_PAUSE_IN_PLACE);
    pause_loop(&s, HR_PAUSE_RETRACT); /* another mode does its work on what still runs */
    assert_int_equal(stats_of(&s).running, 0);
    assert_int_equal(stats_of(&s).queued, 2);
    assert_int_equal(hr_loop_flush_cache(s.loop, 0, NULL), HR_OK);
    assert_int_equal(stats_of(&s).kv_pages_free, N_PAGES);
    hr_loop_continue(s.loop);
    waiter_wait(a);
    assert_int_equal(a->c.retractions, 1);
    end_undisturbed(a, &s);
    end_undisturbed(b, &s);
    stand_close(&s);
}

static void pausing_by_abort_returns_when_no_request_is_left(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w[10];
    for (uint32_t i = 0; i < 10; i++) { /* six run, four wait */
        char rid[16];
        snprintf(rid, sizeof rid, "w%u", i);
        w[i] = start_request(&s, rid, NULL);
    }
    wait_running(&s, 6, 12);
    pause_loop(&s, HR_PAUSE_ABORT);
    for (uint32_t i = 0; i < 10; i++) {
        assert_true(w[i]->is_done); /* without waiting */
        check_waiter(w[i], &s.limits, true);
        assert_int_equal(w[i]->c.type, HR_FINISH_ABORT);
        waiter_close(w[i]);
        free(w[i]);
    }
    assert_int_equal(hr_loop_flush_cache(s.loop, 0, NULL), HR_OK);
    waiter *next = start_request(&s, "next", NULL);
    usleep(5000);
    assert_int_equal(next->c.n_tokens, 0);
    hr_loop_continue(s.loop);
    end_undisturbed(next, &s);
    stand_close(&s);
}

/* Four requests of adapter "a" that run and then are paused. */
static void open_paused(stand *s, waiter *w[4], hr_pause_mode mode) {
    stand_open(s, 100);
    load(s, "a", 100);
    for (uint32_t i = 0; i < 4; i++) {
        char rid[16];
        snprintf(rid, sizeof rid, "w%u", i);
        w[i] = start_request(s, rid, "a");
    }
    wait_running(s, 4, 8);
    pause_loop(s, mode);
    assert_int_equal(stats_of(s).leases, 4);
}

static void end_aborted(waiter *w, stand *s) {
    waiter_wait(w);
    check_waiter(w, &s->limits, true);
    assert_int_equal(w->c.type, HR_FINISH_ABORT);
    waiter_close(w);
    free(w);
}

/* The paused request is computed with these weights from its next token on. */
static void expect_weights(waiter *w, uint32_t kept, uint64_t adapter, uint64_t base) {
    w->c.events[w->c.n_events++] =
        (fake_event){.at_token = w->c.n_tokens, .kept = kept, .adapter = adapter, .base = base};
}

static void requests_frozen_in_place_outlive_the_name_of_their_adapter(void **state) {
    (void)state;
    stand s;
    waiter *w[4];
    open_paused(&s, w, HR_PAUSE_IN_PLACE);
    assert_int_equal(hr_adapter_store_unload(s.store, "a", NULL), HR_OK);
    hr_loop_renew_waiting(s.loop);
    load(&s, "a", 200); /* the same name, other weights */
    assert_true(hr_loop_abort(s.loop, "w3"));
    end_aborted(w[3], &s);
    assert_int_equal(stats_of(&s).leases, 3);
    hr_loop_continue(s.loop);
    for (uint32_t i = 0; i < 3; i++)
        end_undisturbed(w[i], &s); /* on the weights they began with */
    assert_int_equal(stats_of(&s).leases, 0);
    stand_close(&s);
}

static void unloading_ends_paused_requests_that_wait_before_they_go_on(void **state) {
    (void)state;
    stand s;
    waiter *w[4];
    open_paused(&s, w, HR_PAUSE_RETRACT);
    waiter *late = start_request(&s, "late", "a");
    assert_int_equal(hr_adapter_store_unload(s.store, "a", NULL), HR_OK);
    hr_loop_renew_waiting(s.loop);
    for (uint32_t i = 0; i < 4; i++) {
        waiter_wait(w[i]);
        assert_int_equal(w[i]->c.status, HR_ERR_ADAPTER_UNKNOWN);
        end_aborted(w[i], &s);
    }
    waiter_wait(late);
    assert_int_equal(late->c.type, HR_FINISH_ERROR);
    assert_int_equal(late->c.status, HR_ERR_ADAPTER_UNKNOWN);
    waiter_close(late);
    free(late);
    assert_int_equal(stats_of(&s).leases, 0);
    hr_loop_continue(s.loop);
    stand_close(&s);
}

static void an_upsert_while_paused_is_what_requests_go_on_with(void **state) {
    (void)state;
    for (int m = 1; m < 3; m++) {
        stand s;
        waiter *w[4];
        open_paused(&s, w, all_modes[m]);
        hr_loop_change change = {.weight_version = "two"};
        assert_int_equal(change_weights(&s, "a", 200, change, 0, NULL), HR_OK);
        char now[16];
        hr_loop_weight_version(s.loop, now, sizeof now);
        assert_string_equal(now, "two");
        uint32_t before[4];
        for (uint32_t i = 0; i < 4; i++) {
            before[i] = w[i]->c.n_tokens;
            /* prompt and tokens, but the last token has no KV yet */
            expect_weights(w[i], all_modes[m] == HR_PAUSE_IN_PLACE ? before[i] : 0, 200, 0);
        }
        hr_adapter_store_stats store;
        hr_adapter_store_stats_get(s.store, &store);
        assert_int_equal(store.versions, 1); /* nobody holds the old one */
        hr_loop_continue(s.loop);
        for (uint32_t i = 0; i < 4; i++) {
            w[i]->slow_us = 0;
            waiter_wait(w[i]);
            assert_int_equal(w[i]->c.n_spans, 2);
            assert_string_equal(w[i]->c.spans[0].version, "test");
            assert_string_equal(w[i]->c.spans[1].version, "two");
            assert_int_equal(w[i]->c.spans[1].start, before[i]);
            assert_int_equal(w[i]->c.spans[1].end, 140);
            end_undisturbed(w[i], &s);
        }
        assert_int_equal(stats_of(&s).leases, 0);
        stand_close(&s);
    }
}

/* ---- changes of base weights ---- */

static void a_base_change_waits_for_those_that_run_and_before_those_that_wait(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *first = start_request(&s, "first", NULL);
    wait_running(&s, 1, 3);
    hr_loop_change change = {.base = true, .weight_version = "two", .timeout_ms = 20};
    hr_error err;
    assert_int_equal(change_weights(&s, NULL, 0, change, 7, &err), HR_ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "1 requests still ran"));
    assert_int_equal(s.model.base, 0);
    char now[16];
    hr_loop_weight_version(s.loop, now, sizeof now);
    assert_string_equal(now, "test");
    waiter *second = start_request(&s, "second", NULL); /* taken in again after the timeout */
    wait_running(&s, 2, 3);
    first->slow_us = second->slow_us = 1000;
    change.timeout_ms = 60000;
    assert_int_equal(change_weights(&s, NULL, 0, change, 7, &err), HR_OK);
    assert_true(first->is_done && second->is_done);
    end_undisturbed(first, &s);
    end_undisturbed(second, &s);
    waiter *third = start_request(&s, "third", NULL);
    third->c.base = 7;
    third->slow_us = 0;
    waiter_wait(third);
    assert_int_equal(third->c.n_spans, 1);
    assert_string_equal(third->c.weight_version, "two");
    end_undisturbed(third, &s);
    stand_close(&s);
}

static void a_base_change_that_aborts_waits_for_nobody(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    for (uint32_t round = 0; round < 20; round++) {
        waiter *w[8];
        for (uint32_t i = 0; i < 8; i++) {
            char rid[16];
            snprintf(rid, sizeof rid, "w%u", i);
            w[i] = start_request(&s, rid, NULL);
            w[i]->c.base = round;
        }
        if (round % 2 == 0)
            wait_running(&s, 6, 0);
        hr_loop_change change = {
            .base = true, .abort_all_requests = true, .flush_cache = true, .timeout_ms = 0};
        hr_error err = {0};
        if (change_weights(&s, NULL, 0, change, round + 1, &err) != HR_OK)
            fail_msg("%s", err.message);
        for (uint32_t i = 0; i < 8; i++) {
            assert_true(w[i]->is_done);
            end_aborted(w[i], &s);
        }
    }
    stand_close(&s);
}

static void no_step_runs_while_it_is_held(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    hr_loop_change hold = {.base = true, .hold = true, .timeout_ms = 1000};
    assert_int_equal(hr_loop_change_apply(s.loop, &hold, NULL), HR_OK);
    waiter *w = start_request(&s, "w", NULL);
    w->c.base = 3;
    usleep(20000);
    assert_int_equal(w->c.n_tokens, 0);
    assert_int_equal(stats_of(&s).queued, 1);
    assert_false(stats_of(&s).paused);
    pause_loop(&s, HR_PAUSE_IN_PLACE);
    hr_loop_continue(s.loop); /* undoes the pause, not the hold */
    usleep(5000);
    assert_int_equal(w->c.n_tokens, 0);
    hr_loop_change change = {.base = true};
    assert_int_equal(change_weights(&s, NULL, 0, change, 3, NULL), HR_OK);
    hr_loop_resume(s.loop);
    end_undisturbed(w, &s);
    stand_close(&s);
}

static void an_unservable_engine_ends_what_would_run_and_refuses_the_rest(void **state) {
    (void)state;
    stand s;
    waiter *w[4];
    open_paused(&s, w, HR_PAUSE_RETRACT);
    hr_loop_set_unservable(s.loop, "base weights are incomplete; send a full update");
    hr_error err;
    waiter *refused = malloc(sizeof *refused);
    assert_non_null(refused);
    long_request(refused, &s, "refused");
    assert_int_equal(hr_loop_submit(s.loop, &refused->c.params, &err), HR_ERR_UNSERVABLE);
    assert_non_null(strstr(err.message, "send a full update"));
    assert_int_equal(stats_of(&s).queued, 4); /* a pause gives time for a better update */
    hr_loop_continue(s.loop);
    for (uint32_t i = 0; i < 4; i++) {
        waiter_wait(w[i]);
        assert_int_equal(w[i]->c.type, HR_FINISH_ERROR);
        assert_int_equal(w[i]->c.status, HR_ERR_UNSERVABLE);
        waiter_close(w[i]);
        free(w[i]);
    }
    hr_loop_set_unservable(s.loop, NULL);
    end_undisturbed(start_request(&s, "good", NULL), &s);
    waiter_close(refused);
    free(refused);
    stand_close(&s);
}

static void a_version_must_be_a_version(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    char text[300];
    memset(text, 'v', sizeof text);
    text[257] = '\0';
    assert_int_equal(hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = text}, NULL),
                     HR_ERR_INVALID);
    assert_int_equal(
        hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = "a\nb"}, NULL),
        HR_ERR_INVALID);
    assert_int_equal(hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = ""}, NULL),
                     HR_ERR_INVALID);
    text[256] = '\0';
    assert_int_equal(hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = text}, NULL),
                     HR_OK);
    char now[300];
    hr_loop_weight_version(s.loop, now, sizeof now);
    assert_string_equal(now, text);
    waiter *w = start_request(&s, "w", NULL); /* the same version again makes no new span */
    wait_running(&s, 1, 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(
            hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = text}, NULL), HR_OK);
    w->slow_us = 0;
    waiter_wait(w);
    assert_int_equal(w->c.n_spans, 1);
    end_undisturbed(w, &s);
    hr_loop_drain(s.loop, 0);
    assert_int_equal(
        hr_loop_change_apply(s.loop, &(hr_loop_change){.weight_version = "late"}, NULL),
        HR_ERR_STOPPING);
    stand_close(&s);
}

static void stopping_while_paused_does_not_wait_for_what_is_frozen(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w = start_request(&s, "w", NULL);
    wait_running(&s, 1, 3);
    pause_loop(&s, HR_PAUSE_IN_PLACE);
    hr_loop_drain(s.loop, 3600 * 1000);
    assert_true(w->is_done);
    assert_int_equal(w->c.type, HR_FINISH_ABORT);
    hr_error err;
    assert_int_equal(hr_loop_pause(s.loop, HR_PAUSE_ABORT, 1000, &err), HR_ERR_STOPPING);
    waiter_close(w);
    free(w);
    stand_close(&s);
}

static void a_flush_waits_for_running_requests_as_long_as_it_may(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w = start_request(&s, "w", NULL);
    wait_running(&s, 1, 3);
    hr_error err;
    assert_int_equal(hr_loop_flush_cache(s.loop, 0, &err), HR_ERR_BUSY);
    assert_non_null(strstr(err.message, "1 requests run"));
    assert_int_equal(hr_loop_flush_cache(s.loop, 30000, &err), HR_OK);
    assert_true(w->is_done);
    end_undisturbed(w, &s);
    assert_int_equal(stats_of(&s).kv_pages_cached, 0);
    stand_close(&s);
}

/* As an update does it: what is aborted is gone before the cache is looked at. */
static void aborting_all_and_flushing_at_once_works_every_time(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    for (uint32_t round = 0; round < 100; round++) {
        waiter *w[8];
        for (uint32_t i = 0; i < 8; i++) {
            char rid[16];
            snprintf(rid, sizeof rid, "w%u", i);
            w[i] = start_request(&s, rid, NULL);
            w[i]->slow_us = 500;
        }
        if (round % 2 == 0)
            wait_running(&s, 6, 0);
        hr_loop_abort_all(s.loop);
        hr_error err = {0};
        if (hr_loop_flush_cache(s.loop, 0, &err) != HR_OK)
            fail_msg("%s", err.message);
        for (uint32_t i = 0; i < 8; i++) {
            assert_true(w[i]->is_done);
            assert_int_equal(w[i]->c.type, HR_FINISH_ABORT);
            check_waiter(w[i], &s.limits, true);
            waiter_close(w[i]);
            free(w[i]);
        }
    }
    stand_close(&s);
}

static void pages_of_an_unloaded_adapter_leave_the_cache(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    load(&s, "a", 100);
    end_undisturbed(start_request(&s, "1", "a"), &s);
    end_undisturbed(start_request(&s, "2", NULL), &s);
    uint64_t both = stats_of(&s).kv_pages_cached;
    assert_true(both >= 8);
    assert_int_equal(hr_adapter_store_unload(s.store, "a", NULL), HR_OK);
    for (int i = 0; i < 10000 && stats_of(&s).kv_pages_cached != both / 2; i++)
        usleep(500);
    assert_int_equal(stats_of(&s).kv_pages_cached, both / 2);
    stand_close(&s);
}

static void an_idle_loop_uses_no_processor_time(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    waiter *w = malloc(sizeof *w);
    assert_non_null(w);
    long_request(w, &s, "warm");
    assert_int_equal(hr_loop_submit(s.loop, &w->c.params, NULL), HR_OK);
    waiter_wait(w);
    usleep(100000); /* pool workers stop spinning */
    struct timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep(300000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double used =
        (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9;
    assert_true(used < 0.015);
    waiter_close(w);
    free(w);
    stand_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(submitters_aborts_and_loads_at_once),
        cmocka_unit_test(pauses_and_flushes_between_them_change_no_bit),
        cmocka_unit_test(pauses_that_abort_between_them_lose_nothing_else),
        cmocka_unit_test(a_rid_is_taken_while_it_lives_and_free_afterwards),
        cmocka_unit_test(a_full_queue_says_busy),
        cmocka_unit_test(draining_refuses_new_requests_and_ends_the_old_ones),
        cmocka_unit_test(an_idle_engine_pauses_in_every_mode_and_answers_everything),
        cmocka_unit_test(paused_in_place_requests_stand_still_with_their_kv),
        cmocka_unit_test(paused_by_retraction_requests_wait_without_kv),
        cmocka_unit_test(pausing_by_abort_returns_when_no_request_is_left),
        cmocka_unit_test(requests_frozen_in_place_outlive_the_name_of_their_adapter),
        cmocka_unit_test(unloading_ends_paused_requests_that_wait_before_they_go_on),
        cmocka_unit_test(an_upsert_while_paused_is_what_requests_go_on_with),
        cmocka_unit_test(a_base_change_waits_for_those_that_run_and_before_those_that_wait),
        cmocka_unit_test(a_base_change_that_aborts_waits_for_nobody),
        cmocka_unit_test(no_step_runs_while_it_is_held),
        cmocka_unit_test(an_unservable_engine_ends_what_would_run_and_refuses_the_rest),
        cmocka_unit_test(a_version_must_be_a_version),
        cmocka_unit_test(stopping_while_paused_does_not_wait_for_what_is_frozen),
        cmocka_unit_test(a_flush_waits_for_running_requests_as_long_as_it_may),
        cmocka_unit_test(aborting_all_and_flushing_at_once_works_every_time),
        cmocka_unit_test(pages_of_an_unloaded_adapter_leave_the_cache),
        cmocka_unit_test(an_idle_loop_uses_no_processor_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
