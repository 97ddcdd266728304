/* Reading JSON from outside: bounded, strict, and with errors that name the key, what was wanted
 * and what came. A thin layer on cJSON, whose tree is used as it is. */
#ifndef HR_FORMAT_JSON_H
#define HR_FORMAT_JSON_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_JSON_MAX_DEPTH 64
#define HR_JSON_MAX_BYTES ((size_t)1 << 30)
#define HR_JSON_MAX_VALUES ((size_t)1 << 24)

/* Parses exactly one JSON value: text need not be NUL-terminated, white space around the value is
 * allowed, anything else is not. Refused beside what JSON refuses: more than max_bytes bytes (0
 * means HR_JSON_MAX_BYTES), nesting deeper than HR_JSON_MAX_DEPTH, more than HR_JSON_MAX_VALUES
 * values, the escape \u0000 (cJSON would cut the string there), invalid UTF-8, numbers of more than
 * 63 characters. The caller frees *out with cJSON_Delete; a key lies in the memory of its node, so
 * that a copy by cJSON_Duplicate would not outlive the tree. ERR_INVALID, ERR_LIMIT, ERR_NO_MEMORY.
 * Thread-safe. */
hr_status hr_json_parse(const char *text, size_t len, size_t max_bytes, cJSON **out, hr_error *err);

/* Reads a file whole and parses it; the top value must be an object. Messages begin with the path.
 * ERR_IO when it cannot be read, ERR_NOT_FOUND when it does not exist. */
hr_status hr_json_parse_file(const char *path, size_t max_bytes, cJSON **out, hr_error *err);

/* A key that stands twice in an object (checked over the whole tree); NULL when there is none. The
 * string belongs to the tree. */
const char *hr_json_duplicate_key(const cJSON *tree);

/* Member of an object, case-sensitive; NULL when absent (or obj is not an object). */
cJSON *hr_json_get(const cJSON *obj, const char *key);
/* The same, but JSON null counts as absent. */
cJSON *hr_json_get_present(const cJSON *obj, const char *key);

/* "an object", "an array", "a string", "a number", "a bool", "null". Static strings. */
const char *hr_json_kind(const cJSON *item);

/* Values by themselves; what names the value in the message ("vocab_size", "stop[2]"). Integers
 * must be integral and within [min, max]; they are exact over the whole 64 bits, and at most 2^53
 * in magnitude when written with a point or an exponent. HR_JSON_DIGITS also takes a string of
 * decimal digits. ERR_INVALID. */
typedef enum hr_json_int_form { HR_JSON_NUMBER, HR_JSON_DIGITS } hr_json_int_form;
hr_status hr_json_u64(const cJSON *item, const char *what, uint64_t min, uint64_t max,
                      hr_json_int_form form, uint64_t *out, hr_error *err);
hr_status hr_json_i64(const cJSON *item, const char *what, int64_t min, int64_t max,
                      hr_json_int_form form, int64_t *out, hr_error *err);
/* Finite; within [min, max]. */
hr_status hr_json_double(const cJSON *item, const char *what, double min, double max, double *out,
                         hr_error *err);
hr_status hr_json_bool(const cJSON *item, const char *what, bool *out, hr_error *err);
/* *out belongs to the tree. */
hr_status hr_json_string(const cJSON *item, const char *what, const char **out, hr_error *err);

/* Members by key. A required member that is absent or null is ERR_INVALID; the _opt forms then
 * leave *out as it was (put the default there first) and return HR_OK. */
hr_status hr_json_get_u64(const cJSON *obj, const char *key, uint64_t min, uint64_t max,
                          uint64_t *out, hr_error *err);
hr_status hr_json_opt_u64(const cJSON *obj, const char *key, uint64_t min, uint64_t max,
                          uint64_t *out, hr_error *err);
hr_status hr_json_get_i64(const cJSON *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                          hr_error *err);
hr_status hr_json_get_double(const cJSON *obj, const char *key, double min, double max, double *out,
                             hr_error *err);
hr_status hr_json_opt_double(const cJSON *obj, const char *key, double min, double max, double *out,
                             hr_error *err);
hr_status hr_json_get_bool(const cJSON *obj, const char *key, bool *out, hr_error *err);
hr_status hr_json_opt_bool(const cJSON *obj, const char *key, bool *out, hr_error *err);
hr_status hr_json_get_string(const cJSON *obj, const char *key, const char **out, hr_error *err);
hr_status hr_json_opt_string(const cJSON *obj, const char *key, const char **out, hr_error *err);

#endif
