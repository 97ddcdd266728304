/* Reference: the chain of leaves that every linear layer is, and LoRA's share of it. */
#include "kernels/ref.h"

#include <math.h>

/* A leaf for the 16 outputs of a panel: the even inputs in one chain from +0, the odd inputs in
 * another, the two added, the sum added to acc. x holds n_inputs values; w[i * 16 + lane] is the
 * weight of input i. */
static void leaf(float acc[HR_PANEL], const float *x, const float *w, int n_inputs) {
    float even[HR_PANEL] = {0}, odd[HR_PANEL] = {0};
    for (int i = 0; i < n_inputs; i += 2) {
        for (int lane = 0; lane < HR_PANEL; lane++)
            even[lane] = fmaf(x[i], w[i * HR_PANEL + lane], even[lane]);
        for (int lane = 0; lane < HR_PANEL; lane++)
            odd[lane] = fmaf(x[i + 1], w[(i + 1) * HR_PANEL + lane], odd[lane]);
    }
    for (int lane = 0; lane < HR_PANEL; lane++)
        acc[lane] = acc[lane] + (even[lane] + odd[lane]);
}

/* Weights are unpacked once for all rows; each row's chain goes on in y. */
static void gemm(hr_compute c, const hr_gemm_args *a) {
    for (uint32_t panel = a->panel_begin; panel < a->panel_end; panel++) {
        float *y = a->y + (size_t)panel * HR_PANEL;
        for (uint32_t row = 0; row < a->m && !a->accumulate; row++)
            memset(y + row * a->ldy, 0, HR_PANEL * sizeof *y);
        for (uint32_t begin = 0; begin < a->k; begin += HR_LEAF) {
            float x[HR_LEAF], w[HR_LEAF * HR_PANEL];
            for (uint32_t i = 0; i < HR_LEAF * HR_PANEL; i++)
                w[i] = ref_load(c, a->w,
                                ref_packed_index(c, a->k, (size_t)panel * HR_PANEL + i % HR_PANEL,
                                                 begin + i / HR_PANEL));
            for (uint32_t row = 0; row < a->m; row++) {
                for (uint32_t i = 0; i < HR_LEAF; i++)
                    x[i] = ref_load(c, a->x, row * a->ldx + begin + i);
                leaf(y + row * a->ldy, x, w, HR_LEAF);
            }
        }
    }
}

void ref_gemm_bf16(const hr_gemm_args *a) {
    gemm(HR_COMPUTE_BF16, a);
}

void ref_gemm_f32(const hr_gemm_args *a) {
    gemm(HR_COMPUTE_F32, a);
}

/* s*h as a sum of two bf16 values, so that the expand can use bf16 inputs and lose almost nothing.
 */
void ref_lora_split_bf16(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                         void *out, size_t ldout) {
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t r = 0; r < n_leaves * HR_LORA_LEAF; r++) {
            uint16_t *leaf_out = (uint16_t *)out + row * ldout + r / HR_LORA_LEAF * HR_LEAF;
            float v = scale * h[row * ldh + r];
            float hi = ref_round(HR_COMPUTE_BF16, v);
            leaf_out[r % HR_LORA_LEAF] = ref_to_bf16(hi);
            leaf_out[HR_LORA_LEAF + r % HR_LORA_LEAF] = ref_to_bf16(v - hi);
        }
}

void ref_lora_split_f32(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                        void *out, size_t ldout) {
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t r = 0; r < n_leaves * HR_LORA_LEAF; r++)
            ((float *)out)[row * ldout + r] = scale * h[row * ldh + r];
}

static void lora_expand(hr_compute c, const hr_lora_expand_args *a) {
    /* bf16: the 16 hi parts, then the 16 lo parts, against the same 16 columns of B. */
    uint32_t inputs = c == HR_COMPUTE_BF16 ? HR_LEAF : HR_LORA_LEAF;
    for (uint32_t row = 0; row < a->m; row++)
        for (uint32_t panel = a->panel_begin; panel < a->panel_end; panel++) {
            float *acc = a->y + row * a->ldy + (size_t)panel * HR_PANEL;
            for (uint32_t l = 0; l < a->n_leaves; l++) {
                float h[HR_LEAF], b[HR_LEAF * HR_PANEL];
                size_t leaf_start = ((size_t)panel * a->n_leaves + l) * HR_LORA_LEAF * HR_PANEL;
                for (uint32_t i = 0; i < inputs; i++) {
                    uint32_t r = i % HR_LORA_LEAF;
                    h[i] = ref_load(c, a->h, row * a->ldh + l * inputs + i);
                    for (uint32_t lane = 0; lane < HR_PANEL; lane++)
                        b[i * HR_PANEL + lane] =
                            ref_load(c, a->b,
                                     leaf_start + (c == HR_COMPUTE_BF16
                                                       ? (r / 2 * HR_PANEL + lane) * 2 + r % 2
                                                       : r * HR_PANEL + lane));
                }
                leaf(acc, h, b, (int)inputs);
            }
        }
}

void ref_lora_expand_bf16(const hr_lora_expand_args *a) {
    lora_expand(HR_COMPUTE_BF16, a);
}

void ref_lora_expand_f32(const hr_lora_expand_args *a) {
    lora_expand(HR_COMPUTE_F32, a);
}
