/* A growing byte string: the one way the project builds text and bytes of unknown length. */
#ifndef HR_BASE_BUF_H
#define HR_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

/* data is NUL-terminated whenever it is not NULL; len excludes that NUL. Zero-initialise to start;
 * free with hr_buf_free. When an allocation fails the buffer is left as it was, failed becomes true
 * and later appends do nothing: check failed once, at the end. */
typedef struct hr_buf {
    char *data;
    size_t len, cap;
    bool failed;
} hr_buf;

void hr_buf_append(hr_buf *buf, const void *bytes, size_t len);
void hr_buf_puts(hr_buf *buf, const char *text);
void hr_buf_putc(hr_buf *buf, char c);
void hr_buf_printf(hr_buf *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void hr_buf_clear(hr_buf *buf); /* keeps the memory; clears failed */
void hr_buf_free(hr_buf *buf);  /* back to zero */

#endif
