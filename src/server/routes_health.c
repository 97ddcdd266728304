/* /health and /health_generate: is the process there, and does the engine still make progress. */
#include "base/clock.h"
#include "base/cond.h"
#include "server/call.h"
#include "server/reply.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PROBE_SECONDS 20
#define PROBE_TICK_MS 50

void hr_route_health(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_buf empty = {0};
    if (atomic_load(&server->draining))
        hr_reply_error(exchange, 503, "the server is stopping");
    else
        hr_exchange_reply(exchange, 200, &empty);
}

/* A request for one token. The one who waits and the engine share it; the last one frees it. */
typedef struct probe {
    pthread_mutex_t lock;
    pthread_cond_t done;
    unsigned users;
    bool finished;
    hr_finish_type how;
} probe;

static void let_go(probe *p) {
    pthread_mutex_lock(&p->lock);
    bool last = --p->users == 0;
    pthread_mutex_unlock(&p->lock);
    if (!last)
        return;
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    (void)ctx;
    (void)token;
    return HR_TOKEN_CONTINUE;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    probe *p = ctx;
    pthread_mutex_lock(&p->lock);
    p->finished = true;
    p->how = finish->type;
    pthread_cond_signal(&p->done);
    pthread_mutex_unlock(&p->lock);
    let_go(p);
}

static probe *new_probe(void) {
    probe *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    p->users = 2;
    pthread_mutex_init(&p->lock, NULL);
    hr_cond_init(&p->done);
    return p;
}

/* Waits a tick; true when the request has finished. */
static bool wait_tick(probe *p) {
    struct timespec until = hr_cond_deadline(PROBE_TICK_MS);
    pthread_mutex_lock(&p->lock);
    if (!p->finished)
        pthread_cond_timedwait(&p->done, &p->lock, &until);
    bool finished = p->finished;
    pthread_mutex_unlock(&p->lock);
    return finished;
}

static hr_engine_stats stats_of(const hr_server *server) {
    hr_engine_stats stats;
    hr_engine_stats_get(server->options.engine, &stats);
    return stats;
}

/* Under load the probe stands in the queue with the others: any step is as good a sign of life. A
 * paused engine makes none and is well. */
static hr_status wait_for_life(hr_call *c, probe *p) {
    hr_clock clock = hr_clock_monotonic();
    hr_deadline deadline = hr_deadline_after_ms(&clock, PROBE_SECONDS * 1000);
    uint64_t steps = stats_of(c->server).steps;
    while (!hr_deadline_passed(&clock, deadline)) {
        if (p != NULL && wait_tick(p))
            return p->how == HR_FINISH_ERROR
                       ? hr_fail(&c->err, HR_ERR_BUSY, "the engine failed to make a token")
                       : HR_OK;
        hr_engine_stats now = stats_of(c->server);
        if (now.steps != steps || now.paused)
            return HR_OK;
        if (p == NULL)
            nanosleep(&(struct timespec){.tv_nsec = PROBE_TICK_MS * 1000000L}, NULL);
    }
    return hr_fail(&c->err, HR_ERR_BUSY, "the engine made no step in %d s", PROBE_SECONDS);
}

static const uint32_t prompt[] = {0};

static hr_request_params probe_params(probe *p, const char *rid) {
    hr_request_params params = {.rid = rid,
                                .input_ids = prompt,
                                .n_input_ids = 1,
                                .sampling = hr_sampling_params_default(),
                                .logprob_start_len = -1,
                                .ctx = p,
                                .on_token = on_token,
                                .on_finish = on_finish};
    params.sampling.max_new_tokens = 1;
    params.sampling.temperature = 0;
    return params;
}

static void run_probe(hr_call *c) {
    hr_engine *engine = c->server->options.engine;
    char rid[64];
    snprintf(rid, sizeof rid, "HEALTH_CHECK_%llu",
             (unsigned long long)atomic_fetch_add(&c->server->probes_made, 1));
    if (stats_of(c->server).paused) { /* makes no token and is well, if it could */
        hr_request_params asked = probe_params(NULL, rid);
        c->status = hr_engine_check(engine, &asked, &c->err);
        if (c->status == HR_ERR_BUSY) /* the queue is full, which a pause does in time */
            c->status = HR_OK;
        return;
    }
    probe *p = new_probe();
    if (p == NULL) {
        c->status = hr_fail(&c->err, HR_ERR_NO_MEMORY, "out of memory for the call");
        return;
    }
    hr_request_params params = probe_params(p, rid);
    c->status = hr_engine_submit(engine, &params, &c->err);
    if (c->status == HR_OK) {
        c->status = wait_for_life(c, p);
        hr_engine_abort(engine, rid);
    } else {
        let_go(p);                    /* the engine's share */
        if (c->status == HR_ERR_BUSY) /* the queue is full */
            c->status = wait_for_life(c, NULL);
    }
    let_go(p);
}

static void answer_probe(hr_exchange *exchange, hr_call *c) {
    hr_buf empty = {0};
    if (c->status == HR_OK)
        hr_exchange_reply(exchange, 200, &empty);
    else
        hr_reply_error(exchange, 503, c->err.message);
}

void hr_route_health_generate(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_call *c = hr_call_new(server, exchange);
    if (c == NULL)
        return;
    c->run = run_probe;
    c->answer = answer_probe;
    hr_call_start(c, server->checks);
}
