/* Base64 of RFC 4648 (standard alphabet, padded): how the bytes of a payload travel inside JSON.
 *
 * The decoder is strict: nothing but the alphabet, padding where it belongs, no bits left over, so
 * that one text stands for one string of bytes. Sizes follow from the input alone. Thread-safe. */
#ifndef HR_FORMAT_BASE64_H
#define HR_FORMAT_BASE64_H

#include "base/buf.h"
#include "base/error.h"

/* Most bytes that n characters decode to; room for that many is always enough. */
static inline size_t hr_base64_decoded_max(size_t n) {
    return n / 4 * 3;
}

/* Decodes n characters into out, which may be the text itself (in place) but must not overlap it
 * otherwise; *size gets the bytes written. ERR_INVALID with the position of the first character
 * that does not belong; out then holds part of the bytes. */
hr_status hr_base64_decode(const char *text, size_t n, void *out, size_t *size, hr_error *err);

/* Appends the text of size bytes to the buffer; no NUL, no line breaks. */
void hr_base64_append(hr_buf *buf, const void *bytes, size_t size);

#endif
