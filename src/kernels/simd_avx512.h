/* Sixteen float lanes as one AVX-512 register: the words in which the fast tiers are written
 * (simd_*.inc.h). */
#ifndef HR_KERNELS_SIMD_AVX512_H
#define HR_KERNELS_SIMD_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef HR_WITH_BF16_DOT
#define HR_TIER_NAME "avx512bf16"
#define HR_TIER(op) hr_avx512bf16_##op
#define HR_TILE_DOT 1
#else
#define HR_TIER_NAME "avx512"
#define HR_TIER(op) hr_avx512_##op
#define HR_TILE_DOT 0
#endif

/* 32 registers: even and odd chains of 6 rows x 2 panels side by side. */
#define HR_TILE_ROWS 6
#define HR_TILE_PANELS 2
#define HR_TILE_SPLIT 0
#define HR_STREAM_LEAVES(rows) 4

typedef __m512 v16;

static inline v16 v_zero(void) {
    return _mm512_setzero_ps();
}
static inline v16 v_set(float x) {
    return _mm512_set1_ps(x);
}
static inline v16 v_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, v16 a) {
    _mm512_storeu_ps(p, a);
}
static inline __mmask16 v_mask_(uint32_t n) {
    return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1);
}
/* The first n <= 16 elements, the rest as fill. */
static inline v16 v_load_n(const float *p, uint32_t n, float fill) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), v_mask_(n), p);
}
/* a's first n <= 16 lanes, the rest as fill. */
static inline v16 v_first_n(v16 a, uint32_t n, float fill) {
    return _mm512_mask_blend_ps(v_mask_(n), _mm512_set1_ps(fill), a);
}
static inline float v_lane0(v16 a) {
    return _mm512_cvtss_f32(a);
}
static inline void v_store_n(float *p, v16 a, uint32_t n) {
    _mm512_mask_storeu_ps(p, v_mask_(n), a);
}
static inline v16 v_add(v16 a, v16 b) {
    return _mm512_add_ps(a, b);
}
static inline v16 v_sub(v16 a, v16 b) {
    return _mm512_sub_ps(a, b);
}
static inline v16 v_mul(v16 a, v16 b) {
    return _mm512_mul_ps(a, b);
}
static inline v16 v_div(v16 a, v16 b) {
    return _mm512_div_ps(a, b);
}
/* a * b + c and c - a * b, one rounding. */
static inline v16 v_fma(v16 a, v16 b, v16 c) {
    return _mm512_fmadd_ps(a, b, c);
}
static inline v16 v_fnma(v16 a, v16 b, v16 c) {
    return _mm512_fnmadd_ps(a, b, c);
}
static inline v16 v_sqrt(v16 a) {
    return _mm512_sqrt_ps(a);
}
static inline v16 v_neg(v16 a) {
    return _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0x80000000u)));
}
/* x > m ? x : m: the instruction gives its second operand for NaN and for equals. */
static inline v16 v_max(v16 m, v16 x) {
    return _mm512_max_ps(x, m);
}
static inline uint32_t v_greater_bits(v16 a, v16 b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
/* a < b ? x : y */
static inline v16 v_if_less(v16 a, v16 b, v16 x, v16 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/* a where a is NaN, else b. */
static inline v16 v_keep_nan(v16 a, v16 b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), b, a);
}
/* Adds the low bits of n to the exponent field of p. */
static inline v16 v_scale_by_low_bits(v16 p, v16 n) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
/* The even or the odd ones of 16 (even, odd) pairs of bf16. */
static inline v16 v_load_even(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
static inline v16 v_load_odd(const void *p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)));
}
static inline v16 v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
static inline __m512i v_bf16_bits_(v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i high = _mm512_srli_epi32(bits, 16);
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)),
                                       _mm512_and_si512(high, _mm512_set1_epi32(1)));
    __m512i out = _mm512_srli_epi32(rounded, 16);
    __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    out = _mm512_mask_or_epi32(out, nan, high, _mm512_set1_epi32(0x40));
    return _mm512_mask_and_epi32(out, small, high, _mm512_set1_epi32(0x8000));
}
static inline void v_store_bf16_n(uint16_t *p, v16 a, uint32_t n) {
    _mm512_mask_cvtepi32_storeu_epi16(p, v_mask_(n), v_bf16_bits_(a));
}
/* a after one rounding to bf16. */
static inline v16 v_round_bf16(v16 a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(v_bf16_bits_(a), 16));
}
#if HR_TILE_DOT
/* Two steps of a chain of bf16 products: the upper halves are multiplied and added first, then the
 * lower ones, each with its own rounding and denormals flushed, whatever MXCSR says. */
static inline v16 v_dot(v16 words, v16 weights, v16 chain) {
    return _mm512_dpbf16_ps(chain, (__m512bh)_mm512_castps_si512(words),
                            (__m512bh)_mm512_castps_si512(weights));
}
/* 32 bf16 as 16 words for v_dot: of inputs 4i .. 4i + 3 word 2i has the even ones and word 2i + 1
 * the odd ones, the first above the second. */
static inline v16 v_load_words(const uint16_t *p) {
    const __m512i swap = _mm512_set4_epi32(0x0b0a0f0e, 0x09080d0c, 0x03020706, 0x01000504);
    return _mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_loadu_si512(p), swap));
}
/* The same of 32 floats that are bf16 values. */
static inline v16 v_words_of_floats(v16 a, v16 b) {
    const __m512i first =
        _mm512_set_epi32(29, 28, 25, 24, 21, 20, 17, 16, 13, 12, 9, 8, 5, 4, 1, 0);
    const __m512i second =
        _mm512_set_epi32(31, 30, 27, 26, 23, 22, 19, 18, 15, 14, 11, 10, 7, 6, 3, 2);
    __m512i upper = _mm512_castps_si512(_mm512_permutex2var_ps(a, first, b));
    __m512i lower = _mm512_castps_si512(_mm512_permutex2var_ps(a, second, b));
    return _mm512_castsi512_ps(_mm512_or_si512(upper, _mm512_srli_epi32(lower, 16)));
}
/* The even (which = 0) or odd (1) weights of two neighbouring pairs of a panel, as words. */
static inline v16 v_load_weight_words(const char *pairs, int which) {
    __m512i a = _mm512_loadu_si512(pairs), b = _mm512_loadu_si512(pairs + 64);
    return _mm512_castsi512_ps(
        which == 0 ? _mm512_mask_blend_epi16(0x55555555u, _mm512_slli_epi32(a, 16), b)
                   : _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(b, 16), a));
}
#endif
/* A macro: gcc takes a function that only prefetches for pure, and drops its calls. */
#define v_prefetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

#endif
