/* The bounded parse and the typed getters. */
#include "format/json.h"

#include "base/buf.h"
#include "format/file.h"
#include "format/json_scan.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HR_JSON_MAX_EXACT 9007199254740992.0 /* 2^53 */

hr_status hr_json_parse(const char *text, size_t len, size_t max_bytes, cJSON **out,
                        hr_error *err) {
    if (max_bytes == 0)
        max_bytes = HR_JSON_MAX_BYTES;
    if (len > max_bytes)
        return hr_fail(err, HR_ERR_LIMIT, "JSON of %zu bytes is over the limit of %zu", len,
                       max_bytes);
    hr_json_scan scan = {.text = (const unsigned char *)text, .len = len, .err = err};
    cJSON *tree = NULL;
    HR_TRY(hr_json_next_tree(&scan, &tree));
    hr_status status = hr_json_end(&scan);
    if (status == HR_OK)
        *out = tree;
    else
        cJSON_Delete(tree);
    return status;
}

hr_status hr_json_parse_file(const char *path, size_t max_bytes, cJSON **out, hr_error *err) {
    hr_buf text = {0};
    cJSON *tree = NULL;
    hr_status status = hr_file_read(path, max_bytes ? max_bytes : HR_JSON_MAX_BYTES, &text, err);
    if (status != HR_OK)
        return status;
    status = hr_json_parse(text.data ? text.data : "", text.len, max_bytes, &tree, err);
    hr_buf_free(&text);
    if (status != HR_OK)
        return hr_fail_context(err, status, "%s", path);
    if (!cJSON_IsObject(tree)) {
        status = hr_fail(err, HR_ERR_INVALID, "%s: wanted a JSON object, came %s", path,
                         hr_json_kind(tree));
        cJSON_Delete(tree);
        return status;
    }
    *out = tree;
    return HR_OK;
}

static int compare_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static const char *duplicate_in_object(const cJSON *object) {
    size_t n = 0;
    bool sorted = true; /* then equal ones would stand together: none do */
    for (const cJSON *item = object->child; item != NULL; item = item->next) {
        sorted = sorted && (n == 0 || strcmp(item->prev->string, item->string) < 0);
        n++;
    }
    if (sorted)
        return NULL;
    const char **keys = malloc(n * sizeof *keys);
    if (keys == NULL)
        return object->child->string; /* cannot be checked: refuse rather than let pass */
    n = 0;
    for (const cJSON *item = object->child; item != NULL; item = item->next)
        keys[n++] = item->string;
    qsort(keys, n, sizeof *keys, compare_keys);
    const char *found = NULL;
    for (size_t i = 1; i < n && found == NULL; i++) {
        if (strcmp(keys[i - 1], keys[i]) == 0)
            found = keys[i];
    }
    free(keys);
    return found;
}

const char *hr_json_duplicate_key(const cJSON *tree) {
    const char *found = cJSON_IsObject(tree) ? duplicate_in_object(tree) : NULL;
    if (cJSON_IsObject(tree) || cJSON_IsArray(tree)) {
        for (const cJSON *item = tree->child; item != NULL && found == NULL; item = item->next)
            found = hr_json_duplicate_key(item);
    }
    return found;
}

cJSON *hr_json_get(const cJSON *obj, const char *key) {
    return cJSON_IsObject(obj) ? cJSON_GetObjectItemCaseSensitive(obj, key) : NULL;
}

cJSON *hr_json_get_present(const cJSON *obj, const char *key) {
    cJSON *item = hr_json_get(obj, key);
    return cJSON_IsNull(item) ? NULL : item;
}

const char *hr_json_kind(const cJSON *item) {
    if (cJSON_IsObject(item))
        return "an object";
    if (cJSON_IsArray(item))
        return "an array";
    if (cJSON_IsString(item))
        return "a string";
    if (cJSON_IsNumber(item))
        return "a number";
    if (cJSON_IsBool(item))
        return "a bool";
    return "null";
}

/* A number that is integral and exact in a double. */
static hr_status exact_integer(const cJSON *item, const char *what, double *out, hr_error *err) {
    if (!cJSON_IsNumber(item))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an integer, came %s", what,
                       hr_json_kind(item));
    double value = item->valuedouble;
    if (!isfinite(value) || fabs(value) > HR_JSON_MAX_EXACT)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an integer of at most 2^53, came %.17g",
                       what, value);
    if (value != floor(value))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an integer, came %.17g", what, value);
    *out = value;
    return HR_OK;
}

/* The digits of an integer that were kept beside a number, or make up a string; NULL: none. */
static const char *digits_of(const cJSON *item, hr_json_int_form form) {
    bool taken = cJSON_IsNumber(item) || (form == HR_JSON_DIGITS && cJSON_IsString(item));
    return taken ? item->valuestring : NULL;
}

/* Only digits, after a minus where one is allowed; strtoull alone would take space and signs. */
static bool is_digits(const char *text, bool minus) {
    if (minus && *text == '-')
        text++;
    size_t n = strspn(text, "0123456789");
    return n > 0 && text[n] == '\0';
}

hr_status hr_json_u64(const cJSON *item, const char *what, uint64_t min, uint64_t max,
                      hr_json_int_form form, uint64_t *out, hr_error *err) {
    uint64_t value;
    const char *digits = digits_of(item, form);
    if (digits != NULL) {
        errno = 0;
        value = strtoull(digits, NULL, 10);
        if (!is_digits(digits, false) || errno != 0)
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted an integer of 64 bits, came \"%.64s\"",
                           what, digits);
    } else {
        double exact = 0;
        HR_TRY(exact_integer(item, what, &exact, err));
        if (exact < 0)
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted %llu to %llu, came %.0f", what,
                           (unsigned long long)min, (unsigned long long)max, exact);
        value = (uint64_t)exact;
    }
    if (value < min || value > max)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted %llu to %llu, came %llu", what,
                       (unsigned long long)min, (unsigned long long)max, (unsigned long long)value);
    *out = value;
    return HR_OK;
}

hr_status hr_json_i64(const cJSON *item, const char *what, int64_t min, int64_t max,
                      hr_json_int_form form, int64_t *out, hr_error *err) {
    int64_t value;
    const char *digits = digits_of(item, form);
    if (digits != NULL) {
        errno = 0;
        value = strtoll(digits, NULL, 10);
        if (!is_digits(digits, true) || errno != 0)
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted an integer of 64 bits, came \"%.64s\"",
                           what, digits);
    } else {
        double exact = 0;
        HR_TRY(exact_integer(item, what, &exact, err));
        value = (int64_t)exact;
    }
    if (value < min || value > max)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted %lld to %lld, came %lld", what,
                       (long long)min, (long long)max, (long long)value);
    *out = value;
    return HR_OK;
}

hr_status hr_json_double(const cJSON *item, const char *what, double min, double max, double *out,
                         hr_error *err) {
    if (!cJSON_IsNumber(item))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a number, came %s", what,
                       hr_json_kind(item));
    double value = item->valuedouble;
    if (!isfinite(value) || value < min || value > max)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a number from %g to %g, came %g", what, min,
                       max, value);
    *out = value;
    return HR_OK;
}

hr_status hr_json_bool(const cJSON *item, const char *what, bool *out, hr_error *err) {
    if (!cJSON_IsBool(item))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted true or false, came %s", what,
                       hr_json_kind(item));
    *out = cJSON_IsTrue(item);
    return HR_OK;
}

hr_status hr_json_string(const cJSON *item, const char *what, const char **out, hr_error *err) {
    if (!cJSON_IsString(item))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a string, came %s", what,
                       hr_json_kind(item));
    *out = item->valuestring;
    return HR_OK;
}

static hr_status require(const cJSON *obj, const char *key, cJSON **out, hr_error *err) {
    cJSON *item = hr_json_get_present(obj, key);
    if (item == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a value, the key is absent", key);
    *out = item;
    return HR_OK;
}

hr_status hr_json_get_u64(const cJSON *obj, const char *key, uint64_t min, uint64_t max,
                          uint64_t *out, hr_error *err) {
    cJSON *item = NULL;
    HR_TRY(require(obj, key, &item, err));
    return hr_json_u64(item, key, min, max, HR_JSON_NUMBER, out, err);
}

hr_status hr_json_opt_u64(const cJSON *obj, const char *key, uint64_t min, uint64_t max,
                          uint64_t *out, hr_error *err) {
    cJSON *item = hr_json_get_present(obj, key);
    return item ? hr_json_u64(item, key, min, max, HR_JSON_NUMBER, out, err) : HR_OK;
}

hr_status hr_json_get_i64(const cJSON *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                          hr_error *err) {
    cJSON *item = NULL;
    HR_TRY(require(obj, key, &item, err));
    return hr_json_i64(item, key, min, max, HR_JSON_NUMBER, out, err);
}

hr_status hr_json_get_double(const cJSON *obj, const char *key, double min, double max, double *out,
                             hr_error *err) {
    cJSON *item = NULL;
    HR_TRY(require(obj, key, &item, err));
    return hr_json_double(item, key, min, max, out, err);
}

hr_status hr_json_opt_double(const cJSON *obj, const char *key, double min, double max, double *out,
                             hr_error *err) {
    cJSON *item = hr_json_get_present(obj, key);
    return item ? hr_json_double(item, key, min, max, out, err) : HR_OK;
}

hr_status hr_json_get_bool(const cJSON *obj, const char *key, bool *out, hr_error *err) {
    cJSON *item = NULL;
    HR_TRY(require(obj, key, &item, err));
    return hr_json_bool(item, key, out, err);
}

hr_status hr_json_opt_bool(const cJSON *obj, const char *key, bool *out, hr_error *err) {
    cJSON *item = hr_json_get_present(obj, key);
    return item ? hr_json_bool(item, key, out, err) : HR_OK;
}

hr_status hr_json_get_string(const cJSON *obj, const char *key, const char **out, hr_error *err) {
    cJSON *item = NULL;
    HR_TRY(require(obj, key, &item, err));
    return hr_json_string(item, key, out, err);
}

hr_status hr_json_opt_string(const cJSON *obj, const char *key, const char **out, hr_error *err) {
    cJSON *item = hr_json_get_present(obj, key);
    return item ? hr_json_string(item, key, out, err) : HR_OK;
}
