/* The body of POST /generate, turned into plain structures: a pure function of the bytes, so that
 * it can be tested by tables and fuzzed without a server. What needs the engine (vocabulary,
 * context length, adapters) is checked later, by the engine.
 *
 * A request is a list of items, each one sequence to generate: prompts x samples, the samples of a
 * prompt next to each other. */
#ifndef HR_SERVER_GENERATE_REQUEST_H
#define HR_SERVER_GENERATE_REQUEST_H

#include "base/error.h"

#include <headrace/engine.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_GENERATE_MAX_ITEMS 8192
#define HR_GENERATE_MAX_STOPS 256
#define HR_GENERATE_MAX_STOP_REGEXES 16
#define HR_GENERATE_MAX_RID 256

struct cJSON;

typedef struct hr_generate_item {
    const char *text; /* NULL: input_ids */
    const uint32_t *input_ids;
    size_t n_input_ids;
    const char *rid;
    const char *batch_rid; /* the rid that was sent, when rid is it and a number; else NULL */
    const char *lora_name; /* NULL = base model */
    bool return_logprob;
    int64_t logprob_start_len;
    uint32_t top_logprobs_num;
    const uint32_t *token_ids_logprob;
    size_t n_token_ids_logprob;
    hr_sampling_params sampling;
    const char *const *stops;
    size_t n_stops;
    const char *const *stop_regexes;
    size_t n_stop_regexes;
    uint32_t stream_interval; /* tokens between two events; 0 = not said */
    bool skip_special_tokens, spaces_between_special_tokens, no_stop_trim;
} hr_generate_item;

typedef struct hr_generate_request {
    bool is_list; /* the answer is an array */
    bool stream;
    bool return_text_in_logprobs;
    size_t n_prompts, n_samples;
    size_t n_items; /* n_prompts * n_samples */
    hr_generate_item *items;
    const char *const *unknown_keys; /* top-level keys that were ignored */
    size_t n_unknown_keys;
    struct hr_generate_memory *memory; /* owns everything above */
} hr_generate_request;

/* Refusals are ERR_INVALID, ERR_UNSUPPORTED or ERR_LIMIT with a message that names the field. rids
 * that the body does not give are random. The caller frees *out with hr_generate_request_free.
 * Thread-safe. */
hr_status hr_generate_request_parse(const char *body, size_t len, hr_generate_request *out,
                                    hr_error *err);

/* The same from a tree that another route made in that shape; the request owns it from now on, also
 * when this fails. */
hr_status hr_generate_request_read(struct cJSON *tree, hr_generate_request *out, hr_error *err);

void hr_generate_request_free(hr_generate_request *request);

#endif
