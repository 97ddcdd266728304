/* Any bytes as the arguments of the update and session routes (a JSON body, or keys and values of a
 * query string) and as a safetensors body: read or refused with a message, and what is read keeps
 * its promises. Payloads inside are decoded too. The first byte says which. */
#include "format/json.h"
#include "server/update_args.h"
#include "server/update_payload.h"
#include "server/update_request.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A refusal says something; true when it was none. */
static bool taken(hr_status status, hr_error *err) {
    if (status != HR_OK && (err->status != status || err->message[0] == '\0'))
        abort();
    *err = (hr_error){.status = HR_OK};
    return status == HR_OK;
}

static void check_manifest(const hr_update_manifest *m) {
    if (m->manifest == NULL)
        return;
    for (size_t i = 0; i < m->manifest->n; i++) {
        const hr_manifest_entry *entry = &m->manifest->entries[i];
        if (entry->name == NULL || (entry->sha256 != NULL && strlen(entry->sha256) != 64) ||
            (entry->xxh3 != NULL && strlen(entry->xxh3) != 32))
            abort();
    }
}

static void check_payload(hr_update_payload *payload) {
    uint64_t bytes = 0;
    unsigned sum = 0;
    for (size_t i = 0; i < payload->n; i++) {
        const uint8_t *at = payload->tensors[i].data;
        bytes += payload->tensors[i].bytes;
        for (uint64_t k = 0; k < payload->tensors[i].bytes; k++)
            sum += at[k]; /* readable to the last byte */
    }
    if (bytes != payload->bytes || sum == UINT32_MAX)
        abort();
    payload->release(payload->owner);
}

static void read_payloads(cJSON *args, hr_error *err) {
    hr_update_payload payload;
    cJSON *one = hr_json_get_present(args, "serialized_tensors");
    bool flattened = false;
    (void)taken(hr_update_load_format_read(args, &flattened, err), err);
    if (taken(hr_update_payload_decode_list(args, "serialized_named_tensors", flattened, &payload,
                                            err),
              err))
        check_payload(&payload);
    if (one != NULL &&
        taken(hr_update_payload_decode(one, "serialized_tensors", flattened, &payload, err), err))
        check_payload(&payload);
    hr_update_payload_give_back(args);
}

static void read_all(cJSON *args) {
    static const char *const known[] = {"lora_name", "manifest", NULL};
    hr_error err = {.status = HR_OK};
    hr_update_registration registration;
    hr_update_manifest manifest;
    hr_update_options options;
    hr_update_begin begin;
    (void)taken(hr_args_check(args, known, &err), &err);
    hr_status status = hr_update_registration_read(args, 100, true, &registration, &err);
    if (taken(status, &err) &&
        strlen(registration.registration.config) != registration.registration.config_len)
        abort();
    hr_update_registration_free(&registration);
    if (taken(hr_update_manifest_read(args, &manifest, &err), &err))
        check_manifest(&manifest);
    hr_update_manifest_free(&manifest);
    if (taken(hr_update_manifest_read_adapter(args, "name", &manifest, &err), &err))
        check_manifest(&manifest);
    hr_update_manifest_free(&manifest);
    if (taken(hr_update_options_read(args, true, &options, &err), &err) && options.timeout_ms == 0)
        abort();
    status = hr_update_begin_read(args, &begin, &err);
    if (taken(status, &err) && begin.session.n_adapters > 0 && begin.session.adapters[0] == NULL)
        abort();
    hr_update_begin_free(&begin);
    read_payloads(args, &err);
}

static void read_json(const char *text, size_t size) {
    hr_error err = {.status = HR_OK};
    cJSON *args = NULL;
    if (!taken(hr_json_parse(text, size, 0, &args, &err), &err))
        return;
    if (cJSON_IsObject(args))
        read_all(args);
    cJSON_Delete(args);
}

/* Keys and values by turns, each ended by a NUL. */
static void read_query(const char *text, size_t size) {
    hr_error err = {.status = HR_OK};
    cJSON *args = cJSON_CreateObject();
    const char *key = NULL;
    for (size_t at = 0; args != NULL && at < size; at += strlen(text + at) + 1) {
        if (key != NULL)
            (void)taken(hr_args_add(args, key, text + at, &err), &err);
        key = key == NULL ? text + at : NULL;
    }
    if (args != NULL)
        read_all(args);
    cJSON_Delete(args);
}

static void read_image(const char *bytes, size_t size) {
    hr_error err = {.status = HR_OK};
    hr_body_pool *pool = NULL;
    hr_body body = {0};
    hr_update_payload payload;
    if (hr_body_pool_create(0, &pool, NULL) != HR_OK)
        return;
    if (hr_body_append(&body, pool, bytes, size, NULL) == HR_OK &&
        taken(hr_update_payload_image(&body, &payload, &err), &err))
        check_payload(&payload);
    hr_body_free(&body);
    hr_body_pool_unref(pool);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    /* an exact copy, so that a read past the end is seen; its NUL ends the last value of a query */
    char *text = malloc(size);
    if (text == NULL)
        return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    if (data[0] == 'q')
        read_query(text, size);
    else if (data[0] == 's')
        read_image(text, size - 1);
    else
        read_json(text, size - 1);
    free(text);
    return 0;
}
