/* The pre-tokenizer: cuts text into the words that merging works on. */
#ifndef HR_TEXT_PRETOKENIZE_H
#define HR_TEXT_PRETOKENIZE_H

#include "base/buf.h"
#include "base/error.h"
#include "format/json.h"
#include "text/regex.h"

#include <stdbool.h>
#include <stddef.h>

#define HR_PRETOKENIZER_MAX_STEPS 16

typedef enum hr_split_behavior {
    HR_SPLIT_REMOVED,
    HR_SPLIT_ISOLATED,
    HR_SPLIT_MERGED_WITH_PREVIOUS,
    HR_SPLIT_MERGED_WITH_NEXT,
    HR_SPLIT_CONTIGUOUS,
} hr_split_behavior;

typedef struct hr_pretokenizer_step {
    enum { HR_PRETOKENIZE_SPLIT, HR_PRETOKENIZE_BYTE_LEVEL, HR_PRETOKENIZE_METASPACE } kind;
    hr_regex *regex; /* owned; NULL: no cutting */
    hr_split_behavior behavior;
    bool invert;         /* what does not match is the separator */
    bool prefix_always;  /* BYTE_LEVEL, METASPACE: put a space in front unless there is one */
    bool prefix_first;   /* METASPACE: only where the text begins */
    char replacement[5]; /* METASPACE: UTF-8 of the character that stands for a space */
} hr_pretokenizer_step;

/* Immutable once read; safe for concurrent readers. */
typedef struct hr_pretokenizer {
    hr_pretokenizer_step steps[HR_PRETOKENIZER_MAX_STEPS];
    size_t count;
} hr_pretokenizer;

/* From the "pre_tokenizer" value of tokenizer.json, NULL or null for none. ERR_UNSUPPORTED names
 * what is not known. *pre is to be freed in every case. */
hr_status hr_pretokenizer_read(hr_pretokenizer *pre, const cJSON *node, hr_error *err);
void hr_pretokenizer_free(hr_pretokenizer *pre);

/* Where a word goes; it is valid during the call only. */
typedef hr_status (*hr_word_sink)(void *sink, const char *word, size_t len, hr_error *err);

/* Working memory and destination of one run; scratch is zero-initialised by the caller, who frees
 * every buffer. */
typedef struct hr_pretokenizer_run {
    const hr_pretokenizer *pre;
    hr_matcher *matcher;
    hr_word_sink sink;
    void *sink_arg;
    hr_buf scratch[HR_PRETOKENIZER_MAX_STEPS];
} hr_pretokenizer_run;

/* Cuts text (valid UTF-8, not empty) and hands every word to the sink, in order; a byte-level step
 * spells them. at_start: the text to be encoded begins here. Forwards the sink's failure. */
hr_status hr_pretokenize(hr_pretokenizer_run *run, const char *text, size_t len, bool at_start,
                         hr_error *err);

#endif
