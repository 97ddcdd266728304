/* The reference tier: docs/arithmetic.md in plain C, the oracle for the others. Written to be read
 * beside that page; speed is what the compiler makes of it. */
#ifndef HR_KERNELS_REF_H
#define HR_KERNELS_REF_H

#include "kernels/kernels.h"

#include <string.h>

static inline uint32_t ref_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float ref_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* float -> bf16: denormals to signed zero, then round to nearest even; NaN stays a (quiet) NaN. */
static inline uint16_t ref_to_bf16(float x) {
    uint32_t bits = ref_bits(x), magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x00800000u)
        return (uint16_t)((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float ref_from_bf16(uint16_t x) {
    return ref_from_bits((uint32_t)x << 16);
}

/* Element i of an array of compute elements, and rounding x into it. */
static inline float ref_load(hr_compute c, const void *array, size_t i) {
    return c == HR_COMPUTE_BF16 ? ref_from_bf16(((const uint16_t *)array)[i])
                                : ((const float *)array)[i];
}

static inline void ref_store(hr_compute c, void *array, size_t i, float x) {
    if (c == HR_COMPUTE_BF16)
        ((uint16_t *)array)[i] = ref_to_bf16(x);
    else
        memcpy((float *)array + i, &x, sizeof x);
}

/* x after one rounding to the compute dtype. */
static inline float ref_round(hr_compute c, float x) {
    return c == HR_COMPUTE_BF16 ? ref_from_bf16(ref_to_bf16(x)) : x;
}

/* Index of W[row][col] in a packed [n][k] matrix; k is a multiple of HR_LEAF. */
static inline size_t ref_packed_index(hr_compute c, size_t k, size_t row, size_t col) {
    size_t panel = row / HR_PANEL, lane = row % HR_PANEL;
    if (c == HR_COMPUTE_BF16)
        return ((panel * (k / 2) + col / 2) * HR_PANEL + lane) * 2 + col % 2;
    return (panel * k + col) * HR_PANEL + lane;
}

/* Sum of 16 lanes: halves are added until one lane is left. */
static inline float ref_lane_tree(const float lane[16]) {
    float t[16];
    memcpy(t, lane, sizeof t);
    for (int half = 8; half >= 1; half /= 2)
        for (int l = 0; l < half; l++)
            t[l] = t[l] + t[l + half];
    return t[0];
}

/* The larger; a NaN x is passed over. */
static inline float ref_max(float m, float x) {
    return x > m ? x : m;
}

float ref_exp(float x);
float ref_log(float x);
/* What is subtracted before exp for a maximum m: m, but 0 for -inf (so that -inf - -inf does not
 * arise). */
float ref_shift(float m);

void ref_gemm_bf16(const hr_gemm_args *a);
void ref_gemm_f32(const hr_gemm_args *a);
void ref_lora_split_bf16(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                         void *out, size_t ldout);
void ref_lora_split_f32(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                        void *out, size_t ldout);
void ref_lora_expand_bf16(const hr_lora_expand_args *a);
void ref_lora_expand_f32(const hr_lora_expand_args *a);
void ref_attention_bf16(const hr_attention_args *a);
void ref_attention_f32(const hr_attention_args *a);
void ref_attention_merge_bf16(const hr_attention_args *a);
void ref_attention_merge_f32(const hr_attention_args *a);
void ref_kv_store_bf16(const float *k, const float *v, uint32_t head_dim, uint32_t slot, char *kv);
void ref_kv_store_f32(const float *k, const float *v, uint32_t head_dim, uint32_t slot, char *kv);
void ref_rmsnorm_bf16(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                      void *out);
void ref_rmsnorm_f32(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                     void *out);
void ref_rope(float *x, const float *cos, const float *sin, uint32_t n);
void ref_store_bf16(const float *x, uint32_t n, uint32_t n_padded, void *out);
void ref_store_f32(const float *x, uint32_t n, uint32_t n_padded, void *out);
void ref_silu_mul_bf16(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                       void *out);
void ref_silu_mul_f32(const float *gate, const float *up, uint32_t n, uint32_t n_padded, void *out);
void ref_unpack_row_bf16(const void *w, uint32_t row, uint32_t k, float *out);
void ref_unpack_row_f32(const void *w, uint32_t row, uint32_t k, float *out);
void ref_add(float *y, const float *x, uint32_t n);
void ref_divide(const float *x, float t, uint32_t n, float *y);
hr_lse ref_lse(const float *x, uint32_t n);
void ref_exp_sub(const float *x, float max, uint32_t n, float *out);
void ref_top_k(const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values, void *scratch);

#endif
