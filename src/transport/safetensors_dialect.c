/* The native form: buckets are safetensors images sent as they are, sessions have ids, a manifest
 * of XXH3-128, prepare and commit. */
#include "format/json.h"
#include "format/json_writer.h"
#include "transport/dialect.h"

static void put_register(const hr_stage_request *r, hr_json_writer *w) {
    uint8_t digest[HR_XXH3_SIZE];
    char hex[HR_XXH3_HEX];
    hr_xxh3(r->registrations->config, r->registrations->config_len, digest);
    hr_json_put_string(w, "lora_name", r->registrations->name);
    hr_json_key(w, "config_dict");
    hr_json_write_raw(w, r->registrations->config, r->registrations->config_len);
    hr_json_put_string(w, "config_digest", hr_xxh3_format(digest, hex));
    hr_json_put_bool(w, "pinned", r->registrations->pinned);
}

static void put_begin(const hr_stage_request *r, hr_json_writer *w) {
    hr_json_put_string(w, "session_id", r->session_id);
    hr_json_put_bool(w, "sync_base", r->sync_base);
    hr_json_key(w, "adapters");
    hr_json_array_begin(w);
    for (size_t i = 0; i < r->n_adapters; i++)
        hr_json_write_string(w, r->adapters[i].name);
    hr_json_array_end(w);
    if (r->audit)
        hr_json_put_bool(w, "audit", true); /* base bytes are gone when the receipt is made */
    if (r->lease_ms > 0)
        hr_json_put_f64(w, "lease_seconds", (double)r->lease_ms / 1e3);
    hr_json_put_f64(w, "timeout_seconds", (double)r->requests_ms / 1e3);
}

static void put_prepare(const hr_stage_request *r, hr_json_writer *w) {
    char hex[HR_XXH3_HEX];
    hr_json_put_string(w, "session_id", r->session_id);
    hr_json_key(w, "manifest");
    hr_json_object_begin(w);
    for (size_t i = 0; i < r->n_manifest; i++)
        hr_json_put_string(w, r->manifest[i].name, hr_xxh3_format(r->manifest[i].xxh3, hex));
    hr_json_object_end(w);
    hr_json_put_bool(w, "covers_base", true);
    hr_json_put_bool(w, "complete_base", r->complete_base);
    if (r->weight_version != NULL)
        hr_json_put_string(w, "weight_version", r->weight_version);
    hr_json_put_bool(w, "flush_cache", r->flush_cache);
    hr_json_put_bool(w, "audit", r->audit);
    hr_json_put_f64(w, "timeout_seconds", (double)r->requests_ms / 1e3);
}

static bool post_bucket(const hr_stage_request *r, hr_step *step) {
    hr_buf_puts(&step->path, "/update_weights_from_safetensors?session_id=");
    hr_query_append(&step->path, r->session_id);
    hr_buf_puts(&step->path, "&stream=");
    hr_query_append(&step->path, r->stream);
    hr_buf_printf(&step->path, "&index=%llu", (unsigned long long)r->index);
    step->content_type = "application/octet-stream";
    step->body = (hr_http_body){r->bucket->size, hr_wire_bucket_read, r->bucket};
    return true;
}

/* Success is what the engine says, not an HTTP status alone, which something between may make. */
static bool done(const hr_stage_request *r, hr_step *step) {
    bool control = r->stage == HR_STAGE_PAUSE || r->stage == HR_STAGE_CONTINUE;
    if (step->status == HR_OK && !control && !cJSON_IsTrue(hr_json_get(step->reply, "success")))
        return hr_step_fail(step, HR_ERR_PEER, "the answer does not say that it was done");
    return false;
}

static bool next(const hr_stage_request *r, hr_step *step) {
    static const struct {
        hr_stage stage;
        const char *path;
        void (*put)(const hr_stage_request *r, hr_json_writer *w);
    } calls[] = {
        {HR_STAGE_REGISTER, "/register_lora_adapter", put_register},
        {HR_STAGE_BEGIN, "/begin_weight_update", put_begin},
        {HR_STAGE_PREPARE, "/prepare_weight_update", put_prepare},
        {HR_STAGE_COMMIT, "/commit_weight_update", NULL},
        {HR_STAGE_ABORT, "/abort_weight_update", NULL},
    };
    if (step->number > 0)
        return done(r, step);
    if (r->stage == HR_STAGE_BUCKET)
        return post_bucket(r, step);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        if (calls[i].stage != r->stage)
            continue;
        hr_json_writer w;
        hr_json_writer_init(&w, &step->text);
        hr_json_object_begin(&w);
        if (calls[i].put != NULL)
            calls[i].put(r, &w);
        else
            hr_json_put_string(&w, "session_id", r->session_id);
        hr_json_object_end(&w);
        return hr_step_post(step, calls[i].path);
    }
    return hr_step_control(r, step);
}

const hr_dialect hr_dialect_safetensors = {
    .traits = {.name = "safetensors",
               .carries_base = true,
               .carries_adapters = true,
               .sessions = true,
               .atomic = true,
               .base_rollback = true,
               .flushes = true},
    .one_call_buckets = true,
    .next = next,
};
