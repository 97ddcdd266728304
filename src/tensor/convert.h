/* Conversion between the floating-point types of weights: F32, BF16, F16.
 *
 * Defined to the bit and independent of the floating-point mode (integer operations only). Widening
 * is exact. Narrowing to bf16 turns an f32 denormal into zero of its sign, then rounds to nearest
 * even (docs/arithmetic.md); values beyond the range become infinities and NaN stays NaN. */
#ifndef HR_TENSOR_CONVERT_H
#define HR_TENSOR_CONVERT_H

#include "base/error.h"

#include <headrace/tensor.h>
#include <string.h>

static inline uint32_t hr_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float hr_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float hr_bf16_to_f32(uint16_t value) {
    return hr_f32_from_bits((uint32_t)value << 16);
}

/* On bits, so that no floating-point move can touch the value. */
static inline uint16_t hr_f32_bits_to_bf16(uint32_t bits) {
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40u;
    uint32_t zero = (bits >> 16) & 0x8000u;
    uint32_t out = magnitude > 0x7f800000u ? quiet_nan : rounded;
    return (uint16_t)(magnitude < 0x00800000u ? zero : out);
}

static inline uint16_t hr_f32_to_bf16(float value) {
    return hr_f32_bits_to_bf16(hr_f32_bits(value));
}

/* Bits of the f32 that equals an f16; f16 denormals are normal numbers in f32 and stay exact. */
uint32_t hr_f16_to_f32_bits(uint16_t value);

static inline float hr_f16_to_f32(uint16_t value) {
    return hr_f32_from_bits(hr_f16_to_f32_bits(value));
}

/* Converts n elements. src is F32, BF16 or F16, dst is F32 or BF16 (equal dtypes copy the bytes).
 * dst and src may be unaligned and must not overlap. ERR_DTYPE for any other pair. Thread-safe. */
hr_status hr_convert(void *dst, hr_dtype dst_dtype, const void *src, hr_dtype src_dtype, size_t n,
                     hr_error *err);

#endif
