/* The trial product. */
#include "kernels/trial.h"

#include "base/pool.h"
#include "kernels/tiers.h"

#include <string.h>

enum { M = 45, N = 48, K = 96 };

/* A sign, seven bits of fraction, and an exponent near 1 or, for wide, over the whole range in
 * which products neither vanish nor overflow; now and then a denormal. */
static uint16_t next_value(uint32_t *seed, bool wide) {
    *seed = *seed * 1664525u + 1013904223u;
    uint32_t exponent = wide ? 70 + (*seed >> 16 & 127) : 120 + (*seed >> 16 & 7);
    if ((*seed >> 12 & 15) == 0)
        exponent = 0;
    return (uint16_t)((*seed >> 31) << 15 | exponent << 7 | (*seed >> 24 & 0x7f));
}

static bool product_agrees(const hr_kernels *kernels, bool wide) {
    uint16_t x[M * K], w[N * K];
    float got[M * N], want[M * N];
    uint32_t seed = 12345;
    for (int i = 0; i < M * K; i++)
        x[i] = next_value(&seed, wide);
    for (int i = 0; i < N * K; i++)
        w[i] = next_value(&seed, wide);
    /* The scratch of one worker; a trial is small. */
    _Alignas(64) float scratch[M * (K + 16)];
    hr_gemm_args a = {.x = x,
                      .ldx = K,
                      .m = M,
                      .k = K,
                      .w = w,
                      .panel_end = N / HR_PANEL,
                      .ldy = N,
                      .scratch = scratch};
    for (int pass = 0; pass < 2; pass++) { /* from +0, and going on */
        a.accumulate = pass == 1;
        a.y = got;
        kernels->gemm[HR_COMPUTE_BF16](&a);
        a.y = want;
        hr_kernels_ref.gemm[HR_COMPUTE_BF16](&a);
        if (memcmp(got, want, sizeof got) != 0)
            return false;
    }
    return true;
}

bool hr_kernels_trial(const hr_kernels *kernels) {
    unsigned saved = hr_fp_enter();
    bool same = product_agrees(kernels, false) && product_agrees(kernels, true);
    hr_fp_restore(saved);
    return same;
}
