/* A JSON grammar checker. cJSON is lenient (control characters as space, "01", "1."), cuts strings
 * at NUL and spends a node on every value; walking the text first makes what it then sees strict
 * and bounded. */
#include "format/json_check.h"

#include "format/json.h"

#include <string.h>

typedef struct hr_json_scan {
    const unsigned char *text;
    size_t len, at, values;
    hr_error *err;
} hr_json_scan;

static hr_status wrong(const hr_json_scan *s, const char *what) {
    return hr_fail(s->err, HR_ERR_INVALID, "malformed JSON at byte %zu: %s", s->at, what);
}

static int peek(const hr_json_scan *s) {
    return s->at < s->len ? s->text[s->at] : -1;
}

static void skip_space(hr_json_scan *s) {
    while (s->at < s->len) {
        unsigned char c = s->text[s->at];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r')
            return;
        s->at++;
    }
}

static bool continues(const char *text, size_t len, size_t from, size_t n) {
    if (from + n > len)
        return false;
    for (size_t i = from; i < from + n; i++) {
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return false;
    }
    return true;
}

size_t hr_utf8_sequence(const char *text, size_t len) {
    if (len == 0)
        return 0;
    unsigned char first = (unsigned char)text[0];
    unsigned char second = len > 1 ? (unsigned char)text[1] : 0;
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return continues(text, len, 1, 1) ? 2 : 0;
    if (first >= 0xe0 && first <= 0xef) {
        bool overlong = first == 0xe0 && second < 0xa0;
        bool surrogate = first == 0xed && second >= 0xa0;
        return !overlong && !surrogate && continues(text, len, 1, 2) ? 3 : 0;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        bool overlong = first == 0xf0 && second < 0x90;
        bool beyond = first == 0xf4 && second >= 0x90;
        return !overlong && !beyond && continues(text, len, 1, 3) ? 4 : 0;
    }
    return 0;
}

static int hex_digit(int c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The four digits after "\u"; -1 when they are not there. */
static int hex4(const hr_json_scan *s, size_t at) {
    int value = 0;
    for (size_t i = 0; i < 4; i++) {
        int digit = at + i < s->len ? hex_digit(s->text[at + i]) : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* At the backslash. */
static hr_status check_escape(hr_json_scan *s) {
    int kind = s->at + 1 < s->len ? s->text[s->at + 1] : -1;
    if (kind != 'u') {
        if (kind <= 0 || strchr("\"\\/bfnrt", kind) == NULL)
            return wrong(s, "unknown escape in a string");
        s->at += 2;
        return HR_OK;
    }
    int code = hex4(s, s->at + 2);
    if (code < 0)
        return wrong(s, "\\u needs four hexadecimal digits");
    if (code == 0)
        return wrong(s, "\\u0000 is not taken in strings");
    if (code >= 0xdc00 && code <= 0xdfff)
        return wrong(s, "half of a surrogate pair");
    s->at += 6;
    if (code >= 0xd800 && code <= 0xdbff) {
        bool escape = s->at + 1 < s->len && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u';
        int low = escape ? hex4(s, s->at + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return wrong(s, "half of a surrogate pair");
        s->at += 6;
    }
    return HR_OK;
}

/* At the opening quote. */
static hr_status check_string(hr_json_scan *s) {
    s->at++;
    while (s->at < s->len) {
        unsigned char c = s->text[s->at];
        if (c == '"') {
            s->at++;
            return HR_OK;
        }
        if (c < 0x20)
            return wrong(s, "control character in a string");
        if (c == '\\') {
            HR_TRY(check_escape(s));
        } else if (c < 0x80) {
            s->at++;
        } else {
            size_t n = hr_utf8_sequence((const char *)s->text + s->at, s->len - s->at);
            if (n == 0)
                return wrong(s, "invalid UTF-8 in a string");
            s->at += n;
        }
    }
    return wrong(s, "string without an end");
}

static bool skip_digits(hr_json_scan *s) {
    size_t start = s->at;
    while (peek(s) >= '0' && peek(s) <= '9')
        s->at++;
    return s->at > start;
}

static hr_status check_number(hr_json_scan *s) {
    size_t start = s->at;
    if (peek(s) == '-')
        s->at++;
    bool zero = peek(s) == '0';
    size_t digits = s->at;
    if (!skip_digits(s) || (zero && s->at > digits + 1))
        return wrong(s, "not a number");
    if (peek(s) == '.') {
        s->at++;
        if (!skip_digits(s))
            return wrong(s, "not a number");
    }
    if (peek(s) == 'e' || peek(s) == 'E') {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-')
            s->at++;
        if (!skip_digits(s))
            return wrong(s, "not a number");
    }
    /* cJSON copies a number into 63 characters. */
    return s->at - start > 63 ? wrong(s, "number of more than 63 characters") : HR_OK;
}

static hr_status check_literal(hr_json_scan *s, const char *literal) {
    size_t n = strlen(literal);
    if (s->len - s->at < n || memcmp(s->text + s->at, literal, n) != 0)
        return wrong(s, "a value was expected");
    s->at += n;
    return HR_OK;
}

static hr_status check_value(hr_json_scan *s, int depth);

static hr_status check_object(hr_json_scan *s, int depth) {
    s->at++;
    skip_space(s);
    if (peek(s) == '}') {
        s->at++;
        return HR_OK;
    }
    for (;;) {
        skip_space(s);
        if (peek(s) != '"')
            return wrong(s, "a key in quotes was expected");
        HR_TRY(check_string(s));
        skip_space(s);
        if (peek(s) != ':')
            return wrong(s, "':' was expected after a key");
        s->at++;
        HR_TRY(check_value(s, depth));
        if (peek(s) == '}') {
            s->at++;
            return HR_OK;
        }
        if (peek(s) != ',')
            return wrong(s, "',' or '}' was expected");
        s->at++;
    }
}

static hr_status check_array(hr_json_scan *s, int depth) {
    s->at++;
    skip_space(s);
    if (peek(s) == ']') {
        s->at++;
        return HR_OK;
    }
    for (;;) {
        HR_TRY(check_value(s, depth));
        if (peek(s) == ']') {
            s->at++;
            return HR_OK;
        }
        if (peek(s) != ',')
            return wrong(s, "',' or ']' was expected");
        s->at++;
    }
}

/* A value with the space around it. */
static hr_status check_value(hr_json_scan *s, int depth) {
    if (depth > HR_JSON_MAX_DEPTH)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON is nested deeper than %d", HR_JSON_MAX_DEPTH);
    if (++s->values > HR_JSON_MAX_VALUES)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON has more than %zu values", HR_JSON_MAX_VALUES);
    skip_space(s);
    switch (peek(s)) {
    case '{':
        HR_TRY(check_object(s, depth + 1));
        break;
    case '[':
        HR_TRY(check_array(s, depth + 1));
        break;
    case '"':
        HR_TRY(check_string(s));
        break;
    case 't':
        HR_TRY(check_literal(s, "true"));
        break;
    case 'f':
        HR_TRY(check_literal(s, "false"));
        break;
    case 'n':
        HR_TRY(check_literal(s, "null"));
        break;
    case '-':
    case '0' ... '9':
        HR_TRY(check_number(s));
        break;
    case -1:
        return wrong(s, "the text ends where a value was expected");
    default:
        return wrong(s, "a value was expected");
    }
    skip_space(s);
    return HR_OK;
}

hr_status hr_json_check(const char *text, size_t len, hr_error *err) {
    hr_json_scan s = {.text = (const unsigned char *)text, .len = len, .err = err};
    HR_TRY(check_value(&s, 0));
    return s.at == len ? HR_OK : wrong(&s, "more text after the value");
}
