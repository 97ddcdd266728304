/* Which bytes may stand in a JSON string: what the reader and the writer share. */
#ifndef HR_FORMAT_JSON_BYTES_H
#define HR_FORMAT_JSON_BYTES_H

#include <stddef.h>

/* Bytes of the valid UTF-8 sequence at text (1 to 4), 0 when there is none. */
size_t hr_utf8_sequence(const char *text, size_t len);

/* How many bytes at text surely stand for themselves in a JSON string: looks at eight at a time,
 * and stops before the eight of which one does not. */
size_t hr_json_plain(const char *text, size_t n);

#endif
