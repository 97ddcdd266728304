/* The scheduler's thread. */
#include "engine/loop.h"

#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* Adapters that may go for good between two steps with their pages dropped at once; pages of more
 * of them are simply not used again, and leave the cache as the least recently used. */
enum { MAX_GONE = 64 };

/* A change that waits for its turn; on the stack of who asks for it. */
typedef struct pending_change {
    struct pending_change *next;
    const hr_loop_change *change;
    hr_version_label *label; /* NULL: the version stays */
    bool begun, made;
} pending_change;

struct hr_loop {
    hr_loop_config c;
    hr_scheduler *scheduler; /* the thread's own */
    pthread_t thread;

    pthread_mutex_t lock; /* all below */
    pthread_cond_t work;  /* something for the thread to do */
    pthread_cond_t done;  /* unfinished fell to 0, an order is carried out, or the cache is empty */
    hr_request *inbox_head, *inbox_tail;
    bool reap, stopping, quit;
    bool paused;             /* no step begins */
    uint32_t holds;          /* nor while any of these is left */
    pending_change *changes; /* in the order in which they are to be made */
    char weight_version[HR_WEIGHT_VERSION_SIZE];
    char unservable[256];         /* why no request is taken; "": all is well */
    bool retract;                 /* order: running requests go back to the queue */
    uint64_t orders, orders_done; /* the thread has stood between two steps after each of these */
    uint32_t flush_callers;       /* waiting for the cache to be emptied */
    uint64_t flushes;             /* how often it was */
    uint64_t gone[MAX_GONE];      /* adapters whose pages nobody will look for again */
    uint32_t n_gone;
    hr_request **rids; /* [n_buckets], live requests */
    size_t n_buckets;
    uint32_t live;       /* accepted and not ended */
    uint32_t unfinished; /* accepted and on_finish has not returned */
    uint64_t started, finished, aborted;
    hr_scheduler_stats scheduled; /* as of the last change of running or queue */
    uint64_t seeds;               /* counter of requests without a seed */
};

/* ---- live rids ---- */

static hr_request **rid_bucket(hr_loop *loop, const char *rid) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = rid; *c != '\0'; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    return &loop->rids[hr_sampler_mix(hash) & (loop->n_buckets - 1)];
}

static hr_request *rid_find(hr_loop *loop, const char *rid) {
    hr_request *r = *rid_bucket(loop, rid);
    while (r != NULL && strcmp(r->rid, rid) != 0)
        r = r->rid_next;
    return r;
}

static void rid_insert(hr_loop *loop, hr_request *r) {
    hr_request **bucket = rid_bucket(loop, r->rid);
    r->rid_next = *bucket;
    *bucket = r;
}

static void rid_remove(hr_loop *loop, hr_request *r) {
    hr_request **link = rid_bucket(loop, r->rid);
    while (*link != r)
        link = &(*link)->rid_next;
    *link = r->rid_next;
}

/* ---- the thread ---- */

/* Called by the scheduler for every request it ends. The lease and the rid are back before the
 * caller hears of it, so what he does next finds them free. */
static void end_request(void *self, hr_request *r, const hr_finish *finish) {
    hr_loop *loop = self;
    hr_adapter_store_release(loop->c.store, &r->lease);
    pthread_mutex_lock(&loop->lock);
    rid_remove(loop, r);
    loop->live--;
    *(finish->type == HR_FINISH_ABORT ? &loop->aborted : &loop->finished) += 1;
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    pthread_mutex_unlock(&loop->lock);

    r->on_finish(r->ctx, finish);
    hr_request_destroy(r, &loop->c.scheduler.alloc);

    pthread_mutex_lock(&loop->lock);
    if (--loop->unfinished == 0)
        pthread_cond_broadcast(&loop->done);
    pthread_mutex_unlock(&loop->lock);
}

/* What the thread takes out of the lock at a time. */
typedef struct hr_loop_turn {
    hr_request *inbox;
    bool reap, retract, flush, change, step, fail, quit;
    uint64_t orders;
    uint64_t gone[MAX_GONE];
    uint32_t n_gone;
} hr_loop_turn;

/* Inside the lock: no step may begin, so what runs stands still with its KV. */
static bool is_frozen(const hr_loop *loop) {
    return loop->paused || loop->holds > 0;
}

/* Inside the lock: the next change waits until nobody runs on the weights that it changes. */
static bool waits_for_requests(const hr_loop *loop) {
    return loop->changes != NULL && loop->changes->change->base && !is_frozen(loop);
}

/* Inside the lock, on the thread: the next change may be made now. */
static bool may_change(const hr_loop *loop) {
    return loop->changes != NULL &&
           (!waits_for_requests(loop) || hr_scheduler_begun(loop->scheduler) == 0);
}

/* Inside the lock. Running requests hold pages of the cache; waiting ones are about to, unless
 * paused. */
static bool may_flush(const hr_loop *loop) {
    hr_scheduler_stats now = hr_scheduler_stats_of(loop->scheduler);
    return now.running == 0 && (is_frozen(loop) || (now.queued == 0 && loop->inbox_head == NULL));
}

static bool has_turn(const hr_loop *loop) {
    return loop->inbox_head != NULL || loop->reap || loop->quit || loop->n_gone > 0 ||
           loop->orders != loop->orders_done || (loop->flush_callers > 0 && may_flush(loop)) ||
           may_change(loop) || hr_scheduler_is_outdated(loop->scheduler) ||
           (!is_frozen(loop) && hr_scheduler_has_work(loop->scheduler));
}

static hr_loop_turn take_turn(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    while (!has_turn(loop))
        pthread_cond_wait(&loop->work, &loop->lock);
    hr_loop_turn turn = {.inbox = loop->inbox_head,
                         .reap = loop->reap,
                         .retract = loop->retract,
                         .flush = loop->flush_callers > 0,
                         .change = loop->changes != NULL,
                         .step = !is_frozen(loop),
                         .fail = loop->unservable[0] != '\0',
                         .quit = loop->quit,
                         .orders = loop->orders};
    loop->inbox_head = loop->inbox_tail = NULL;
    loop->reap = loop->retract = false;
    memcpy(turn.gone, loop->gone, loop->n_gone * sizeof *loop->gone);
    turn.n_gone = loop->n_gone;
    loop->n_gone = 0;
    hr_scheduler_close(loop->scheduler, waits_for_requests(loop));
    pthread_mutex_unlock(&loop->lock);
    return turn;
}

/* The next change that may be made, taken out of the list; NULL when there is none. */
static pending_change *take_change(hr_loop *loop, bool *frozen) {
    pthread_mutex_lock(&loop->lock);
    pending_change *next = may_change(loop) ? loop->changes : NULL;
    if (next != NULL) {
        loop->changes = next->next;
        next->begun = true;
        *frozen = is_frozen(loop);
        loop->holds += next->change->hold;
    }
    pthread_mutex_unlock(&loop->lock);
    return next;
}

/* The same version again is no new one. Only this thread changes the version. */
static hr_version_label *new_label(hr_loop *loop, pending_change *pending) {
    if (pending->label == NULL || strcmp(pending->label->text, loop->weight_version) != 0)
        return pending->label;
    hr_version_label_release(pending->label, &loop->c.scheduler.alloc);
    return NULL;
}

/* Between two steps. */
static void make_changes(hr_loop *loop) {
    pending_change *next;
    bool frozen;
    while ((next = take_change(loop, &frozen)) != NULL) {
        const hr_loop_change *change = next->change;
        if (change->apply != NULL)
            change->apply(change->self);
        hr_scheduler_change scheduled = {.base = change->base && !change->hold,
                                         .frozen = frozen && !change->hold,
                                         .flush = change->flush_cache,
                                         .label = new_label(loop, next)};
        hr_scheduler_changed(loop->scheduler, &scheduled);
        pthread_mutex_lock(&loop->lock);
        if (scheduled.label != NULL)
            memcpy(loop->weight_version, scheduled.label->text, sizeof loop->weight_version);
        next->made = true;
        loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
        pthread_cond_broadcast(&loop->done);
        pthread_mutex_unlock(&loop->lock);
    }
}

/* A change that was just made may hold the steps. */
static bool is_held(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    bool held = loop->holds > 0;
    pthread_mutex_unlock(&loop->lock);
    return held;
}

/* Steps would run, but the weights are not whole. */
static void fail_requests(hr_loop *loop) {
    char reason[sizeof loop->unservable];
    pthread_mutex_lock(&loop->lock);
    memcpy(reason, loop->unservable, sizeof reason);
    pthread_mutex_unlock(&loop->lock);
    if (reason[0] != '\0')
        hr_scheduler_fail_all(loop->scheduler, HR_ERR_UNSERVABLE, reason);
}

/* The thread stands between two steps and has done what was ordered. */
static void report_orders(hr_loop *loop, uint64_t orders) {
    pthread_mutex_lock(&loop->lock);
    if (loop->flush_callers > 0 && may_flush(loop)) {
        hr_scheduler_flush_cache(loop->scheduler);
        loop->flushes++;
    }
    loop->orders_done = orders;
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    pthread_cond_broadcast(&loop->done);
    pthread_mutex_unlock(&loop->lock);
}

static void *loop_main(void *arg) {
    hr_loop *loop = arg;
    hr_loop_turn turn;
    do {
        turn = take_turn(loop);
        while (turn.inbox != NULL) {
            hr_request *r = turn.inbox;
            turn.inbox = r->next;
            hr_scheduler_add(loop->scheduler, r);
        }
        if (turn.reap)
            hr_scheduler_reap(loop->scheduler);
        if (turn.retract)
            hr_scheduler_retract_all(loop->scheduler);
        for (uint32_t i = 0; i < turn.n_gone; i++)
            hr_scheduler_forget_adapter(loop->scheduler, turn.gone[i]);
        if (hr_scheduler_is_outdated(loop->scheduler))
            hr_scheduler_renew_waiting(loop->scheduler);
        if (turn.change) {
            make_changes(loop);
            turn.step = turn.step && !is_held(loop);
        }
        if (turn.flush || turn.orders != loop->orders_done)
            report_orders(loop, turn.orders);
        if (turn.step && turn.fail)
            fail_requests(loop);
        else if (turn.step && hr_scheduler_has_work(loop->scheduler))
            hr_scheduler_step(loop->scheduler);
    } while (!turn.quit);
    return NULL;
}

/* Called by the store, on any thread, the scheduler's too. */
static void adapter_gone(void *self, uint64_t id) {
    hr_loop *loop = self;
    pthread_mutex_lock(&loop->lock);
    if (loop->n_gone < MAX_GONE)
        loop->gone[loop->n_gone++] = id;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

/* ---- life ---- */

static size_t bucket_count(const hr_loop_config *config) {
    size_t n = 64;
    while (n < (size_t)config->max_queued + config->scheduler.max_running)
        n *= 2;
    return n;
}

static uint64_t first_seed(const hr_clock *clock) {
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed)
        seed = hr_sampler_mix(hr_now_ns(clock));
    return seed;
}

hr_status hr_loop_create(const hr_loop_config *config, hr_loop **out, hr_error *err) {
    const hr_alloc *alloc = &config->scheduler.alloc;
    hr_loop *loop = hr_alloc_array(alloc, 1, sizeof *loop);
    if (loop == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the scheduler thread");
    loop->c = *config;
    loop->c.scheduler.finish = end_request;
    loop->c.scheduler.finish_self = loop;
    loop->seeds = first_seed(&config->scheduler.clock);
    loop->n_buckets = bucket_count(config);
    hr_status status = HR_OK;
    loop->rids = hr_alloc_array(alloc, loop->n_buckets, sizeof(hr_request *));
    if (loop->rids == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a queue of %u requests",
                         config->max_queued);
        goto free_loop;
    }
    loop->c.scheduler.store = config->store;
    status = hr_scheduler_create(&loop->c.scheduler, &loop->scheduler, err);
    if (status != HR_OK)
        goto free_rids;
    memcpy(loop->weight_version, config->scheduler.weight_version,
           strlen(config->scheduler.weight_version) + 1);
    pthread_mutex_init(&loop->lock, NULL);
    pthread_cond_init(&loop->work, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&loop->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int rc = pthread_create(&loop->thread, NULL, loop_main, loop);
    if (rc != 0) {
        status =
            hr_fail(err, HR_ERR_NO_MEMORY, "cannot start the scheduler thread: %s", strerror(rc));
        goto free_scheduler;
    }
    pthread_setname_np(loop->thread, "hr-scheduler");
    hr_adapter_store_watch(config->store, adapter_gone, loop);
    *out = loop;
    return HR_OK;

free_scheduler:
    pthread_cond_destroy(&loop->done);
    pthread_cond_destroy(&loop->work);
    pthread_mutex_destroy(&loop->lock);
    hr_scheduler_destroy(loop->scheduler);
free_rids:
    hr_alloc_free(alloc, loop->rids);
free_loop:
    hr_alloc_free(alloc, loop);
    return status;
}

void hr_loop_destroy(hr_loop *loop) {
    if (loop == NULL)
        return;
    hr_loop_drain(loop, 0);
    pthread_mutex_lock(&loop->lock);
    loop->quit = true;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
    pthread_join(loop->thread, NULL);
    hr_adapter_store_watch(loop->c.store, NULL, NULL);
    pthread_cond_destroy(&loop->done);
    pthread_cond_destroy(&loop->work);
    pthread_mutex_destroy(&loop->lock);
    hr_scheduler_destroy(loop->scheduler);
    hr_alloc alloc = loop->c.scheduler.alloc;
    hr_alloc_free(&alloc, loop->rids);
    hr_alloc_free(&alloc, loop);
}

/* ---- submit ---- */

static bool names_adapter(const hr_request_params *params) {
    return params->lora_name != NULL && params->lora_name[0] != '\0';
}

/* Inside the lock: may one more request come in? */
static hr_status check_door(hr_loop *loop, const char *rid, hr_error *err) {
    if (loop->stopping)
        return hr_fail(err, HR_ERR_STOPPING, "the engine is stopping and takes no new requests");
    if (loop->unservable[0] != '\0')
        return hr_fail(err, HR_ERR_UNSERVABLE, "%s", loop->unservable);
    uint32_t queued = loop->live - loop->scheduled.running;
    if (queued >= loop->c.max_queued)
        return hr_fail(
            err, HR_ERR_BUSY,
            "the queue is full (%u requests wait, --max-queued-requests %u); retry later", queued,
            loop->c.max_queued);
    if (rid_find(loop, rid) != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "rid '%.200s' belongs to a request that is still running", rid);
    return HR_OK;
}

static void accept_request(hr_loop *loop, hr_request *r) {
    rid_insert(loop, r);
    loop->live++;
    loop->unfinished++;
    loop->started++;
    *(loop->inbox_tail != NULL ? &loop->inbox_tail->next : &loop->inbox_head) = r;
    loop->inbox_tail = r;
    pthread_cond_signal(&loop->work);
}

static uint64_t next_seed(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    uint64_t seed = hr_sampler_mix(loop->seeds++);
    pthread_mutex_unlock(&loop->lock);
    return seed;
}

hr_status hr_loop_submit(hr_loop *loop, const hr_request_params *params, hr_error *err) {
    hr_adapter_store *store = loop->c.store;
    const hr_alloc *alloc = &loop->c.scheduler.alloc;
    hr_request *r = NULL;
    hr_adapter_lease lease = {0};
    uint64_t now = hr_now_ns(&loop->c.scheduler.clock);
    HR_TRY(hr_request_create(params, &loop->c.scheduler.limits, next_seed(loop), alloc, &r, err));
    r->submit_ns = now;
    hr_status status = HR_OK;
    if (names_adapter(params))
        status = hr_adapter_store_acquire(store, params->lora_name, &lease, err);
    if (status != HR_OK)
        goto refuse;
    hr_request_set_adapter(r, lease);

    pthread_mutex_lock(&loop->lock);
    status = check_door(loop, r->rid, err);
    if (status == HR_OK)
        accept_request(loop, r);
    pthread_mutex_unlock(&loop->lock);
    if (status == HR_OK)
        return HR_OK;

refuse:
    hr_adapter_store_release(store, &r->lease);
    hr_request_destroy(r, alloc);
    return status;
}

hr_status hr_loop_check(hr_loop *loop, const hr_request_params *params, hr_error *err) {
    HR_TRY(hr_request_check(params, &loop->c.scheduler.limits, err));
    if (names_adapter(params))
        HR_TRY(hr_adapter_store_check(loop->c.store, params->lora_name, err));
    pthread_mutex_lock(&loop->lock);
    hr_status status = check_door(loop, params->rid, err);
    pthread_mutex_unlock(&loop->lock);
    return status;
}

/* ---- ending from outside ---- */

/* Inside the lock. The first reason stays. */
static void ask_ending(hr_loop *loop, hr_request *r, int ending) {
    int none = HR_ENDING_NOT;
    atomic_compare_exchange_strong(&r->ending, &none, ending);
    loop->reap = true;
    pthread_cond_signal(&loop->work);
}

static void ask_ending_of_all(hr_loop *loop, int ending) {
    for (size_t b = 0; b < loop->n_buckets; b++)
        for (hr_request *r = loop->rids[b]; r != NULL; r = r->rid_next)
            ask_ending(loop, r, ending);
}

bool hr_loop_abort(hr_loop *loop, const char *rid) {
    pthread_mutex_lock(&loop->lock);
    hr_request *r = rid_find(loop, rid);
    if (r != NULL)
        ask_ending(loop, r, HR_ENDING_ABORT);
    pthread_mutex_unlock(&loop->lock);
    return r != NULL;
}

void hr_loop_abort_all(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    ask_ending_of_all(loop, HR_ENDING_ABORT);
    pthread_mutex_unlock(&loop->lock);
}

/* ---- waiting: every wait has a deadline ---- */

static struct timespec after_ms(uint64_t ms) {
    const uint64_t most_ms = 366ull * 86400 * 1000; /* keeps the sum below in range */
    ms = ms < most_ms ? ms : most_ms;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(ms / 1000);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    return until;
}

/* Inside the lock: waits for the next change; false when the deadline has passed. */
static bool wait_done(hr_loop *loop, const struct timespec *until) {
    return pthread_cond_timedwait(&loop->done, &loop->lock, until) != ETIMEDOUT;
}

/* Inside the lock: waits until no request is unfinished, at most ms; false when some are left. */
static bool wait_idle(hr_loop *loop, uint64_t ms) {
    struct timespec until = after_ms(ms);
    while (loop->unfinished > 0)
        if (!wait_done(loop, &until))
            return loop->unfinished == 0;
    return true;
}

/* What is frozen by a pause cannot finish, so a paused loop does not wait for it. */
void hr_loop_drain(hr_loop *loop, uint64_t drain_ms) {
    pthread_mutex_lock(&loop->lock);
    loop->stopping = true;
    if (!wait_idle(loop, is_frozen(loop) ? 0 : drain_ms)) {
        ask_ending_of_all(loop, HR_ENDING_STOP);
        while (!wait_idle(loop, 10000))
            hr_log(HR_LOG_WARN,
                   "stopping: waiting for the scheduler's step to end, %u requests left",
                   loop->unfinished);
    }
    pthread_mutex_unlock(&loop->lock);
}

/* ---- control ---- */

/* Inside the lock: has the thread look at the orders; returns what orders_done must reach. */
static uint64_t give_order(hr_loop *loop) {
    pthread_cond_signal(&loop->work);
    return ++loop->orders;
}

static hr_status wait_order(hr_loop *loop, uint64_t order, uint64_t timeout_ms, hr_error *err) {
    struct timespec until = after_ms(timeout_ms);
    while (loop->orders_done < order)
        if (!wait_done(loop, &until) && loop->orders_done < order)
            return hr_fail(err, HR_ERR_TIMEOUT,
                           "the scheduler's step did not end within %llu ms (%u requests run)",
                           (unsigned long long)timeout_ms, loop->scheduled.running);
    return HR_OK;
}

hr_status hr_loop_pause(hr_loop *loop, hr_pause_mode mode, uint64_t timeout_ms, hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&loop->lock);
    if (loop->stopping) {
        status = hr_fail(err, HR_ERR_STOPPING, "the engine is stopping and cannot be paused");
    } else {
        loop->paused = true;
        loop->retract |= mode == HR_PAUSE_RETRACT;
        if (mode == HR_PAUSE_ABORT)
            ask_ending_of_all(loop, HR_ENDING_ABORT);
        status = wait_order(loop, give_order(loop), timeout_ms, err);
    }
    pthread_mutex_unlock(&loop->lock);
    return status;
}

void hr_loop_continue(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    loop->paused = false;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

hr_status hr_loop_flush_cache(hr_loop *loop, uint64_t timeout_ms, hr_error *err) {
    hr_status status = HR_OK;
    struct timespec until = after_ms(timeout_ms);
    pthread_mutex_lock(&loop->lock);
    loop->flush_callers++;
    uint64_t before = loop->flushes, order = give_order(loop);
    bool in_time = true;
    while (loop->flushes == before && in_time)
        in_time = wait_done(loop, &until);
    if (loop->flushes == before) /* a timeout of 0 too is for requests, not for the thread */
        status = wait_order(loop, order, HR_LOOP_STEP_MS, err);
    loop->flush_callers--;
    if (status == HR_OK && loop->flushes == before)
        status =
            hr_fail(err, HR_ERR_BUSY, "the cache is not flushed: %u requests run and %u wait%s",
                    loop->scheduled.running, loop->live - loop->scheduled.running,
                    loop->paused ? " while generation is paused in place; pause with mode "
                                   "retract or abort"
                                 : "; wait for them, abort them or pause");
    pthread_mutex_unlock(&loop->lock);
    return status;
}

/* ---- changes ---- */

/* Inside the lock. */
static void append_change(hr_loop *loop, pending_change *pending) {
    pending_change **end = &loop->changes;
    while (*end != NULL)
        end = &(*end)->next;
    *end = pending;
}

static void drop_change(hr_loop *loop, const pending_change *pending) {
    pending_change **link = &loop->changes;
    while (*link != pending)
        link = &(*link)->next;
    *link = pending->next;
    pthread_cond_signal(&loop->work);
}

/* Inside the lock: whether it was made; what has begun is waited for. */
static bool wait_change(hr_loop *loop, const pending_change *pending, uint64_t timeout_ms) {
    struct timespec until = after_ms(timeout_ms), step = after_ms(HR_LOOP_STEP_MS);
    uint64_t order = give_order(loop);
    bool in_time = true, step_in_time = true;
    while (!pending->made && in_time)
        in_time = wait_done(loop, &until);
    while (!pending->made && loop->orders_done < order && step_in_time)
        step_in_time = wait_done(loop, &step);
    while (!pending->made && pending->begun)
        pthread_cond_wait(&loop->done, &loop->lock); /* apply does not block */
    return pending->made;
}

hr_status hr_loop_change_apply(hr_loop *loop, const hr_loop_change *change, hr_error *err) {
    const hr_alloc *alloc = &loop->c.scheduler.alloc;
    pending_change pending = {.change = change};
    hr_status status = HR_OK;
    if (change->weight_version != NULL)
        HR_TRY(hr_version_label_create(change->weight_version, alloc, &pending.label, err));
    pthread_mutex_lock(&loop->lock);
    if (loop->stopping) {
        status = hr_fail(err, HR_ERR_STOPPING, "the engine is stopping; nothing was changed");
    } else {
        if (change->abort_all_requests)
            ask_ending_of_all(loop, HR_ENDING_ABORT);
        append_change(loop, &pending);
        if (!wait_change(loop, &pending, change->timeout_ms)) {
            drop_change(loop, &pending);
            status = hr_fail(err, HR_ERR_TIMEOUT,
                             "%u requests still ran after %llu ms; nothing was changed: wait "
                             "longer, abort them, or pause generation",
                             loop->scheduled.running, (unsigned long long)change->timeout_ms);
        }
    }
    pthread_mutex_unlock(&loop->lock);
    if (status != HR_OK)
        hr_version_label_release(pending.label, alloc);
    return status;
}

void hr_loop_resume(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    HR_ASSERT(loop->holds > 0);
    loop->holds--;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_set_unservable(hr_loop *loop, const char *reason) {
    pthread_mutex_lock(&loop->lock);
    snprintf(loop->unservable, sizeof loop->unservable, "%s", reason != NULL ? reason : "");
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_renew_waiting(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_weight_version(hr_loop *loop, char *out, size_t size) {
    pthread_mutex_lock(&loop->lock);
    if (size > 0)
        snprintf(out, size, "%s", loop->weight_version);
    pthread_mutex_unlock(&loop->lock);
}

/* ---- counters ---- */

void hr_loop_stats_get(hr_loop *loop, hr_engine_stats *out) {
    hr_adapter_store_stats store;
    hr_adapter_store_stats_get(loop->c.store, &store);
    pthread_mutex_lock(&loop->lock);
    const hr_scheduler_stats *s = &loop->scheduled;
    *out = (hr_engine_stats){
        .running = s->running,
        .queued = loop->live - s->running,
        .paused = loop->paused,
        .kv_pages_cached = s->kv_pages_cached,
        .cached_prompt_tokens = s->cached_prompt_tokens,
        .leases = store.leases_acquired - store.leases_released,
        .leases_acquired = store.leases_acquired,
        .leases_released = store.leases_released,
        .kv_pages = s->kv_pages,
        .kv_pages_free = s->kv_pages_free,
        .requests_started = loop->started,
        .requests_finished = loop->finished,
        .requests_aborted = loop->aborted,
        .prompt_tokens = s->prompt_tokens,
        .generated_tokens = s->generated_tokens,
        .steps = s->steps,
    };
    pthread_mutex_unlock(&loop->lock);
}
