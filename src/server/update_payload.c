/* Tensors of a request. */
#include "server/update_payload.h"

#include "format/base64.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "format/torch_payload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TP_SIZE 1 /* ranks of an engine */

/* ---- pickles ---- */

typedef struct pickle {
    char *bytes; /* the string of the tree, decoded in place */
    hr_torch_payload *payload;
} pickle;

static void release_pickle(void *owner) {
    pickle *p = owner;
    hr_torch_payload_close(p->payload);
    cJSON_free(p->bytes);
    free(p);
}

static void add_up(hr_update_payload *payload) {
    payload->bytes = 0;
    for (size_t i = 0; i < payload->n; i++)
        payload->bytes += payload->tensors[i].bytes;
}

hr_status hr_update_payload_decode(cJSON *text, const char *what, bool flattened,
                                   hr_update_payload *out, hr_error *err) {
    size_t size = 0;
    hr_torch_options options = {.flattened = flattened};
    if (!cJSON_IsString(text))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a base64 string, came %s", what,
                       hr_json_kind(text));
    pickle *p = calloc(1, sizeof *p);
    if (p == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a payload");
    p->bytes = text->valuestring;
    text->valuestring = NULL;
    hr_status status = hr_base64_decode(p->bytes, strlen(p->bytes), p->bytes, &size, err);
    if (status == HR_OK)
        status = hr_torch_payload_read(p->bytes, size, &options, &p->payload, err);
    if (status != HR_OK) {
        release_pickle(p);
        return hr_fail_context(err, status, "%s", what);
    }
    *out = (hr_update_payload){.tensors = hr_torch_payload_tensors(p->payload),
                               .n = hr_torch_payload_count(p->payload),
                               .owner = p,
                               .release = release_pickle};
    add_up(out);
    return HR_OK;
}

hr_status hr_update_payload_decode_list(const cJSON *args, const char *key, bool flattened,
                                        hr_update_payload *out, hr_error *err) {
    char what[80];
    const cJSON *list = hr_json_get_present(args, key);
    if (!cJSON_IsArray(list))
        return hr_fail(err, HR_ERR_INVALID,
                       "%s: wanted a list of base64 strings, one for each tensor-parallel rank, "
                       "came %s",
                       key, list == NULL ? "nothing" : hr_json_kind(list));
    int n = cJSON_GetArraySize(list);
    if (n != TP_SIZE)
        return hr_fail(err, HR_ERR_INVALID,
                       "%s: wanted one entry for each tensor-parallel rank, which is %d (tp_size), "
                       "came %d",
                       key, TP_SIZE, n);
    snprintf(what, sizeof what, "%s[0]", key);
    return hr_update_payload_decode(list->child, what, flattened, out, err);
}

static bool is_unread(const cJSON *text) {
    return cJSON_IsString(text) && text->valuestring != NULL;
}

static void give_back(cJSON *text) {
    hr_update_payload payload;
    hr_error ignored; /* the call has been refused for something else */
    if (hr_update_payload_decode(text, "", false, &payload, &ignored) == HR_OK)
        payload.release(payload.owner);
}

static int compare_texts(const void *a, const void *b) {
    return strcmp((*(cJSON *const *)a)->valuestring, (*(cJSON *const *)b)->valuestring);
}

/* Each text once. Sorted, since a list that is refused may have millions of them. */
static void give_back_list(const cJSON *list) {
    cJSON *text, **texts = malloc(((size_t)cJSON_GetArraySize(list) + 1) * sizeof *texts);
    size_t n = 0;
    if (texts == NULL)
        return;
    cJSON_ArrayForEach(text, list) {
        if (is_unread(text))
            texts[n++] = text;
    }
    qsort(texts, n, sizeof *texts, compare_texts);
    for (size_t i = 0; i < n; i++) {
        if (i + 1 == n || compare_texts(&texts[i], &texts[i + 1]) != 0)
            give_back(texts[i]);
    }
    free(texts);
}

void hr_update_payload_give_back(const cJSON *args) {
    static const char *const keys[] = {"serialized_tensors", "serialized_named_tensors"};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        cJSON *item = hr_json_get(args, keys[k]);
        if (cJSON_IsArray(item))
            give_back_list(item);
        else if (is_unread(item))
            give_back(item);
    }
}

/* ---- images ---- */

typedef struct image {
    hr_body body;
    hr_safetensors *file;
} image;

static void release_image(void *owner) {
    image *m = owner;
    hr_safetensors_close(m->file);
    hr_body_free(&m->body);
    free(m);
}

hr_status hr_update_payload_image(hr_body *body, hr_update_payload *out, hr_error *err) {
    if (body->len == 0)
        return hr_fail(err, HR_ERR_INVALID,
                       "the request body: wanted a safetensors file, came nothing");
    image *m = calloc(1, sizeof *m);
    if (m == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a bucket");
    hr_status status =
        hr_safetensors_parse(body->data, body->len, "the request body", &m->file, err);
    if (status != HR_OK) {
        free(m);
        return status;
    }
    m->body = hr_body_move(body);
    *out = (hr_update_payload){
        .n = hr_safetensors_count(m->file), .owner = m, .release = release_image};
    if (out->n > 0)
        out->tensors = hr_safetensors_at(m->file, 0);
    add_up(out);
    return HR_OK;
}

void hr_update_payload_fill(const hr_update_payload *payload, hr_bucket *bucket) {
    bucket->tensors = payload->tensors;
    bucket->n = payload->n;
    bucket->owner = payload->owner;
    bucket->release = payload->release;
}
