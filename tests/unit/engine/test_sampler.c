/* The sampler against reference distributions written here in double with libm, and its promises:
 * ties, masks, penalties, the same draw whatever the batch, the logprob rule.
 *
 * Draws are counted over N_DRAWS positions of one fixed seed and compared by chi-square over the
 * ids the reference keeps (those expected at least 5 times; the rest in one bin); ids it drops must
 * never be drawn. The bound is the mean plus five standard deviations of chi-square: df + 5 sqrt(2
 * df). The seeds are fixed, so the test either always passes or always fails. */
#include "base/pool.h"
#include "engine/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_VOCAB = 3000, N_DRAWS = 30000 };

static const hr_kernels *kernels;
static void *scratch;
static uint32_t space_ids[2][MAX_VOCAB];
static float space_values[2][MAX_VOCAB];
static const hr_sampler_space space = {space_ids[0], space_values[0], space_ids[1],
                                       space_values[1]};
static const hr_logprob_wish only_token = {.any = true}, nothing = {0};

static hr_sampler plain(void) {
    return (hr_sampler){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 42};
}

/* Normal-looking logits in about [-spread, spread]. */
static void make_logits(uint64_t seed, uint32_t n, float spread, float *x) {
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0;
        for (uint64_t j = 0; j < 4; j++)
            sum += hr_sampler_uniform(seed, i * 4 + j) - 0.5;
        x[i] = (float)(sum * spread);
    }
}

static hr_row_result draw(const hr_sampler *s, const float *logits, uint32_t n, uint64_t position,
                          bool masked, const hr_logprob_wish *wish) {
    float x[MAX_VOCAB];
    memcpy(x, logits, n * sizeof *x);
    hr_row_result result = {0};
    hr_sampler_draw(kernels, s, x, n, position, masked, wish, &result, &space, scratch);
    return result;
}

/* ---- the reference ---- */

typedef struct ranked {
    double x;
    uint32_t id;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *l = a, *r = b;
    if (l->x != r->x)
        return l->x > r->x ? -1 : 1;
    return l->id < r->id ? -1 : l->id > r->id;
}

/* x / T, softmax, then top_k, top_p and min_p on those probabilities, then renormalised. */
static void reference(const hr_sampler *s, const float *logits, uint32_t n, double *p) {
    static ranked order[MAX_VOCAB];
    double total = 0, kept = 0, before = 0;
    for (uint32_t i = 0; i < n; i++)
        order[i] = (ranked){logits[i] / (double)s->temperature, i};
    qsort(order, n, sizeof *order, by_rank);
    for (uint32_t i = 0; i < n; i++)
        total += exp(order[i].x - order[0].x);
    for (uint32_t i = 0; i < n; i++) {
        double mine = exp(order[i].x - order[0].x) / total;
        bool keep =
            (s->top_k == 0 || i < s->top_k) && before <= s->top_p && mine >= s->min_p / total;
        p[order[i].id] = keep ? mine : 0;
        kept += p[order[i].id];
        before += mine;
    }
    for (uint32_t i = 0; i < n; i++)
        p[i] /= kept;
}

static void assert_distribution(const hr_sampler *s, const float *logits, uint32_t n) {
    static double p[MAX_VOCAB];
    static uint32_t seen[MAX_VOCAB];
    memset(seen, 0, sizeof seen);
    reference(s, logits, n, p);
    for (uint64_t i = 0; i < N_DRAWS; i++) {
        uint32_t token = draw(s, logits, n, i, false, &nothing).token;
        assert_true(token < n && p[token] > 0);
        seen[token]++;
    }
    double chi = 0, rest_expected = 0, rest_seen = 0;
    int bins = 0;
    for (uint32_t i = 0; i < n; i++) {
        double expected = p[i] * N_DRAWS;
        if (expected < 5) {
            rest_expected += expected;
            rest_seen += seen[i];
            continue;
        }
        chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        bins++;
    }
    if (rest_expected >= 5) {
        chi += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        bins++;
    }
    int df = bins > 1 ? bins - 1 : 1;
    if (!(chi <= df + 5 * sqrt(2.0 * df)))
        fail_msg("chi-square %.1f with %d degrees of freedom", chi, df);
}

static void every_filter_draws_from_its_distribution(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    make_logits(1, 60, 8, logits);
    hr_sampler s = plain();
    assert_distribution(&s, logits, 60);
    s.temperature = 0.5f;
    assert_distribution(&s, logits, 60);
    s.temperature = 2;
    assert_distribution(&s, logits, 60);
    s = plain();
    s.top_k = 5;
    assert_distribution(&s, logits, 60);
    s = plain();
    s.top_p = 0.7f;
    assert_distribution(&s, logits, 60);
    s = plain();
    s.min_p = 0.1f;
    assert_distribution(&s, logits, 60);
    s.top_k = 20;
    s.top_p = 0.9f;
    s.temperature = 1.5f;
    assert_distribution(&s, logits, 60);
}

static void a_flat_distribution_over_many_blocks_is_drawn_right(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    make_logits(2, 2100, 1, logits);
    hr_sampler s = plain();
    assert_distribution(&s, logits, 2100);
    s.top_p = 0.8f;
    assert_distribution(&s, logits, 2100);
    s.top_k = 1500;
    assert_distribution(&s, logits, 2100);
}

/* Every id in one bin, and ids so far below the best that they share the last bin. */
static void top_p_cuts_right_where_its_bins_are_crowded(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    for (uint32_t i = 0; i < 1000; i++)
        logits[i] = (float)(i % 10) * 1e-4f;
    hr_sampler s = plain();
    s.top_p = 0.05f;
    assert_distribution(&s, logits, 1000);
    for (uint32_t i = 0; i < 1000; i++)
        logits[i] = i == 500 ? 0 : -100 - (float)i;
    s.top_p = 0.999f;
    assert_distribution(&s, logits, 1000);
    for (uint32_t i = 0; i < 1000; i++)
        logits[i] = -(float)i / 16;
    assert_distribution(&s, logits, 1000);
}

static void a_broken_sampler_would_be_seen(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    static double p[MAX_VOCAB];
    make_logits(1, 60, 8, logits);
    hr_sampler s = plain(), colder = plain();
    colder.temperature = 0.9f;
    reference(&colder, logits, 60, p);
    double chi = 0;
    uint32_t seen[60] = {0};
    for (uint64_t i = 0; i < N_DRAWS; i++)
        seen[draw(&s, logits, 60, i, false, &nothing).token]++;
    for (uint32_t i = 0; i < 60; i++)
        if (p[i] * N_DRAWS >= 5)
            chi += (seen[i] - p[i] * N_DRAWS) * (seen[i] - p[i] * N_DRAWS) / (p[i] * N_DRAWS);
    assert_true(chi > 60 + 5 * sqrt(2 * 60.0)); /* a tenth of temperature is far over the bound */
}

/* ---- ties and edges ---- */

static void ties_go_to_the_lowest_id(void **state) {
    (void)state;
    float flat[600];
    for (int i = 0; i < 600; i++)
        flat[i] = i == 7 || i == 300 || i == 599 ? 2.0f : 1.0f;
    hr_sampler s = plain();
    s.greedy = true;
    assert_int_equal(draw(&s, flat, 600, 0, false, &nothing).token, 7);
    s = plain();
    s.top_k = 2;
    for (uint64_t i = 0; i < 200; i++) {
        uint32_t token = draw(&s, flat, 600, i, false, &nothing).token;
        assert_true(token == 7 || token == 300);
    }
    s.top_k = 5;
    for (uint64_t i = 0; i < 200; i++) {
        uint32_t token = draw(&s, flat, 600, i, false, &nothing).token;
        assert_true(token == 7 || token == 300 || token == 599 || token == 0 || token == 1);
    }
}

static void the_narrowest_filters_leave_the_best_id(void **state) {
    (void)state;
    float logits[200];
    make_logits(3, 200, 4, logits);
    hr_sampler greedy = plain(), s = plain();
    greedy.greedy = true;
    uint32_t best = draw(&greedy, logits, 200, 0, false, &nothing).token;
    for (uint64_t i = 0; i < 100; i++) {
        s = plain();
        s.top_k = 1;
        assert_int_equal(draw(&s, logits, 200, i, false, &nothing).token, best);
        s = plain();
        s.top_p = 1e-6f;
        assert_int_equal(draw(&s, logits, 200, i, false, &nothing).token, best);
        s = plain();
        s.min_p = 1;
        assert_int_equal(draw(&s, logits, 200, i, false, &nothing).token, best);
        s = plain();
        s.temperature = 1e-5f;
        assert_int_equal(draw(&s, logits, 200, i, false, &nothing).token, best);
    }
}

static void uniform_is_even_and_below_one(void **state) {
    (void)state;
    uint32_t bins[16] = {0};
    for (uint64_t i = 0; i < 16000; i++) {
        double u = hr_sampler_uniform(i / 100, i % 100);
        assert_true(u >= 0 && u < 1);
        bins[(int)(u * 16)]++;
    }
    double chi = 0;
    for (int i = 0; i < 16; i++)
        chi += (bins[i] - 1000.0) * (bins[i] - 1000.0) / 1000;
    assert_true(chi < 15 + 5 * sqrt(30.0));
    assert_true(hr_sampler_uniform(1, 2) != hr_sampler_uniform(2, 1));
}

static void other_seeds_and_positions_draw_other_tokens(void **state) {
    (void)state;
    float logits[100] = {0};
    hr_sampler a = plain(), b = plain();
    b.seed = 43;
    int same_seed = 0, same_position = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same_seed += draw(&a, logits, 100, i, false, &nothing).token ==
                     draw(&b, logits, 100, i, false, &nothing).token;
        same_position += draw(&a, logits, 100, i, false, &nothing).token ==
                         draw(&a, logits, 100, i + 1, false, &nothing).token;
        assert_int_equal(draw(&a, logits, 100, i, false, &nothing).token,
                         draw(&a, logits, 100, i, false, &nothing).token);
    }
    assert_true(same_seed < 40 && same_position < 40); /* 10 are expected */
}

/* ---- the logprob rule ---- */

static double reference_logprob(const float *x, uint32_t n, uint32_t token, double temperature) {
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, x[i] / temperature);
    for (uint32_t i = 0; i < n; i++)
        sum += exp(x[i] / temperature - max);
    return x[token] / temperature - max - log(sum);
}

static void logprobs_are_those_before_the_filters(void **state) {
    (void)state;
    float logits[300];
    make_logits(4, 300, 8, logits);
    hr_sampler s = plain();
    s.top_k = 3;
    s.top_p = 0.5f;
    s.min_p = 0.2f;
    const float temperatures[] = {0.5f, 1, 2};
    for (int t = 0; t < 3; t++) {
        s.temperature = temperatures[t];
        for (uint64_t i = 0; i < 20; i++) {
            hr_row_result r = draw(&s, logits, 300, i, false, &only_token);
            assert_true(fabs(r.logprob - reference_logprob(logits, 300, r.token, s.temperature)) <
                        2e-6);
        }
    }
    s.greedy = true; /* then T is 1, whatever it says */
    hr_row_result r = draw(&s, logits, 300, 0, false, &only_token);
    assert_true(fabs(r.logprob - reference_logprob(logits, 300, r.token, 1)) < 2e-6);
}

static void a_drawn_token_scores_the_same_bits(void **state) {
    (void)state;
    float logits[300];
    hr_sampler s = plain();
    s.top_k = 40;
    for (uint64_t i = 0; i < 50; i++) {
        make_logits(i, 300, 8, logits);
        s.greedy = i & 1;
        hr_row_result drawn = draw(&s, logits, 300, i, false, &only_token), scored = {0};
        hr_sampler_score(kernels, logits, 300, drawn.token, &only_token, &scored, scratch);
        assert_memory_equal(&drawn.logprob, &scored.logprob, sizeof(float));
    }
}

static void top_and_asked_logprobs_are_in_order(void **state) {
    (void)state;
    float logits[300], top[4], asked[3];
    uint32_t top_ids[4];
    const uint32_t ids[] = {299, 0, 299};
    make_logits(5, 300, 8, logits);
    logits[10] = logits[200] = 20; /* a tie at the top */
    hr_logprob_wish wish = {true, 4, ids, 3};
    hr_row_result r = {.top_ids = top_ids, .top_logprobs = top, .ids_logprobs = asked};
    hr_sampler_score(kernels, logits, 300, 5, &wish, &r, scratch);
    assert_int_equal(top_ids[0], 10);
    assert_int_equal(top_ids[1], 200);
    assert_true(top[0] == top[1] && top[1] > top[2] && top[2] >= top[3]);
    for (int i = 0; i < 4; i++)
        assert_true(fabs(top[i] - reference_logprob(logits, 300, top_ids[i], 1)) < 2e-6);
    for (int i = 0; i < 3; i++)
        assert_true(fabs(asked[i] - reference_logprob(logits, 300, ids[i], 1)) < 4e-6);
    assert_true(asked[0] == asked[2]);
}

/* ---- penalties, bias, masks ---- */

static void penalties_apply_in_the_written_order(void **state) {
    (void)state;
    float logits[8] = {2, 2, -2, -2, 1, 0, 0, 0}, expected[8];
    uint32_t counts[8] = {
        3, HR_SAMPLER_IN_PROMPT, 1, HR_SAMPLER_IN_PROMPT, HR_SAMPLER_IN_PROMPT | 2, 0, 0, 0};
    const uint32_t bias_ids[] = {5, 0, 5};
    const float bias[] = {1, 0.5f, 2};
    hr_sampler s = plain();
    s.frequency_penalty = 0.25f;
    s.presence_penalty = 0.5f;
    s.repetition_penalty = 2;
    s.counts = counts;
    s.bias_ids = bias_ids;
    s.bias = bias;
    s.n_bias = 3;
    expected[0] = (2 - 0.75f - 0.5f) / 2 + 0.5f;
    expected[1] = 2 / 2.0f;
    expected[2] = (-2 - 0.25f - 0.5f) * 2;
    expected[3] = -2 * 2;
    expected[4] = (1 - 0.5f - 0.5f) * 2;
    expected[5] = 3;
    expected[6] = expected[7] = 0;
    float x[8];
    memcpy(x, logits, sizeof x);
    hr_row_result r = {0};
    hr_sampler_draw(kernels, &s, x, 8, 0, false, &only_token, &r, &space, scratch);
    for (int i = 0; i < 8; i++)
        assert_true(x[i] == expected[i]);
    assert_true(fabs(r.logprob - reference_logprob(expected, 8, r.token, 1)) < 2e-6);
}

static void masked_ids_are_never_drawn(void **state) {
    (void)state;
    float logits[40] = {0};
    logits[3] = 50;
    logits[8] = 40;
    const uint32_t stop_ids[] = {3, 8};
    hr_sampler s = plain();
    s.stop_ids = stop_ids;
    s.n_stop_ids = 2;
    for (uint64_t i = 0; i < 500; i++) {
        hr_row_result r = draw(&s, logits, 40, i, true, &only_token);
        assert_true(r.token != 3 && r.token != 8);
        assert_true(fabs(r.logprob + log(38)) < 1e-5);
    }
    assert_int_equal(draw(&s, logits, 40, 0, false, &nothing).token, 3);
    s.greedy = true;
    assert_int_equal(draw(&s, logits, 40, 0, true, &nothing).token, 0);
}

/* ---- bad logits ---- */

static void logits_that_are_not_finite_are_reported(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < 3; b++)
        for (uint32_t at = 0; at < 20; at += 19) {
            float logits[20] = {0};
            logits[at] = bad[b];
            hr_sampler s = plain();
            assert_false(draw(&s, logits, 20, 0, false, &nothing).finite);
            s.greedy = true;
            assert_false(draw(&s, logits, 20, 0, false, &nothing).finite);
            hr_row_result r = {0};
            hr_sampler_score(kernels, logits, 20, 1, &nothing, &r, scratch);
            assert_false(r.finite);
            assert_false(r.overflowed);
        }
    float large[20] = {3e38f};
    hr_sampler s = plain();
    s.temperature = 0.01f; /* finite logits, but not after the division */
    hr_row_result overflowed = draw(&s, large, 20, 0, false, &nothing);
    assert_false(overflowed.finite);
    assert_true(overflowed.overflowed); /* the request's doing, not the weights' */
}

int main(void) {
    kernels = hr_kernels_tier(0);
    scratch = aligned_alloc(64, HR_SCRATCH_BYTES);
    unsigned saved = hr_fp_enter();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_filter_draws_from_its_distribution),
        cmocka_unit_test(a_flat_distribution_over_many_blocks_is_drawn_right),
        cmocka_unit_test(top_p_cuts_right_where_its_bins_are_crowded),
        cmocka_unit_test(a_broken_sampler_would_be_seen),
        cmocka_unit_test(ties_go_to_the_lowest_id),
        cmocka_unit_test(the_narrowest_filters_leave_the_best_id),
        cmocka_unit_test(uniform_is_even_and_below_one),
        cmocka_unit_test(other_seeds_and_positions_draw_other_tokens),
        cmocka_unit_test(logprobs_are_those_before_the_filters),
        cmocka_unit_test(a_drawn_token_scores_the_same_bits),
        cmocka_unit_test(top_and_asked_logprobs_are_in_order),
        cmocka_unit_test(penalties_apply_in_the_written_order),
        cmocka_unit_test(masked_ids_are_never_drawn),
        cmocka_unit_test(logits_that_are_not_finite_are_reported),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    hr_fp_restore(saved);
    free(scratch);
    return failed;
}
