/* exp on 16 lanes and what stands on it: log-softmax, SiLU, the largest values. */
#include "kernels/exp_log.h"
#include "kernels/top_k.h"

#include <math.h>

HR_INLINE v16 v_exp(v16 x) {
    v16 shifted = v_fma(x, v_set(HR_LOG2E), v_set(HR_ROUND_MAGIC));
    v16 n = v_sub(shifted, v_set(HR_ROUND_MAGIC));
    v16 r = v_fnma(n, v_set(HR_LN2_LO), v_fnma(n, v_set(HR_LN2_HI), x));
    v16 p = v_set(HR_EXP_6);
    p = v_fma(p, r, v_set(HR_EXP_5));
    p = v_fma(p, r, v_set(HR_EXP_4));
    p = v_fma(p, r, v_set(HR_EXP_3));
    p = v_fma(p, r, v_set(HR_EXP_2));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    v16 y = v_scale_by_low_bits(p, shifted);
    y = v_if_less(x, v_set(HR_EXP_LOW), v_zero(), y);
    y = v_if_less(v_set(HR_EXP_HIGH), x, v_set(INFINITY), y);
    return v_keep_nan(x, y);
}

HR_INLINE float exp_of(float x) {
    return v_lane0(v_exp(v_set(x)));
}

/* The larger; a NaN x is passed over. */
HR_INLINE float max_of(float m, float x) {
    return x > m ? x : m;
}

/* Lanes 8 apart are added, then 4, 2 and 1. */
HR_INLINE float lane_tree(v16 x) {
    float t[16];
    v_store(t, x);
    HR_UNROLL for (int half = 8; half >= 1; half /= 2) HR_UNROLL for (int l = 0; l < half; l++)
        t[l] = t[l] + t[l + half];
    return t[0];
}

/* Largest lane, as +0 when it is a zero. */
HR_INLINE float lane_max(v16 x) {
    float t[16];
    v_store(t, x);
    HR_UNROLL for (int half = 8; half >= 1; half /= 2) HR_UNROLL for (int l = 0; l < half; l++)
        t[l] = max_of(t[l], t[l + half]);
    return t[0] + 0.0f;
}

/* What is subtracted before exp for a maximum m. */
HR_INLINE float shift_of(float m) {
    return m == -INFINITY ? 0.0f : m;
}

static float log_of(float x) {
    if (x != x || x < 0.0f)
        return NAN;
    if (x == 0.0f)
        return -INFINITY;
    if (x == INFINITY)
        return x;
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t offset = bits - HR_SQRT_HALF_BITS, fraction = (offset & 0x7fffff) + HR_SQRT_HALF_BITS;
    float e = (float)(offset >> 23), f;
    memcpy(&f, &fraction, sizeof f);
    f = f - 1.0f;
    const float c[] = {HR_LOG_9, HR_LOG_8, HR_LOG_7, HR_LOG_6, HR_LOG_5, HR_LOG_4, HR_LOG_3};
    float p = HR_LOG_10;
    for (size_t i = 0; i < sizeof c / sizeof c[0]; i++)
        p = fmaf(p, f, c[i]);
    float f2 = f * f;
    float tail = fmaf(-0.5f, f2, fmaf(p, f2 * f, e * HR_LN2_LO));
    return fmaf(e, HR_LN2_HI, f + tail);
}

/* Maximum and sum of exponentials of one block. */
static hr_lse lse_block(const float *x, uint32_t n) {
    v16 m = v_set(-INFINITY), sum = v_zero();
    for (uint32_t i = 0; i < n; i += 16)
        m = v_max(m, v_load_n(x + i, n - i, -INFINITY));
    float max = lane_max(m);
    v16 shift = v_set(shift_of(max));
    for (uint32_t i = 0; i < n; i += 16) /* lanes past n: exp(-inf) = +0 */
        sum = v_add(sum, v_exp(v_sub(v_load_n(x + i, n - i, -INFINITY), shift)));
    return (hr_lse){max, lane_tree(sum)};
}

hr_lse HR_TIER(lse)(const float *x, uint32_t n) {
    hr_lse total = {0, 0};
    for (uint32_t begin = 0; begin < n; begin += HR_VOCAB_BLOCK) {
        hr_lse block =
            lse_block(x + begin, n - begin < HR_VOCAB_BLOCK ? n - begin : HR_VOCAB_BLOCK);
        if (begin == 0) {
            total = block;
            continue;
        }
        float m = max_of(total.max, block.max), shift = shift_of(m);
        float keep = exp_of(total.max - shift), take = exp_of(block.max - shift);
        total = (hr_lse){m, fmaf(block.log_sum, take, total.log_sum * keep)};
    }
    return (hr_lse){total.max, log_of(total.log_sum)};
}

void HR_TIER(exp_sub)(const float *x, float max, uint32_t n, float *out) {
    for (uint32_t i = 0; i < n; i += 16)
        v_store_n(out + i, v_exp(v_sub(v_load_n(x + i, n - i, 0.0f), v_set(max))), n - i);
}

void HR_TIER(divide)(const float *x, float t, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i += 16)
        v_store_n(y + i, v_div(v_load_n(x + i, n - i, 0.0f), v_set(t)), n - i);
}

/* The worst of the best so far as a float to compare with; NaN stands as -inf. */
HR_INLINE v16 threshold_of(const float *x, const uint32_t *heap) {
    float worst = x[heap[0]];
    return v_set(worst != worst ? -INFINITY : worst);
}

void HR_TIER(top_k)(const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values,
                    void *scratch) {
    (void)scratch;
    if (k == 0)
        return;
    for (uint32_t i = 0; i < k; i++)
        ids[i] = i;
    hr_top_k_heapify(x, ids, k);
    v16 threshold = threshold_of(x, ids);
    for (uint32_t i = k; i < n; i += 16) {
        uint32_t better = v_greater_bits(v_load_n(x + i, n - i, -INFINITY), threshold);
        if (better == 0)
            continue;
        for (; better != 0; better &= better - 1)
            hr_top_k_offer(x, ids, k, i + (uint32_t)__builtin_ctz(better));
        threshold = threshold_of(x, ids);
    }
    hr_top_k_finish(x, ids, values, k);
}
