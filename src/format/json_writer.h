/* Writing JSON: a small streaming writer onto a growing buffer. Replies of ten thousand logprobs
 * are printed in some milliseconds, which a tree printer does not reach. */
#ifndef HR_FORMAT_JSON_WRITER_H
#define HR_FORMAT_JSON_WRITER_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Start with hr_json_writer_init; needs no freeing (the buffer is the caller's). Commas are put by
 * the writer. Calls must form one valid value: inside an object, a key before each value. Out of
 * memory shows in buf->failed. Not for two threads at once. */
typedef struct hr_json_writer {
    hr_buf *buf;
    bool comma; /* the next value or key needs a comma before it */
} hr_json_writer;

void hr_json_writer_init(hr_json_writer *w, hr_buf *buf);

void hr_json_object_begin(hr_json_writer *w);
void hr_json_object_end(hr_json_writer *w);
void hr_json_array_begin(hr_json_writer *w);
void hr_json_array_end(hr_json_writer *w);
void hr_json_key(hr_json_writer *w, const char *key);

/* Bytes are escaped as JSON asks; each byte of invalid UTF-8 becomes U+FFFD; NUL is written as
 * \u0000. */
void hr_json_write_string(hr_json_writer *w, const char *text);
void hr_json_write_string_n(hr_json_writer *w, const char *text, size_t len);
void hr_json_write_i64(hr_json_writer *w, int64_t value);
void hr_json_write_u64(hr_json_writer *w, uint64_t value);
void hr_json_write_bool(hr_json_writer *w, bool value);
void hr_json_write_null(hr_json_writer *w);
/* 9 significant digits, correctly rounded: reads back to the same f32. Infinities and NaN become
 * null. */
void hr_json_write_f32(hr_json_writer *w, float value);
/* 17 significant digits: reads back to the same double. Infinities and NaN become null. */
void hr_json_write_f64(hr_json_writer *w, double value);
/* Text that is JSON already (a number, a stored object), put as a value. */
void hr_json_write_raw(hr_json_writer *w, const char *json, size_t len);

/* Key and value in one call. */
static inline void hr_json_put_string(hr_json_writer *w, const char *key, const char *value) {
    hr_json_key(w, key);
    hr_json_write_string(w, value);
}
static inline void hr_json_put_i64(hr_json_writer *w, const char *key, int64_t value) {
    hr_json_key(w, key);
    hr_json_write_i64(w, value);
}
static inline void hr_json_put_u64(hr_json_writer *w, const char *key, uint64_t value) {
    hr_json_key(w, key);
    hr_json_write_u64(w, value);
}
static inline void hr_json_put_bool(hr_json_writer *w, const char *key, bool value) {
    hr_json_key(w, key);
    hr_json_write_bool(w, value);
}
static inline void hr_json_put_f64(hr_json_writer *w, const char *key, double value) {
    hr_json_key(w, key);
    hr_json_write_f64(w, value);
}
static inline void hr_json_put_null(hr_json_writer *w, const char *key) {
    hr_json_key(w, key);
    hr_json_write_null(w);
}

#endif
