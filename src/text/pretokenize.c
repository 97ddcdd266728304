/* The pre-tokenizer of tokenizer.json. Each step cuts one piece and hands every part on to the next
 * step at once, so no list of pieces is ever built. */
#include "text/pretokenize.h"

#include "text/byte_level.h"
#include "text/normalizer.h"
#include "text/utf8.h"

#include <string.h>

#define MAX_NESTING 8

/* The pattern of GPT-2's byte-level BPE: contractions, then letters, digits or symbols with one
 * leading space, then spaces but for the last before a word. */
#define BYTE_LEVEL_PATTERN                                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define WORD_PATTERN "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]+"
#define SPACE_SET                                                                                  \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define SYMBOLS_PATTERN "[^" SPACE_SET "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]+"

/* --- reading --- */

static hr_status own_pattern(hr_pretokenizer_step *step, const char *pattern,
                             hr_split_behavior behavior, bool invert, hr_error *err) {
    step->kind = HR_PRETOKENIZE_SPLIT;
    step->behavior = behavior;
    step->invert = invert;
    return hr_regex_compile(&step->regex, pattern, strlen(pattern), HR_REGEX_OWN, err);
}

static hr_status read_split(hr_pretokenizer_step *step, const cJSON *node, hr_error *err) {
    static const char *const names[] = {
        [HR_SPLIT_REMOVED] = "Removed",
        [HR_SPLIT_ISOLATED] = "Isolated",
        [HR_SPLIT_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
        [HR_SPLIT_MERGED_WITH_NEXT] = "MergedWithNext",
        [HR_SPLIT_CONTIGUOUS] = "Contiguous",
    };
    const char *behavior;
    HR_TRY(hr_json_get_string(node, "behavior", &behavior, err));
    step->kind = HR_PRETOKENIZE_SPLIT;
    HR_TRY(hr_json_opt_bool(node, "invert", &step->invert, err));
    HR_TRY(hr_pattern_read(node, &step->regex, err));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(behavior, names[i]) == 0) {
            step->behavior = (hr_split_behavior)i;
            return HR_OK;
        }
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "pre_tokenizer Split: behavior \"%.64s\" is not supported", behavior);
}

static hr_status read_byte_level(hr_pretokenizer_step *step, const cJSON *node, hr_error *err) {
    bool use_regex = true;
    step->kind = HR_PRETOKENIZE_BYTE_LEVEL;
    step->behavior = HR_SPLIT_ISOLATED;
    step->prefix_always = true;
    HR_TRY(hr_json_opt_bool(node, "add_prefix_space", &step->prefix_always, err));
    HR_TRY(hr_json_opt_bool(node, "use_regex", &use_regex, err));
    if (!use_regex)
        return HR_OK;
    return hr_regex_compile(&step->regex, BYTE_LEVEL_PATTERN, strlen(BYTE_LEVEL_PATTERN),
                            HR_REGEX_FROM_FILE, err);
}

/* prepend_scheme, or the switch that older files have in its place. */
static hr_status read_prepend(hr_pretokenizer_step *step, const cJSON *node, hr_error *err) {
    bool add = true;
    HR_TRY(hr_json_opt_bool(node, "add_prefix_space", &add, err));
    const char *scheme = add ? "always" : "never";
    HR_TRY(hr_json_opt_string(node, "prepend_scheme", &scheme, err));
    step->prefix_always = strcmp(scheme, "always") == 0;
    step->prefix_first = strcmp(scheme, "first") == 0;
    if (!step->prefix_always && !step->prefix_first && strcmp(scheme, "never") != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "Metaspace: prepend_scheme \"%.64s\" is not supported", scheme);
    return HR_OK;
}

static hr_status read_metaspace(hr_pretokenizer_step *step, const cJSON *node, hr_error *err) {
    const char *replacement;
    bool split = true;
    size_t used;
    step->kind = HR_PRETOKENIZE_METASPACE;
    step->behavior = HR_SPLIT_MERGED_WITH_NEXT;
    HR_TRY(read_prepend(step, node, err));
    HR_TRY(hr_json_opt_bool(node, "split", &split, err));
    HR_TRY(hr_json_get_string(node, "replacement", &replacement, err));
    if (replacement[0] == '\0' || (hr_utf8_next(replacement, &used), replacement[used] != '\0'))
        return hr_fail(err, HR_ERR_CORRUPT,
                       "Metaspace: replacement must be one character, not \"%.64s\"", replacement);
    memcpy(step->replacement, replacement, used);
    if (!split)
        return HR_OK;
    return hr_regex_compile(&step->regex, replacement, used, HR_REGEX_LITERAL, err);
}

static hr_status read_digits(hr_pretokenizer_step *step, const cJSON *node, hr_error *err) {
    bool individual = false;
    HR_TRY(hr_json_opt_bool(node, "individual_digits", &individual, err));
    return own_pattern(step, "\\p{N}", individual ? HR_SPLIT_ISOLATED : HR_SPLIT_CONTIGUOUS, false,
                       err);
}

static hr_status read_step(hr_pretokenizer_step *step, const cJSON *node, const char *type,
                           hr_error *err) {
    if (strcmp(type, "Split") == 0)
        return read_split(step, node, err);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(step, node, err);
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(step, node, err);
    if (strcmp(type, "Digits") == 0)
        return read_digits(step, node, err);
    if (strcmp(type, "Whitespace") == 0)
        return own_pattern(step, WORD_PATTERN "|" SYMBOLS_PATTERN, HR_SPLIT_REMOVED, true, err);
    if (strcmp(type, "WhitespaceSplit") == 0)
        return own_pattern(step, "[" SPACE_SET "]", HR_SPLIT_REMOVED, false, err);
    return hr_fail(err, HR_ERR_UNSUPPORTED, "pre_tokenizer \"%.64s\" is not supported", type);
}

static hr_status read_node(hr_pretokenizer *pre, const cJSON *node, int depth, hr_error *err) {
    const char *type;
    HR_TRY(hr_json_get_string(node, "type", &type, err));
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *list = hr_json_get(node, "pretokenizers");
        if (!cJSON_IsArray(list) || depth == MAX_NESTING)
            return hr_fail(
                err, HR_ERR_CORRUPT,
                "pre_tokenizer Sequence: wanted an array \"pretokenizers\", nested at most "
                "%d deep",
                MAX_NESTING);
        for (const cJSON *item = list->child; item != NULL; item = item->next)
            HR_TRY(read_node(pre, item, depth + 1, err));
        return HR_OK;
    }
    if (pre->count == HR_PRETOKENIZER_MAX_STEPS)
        return hr_fail(err, HR_ERR_LIMIT, "more than %d pre_tokenizers", HR_PRETOKENIZER_MAX_STEPS);
    return read_step(&pre->steps[pre->count++], node, type, err);
}

hr_status hr_pretokenizer_read(hr_pretokenizer *pre, const cJSON *node, hr_error *err) {
    *pre = (hr_pretokenizer){0};
    if (node == NULL || cJSON_IsNull(node))
        return HR_OK;
    HR_TRY(read_node(pre, node, 0, err));
    for (size_t i = 0; i + 1 < pre->count; i++)
        if (pre->steps[i].kind == HR_PRETOKENIZE_BYTE_LEVEL)
            return hr_fail(err, HR_ERR_UNSUPPORTED,
                           "a pre_tokenizer behind ByteLevel is not supported");
    return HR_OK;
}

void hr_pretokenizer_free(hr_pretokenizer *pre) {
    for (size_t i = 0; i < pre->count; i++)
        hr_regex_free(pre->steps[i].regex);
    pre->count = 0;
}

/* --- cutting --- */

static hr_status run_step(hr_pretokenizer_run *run, size_t index, const char *text, size_t len,
                          bool at_start, hr_error *err);

/* The parts of one piece, on their way to the next step. held is the part that may still grow. */
typedef struct cutter {
    hr_pretokenizer_run *run;
    const hr_pretokenizer_step *step;
    size_t next_step;
    const char *text;
    bool at_start;
    bool holds, held_match;
    size_t held_start, held_end;
} cutter;

static hr_status emit(cutter *c, size_t start, size_t end, hr_error *err) {
    if (start == end)
        return HR_OK;
    return run_step(c->run, c->next_step, c->text + start, end - start, c->at_start && start == 0,
                    err);
}

/* Whether the part [.., ..) of this kind continues the held one. */
static bool continues(const cutter *c, bool match) {
    if (!c->holds)
        return false;
    switch (c->step->behavior) {
    case HR_SPLIT_CONTIGUOUS:
        return match == c->held_match;
    case HR_SPLIT_MERGED_WITH_PREVIOUS:
        return match && !c->held_match;
    case HR_SPLIT_MERGED_WITH_NEXT:
        return !match && c->held_match;
    default:
        return false;
    }
}

static hr_status take_part(cutter *c, size_t start, size_t end, bool match, hr_error *err) {
    match = match != c->step->invert;
    if (c->step->behavior == HR_SPLIT_ISOLATED)
        return emit(c, start, end, err);
    if (c->step->behavior == HR_SPLIT_REMOVED)
        return match ? HR_OK : emit(c, start, end, err);
    if (continues(c, match)) {
        c->held_end = end;
        c->held_match = match;
        return HR_OK;
    }
    if (c->holds)
        HR_TRY(emit(c, c->held_start, c->held_end, err));
    c->holds = true;
    c->held_match = match;
    c->held_start = start;
    c->held_end = end;
    return HR_OK;
}

static hr_status cut(hr_pretokenizer_run *run, size_t index, const char *text, size_t len,
                     bool at_start, hr_error *err) {
    const hr_pretokenizer_step *step = &run->pre->steps[index];
    cutter c = {
        .run = run, .step = step, .next_step = index + 1, .text = text, .at_start = at_start};
    hr_match_walk walk = hr_match_walk_start(step->regex, text, len);
    size_t done = 0, start, end;
    for (;;) {
        bool found;
        HR_TRY(hr_match_walk_next(&walk, run->matcher, &found, &start, &end, err));
        if (!found)
            break;
        if (done < start)
            HR_TRY(take_part(&c, done, start, false, err));
        HR_TRY(take_part(&c, start, end, true, err));
        done = end;
    }
    if (done < len)
        HR_TRY(take_part(&c, done, len, false, err));
    return c.holds ? emit(&c, c.held_start, c.held_end, err) : HR_OK;
}

static hr_status out_of_memory(size_t len, hr_error *err) {
    return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to cut %zu bytes into words", len);
}

/* Spaces become the replacement character, one may go in front. */
static hr_status run_metaspace(hr_pretokenizer_run *run, size_t index, const char *text, size_t len,
                               bool at_start, hr_error *err) {
    const hr_pretokenizer_step *step = &run->pre->steps[index];
    hr_buf *out = &run->scratch[index];
    size_t mark = strlen(step->replacement);
    hr_buf_clear(out);
    bool has_prefix = text[0] == ' ' || (len >= mark && memcmp(text, step->replacement, mark) == 0);
    if (!has_prefix && (step->prefix_always || (step->prefix_first && at_start)))
        hr_buf_puts(out, step->replacement);
    for (size_t i = 0; i < len;) {
        const char *space = memchr(text + i, ' ', len - i);
        size_t n = space == NULL ? len - i : (size_t)(space - text) - i;
        hr_buf_append(out, text + i, n);
        if (space != NULL)
            hr_buf_puts(out, step->replacement);
        i += n + (space != NULL);
    }
    if (out->failed)
        return out_of_memory(len, err);
    if (step->regex == NULL)
        return run_step(run, index + 1, out->data, out->len, at_start, err);
    return cut(run, index, out->data, out->len, at_start, err);
}

/* The words of a byte-level step go to the sink spelled in its alphabet; nothing comes behind it.
 */
static hr_status spell_word(hr_pretokenizer_run *run, const char *text, size_t len, hr_error *err) {
    hr_buf *out = &run->scratch[run->pre->count - 1];
    hr_buf_clear(out);
    hr_byte_level_spell(text, len, out);
    if (out->failed)
        return out_of_memory(len, err);
    return run->sink(run->sink_arg, out->data, out->len, err);
}

static bool spells(const hr_pretokenizer *pre) {
    return pre->count > 0 && pre->steps[pre->count - 1].kind == HR_PRETOKENIZE_BYTE_LEVEL;
}

static hr_status run_byte_level(hr_pretokenizer_run *run, size_t index, const char *text,
                                size_t len, bool at_start, hr_error *err) {
    const hr_pretokenizer_step *step = &run->pre->steps[index];
    if (step->regex == NULL && !(step->prefix_always && text[0] != ' '))
        return spell_word(run, text, len, err);
    if (!step->prefix_always || text[0] == ' ')
        return cut(run, index, text, len, at_start, err);
    hr_buf prefixed = {0};
    hr_buf_putc(&prefixed, ' ');
    hr_buf_append(&prefixed, text, len);
    hr_status status;
    if (prefixed.failed)
        status = out_of_memory(len, err);
    else if (step->regex == NULL)
        status = spell_word(run, prefixed.data, prefixed.len, err);
    else
        status = cut(run, index, prefixed.data, prefixed.len, at_start, err);
    hr_buf_free(&prefixed);
    return status;
}

static hr_status run_step(hr_pretokenizer_run *run, size_t index, const char *text, size_t len,
                          bool at_start, hr_error *err) {
    if (index == run->pre->count)
        return spells(run->pre) ? spell_word(run, text, len, err)
                                : run->sink(run->sink_arg, text, len, err);
    switch (run->pre->steps[index].kind) {
    case HR_PRETOKENIZE_SPLIT:
        return cut(run, index, text, len, at_start, err);
    case HR_PRETOKENIZE_METASPACE:
        return run_metaspace(run, index, text, len, at_start, err);
    case HR_PRETOKENIZE_BYTE_LEVEL:
        return run_byte_level(run, index, text, len, at_start, err);
    }
    return hr_fail(err, HR_ERR_INTERNAL, "unknown pre_tokenizer step");
}

hr_status hr_pretokenize(hr_pretokenizer_run *run, const char *text, size_t len, bool at_start,
                         hr_error *err) {
    return run_step(run, 0, text, len, at_start, err);
}
