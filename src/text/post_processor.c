/* The post-processor of tokenizer.json: a template for one text, flattened into ids before and
 * behind it. */
#include "text/post_processor.h"

#include <stdlib.h>
#include <string.h>

#define MAX_NESTING 8
#define MAX_IDS 1024

/* Appends the ids that the template's own table gives to a special token. */
static hr_status add_special(const cJSON *table, const char *name, hr_ids *out, hr_error *err) {
    const cJSON *ids = hr_json_get(hr_json_get(table, name), "ids");
    if (!cJSON_IsArray(ids))
        return hr_fail(err, HR_ERR_CORRUPT,
                       "post_processor: special token \"%.64s\" has no ids in special_tokens",
                       name);
    for (const cJSON *item = ids->child; item != NULL; item = item->next) {
        uint64_t id;
        HR_TRY(hr_json_u64(item, "post_processor id", 0, HR_VOCAB_MAX_TOKENS - 1, HR_JSON_NUMBER,
                           &id, err));
        if (out->len == MAX_IDS)
            return hr_fail(err, HR_ERR_LIMIT, "post_processor adds more than %d tokens", MAX_IDS);
        HR_TRY(hr_ids_append(out, (uint32_t)id, err));
    }
    return HR_OK;
}

static hr_status read_template(const cJSON *node, hr_ids *before, hr_ids *behind, hr_error *err) {
    const cJSON *single = hr_json_get(node, "single"), *table = hr_json_get(node, "special_tokens");
    size_t texts = 0;
    for (const cJSON *item = cJSON_IsArray(single) ? single->child : NULL; item != NULL;
         item = item->next) {
        const cJSON *special = hr_json_get(item, "SpecialToken"),
                    *text = hr_json_get(item, "Sequence");
        const char *id;
        HR_TRY(hr_json_get_string(special != NULL ? special : text, "id", &id, err));
        if (special != NULL)
            HR_TRY(add_special(table, id, texts == 0 ? before : behind, err));
        else if (strcmp(id, "A") == 0)
            texts++;
    }
    if (texts != 1)
        return hr_fail(
            err, HR_ERR_UNSUPPORTED,
            "post_processor: the template of a single text must hold the text once, not %zu "
            "times",
            texts);
    return HR_OK;
}

static hr_status prepend(hr_ids *ids, const hr_ids *front, hr_error *err) {
    for (size_t i = 0; i < front->len; i++)
        HR_TRY(hr_ids_append(ids, 0, err));
    memmove(ids->data + front->len, ids->data, (ids->len - front->len) * sizeof *ids->data);
    memcpy(ids->data, front->data, front->len * sizeof *ids->data);
    return HR_OK;
}

/* A later processor of a sequence goes around what the earlier ones made. */
static hr_status wrap(const cJSON *node, hr_ids *prefix, hr_ids *suffix, hr_error *err) {
    hr_ids before = {0}, behind = {0};
    hr_status status = read_template(node, &before, &behind, err);
    if (status == HR_OK && prefix->len + before.len + suffix->len + behind.len > MAX_IDS)
        status = hr_fail(err, HR_ERR_LIMIT, "post_processor adds more than %d tokens", MAX_IDS);
    if (status == HR_OK && before.len > 0)
        status = prepend(prefix, &before, err);
    for (size_t i = 0; i < behind.len && status == HR_OK; i++)
        status = hr_ids_append(suffix, behind.data[i], err);
    free(before.data);
    free(behind.data);
    return status;
}

static hr_status read_node(const cJSON *node, hr_ids *prefix, hr_ids *suffix, int depth,
                           hr_error *err) {
    const char *type;
    HR_TRY(hr_json_get_string(node, "type", &type, err));
    if (strcmp(type, "ByteLevel") == 0)
        return HR_OK; /* moves offsets, which are not kept here */
    if (strcmp(type, "TemplateProcessing") == 0)
        return wrap(node, prefix, suffix, err);
    if (strcmp(type, "Sequence") != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "post_processor \"%.64s\" is not supported", type);
    const cJSON *list = hr_json_get(node, "processors");
    if (!cJSON_IsArray(list) || depth == MAX_NESTING)
        return hr_fail(
            err, HR_ERR_CORRUPT,
            "post_processor Sequence: wanted an array \"processors\", nested at most %d deep",
            MAX_NESTING);
    for (const cJSON *item = list->child; item != NULL; item = item->next)
        HR_TRY(read_node(item, prefix, suffix, depth + 1, err));
    return HR_OK;
}

hr_status hr_post_processor_read(const cJSON *node, hr_ids *prefix, hr_ids *suffix, hr_error *err) {
    if (node == NULL || cJSON_IsNull(node))
        return HR_OK;
    return read_node(node, prefix, suffix, 0, err);
}
