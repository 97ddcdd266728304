/* Weights coming in: by SGLang's pickles, as safetensors images, from a directory; and the version
 * alone. A bucket that comes while no session is open is a session of its own. */
#include "base/log.h"
#include "format/json.h"
#include "server/update_args.h"
#include "server/update_call.h"
#include "server/update_payload.h"
#include "server/update_request.h"

#include <stdio.h>
#include <string.h>

static hr_receiver *receiver_of(const hr_update_call *c) {
    return hr_engine_receiver(c->server->options.engine);
}

static bool session_is_open(const hr_update_call *c) {
    hr_receiver_status s;
    hr_receiver_status_get(receiver_of(c), &s);
    return s.state == HR_SESSION_OPEN || s.state == HR_SESSION_PREPARED;
}

/* A session that publishes new adapters beside running requests pauses nobody, so its buckets must
 * not ask for what would touch them. */
static hr_status check_staged(const hr_update_call *c, const hr_update_options *o, hr_error *err) {
    hr_receiver_status s;
    hr_receiver_status_get(receiver_of(c), &s);
    if (s.state != HR_SESSION_OPEN || s.sync_base || s.pending == 0)
        return HR_OK;
    const char *what = o->flush_cache              ? "flush_cache"
                       : o->abort_all_requests     ? "abort_all_requests"
                       : o->weight_version != NULL ? "weight_version"
                                                   : NULL;
    if (what == NULL)
        return HR_OK;
    return hr_fail(err, HR_ERR_SESSION,
                   "%s in a staged session: adapters that wait for publication (defer_publish) go "
                   "live beside running requests; send flush_cache false, abort_all_requests false "
                   "and no weight_version with its buckets",
                   what);
}

/* What a session has no place for in the middle: it would guard nothing. */
static hr_status check_in_session(const hr_update_call *c, const hr_update_options *o,
                                  hr_error *err) {
    const char *what = o->complete_base                                          ? "complete_base"
                       : o->audit                                                ? "audit"
                       : hr_json_get_present(c->args, "timeout_seconds") != NULL ? "timeout_seconds"
                                                                                 : NULL;
    if (what == NULL)
        return HR_OK;
    return hr_fail(err, HR_ERR_SESSION,
                   "%s beside a bucket of a session: send complete_base with its end, audit and "
                   "timeout_seconds with its begin and its end",
                   what);
}

static void put_bucket(hr_update_call *c, const hr_update_payload *payload,
                       const hr_update_options *o) {
    hr_json_put_u64(&c->w, "tensors", payload->n);
    hr_json_put_u64(&c->w, "bytes", payload->bytes);
    hr_json_put_bool(&c->w, "flush_cache", o->flush_cache);
    hr_json_put_bool(&c->w, "abort_all_requests", o->abort_all_requests);
}

/* Gives a payload to the receiver, which releases it: in the session that is open, or that the call
 * names; else as a session of its own. */
static hr_status give(hr_update_call *c, const hr_update_payload *payload,
                      const hr_update_options *o, const hr_registration *registration,
                      const hr_manifest *manifest, const char *adapter, bool in_session,
                      hr_error *err) {
    hr_bucket bucket = {.adapter = adapter,
                        .session_id = o->session_id,
                        .stream = o->stream,
                        .index = o->index,
                        .weight_version = o->weight_version,
                        .flush_cache = o->flush_cache,
                        .abort_all_requests = o->abort_all_requests};
    hr_end_options end = {.manifest = manifest,
                          .complete_base = o->complete_base,
                          .audit = o->audit,
                          .timeout_ms = o->timeout_ms};
    hr_update_payload_fill(payload, &bucket);
    put_bucket(c, payload, o); /* the payload is gone afterwards */
    hr_json_put_string(&c->w, "session", in_session ? "open" : "own");
    if (in_session)
        return hr_receiver_bucket(receiver_of(c), &bucket, err);
    return hr_receiver_apply(receiver_of(c), registration, &bucket, &end, &c->receipt, err);
}

/* stamped: the version that came into force with it; NULL: none. */
static void say_success(hr_update_call *c, const char *what, const char *stamped) {
    snprintf(c->message, sizeof c->message, "%s%s%s%s", what,
             stamped != NULL ? " Weight version updated to " : "", stamped != NULL ? stamped : "",
             stamped != NULL ? "." : "");
}

/* The session that this bucket was for must not end as if it had come. */
static hr_status refuse_bucket(const hr_update_call *c, const hr_update_options *o,
                               const hr_error *cause, hr_error *err) {
    hr_bucket bucket = {.session_id = o->session_id, .stream = o->stream, .index = o->index};
    hr_receiver_bucket_unread(receiver_of(c), &bucket, cause);
    *err = *cause;
    return cause->status;
}

/* ---- SGLang's pickles ---- */

static hr_status read_tensors(hr_update_call *c, const hr_update_options *o, bool in_session,
                              hr_update_payload *payload, hr_error *err) {
    bool flattened = false;
    if (in_session)
        HR_TRY(check_in_session(c, o, err));
    HR_TRY(hr_update_load_format_read(c->args, &flattened, err));
    HR_TRY(check_staged(c, o, err));
    return hr_update_payload_decode_list(c->args, "serialized_named_tensors", flattened, payload,
                                         err);
}

static hr_status run_tensor(hr_update_call *c, hr_error *err) {
    hr_update_options o;
    hr_update_payload payload;
    hr_error cause;
    HR_TRY(hr_update_options_read(c->args, true, &o, err));
    bool in_session = o.session_id != NULL || session_is_open(c);
    if (read_tensors(c, &o, in_session, &payload, &cause) != HR_OK)
        return refuse_bucket(c, &o, &cause, err);
    HR_TRY(give(c, &payload, &o, NULL, NULL, NULL, in_session, err));
    say_success(c, "Success", in_session ? NULL : o.weight_version);
    return HR_OK;
}

void hr_route_update_from_tensor(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"serialized_named_tensors",
                                       "load_format",
                                       "flush_cache",
                                       "abort_all_requests",
                                       "weight_version",
                                       "selector",
                                       "session_id",
                                       "stream",
                                       "index",
                                       "complete_base",
                                       "audit",
                                       "timeout_seconds",
                                       NULL};
    static const hr_update_route route = {.keys = keys, .pickles = true, .run = run_tensor};
    hr_update_call_start(app, exchange, &route);
}

/* One string for all ranks, or a list with one for each. */
static hr_status decode_adapter(hr_update_call *c, bool flattened, hr_update_payload *out,
                                hr_error *err) {
    cJSON *one = hr_json_get_present(c->args, "serialized_tensors");
    const cJSON *each = hr_json_get_present(c->args, "serialized_named_tensors");
    if ((one == NULL) == (each == NULL))
        return hr_fail(err, HR_ERR_INVALID,
                       "send serialized_tensors (one string for all ranks) or "
                       "serialized_named_tensors (a list, one for each rank): came %s",
                       one == NULL ? "neither" : "both");
    if (one != NULL)
        return hr_update_payload_decode(one, "serialized_tensors", flattened, out, err);
    return hr_update_payload_decode_list(c->args, "serialized_named_tensors", flattened, out, err);
}

static hr_status load_tensors(hr_update_call *c, hr_update_registration *r,
                              const hr_update_options *o, hr_error *err) {
    hr_update_manifest manifest = {0};
    hr_update_payload payload;
    bool flattened = false, upsert = false;
    HR_TRY(hr_args_bool(c->args, "upsert", &upsert, err));
    HR_TRY(hr_update_load_format_read(c->args, &flattened, err));
    r->registration.refuse_existing = !upsert;
    hr_status status =
        hr_update_manifest_read_adapter(c->args, r->registration.name, &manifest, err);
    if (status == HR_OK)
        status = decode_adapter(c, flattened, &payload, err);
    if (status == HR_OK)
        status = give(c, &payload, o, &r->registration, manifest.manifest, r->registration.name,
                      false, err);
    hr_json_put_bool(&c->w, "upsert", upsert);
    hr_json_put_bool(&c->w, "checksums_verified", manifest.manifest != NULL);
    hr_update_manifest_free(&manifest);
    return status;
}

static hr_status run_load_tensors(hr_update_call *c, hr_error *err) {
    hr_update_registration r = {0};
    hr_update_options o;
    uint32_t vocab = hr_engine_info_of(c->server->options.engine)->vocab_size;
    HR_TRY(hr_update_options_read(c->args, false, &o, err));
    hr_status status = hr_update_registration_read(c->args, vocab, true, &r, err);
    if (status == HR_OK)
        status = hr_app_check_adapter_name(c->server, r.registration.name, err);
    if (status == HR_OK)
        status = load_tensors(c, &r, &o, err);
    hr_update_registration_free(&r);
    return status;
}

void hr_route_load_adapter_from_tensors(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"lora_name",
                                       "config_dict",
                                       "serialized_tensors",
                                       "serialized_named_tensors",
                                       "pinned",
                                       "added_tokens_config",
                                       "load_format",
                                       "expected_checksums",
                                       "upsert",
                                       "audit",
                                       "timeout_seconds",
                                       NULL};
    static const hr_update_route route = {
        .keys = keys, .shape = HR_UPDATE_ADAPTERS, .pickles = true, .run = run_load_tensors};
    hr_update_call_start(app, exchange, &route);
}

/* ---- safetensors images ---- */

/* Without a config in this call the one registered before holds. */
static hr_status check_upsert(hr_update_call *c, hr_update_registration *r, bool upsert,
                              hr_error *err) {
    const char *name = r->registration.name;
    r->registration.refuse_existing = !upsert;
    if (upsert || r->config != NULL ||
        hr_engine_adapter_state(c->server->options.engine, name) != HR_ADAPTER_LOADED)
        return HR_OK;
    return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                   "LoRA adapter %s is already loaded; send upsert=true to replace it", name);
}

static hr_status read_image(hr_update_call *c, hr_update_registration *r,
                            const hr_update_options *o, bool in_session, bool *upsert,
                            hr_update_payload *payload, hr_error *err) {
    if (in_session)
        HR_TRY(check_in_session(c, o, err));
    HR_TRY(check_staged(c, o, err));
    HR_TRY(hr_args_bool(c->args, "upsert", upsert, err));
    if (r->config == NULL && r->registration.pinned)
        return hr_fail(err, HR_ERR_INVALID,
                       "pinned: only with the adapter's config (X-Lora-Config), or when it is "
                       "registered");
    if (!*upsert && r->registration.name == NULL)
        return hr_fail(err, HR_ERR_INVALID, "upsert false: of which adapter? Name it by lora_name");
    if (in_session && r->config != NULL)
        return hr_fail(err, HR_ERR_SESSION,
                       "an adapter config beside a bucket of a session: register the adapter "
                       "before, by /register_lora_adapter");
    if (r->registration.name != NULL)
        HR_TRY(check_upsert(c, r, *upsert, err));
    return hr_update_payload_image(&c->body, payload, err);
}

/* A whole adapter as PEFT saved it, or a bucket with names of its own. */
static hr_status take_image(hr_update_call *c, hr_update_registration *r, hr_error *err) {
    hr_update_options o;
    hr_update_payload payload;
    hr_error cause;
    bool upsert = true;
    const char *name = r->registration.name;
    HR_TRY(hr_update_options_read(c->args, false, &o, err));
    bool in_session = o.session_id != NULL || session_is_open(c);
    if (read_image(c, r, &o, in_session, &upsert, &payload, &cause) != HR_OK)
        return refuse_bucket(c, &o, &cause, err);
    const hr_registration *registration = r->config != NULL ? &r->registration : NULL;
    hr_status status = give(c, &payload, &o, registration, NULL, name, in_session, err);
    if (status == HR_ERR_ADAPTER_UNKNOWN && !in_session && name != NULL)
        return hr_fail_context(err, status,
                               "a new adapter needs its config: send its adapter_config.json in "
                               "the header X-Lora-Config of this call");
    HR_TRY(status);
    if (name != NULL)
        hr_json_put_bool(&c->w, "upsert", upsert);
    say_success(c, "Success", in_session ? NULL : o.weight_version);
    return HR_OK;
}

static hr_status run_safetensors(hr_update_call *c, hr_error *err) {
    hr_update_registration r = {0};
    hr_status status = HR_OK;
    uint32_t vocab = hr_engine_info_of(c->server->options.engine)->vocab_size;
    if (hr_json_get(c->args, "lora_name") != NULL)
        status = hr_update_registration_read(c->args, vocab, false, &r, err);
    else if (hr_json_get(c->args, "config_dict") != NULL || hr_json_get(c->args, "pinned") != NULL)
        status = hr_fail(err, HR_ERR_INVALID,
                         "X-Lora-Config, pinned: of which adapter? Name it by lora_name");
    if (status == HR_OK)
        status = hr_app_check_adapter_name(c->server, r.registration.name, err);
    if (status == HR_OK)
        status = take_image(c, &r, err);
    hr_update_registration_free(&r);
    return status;
}

void hr_route_update_from_safetensors(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"lora_name",
                                       "config_dict",
                                       "pinned",
                                       "session_id",
                                       "stream",
                                       "index",
                                       "weight_version",
                                       "flush_cache",
                                       "abort_all_requests",
                                       "upsert",
                                       "complete_base",
                                       "audit",
                                       "timeout_seconds",
                                       NULL};
    static const hr_update_route route = {.keys = keys, .image = true, .run = run_safetensors};
    hr_update_call_start(app, exchange, &route);
}

/* ---- a directory ---- */

static hr_status read_disk(const hr_update_call *c, const hr_update_options *o, hr_disk_update *out,
                           hr_error *err) {
    const char *format = "auto";
    *out = (hr_disk_update){.weight_version = o->weight_version,
                            .flush_cache = o->flush_cache,
                            .abort_all_requests = o->abort_all_requests,
                            .timeout_ms = o->timeout_ms};
    HR_TRY(hr_json_get_string(c->args, "model_path", &out->model_path, err));
    HR_TRY(hr_args_string(c->args, "load_format", &format, err));
    if (strcmp(format, "auto") != 0 && strcmp(format, "safetensors") != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "load_format: wanted null, \"auto\" or \"safetensors\", came \"%.100s\"",
                       format);
    if (hr_json_get_present(c->args, "manifest") != NULL)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "manifest is not read here: the directory must be whole by itself");
    return HR_OK;
}

static hr_status run_disk(hr_update_call *c, hr_error *err) {
    hr_engine *engine = c->server->options.engine;
    hr_update_options o;
    hr_disk_update update;
    hr_engine_stats stats;
    HR_TRY(hr_update_options_read(c->args, true, &o, err));
    HR_TRY(read_disk(c, &o, &update, err));
    hr_engine_stats_get(engine, &stats);
    HR_TRY(hr_engine_update_from_disk(engine, &update, &c->receipt, err));
    say_success(c, "Succeeded to update model weights.", o.weight_version);
    hr_json_put_u64(&c->w, "num_paused_requests", stats.paused ? stats.running + stats.queued : 0);
    hr_json_put_bool(&c->w, "flush_cache", o.flush_cache);
    hr_json_put_bool(&c->w, "abort_all_requests", o.abort_all_requests);
    return HR_OK;
}

void hr_route_update_from_disk(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"model_path",  "load_format",     "abort_all_requests",
                                       "flush_cache", "manifest",        "weight_version",
                                       "selector",    "timeout_seconds", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_disk};
    hr_update_call_start(app, exchange, &route);
}

/* ---- the version alone ---- */

static hr_status run_version(hr_update_call *c, hr_error *err) {
    const char *version = NULL;
    bool abort = true;
    HR_TRY(hr_json_get_string(c->args, "new_version", &version, err));
    HR_TRY(hr_args_bool(c->args, "abort_all_requests", &abort, err));
    HR_TRY(hr_receiver_set_version(receiver_of(c), version, abort, err));
    hr_log(HR_LOG_INFO, "weight version is %s", version);
    snprintf(c->message, sizeof c->message, "Weight version updated to %s", version);
    hr_json_put_string(&c->w, "new_version", version);
    hr_json_put_bool(&c->w, "abort_all_requests", abort);
    return HR_OK;
}

void hr_route_update_version(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"new_version", "abort_all_requests", NULL};
    static const hr_update_route route = {.keys = keys, .run = run_version};
    hr_update_call_start(app, exchange, &route);
}
