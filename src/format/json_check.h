/* Reading JSON in one strict pass, without a bound on the text's size. Private to the room. */
#ifndef HR_FORMAT_JSON_CHECK_H
#define HR_FORMAT_JSON_CHECK_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stddef.h>

/* As hr_json_parse, of bytes of any number. */
hr_status hr_json_read(const char *text, size_t len, cJSON **out, hr_error *err);

/* Bytes of the valid UTF-8 sequence at text (1 to 4), 0 when there is none. */
size_t hr_utf8_sequence(const char *text, size_t len);

/* How many bytes at text surely stand for themselves in a JSON string: looks at eight at a time,
 * and stops before the eight of which one does not. */
size_t hr_json_plain(const char *text, size_t n);

#endif
