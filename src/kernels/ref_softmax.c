/* Reference: exp, log and what stands on them. */
#include "kernels/exp_log.h"
#include "kernels/ref.h"
#include "kernels/top_k.h"

#include <math.h>

float ref_exp(float x) {
    if (x != x)
        return x;
    if (x < HR_EXP_LOW)
        return 0.0f;
    if (x > HR_EXP_HIGH)
        return INFINITY;
    float shifted = fmaf(x, HR_LOG2E, HR_ROUND_MAGIC);
    float n = shifted - HR_ROUND_MAGIC;
    float r = fmaf(-n, HR_LN2_LO, fmaf(-n, HR_LN2_HI, x));
    float p = HR_EXP_6;
    p = fmaf(p, r, HR_EXP_5);
    p = fmaf(p, r, HR_EXP_4);
    p = fmaf(p, r, HR_EXP_3);
    p = fmaf(p, r, HR_EXP_2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* Times 2^n by the exponent bits: n is in the low bits of shifted, the magic's own low bits are
     * zero. */
    return ref_from_bits(ref_bits(p) + (ref_bits(shifted) << 23));
}

float ref_log(float x) {
    if (x != x || x < 0.0f)
        return NAN;
    if (x == 0.0f)
        return -INFINITY;
    if (x == INFINITY)
        return x;
    int32_t offset = (int32_t)ref_bits(x) - HR_SQRT_HALF_BITS;
    float e = (float)(offset >> 23);
    float f = ref_from_bits((uint32_t)((offset & 0x7fffff) + HR_SQRT_HALF_BITS)) - 1.0f;
    float p = HR_LOG_10;
    p = fmaf(p, f, HR_LOG_9);
    p = fmaf(p, f, HR_LOG_8);
    p = fmaf(p, f, HR_LOG_7);
    p = fmaf(p, f, HR_LOG_6);
    p = fmaf(p, f, HR_LOG_5);
    p = fmaf(p, f, HR_LOG_4);
    p = fmaf(p, f, HR_LOG_3);
    float f2 = f * f;
    float tail = fmaf(p, f2 * f, e * HR_LN2_LO);
    tail = fmaf(-0.5f, f2, tail);
    return fmaf(e, HR_LN2_HI, f + tail);
}

float ref_shift(float m) {
    return m == -INFINITY ? 0.0f : m;
}

hr_lse ref_lse(const float *x, uint32_t n) {
    float m = 0, s = 0;
    for (uint32_t block = 0; block < n; block += HR_VOCAB_BLOCK) {
        uint32_t end = n - block < HR_VOCAB_BLOCK ? n : block + HR_VOCAB_BLOCK;
        float m_b = -INFINITY, lane[16] = {0};
        for (uint32_t i = block; i < end; i++)
            m_b = ref_max(m_b, x[i]);
        m_b = m_b + 0.0f;
        for (uint32_t i = block; i < end; i++)
            lane[i % 16] = lane[i % 16] + ref_exp(x[i] - ref_shift(m_b));
        float s_b = ref_lane_tree(lane);
        float m_new = block == 0 ? m_b : ref_max(m, m_b);
        s = block == 0
                ? s_b
                : fmaf(s_b, ref_exp(m_b - ref_shift(m_new)), s * ref_exp(m - ref_shift(m_new)));
        m = m_new;
    }
    return (hr_lse){m, ref_log(s)};
}

void ref_exp_sub(const float *x, float max, uint32_t n, float *out) {
    for (uint32_t i = 0; i < n; i++)
        out[i] = ref_exp(x[i] - max);
}

void ref_top_k(const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values,
               void *scratch) {
    (void)scratch;
    for (uint32_t i = 0; i < k; i++)
        ids[i] = i;
    hr_top_k_heapify(x, ids, k);
    for (uint32_t i = k; i < n && k > 0; i++)
        hr_top_k_offer(x, ids, k, i);
    hr_top_k_finish(x, ids, values, k);
}
