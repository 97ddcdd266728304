/* The streaming JSON writer. Floats have a path of their own since replies are mostly made of them.
 */
#include "format/json_writer.h"

#include "format/json_bytes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void hr_json_writer_init(hr_json_writer *w, hr_buf *buf) {
    w->buf = buf;
    w->comma = false;
}

static void before_value(hr_json_writer *w) {
    if (w->comma)
        hr_buf_putc(w->buf, ',');
    w->comma = true;
}

static void open_group(hr_json_writer *w, char bracket) {
    before_value(w);
    hr_buf_putc(w->buf, bracket);
    w->comma = false;
}

static void close_group(hr_json_writer *w, char bracket) {
    hr_buf_putc(w->buf, bracket);
    w->comma = true;
}

void hr_json_object_begin(hr_json_writer *w) {
    open_group(w, '{');
}

void hr_json_object_end(hr_json_writer *w) {
    close_group(w, '}');
}

void hr_json_array_begin(hr_json_writer *w) {
    open_group(w, '[');
}

void hr_json_array_end(hr_json_writer *w) {
    close_group(w, ']');
}

static void put_escape(hr_buf *buf, unsigned char c) {
    static const char hex[] = "0123456789abcdef";
    static const char named[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const char *at = c ? strchr(named, c) : NULL;
    if (at != NULL) {
        char text[2] = {'\\', letters[at - named]};
        hr_buf_append(buf, text, sizeof text);
    } else {
        char text[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        hr_buf_append(buf, text, sizeof text);
    }
}

static void put_string(hr_buf *buf, const char *text, size_t len) {
    size_t start = 0, at = hr_json_plain(text, len);
    hr_buf_putc(buf, '"');
    while (at < len) {
        unsigned char c = (unsigned char)text[at];
        bool escape = c < 0x20 || c == '"' || c == '\\';
        size_t n = escape ? 0 : c < 0x80 ? 1 : hr_utf8_sequence(text + at, len - at);
        at += n;
        if (n > 0)
            continue;
        hr_buf_append(buf, text + start, at - start);
        if (escape)
            put_escape(buf, c);
        else
            hr_buf_append(buf, "\xef\xbf\xbd", 3);
        start = ++at;
    }
    hr_buf_append(buf, text + start, len - start);
    hr_buf_putc(buf, '"');
}

void hr_json_key(hr_json_writer *w, const char *key) {
    before_value(w);
    put_string(w->buf, key, strlen(key));
    hr_buf_putc(w->buf, ':');
    w->comma = false;
}

void hr_json_write_string(hr_json_writer *w, const char *text) {
    hr_json_write_string_n(w, text, strlen(text));
}

void hr_json_write_string_n(hr_json_writer *w, const char *text, size_t len) {
    before_value(w);
    put_string(w->buf, text, len);
}

/* Writes the decimal digits of value to the end of text[20] and returns where they begin. */
static char *digits_of(uint64_t value, char text[20]) {
    char *at = text + 20;
    do {
        *--at = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    return at;
}

void hr_json_write_u64(hr_json_writer *w, uint64_t value) {
    char text[20], *at = digits_of(value, text);
    before_value(w);
    hr_buf_append(w->buf, at, (size_t)(text + 20 - at));
}

void hr_json_write_i64(hr_json_writer *w, int64_t value) {
    char text[20], *at = digits_of(value < 0 ? 0 - (uint64_t)value : (uint64_t)value, text);
    before_value(w);
    if (value < 0)
        hr_buf_putc(w->buf, '-');
    hr_buf_append(w->buf, at, (size_t)(text + 20 - at));
}

void hr_json_write_bool(hr_json_writer *w, bool value) {
    before_value(w);
    hr_buf_puts(w->buf, value ? "true" : "false");
}

void hr_json_write_null(hr_json_writer *w) {
    before_value(w);
    hr_buf_puts(w->buf, "null");
}

void hr_json_write_raw(hr_json_writer *w, const char *json, size_t len) {
    before_value(w);
    hr_buf_append(w->buf, json, len);
}

/* A number that some readers would take for an integer gets ".0". */
static void put_float_text(hr_buf *buf, const char *text, size_t len) {
    hr_buf_append(buf, text, len);
    if (strcspn(text, ".e") == len)
        hr_buf_append(buf, ".0", 2);
}

/* The text of %.9g for magnitudes that it prints without an exponent; 0 when the value is outside
 * or so near to a tie that double arithmetic cannot say which way it rounds. */
static size_t format_plain(double magnitude, char *text) {
    static const double power[] = {1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1,  1e2,  1e3, 1e4,
                                   1e5,  1e6,  1e7,  1e8,  1e9, 1e10, 1e11, 1e12};
    if (!(magnitude >= 1e-4 && magnitude < 1e8))
        return 0;
    int exponent = -4;
    while (magnitude >= power[exponent + 5])
        exponent++;
    double scaled = magnitude * power[8 - exponent + 4];
    double whole = floor(scaled), rest = scaled - whole;
    if (fabs(rest - 0.5) < 1e-4 || whole < 1e8 || whole >= 999999999.0)
        return 0;
    uint64_t digits = (uint64_t)whole + (rest > 0.5);
    int n_digits = 9;
    while (digits % 10 == 0) {
        digits /= 10;
        n_digits--;
    }
    char decimal[20], *from = digits_of(digits, decimal);
    char *to = text;
    if (exponent < 0) {
        *to++ = '0';
        *to++ = '.';
        for (int i = -1; i > exponent; i--)
            *to++ = '0';
        memcpy(to, from, (size_t)n_digits);
        to += n_digits;
    } else {
        for (int i = 0; i < n_digits || i <= exponent; i++) {
            if (i == exponent + 1)
                *to++ = '.';
            *to++ = i < n_digits ? from[i] : '0';
        }
    }
    *to = '\0';
    return (size_t)(to - text);
}

void hr_json_write_f32(hr_json_writer *w, float value) {
    char text[40];
    if (!isfinite(value)) {
        hr_json_write_null(w);
        return;
    }
    before_value(w);
    if (value < 0)
        hr_buf_putc(w->buf, '-');
    size_t len = format_plain(fabs((double)value), text);
    if (len == 0)
        len = (size_t)snprintf(text, sizeof text, "%.9g", fabs((double)value));
    put_float_text(w->buf, text, len);
}

void hr_json_write_f64(hr_json_writer *w, double value) {
    char text[40];
    if (!isfinite(value)) {
        hr_json_write_null(w);
        return;
    }
    before_value(w);
    size_t len = (size_t)snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value)
        len = (size_t)snprintf(text, sizeof text, "%.17g", value);
    put_float_text(w->buf, text, len);
}
