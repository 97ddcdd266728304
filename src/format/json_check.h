/* The strict half of JSON reading: says whether bytes are exactly one JSON value before any tree is
 * built. Private to the room. */
#ifndef HR_FORMAT_JSON_CHECK_H
#define HR_FORMAT_JSON_CHECK_H

#include "base/error.h"

#include <stddef.h>

/* Nesting is at most HR_JSON_MAX_DEPTH and values at most HR_JSON_MAX_VALUES. ERR_INVALID or
 * ERR_LIMIT with the byte position. */
hr_status hr_json_check(const char *text, size_t len, hr_error *err);

/* Bytes of the valid UTF-8 sequence at text (1 to 4), 0 when there is none. */
size_t hr_utf8_sequence(const char *text, size_t len);

#endif
