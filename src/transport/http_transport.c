/* The transport to engines that are reached by HTTP. */
#include "transport/http_transport.h"

#include "base/clock.h"
#include "format/json.h"
#include "transport/dialect.h"
#include "transport/reply.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TP_SIZE = 1024 };

/* One attempt: the calls of its engines. */
typedef struct round_of_calls {
    const hr_wire_bucket *bucket;
    uint32_t *engines;
    hr_step *steps;      /* by engine of the attempt */
    hr_http_call *calls; /* of those that have one to make, and whose they are */
    hr_step **turn;
    size_t n, active;
} round_of_calls;

typedef struct http_transport {
    const hr_dialect *dialect;
    hr_http_client *client;
    hr_endpoint *engines;
    size_t n_engines;
    round_of_calls ahead; /* a bucket that was begun before its turn; n = 0: none */
} http_transport;

/* From the richest to the plainest. */
static const hr_dialect *const dialects[] = {&hr_dialect_safetensors, &hr_dialect_sglang,
                                             &hr_dialect_sglang_load};
enum { N_DIALECTS = sizeof dialects / sizeof dialects[0] };

bool hr_http_transport_known(const char *name) {
    bool known = strcmp(name, "auto") == 0;
    for (size_t i = 0; i < N_DIALECTS; i++)
        known = known || strcmp(name, dialects[i]->traits.name) == 0;
    return known;
}

/* ---- what engines speak ---- */

static bool lists_route(const cJSON *info, const char *path) {
    const cJSON *route;
    cJSON_ArrayForEach(route, hr_json_get(info, "routes")) {
        const cJSON *text = hr_json_get(route, "path");
        if (cJSON_IsString(text) && strcmp(text->valuestring, path) == 0)
            return true;
    }
    return false;
}

/* One call to every engine, all at the same time. */
typedef struct probe_calls {
    hr_http_call *calls;
    char (*urls)[1024];
    size_t n;
} probe_calls;

static void probe_run(http_transport *t, probe_calls *p, const char *method, const char *path,
                      uint64_t timeout_ms) {
    for (size_t i = 0; i < p->n; i++) {
        hr_buf_free(&p->calls[i].reply);
        snprintf(p->urls[i], sizeof p->urls[i], "%s%s", t->engines[i].url, path);
        p->calls[i] = (hr_http_call){.method = method, .url = p->urls[i]};
    }
    hr_http_client_run(t->client, p->calls, p->n, timeout_ms, NULL);
}

static hr_status probe_fail(const hr_http_call *call, const char *url, hr_status status,
                            const char *why, hr_error *err) {
    if (status == HR_ERR_CANCELLED)
        return hr_fail(err, status, "cancelled while engine %s was asked what it speaks", url);
    if (call->status != HR_OK)
        return hr_fail(err, status,
                       "engine %s is not reachable: %.800s; is `headrace serve` running there?",
                       url, why);
    return hr_fail(err, status, "engine %s cannot be asked what it speaks: %.800s", url, why);
}

/* Whether the engine must be asked for SGLang's sessions: it does not list Headrace's. Only one
 * that is known to be another gets a form without verified sessions: SGLang tells its tp_size and
 * lists no routes. info NULL: it has no /server_info. */
static hr_status is_other(const cJSON *info, bool *other, hr_error *err) {
    *other = !lists_route(info, "/prepare_weight_update") ||
             !lists_route(info, "/update_weights_from_safetensors");
    if (*other && info != NULL && hr_json_get(info, "tp_size") == NULL)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "its /server_info shows neither Headrace's routes nor SGLang's tp_size; "
                       "choose a transport by name");
    return HR_OK;
}

static hr_status read_info(const hr_http_call *call, hr_endpoint *engine, cJSON **info,
                           hr_error *err) {
    *info = NULL;
    engine->tp_size = 1;
    if (call->status != HR_OK) {
        *err = call->err;
        return call->status;
    }
    if (call->http_status == 404)
        return HR_OK;
    hr_status status = hr_reply_of_call(call, info, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "/server_info");
    if (!cJSON_IsObject(*info))
        return hr_fail(err, HR_ERR_PEER, "/server_info: wanted a JSON object, came %.100s",
                       call->reply.len > 0 ? call->reply.data : "nothing");
    return hr_json_opt_u64(*info, "tp_size", 1, MAX_TP_SIZE, &engine->tp_size, err);
}

/* Whether every engine has Headrace's own sessions. The route needs the key that updates need, so
 * that one key is enough; /server_info may want another. */
static bool all_native(const hr_http_call *calls, size_t n) {
    bool native = true;
    for (size_t i = 0; i < n && native; i++) {
        cJSON *reply = NULL;
        native =
            calls[i].status == HR_OK && calls[i].http_status == 200 &&
            hr_reply_read(200, calls[i].reply.data, calls[i].reply.len, &reply, NULL) == HR_OK &&
            cJSON_IsString(hr_json_get(hr_json_get(reply, "session"), "state"));
        cJSON_Delete(reply);
    }
    return native;
}

/* What every engine tells of itself. others[i]: it does not list the sessions of Headrace. */
static hr_status read_infos(http_transport *t, probe_calls *p, bool choose, bool *others,
                            hr_error *err) {
    for (size_t i = 0; i < p->n; i++) {
        cJSON *info = NULL;
        hr_error local;
        others[i] = false;
        hr_status status = read_info(&p->calls[i], &t->engines[i], &info, &local);
        if (status == HR_OK && choose)
            status = is_other(info, &others[i], &local);
        cJSON_Delete(info);
        if (status != HR_OK)
            return probe_fail(&p->calls[i], t->engines[i].url, status, local.message, err);
    }
    return HR_OK;
}

/* The plainest form of those that the engines speak, as an index into dialects. A route that is
 * there answers another method with 405, one that is not with 404. */
static hr_status choose_form(http_transport *t, probe_calls *p, const bool *others,
                             uint64_t timeout_ms, size_t *chosen, hr_error *err) {
    probe_run(t, p, "OPTIONS", "/begin_weight_update", timeout_ms);
    for (size_t i = 0; i < p->n; i++) {
        const hr_http_call *call = &p->calls[i];
        if (!others[i])
            continue;
        if (call->status != HR_OK)
            return probe_fail(call, t->engines[i].url, call->status, call->err.message, err);
        size_t form = call->http_status != 404 ? 1 : 2;
        *chosen = form > *chosen ? form : *chosen;
    }
    return HR_OK;
}

/* An engine that let the time pass is not asked again. */
static hr_status check_in_time(const http_transport *t, const probe_calls *p, hr_error *err) {
    for (size_t i = 0; i < p->n; i++) {
        const hr_http_call *call = &p->calls[i];
        if (call->status == HR_ERR_TIMEOUT || call->status == HR_ERR_CANCELLED)
            return probe_fail(call, t->engines[i].url, call->status, call->err.message, err);
    }
    return HR_OK;
}

static hr_status probe_all(http_transport *t, probe_calls *p, const char *name, uint64_t timeout_ms,
                           bool *others, size_t *chosen, hr_error *err) {
    bool choose = strcmp(name, "auto") == 0, any = false;
    probe_run(t, p, "GET", "/weight_update_status", timeout_ms);
    if (all_native(p->calls, p->n) && (choose || strcmp(name, dialects[0]->traits.name) == 0))
        return HR_OK;
    HR_TRY(check_in_time(t, p, err));
    for (size_t d = 0; d < N_DIALECTS; d++) {
        if (strcmp(name, dialects[d]->traits.name) == 0)
            *chosen = d;
    }
    probe_run(t, p, "GET", "/server_info", timeout_ms);
    HR_TRY(read_infos(t, p, choose, others, err));
    for (size_t i = 0; i < p->n; i++)
        any = any || others[i];
    return any ? choose_form(t, p, others, timeout_ms, chosen, err) : HR_OK;
}

static hr_status probe(http_transport *t, const char *name, uint64_t timeout_ms, hr_error *err) {
    size_t chosen = 0, n = t->n_engines;
    probe_calls p = {
        .calls = calloc(n, sizeof *p.calls), .urls = calloc(n, sizeof *p.urls), .n = n};
    bool *others = calloc(n, sizeof *others);
    hr_status status = p.calls != NULL && p.urls != NULL && others != NULL
                           ? probe_all(t, &p, name, timeout_ms, others, &chosen, err)
                           : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
    if (status == HR_OK)
        t->dialect = dialects[chosen];
    for (size_t i = 0; p.calls != NULL && i < n; i++)
        hr_buf_free(&p.calls[i].reply);
    free(p.calls);
    free(p.urls);
    free(others);
    return status;
}

/* ---- one attempt ---- */

static void clear_step(hr_step *step) {
    hr_buf_clear(&step->path);
    hr_buf_clear(&step->text);
    free(step->body_state);
    step->body_state = NULL;
    step->body = (hr_http_body){0};
    step->content_type = NULL;
    step->once = false;
}

/* Of the last call that had one. One that cannot be understood is a refusal: a guard must be
 * acknowledged. */
static void take_receipt(hr_step *step, hr_stage_answer *answer) {
    const cJSON *object = hr_json_get_present(step->reply, "receipt");
    hr_engine_receipt receipt;
    hr_error err;
    if (object == NULL)
        return;
    hr_status status = hr_engine_receipt_read(object, &receipt, &err);
    if (status == HR_OK) {
        hr_engine_receipt_clear(&answer->receipt);
        answer->receipt = receipt;
        answer->has_receipt = true;
    } else if (step->status == HR_OK) {
        step->status = status;
        step->err = err;
    }
}

/* Something between answered for an engine that did not, and may have done it or not. */
static bool is_from_gateway(const hr_step *step) {
    return (step->http_status == 502 || step->http_status == 504) &&
           hr_json_get(step->reply, "status") == NULL;
}

static void read_answer(hr_step *step, const hr_http_call *call, hr_stage_answer *answer) {
    cJSON_Delete(step->reply);
    step->reply = NULL;
    step->number++;
    if (call->status != HR_OK) {
        answer->lost = call->status != HR_ERR_CANCELLED && call->status != HR_ERR_NO_MEMORY;
        step->status = call->status;
        step->err = call->err;
        return;
    }
    step->http_status = call->http_status;
    step->status = hr_reply_of_call(call, &step->reply, &step->err);
    bool cut_short = step->status == HR_ERR_PEER && step->reply == NULL;
    answer->lost = cut_short || is_from_gateway(step);
    answer->unservable = step->status == HR_ERR_UNSERVABLE;
    take_receipt(step, answer);
}

/* Asks the dialect for the next call; false when the stage is done for this engine. */
static bool prepare_call(const http_transport *t, const hr_stage_request *request, hr_step *step,
                         hr_http_call *call) {
    hr_stage_request own = *request;
    if (step->registration != NULL) {
        own.registrations = step->registration;
        own.n_registrations = 1;
    }
    clear_step(step);
    hr_buf_puts(&step->path, step->engine->url);
    if (!t->dialect->next(&own, step))
        return false;
    if (step->path.failed || step->text.failed)
        return hr_step_fail(step, HR_ERR_NO_MEMORY, "no memory for a request");
    call->method = "POST";
    call->url = step->path.data;
    call->content_type = step->content_type;
    call->body = step->body;
    call->once = step->once;
    call->text = step->body.read == NULL ? step->text.data : NULL;
    call->text_len = step->text.len;
    return true;
}

static bool round_open(http_transport *t, const hr_stage_request *request, const uint32_t *engines,
                       size_t n, round_of_calls *out) {
    round_of_calls r = {.bucket = request->bucket, .n = n};
    r.engines = calloc(n + 1, sizeof *r.engines);
    r.steps = calloc(n + 1, sizeof *r.steps);
    r.calls = calloc(n + 1, sizeof *r.calls);
    r.turn = calloc(n + 1, sizeof *r.turn);
    bool ready = r.engines != NULL && r.steps != NULL && r.calls != NULL && r.turn != NULL;
    for (size_t i = 0; ready && i < n; i++) {
        r.engines[i] = engines[i];
        r.steps[i].engine = &t->engines[engines[i]];
    }
    *out = r;
    return ready;
}

static void round_close(round_of_calls *r) {
    for (size_t i = 0; r->steps != NULL && i < r->n; i++) {
        clear_step(&r->steps[i]);
        hr_buf_free(&r->steps[i].path);
        hr_buf_free(&r->steps[i].text);
        cJSON_Delete(r->steps[i].reply);
    }
    for (size_t i = 0; r->calls != NULL && i < r->n; i++)
        hr_buf_free(&r->calls[i].reply);
    free(r->engines);
    free(r->steps);
    free(r->turn);
    free(r->calls);
    *r = (round_of_calls){0};
}

/* The next call of every engine that is not done. */
static void gather_calls(const http_transport *t, const hr_stage_request *request,
                         round_of_calls *r, const hr_stage_answer *answers) {
    r->active = 0;
    for (size_t i = 0; i < r->n; i++) {
        if ((answers == NULL || !answers[i].lost) &&
            prepare_call(t, request, &r->steps[i], &r->calls[r->active]))
            r->turn[r->active++] = &r->steps[i];
    }
}

/* ---- the bucket after this one ---- */

static void drop_ahead(http_transport *t) {
    hr_http_client_drop_ahead(t->client);
    round_close(&t->ahead);
}

typedef struct look_ahead {
    http_transport *t;
    const hr_stage_request *request;
    const round_of_calls *now;
} look_ahead;

/* Begins the next bucket, to the engines that this one goes to. Without memory it waits its turn.
 */
static void begin_ahead(void *ctx) {
    look_ahead *look = ctx;
    http_transport *t = look->t;
    hr_stage_request next = *look->request;
    next.index++;
    next.bucket = next.ahead(next.ahead_ctx);
    if (next.bucket == NULL || t->ahead.n > 0)
        return;
    bool ready = round_open(t, &next, look->now->engines, look->now->n, &t->ahead);
    if (ready)
        gather_calls(t, &next, &t->ahead, NULL);
    if (ready && t->ahead.active == t->ahead.n)
        hr_http_client_ahead(t->client, t->ahead.calls, t->ahead.n);
    else
        round_close(&t->ahead);
}

/* The calls that were begun ahead of this attempt, if it is theirs. */
static bool take_ahead(http_transport *t, const hr_stage_request *request, const uint32_t *engines,
                       size_t n, round_of_calls *out) {
    round_of_calls *ahead = &t->ahead;
    if (ahead->n == 0)
        return false;
    if (request->stage == HR_STAGE_BUCKET && request->bucket != ahead->bucket)
        return false; /* the one before, once more */
    if (request->stage != HR_STAGE_BUCKET || n != ahead->n ||
        memcmp(engines, ahead->engines, n * sizeof *engines) != 0) {
        drop_ahead(t);
        return false;
    }
    *out = *ahead;
    *ahead = (round_of_calls){0};
    return true;
}

/* Rounds of calls: in each, every engine that is not done makes its next one. */
static void run_steps(http_transport *t, const hr_stage_request *request, round_of_calls *r,
                      bool begun, hr_stage_answer *answers) {
    hr_clock clock = hr_clock_monotonic();
    hr_deadline deadline = hr_deadline_after_ms(&clock, request->timeout_ms);
    look_ahead look = {t, request, r};
    hr_http_meanwhile meanwhile = {begin_ahead, &look};
    bool looks = request->ahead != NULL && t->dialect->one_call_buckets;
    for (;; begun = false) {
        if (!begun)
            gather_calls(t, request, r, answers);
        if (r->active == 0)
            return;
        uint64_t now = hr_now_ns(&clock);
        uint64_t left_ms = now < deadline ? (deadline - now) / 1000000 + 1 : 1;
        hr_http_client_run(t->client, r->calls, r->active, left_ms, looks ? &meanwhile : NULL);
        for (size_t i = 0; i < r->active; i++)
            read_answer(r->turn[i], &r->calls[i], &answers[r->turn[i] - r->steps]);
    }
}

/* registrations: those of the steps, which come in this order for each engine; 0: none. */
static void attempt_steps(http_transport *t, const hr_stage_request *request,
                          const uint32_t *engines, size_t n, size_t registrations,
                          hr_stage_answer *answers) {
    round_of_calls r = {0};
    bool begun = take_ahead(t, request, engines, n, &r);
    bool ready = begun || round_open(t, request, engines, n, &r);
    for (size_t i = 0; i < n; i++) {
        answers[i] = (hr_stage_answer){0};
        if (!ready)
            answers[i].status = hr_fail(&answers[i].err, HR_ERR_NO_MEMORY, "no memory for a call");
    }
    for (size_t i = 0; ready && registrations > 0 && i < n; i++)
        r.steps[i].registration = &request->registrations[i % registrations];
    if (ready)
        run_steps(t, request, &r, begun, answers);
    for (size_t i = 0; ready && i < n; i++) {
        answers[i].status = r.steps[i].status;
        answers[i].untouched = r.steps[i].untouched && !answers[i].lost;
        answers[i].err = r.steps[i].err;
    }
    round_close(&r);
}

/* Of the registrations at one engine: the first that failed. */
static hr_stage_answer merge_answers(hr_stage_answer *answers, size_t n) {
    size_t first = 0;
    while (first + 1 < n && answers[first].status == HR_OK)
        first++;
    for (size_t i = 0; i < n; i++) {
        if (i != first)
            hr_engine_receipt_clear(&answers[i].receipt);
    }
    return answers[first];
}

/* Each registration is a call of its own, and all are made at the same time. */
static void attempt_registrations(http_transport *t, const hr_stage_request *request,
                                  const uint32_t *engines, size_t n, hr_stage_answer *answers) {
    size_t each = request->n_registrations;
    uint32_t *places = calloc(n * each + 1, sizeof *places);
    hr_stage_answer *parts = calloc(n * each + 1, sizeof *parts);
    bool ready = places != NULL && parts != NULL;
    for (size_t i = 0; ready && i < n * each; i++)
        places[i] = engines[i / each];
    if (ready)
        attempt_steps(t, request, places, n * each, each, parts);
    for (size_t i = 0; i < n; i++) {
        answers[i] = ready ? merge_answers(&parts[i * each], each) : (hr_stage_answer){0};
        if (!ready)
            answers[i].status = hr_fail(&answers[i].err, HR_ERR_NO_MEMORY, "no memory for a call");
    }
    free(places);
    free(parts);
}

static void attempt(void *self, const hr_stage_request *request, const uint32_t *engines, size_t n,
                    hr_stage_answer *answers) {
    if (request->stage == HR_STAGE_REGISTER)
        attempt_registrations(self, request, engines, n, answers);
    else
        attempt_steps(self, request, engines, n, 0, answers);
}

/* ---- life ---- */

static void close_transport(void *self) {
    http_transport *t = self;
    drop_ahead(t);
    for (size_t i = 0; t->engines != NULL && i < t->n_engines; i++)
        free(t->engines[i].url);
    free(t->engines);
    free(t);
}

hr_status hr_http_transport_open(hr_http_client *client, const char *const *urls, size_t n,
                                 const char *name, uint64_t timeout_ms, hr_transport *out,
                                 hr_error *err) {
    hr_status status = HR_OK;
    http_transport *t = calloc(1, sizeof *t);
    if (t == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a transport");
    t->client = client;
    t->engines = calloc(n, sizeof *t->engines);
    t->n_engines = n;
    for (size_t i = 0; i < n && status == HR_OK; i++) {
        if (t->engines != NULL)
            t->engines[i].url = strdup(urls[i]);
        if (t->engines == NULL || t->engines[i].url == NULL)
            status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
    }
    if (status == HR_OK)
        status = probe(t, name, timeout_ms, err);
    if (status != HR_OK) {
        close_transport(t);
        return status;
    }
    *out = (hr_transport){&t->dialect->traits, t, attempt, close_transport};
    return HR_OK;
}
