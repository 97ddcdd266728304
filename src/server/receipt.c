/* Receipts as JSON. */
#include "server/update_call.h"

#include "tensor/digest.h"

static void put_digest(hr_json_writer *w, const char *key, const uint8_t digest[HR_XXH3_SIZE]) {
    char hex[HR_XXH3_HEX];
    hr_json_put_string(w, key, hr_xxh3_format(digest, hex));
}

static void write_adapters(const hr_receipt *r, hr_json_writer *w) {
    hr_json_array_begin(w);
    for (size_t i = 0; i < r->n_adapters; i++) {
        const hr_receipt_adapter *a = &r->adapters[i];
        hr_json_object_begin(w);
        hr_json_put_string(w, "name", a->name);
        hr_json_put_u64(w, "id", a->id);
        hr_json_put_u64(w, "tensors", a->tensors);
        hr_json_put_u64(w, "bytes", a->bytes);
        put_digest(w, "xxh3", a->xxh3);
        put_digest(w, "config_digest", a->config_digest);
        hr_json_put_bool(w, "unchanged", a->unchanged);
        hr_json_object_end(w);
    }
    hr_json_array_end(w);
}

static void write_audit(const hr_receipt *r, hr_json_writer *w) {
    hr_json_object_begin(w);
    for (size_t i = 0; i < r->n_audit; i++) {
        hr_json_key(w, r->audit[i].name);
        hr_json_object_begin(w);
        hr_json_put_u64(w, "bytes", r->audit[i].bytes);
        put_digest(w, "xxh3", r->audit[i].xxh3);
        if (r->audit[i].sha256[0] != '\0')
            hr_json_put_string(w, "sha256", r->audit[i].sha256);
        hr_json_object_end(w);
    }
    hr_json_object_end(w);
}

static void put_ms(hr_json_writer *w, const char *key, uint64_t ns) {
    hr_json_key(w, key);
    hr_json_write_f32(w, (float)((double)ns / 1e6));
}

void hr_write_receipt(const hr_receipt *r, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "state", hr_session_state_name(r->state));
    hr_json_put_string(w, "session_id", r->session_id);
    hr_json_put_string(w, "instance", r->instance);
    hr_json_put_string(w, "weight_version", r->weight_version);
    hr_json_put_string(w, "base_mode", r->base_mode);
    hr_json_put_u64(w, "ranks", r->ranks);
    hr_json_put_u64(w, "tensors", r->tensors);
    hr_json_put_u64(w, "bytes", r->bytes);
    put_digest(w, "xxh3", r->xxh3);
    hr_json_put_u64(w, "base_tensors", r->base_tensors);
    hr_json_put_u64(w, "base_bytes", r->base_bytes);
    hr_json_key(w, "adapters");
    write_adapters(r, w);
    if (r->audit != NULL) {
        hr_json_key(w, "audit");
        write_audit(r, w);
    }
    hr_json_key(w, "milliseconds");
    hr_json_object_begin(w);
    put_ms(w, "receive", r->receive_ns);
    put_ms(w, "verify", r->verify_ns);
    put_ms(w, "build", r->build_ns);
    put_ms(w, "publish", r->publish_ns);
    hr_json_object_end(w);
    hr_json_object_end(w);
}
