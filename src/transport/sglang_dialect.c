/* SGLang's forms: pickled tensors as base64 inside JSON.
 *
 * "sglang" speaks the generation with update sessions: buckets are flattened, adapters are stashed
 * by the engine and applied at end under a manifest of SHA-256; base tensors are written as they
 * come. "sglang-load" speaks the one before: an adapter is one load call, under the same name where
 * the engine takes an upsert, else unloaded and loaded. */
#include "format/json_writer.h"
#include "format/torch_write.h"
#include "transport/dialect.h"
#include "transport/sglang_body.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- payloads ---- */

/* The bucket's tensors pickled, made once for all engines; names lose their prefix when bare. */
static hr_status make_payload(hr_wire_bucket *bucket, hr_torch_form form, bool bare,
                              hr_error *err) {
    if (bucket->payload.len > 0)
        return HR_OK;
    hr_tensor *list = calloc(bucket->n + 1, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", bucket->n);
    for (size_t i = 0; i < bucket->n; i++) {
        list[i] = *bucket->tensors[i].tensor;
        const char *colon = bare ? strchr(list[i].name, ':') : NULL;
        if (colon != NULL)
            list[i].name = colon + 1;
    }
    hr_status status = hr_torch_payload_write(list, bucket->n, form, &bucket->payload, err);
    free(list);
    if (status != HR_OK)
        hr_buf_free(&bucket->payload);
    hr_wire_bucket_digest(bucket);
    return status;
}

/* The call that carries members and the payload. */
static bool post_payload(const hr_stage_request *r, hr_step *step, const char *path,
                         const hr_buf *members) {
    hr_sglang_body *body =
        members->failed ? NULL
                        : hr_sglang_body_make(members, &r->bucket->payload, step->engine->tp_size);
    if (body == NULL)
        return hr_step_fail(step, HR_ERR_NO_MEMORY, "no memory for a request");
    step->body_state = body;
    step->body = (hr_http_body){hr_sglang_body_size(body), hr_sglang_body_read, body};
    return hr_step_post(step, path);
}

static bool post_flattened(const hr_stage_request *r, hr_step *step) {
    hr_buf members = {0};
    step->status = make_payload(r->bucket, HR_TORCH_FLATTENED, false, &step->err);
    if (step->status != HR_OK)
        return false;
    hr_buf_puts(&members, "\"load_format\": \"flattened_bucket\", \"flush_cache\": false");
    bool go_on = post_payload(r, step, "/update_weights_from_tensor", &members);
    hr_buf_free(&members);
    return go_on;
}

static bool post_version(const hr_stage_request *r, hr_step *step) {
    hr_json_writer w;
    hr_json_writer_init(&w, &step->text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "new_version", r->weight_version);
    hr_json_put_bool(&w, "abort_all_requests", false); /* the engine's default is true */
    hr_json_object_end(&w);
    return hr_step_post(step, "/update_weight_version");
}

/* ---- with sessions ---- */

static bool post_register(const hr_stage_request *r, hr_step *step) {
    hr_json_writer w;
    hr_json_writer_init(&w, &step->text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "lora_name", r->registrations->name);
    hr_json_key(&w, "config_dict");
    hr_json_write_raw(&w, r->registrations->config, r->registrations->config_len);
    hr_json_put_bool(&w, "pinned", r->registrations->pinned);
    hr_json_object_end(&w);
    return hr_step_post(step, "/register_lora_adapter");
}

/* {adapter: {key: sha256}}; the manifest is sorted, so an adapter's names stand together. */
static void put_checksums(const hr_stage_request *r, hr_json_writer *w) {
    const char *open = NULL;
    size_t open_len = 0;
    hr_json_object_begin(w);
    for (size_t i = 0; i < r->n_manifest; i++) {
        const char *name = r->manifest[i].name, *colon = strchr(name, ':');
        if (colon == NULL)
            continue; /* base tensors are not in it */
        size_t len = (size_t)(colon - name);
        if (open == NULL || len != open_len || memcmp(open, name, len) != 0) {
            if (open != NULL)
                hr_json_object_end(w);
            char adapter[HR_LORA_NAME_SIZE];
            snprintf(adapter, sizeof adapter, "%.*s", (int)len, name);
            hr_json_key(w, adapter);
            hr_json_object_begin(w);
            open = name;
            open_len = len;
        }
        hr_json_put_string(w, colon + 1, r->manifest[i].sha256);
    }
    if (open != NULL)
        hr_json_object_end(w);
    hr_json_object_end(w);
}

static bool post_end(const hr_stage_request *r, hr_step *step) {
    hr_json_writer w;
    hr_json_writer_init(&w, &step->text);
    hr_json_object_begin(&w);
    if (r->stage == HR_STAGE_ABORT) {
        hr_json_put_bool(&w, "abort", true);
    } else if (r->n_adapters > 0) {
        hr_json_key(&w, "expected_lora_checksums");
        put_checksums(r, &w);
    }
    hr_json_object_end(&w);
    return hr_step_post(step, "/end_weight_update");
}

static bool next_session(const hr_stage_request *r, hr_step *step) {
    bool version_follows = r->stage == HR_STAGE_COMMIT && r->weight_version != NULL;
    if (step->number > 0)
        return step->number == 1 && step->status == HR_OK && version_follows ? post_version(r, step)
                                                                             : false;
    step->once = r->stage == HR_STAGE_BEGIN || r->stage == HR_STAGE_COMMIT;
    switch (r->stage) {
    case HR_STAGE_REGISTER:
        return post_register(r, step);
    case HR_STAGE_BEGIN:
        hr_buf_printf(&step->text, "{\"selector\": \"all\", \"sync_base\": %s}",
                      r->sync_base ? "true" : "false");
        return hr_step_post(step, "/begin_weight_update");
    case HR_STAGE_BUCKET:
        return post_flattened(r, step);
    case HR_STAGE_PREPARE:
        return false; /* the engine checks at end */
    case HR_STAGE_COMMIT:
    case HR_STAGE_ABORT:
        return post_end(r, step);
    default:
        return hr_step_control(r, step);
    }
}

/* ---- without ---- */

static const hr_push_adapter *adapter_of(const hr_stage_request *r) {
    const char *name = r->bucket->tensors[0].tensor->name, *colon = strchr(name, ':');
    for (size_t i = 0; colon != NULL && i < r->n_adapters; i++) {
        size_t len = strlen(r->adapters[i].name);
        if (len == (size_t)(colon - name) && memcmp(r->adapters[i].name, name, len) == 0)
            return &r->adapters[i];
    }
    return NULL;
}

static void put_expected(const hr_wire_bucket *bucket, hr_json_writer *w) {
    hr_json_key(w, "expected_checksums");
    hr_json_object_begin(w);
    for (size_t i = 0; i < bucket->n; i++) {
        const char *name = bucket->tensors[i].tensor->name, *colon = strchr(name, ':');
        hr_json_put_string(w, colon != NULL ? colon + 1 : name, bucket->tensors[i].sha256);
    }
    hr_json_object_end(w);
}

static bool post_load(const hr_stage_request *r, hr_step *step, const hr_push_adapter *adapter,
                      bool upsert) {
    hr_buf members = {0};
    hr_json_writer w;
    step->status = make_payload(r->bucket, HR_TORCH_DICT, true, &step->err);
    if (step->status != HR_OK)
        return false;
    hr_json_writer_init(&w, &members);
    hr_json_put_string(&w, "lora_name", adapter->name);
    hr_json_key(&w, "config_dict");
    hr_json_write_raw(&w, adapter->config, adapter->config_len);
    hr_json_put_bool(&w, "pinned", adapter->pinned);
    put_expected(r->bucket, &w);
    if (upsert)
        hr_json_put_bool(&w, "upsert", true);
    bool go_on = post_payload(r, step, "/load_lora_adapter_from_tensors", &members);
    hr_buf_free(&members);
    return go_on;
}

static bool post_unload(hr_step *step, const hr_push_adapter *adapter) {
    hr_json_writer w;
    hr_json_writer_init(&w, &step->text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "lora_name", adapter->name);
    hr_json_object_end(&w);
    return hr_step_post(step, "/unload_lora_adapter");
}

/* Upsert; where the engine knows none: unload (an unknown name is fine), then load. */
static bool next_load(const hr_stage_request *r, hr_step *step, const hr_push_adapter *adapter) {
    bool unknown = step->number == 2 && strstr(step->err.message, "not exist") != NULL;
    if (step->number == 0)
        return post_load(r, step, adapter, true);
    if (step->number == 1 && step->status != HR_OK && strstr(step->err.message, "psert") != NULL)
        return post_unload(step, adapter);
    if (step->number == 2 && (step->status == HR_OK || unknown))
        return post_load(r, step, adapter, false);
    step->untouched = step->number == 1 && step->status != HR_OK; /* an upsert keeps the old one */
    return false;
}

static bool next_plain(const hr_stage_request *r, hr_step *step) {
    switch (r->stage) {
    case HR_STAGE_BUCKET: {
        const hr_push_adapter *adapter = adapter_of(r);
        if (adapter != NULL)
            return next_load(r, step, adapter);
        return step->number == 0 ? post_flattened(r, step) : false;
    }
    case HR_STAGE_COMMIT:
        return step->number == 0 && r->weight_version != NULL ? post_version(r, step) : false;
    case HR_STAGE_REGISTER: /* registered with its load */
    case HR_STAGE_BEGIN:
    case HR_STAGE_PREPARE:
    case HR_STAGE_ABORT:
        return false;
    default:
        return hr_step_control(r, step);
    }
}

const hr_dialect hr_dialect_sglang = {
    .traits = {.name = "sglang",
               .carries_base = true,
               .carries_adapters = true,
               .sessions = true,
               .needs_sha256 = true,
               .register_once = true},
    .next = next_session,
};

const hr_dialect hr_dialect_sglang_load = {
    .traits = {.name = "sglang-load",
               .carries_base = true,
               .carries_adapters = true,
               .whole_adapters = true,
               .needs_sha256 = true},
    .next = next_plain,
};
