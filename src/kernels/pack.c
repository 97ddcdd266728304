/* Packing of weights into panels, at load time and when a bucket arrives.
 *
 * Integer operations only: the result does not depend on the floating-point mode of the thread. */
#include "kernels/kernels.h"

#include <string.h>

/* One panel of n_rows rows; rows past them and columns past k become zero. */
static void pack_panel_bf16(const uint16_t *src, size_t k, size_t n_rows, uint16_t *dst) {
    size_t padded = hr_round_up(k, HR_LEAF), full = k / 2;
    memset(dst, 0, padded * HR_PANEL * sizeof *dst);
    for (size_t row = 0; row < n_rows; row++) {
        const uint16_t *in = src + row * k;
        uint16_t *out = dst + 2 * row;
        for (size_t pair = 0; pair < full; pair++)
            memcpy(out + pair * 2 * HR_PANEL, in + 2 * pair, 4);
        if (k % 2 != 0)
            out[full * 2 * HR_PANEL] = in[k - 1];
    }
}

static void pack_panel_f32(const float *src, size_t k, size_t n_rows, float *dst) {
    size_t padded = hr_round_up(k, HR_LEAF);
    memset(dst, 0, padded * HR_PANEL * sizeof *dst);
    for (size_t row = 0; row < n_rows; row++)
        for (size_t i = 0; i < k; i++)
            memcpy(dst + i * HR_PANEL + row, src + row * k + i, sizeof *dst);
}

static size_t panel_rows(size_t row, size_t end) {
    return end - row < HR_PANEL ? end - row : HR_PANEL;
}

void hr_pack_weight_bf16(const uint16_t *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                         void *dst) {
    (void)n;
    size_t panel_elements = hr_round_up(k, HR_LEAF) * HR_PANEL;
    for (size_t row = row_begin; row < row_end; row += HR_PANEL)
        pack_panel_bf16(src + row * k, k, panel_rows(row, row_end),
                        (uint16_t *)dst + row / HR_PANEL * panel_elements);
}

void hr_pack_weight_f32(const float *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                        void *dst) {
    (void)n;
    size_t panel_elements = hr_round_up(k, HR_LEAF) * HR_PANEL;
    for (size_t row = row_begin; row < row_end; row += HR_PANEL)
        pack_panel_f32(src + row * k, k, panel_rows(row, row_end),
                       (float *)dst + row / HR_PANEL * panel_elements);
}

static size_t lora_ranks(size_t rank) {
    return hr_round_up(rank, HR_LORA_LEAF);
}

size_t hr_pack_lora_b_bytes(hr_compute c, size_t n, size_t rank) {
    return hr_round_up(n, HR_PANEL) * lora_ranks(rank) * hr_compute_bytes(c);
}

void hr_pack_lora_b_bf16(const uint16_t *src, size_t n, size_t rank, void *dst) {
    uint16_t *out = dst;
    memset(dst, 0, hr_pack_lora_b_bytes(HR_COMPUTE_BF16, n, rank));
    for (size_t row = 0; row < n; row++)
        for (size_t r = 0; r < rank; r++) {
            size_t pair = row / HR_PANEL * (lora_ranks(rank) / 2) + r / 2;
            out[(pair * HR_PANEL + row % HR_PANEL) * 2 + r % 2] = src[row * rank + r];
        }
}

void hr_pack_lora_b_f32(const float *src, size_t n, size_t rank, void *dst) {
    float *out = dst;
    memset(dst, 0, hr_pack_lora_b_bytes(HR_COMPUTE_F32, n, rank));
    for (size_t row = 0; row < n; row++)
        for (size_t r = 0; r < rank; r++)
            memcpy(out + (row / HR_PANEL * lora_ranks(rank) + r) * HR_PANEL + row % HR_PANEL,
                   src + row * rank + r, sizeof *out);
}
