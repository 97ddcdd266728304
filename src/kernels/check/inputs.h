/* Inputs for the kernel checks: every kind of float that an op can meet, from one seed, and
 * comparison to the bit. */
#ifndef HR_KERNELS_CHECK_INPUTS_H
#define HR_KERNELS_CHECK_INPUTS_H

#include "kernels/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum input_kind {
    INPUT_NORMAL,   /* around 1, as activations are */
    INPUT_WIDE,     /* exponents over the whole range */
    INPUT_DENORMAL, /* denormals, zeros and the smallest normals */
    INPUT_HUGE,     /* sums and products overflow */
    INPUT_ZERO,     /* +0 and -0, here and there a one */
    INPUT_ANY,      /* any bit pattern: infinities and NaN too */
    INPUT_KINDS
} input_kind;

static const char *const INPUT_NAMES[INPUT_KINDS] = {"normal", "wide", "denormal",
                                                     "huge",   "zero", "any bits"};

typedef struct rng {
    uint64_t state;
} rng;

static inline uint32_t rng_next(rng *r) {
    r->state += 0x9e3779b97f4a7c15u;
    uint64_t z = r->state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static inline uint32_t rng_below(rng *r, uint32_t n) {
    return rng_next(r) % n;
}

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A float of the kind, as bits. */
static inline uint32_t random_bits(rng *r, input_kind kind) {
    uint32_t bits = rng_next(r), sign = bits & 0x80000000u, fraction = bits & 0x007fffffu;
    switch (kind) {
    case INPUT_NORMAL:
        return sign | (0x7fu - rng_below(r, 6)) << 23 | fraction;
    case INPUT_WIDE:
        return sign | (1 + rng_below(r, 0xfd)) << 23 | fraction;
    case INPUT_DENORMAL:
        return sign | rng_below(r, 3) << 23 | fraction;
    case INPUT_HUGE:
        return sign | (0xfau + rng_below(r, 5)) << 23 | fraction;
    case INPUT_ZERO:
        return sign | (rng_below(r, 16) == 0 ? 0x3f800000u : 0);
    default:
        return bits;
    }
}

static inline void *bytes_of(size_t bytes) {
    void *p = aligned_alloc(64, hr_round_up(bytes > 0 ? bytes : 1, 64));
    if (p == NULL)
        abort();
    memset(p, 0, hr_round_up(bytes > 0 ? bytes : 1, 64));
    return p;
}

/* n floats; the caller frees. */
static inline float *random_floats(rng *r, input_kind kind, size_t n) {
    uint32_t *x = bytes_of(n * 4);
    for (size_t i = 0; i < n; i++)
        x[i] = random_bits(r, kind);
    return (float *)x;
}

/* n compute elements; the caller frees. bf16 takes the upper halves. */
static inline void *random_elements(rng *r, input_kind kind, hr_compute c, size_t n) {
    if (c == HR_COMPUTE_F32)
        return random_floats(r, kind, n);
    uint16_t *x = bytes_of(n * 2);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint16_t)(random_bits(r, kind) >> 16);
    return x;
}

static inline float element_at(hr_compute c, const void *x, size_t i) {
    return c == HR_COMPUTE_F32 ? ((const float *)x)[i]
                               : float_of_bits((uint32_t)((const uint16_t *)x)[i] << 16);
}

static inline void pack(hr_compute c, const void *src, size_t n, size_t k, void *dst) {
    if (c == HR_COMPUTE_BF16)
        hr_pack_weight_bf16(src, n, k, 0, n, dst);
    else
        hr_pack_weight_f32(src, n, k, 0, n, dst);
}

/* Index of the first element that differs (two NaN are the same), or n. */
static inline size_t first_difference(hr_compute c, const void *a, const void *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = element_at(c, a, i), y = element_at(c, b, i);
        if (float_bits(x) != float_bits(y) && !(isnan(x) && isnan(y)))
            return i;
    }
    return n;
}

#endif
