/* Reference: norms, rotary embedding, SiLU, rounding into compute elements, cache writes. */
#include "kernels/ref.h"

#include <math.h>

static void rmsnorm(hr_compute c, const float *x, const float *w, uint32_t n, uint32_t n_padded,
                    float eps, void *out) {
    float lane[16] = {0};
    for (uint32_t i = 0; i < n; i++)
        lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    float mean = ref_lane_tree(lane) / (float)n;
    float r = 1.0f / sqrtf(mean + eps);
    for (uint32_t i = 0; i < n; i++)
        ref_store(c, out, i, (x[i] * r) * w[i]);
    for (uint32_t i = n; i < n_padded; i++)
        ref_store(c, out, i, 0.0f);
}

void ref_rmsnorm_bf16(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                      void *out) {
    rmsnorm(HR_COMPUTE_BF16, x, w, n, n_padded, eps, out);
}

void ref_rmsnorm_f32(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                     void *out) {
    rmsnorm(HR_COMPUTE_F32, x, w, n, n_padded, eps, out);
}

void ref_rope(float *x, const float *cos, const float *sin, uint32_t n) {
    uint32_t half = n / 2;
    for (uint32_t i = 0; i < half; i++) {
        float lo = x[i], hi = x[half + i];
        x[i] = fmaf(-hi, sin[i], lo * cos[i]);
        x[half + i] = fmaf(lo, sin[i], hi * cos[i]);
    }
}

static void store(hr_compute c, const float *x, uint32_t n, uint32_t n_padded, void *out) {
    for (uint32_t i = 0; i < n; i++)
        ref_store(c, out, i, x[i]);
    for (uint32_t i = n; i < n_padded; i++)
        ref_store(c, out, i, 0.0f);
}

void ref_store_bf16(const float *x, uint32_t n, uint32_t n_padded, void *out) {
    store(HR_COMPUTE_BF16, x, n, n_padded, out);
}

void ref_store_f32(const float *x, uint32_t n, uint32_t n_padded, void *out) {
    store(HR_COMPUTE_F32, x, n, n_padded, out);
}

/* Keys: [n = position][k = dim]; values: [n = dim][k = position]. The padding of this position is
 * written too, so that nothing left in the page by an earlier sequence is ever read. */
static void kv_store(hr_compute c, const float *k, const float *v, uint32_t head_dim, uint32_t slot,
                     char *kv) {
    uint32_t padded = (uint32_t)hr_round_up(head_dim, HR_LEAF);
    char *values = kv + hr_kv_slot_bytes(c, head_dim) / 2;
    for (uint32_t d = 0; d < padded; d++) {
        ref_store(c, kv, ref_packed_index(c, padded, slot, d), d < head_dim ? k[d] : 0.0f);
        ref_store(c, values, ref_packed_index(c, HR_KV_PAGE_TOKENS, d, slot),
                  d < head_dim ? v[d] : 0.0f);
    }
}

void ref_kv_store_bf16(const float *k, const float *v, uint32_t head_dim, uint32_t slot, char *kv) {
    kv_store(HR_COMPUTE_BF16, k, v, head_dim, slot, kv);
}

void ref_kv_store_f32(const float *k, const float *v, uint32_t head_dim, uint32_t slot, char *kv) {
    kv_store(HR_COMPUTE_F32, k, v, head_dim, slot, kv);
}

static void silu_mul(hr_compute c, const float *gate, const float *up, uint32_t n,
                     uint32_t n_padded, void *out) {
    for (uint32_t i = 0; i < n; i++)
        ref_store(c, out, i, (gate[i] / (1.0f + ref_exp(-gate[i]))) * up[i]);
    for (uint32_t i = n; i < n_padded; i++)
        ref_store(c, out, i, 0.0f);
}

void ref_silu_mul_bf16(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                       void *out) {
    silu_mul(HR_COMPUTE_BF16, gate, up, n, n_padded, out);
}

void ref_silu_mul_f32(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                      void *out) {
    silu_mul(HR_COMPUTE_F32, gate, up, n, n_padded, out);
}

static void unpack_row(hr_compute c, const void *w, uint32_t row, uint32_t k, float *out) {
    size_t padded = hr_round_up(k, HR_LEAF);
    for (uint32_t i = 0; i < k; i++)
        out[i] = ref_load(c, w, ref_packed_index(c, padded, row, i));
}

void ref_unpack_row_bf16(const void *w, uint32_t row, uint32_t k, float *out) {
    unpack_row(HR_COMPUTE_BF16, w, row, k, out);
}

void ref_unpack_row_f32(const void *w, uint32_t row, uint32_t k, float *out) {
    unpack_row(HR_COMPUTE_F32, w, row, k, out);
}

void ref_add(float *y, const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

void ref_divide(const float *x, float t, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] / t;
}
