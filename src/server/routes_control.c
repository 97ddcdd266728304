/* Steering the engine: /pause_generation, /continue_generation, /flush_cache, /abort_request. */
#include "base/log.h"
#include "format/json.h"
#include "format/json_writer.h"
#include "server/call.h"
#include "server/generate_job.h"
#include "server/reply.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A step is far shorter, so this only ends a wait for what hangs. */
#define PAUSE_TIMEOUT_MS 60000
#define MAX_FLUSH_SECONDS 600

/* ---- pausing ---- */

static void reply_ok(hr_exchange *exchange, const char *message) {
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "message", message);
    hr_json_put_string(&w, "status", "ok");
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}

static const char *const mode_names[] = {
    [HR_PAUSE_ABORT] = "abort", [HR_PAUSE_RETRACT] = "retract", [HR_PAUSE_IN_PLACE] = "in_place"};

static void run_pause(hr_call *c) {
    c->status = hr_engine_pause(c->server->options.engine, c->mode, PAUSE_TIMEOUT_MS, &c->err);
}

static void answer_pause(hr_exchange *exchange, hr_call *c) {
    if (c->status == HR_OK) {
        hr_log(HR_LOG_INFO, "generation is paused (%s)", mode_names[c->mode]);
        reply_ok(exchange, "Generation paused successfully.");
    } else {
        hr_log_refusal(exchange, &c->err);
        hr_reply_failure(exchange, &c->err);
    }
}

static hr_status read_mode(const cJSON *body, hr_pause_mode *mode, hr_error *err) {
    const char *name = "abort";
    HR_TRY(hr_json_opt_string(body, "mode", &name, err));
    for (size_t i = 0; i < sizeof mode_names / sizeof mode_names[0]; i++) {
        if (strcmp(mode_names[i], name) != 0)
            continue;
        *mode = (hr_pause_mode)i;
        return HR_OK;
    }
    return hr_fail(err, HR_ERR_INVALID,
                   "mode: wanted \"abort\", \"retract\" or \"in_place\", came \"%.100s\"", name);
}

void hr_route_pause(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_call *c = hr_call_new(server, exchange);
    if (c == NULL)
        return;
    if (read_mode(c->body, &c->mode, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        hr_call_free(c);
        return;
    }
    /* What still waits for its adapter to be read is not in the engine yet. */
    if (c->mode == HR_PAUSE_ABORT)
        hr_jobs_abort(server, NULL, NULL);
    c->run = run_pause;
    c->answer = answer_pause;
    hr_call_start(c, server->pauses);
}

void hr_route_continue(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_call *c = hr_call_new(server, exchange);
    if (c == NULL)
        return;
    hr_call_free(c);
    hr_engine_continue(server->options.engine);
    hr_log(HR_LOG_INFO, "generation continues");
    reply_ok(exchange, "Generation continued successfully.");
}

/* ---- the prefix cache ---- */

static void run_flush(hr_call *c) {
    c->status = hr_engine_flush_cache(c->server->options.engine, c->timeout_ms, &c->err);
}

static void answer_flush(hr_exchange *exchange, hr_call *c) {
    hr_buf body = {0};
    hr_buf_printf(&body, "%s\n", c->status == HR_OK ? "Cache flushed." : c->err.message);
    hr_exchange_content_type(exchange, "text/plain; charset=utf-8");
    /* Clients try again on 400. */
    hr_exchange_reply(exchange, c->status == HR_ERR_BUSY ? 400 : hr_http_status_of(c->status),
                      &body);
}

static hr_status read_timeout(const hr_exchange *exchange, uint64_t *ms, hr_error *err) {
    const char *text = hr_exchange_query(exchange, "timeout");
    char *end = NULL;
    *ms = 0;
    if (text == NULL)
        return HR_OK;
    double seconds = strtod(text, &end);
    if (end == text || *end != '\0' || text[strspn(text, "0123456789.eE+-")] != '\0' ||
        !(seconds >= 0 && seconds <= MAX_FLUSH_SECONDS))
        return hr_fail(err, HR_ERR_INVALID, "timeout: wanted seconds from 0 to %d, came \"%.100s\"",
                       MAX_FLUSH_SECONDS, text);
    *ms = (uint64_t)ceil(seconds * 1000);
    return HR_OK;
}

void hr_route_flush_cache(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_call *c = hr_call_new(server, exchange);
    if (c == NULL)
        return;
    if (read_timeout(exchange, &c->timeout_ms, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        hr_call_free(c);
        return;
    }
    c->run = run_flush;
    c->answer = answer_flush;
    /* A flush that does not wait must not stand behind those that do. */
    hr_call_start(c, c->timeout_ms > 0 ? server->flush_waits : server->flushes);
}

/* ---- aborting ---- */

static hr_status abort_requests(hr_call *c, hr_error *err) {
    const char *rid = "", *message = NULL;
    bool all = false;
    HR_TRY(hr_json_opt_string(c->body, "rid", &rid, err));
    HR_TRY(hr_json_opt_bool(c->body, "abort_all", &all, err));
    HR_TRY(hr_json_opt_string(c->body, "abort_message", &message, err));
    if (all)
        hr_jobs_abort(c->server, NULL, message);
    else if (rid[0] != '\0')
        hr_jobs_abort(c->server, rid, message);
    return HR_OK;
}

void hr_route_abort(hr_exchange *exchange, void *app) {
    hr_error err;
    hr_buf empty = {0};
    hr_call *c = hr_call_new(app, exchange);
    if (c == NULL)
        return;
    if (abort_requests(c, &err) == HR_OK)
        hr_exchange_reply(exchange, 200, &empty);
    else
        hr_reply_failure(exchange, &err);
    hr_call_free(c);
}
