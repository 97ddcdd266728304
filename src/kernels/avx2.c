/* The avx2 tier: the shared kernels in its registers. */
#include "kernels/simd_avx2.h"
#include "kernels/tiers.h"

#include "kernels/tier_decl.inc.h"

#include "kernels/simd_tile.inc.h"

#include "kernels/simd_gemm.inc.h"

#include "kernels/simd_softmax.inc.h"

#include "kernels/simd_attention.inc.h"
#include "kernels/simd_elementwise.inc.h"

const hr_kernels hr_kernels_avx2 = {
    .name = HR_TIER_NAME,
    .gemm[HR_COMPUTE_BF16] = HR_TIER(gemm_bf16),
#include "kernels/tier_table.inc.h"
};
