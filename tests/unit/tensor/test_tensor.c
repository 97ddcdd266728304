/* Element types, shapes, and conversions to the bit. */
#include "base/pool.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/finite.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <xxhash.h>

#include <cmocka.h>

static void every_dtype_is_found_by_its_names(void **state) {
    (void)state;
    for (int i = 0; i < HR_DTYPE_COUNT; i++) {
        hr_dtype found = HR_DTYPE_COUNT;
        assert_true(hr_dtype_from_name(hr_dtype_name((hr_dtype)i), &found));
        assert_int_equal(found, i);
        assert_true(hr_dtype_from_torch_name(hr_dtype_torch_name((hr_dtype)i), &found));
        assert_int_equal(found, i);
        assert_true(hr_dtype_size((hr_dtype)i) > 0);
    }
    hr_dtype kept = HR_DTYPE_I8;
    assert_false(hr_dtype_from_name("bf16", &kept));
    assert_int_equal(kept, HR_DTYPE_I8);
    assert_true(hr_dtype_from_torch_name("torch.bfloat16", &kept));
    assert_int_equal(kept, HR_DTYPE_BF16);
    assert_string_equal(hr_dtype_name((hr_dtype)99), "unknown");
}

static void a_shape_counts_its_elements_or_overflows(void **state) {
    (void)state;
    uint64_t n = 0;
    assert_true(hr_shape_elements(NULL, 0, &n));
    assert_int_equal(n, 1);
    assert_true(hr_shape_elements((uint64_t[]){3, 0, 7}, 3, &n));
    assert_int_equal(n, 0);
    assert_false(hr_shape_elements((uint64_t[]){1ull << 32, 1ull << 32}, 2, &n));
}

static void a_shape_is_written_for_messages(void **state) {
    (void)state;
    char text[64], small[5];
    assert_string_equal(hr_shape_format((uint64_t[]){2, 30}, 2, text, sizeof text), "[2, 30]");
    assert_string_equal(hr_shape_format(NULL, 0, text, sizeof text), "[]");
    assert_string_equal(hr_shape_format((uint64_t[]){2, 30}, 2, small, sizeof small), "[2, ");
}

/* The rule written out in another way: through the two neighbours and their distance. */
static uint16_t bf16_by_definition(uint32_t bits) {
    uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 31 << 15;
    if (magnitude < 0x00800000)
        return (uint16_t)sign;
    uint32_t low = magnitude >> 16, rest = magnitude & 0xffff;
    if (rest > 0x8000 || (rest == 0x8000 && (low & 1)))
        low++;
    return (uint16_t)(sign | low);
}

static void f32_becomes_bf16_by_round_to_nearest_even_and_denormals_vanish(void **state) {
    (void)state;
    static const uint32_t table[][2] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, /* tie to even, down */
        {0x3f818000, 0x3f82},                       /* tie to even, up */
        {0x3f808001, 0x3f81}, {0x007fffff, 0x0000}, /* largest denormal, not the smallest normal */
        {0x807fffff, 0x8000}, {0x00800000, 0x0080}, {0x7f7fffff, 0x7f80}, {0xff800000, 0xff80},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        assert_int_equal(hr_f32_bits_to_bf16(table[i][0]), table[i][1]);
    for (uint32_t i = 0; i < 1u << 20; i++) {
        uint32_t bits = i * 2654435761u;
        if ((bits & 0x7fffffff) <= 0x7f800000)
            assert_int_equal(hr_f32_bits_to_bf16(bits), bf16_by_definition(bits));
    }
    assert_true(isnan(hr_bf16_to_f32(hr_f32_bits_to_bf16(0x7f800001))));
}

static void every_f16_widens_exactly(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        int exponent = (int)(h >> 10 & 31);
        double fraction = h & 0x3ff;
        float got = hr_f16_to_f32((uint16_t)h);
        if (exponent == 31) {
            assert_true(fraction != 0 ? isnan(got) : isinf(got));
            continue;
        }
        double wanted = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
        assert_true(got == (float)(h & 0x8000 ? -wanted : wanted));
        assert_int_equal(signbit(got) != 0, h >> 15);
    }
}

/* Rows of every pair of types, at odd addresses, equal the single conversions; flush modes change
 * nothing. */
static void rows_convert_at_any_address_in_any_float_mode(void **state) {
    (void)state;
    enum { N = 1003 };
    static unsigned char source[4 * N + 1], there[4 * N + 1];
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (unsigned char)(i * 167 + (i >> 3) * 13);
    unsigned saved = hr_fp_enter();
    for (int narrow = 0; narrow < 2; narrow++) {
        for (int f16 = 0; f16 < 2; f16++) {
            hr_dtype to = narrow ? HR_DTYPE_BF16 : HR_DTYPE_F32;
            hr_dtype from = f16 ? HR_DTYPE_F16 : narrow ? HR_DTYPE_F32 : HR_DTYPE_BF16;
            assert_int_equal(hr_convert(there + 1, to, source + 1, from, N, NULL), HR_OK);
            for (size_t i = 0; i < N; i++) {
                uint32_t in = 0, bits = 0, out = 0;
                size_t size = hr_dtype_size(from);
                memcpy(&in, source + 1 + i * size, size);
                bits = f16 ? hr_f16_to_f32_bits((uint16_t)in) : narrow ? in : in << 16;
                memcpy(&out, there + 1 + i * hr_dtype_size(to), hr_dtype_size(to));
                assert_int_equal(out, narrow ? hr_f32_bits_to_bf16(bits) : bits);
            }
        }
    }
    hr_fp_restore(saved);
}

static void equal_types_copy_their_bytes(void **state) {
    (void)state;
    uint32_t denormal = 1, out = 0;
    assert_int_equal(hr_convert(&out, HR_DTYPE_F32, &denormal, HR_DTYPE_F32, 1, NULL), HR_OK);
    assert_int_equal(out, 1);
}

static void other_conversions_are_refused_by_name(void **state) {
    (void)state;
    hr_error err = {0};
    uint32_t word = 0;
    assert_int_equal(hr_convert(&word, HR_DTYPE_F32, &word, HR_DTYPE_F8_E4M3, 1, &err),
                     HR_ERR_DTYPE);
    assert_non_null(strstr(err.message, "F8_E4M3"));
}

static void one_infinity_or_nan_is_found_wherever_it_stands(void **state) {
    (void)state;
    enum { N = 67 };
    for (size_t at = 0; at < N; at++) {
        float f32[N] = {0};
        uint16_t half[N] = {0};
        assert_true(hr_all_finite(f32, HR_DTYPE_F32, HR_DTYPE_F32, N));
        f32[at] = at % 2 ? INFINITY : NAN;
        assert_false(hr_all_finite(f32, HR_DTYPE_F32, HR_DTYPE_F32, N));
        assert_false(hr_all_finite(f32, HR_DTYPE_F32, HR_DTYPE_BF16, N));
        half[at] = 0x7bff; /* the largest f16; a finite bf16 too */
        assert_true(hr_all_finite(half, HR_DTYPE_F16, HR_DTYPE_BF16, N));
        half[at] = 0xfc00;
        assert_false(hr_all_finite(half, HR_DTYPE_F16, HR_DTYPE_BF16, N));
        assert_true(hr_all_finite(half, HR_DTYPE_BF16, HR_DTYPE_BF16, N));
        half[at] = 0xff81;
        assert_false(hr_all_finite(half, HR_DTYPE_BF16, HR_DTYPE_F32, N));
    }
}

/* Of every type, the values around each border: what converts to a finite number is finite. */
static void values_are_judged_as_what_they_become(void **state) {
    (void)state;
    static const uint32_t f32[] = {0x7f7effff, 0x7f7f0000, 0x7f7f7fff, 0x7f7f8000, 0x7f7f8001,
                                   0x7f7fffff, 0x7f800000, 0x7f800001, 0x00000001, 0x7fffffff};
    for (size_t i = 0; i < 2 * sizeof f32 / sizeof *f32; i++) {
        uint32_t bits = f32[i / 2] | (uint32_t)(i % 2) << 31;
        uint16_t narrow = hr_f32_bits_to_bf16(bits);
        assert_int_equal(hr_all_finite(&bits, HR_DTYPE_F32, HR_DTYPE_BF16, 1),
                         isfinite(hr_bf16_to_f32(narrow)) != 0);
        assert_int_equal(hr_all_finite(&bits, HR_DTYPE_F32, HR_DTYPE_F32, 1),
                         isfinite(hr_f32_from_bits(bits)) != 0);
    }
    for (uint32_t h = 0; h < 0x10000; h++) {
        uint16_t half = (uint16_t)h;
        assert_int_equal(hr_all_finite(&half, HR_DTYPE_F16, HR_DTYPE_BF16, 1),
                         isfinite(hr_bf16_to_f32(hr_f32_to_bf16(hr_f16_to_f32(half)))) != 0);
        assert_int_equal(hr_all_finite(&half, HR_DTYPE_BF16, HR_DTYPE_F32, 1),
                         isfinite(hr_bf16_to_f32(half)) != 0);
    }
}

static void a_refusal_of_values_counts_them(void **state) {
    (void)state;
    float values[12] = {3e38f, NAN, -INFINITY, 3.4e38f, -3.4e38f};
    hr_tensor tensor = {.name = "w",
                        .dtype = HR_DTYPE_F32,
                        .ndim = 2,
                        .shape = {3, 4},
                        .data = values,
                        .bytes = sizeof values};
    hr_error err = {0};
    assert_int_equal(hr_fail_not_finite(&tensor, HR_DTYPE_BF16, &err), HR_ERR_VALUE);
    assert_non_null(strstr(err.message, "tensor w: 2 of 12 values are NaN or infinite"));
    values[1] = values[2] = 0;
    assert_int_equal(hr_fail_not_finite(&tensor, HR_DTYPE_BF16, &err), HR_ERR_VALUE);
    assert_non_null(strstr(err.message, "tensor w: 2 of 12 values are too large for BF16"));
}

/* Vectors of the published programs: xxh128sum of "" and of "abc" fed in two pieces; FIPS 180-2. */
static void digests_are_those_of_the_published_programs(void **state) {
    (void)state;
    uint8_t digest[HR_XXH3_SIZE], back[HR_XXH3_SIZE];
    char hex[HR_XXH3_HEX], sha[HR_SHA256_HEX];
    hr_xxh3("", 0, digest);
    assert_string_equal(hr_xxh3_format(digest, hex), "99aa06d3014798d86001c324468d497f");
    hr_xxh3_stream *stream = hr_xxh3_stream_create();
    assert_non_null(stream);
    hr_xxh3_stream_update(stream, "a", 1);
    hr_xxh3_stream_update(stream, "bc", 2);
    hr_xxh3_stream_digest(stream, digest);
    assert_string_equal(hr_xxh3_format(digest, hex), "06b05ab6733a618578af5f94892f3950");
    assert_true(hr_xxh3_parse("06B05AB6733A618578AF5F94892F3950", back));
    assert_memory_equal(back, digest, sizeof back);
    hr_xxh3_stream_destroy(stream);
    assert_false(hr_xxh3_parse("06b05ab6733a618578af5f94892f395", back));
    assert_false(hr_xxh3_parse("06b05ab6733a618578af5f94892f395g", back));
    hr_sha256_hex("abc", 3, sha);
    assert_string_equal(sha, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/* Whatever the machine's instructions: the linked library is the baseline. */
static void digests_are_the_librarys_at_every_length_and_in_every_piece(void **state) {
    (void)state;
    enum { MOST = 5000 };
    static const size_t pieces[] = {1, 63, 64, 65, 255, 1024, 4999};
    unsigned char bytes[MOST];
    for (size_t i = 0; i < MOST; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 11);
    hr_xxh3_stream *stream = hr_xxh3_stream_create();
    assert_non_null(stream);
    for (size_t size = 0; size <= MOST; size += size < 600 ? 1 : 97) {
        XXH128_canonical_t want;
        uint8_t digest[HR_XXH3_SIZE];
        XXH128_canonicalFromHash(&want, XXH3_128bits(bytes, size));
        hr_xxh3(bytes, size, digest);
        assert_memory_equal(digest, want.digest, sizeof digest);
        for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; p++) {
            hr_xxh3_stream_reset(stream);
            for (size_t at = 0; at < size; at += pieces[p])
                hr_xxh3_stream_update(stream, bytes + at,
                                      size - at < pieces[p] ? size - at : pieces[p]);
            hr_xxh3_stream_digest(stream, digest);
            assert_memory_equal(digest, want.digest, sizeof digest);
        }
    }
    hr_xxh3_stream_destroy(stream);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digests_are_the_librarys_at_every_length_and_in_every_piece),
        cmocka_unit_test(every_dtype_is_found_by_its_names),
        cmocka_unit_test(a_shape_counts_its_elements_or_overflows),
        cmocka_unit_test(a_shape_is_written_for_messages),
        cmocka_unit_test(f32_becomes_bf16_by_round_to_nearest_even_and_denormals_vanish),
        cmocka_unit_test(every_f16_widens_exactly),
        cmocka_unit_test(digests_are_those_of_the_published_programs),
        cmocka_unit_test(rows_convert_at_any_address_in_any_float_mode),
        cmocka_unit_test(equal_types_copy_their_bytes),
        cmocka_unit_test(other_conversions_are_refused_by_name),
        cmocka_unit_test(one_infinity_or_nan_is_found_wherever_it_stands),
        cmocka_unit_test(values_are_judged_as_what_they_become),
        cmocka_unit_test(a_refusal_of_values_counts_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
