/* The normalizer of tokenizer.json. */
#include "text/normalizer.h"

#include "text/unicode_form.h"
#include "text/utf8.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* Sequences may nest; deeper than any real file means nonsense. */
#define MAX_NESTING 8

/* No real normal form grows text more than this; replacements written to explode do. */
static size_t longest_result(size_t len) {
    return 32 * len + 65536;
}

hr_status hr_pattern_read(const cJSON *node, hr_regex **out, hr_error *err) {
    const cJSON *pattern = hr_json_get(node, "pattern");
    const cJSON *literal = hr_json_get(pattern, "String"), *regex = hr_json_get(pattern, "Regex");
    if (cJSON_IsString(literal))
        return hr_regex_compile(out, literal->valuestring, strlen(literal->valuestring),
                                HR_REGEX_LITERAL, err);
    if (cJSON_IsString(regex))
        return hr_regex_compile(out, regex->valuestring, strlen(regex->valuestring),
                                HR_REGEX_FROM_FILE, err);
    return hr_fail(err, HR_ERR_CORRUPT,
                   "pattern: wanted {\"String\": text} or {\"Regex\": text}, got %s",
                   pattern == NULL ? "nothing" : hr_json_kind(pattern));
}

static hr_status copy_content(hr_normalizer_step *step, const char *text, hr_error *err) {
    step->content = strdup(text);
    return step->content != NULL ? HR_OK
                                 : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a normalizer");
}

static hr_status read_step(hr_normalizer_step *step, const cJSON *node, const char *type,
                           hr_error *err) {
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    for (size_t i = 0; i < 4; i++)
        if (strcmp(type, forms[i]) == 0) {
            step->kind = HR_NORMALIZE_UNICODE;
            step->compose = i % 2 == 0;
            step->compat = i >= 2;
            return HR_OK;
        }
    if (strcmp(type, "Prepend") == 0) {
        const char *text;
        step->kind = HR_NORMALIZE_PREPEND;
        HR_TRY(hr_json_get_string(node, "prepend", &text, err));
        return copy_content(step, text, err);
    }
    if (strcmp(type, "Replace") == 0) {
        const char *text;
        step->kind = HR_NORMALIZE_REPLACE;
        HR_TRY(hr_json_get_string(node, "content", &text, err));
        HR_TRY(hr_pattern_read(node, &step->pattern, err));
        return copy_content(step, text, err);
    }
    if (strcmp(type, "Strip") == 0) {
        step->kind = HR_NORMALIZE_STRIP;
        HR_TRY(hr_json_get_bool(node, "strip_left", &step->strip_left, err));
        return hr_json_get_bool(node, "strip_right", &step->strip_right, err);
    }
    if (strcmp(type, "Lowercase") == 0) {
        step->kind = HR_NORMALIZE_LOWERCASE;
        return HR_OK;
    }
    return hr_fail(err, HR_ERR_UNSUPPORTED, "normalizer \"%.64s\" is not supported", type);
}

static hr_status read_node(hr_normalizer *normalizer, const cJSON *node, int depth, hr_error *err) {
    const char *type;
    HR_TRY(hr_json_get_string(node, "type", &type, err));
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *list = hr_json_get(node, "normalizers");
        if (!cJSON_IsArray(list) || depth == MAX_NESTING)
            return hr_fail(
                err, HR_ERR_CORRUPT,
                "normalizer Sequence: wanted an array \"normalizers\", nested at most %d deep",
                MAX_NESTING);
        for (const cJSON *item = list->child; item != NULL; item = item->next)
            HR_TRY(read_node(normalizer, item, depth + 1, err));
        return HR_OK;
    }
    if (normalizer->count == HR_NORMALIZER_MAX_STEPS)
        return hr_fail(err, HR_ERR_LIMIT, "more than %d normalizers", HR_NORMALIZER_MAX_STEPS);
    return read_step(&normalizer->steps[normalizer->count++], node, type, err);
}

hr_status hr_normalizer_read(hr_normalizer *normalizer, const cJSON *node, hr_error *err) {
    *normalizer = (hr_normalizer){0};
    if (node == NULL || cJSON_IsNull(node))
        return HR_OK;
    return read_node(normalizer, node, 0, err);
}

void hr_normalizer_free(hr_normalizer *normalizer) {
    for (size_t i = 0; i < normalizer->count; i++) {
        free(normalizer->steps[i].content);
        hr_regex_free(normalizer->steps[i].pattern);
    }
    normalizer->count = 0;
}

hr_status hr_replace_all(const hr_regex *pattern, hr_matcher *matcher, const char *text, size_t len,
                         const char *content, hr_buf *out, hr_error *err) {
    hr_match_walk walk = hr_match_walk_start(pattern, text, len);
    size_t done = 0, start, end;
    for (;;) {
        bool found;
        HR_TRY(hr_match_walk_next(&walk, matcher, &found, &start, &end, err));
        if (!found)
            break;
        hr_buf_append(out, text + done, start - done);
        hr_buf_puts(out, content);
        done = end;
        if (out->len > longest_result(len))
            return hr_fail(
                err, HR_ERR_LIMIT,
                "replacements make more than %zu bytes out of %zu; the tokenizer's patterns "
                "are at fault",
                longest_result(len), len);
    }
    hr_buf_append(out, text + done, len - done);
    return HR_OK;
}

static void strip(const hr_normalizer_step *step, const char *text, size_t len, hr_buf *out) {
    size_t first = len, last = 0, used;
    for (size_t i = 0; i < len; i += used) {
        if (hr_char_is_space(hr_utf8_next(text + i, &used)))
            continue;
        first = first == len ? i : first;
        last = i + used;
    }
    size_t from = step->strip_left ? first : 0;
    size_t to = step->strip_right ? last : len;
    if (to > from)
        hr_buf_append(out, text + from, to - from);
}

static void lowercase(const char *text, size_t len, hr_buf *out) {
    size_t used;
    for (size_t i = 0; i < len; i += used) {
        uint32_t cp = hr_utf8_next(text + i, &used);
        char bytes[4];
        if (cp == 0x130) /* the one character whose lower case is two */
            hr_buf_puts(out, "i\xCC\x87");
        else
            hr_buf_append(out, bytes,
                          hr_utf8_put((uint32_t)utf8proc_tolower((utf8proc_int32_t)cp), bytes));
    }
}

static hr_status apply_step(const hr_normalizer_step *step, hr_matcher *matcher, const char *text,
                            size_t len, hr_buf *out, hr_error *err) {
    switch (step->kind) {
    case HR_NORMALIZE_UNICODE:
        return hr_unicode_form(text, len, step->compose, step->compat, out, err);
    case HR_NORMALIZE_PREPEND:
        hr_buf_puts(out, step->content);
        hr_buf_append(out, text, len);
        return HR_OK;
    case HR_NORMALIZE_REPLACE:
        return hr_replace_all(step->pattern, matcher, text, len, step->content, out, err);
    case HR_NORMALIZE_STRIP:
        strip(step, text, len, out);
        return HR_OK;
    case HR_NORMALIZE_LOWERCASE:
        lowercase(text, len, out);
        return HR_OK;
    }
    return hr_fail(err, HR_ERR_INTERNAL, "unknown normalizer step");
}

hr_status hr_normalizer_apply(const hr_normalizer *normalizer, hr_matcher *matcher, hr_buf *text,
                              hr_buf *other, hr_error *err) {
    size_t limit = longest_result(text->len);
    for (size_t i = 0; i < normalizer->count && text->len > 0; i++) {
        hr_buf_clear(other);
        HR_TRY(apply_step(&normalizer->steps[i], matcher, text->data, text->len, other, err));
        if (other->failed)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to normalise %zu bytes", text->len);
        if (other->len > limit)
            return hr_fail(err, HR_ERR_LIMIT,
                           "normalising makes %zu bytes, at most %zu are allowed", other->len,
                           limit);
        hr_buf swap = *text;
        *text = *other;
        *other = swap;
    }
    return HR_OK;
}
