/* The avx512bf16 tier: the shared kernels in AVX-512 registers, with the bf16 dot product where the
 * inputs are bf16.
 *
 * VDPBF16PS takes two steps of a chain: fma(lower halves, fma(upper halves, chain)), so words that
 * hold inputs i and i + 2 of a leaf make its even chain and i + 1 and i + 3 its odd one, in order
 * and to the bit, at twice the speed. That a processor really rounds twice is tried before the tier
 * is used (trial.c). */
#define HR_WITH_BF16_DOT
#include "kernels/simd_avx512.h"
#include "kernels/tiers.h"

#include "kernels/tier_decl.inc.h"

#include "kernels/simd_tile.inc.h"

#include "kernels/simd_gemm.inc.h"

#include "kernels/simd_softmax.inc.h"

#include "kernels/simd_attention.inc.h"
#include "kernels/simd_elementwise.inc.h"

const hr_kernels hr_kernels_avx512bf16 = {
    .name = HR_TIER_NAME,
    .gemm[HR_COMPUTE_BF16] = HR_TIER(gemm_bf16),
#include "kernels/tier_table.inc.h"
};
