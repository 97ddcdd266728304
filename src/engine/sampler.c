/* Sampling and logprobs of one row. Every float step is a kernel op or an element-wise +, -, *, /
 * or compare, so that every tier and every compiler gives the same bits. */
#include "engine/sampler.h"

#include <math.h>
#include <string.h>

uint64_t hr_sampler_mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

double hr_sampler_uniform(uint64_t seed, uint64_t position) {
    uint64_t bits = hr_sampler_mix(hr_sampler_mix(seed) ^ hr_sampler_mix(~position));
    return (double)(bits >> 11) * 0x1p-53;
}

static bool all_finite(const float *x, uint32_t n) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

static void report(const hr_kernels *kernels, const float *x, uint32_t n_vocab, hr_lse lse,
                   const hr_logprob_wish *wish, hr_row_result *result, void *scratch) {
    result->logprob = x[result->token] - lse.max - lse.log_sum;
    if (wish->n_top > 0)
        kernels->top_k(x, n_vocab, wish->n_top, result->top_ids, result->top_logprobs, scratch);
    for (uint32_t i = 0; i < wish->n_top; i++)
        result->top_logprobs[i] = result->top_logprobs[i] - lse.max - lse.log_sum;
    for (uint32_t i = 0; i < wish->n_ids; i++)
        result->ids_logprobs[i] = x[wish->ids[i]] - lse.max - lse.log_sum;
}

void hr_sampler_score(const hr_kernels *kernels, float *logits, uint32_t n_vocab, uint32_t token,
                      const hr_logprob_wish *wish, hr_row_result *result, void *scratch) {
    result->finite = all_finite(logits, n_vocab);
    result->overflowed = false;
    if (!result->finite)
        return;
    result->token = token;
    report(kernels, logits, n_vocab, kernels->lse(logits, n_vocab), wish, result, scratch);
}

static void apply_penalties(const hr_sampler *s, float *x, uint32_t n_vocab) {
    for (uint32_t i = 0; i < n_vocab; i++) {
        uint32_t count = s->counts[i];
        if (count == 0)
            continue;
        uint32_t generated = count & ~HR_SAMPLER_IN_PROMPT;
        if (generated > 0)
            x[i] = x[i] - s->frequency_penalty * (float)generated - s->presence_penalty;
        x[i] = x[i] > 0 ? x[i] / s->repetition_penalty : x[i] * s->repetition_penalty;
    }
}

static void adjust(const hr_kernels *kernels, const hr_sampler *s, float *x, uint32_t n_vocab,
                   bool masked) {
    if (s->counts != NULL)
        apply_penalties(s, x, n_vocab);
    for (size_t i = 0; i < s->n_bias; i++)
        x[s->bias_ids[i]] += s->bias[i];
    if (!s->greedy && s->temperature != 1.0f)
        kernels->divide(x, s->temperature, n_vocab, x);
    if (masked)
        for (size_t i = 0; i < s->n_stop_ids; i++)
            x[s->stop_ids[i]] = HR_SAMPLER_MASKED;
}

static uint32_t argmax(const hr_kernels *kernels, const float *x, uint32_t n_vocab, void *scratch) {
    uint32_t id;
    float value;
    kernels->top_k(x, n_vocab, 1, &id, &value, scratch);
    return id;
}

/* The last kept id of the ranking: an id is kept when it ranks no later. */
typedef struct hr_cut {
    float value;
    uint32_t id;
} hr_cut;

static bool is_kept(hr_cut cut, float value, uint32_t id) {
    return value > cut.value || (value == cut.value && id <= cut.id);
}

static uint32_t block_len(uint32_t n, uint32_t block) {
    return n - block < HR_VOCAB_BLOCK ? n - block : HR_VOCAB_BLOCK;
}

static hr_cut top_k_cut(const hr_kernels *kernels, uint32_t k, const float *x, uint32_t n_vocab,
                        const hr_sampler_space *space, void *scratch) {
    kernels->top_k(x, n_vocab, k, space->ranked_ids, space->ranked_values, scratch);
    return (hr_cut){space->ranked_values[k - 1], space->ranked_ids[k - 1]};
}

/* Ranking the whole vocabulary to cut it at top_p would cost more than the rest of the draw. Ids
 * are put into bins by their distance below the maximum, which keeps the order of values; the bin
 * in which the mass passes top_p is found by sums, and only its ids are ranked. */
enum { BINS = 4096, BINS_PER_NAT = 64 };

static uint32_t bin_of(float max, float x) {
    float distance = (max - x) * BINS_PER_NAT;
    return distance < BINS - 1 ? (uint32_t)distance : BINS - 1;
}

static void sum_bins(const hr_kernels *kernels, const float *x, uint32_t n_vocab, float max,
                     double *mass) {
    float e[HR_VOCAB_BLOCK];
    memset(mass, 0, BINS * sizeof *mass);
    for (uint32_t block = 0; block < n_vocab; block += HR_VOCAB_BLOCK) {
        uint32_t len = block_len(n_vocab, block);
        kernels->exp_sub(x + block, max, len, e);
        for (uint32_t i = 0; i < len; i++)
            mass[bin_of(max, x[block + i])] += e[i];
    }
}

/* Copies the ids and values of one bin into space, in id order; returns how many. */
static uint32_t gather_bin(const float *x, uint32_t n_vocab, float max, uint32_t bin,
                           const hr_sampler_space *space) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_vocab; i++)
        if (bin_of(max, x[i]) == bin) {
            space->ids[n] = i;
            space->values[n++] = x[i];
        }
    return n;
}

static hr_cut top_p_cut(const hr_kernels *kernels, float top_p, const float *x, uint32_t n_vocab,
                        hr_lse lse, const hr_sampler_space *space, void *scratch) {
    double mass[BINS], before = 0;
    float sum, e[HR_VOCAB_BLOCK];
    kernels->exp_sub(&lse.log_sum, 0, 1, &sum);
    double most = (double)top_p * sum;
    sum_bins(kernels, x, n_vocab, lse.max, mass);
    uint32_t bin = 0;
    for (; bin < BINS - 1 && before + mass[bin] <= most; bin++)
        before += mass[bin];
    uint32_t n = gather_bin(x, n_vocab, lse.max, bin, space), last = 0;
    if (n == 0) /* all of the mass, but for rounding, is before the last bin */
        return (hr_cut){-INFINITY, 0};
    kernels->top_k(space->values, n, n, space->ranked_ids, space->ranked_values, scratch);
    for (uint32_t block = 0; block < n && before <= most; block += HR_VOCAB_BLOCK) {
        uint32_t len = block_len(n, block);
        kernels->exp_sub(space->ranked_values + block, lse.max, len, e);
        for (uint32_t i = 0; i < len && before <= most; i++) {
            last = block + i;
            before += e[i];
        }
    }
    return (hr_cut){space->ranked_values[last], space->ids[space->ranked_ids[last]]};
}

/* The stricter of top_k and top_p. */
static hr_cut find_cut(const hr_kernels *kernels, const hr_sampler *s, const float *x,
                       uint32_t n_vocab, hr_lse lse, const hr_sampler_space *space, void *scratch) {
    hr_cut cut = {-INFINITY, 0};
    if (s->top_k > 0 && s->top_k < n_vocab)
        cut = top_k_cut(kernels, s->top_k, x, n_vocab, space, scratch);
    if (s->top_p < 1) {
        hr_cut other = top_p_cut(kernels, s->top_p, x, n_vocab, lse, space, scratch);
        cut = is_kept(cut, other.value, other.id) ? other : cut;
    }
    return cut;
}

static double block_sum(const float *w, uint32_t n) {
    double lane[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (uint32_t l = 0; l < 8; l++)
            lane[l] += w[i + l];
    for (uint32_t l = 0; i + l < n; l++)
        lane[l] += w[i + l];
    for (uint32_t half = 4; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

/* Writes the weights of the draw, [n_vocab], and returns their sum. */
static double make_weights(const hr_kernels *kernels, const hr_sampler *s, const float *x,
                           uint32_t n_vocab, float max, hr_cut cut, float *weights) {
    double total = 0;
    kernels->exp_sub(x, max, n_vocab, weights);
    for (uint32_t block = 0; block < n_vocab; block += HR_VOCAB_BLOCK) {
        uint32_t len = block_len(n_vocab, block);
        float *w = weights + block;
        for (uint32_t i = 0; i < len; i++)
            w[i] = w[i] >= s->min_p && is_kept(cut, x[block + i], block + i) ? w[i] : 0;
        total += block_sum(w, len);
    }
    return total;
}

static uint32_t pick(const float *w, uint32_t n_vocab, double target) {
    double before = 0;
    uint32_t last = 0; /* rounding may leave the target just past the last weight: then that one */
    for (uint32_t block = 0; block < n_vocab; block += HR_VOCAB_BLOCK) {
        uint32_t len = block_len(n_vocab, block);
        double sum = block_sum(w + block, len);
        bool here = before + sum > target;
        double running = before;
        for (uint32_t i = 0; sum > 0 && i < len; i++) {
            if (w[block + i] > 0)
                last = block + i;
            running += w[block + i];
            if (here && running > target)
                return block + i;
        }
        if (here)
            return last;
        before += sum;
    }
    return last;
}

void hr_sampler_draw(const hr_kernels *kernels, const hr_sampler *sampler, float *x,
                     uint32_t n_vocab, uint64_t position, bool masked, const hr_logprob_wish *wish,
                     hr_row_result *result, const hr_sampler_space *space, void *scratch) {
    result->finite = all_finite(x, n_vocab);
    result->overflowed = false;
    if (!result->finite)
        return;
    adjust(kernels, sampler, x, n_vocab, masked);
    /* Finite logits can still overflow here: a temperature near zero, a bias near the largest
     * float. */
    result->finite = all_finite(x, n_vocab);
    result->overflowed = !result->finite;
    if (!result->finite)
        return;
    if (sampler->greedy) {
        result->token = argmax(kernels, x, n_vocab, scratch);
        if (wish->any)
            report(kernels, x, n_vocab, kernels->lse(x, n_vocab), wish, result, scratch);
        return;
    }
    hr_lse lse = kernels->lse(x, n_vocab);
    hr_cut cut = find_cut(kernels, sampler, x, n_vocab, lse, space, scratch);
    double total = make_weights(kernels, sampler, x, n_vocab, lse.max, cut, space->values);
    result->token =
        pick(space->values, n_vocab, hr_sampler_uniform(sampler->seed, position) * total);
    if (wish->any)
        report(kernels, x, n_vocab, lse, wish, result, scratch);
}
