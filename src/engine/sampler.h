/* From one row of logits to logprobs and, when asked, a token.
 *
 * The rule (docs/arithmetic.md, DESIGN 5.6): x = (logits + penalties + bias) / T, with T = 1 for
 * greedy and for scoring; a reported logprob is log-softmax of x over the whole vocabulary, before
 * top-k, top-p and min-p. Only the row, the request's own state and its seed count: nothing here
 * sees the batch.
 *
 * Order of the penalties: frequency * count, then presence, are subtracted; then repetition divides
 * positive and multiplies other values; then logit_bias is added; then T divides; then masked ids
 * get HR_SAMPLER_MASKED.
 *
 * Filters, as in SGLang: ids ranked by (x descending, id ascending); top_k keeps the first k; top_p
 * keeps an id when the probability of all ids ranked before it is <= top_p, probabilities being
 * those of the whole vocabulary; min_p keeps an id whose probability is >= min_p times the largest.
 *
 * The draw: u in [0, 1) is a hash of (seed, position); w[i] = exp(x[i] - max) for kept ids, else 0.
 * Weights are summed in double in blocks of HR_VOCAB_BLOCK ids (in a block 8 lanes of stride 8,
 * folded 4-2-1; blocks left to right); the token is the first whose running sum, in id order,
 * passes u * total. */
#ifndef HR_ENGINE_SAMPLER_H
#define HR_ENGINE_SAMPLER_H

#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

/* Finite, so that sums stay finite; exp of it is +0 whatever the maximum is. */
#define HR_SAMPLER_MASKED (-1e30f)

/* How one request draws. Arrays belong to the request. */
typedef struct hr_sampler {
    bool greedy;
    float temperature; /* > 0; read when not greedy */
    uint32_t top_k;    /* 0 = whole vocabulary */
    float top_p, min_p;
    float frequency_penalty, presence_penalty, repetition_penalty;
    const uint32_t *bias_ids;
    const float *bias;
    size_t n_bias;
    const uint32_t *stop_ids; /* masked while masking is asked for: eos and stop_token_ids */
    size_t n_stop_ids;
    uint64_t seed;
    /* [n_vocab], NULL without penalties: times generated, and HR_SAMPLER_IN_PROMPT. */
    uint32_t *counts;
} hr_sampler;

#define HR_SAMPLER_IN_PROMPT 0x80000000u

static inline bool hr_sampler_has_penalties(const hr_sampler *s) {
    return s->frequency_penalty != 0 || s->presence_penalty != 0 || s->repetition_penalty != 1;
}

/* Which logprobs of a row are wanted besides the token's own. */
typedef struct hr_logprob_wish {
    bool any; /* false: none at all */
    uint32_t n_top;
    const uint32_t *ids;
    uint32_t n_ids;
} hr_logprob_wish;

/* What a row gave; the arrays belong to the caller and hold n_top, n_top and n_ids entries. */
typedef struct hr_row_result {
    bool finite;     /* false: logits had a NaN or an infinity; nothing else is set */
    bool overflowed; /* they were finite until penalties, bias and temperature; !finite then */
    uint32_t token;
    float logprob;
    uint32_t *top_ids;
    float *top_logprobs;
    float *ids_logprobs;
} hr_row_result;

/* Room of one worker, [n_vocab] each: ids and values picked out, the same ranked; values also hold
 * the weights of the draw. */
typedef struct hr_sampler_space {
    uint32_t *ids;
    float *values;
    uint32_t *ranked_ids;
    float *ranked_values;
} hr_sampler_space;

/* Logprobs of token given at T = 1 without penalties; logits are left as they are. scratch:
 * HR_SCRATCH_BYTES. Both functions need the floating-point mode of a pool job. */
void hr_sampler_score(const hr_kernels *kernels, float *logits, uint32_t n_vocab, uint32_t token,
                      const hr_logprob_wish *wish, hr_row_result *result, void *scratch);

/* Draws the token that will stand at absolute position; masked: stop ids cannot be drawn. logits
 * [n_vocab] become x of the rule above. */
void hr_sampler_draw(const hr_kernels *kernels, const hr_sampler *sampler, float *logits,
                     uint32_t n_vocab, uint64_t position, bool masked, const hr_logprob_wish *wish,
                     hr_row_result *result, const hr_sampler_space *space, void *scratch);

/* The counter hash: 53 bits of (seed, position) as a number in [0, 1). */
double hr_sampler_uniform(uint64_t seed, uint64_t position);

/* One well-mixed 64-bit value from another; also makes seeds for requests without one. */
uint64_t hr_sampler_mix(uint64_t value);

#endif
