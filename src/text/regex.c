/* Oniguruma patterns on PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/regex.h"

#include "base/buf.h"
#include "text/utf8.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Both engines agree on Unicode white space but for U+180E, which PCRE2 counts in. */
#define SPACE_CHARS                                                                                \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define WORD_CHARS "\\p{L}\\p{M}\\p{Nd}\\p{Pc}"
#define HEX_CHARS "0-9A-Fa-f"

#define MAX_DEPTH 128 /* of groups */

/* Far above what a megabyte of text needs with the patterns in use, low enough to end within
 * seconds. */
#define MATCH_LIMIT 50000000u
#define HEAP_LIMIT_KIB 65536u
#define JIT_STACK_START 32768
#define JIT_STACK_MAX ((size_t)4 << 20)

struct hr_regex {
    pcre2_code *code;
};

struct hr_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Translation state: a cursor over the pattern, and where in the output the item that a repeat
 * would repeat begins. */
typedef struct translation {
    const char *p;
    size_t len, at;
    hr_buf *out;
    hr_error *err;
    size_t atom;            /* start of the last item */
    size_t open[MAX_DEPTH]; /* starts of the groups around the cursor */
    size_t depth;
} translation;

static hr_status refuse(const translation *t, const char *what) {
    return hr_fail(t->err, HR_ERR_UNSUPPORTED,
                   "regular expression \"%.*s\": %s at byte %zu is not supported",
                   (int)(t->len < 300 ? t->len : 300), t->p, what, t->at);
}

static bool at_text(const translation *t, const char *text) {
    size_t n = strlen(text);
    return t->len - t->at >= n && memcmp(t->p + t->at, text, n) == 0;
}

static void copy(translation *t, size_t n) {
    n = n < t->len - t->at ? n : t->len - t->at;
    hr_buf_append(t->out, t->p + t->at, n);
    t->at += n;
}

/* \p{Name}: names longer than a category are scripts, which PCRE2 would widen to script extensions.
 */
static hr_status translate_property(translation *t) {
    const char *close = memchr(t->p + t->at, '}', t->len - t->at);
    if (t->len - t->at < 3 || t->p[t->at + 2] != '{' || close == NULL) {
        copy(t, 3); /* \pL */
        return HR_OK;
    }
    size_t name = t->at + 3, end = (size_t)(close - t->p);
    bool script = end - name > 2 && memchr(t->p + name, '^', end - name) == NULL &&
                  memchr(t->p + name, '&', end - name) == NULL;
    copy(t, 3);
    if (script)
        hr_buf_puts(t->out, "sc:");
    copy(t, end + 1 - t->at);
    return HR_OK;
}

/* Appends the class members, in brackets of their own when not inside a class already. */
static void put_class(translation *t, bool in_class, bool negated, const char *members) {
    if (in_class)
        hr_buf_puts(t->out, members);
    else
        hr_buf_printf(t->out, negated ? "[^%s]" : "[%s]", members);
    t->at += 2;
}

static hr_status translate_escape(translation *t, bool in_class) {
    if (t->at + 1 == t->len)
        return refuse(t, "a backslash at the end");
    char c = t->p[t->at + 1];
    switch (c) {
    case 's':
        put_class(t, in_class, false, SPACE_CHARS);
        return HR_OK;
    case 'w':
        put_class(t, in_class, false, WORD_CHARS);
        return HR_OK;
    case 'h':
        put_class(t, in_class, false, HEX_CHARS);
        return HR_OK;
    case 'S':
        if (in_class)
            copy(t, 2); /* differs in U+180E only */
        else
            put_class(t, false, true, SPACE_CHARS);
        return HR_OK;
    case 'W':
        if (in_class)
            return refuse(t, "\\W in a class");
        put_class(t, false, true, WORD_CHARS);
        return HR_OK;
    case 'p':
    case 'P':
        return translate_property(t);
    case 'u':
        if (t->len - t->at < 6)
            return refuse(t, "a short \\u");
        hr_buf_printf(t->out, "\\x{%.4s}", t->p + t->at + 2);
        t->at += 6;
        return HR_OK;
    default:
        /* What both engines read alike; the rest (\Q, \K, \H, \C, \g ...) has another meaning. */
        if ((unsigned char)c < 0x80 && strchr("dDnrtfvaexAzZ0123456789", c) == NULL &&
            ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')))
            return refuse(t, "this escape");
        if (c == 'v') { /* one character there, a class here */
            hr_buf_puts(t->out, "\\x0B");
            t->at += 2;
            return HR_OK;
        }
        copy(t, 2);
        return HR_OK;
    }
}

static hr_status translate_class(translation *t) {
    copy(t, 1);
    if (at_text(t, "^"))
        copy(t, 1);
    if (at_text(t, "]"))
        return refuse(t, "a class that begins with ]");
    while (t->at < t->len) {
        if (at_text(t, "]")) {
            copy(t, 1);
            return HR_OK;
        }
        if (at_text(t, "&&"))
            return refuse(t, "a class intersection");
        if (at_text(t, "["))
            return refuse(t, "a class within a class");
        if (at_text(t, "\\"))
            HR_TRY(translate_escape(t, true));
        else
            copy(t, 1);
    }
    return refuse(t, "a class without end");
}

static hr_status open_group(translation *t) {
    static const char *const heads[] = {"(?:",  "(?=",  "(?!",  "(?>",
                                        "(?<=", "(?<!", "(?i:", "(?-i:"};
    if (at_text(t, "(*"))
        return refuse(t, "(*");
    if (t->depth == MAX_DEPTH)
        return refuse(t, "nesting this deep");
    t->open[t->depth++] = t->out->len;
    if (!at_text(t, "(?")) {
        copy(t, 1);
        return HR_OK;
    }
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (at_text(t, heads[i])) {
            copy(t, strlen(heads[i]));
            return HR_OK;
        }
    return refuse(t, "this kind of group");
}

static hr_status close_group(translation *t) {
    if (t->depth == 0)
        return refuse(t, "a ) without (");
    copy(t, 1);
    t->atom = t->open[--t->depth];
    return HR_OK;
}

/* Length of a repeat {n}, {n,}, {,m} or {n,m} at the cursor, 0 when the brace is an ordinary
 * character. */
static size_t repeat_length(const translation *t, bool *has_comma, bool *has_low) {
    size_t i = t->at + 1, digits = 0;
    *has_comma = *has_low = false;
    for (; i < t->len && t->p[i] != '}'; i++) {
        if (t->p[i] >= '0' && t->p[i] <= '9') {
            digits++;
            *has_low = *has_low || !*has_comma;
        } else if (t->p[i] == ',' && !*has_comma) {
            *has_comma = true;
        } else {
            return 0;
        }
    }
    return i < t->len && digits > 0 ? i + 1 - t->at : 0;
}

/* Behind a counted repeat + repeats once more there, and is possessive here; {,m} is a repeat only
 * there. */
static hr_status translate_repeat(translation *t) {
    bool has_comma, has_low;
    size_t n = repeat_length(t, &has_comma, &has_low);
    if (n == 0) {
        t->atom = t->out->len;
        hr_buf_putc(t->out, '\\');
        copy(t, 1);
        return HR_OK;
    }
    char next = t->at + n < t->len ? t->p[t->at + n] : '\0';
    if (next == '?' && !has_comma)
        return refuse(t, "{n}?");
    if (next == '+') {
        hr_buf_puts(t->out, "(?:");
        if (t->out->failed)
            return HR_OK; /* reported at the end */
        memmove(t->out->data + t->atom + 3, t->out->data + t->atom, t->out->len - 3 - t->atom);
        memcpy(t->out->data + t->atom, "(?:", 3);
    }
    hr_buf_puts(t->out, has_low ? "{" : "{0");
    t->at++;
    copy(t, n - 1);
    if (next == '+')
        hr_buf_putc(t->out, ')');
    return HR_OK;
}

static hr_status translate_next(translation *t) {
    char c = t->p[t->at];
    if (c == '(')
        return open_group(t);
    if (c == ')')
        return close_group(t);
    if (c == '{')
        return translate_repeat(t);
    if (c == '*' || c == '+' || c == '?') {
        copy(t, 1);
        return HR_OK;
    }
    t->atom = t->out->len;
    if (c == '\\')
        return translate_escape(t, false);
    if (c == '[')
        return translate_class(t);
    size_t used;
    hr_utf8_next(t->p + t->at, &used);
    copy(t, used);
    return HR_OK;
}

static hr_status translate(translation *t) {
    while (t->at < t->len)
        HR_TRY(translate_next(t));
    return t->out->failed ? hr_fail(t->err, HR_ERR_NO_MEMORY, "no memory for a regular expression")
                          : HR_OK;
}

static uint32_t options_of(hr_regex_dialect dialect) {
    uint32_t options = PCRE2_UTF | PCRE2_NO_UTF_CHECK;
    if (dialect == HR_REGEX_LITERAL)
        return options | PCRE2_LITERAL;
    /* ^ and $ always look at lines in Oniguruma's Ruby syntax */
    return options | PCRE2_UCP | (dialect == HR_REGEX_FROM_FILE ? PCRE2_MULTILINE : 0);
}

hr_status hr_regex_compile(hr_regex **out, const char *pattern, size_t len,
                           hr_regex_dialect dialect, hr_error *err) {
    if (len > HR_REGEX_MAX_PATTERN)
        return hr_fail(err, HR_ERR_LIMIT, "regular expression of %zu bytes: at most %d", len,
                       HR_REGEX_MAX_PATTERN);
    hr_buf text = {0};
    hr_status status = HR_OK;
    hr_regex *regex = NULL;
    if (dialect == HR_REGEX_FROM_FILE) {
        translation t = {.p = pattern, .len = len, .out = &text, .err = err};
        status = translate(&t);
    } else {
        hr_buf_append(&text, pattern, len);
    }
    if (status != HR_OK)
        goto done;
    regex = calloc(1, sizeof *regex);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (regex == NULL || context == NULL || text.failed) {
        pcre2_compile_context_free(context);
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a regular expression");
        goto done;
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    int code;
    PCRE2_SIZE where;
    regex->code =
        pcre2_compile((PCRE2_SPTR)text.data, text.len, options_of(dialect), &code, &where, context);
    pcre2_compile_context_free(context);
    if (regex->code == NULL) {
        char reason[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
        status =
            hr_fail(err, HR_ERR_UNSUPPORTED, "regular expression \"%.*s\" is not supported: %s",
                    (int)(len < 300 ? len : 300), pattern, reason);
        goto done;
    }
    /* Where the system allows no generated code the interpreter serves. */
    (void)pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE);
    *out = regex;
    regex = NULL;
done:
    hr_regex_free(regex);
    hr_buf_free(&text);
    return status;
}

void hr_regex_free(hr_regex *regex) {
    if (regex == NULL)
        return;
    pcre2_code_free(regex->code);
    free(regex);
}

hr_status hr_matcher_create(hr_matcher **out, hr_error *err) {
    hr_matcher *m = calloc(1, sizeof *m);
    if (m != NULL) {
        m->data = pcre2_match_data_create(1, NULL);
        m->context = pcre2_match_context_create(NULL);
    }
    if (m == NULL || m->data == NULL || m->context == NULL) {
        hr_matcher_free(m);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to match regular expressions");
    }
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
    pcre2_set_heap_limit(m->context, HEAP_LIMIT_KIB);
    m->stack = pcre2_jit_stack_create(JIT_STACK_START, JIT_STACK_MAX, NULL);
    if (m->stack != NULL)
        pcre2_jit_stack_assign(m->context, NULL, m->stack);
    *out = m;
    return HR_OK;
}

void hr_matcher_free(hr_matcher *matcher) {
    if (matcher == NULL)
        return;
    pcre2_jit_stack_free(matcher->stack);
    pcre2_match_context_free(matcher->context);
    pcre2_match_data_free(matcher->data);
    free(matcher);
}

hr_match_walk hr_match_walk_start(const hr_regex *regex, const char *text, size_t len) {
    return (hr_match_walk){.regex = regex, .text = text, .len = len};
}

static size_t after_char(const hr_match_walk *walk, size_t at) {
    size_t used = 1;
    if (at < walk->len)
        hr_utf8_next(walk->text + at, &used);
    return at + used;
}

hr_status hr_match_walk_next(hr_match_walk *walk, hr_matcher *matcher, bool *found, size_t *start,
                             size_t *end, hr_error *err) {
    *found = false;
    while (walk->from <= walk->len) {
        int rc = pcre2_match(walk->regex->code, (PCRE2_SPTR)walk->text, walk->len, walk->from,
                             PCRE2_NO_UTF_CHECK, matcher->data, matcher->context);
        if (rc == PCRE2_ERROR_NOMATCH)
            break;
        if (rc < 0) {
            char reason[128];
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)reason, sizeof reason);
            return hr_fail(err, HR_ERR_LIMIT,
                           "the tokenizer's regular expression failed at byte %zu of a text of %zu "
                           "bytes: %s; send shorter text",
                           walk->from, walk->len, reason);
        }
        const PCRE2_SIZE *span = pcre2_get_ovector_pointer(matcher->data);
        size_t s = span[0], e = span[1];
        walk->from = e > s ? e : after_char(walk, e);
        if (s == e && walk->any && walk->last_end == e)
            continue;
        walk->any = true;
        walk->last_end = e;
        *start = s;
        *end = e;
        *found = true;
        return HR_OK;
    }
    walk->from = walk->len + 1;
    return HR_OK;
}
