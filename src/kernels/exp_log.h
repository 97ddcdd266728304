/* Coefficients of exp and log, part of the definition (docs/arithmetic.md): polynomials with the
 * smallest largest relative error, found by exchange, then rounded to float. */
#ifndef HR_KERNELS_EXP_LOG_H
#define HR_KERNELS_EXP_LOG_H

#define HR_LN2_HI 0x1.62ep-1f /* 12 bits, so that n * HR_LN2_HI is exact */
#define HR_LN2_LO 0x1.0bfbe8p-15f

/* exp(r) = 1 + r + r^2 (E2 + E3 r + .. + E6 r^4), |r| <= ln 2 / 2. */
#define HR_LOG2E 0x1.715476p+0f
#define HR_ROUND_MAGIC 0x1.8p23f /* adding it rounds to an integer, kept in the low bits */
#define HR_EXP_LOW (-87.0f)      /* below: +0 */
#define HR_EXP_HIGH 88.7f        /* above: infinity */
#define HR_EXP_2 0x1.fffffcp-2f
#define HR_EXP_3 0x1.55549p-3f
#define HR_EXP_4 0x1.5558fap-5f
#define HR_EXP_5 0x1.123b6ap-7f
#define HR_EXP_6 0x1.6a21acp-10f

/* log(1 + f) = f - f^2/2 + f^3 (L3 + L4 f + .. + L10 f^7), sqrt(1/2) <= 1 + f < sqrt(2). */
#define HR_SQRT_HALF_BITS 0x3f3504f3
#define HR_LOG_3 0x1.555554p-2f
#define HR_LOG_4 (-0x1.000226p-2f)
#define HR_LOG_5 0x1.99a008p-3f
#define HR_LOG_6 (-0x1.547244p-3f)
#define HR_LOG_7 0x1.22da1cp-3f
#define HR_LOG_8 (-0x1.0d8542p-3f)
#define HR_LOG_9 0x1.055b6cp-3f
#define HR_LOG_10 (-0x1.38b586p-4f)

#endif
