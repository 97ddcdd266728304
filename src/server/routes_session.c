/* Update sessions: registration, begin, end, prepare, commit, abort, and what is open now. */
#include "format/json.h"
#include "server/reply.h"
#include "server/update_args.h"
#include "server/update_call.h"
#include "server/update_request.h"

#include <stdio.h>
#include <string.h>

static hr_receiver *receiver_of(const hr_update_call *c) {
    return hr_engine_receiver(c->server->options.engine);
}

/* ---- registration ---- */

static hr_status run_register(hr_update_call *c, hr_error *err) {
    uint32_t vocab = hr_engine_info_of(c->server->options.engine)->vocab_size;
    hr_update_registration r;
    bool pending = false;
    hr_status status = hr_update_registration_read(c->args, vocab, true, &r, err);
    if (status == HR_OK)
        status = hr_app_check_adapter_name(c->server, r.registration.name, err);
    if (status == HR_OK)
        status = hr_receiver_register(receiver_of(c), &r.registration, &pending, err);
    if (status == HR_OK) {
        hr_json_put_bool(&c->w, "pending", pending);
        hr_json_put_bool(&c->w, "pinned", r.registration.pinned);
    }
    hr_update_registration_free(&r);
    return status;
}

void hr_route_register_adapter(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {
        "lora_name", "config_dict",   "config_digest",       "pinned",
        "lora_path", "defer_publish", "added_tokens_config", NULL};
    static const hr_update_route route = {
        .keys = keys, .shape = HR_UPDATE_ADAPTERS, .run = run_register};
    hr_update_call_start(app, exchange, &route);
}

/* ---- begin ---- */

static hr_status run_begin(hr_update_call *c, hr_error *err) {
    char id[HR_SESSION_ID_SIZE];
    hr_update_begin begin;
    hr_status status = hr_update_begin_read(c->args, &begin, err);
    if (status == HR_OK)
        status = hr_receiver_begin(receiver_of(c), &begin.session, id, err);
    if (status == HR_OK) {
        snprintf(c->message, sizeof c->message, "The weight-update session is open.");
        hr_json_put_string(&c->w, "session_id", id);
        hr_json_put_bool(&c->w, "sync_base", begin.session.sync_base);
        hr_json_put_string(&c->w, "base_mode", hr_engine_base_mode(c->server->options.engine));
    }
    hr_update_begin_free(&begin);
    return status;
}

void hr_route_begin_update(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"selector", "sync_base",       "session_id",
                                       "adapters", "new_lora_names",  "lease_seconds",
                                       "audit",    "timeout_seconds", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_begin};
    hr_update_call_start(app, exchange, &route);
}

/* ---- the end ---- */

static void put_options(hr_update_call *c, const hr_end_options *options) {
    hr_json_put_bool(&c->w, "checksums_verified", options->manifest != NULL);
    hr_json_put_bool(&c->w, "complete_base", options->complete_base);
    hr_json_put_bool(&c->w, "flush_cache", options->flush_cache);
    hr_json_put_bool(&c->w, "abort_all_requests", options->abort_all_requests);
}

typedef hr_status (*end_function)(hr_receiver *receiver, const hr_end_options *options,
                                  hr_receipt **receipt, hr_error *err);

static hr_status end_with(hr_update_call *c, end_function end, hr_error *err) {
    hr_update_options o;
    hr_update_manifest manifest = {0};
    hr_status status = hr_update_options_read(c->args, false, &o, err);
    if (status == HR_OK)
        status = hr_update_manifest_read(c->args, &manifest, err);
    if (status == HR_OK) {
        hr_end_options options = {.session_id = o.session_id,
                                  .manifest = manifest.manifest,
                                  .weight_version = o.weight_version,
                                  .complete_base = o.complete_base,
                                  .flush_cache = o.flush_cache,
                                  .abort_all_requests = o.abort_all_requests,
                                  .audit = o.audit,
                                  .timeout_ms = o.timeout_ms};
        status = end(receiver_of(c), &options, &c->receipt, err);
        put_options(c, &options);
    }
    hr_update_manifest_free(&manifest);
    return status;
}

static hr_status run_abort(hr_update_call *c, hr_error *err) {
    const char *id = NULL;
    hr_receiver_status before;
    HR_TRY(hr_args_string(c->args, "session_id", &id, err));
    hr_receiver_status_get(receiver_of(c), &before);
    HR_TRY(hr_receiver_abort(receiver_of(c), id, err));
    bool in_place = before.sync_base && before.tensors > 0 &&
                    strcmp(hr_engine_base_mode(c->server->options.engine), "in_place") == 0;
    snprintf(c->message, sizeof c->message, "The weight-update session was aborted; %s.",
             in_place ? "base tensors, if any came, were written in place, and requests are "
                        "refused until all base weights have come"
                      : "nothing has changed");
    hr_json_put_bool(&c->w, "aborted", true);
    return HR_OK;
}

static hr_status run_end(hr_update_call *c, hr_error *err) {
    bool abort = false;
    HR_TRY(hr_args_bool(c->args, "abort", &abort, err));
    if (abort)
        return run_abort(c, err);
    HR_TRY(end_with(c, hr_receiver_end, err));
    snprintf(c->message, sizeof c->message, "The weight-update session was published.");
    return HR_OK;
}

void hr_route_end_update(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"expected_lora_checksums",
                                       "abort",
                                       "session_id",
                                       "manifest",
                                       "covers_base",
                                       "complete_base",
                                       "audit",
                                       "weight_version",
                                       "flush_cache",
                                       "abort_all_requests",
                                       "selector",
                                       "timeout_seconds",
                                       NULL};
    static const hr_update_route route = {.keys = keys, .run = run_end};
    hr_update_call_start(app, exchange, &route);
}

static hr_status run_prepare(hr_update_call *c, hr_error *err) {
    HR_TRY(end_with(c, hr_receiver_prepare, err));
    snprintf(c->message, sizeof c->message,
             "Everything is checked and built; commit publishes it.");
    return HR_OK;
}

void hr_route_prepare_update(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {
        "session_id",         "manifest",        "expected_lora_checksums",
        "covers_base",        "complete_base",   "audit",
        "weight_version",     "flush_cache",     "selector",
        "abort_all_requests", "timeout_seconds", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_prepare};
    hr_update_call_start(app, exchange, &route);
}

static hr_status run_commit(hr_update_call *c, hr_error *err) {
    const char *id = NULL;
    HR_TRY(hr_json_get_string(c->args, "session_id", &id, err));
    HR_TRY(hr_receiver_commit(receiver_of(c), id, &c->receipt, err));
    snprintf(c->message, sizeof c->message, "The weight-update session was published.");
    return HR_OK;
}

void hr_route_commit_update(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"session_id", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_commit};
    hr_update_call_start(app, exchange, &route);
}

void hr_route_abort_update(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"session_id", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_abort};
    hr_update_call_start(app, exchange, &route);
}

/* ---- state ---- */

void hr_write_update_status(hr_engine *engine, hr_json_writer *w) {
    hr_receiver_status s;
    hr_receiver_status_get(hr_engine_receiver(engine), &s);
    hr_json_object_begin(w);
    hr_json_put_string(w, "state", hr_session_state_name(s.state));
    hr_json_put_string(w, "instance", s.instance);
    hr_json_put_string(w, "session_id", s.session_id);
    hr_json_put_bool(w, "sync_base", s.sync_base);
    hr_json_put_u64(w, "tensors", s.tensors);
    hr_json_put_u64(w, "bytes", s.bytes);
    hr_json_put_u64(w, "idle_ms", s.idle_ms);
    hr_json_put_u64(w, "lease_ms", s.lease_ms);
    hr_json_put_u64(w, "sessions_published", s.sessions_published);
    hr_json_put_u64(w, "sessions_rolled_back", s.sessions_rolled_back);
    hr_json_put_u64(w, "registered", s.registered);
    hr_json_put_u64(w, "pending", s.pending);
    hr_json_put_string(w, "base_mode", hr_engine_base_mode(engine));
    hr_json_object_end(w);
}

void hr_route_update_status(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    char version[HR_WEIGHT_VERSION_SIZE];
    hr_buf body = {0};
    hr_json_writer w;
    hr_engine_weight_version(server->options.engine, version, sizeof version);
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", true);
    hr_json_put_string(&w, "weight_version", version);
    hr_json_key(&w, "session");
    hr_write_update_status(server->options.engine, &w);
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}
