/* JSON read value by value, strictly, in one pass: for texts whose form is known and of which no
 * tree is wanted. What is refused beside malformed text, json.h says. Private to the room. */
#ifndef HR_FORMAT_JSON_SCAN_H
#define HR_FORMAT_JSON_SCAN_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Start with the text, its length and where failures go. A copy reads from where it was made. */
typedef struct hr_json_scan {
    const unsigned char *text;
    size_t len;
    hr_error *err;
    size_t at, values;
    int depth;
} hr_json_scan;

/* What stands between two quotes of the text. */
typedef struct hr_json_text {
    const unsigned char *bytes;
    size_t len;
    bool escapes;
} hr_json_text;

/* Writes the string and a NUL, at most len + 1 bytes; returns its length. */
size_t hr_json_text_copy(const hr_json_text *text, char *to);

/* The first character of the next value; -1 at the end. */
int hr_json_peek(hr_json_scan *scan);

/* Each reads the next value, with the space around it, and fails when it is of another kind or
 * malformed: ERR_INVALID with the byte position, ERR_LIMIT, ERR_NO_MEMORY. *is_size: the number is
 * of digits alone and below 2^63. */
hr_status hr_json_next_string(hr_json_scan *scan, hr_json_text *out);
hr_status hr_json_next_size(hr_json_scan *scan, bool *is_size, uint64_t *out);
hr_status hr_json_next_tree(hr_json_scan *scan, cJSON **out);

/* each is called for every member (key NULL: item) and reads its value; what it fails with ends the
 * walk. */
typedef hr_status (*hr_json_each)(void *ctx, hr_json_scan *scan, const hr_json_text *key);
hr_status hr_json_next_object(hr_json_scan *scan, hr_json_each each, void *ctx);
hr_status hr_json_next_array(hr_json_scan *scan, hr_json_each each, void *ctx);

/* That nothing follows. */
hr_status hr_json_end(const hr_json_scan *scan);

#endif
