/* Requests of the update and session routes. */
#include "server/update_request.h"

#include "format/json.h"
#include "server/update_args.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 600000 /* for running requests, which may be long ones, to end */

/* ---- registrations ---- */

static hr_status check_added_tokens(const cJSON *args, uint32_t vocab_size, hr_error *err) {
    const cJSON *tokens = hr_json_get_present(args, "added_tokens_config");
    if (tokens == NULL)
        return HR_OK;
    if (!cJSON_IsObject(tokens))
        return hr_fail(err, HR_ERR_INVALID, "added_tokens_config: wanted an object, came %s",
                       hr_json_kind(tokens));
    for (const cJSON *item = tokens->child; item != NULL; item = item->next) {
        uint64_t id = 0;
        HR_TRY(hr_json_u64(item, "added_tokens_config", 0, UINT32_MAX, HR_JSON_DIGITS, &id, err));
        if (id >= vocab_size)
            return hr_fail(
                err, HR_ERR_ADAPTER_CONFIG,
                "added_tokens_config: the token \"%.100s\" has id %llu, and the base has "
                "%u tokens: headrace doesn't support adapters that add tokens",
                item->string, (unsigned long long)id, vocab_size);
    }
    return HR_OK;
}

hr_status hr_update_registration_read(const cJSON *args, uint32_t vocab_size, bool config_required,
                                      hr_update_registration *out, hr_error *err) {
    *out = (hr_update_registration){0};
    hr_registration *r = &out->registration;
    HR_TRY(hr_json_get_string(args, "lora_name", &r->name, err));
    HR_TRY(hr_args_bool(args, "pinned", &r->pinned, err));
    HR_TRY(hr_args_string(args, "config_digest", &r->config_digest, err));
    HR_TRY(hr_args_string(args, "lora_path", &r->path, err));
    HR_TRY(hr_args_bool(args, "defer_publish", &r->defer_publish, err));
    HR_TRY(check_added_tokens(args, vocab_size, err));
    HR_TRY(hr_args_object_text(args, "config_dict", &out->config, err));
    if (out->config == NULL && config_required)
        return hr_fail(err, HR_ERR_INVALID,
                       "config_dict: wanted the object of an adapter_config.json, came nothing");
    r->config = out->config;
    r->config_len = out->config != NULL ? strlen(out->config) : 0;
    return HR_OK;
}

void hr_update_registration_free(hr_update_registration *registration) {
    cJSON_free(registration->config);
    *registration = (hr_update_registration){0};
}

/* ---- manifests ---- */

static bool is_hex(const char *text, size_t digits) {
    return strlen(text) == digits && strspn(text, "0123456789abcdefABCDEF") == digits;
}

static hr_status wrong_digest(const char *name, const char *what, hr_error *err) {
    return hr_fail(err, HR_ERR_INVALID,
                   "the digest of \"%.200s\": wanted %s, or null for a tensor that only must come",
                   name, what);
}

/* One digest as text, its kind told by its length; null: none. */
static hr_status read_hex(const char *name, const cJSON *item, bool sha256, bool xxh3,
                          hr_manifest_entry *entry, hr_error *err) {
    const char *what = !xxh3     ? "a SHA-256 of 64 hex digits"
                       : !sha256 ? "an XXH3-128 of 32 hex digits"
                                 : "a SHA-256 of 64 hex digits or an XXH3-128 of 32";
    if (item == NULL || cJSON_IsNull(item))
        return HR_OK;
    if (!cJSON_IsString(item))
        return wrong_digest(name, what, err);
    if (sha256 && is_hex(item->valuestring, 64))
        entry->sha256 = item->valuestring;
    else if (xxh3 && is_hex(item->valuestring, 32))
        entry->xxh3 = item->valuestring;
    else
        return wrong_digest(name, what, err);
    return HR_OK;
}

static hr_status read_entry(const cJSON *item, hr_manifest_entry *entry, hr_error *err) {
    entry->name = item->string;
    if (!cJSON_IsObject(item))
        return read_hex(item->string, item, true, true, entry, err);
    for (const cJSON *digest = item->child; digest != NULL; digest = digest->next) {
        bool sha256 = strcmp(digest->string, "sha256") == 0;
        if (!sha256 && strcmp(digest->string, "xxh3") != 0)
            return hr_fail(
                err, HR_ERR_INVALID,
                "manifest: \"%.200s\" has a \"%.60s\"; there are \"xxh3\" and \"sha256\"",
                item->string, digest->string);
        HR_TRY(read_hex(item->string, digest, sha256, !sha256, entry, err));
    }
    return HR_OK;
}

static hr_status allocate(hr_update_manifest *out, size_t n, hr_error *err) {
    out->manifest = calloc(1, sizeof *out->manifest);
    out->entries = calloc(n > 0 ? n : 1, sizeof *out->entries);
    out->names = calloc(n > 0 ? n : 1, sizeof *out->names);
    if (out->manifest == NULL || out->entries == NULL || out->names == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a manifest of %zu tensors", n);
    out->manifest->entries = out->entries;
    return HR_OK;
}

static hr_status read_native(const cJSON *manifest, hr_update_manifest *out, hr_error *err) {
    if (!cJSON_IsObject(manifest) && !cJSON_IsArray(manifest))
        return hr_fail(
            err, HR_ERR_INVALID,
            "manifest: wanted {name: {\"xxh3\", \"sha256\"}} or a list of names, came %s",
            hr_json_kind(manifest));
    HR_TRY(allocate(out, (size_t)cJSON_GetArraySize(manifest), err));
    for (const cJSON *item = manifest->child; item != NULL; item = item->next) {
        hr_manifest_entry *entry = &out->entries[out->manifest->n++];
        if (cJSON_IsArray(manifest))
            HR_TRY(hr_json_string(item, "manifest", &entry->name, err));
        else
            HR_TRY(read_entry(item, entry, err));
    }
    return HR_OK;
}

/* Names of one adapter, as buckets have them. */
static hr_status read_adapter(const cJSON *names, const char *what, const char *adapter,
                              hr_update_manifest *out, hr_error *err) {
    if (!cJSON_IsObject(names))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted {name: sha256}, came %s", what,
                       hr_json_kind(names));
    for (const cJSON *item = names->child; item != NULL; item = item->next) {
        size_t size = strlen(adapter) + strlen(item->string) + 2;
        char *name = malloc(size);
        if (name == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a manifest");
        snprintf(name, size, "%s:%s", adapter, item->string);
        out->names[out->n_names++] = name;
        hr_manifest_entry *entry = &out->entries[out->manifest->n++];
        entry->name = name;
        HR_TRY(read_hex(item->string, item, true, false, entry, err));
    }
    return HR_OK;
}

static hr_status read_lora_checksums(const cJSON *adapters, hr_update_manifest *out,
                                     hr_error *err) {
    size_t n = 0;
    if (!cJSON_IsObject(adapters))
        return hr_fail(err, HR_ERR_INVALID,
                       "expected_lora_checksums: wanted {adapter: {name: sha256}}, came %s",
                       hr_json_kind(adapters));
    for (const cJSON *item = adapters->child; item != NULL; item = item->next) {
        if (strchr(item->string, ':') != NULL)
            return hr_fail(err, HR_ERR_INVALID,
                           "expected_lora_checksums: the name \"%.100s\" must not contain ':'",
                           item->string);
        n += (size_t)cJSON_GetArraySize(item);
    }
    HR_TRY(allocate(out, n, err));
    for (const cJSON *item = adapters->child; item != NULL; item = item->next)
        HR_TRY(read_adapter(item, "expected_lora_checksums", item->string, out, err));
    return HR_OK;
}

hr_status hr_update_manifest_read(const cJSON *args, hr_update_manifest *out, hr_error *err) {
    *out = (hr_update_manifest){0};
    const cJSON *native = hr_json_get_present(args, "manifest");
    const cJSON *lora = hr_json_get_present(args, "expected_lora_checksums");
    bool covers_base = false;
    HR_TRY(hr_args_bool(args, "covers_base", &covers_base, err));
    if (native != NULL && lora != NULL)
        return hr_fail(err, HR_ERR_INVALID, "send manifest or expected_lora_checksums, not both");
    if (covers_base && native == NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "covers_base says something about a manifest, and "
                       "there is none");
    if (native != NULL)
        HR_TRY(read_native(native, out, err));
    if (lora != NULL)
        HR_TRY(read_lora_checksums(lora, out, err));
    if (out->manifest != NULL)
        out->manifest->covers_base = covers_base;
    return HR_OK;
}

hr_status hr_update_manifest_read_adapter(const cJSON *args, const char *lora_name,
                                          hr_update_manifest *out, hr_error *err) {
    *out = (hr_update_manifest){0};
    const cJSON *names = hr_json_get_present(args, "expected_checksums");
    if (names == NULL)
        return HR_OK;
    HR_TRY(allocate(out, (size_t)cJSON_GetArraySize(names), err));
    return read_adapter(names, "expected_checksums", lora_name, out, err);
}

void hr_update_manifest_free(hr_update_manifest *manifest) {
    for (size_t i = 0; i < manifest->n_names; i++)
        free(manifest->names[i]);
    free(manifest->names);
    free(manifest->entries);
    free(manifest->manifest);
    *manifest = (hr_update_manifest){0};
}

/* ---- options ---- */

hr_status hr_update_options_read(const cJSON *args, bool flush_cache_default,
                                 hr_update_options *out, hr_error *err) {
    *out = (hr_update_options){.flush_cache = flush_cache_default, .timeout_ms = TIMEOUT_MS};
    HR_TRY(hr_args_selector(args, err));
    HR_TRY(hr_args_string(args, "session_id", &out->session_id, err));
    HR_TRY(hr_args_string(args, "stream", &out->stream, err));
    HR_TRY(hr_args_string(args, "weight_version", &out->weight_version, err));
    HR_TRY(hr_args_u64(args, "index", 0, UINT64_MAX, &out->index, err));
    if (out->stream == NULL && hr_json_get_present(args, "index") != NULL)
        return hr_fail(err, HR_ERR_INVALID, "index: of which stream? Name it by stream");
    HR_TRY(hr_args_seconds(args, "timeout_seconds", &out->timeout_ms, err));
    HR_TRY(hr_args_bool(args, "flush_cache", &out->flush_cache, err));
    HR_TRY(hr_args_bool(args, "abort_all_requests", &out->abort_all_requests, err));
    HR_TRY(hr_args_bool(args, "complete_base", &out->complete_base, err));
    return hr_args_bool(args, "audit", &out->audit, err);
}

/* ---- begin ---- */

static hr_status read_names(const cJSON *args, hr_update_begin *out, hr_error *err) {
    const cJSON *adapters = hr_json_get_present(args, "adapters");
    const cJSON *new_names = hr_json_get_present(args, "new_lora_names");
    const char *key = adapters != NULL ? "adapters" : "new_lora_names";
    const cJSON *list = adapters != NULL ? adapters : new_names;
    size_t n = 0;
    if (adapters != NULL && new_names != NULL)
        return hr_fail(err, HR_ERR_INVALID, "send adapters or new_lora_names, not both");
    if (list == NULL)
        return HR_OK;
    if (!cJSON_IsArray(list))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a list of names, came %s", key,
                       hr_json_kind(list));
    n = (size_t)cJSON_GetArraySize(list);
    out->adapters = calloc(n > 0 ? n : 1, sizeof *out->adapters);
    if (out->adapters == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for %zu names", n);
    out->session.adapters = out->adapters;
    for (const cJSON *item = list->child; item != NULL; item = item->next)
        HR_TRY(hr_json_string(item, key, &out->adapters[out->session.n_adapters++], err));
    return HR_OK;
}

hr_status hr_update_begin_read(const cJSON *args, hr_update_begin *out, hr_error *err) {
    *out = (hr_update_begin){.session = {.sync_base = true, .timeout_ms = TIMEOUT_MS}};
    HR_TRY(hr_args_selector(args, err));
    HR_TRY(hr_args_bool(args, "sync_base", &out->session.sync_base, err));
    HR_TRY(hr_args_string(args, "session_id", &out->session.session_id, err));
    HR_TRY(hr_args_seconds(args, "lease_seconds", &out->session.lease_ms, err));
    HR_TRY(hr_args_seconds(args, "timeout_seconds", &out->session.timeout_ms, err));
    HR_TRY(hr_args_bool(args, "audit", &out->session.audit, err));
    return read_names(args, out, err);
}

void hr_update_begin_free(hr_update_begin *begin) {
    free(begin->adapters);
    *begin = (hr_update_begin){0};
}

/* ---- payloads ---- */

hr_status hr_update_load_format_read(const cJSON *args, bool *flattened, hr_error *err) {
    const char *format = "direct";
    HR_TRY(hr_args_string(args, "load_format", &format, err));
    *flattened = strcmp(format, "flattened_bucket") == 0;
    if (*flattened || strcmp(format, "direct") == 0)
        return HR_OK;
    if (strcmp(format, "nccl_m2n") == 0)
        return hr_fail(
            err, HR_ERR_UNSUPPORTED,
            "load_format nccl_m2n moves tensors between GPUs over NCCL, which this "
            "engine does not have; send them by load_format \"flattened_bucket\" or null");
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "load_format: wanted null, \"direct\" or \"flattened_bucket\", came \"%.200s\"; "
                   "loaders of a client's own are code, and none is run here",
                   format);
}
