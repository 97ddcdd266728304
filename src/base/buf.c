/* A growing byte string. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool reserve(hr_buf *buf, size_t extra) {
    if (buf->failed)
        return false;
    if (extra < buf->cap - buf->len)
        return true;
    size_t want = buf->cap < 64 ? 64 : buf->cap;
    while (want - buf->len <= extra) {
        if (want > SIZE_MAX / 2) {
            buf->failed = true;
            return false;
        }
        want *= 2;
    }
    char *data = realloc(buf->data, want);
    if (data == NULL) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->cap = want;
    return true;
}

void hr_buf_append(hr_buf *buf, const void *bytes, size_t len) {
    if (!reserve(buf, len))
        return;
    if (len > 0)
        memcpy(buf->data + buf->len, bytes, len);
    buf->len += len;
    buf->data[buf->len] = '\0';
}

void hr_buf_puts(hr_buf *buf, const char *text) {
    hr_buf_append(buf, text, strlen(text));
}

void hr_buf_putc(hr_buf *buf, char c) {
    hr_buf_append(buf, &c, 1);
}

void hr_buf_printf(hr_buf *buf, const char *fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0)
        buf->failed = true;
    else if (reserve(buf, (size_t)n)) {
        vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, again);
        buf->len += (size_t)n;
    }
    va_end(again);
}

void hr_buf_clear(hr_buf *buf) {
    buf->len = 0;
    buf->failed = false;
    if (buf->data != NULL)
        buf->data[0] = '\0';
}

void hr_buf_free(hr_buf *buf) {
    free(buf->data);
    *buf = (hr_buf){0};
}
