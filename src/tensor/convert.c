/* Row conversions. Plain loops over unaligned element types, written so that the compiler
 * vectorises them; integer operations only, so the floating-point mode of the calling thread does
 * not matter. */
#include "tensor/convert.h"

typedef uint16_t hr_u16 __attribute__((aligned(1)));
typedef uint32_t hr_u32 __attribute__((aligned(1)));

/* The int to float step and the product with 2^-24 are exact and meet no f32 denormal, so neither
 * rounding nor flush modes touch them. */
static inline uint32_t f16_bits(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = value & 0x7fffu;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    uint32_t denormal = hr_f32_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t out = magnitude >= 0x7c00u ? special : normal;
    return sign | (magnitude < 0x0400u ? denormal : out);
}

uint32_t hr_f16_to_f32_bits(uint16_t value) {
    return f16_bits(value);
}

static void f32_to_bf16(hr_u16 *restrict dst, const hr_u32 *restrict src, size_t n) {
    for (size_t i = 0; i < n; i++)
        dst[i] = hr_f32_bits_to_bf16(src[i]);
}

static void f16_to_bf16(hr_u16 *restrict dst, const hr_u16 *restrict src, size_t n) {
    for (size_t i = 0; i < n; i++)
        dst[i] = hr_f32_bits_to_bf16(f16_bits(src[i]));
}

static void f16_to_f32(hr_u32 *restrict dst, const hr_u16 *restrict src, size_t n) {
    for (size_t i = 0; i < n; i++)
        dst[i] = f16_bits(src[i]);
}

static void bf16_to_f32(hr_u32 *restrict dst, const hr_u16 *restrict src, size_t n) {
    for (size_t i = 0; i < n; i++)
        dst[i] = (uint32_t)src[i] << 16;
}

hr_status hr_convert(void *dst, hr_dtype dst_dtype, const void *src, hr_dtype src_dtype, size_t n,
                     hr_error *err) {
    if (dst_dtype == src_dtype) {
        if (n > 0)
            memcpy(dst, src, n * hr_dtype_size(dst_dtype));
        return HR_OK;
    }
    if (dst_dtype == HR_DTYPE_BF16 && src_dtype == HR_DTYPE_F32)
        f32_to_bf16(dst, src, n);
    else if (dst_dtype == HR_DTYPE_BF16 && src_dtype == HR_DTYPE_F16)
        f16_to_bf16(dst, src, n);
    else if (dst_dtype == HR_DTYPE_F32 && src_dtype == HR_DTYPE_F16)
        f16_to_f32(dst, src, n);
    else if (dst_dtype == HR_DTYPE_F32 && src_dtype == HR_DTYPE_BF16)
        bf16_to_f32(dst, src, n);
    else
        return hr_fail(err, HR_ERR_DTYPE,
                       "no conversion from %s to %s; weights are F32, F16 or BF16",
                       hr_dtype_name(src_dtype), hr_dtype_name(dst_dtype));
    return HR_OK;
}
