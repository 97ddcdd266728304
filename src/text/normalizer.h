/* What happens to text before it is cut into words: Unicode forms, replacements, a prefix. */
#ifndef HR_TEXT_NORMALIZER_H
#define HR_TEXT_NORMALIZER_H

#include "base/buf.h"
#include "base/error.h"
#include "format/json.h"
#include "text/regex.h"

#include <stdbool.h>
#include <stddef.h>

#define HR_NORMALIZER_MAX_STEPS 16

typedef struct hr_normalizer_step {
    enum {
        HR_NORMALIZE_UNICODE,
        HR_NORMALIZE_PREPEND,
        HR_NORMALIZE_REPLACE,
        HR_NORMALIZE_STRIP,
        HR_NORMALIZE_LOWERCASE,
    } kind;
    bool compose, compat;         /* UNICODE */
    char *content;                /* PREPEND, REPLACE; owned */
    hr_regex *pattern;            /* REPLACE; owned */
    bool strip_left, strip_right; /* STRIP */
} hr_normalizer_step;

/* Immutable once read; safe for concurrent readers. */
typedef struct hr_normalizer {
    hr_normalizer_step steps[HR_NORMALIZER_MAX_STEPS];
    size_t count; /* 0: text stays as it is */
} hr_normalizer;

/* From the "normalizer" value of tokenizer.json, NULL or null for none. ERR_UNSUPPORTED names what
 * is not known. *normalizer is to be freed in every case. */
hr_status hr_normalizer_read(hr_normalizer *normalizer, const cJSON *node, hr_error *err);
void hr_normalizer_free(hr_normalizer *normalizer);

/* Replaces the text in *text (valid UTF-8) by its normal form; other is working memory of the same
 * kind. */
hr_status hr_normalizer_apply(const hr_normalizer *normalizer, hr_matcher *matcher, hr_buf *text,
                              hr_buf *other, hr_error *err);

/* Appends text with every match of pattern replaced by content. */
hr_status hr_replace_all(const hr_regex *pattern, hr_matcher *matcher, const char *text, size_t len,
                         const char *content, hr_buf *out, hr_error *err);

/* Reads {"pattern": {"String": ..} or {"Regex": ..}} of a component. */
hr_status hr_pattern_read(const cJSON *node, hr_regex **out, hr_error *err);

#endif
