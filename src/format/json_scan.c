/* The JSON reader: checks the grammar while it reads, in one pass. cJSON's own parser is lenient
 * (control characters as space, "01", "1."), cuts strings at NUL, spends a node on every value
 * without a bound, and is several times slower on manifests and headers, which have tens of
 * thousands of names. */
#include "format/json_scan.h"

#include "format/json.h"
#include "format/json_bytes.h"

#include <limits.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NUMBER = 63, MAX_EXACT_DIGITS = 15, MAX_64_BIT_DIGITS = 20 };

static hr_status wrong(const hr_json_scan *s, const char *what) {
    return hr_fail(s->err, HR_ERR_INVALID, "malformed JSON at byte %zu: %s", s->at, what);
}

static hr_status no_memory(const hr_json_scan *s) {
    return hr_fail(s->err, HR_ERR_NO_MEMORY, "no memory for the JSON tree of %zu bytes", s->len);
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

/* ---- strings ---- */

static int hex_digit(int c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The four digits after "\u", before end; -1 when they are not there. */
static int hex4(const unsigned char *at, const unsigned char *end) {
    int value = 0;
    if (end - at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(at[i]);
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
    int code = hex4(s->text + s->at + 2, s->text + s->len);
    if (code < 0)
        return wrong(s, "\\u needs four hexadecimal digits");
    if (code == 0)
        return wrong(s, "\\u0000 is not taken in strings");
    if (code >= 0xdc00 && code <= 0xdfff)
        return wrong(s, "half of a surrogate pair");
    s->at += 6;
    if (code >= 0xd800 && code <= 0xdbff) {
        bool escape = s->at + 1 < s->len && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u';
        int low = escape ? hex4(s->text + s->at + 2, s->text + s->len) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return wrong(s, "half of a surrogate pair");
        s->at += 6;
    }
    return HR_OK;
}

/* At the opening quote. */
static hr_status check_string(hr_json_scan *s, hr_json_text *out) {
    size_t start = ++s->at;
    bool escapes = false;
    s->at += hr_json_plain((const char *)s->text + s->at, s->len - s->at);
    while (s->at < s->len) {
        unsigned char c = s->text[s->at];
        if (c == '"') {
            *out = (hr_json_text){s->text + start, s->at - start, escapes};
            s->at++;
            return HR_OK;
        }
        if (c < 0x20)
            return wrong(s, "control character in a string");
        if (c == '\\') {
            HR_TRY(check_escape(s));
            escapes = true;
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

static size_t put_utf8(unsigned code, char *to) {
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--) {
        to[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    to[0] = (char)((0xf00u >> n & 0xf0u) | code);
    return n;
}

/* One escape that was found good, at its backslash; *from is moved behind it. */
static size_t put_escaped(const unsigned char **from, const unsigned char *end, char *to) {
    static const char letters[] = "bfnrt", values[] = "\b\f\n\r\t";
    char kind = (char)(*from)[1];
    if (kind != 'u') {
        const char *found = strchr(letters, kind);
        *to = found != NULL ? values[found - letters] : kind;
        *from += 2;
        return 1;
    }
    unsigned code = (unsigned)hex4(*from + 2, end);
    *from += 6;
    if (code >= 0xd800 && code <= 0xdbff) {
        code = 0x10000 + ((code - 0xd800) << 10) + ((unsigned)hex4(*from + 2, end) - 0xdc00);
        *from += 6;
    }
    return put_utf8(code, to);
}

size_t hr_json_text_copy(const hr_json_text *text, char *to) {
    const unsigned char *from = text->bytes, *end = from + text->len;
    size_t n = text->escapes ? 0 : text->len;
    if (!text->escapes)
        memcpy(to, from, n);
    while (text->escapes && from < end) {
        if (*from == '\\')
            n += put_escaped(&from, end, to + n);
        else
            to[n++] = (char)*from++;
    }
    to[n] = '\0';
    return n;
}

/* ---- numbers ---- */

static bool skip_digits(hr_json_scan *s) {
    size_t start = s->at;
    while (peek(s) >= '0' && peek(s) <= '9')
        s->at++;
    return s->at > start;
}

/* As strtod would read it in the "C" locale: the caller may have set another. */
static double to_double(const unsigned char *digits, size_t len) {
    char text[MAX_NUMBER + 1];
    memcpy(text, digits, len);
    text[len] = '\0';
    char *point = memchr(text, '.', len);
    if (point != NULL)
        *point = localeconv()->decimal_point[0];
    return strtod(text, NULL);
}

/* False when there is something else than digits, or more than any 64 bits hold. */
static bool read_digits(const unsigned char *digits, size_t len, uint64_t *out) {
    uint64_t value = 0;
    if (len >= MAX_64_BIT_DIGITS)
        return false;
    for (size_t i = 0; i < len; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(digits[i] - '0');
    }
    *out = value;
    return true;
}

static double whole_number(const unsigned char *digits, size_t len) {
    bool minus = digits[0] == '-';
    uint64_t value = 0;
    read_digits(digits + minus, len - minus, &value);
    return minus ? -(double)value : (double)value;
}

static hr_status check_number(hr_json_scan *s, double *out) {
    size_t start = s->at;
    if (peek(s) == '-')
        s->at++;
    bool zero = peek(s) == '0', whole = true;
    size_t digits = s->at;
    if (!skip_digits(s) || (zero && s->at > digits + 1))
        return wrong(s, "not a number");
    if (peek(s) == '.') {
        whole = false;
        s->at++;
        if (!skip_digits(s))
            return wrong(s, "not a number");
    }
    if (peek(s) == 'e' || peek(s) == 'E') {
        whole = false;
        s->at++;
        if (peek(s) == '+' || peek(s) == '-')
            s->at++;
        if (!skip_digits(s))
            return wrong(s, "not a number");
    }
    size_t len = s->at - start;
    if (len > MAX_NUMBER)
        return wrong(s, "number of more than 63 characters");
    *out = whole && len <= MAX_EXACT_DIGITS ? whole_number(s->text + start, len)
                                            : to_double(s->text + start, len);
    return HR_OK;
}

/* ---- one value after the other ---- */

/* Where a value must begin. */
static hr_status enter_value(hr_json_scan *s) {
    if (s->depth > HR_JSON_MAX_DEPTH)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON is nested deeper than %d", HR_JSON_MAX_DEPTH);
    if (++s->values > HR_JSON_MAX_VALUES)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON has more than %zu values", HR_JSON_MAX_VALUES);
    skip_space(s);
    return HR_OK;
}

/* And has ended. */
static hr_status leave_value(hr_json_scan *s, hr_status status) {
    if (status == HR_OK)
        skip_space(s);
    return status;
}

static hr_status wrong_kind(const hr_json_scan *s) {
    return wrong(s,
                 peek(s) < 0 ? "the text ends where a value was expected" : "a value was expected");
}

int hr_json_peek(hr_json_scan *s) {
    skip_space(s);
    return peek(s);
}

hr_status hr_json_next_string(hr_json_scan *s, hr_json_text *out) {
    HR_TRY(enter_value(s));
    return leave_value(s, peek(s) == '"' ? check_string(s, out) : wrong_kind(s));
}

hr_status hr_json_next_size(hr_json_scan *s, bool *is_size, uint64_t *out) {
    double value;
    HR_TRY(enter_value(s));
    int c = peek(s);
    if (c != '-' && (c < '0' || c > '9'))
        return wrong_kind(s);
    size_t start = s->at;
    HR_TRY(check_number(s, &value));
    *is_size = read_digits(s->text + start, s->at - start, out) && *out <= INT64_MAX;
    return leave_value(s, HR_OK);
}

static hr_status read_key(hr_json_scan *s, hr_json_text *key) {
    skip_space(s);
    if (peek(s) != '"')
        return wrong(s, "a key in quotes was expected");
    HR_TRY(check_string(s, key));
    skip_space(s);
    if (peek(s) != ':')
        return wrong(s, "':' was expected after a key");
    s->at++;
    return HR_OK;
}

/* At the opening bracket. */
static hr_status read_group(hr_json_scan *s, bool object, hr_json_each each, void *ctx) {
    int end = object ? '}' : ']';
    hr_json_text key;
    s->at++;
    skip_space(s);
    if (peek(s) == end) {
        s->at++;
        return HR_OK;
    }
    s->depth++;
    for (;;) {
        if (object)
            HR_TRY(read_key(s, &key));
        HR_TRY(each(ctx, s, object ? &key : NULL));
        if (peek(s) == end)
            break;
        if (peek(s) != ',')
            return wrong(s, object ? "',' or '}' was expected" : "',' or ']' was expected");
        s->at++;
    }
    s->depth--;
    s->at++;
    return HR_OK;
}

hr_status hr_json_next_object(hr_json_scan *s, hr_json_each each, void *ctx) {
    HR_TRY(enter_value(s));
    return leave_value(s, peek(s) == '{' ? read_group(s, true, each, ctx) : wrong_kind(s));
}

hr_status hr_json_next_array(hr_json_scan *s, hr_json_each each, void *ctx) {
    HR_TRY(enter_value(s));
    return leave_value(s, peek(s) == '[' ? read_group(s, false, each, ctx) : wrong_kind(s));
}

hr_status hr_json_end(const hr_json_scan *s) {
    return s->at == s->len ? HR_OK : wrong(s, "more text after the value");
}

/* ---- as a tree ---- */

static hr_status fill_node(hr_json_scan *s, cJSON *node);

/* A node behind the last child of the parent, with its key in the same piece of memory. */
static hr_status add_child(void *ctx, hr_json_scan *s, const hr_json_text *key) {
    cJSON *parent = ctx, *first = parent->child;
    cJSON *node = cJSON_malloc(sizeof *node + (key != NULL ? key->len + 1 : 0));
    if (node == NULL)
        return no_memory(s);
    *node = (cJSON){0};
    if (key != NULL) {
        node->string = (char *)(node + 1);
        node->type = cJSON_StringIsConst; /* not freed by itself */
        hr_json_text_copy(key, node->string);
    }
    if (first == NULL) {
        parent->child = node->prev = node; /* prev of the first child is the last one */
    } else {
        node->prev = first->prev;
        first->prev = first->prev->next = node;
    }
    return fill_node(s, node);
}

static hr_status fill_string(hr_json_scan *s, cJSON *node) {
    hr_json_text text;
    HR_TRY(check_string(s, &text));
    node->valuestring = cJSON_malloc(text.len + 1);
    if (node->valuestring == NULL)
        return no_memory(s);
    node->type |= cJSON_String;
    hr_json_text_copy(&text, node->valuestring);
    return HR_OK;
}

/* An integer that a double may not hold keeps its digits, beside the nearest double. */
static hr_status keep_digits(const hr_json_scan *s, size_t start, cJSON *node) {
    size_t len = s->at - start;
    for (size_t i = start; i < s->at; i++)
        if (strchr(".eE", s->text[i]) != NULL)
            return HR_OK;
    node->valuestring = cJSON_malloc(len + 1);
    if (node->valuestring == NULL)
        return no_memory(s);
    memcpy(node->valuestring, s->text + start, len);
    node->valuestring[len] = '\0';
    return HR_OK;
}

static hr_status fill_number(hr_json_scan *s, cJSON *node) {
    size_t start = s->at;
    HR_TRY(check_number(s, &node->valuedouble));
    if (s->at - start > MAX_EXACT_DIGITS && s->at - start <= MAX_64_BIT_DIGITS)
        HR_TRY(keep_digits(s, start, node));
    double value = node->valuedouble;
    node->type |= cJSON_Number;
    node->valueint = value >= INT_MAX ? INT_MAX : value <= INT_MIN ? INT_MIN : (int)value;
    return HR_OK;
}

static hr_status fill_group(hr_json_scan *s, bool object, cJSON *node) {
    node->type |= object ? cJSON_Object : cJSON_Array;
    return read_group(s, object, add_child, node);
}

static hr_status fill_literal(hr_json_scan *s, const char *literal, int type, cJSON *node) {
    size_t n = strlen(literal);
    if (s->len - s->at < n || memcmp(s->text + s->at, literal, n) != 0)
        return wrong_kind(s);
    s->at += n;
    node->type |= type;
    node->valueint = type == cJSON_True;
    return HR_OK;
}

static hr_status fill_by_kind(hr_json_scan *s, cJSON *node) {
    switch (peek(s)) {
    case '{':
        return fill_group(s, true, node);
    case '[':
        return fill_group(s, false, node);
    case '"':
        return fill_string(s, node);
    case 't':
        return fill_literal(s, "true", cJSON_True, node);
    case 'f':
        return fill_literal(s, "false", cJSON_False, node);
    case 'n':
        return fill_literal(s, "null", cJSON_NULL, node);
    case '-':
    case '0' ... '9':
        return fill_number(s, node);
    default:
        return wrong_kind(s);
    }
}

static hr_status fill_node(hr_json_scan *s, cJSON *node) {
    HR_TRY(enter_value(s));
    return leave_value(s, fill_by_kind(s, node));
}

hr_status hr_json_next_tree(hr_json_scan *s, cJSON **out) {
    cJSON *tree = cJSON_CreateNull();
    if (tree == NULL)
        return no_memory(s);
    tree->type = cJSON_Invalid;
    hr_status status = fill_node(s, tree);
    if (status == HR_OK)
        *out = tree;
    else
        cJSON_Delete(tree);
    return status;
}
