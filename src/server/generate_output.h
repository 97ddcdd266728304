/* What one sequence has produced so far: tokens, logprobs, text. Fed by the engine's callbacks,
 * read when an answer or a stream event is written. Not thread-safe; whoever shares it locks. */
#ifndef HR_SERVER_GENERATE_OUTPUT_H
#define HR_SERVER_GENERATE_OUTPUT_H

#include "base/buf.h"
#include "server/generate_request.h"
#include "text/detokenizer.h"
#include "text/stop.h"

#include <headrace/engine.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hr_position {
    uint32_t token;
    float logprob;
    bool has_logprob;
    uint32_t n_top, n_ids;
    size_t top_at, ids_at; /* into the lists below */
} hr_position;

/* Positions in order, their top and asked-for logprobs one after the other. Zero-initialise. */
typedef struct hr_position_list {
    hr_position *positions;
    size_t n, cap;
    uint32_t *top_ids;
    float *top_logprobs;
    size_t n_top, cap_top;
    float *ids_logprobs;
    size_t n_ids, cap_ids;
} hr_position_list;

/* How much of an output somebody has seen. */
typedef struct hr_output_mark {
    size_t text, prompt, tokens;
} hr_output_mark;

/* Output tokens [start, end) were made under this weight version. */
typedef struct hr_output_span {
    char version[HR_WEIGHT_VERSION_SIZE];
    uint32_t start, end;
} hr_output_span;

typedef struct hr_generate_output {
    const hr_generate_item *item;
    const hr_tokenizer *tokenizer; /* NULL: no text */
    const uint32_t *eos_ids;
    size_t n_eos_ids;

    hr_position_list prompt, tokens;
    hr_buf text; /* certain: never taken back */
    hr_detokenizer *detokenizer;
    hr_stop *stop;     /* NULL without stop strings and expressions */
    int matched_stop;  /* index into item->stops, then stop_regexes; -1 */
    bool has_withheld; /* the last token is a stop token, whose text is not shown */
    uint32_t withheld;
    bool failed; /* see error; what is here is not complete */
    hr_error error;
    bool is_copy;
    hr_output_mark before; /* of a copy: what it leaves out */

    bool finished;
    hr_finish finish; /* texts point into the buffers below; no spans */
    char message[256], weight_version[HR_WEIGHT_VERSION_SIZE];
    char adapter_version[HR_WEIGHT_VERSION_SIZE];
    hr_output_span *spans; /* contiguous from 0 to all tokens; a copy borrows them */
    size_t n_spans;
} hr_generate_output;

/* item, tokenizer and eos_ids must outlive the output. ERR_INVALID (stop strings), ERR_NO_MEMORY;
 * *out is to be freed in every case. */
hr_status hr_generate_output_init(hr_generate_output *out, const hr_generate_item *item,
                                  const hr_tokenizer *tokenizer, const uint32_t *eos_ids,
                                  size_t n_eos_ids, hr_error *err);
void hr_generate_output_free(hr_generate_output *out);

/* The engine's callbacks, with the output in place of ctx. */
void hr_generate_output_prompt(hr_generate_output *out, uint32_t n,
                               const hr_position_logprobs *positions);
hr_token_verdict hr_generate_output_token(hr_generate_output *out,
                                          const hr_position_logprobs *token);
void hr_generate_output_finish(hr_generate_output *out, const hr_finish *finish);

/* Finishes an output that never got to the engine. */
void hr_generate_output_abort(hr_generate_output *out, const char *message,
                              const char *weight_version);

/* What matched, as finish_reason names it; NULL when no string or expression did. */
const char *hr_generate_output_matched(const hr_generate_output *out);

/* Everything out shows now. */
hr_output_mark hr_generate_output_mark(const hr_generate_output *out);

/* Makes copy show what out shows now (for writing without the lock), but for what came before
 * since; copy was zeroed or is an older copy. It can only be read and freed, before out is. False
 * when out of memory. */
bool hr_generate_output_copy(hr_generate_output *copy, const hr_generate_output *out,
                             hr_output_mark since);

#endif
