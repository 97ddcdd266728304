/* Every tier gives the bits of the reference, calls what it says it calls, and a tier that leans on
 * an instruction is refused where that instruction does otherwise. */
#include "kernels/check/bits.h"
#include "kernels/check/count.h"
#include "kernels/check/inputs.h"
#include "kernels/trial.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { MAX_TIERS = 8 };
static const hr_kernels *tiers[MAX_TIERS]; /* all that this machine has, then NULL */

static int set_up(void **state) {
    (void)state;
    for (size_t i = 0; i + 1 < MAX_TIERS; i++)
        tiers[i] = hr_kernels_tier(i);
    return 0;
}

static void every_op_has_the_bits_of_the_reference(void **state) {
    (void)state;
    static hr_bits_result results[HR_BITS_RESULTS];
    size_t n = hr_bits_check(tiers[0], tiers + 1, results);
    assert_true(n > 0 || tiers[1] == NULL);
    for (size_t i = 0; i < n; i++) {
        assert_true(results[i].compared > 0);
        if (results[i].different > 0)
            fail_msg("%s, %s: %s", results[i].tier->name, results[i].op, results[i].first);
    }
}

/* The check reaches every entry of a tier's table, and every entry is code of that tier: only amx
 * takes what it does not do on tiles from avx512. */
static void every_entry_of_a_tier_is_called_and_its_own(void **state) {
    (void)state;
    static hr_bits_result results[HR_BITS_RESULTS];
    for (size_t t = 1; tiers[t] != NULL; t++) {
        hr_kernels counting;
        hr_count_start(tiers[t], &counting);
        const hr_kernels *only[] = {&counting, NULL};
        hr_bits_check(tiers[0], only, results);
        for (size_t entry = 0; entry < HR_COUNT_ENTRIES; entry++) {
            assert_true(hr_count_calls(entry) > 0);
            const hr_kernels *owner = hr_count_owner(tiers, t, entry);
            bool borrowed = strcmp(tiers[t]->name, "amx") == 0 &&
                            strcmp(hr_count_name(entry), "gemm bf16") != 0;
            assert_string_equal(owner->name, borrowed ? "avx512" : tiers[t]->name);
        }
    }
}

/* A dot product that adds the second of two products first: what the trial must find out. */
static void gemm_in_another_order(const hr_gemm_args *a) {
    for (uint32_t row = 0; row < a->m; row++)
        for (uint32_t out = a->panel_begin * HR_PANEL; out < a->panel_end * HR_PANEL; out++) {
            const uint16_t *x = (const uint16_t *)a->x + row * a->ldx;
            const uint16_t *w = (const uint16_t *)a->w + (size_t)out / HR_PANEL * a->k * HR_PANEL;
            float acc = a->accumulate ? a->y[row * a->ldy + out] : 0;
            for (uint32_t leaf = 0; leaf < a->k; leaf += HR_LEAF) {
                float chain[2] = {0, 0};
                for (uint32_t i = 0; i < HR_LEAF; i++) {
                    uint32_t at = leaf + (i / 4 * 4 + (i + 2) % 4);
                    size_t index = (at / 2 * HR_PANEL + out % HR_PANEL) * 2 + at % 2;
                    chain[i % 2] = fmaf(element_at(HR_COMPUTE_BF16, x, at),
                                        element_at(HR_COMPUTE_BF16, w, index), chain[i % 2]);
                }
                acc = acc + (chain[0] + chain[1]);
            }
            a->y[row * a->ldy + out] = acc;
        }
}

static void the_trial_passes_every_tier_and_refuses_another_order(void **state) {
    (void)state;
    for (size_t i = 0; tiers[i] != NULL; i++)
        assert_true(hr_kernels_trial(tiers[i]));
    hr_kernels other = *tiers[0];
    other.gemm[HR_COMPUTE_BF16] = gemm_in_another_order;
    assert_false(hr_kernels_trial(&other));
}

/* The check itself can fail: it finds a tier whose products add in another order. */
static void the_check_finds_a_wrong_order(void **state) {
    (void)state;
    static hr_bits_result results[HR_BITS_RESULTS];
    hr_kernels other = *tiers[0];
    other.gemm[HR_COMPUTE_BF16] = gemm_in_another_order;
    const hr_kernels *only[] = {&other, NULL};
    size_t n = hr_bits_check(tiers[0], only, results), wrong = 0;
    for (size_t i = 0; i < n; i++)
        wrong += results[i].different > 0 && strcmp(results[i].op, "gemm") == 0;
    assert_int_equal(wrong, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_has_the_bits_of_the_reference),
        cmocka_unit_test(every_entry_of_a_tier_is_called_and_its_own),
        cmocka_unit_test(the_check_finds_a_wrong_order),
        cmocka_unit_test(the_trial_passes_every_tier_and_refuses_another_order),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
