/* The JSON reader: checks the grammar and builds cJSON's tree in one pass. cJSON's own parser is
 * lenient (control characters as space, "01", "1."), cuts strings at NUL and spends a node on every
 * value without a bound; it also is several times slower on manifests and headers, which have tens
 * of thousands of names. */
#include "format/json_check.h"

#include "format/json.h"

#include <limits.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NUMBER = 63, MAX_EXACT_DIGITS = 15 };

typedef struct hr_json_scan {
    const unsigned char *text;
    size_t len, at, values;
    hr_error *err;
} hr_json_scan;

/* What stands between two quotes. */
typedef struct json_text {
    const unsigned char *bytes;
    size_t len;
    bool escapes;
} json_text;

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

size_t hr_json_plain(const char *text, size_t n) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    size_t at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, sizeof word);
        uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');
        uint64_t low = word - ones * 0x20; /* top bits tell, from the first byte that is below on */
        if (((low | (quote - ones) | (slash - ones) | word) & tops) != 0)
            break;
    }
    return at;
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
static hr_status check_string(hr_json_scan *s, json_text *out) {
    size_t start = ++s->at;
    bool escapes = false;
    s->at += hr_json_plain((const char *)s->text + s->at, s->len - s->at);
    while (s->at < s->len) {
        unsigned char c = s->text[s->at];
        if (c == '"') {
            *out = (json_text){s->text + start, s->at - start, escapes};
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
static size_t put_escaped(const hr_json_scan *s, size_t *from, char *to) {
    static const char letters[] = "bfnrt", values[] = "\b\f\n\r\t";
    char kind = (char)s->text[*from + 1];
    if (kind != 'u') {
        const char *found = strchr(letters, kind);
        *to = found != NULL ? values[found - letters] : kind;
        *from += 2;
        return 1;
    }
    unsigned code = (unsigned)hex4(s, *from + 2);
    *from += 6;
    if (code >= 0xd800 && code <= 0xdbff) {
        code = 0x10000 + ((code - 0xd800) << 10) + ((unsigned)hex4(s, *from + 2) - 0xdc00);
        *from += 6;
    }
    return put_utf8(code, to);
}

/* The string itself, with a NUL behind it: to has text.len + 1 bytes, which is always enough. */
static void put_text(const hr_json_scan *s, const json_text *text, char *to) {
    size_t from = (size_t)(text->bytes - s->text), end = from + text->len, n = 0;
    if (!text->escapes) {
        memcpy(to, text->bytes, text->len);
        to[text->len] = '\0';
        return;
    }
    while (from < end) {
        if (s->text[from] == '\\')
            n += put_escaped(s, &from, to + n);
        else
            to[n++] = (char)s->text[from++];
    }
    to[n] = '\0';
}

static hr_status read_string(hr_json_scan *s, cJSON *node) {
    json_text text;
    HR_TRY(check_string(s, &text));
    node->valuestring = cJSON_malloc(text.len + 1);
    if (node->valuestring == NULL)
        return no_memory(s);
    node->type |= cJSON_String;
    put_text(s, &text, node->valuestring);
    return HR_OK;
}

/* ---- numbers and literals ---- */

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

static double whole_number(const unsigned char *digits, size_t len) {
    bool minus = digits[0] == '-';
    uint64_t value = 0;
    for (size_t i = minus; i < len; i++)
        value = value * 10 + (uint64_t)(digits[i] - '0');
    return minus ? -(double)value : (double)value;
}

static hr_status read_number(hr_json_scan *s, cJSON *node) {
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
    double value = whole && len <= MAX_EXACT_DIGITS ? whole_number(s->text + start, len)
                                                    : to_double(s->text + start, len);
    node->type |= cJSON_Number;
    node->valuedouble = value;
    node->valueint = value >= INT_MAX ? INT_MAX : value <= INT_MIN ? INT_MIN : (int)value;
    return HR_OK;
}

static hr_status read_literal(hr_json_scan *s, const char *literal, int type, cJSON *node) {
    size_t n = strlen(literal);
    if (s->len - s->at < n || memcmp(s->text + s->at, literal, n) != 0)
        return wrong(s, "a value was expected");
    s->at += n;
    node->type |= type;
    node->valueint = type == cJSON_True;
    return HR_OK;
}

/* ---- values ---- */

static hr_status read_value(hr_json_scan *s, int depth, cJSON *node);

/* A node behind the last child of parent, with its key in the same piece of memory. */
static cJSON *add_child(const hr_json_scan *s, cJSON *parent, const json_text *key) {
    cJSON *node = cJSON_malloc(sizeof *node + (key != NULL ? key->len + 1 : 0));
    if (node == NULL)
        return NULL;
    *node = (cJSON){0};
    if (key != NULL) {
        node->string = (char *)(node + 1);
        node->type = cJSON_StringIsConst; /* not freed by itself */
        put_text(s, key, node->string);
    }
    cJSON *first = parent->child;
    if (first == NULL) {
        parent->child = node;
        node->prev = node; /* the first child's is the last one */
    } else {
        first->prev->next = node;
        node->prev = first->prev;
        first->prev = node;
    }
    return node;
}

static hr_status read_member(hr_json_scan *s, int depth, cJSON *object) {
    json_text key;
    skip_space(s);
    if (peek(s) != '"')
        return wrong(s, "a key in quotes was expected");
    HR_TRY(check_string(s, &key));
    skip_space(s);
    if (peek(s) != ':')
        return wrong(s, "':' was expected after a key");
    s->at++;
    cJSON *node = add_child(s, object, &key);
    return node != NULL ? read_value(s, depth, node) : no_memory(s);
}

static hr_status read_item(hr_json_scan *s, int depth, cJSON *array) {
    cJSON *node = add_child(s, array, NULL);
    return node != NULL ? read_value(s, depth, node) : no_memory(s);
}

/* At the opening bracket. */
static hr_status read_group(hr_json_scan *s, int depth, cJSON *group) {
    bool object = peek(s) == '{';
    int end = object ? '}' : ']';
    group->type |= object ? cJSON_Object : cJSON_Array;
    s->at++;
    skip_space(s);
    if (peek(s) == end) {
        s->at++;
        return HR_OK;
    }
    for (;;) {
        HR_TRY(object ? read_member(s, depth, group) : read_item(s, depth, group));
        if (peek(s) == end) {
            s->at++;
            return HR_OK;
        }
        if (peek(s) != ',')
            return wrong(s, object ? "',' or '}' was expected" : "',' or ']' was expected");
        s->at++;
    }
}

/* A value with the space around it. */
static hr_status read_value(hr_json_scan *s, int depth, cJSON *node) {
    if (depth > HR_JSON_MAX_DEPTH)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON is nested deeper than %d", HR_JSON_MAX_DEPTH);
    if (++s->values > HR_JSON_MAX_VALUES)
        return hr_fail(s->err, HR_ERR_LIMIT, "JSON has more than %zu values", HR_JSON_MAX_VALUES);
    skip_space(s);
    switch (peek(s)) {
    case '{':
    case '[':
        HR_TRY(read_group(s, depth + 1, node));
        break;
    case '"':
        HR_TRY(read_string(s, node));
        break;
    case 't':
        HR_TRY(read_literal(s, "true", cJSON_True, node));
        break;
    case 'f':
        HR_TRY(read_literal(s, "false", cJSON_False, node));
        break;
    case 'n':
        HR_TRY(read_literal(s, "null", cJSON_NULL, node));
        break;
    case '-':
    case '0' ... '9':
        HR_TRY(read_number(s, node));
        break;
    case -1:
        return wrong(s, "the text ends where a value was expected");
    default:
        return wrong(s, "a value was expected");
    }
    skip_space(s);
    return HR_OK;
}

hr_status hr_json_read(const char *text, size_t len, cJSON **out, hr_error *err) {
    hr_json_scan s = {.text = (const unsigned char *)text, .len = len, .err = err};
    cJSON *tree = cJSON_CreateNull();
    if (tree == NULL)
        return no_memory(&s);
    tree->type = cJSON_Invalid;
    hr_status status = read_value(&s, 0, tree);
    if (status == HR_OK && s.at != len)
        status = wrong(&s, "more text after the value");
    if (status == HR_OK)
        *out = tree;
    else
        cJSON_Delete(tree);
    return status;
}
