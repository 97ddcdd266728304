/* Status names and the one place where error messages are formatted. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *hr_status_name(hr_status status) {
    switch (status) {
#define HR_STATUS_NAME(name, value, text)                                                          \
    case HR_##name:                                                                                \
        return #name;
        HR_STATUS_MAP(HR_STATUS_NAME)
#undef HR_STATUS_NAME
    }
    return "unknown";
}

const char *hr_status_text(hr_status status) {
    switch (status) {
#define HR_STATUS_TEXT(name, value, text)                                                          \
    case HR_##name:                                                                                \
        return text;
        HR_STATUS_MAP(HR_STATUS_TEXT)
#undef HR_STATUS_TEXT
    }
    return "unknown";
}

/* A cut message must stay valid UTF-8: step back over the bytes of a character that does not fit.
 */
static void cut_at_character(char *text, size_t size) {
    size_t len = strlen(text);
    if (len + 1 < size)
        return;
    size_t start = len;
    while (start > 0 && len - start < 4 && ((unsigned char)text[start - 1] & 0xC0) == 0x80)
        start--;
    if (start == 0)
        return;
    unsigned char lead = (unsigned char)text[start - 1];
    size_t need = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (len - (start - 1) < need)
        text[start - 1] = '\0';
}

hr_status hr_fail(hr_error *err, hr_status status, const char *fmt, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(err->message, sizeof err->message, fmt, args);
        va_end(args);
        cut_at_character(err->message, sizeof err->message);
        err->status = status;
    }
    return status;
}

hr_status hr_fail_context(hr_error *err, hr_status status, const char *fmt, ...) {
    if (err == NULL)
        return status;
    char text[sizeof err->message];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (n < 0)
        return err->status;
    size_t used = (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
    snprintf(text + used, sizeof text - used, ": %.*s", (int)sizeof err->message, err->message);
    cut_at_character(text, sizeof text);
    memcpy(err->message, text, sizeof text);
    return err->status;
}

noreturn void hr_assert_failed(const char *cond, const char *file, int line) {
    fprintf(stderr, "headrace: internal error: %s is false (%s:%d)\n", cond, file, line);
    abort();
}
