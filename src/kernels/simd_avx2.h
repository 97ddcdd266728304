/* Sixteen float lanes as two AVX2 registers: the same words as simd_avx512.h. */
#ifndef HR_KERNELS_SIMD_AVX2_H
#define HR_KERNELS_SIMD_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define HR_TIER_NAME "avx2"
#define HR_TIER(op) hr_avx2_##op

/* 16 registers: the chains of 6 rows x 1 panel, the even ones first and then the odd ones. */
#define HR_TILE_ROWS 6
#define HR_TILE_PANELS 1
#define HR_TILE_SPLIT 1
#define HR_TILE_DOT 0
#define HR_STREAM_LEAVES(rows) ((rows) == 1 ? 2 : 1)

typedef struct v16 {
    __m256 a, b; /* lanes 0..7, 8..15 */
} v16;

#define V_EACH_(op, x) ((v16){op((x).a), op((x).b)})
#define V_EACH2_(op, x, y) ((v16){op((x).a, (y).a), op((x).b, (y).b)})
#define V_EACH3_(op, x, y, z) ((v16){op((x).a, (y).a, (z).a), op((x).b, (y).b, (z).b)})

static inline v16 v_zero(void) {
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
static inline v16 v_set(float x) {
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
static inline v16 v_load(const float *p) {
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline void v_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
/* All ones in lanes first + i < n. */
static inline __m256i v_mask_(uint32_t n, int first) {
    __m256i lane =
        _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}
/* a's first n <= 16 lanes, the rest as fill. */
static inline v16 v_first_n(v16 x, uint32_t n, float fill) {
    __m256 f = _mm256_set1_ps(fill);
    return (v16){_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(v_mask_(n, 0))),
                 _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(v_mask_(n, 8)))};
}
/* The first n <= 16 elements, the rest as fill. */
static inline v16 v_load_n(const float *p, uint32_t n, float fill) {
    if (n >= 16)
        return v_load(p);
    v16 x = {_mm256_maskload_ps(p, v_mask_(n, 0)), _mm256_maskload_ps(p + 8, v_mask_(n, 8))};
    return v_first_n(x, n, fill);
}
static inline void v_store_n(float *p, v16 x, uint32_t n) {
    if (n >= 16) {
        v_store(p, x);
        return;
    }
    _mm256_maskstore_ps(p, v_mask_(n, 0), x.a);
    _mm256_maskstore_ps(p + 8, v_mask_(n, 8), x.b);
}
static inline float v_lane0(v16 x) {
    return _mm256_cvtss_f32(x.a);
}
static inline v16 v_add(v16 x, v16 y) {
    return V_EACH2_(_mm256_add_ps, x, y);
}
static inline v16 v_sub(v16 x, v16 y) {
    return V_EACH2_(_mm256_sub_ps, x, y);
}
static inline v16 v_mul(v16 x, v16 y) {
    return V_EACH2_(_mm256_mul_ps, x, y);
}
static inline v16 v_div(v16 x, v16 y) {
    return V_EACH2_(_mm256_div_ps, x, y);
}
/* x * y + z and z - x * y, one rounding. */
static inline v16 v_fma(v16 x, v16 y, v16 z) {
    return V_EACH3_(_mm256_fmadd_ps, x, y, z);
}
static inline v16 v_fnma(v16 x, v16 y, v16 z) {
    return V_EACH3_(_mm256_fnmadd_ps, x, y, z);
}
static inline v16 v_sqrt(v16 x) {
    return V_EACH_(_mm256_sqrt_ps, x);
}
static inline v16 v_neg(v16 x) {
    v16 sign = v_set(-0.0f);
    return V_EACH2_(_mm256_xor_ps, x, sign);
}
/* x > m ? x : m: the instruction gives its second operand for NaN and for equals. */
static inline v16 v_max(v16 m, v16 x) {
    return V_EACH2_(_mm256_max_ps, x, m);
}
static inline uint32_t v_greater_bits(v16 x, v16 y) {
    uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ));
    return low | (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8;
}
/* x < y ? yes : no */
static inline v16 v_if_less(v16 x, v16 y, v16 yes, v16 no) {
    return (v16){_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                 _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
/* x where x is NaN, else y. */
static inline v16 v_keep_nan(v16 x, v16 y) {
    return (v16){_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
                 _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
static inline __m256 v_scale_half_(__m256 p, __m256 n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
/* Adds the low bits of n to the exponent field of p. */
static inline v16 v_scale_by_low_bits(v16 p, v16 n) {
    return V_EACH2_(v_scale_half_, p, n);
}
static inline __m256i v_load_half_(const void *p, size_t bytes) {
    return _mm256_loadu_si256((const __m256i *)(const void *)((const char *)p + bytes));
}
static inline __m256 v_even_half_(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
static inline __m256 v_odd_half_(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
}
/* The even or the odd ones of 16 (even, odd) pairs of bf16. */
static inline v16 v_load_even(const void *p) {
    return (v16){v_even_half_(v_load_half_(p, 0)), v_even_half_(v_load_half_(p, 32))};
}
static inline v16 v_load_odd(const void *p) {
    return (v16){v_odd_half_(v_load_half_(p, 0)), v_odd_half_(v_load_half_(p, 32))};
}
static inline v16 v_load_bf16(const uint16_t *p) {
    __m256i x = v_load_half_(p, 0);
    return (v16){v_even_half_(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x))),
                 v_even_half_(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)))};
}
/* bf16 bits in the low half of each lane. */
static inline __m256i v_bf16_bits_half_(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)),
                                       _mm256_and_si256(high, _mm256_set1_epi32(1)));
    __m256i out = _mm256_srli_epi32(rounded, 16);
    __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
    out = _mm256_blendv_epi8(out, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    return _mm256_blendv_epi8(out, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), small);
}
static inline void v_store_bf16_n(uint16_t *p, v16 x, uint32_t n) {
    __m256i packed = _mm256_packus_epi32(v_bf16_bits_half_(x.a), v_bf16_bits_half_(x.b));
    packed = _mm256_permute4x64_epi64(packed, 0xd8);
    if (n >= 16) {
        _mm256_storeu_si256((__m256i *)(void *)p, packed);
        return;
    }
    uint16_t part[16];
    _mm256_storeu_si256((__m256i *)(void *)part, packed);
    memcpy(p, part, n * sizeof *p);
}
static inline __m256 v_round_half_(__m256 x) {
    return v_even_half_(v_bf16_bits_half_(x));
}
/* x after one rounding to bf16. */
static inline v16 v_round_bf16(v16 x) {
    return V_EACH_(v_round_half_, x);
}
/* A macro: gcc takes a function that only prefetches for pure, and drops its calls. */
#define v_prefetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

#endif
