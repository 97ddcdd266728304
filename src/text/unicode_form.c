/* Unicode normal forms. utf8proc knows the tables; its own ordering of combining marks is quadratic
 * in the length of a run of marks, which text from outside could exploit, so the ordering is done
 * here by counting. */
#include "text/unicode_form.h"

#include "text/utf8.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static bool is_ascii(const char *text, size_t len) {
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] >= 0x80)
            return false;
    return true;
}

typedef struct points {
    utf8proc_int32_t *data;
    size_t len, cap;
} points;

static bool points_reserve(points *p, size_t extra) {
    if (p->cap - p->len >= extra)
        return true;
    size_t cap = p->cap * 2 + extra;
    utf8proc_int32_t *data = realloc(p->data, cap * sizeof *data);
    if (data == NULL)
        return false;
    p->data = data;
    p->cap = cap;
    return true;
}

static bool decompose(const char *text, size_t len, utf8proc_option_t options, points *out) {
    enum { LONGEST = 32 }; /* the longest decomposition of one character has 18 */
    if (!points_reserve(out, len + LONGEST))
        return false;
    size_t used;
    int boundary = 0;
    for (size_t i = 0; i < len; i += used) {
        if (!points_reserve(out, LONGEST))
            return false;
        utf8proc_int32_t cp = (utf8proc_int32_t)hr_utf8_next(text + i, &used);
        utf8proc_ssize_t n =
            utf8proc_decompose_char(cp, out->data + out->len, LONGEST, options, &boundary);
        if (n < 0 || n > LONGEST)
            return false;
        out->len += (size_t)n;
    }
    return true;
}

static unsigned combining_class(utf8proc_int32_t cp) {
    return cp < 0x300 ? 0 : (unsigned)utf8proc_get_property(cp)->combining_class & 0xFF;
}

/* Stable sort of data[0..n) by combining class; tmp holds n more. */
static void order_run(utf8proc_int32_t *data, size_t n, utf8proc_int32_t *tmp) {
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++)
        start[combining_class(data[i]) + 1]++;
    for (size_t c = 1; c < 257; c++)
        start[c] += start[c - 1];
    for (size_t i = 0; i < n; i++)
        tmp[start[combining_class(data[i])]++] = data[i];
    memcpy(data, tmp, n * sizeof *data);
}

static bool order_marks(points *p) {
    utf8proc_int32_t *tmp = NULL;
    bool ok = true;
    for (size_t i = 0; i < p->len && ok;) {
        size_t end = i;
        bool sorted = true;
        unsigned last = 0, class;
        while (end < p->len && (class = combining_class(p->data[end])) != 0) {
            sorted = sorted && class >= last;
            last = class;
            end++;
        }
        if (!sorted && tmp == NULL)
            ok = (tmp = malloc(p->len * sizeof *tmp)) != NULL;
        if (!sorted && ok)
            order_run(p->data + i, end - i, tmp);
        i = end + 1;
    }
    free(tmp);
    return ok;
}

hr_status hr_unicode_form(const char *text, size_t len, bool compose, bool compat, hr_buf *out,
                          hr_error *err) {
    if (is_ascii(text, len)) { /* is in every form already */
        hr_buf_append(out, text, len);
        return HR_OK;
    }
    utf8proc_option_t options = UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    if (compat)
        options |= UTF8PROC_COMPAT;
    points p = {0};
    bool ok = decompose(text, len, options, &p) && order_marks(&p);
    if (ok && compose) {
        utf8proc_ssize_t n = utf8proc_normalize_utf32(p.data, (utf8proc_ssize_t)p.len, options);
        ok = n >= 0;
        p.len = ok ? (size_t)n : 0;
    }
    for (size_t i = 0; ok && i < p.len; i++) {
        char bytes[4];
        hr_buf_append(out, bytes, hr_utf8_put((uint32_t)p.data[i], bytes));
    }
    free(p.data);
    return ok ? HR_OK : hr_fail(err, HR_ERR_NO_MEMORY, "no memory to normalise %zu bytes", len);
}
