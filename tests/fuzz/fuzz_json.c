/* Any bytes as JSON: what is taken is written back by the writer as JSON of the same shape. */
#include "format/json.h"
#include "format/json_writer.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void write_value(hr_json_writer *w, const cJSON *item) {
    if (cJSON_IsObject(item) || cJSON_IsArray(item)) {
        bool object = cJSON_IsObject(item);
        if (object)
            hr_json_object_begin(w);
        else
            hr_json_array_begin(w);
        for (const cJSON *child = item->child; child != NULL; child = child->next) {
            if (object)
                hr_json_key(w, child->string);
            write_value(w, child);
        }
        if (object)
            hr_json_object_end(w);
        else
            hr_json_array_end(w);
    } else if (cJSON_IsString(item)) {
        hr_json_write_string(w, item->valuestring);
    } else if (cJSON_IsNumber(item)) {
        hr_json_write_f64(w, item->valuedouble);
    } else if (cJSON_IsBool(item)) {
        hr_json_write_bool(w, cJSON_IsTrue(item));
    } else {
        hr_json_write_null(w);
    }
}

/* Infinities, which "1e999" gives, are written as null. */
static bool same(const cJSON *a, const cJSON *b) {
    if (cJSON_IsNumber(a))
        return cJSON_IsNull(b) || (cJSON_IsNumber(b) && a->valuedouble == b->valuedouble);
    if ((a->type & 0xff) != (b->type & 0xff))
        return false;
    if (cJSON_IsString(a))
        return strcmp(a->valuestring, b->valuestring) == 0;
    const cJSON *x = a->child, *y = b->child;
    for (; x != NULL && y != NULL; x = x->next, y = y->next) {
        if (!same(x, y) || (x->string != NULL && strcmp(x->string, y->string) != 0))
            return false;
    }
    return x == NULL && y == NULL;
}

static void get_everything(const cJSON *item) {
    uint64_t u;
    int64_t i;
    double d;
    hr_error err;
    (void)hr_json_u64(item, "x", 0, UINT64_MAX, HR_JSON_DIGITS, &u, &err);
    (void)hr_json_i64(item, "x", INT64_MIN, INT64_MAX, HR_JSON_DIGITS, &i, &err);
    (void)hr_json_double(item, "x", -1e300, 1e300, &d, &err);
    for (const cJSON *child = item->child; child != NULL; child = child->next)
        get_everything(child);
}

/* Any bytes as a string: what the writer makes of them is JSON. */
static void write_bytes(const uint8_t *data, size_t size) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_write_string_n(&w, (const char *)data, size);
    cJSON *tree = NULL;
    hr_error err = {0};
    hr_status status = hr_json_parse(text.data, text.len, 0, &tree, &err);
    HR_ASSERT(status == HR_OK || memchr(data, 0, size) != NULL);
    cJSON_Delete(tree);
    hr_buf_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    cJSON *tree = NULL, *again = NULL;
    hr_error err;
    write_bytes(data, size);
    if (hr_json_parse((const char *)data, size, 0, &tree, &err) != HR_OK)
        return 0;
    (void)hr_json_duplicate_key(tree);
    get_everything(tree);
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    write_value(&w, tree);
    HR_ASSERT(hr_json_parse(text.data, text.len, 0, &again, &err) == HR_OK);
    HR_ASSERT(same(tree, again));
    cJSON_Delete(tree);
    cJSON_Delete(again);
    hr_buf_free(&text);
    return 0;
}
