/* What an engine says about a session. */
#include "transport/engine_receipt.h"

#include "format/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool hr_session_state_from_name(const char *name, hr_session_state *out) {
    static const hr_session_state states[] = {HR_SESSION_IDLE, HR_SESSION_OPEN, HR_SESSION_PREPARED,
                                              HR_SESSION_PUBLISHED, HR_SESSION_ROLLED_BACK};
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        if (strcmp(hr_session_state_name(states[i]), name) == 0) {
            *out = states[i];
            return true;
        }
    }
    return false;
}

/* A string that fits; one that is absent is "". */
static hr_status read_text(const cJSON *object, const char *key, char *out, size_t size,
                           hr_error *err) {
    const char *text = "";
    HR_TRY(hr_json_opt_string(object, key, &text, err));
    if (strlen(text) >= size)
        return hr_fail(err, HR_ERR_INVALID, "%s: %zu bytes where at most %zu are allowed", key,
                       strlen(text), size - 1);
    memcpy(out, text, strlen(text) + 1);
    return HR_OK;
}

static hr_status read_digest(const cJSON *object, hr_engine_receipt *r, hr_error *err) {
    const char *hex = NULL;
    HR_TRY(hr_json_opt_string(object, "xxh3", &hex, err));
    r->has_xxh3 = hex != NULL;
    if (hex != NULL && !hr_xxh3_parse(hex, r->xxh3))
        return hr_fail(err, HR_ERR_INVALID, "xxh3: wanted 32 hex digits, came \"%.40s\"", hex);
    return HR_OK;
}

static hr_status read_adapter(const cJSON *object, hr_engine_receipt *r, hr_error *err) {
    hr_engine_adapter *to = &r->adapters[r->n_adapters];
    const char *hex = NULL;
    HR_TRY(read_text(object, "name", to->name, sizeof to->name, err));
    HR_TRY(hr_json_opt_string(object, "config_digest", &hex, err));
    if (hex == NULL)
        return HR_OK;
    if (!hr_xxh3_parse(hex, to->config_digest))
        return hr_fail(err, HR_ERR_INVALID, "config_digest: wanted 32 hex digits, came \"%.40s\"",
                       hex);
    r->n_adapters++;
    return HR_OK;
}

static hr_status read_adapters(const cJSON *object, hr_engine_receipt *r, hr_error *err) {
    const cJSON *item, *list = hr_json_get_present(object, "adapters");
    if (!cJSON_IsArray(list) || list->child == NULL)
        return HR_OK;
    r->adapters = calloc((size_t)cJSON_GetArraySize(list), sizeof *r->adapters);
    if (r->adapters == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of adapters");
    cJSON_ArrayForEach(item, list) HR_TRY(read_adapter(item, r, err));
    return HR_OK;
}

static hr_status read_times(const cJSON *object, hr_engine_receipt *r, hr_error *err) {
    const cJSON *times = hr_json_get_present(object, "milliseconds");
    const struct {
        const char *key;
        uint64_t *ns;
    } fields[] = {{"receive", &r->receive_ns},
                  {"verify", &r->verify_ns},
                  {"build", &r->build_ns},
                  {"publish", &r->publish_ns}};
    for (size_t i = 0; times != NULL && i < sizeof fields / sizeof fields[0]; i++) {
        double ms = 0;
        const cJSON *item = hr_json_get_present(times, fields[i].key);
        if (item != NULL)
            HR_TRY(hr_json_double(item, fields[i].key, 0, 1e12, &ms, err));
        *fields[i].ns = (uint64_t)(ms * 1e6);
    }
    return HR_OK;
}

static hr_status read_fields(const cJSON *object, hr_engine_receipt *r, hr_error *err) {
    const char *state = NULL;
    const uint64_t most = (uint64_t)1 << 53;
    if (!cJSON_IsObject(object))
        return hr_fail(err, HR_ERR_INVALID, "wanted an object, came %s", hr_json_kind(object));
    HR_TRY(hr_json_get_string(object, "state", &state, err));
    if (!hr_session_state_from_name(state, &r->state))
        return hr_fail(err, HR_ERR_INVALID, "state: \"%.40s\" is not known", state);
    HR_TRY(read_text(object, "session_id", r->session_id, sizeof r->session_id, err));
    HR_TRY(read_text(object, "instance", r->instance, sizeof r->instance, err));
    HR_TRY(read_text(object, "weight_version", r->weight_version, sizeof r->weight_version, err));
    HR_TRY(read_text(object, "base_mode", r->base_mode, sizeof r->base_mode, err));
    HR_TRY(hr_json_opt_u64(object, "ranks", 0, most, &r->ranks, err));
    HR_TRY(hr_json_opt_u64(object, "tensors", 0, most, &r->tensors, err));
    HR_TRY(hr_json_opt_u64(object, "bytes", 0, most, &r->bytes, err));
    HR_TRY(read_digest(object, r, err));
    HR_TRY(read_adapters(object, r, err));
    return read_times(object, r, err);
}

hr_status hr_engine_receipt_read(const cJSON *object, hr_engine_receipt *out, hr_error *err) {
    hr_engine_receipt r = {0};
    hr_status status = read_fields(object, &r, err);
    if (status == HR_OK && (r.json = cJSON_PrintUnformatted(object)) == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for it");
    if (status != HR_OK) {
        hr_engine_receipt_clear(&r);
        return hr_fail_context(err, status, "the engine's receipt");
    }
    *out = r;
    return HR_OK;
}

void hr_engine_receipt_clear(hr_engine_receipt *receipt) {
    free(receipt->adapters);
    cJSON_free(receipt->json);
    *receipt = (hr_engine_receipt){0};
}
