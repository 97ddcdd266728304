/* The AMX tier's loops on emulated tiles, so that its blocks and tails are checked on machines
 * without AMX. What the tile product itself computes is taken from docs/arithmetic.md; on a machine
 * with AMX test_tiers runs the real one. */
#include "kernels/check/inputs.h"

#include "base/pool.h"

#include <immintrin.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

typedef struct emulated_tile {
    int rows;
    uint32_t word[16][16];
} emulated_tile;

static emulated_tile tiles[8];
static int loadconfigs, releases;

static void emulate_loadconfig(const void *config) {
    const uint8_t *bytes = config;
    assert_int_equal(bytes[0], 1);
    for (int t = 0; t < 8; t++) {
        assert_int_equal(bytes[16 + 2 * t], 64);
        tiles[t].rows = bytes[48 + t];
        assert_in_range(tiles[t].rows, 1, 16);
    }
    loadconfigs++;
}

static void emulate_zero(int t) {
    memset(tiles[t].word, 0, sizeof tiles[t].word);
}

static void emulate_load(int t, const void *base, size_t stride) {
    emulate_zero(t);
    for (int r = 0; r < tiles[t].rows; r++)
        memcpy(tiles[t].word[r], (const char *)base + (size_t)r * stride, 64);
}

static void emulate_store(int t, void *base, size_t stride) {
    for (int r = 0; r < tiles[t].rows; r++)
        memcpy((char *)base + (size_t)r * stride, tiles[t].word[r], 64);
}

static void emulate_product(int sum, int rows, int panel) {
    for (int r = 0; r < tiles[sum].rows; r++)
        for (int lane = 0; lane < 16; lane++) {
            float even = 0, odd = 0;
            for (int j = 0; j < 16; j++) {
                uint32_t x = tiles[rows].word[r][j], w = tiles[panel].word[j][lane];
                even = fmaf(float_of_bits(x << 16), float_of_bits(w << 16), even);
                odd = fmaf(float_of_bits(x & 0xffff0000u), float_of_bits(w & 0xffff0000u), odd);
            }
            float acc = float_of_bits(tiles[sum].word[r][lane]) + (even + odd);
            tiles[sum].word[r][lane] = float_bits(acc);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulate_loadconfig(config)
#define _tile_release() (void)releases++
#define _tile_zero(t) emulate_zero(t)
#define _tile_loadd(t, base, stride) emulate_load(t, base, stride)
#define _tile_stored(t, base, stride) emulate_store(t, base, stride)
#define _tile_dpbf16ps(sum, rows, panel) emulate_product(sum, rows, panel)
#define hr_kernels_amx emulated_amx
#define hr_amx_present emulated_amx_present
#define hr_amx_refused emulated_amx_refused
#include "kernels/amx.c"

static void check(input_kind kind, uint32_t m, uint32_t n, uint32_t k, bool accumulate) {
    rng r = {m * 1000 + n + k};
    size_t ldx = k + 8, ldy = hr_round_up(n, HR_PANEL) + 5;
    void *x = random_elements(&r, kind, HR_COMPUTE_BF16, m * ldx);
    void *rows = random_elements(&r, kind, HR_COMPUTE_BF16, (size_t)n * k);
    void *w = bytes_of(hr_packed_bytes(HR_COMPUTE_BF16, n, k));
    float *want = random_floats(&r, kind, m * ldy), *got = bytes_of(m * ldy * 4);
    memcpy(got, want, m * ldy * 4);
    pack(HR_COMPUTE_BF16, rows, n, k, w);
    hr_gemm_args a = {.x = x,
                      .ldx = ldx,
                      .m = m,
                      .k = k,
                      .w = w,
                      .panel_end = (uint32_t)hr_round_up(n, HR_PANEL) / HR_PANEL,
                      .y = want,
                      .ldy = ldy,
                      .accumulate = accumulate};
    hr_kernels_tier(0)->gemm[HR_COMPUTE_BF16](&a);
    a.y = got;
    emulated_amx.gemm[HR_COMPUTE_BF16](&a);
    size_t at = first_difference(HR_COMPUTE_F32, got, want, m * ldy);
    if (at < m * ldy)
        fail_msg("%s, m=%u n=%u k=%u: element %zu is %a, want %a", INPUT_NAMES[kind], m, n, k, at,
                 (double)got[at], (double)want[at]);
    free(x);
    free(rows);
    free(w);
    free(want);
    free(got);
}

static void tiles_cover_every_number_of_rows_and_panels(void **state) {
    (void)state;
    unsigned saved = hr_fp_enter();
    for (uint32_t m = MIN_ROWS; m <= 70; m++)
        check((input_kind)(m % INPUT_KINDS), m, m % 2 ? 80 : 40, 64, m % 3 == 0);
    check(INPUT_NORMAL, 300, 48, 64, false);
    check(INPUT_NORMAL, 33, 33, 2080, false);
    check(INPUT_NORMAL, 40, 16, 1056, true);
    hr_fp_restore(saved);
    assert_true(loadconfigs > 0 && releases > 0);
}

static void the_trial_product_agrees(void **state) {
    (void)state;
    assert_true(hr_kernels_trial(&emulated_amx));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_cover_every_number_of_rows_and_panels),
        cmocka_unit_test(the_trial_product_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
