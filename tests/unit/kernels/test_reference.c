/* The reference itself, against plain computations in double; accuracy of exp and log; packing;
 * selection. */
#include "kernels/check/inputs.h"

#include "base/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static unsigned saved_fp_mode;
static const hr_kernels *ref;
static void *scratch;

static int set_up(void **state) {
    (void)state;
    saved_fp_mode = hr_fp_enter();
    ref = hr_kernels_tier(0);
    scratch = bytes_of(HR_SCRATCH_BYTES);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    free(scratch);
    hr_fp_restore(saved_fp_mode);
    return 0;
}

#define FOR_EACH_COMPUTE(c) for (hr_compute c = 0; c < HR_COMPUTE_COUNT; c++)

/* Half a unit of the last place that a compute element keeps. */
static double rounding_of(hr_compute c) {
    return c == HR_COMPUTE_BF16 ? 1.0 / 256 : 1.0 / (1 << 23);
}

static void expect_near(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("got %.9g, want %.9g within %.3g", got, want, tolerance);
}

/* Distance in units in the last place of the float nearest to want. */
static double ulps(float got, double want) {
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1.0, exponent - 24);
}

static void gemm_is_a_matrix_product(void **state) {
    (void)state;
    enum { M = 5, N = 40, K = 200, PADDED = 224, LDY = 48 };
    FOR_EACH_COMPUTE(c) {
        rng r = {1};
        size_t element = hr_compute_bytes(c);
        char *x = bytes_of(M * PADDED * 4), *rows = random_elements(&r, INPUT_NORMAL, c, M * K);
        for (size_t i = 0; i < M; i++)
            memcpy(x + i * PADDED * element, rows + i * K * element, K * element);
        void *w = random_elements(&r, INPUT_NORMAL, c, N * K),
             *packed = bytes_of(hr_packed_bytes(c, N, K));
        float *y = random_floats(&r, INPUT_NORMAL, M * LDY), *y0 = bytes_of(M * LDY * 4);
        memcpy(y0, y, M * LDY * 4);
        pack(c, w, N, K, packed);
        ref->gemm[c](&(hr_gemm_args){.x = x,
                                     .ldx = PADDED,
                                     .m = M,
                                     .k = PADDED,
                                     .w = packed,
                                     .panel_begin = 0,
                                     .panel_end = LDY / HR_PANEL,
                                     .y = y,
                                     .ldy = LDY,
                                     .accumulate = true,
                                     .scratch = scratch});
        for (int i = 0; i < M; i++)
            for (int n = 0; n < N; n++) {
                double want = (double)y0[i * LDY + n], size = 1;
                for (int k = 0; k < K; k++) {
                    double product = (double)element_at(c, rows, (size_t)(i * K + k)) *
                                     (double)element_at(c, w, (size_t)(n * K + k));
                    want += product;
                    size += fabs(product);
                }
                expect_near((double)y[i * LDY + n], want, size * 1e-6);
            }
        free(x);
        free(rows);
        free(w);
        free(packed);
        free(y);
        free(y0);
    }
}

/* A leaf whose terms can only come out as they do in the order that is written down. */
static void a_leaf_sums_even_and_odd_inputs_apart(void **state) {
    (void)state;
    float x[HR_LEAF] = {0}, w[HR_LEAF] = {0}, y[HR_PANEL] = {0};
    for (int i = 0; i < HR_LEAF; i++)
        x[i] = 1.0f;
    w[0] = 0x1p24f; /* swallows a 1 that is added to it alone, but not the sum of the odd ones */
    w[1] = 1.0f;
    w[2] = 1.0f;
    w[3] = 1.0f;
    float packed[HR_LEAF * HR_PANEL];
    hr_pack_weight_f32(w, 1, HR_LEAF, 0, 1, packed);
    ref->gemm[HR_COMPUTE_F32](&(hr_gemm_args){.x = x,
                                              .ldx = HR_LEAF,
                                              .m = 1,
                                              .k = HR_LEAF,
                                              .w = packed,
                                              .panel_begin = 0,
                                              .panel_end = 1,
                                              .y = y,
                                              .ldy = HR_PANEL,
                                              .scratch = scratch});
    assert_true(y[0] == 0x1p24f + 2.0f);
}

static void lora_adds_the_scaled_low_rank_product(void **state) {
    (void)state;
    enum { M = 3, N = 32, RANK = 20, LEAVES = 2 };
    FOR_EACH_COMPUTE(c) {
        rng r = {2};
        float *h = random_floats(&r, INPUT_NORMAL, M * LEAVES * HR_LORA_LEAF);
        void *b = random_elements(&r, INPUT_NORMAL, c, N * RANK);
        void *packed = bytes_of(hr_pack_lora_b_bytes(c, N, RANK)),
             *split = bytes_of(M * LEAVES * 32 * 4);
        float *y = bytes_of(M * N * 4);
        size_t ldh = LEAVES * (c == HR_COMPUTE_BF16 ? HR_LEAF : HR_LORA_LEAF);
        if (c == HR_COMPUTE_BF16)
            hr_pack_lora_b_bf16(b, N, RANK, packed);
        else
            hr_pack_lora_b_f32(b, N, RANK, packed);
        ref->lora_split[c](h, LEAVES * HR_LORA_LEAF, M, LEAVES, 2.5f, split, ldh);
        ref->lora_expand[c](&(hr_lora_expand_args){.h = split,
                                                   .ldh = ldh,
                                                   .m = M,
                                                   .n_leaves = LEAVES,
                                                   .b = packed,
                                                   .panel_begin = 0,
                                                   .panel_end = N / HR_PANEL,
                                                   .y = y,
                                                   .ldy = N,
                                                   .scratch = scratch});
        for (size_t i = 0; i < M; i++)
            for (size_t n = 0; n < N; n++) {
                double want = 0, size = 0;
                for (size_t k = 0; k < RANK; k++) {
                    double product = 2.5 * (double)h[i * LEAVES * HR_LORA_LEAF + k] *
                                     (double)element_at(c, b, n * RANK + k);
                    want += product;
                    size += fabs(product);
                }
                /* hi + lo keep 16 bits and more of h. */
                expect_near((double)y[i * N + n], want,
                            size * (c == HR_COMPUTE_BF16 ? 0x1p-16 : 1e-6));
            }
        free(h);
        free(b);
        free(packed);
        free(split);
        free(y);
    }
}

/* Softmax attention of one head as one reads it in a book. */
static void plain_attention(const float *q, float *const *k, float *const *v, uint32_t n,
                            uint32_t dim, double scale, double *out) {
    double *p = bytes_of(n * sizeof *p), max = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n; j++) {
        p[j] = 0;
        for (uint32_t d = 0; d < dim; d++)
            p[j] += (double)q[d] * (double)k[j][d] * scale;
        max = fmax(max, p[j]);
    }
    for (uint32_t j = 0; j < n; j++)
        sum += p[j] = exp(p[j] - max);
    for (uint32_t d = 0; d < dim; d++) {
        out[d] = 0;
        for (uint32_t j = 0; j < n; j++)
            out[d] += p[j] / sum * (double)v[j][d];
    }
    free(p);
}

static void attention_is_softmax_attention(void **state) {
    (void)state;
    enum { DIM = 20, PADDED = 32, N = 1100, HEADS = 2 };
    const uint32_t rows[] = {0, 1, 31, 32, 511, 512, 1099};
    FOR_EACH_COMPUTE(c) {
        rng r = {3};
        size_t stride = hr_kv_slot_bytes(c, DIM);
        char *kv = bytes_of(stride * (N / HR_KV_PAGE_TOKENS + 2));
        uint32_t pages[N / HR_KV_PAGE_TOKENS + 1];
        float *k[N], *v[N], q[HEADS][PADDED] = {0};
        double want[DIM];
        for (uint32_t i = 0; i < sizeof pages / sizeof pages[0]; i++)
            pages[i] = i ^ 1;
        for (uint32_t j = 0; j < N; j++) {
            k[j] = random_floats(&r, INPUT_NORMAL, DIM);
            v[j] = random_floats(&r, INPUT_NORMAL, DIM);
            if (c ==
                HR_COMPUTE_BF16) /* values that bf16 holds, so that only the arithmetic is judged */
                for (int d = 0; d < DIM; d++) {
                    k[j][d] = float_of_bits(float_bits(k[j][d]) & 0xffff0000u);
                    v[j][d] = float_of_bits(float_bits(v[j][d]) & 0xffff0000u);
                }
            ref->kv_store[c](k[j], v[j], DIM, j % HR_KV_PAGE_TOKENS,
                             kv + pages[j / HR_KV_PAGE_TOKENS] * stride);
        }
        char elements[HEADS * PADDED * 4], out[HEADS * DIM * 4];
        for (int h = 0; h < HEADS; h++) {
            float *x = random_floats(&r, INPUT_NORMAL, DIM);
            for (int d = 0; d < DIM; d++)
                q[h][d] = float_of_bits(float_bits(x[d]) & 0xffff0000u);
            free(x);
        }
        ref->store[c](&q[0][0], HEADS * PADDED, HEADS * PADDED, elements);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            ref->attention[c](&(hr_attention_args){.q = elements,
                                                   .ldq = HEADS * PADDED,
                                                   .head_stride = PADDED,
                                                   .n_rows = 1,
                                                   .n_heads = HEADS,
                                                   .head_dim = DIM,
                                                   .first_pos = rows[i],
                                                   .kv = kv,
                                                   .page_stride = stride,
                                                   .pages = pages,
                                                   .scale = 2.0f,
                                                   .out = out,
                                                   .ldo = HEADS * DIM,
                                                   .out_head_stride = DIM,
                                                   .scratch = scratch});
            for (int h = 0; h < HEADS; h++) {
                plain_attention(q[h], k, v, rows[i] + 1, DIM, 2.0, want);
                for (int d = 0; d < DIM; d++)
                    expect_near((double)element_at(c, out, (size_t)(h * DIM + d)), want[d],
                                (1 + fabs(want[d])) * (c == HR_COMPUTE_BF16 ? 1 : 8) *
                                    rounding_of(c));
            }
        }
        for (uint32_t j = 0; j < N; j++) {
            free(k[j]);
            free(v[j]);
        }
        free(kv);
    }
}

static void norm_rope_and_silu_are_what_their_names_say(void **state) {
    (void)state;
    enum { N = 70, HALF = N / 2 };
    rng r = {4};
    float *x = random_floats(&r, INPUT_NORMAL, N), *w = random_floats(&r, INPUT_NORMAL, N);
    float turned[N], cosines[HALF], sines[HALF];
    double squares = 0;
    for (int i = 0; i < N; i++)
        squares += (double)x[i] * (double)x[i];
    FOR_EACH_COMPUTE(c) {
        char out[N * 4];
        ref->rmsnorm[c](x, w, N, N, 1e-5f, out);
        for (int i = 0; i < N; i++) {
            double want = (double)x[i] / sqrt(squares / N + 1e-5) * (double)w[i];
            expect_near((double)element_at(c, out, (size_t)i), want,
                        fabs(want) * rounding_of(c) + 1e-30);
        }
        ref->silu_mul[c](x, w, N, N, out);
        for (int i = 0; i < N; i++) {
            double want = (double)x[i] / (1 + exp(-(double)x[i])) * (double)w[i];
            expect_near((double)element_at(c, out, (size_t)i), want,
                        fabs(want) * 3 * rounding_of(c));
        }
    }
    memcpy(turned, x, sizeof turned);
    for (int i = 0; i < HALF; i++) {
        cosines[i] = cosf((float)i);
        sines[i] = sinf((float)i);
    }
    ref->rope(turned, cosines, sines, N);
    for (int i = 0; i < HALF; i++) {
        expect_near((double)turned[i],
                    (double)x[i] * (double)cosines[i] - (double)x[HALF + i] * (double)sines[i],
                    1e-6);
        expect_near((double)turned[HALF + i],
                    (double)x[HALF + i] * (double)cosines[i] + (double)x[i] * (double)sines[i],
                    1e-6);
    }
    free(x);
    free(w);
}

static void exp_and_log_are_within_one_unit_in_the_last_place(void **state) {
    (void)state;
    double worst_exp = 0, worst_log = 0;
    for (uint32_t bits = 0x20000000u; bits < 0x42b17000u; bits += 2741) /* up to 88.7 */
        for (int negative = 0; negative <= 1; negative++) {
            float x = float_of_bits(bits | (uint32_t)negative << 31), y;
            if (x < -87.0f || x > 88.7f)
                continue;
            ref->exp_sub(&x, 0.0f, 1, &y);
            worst_exp = fmax(worst_exp, ulps(y, exp((double)x)));
        }
    /* log is seen through lse: equal values give the log of their number; a pair gives log(1 +
     * e^-d). */
    for (uint32_t n = 2; n < 3000; n++) {
        static float same[3000];
        hr_lse got = ref->lse(same, n);
        worst_log = fmax(worst_log, ulps(got.log_sum, log((double)n)));
    }
    for (float d = 0.01f; d < 16.0f; d += 0.003f) {
        float pair[] = {0.0f, -d}, e;
        ref->exp_sub(&pair[1], 0.0f, 1, &e);
        worst_log = fmax(worst_log, ulps(ref->lse(pair, 2).log_sum, log((double)(1.0f + e))));
    }
    print_message("exp: %.3f ulp, log: %.3f ulp\n", worst_exp, worst_log);
    assert_true(worst_exp <= 1.0);
    assert_true(worst_log <= 1.0);
}

static void exp_and_log_meet_their_special_values(void **state) {
    (void)state;
    const float x[] = {0.0f, -0.0f, -INFINITY, INFINITY, NAN, -87.01f, 88.71f, 1e-40f};
    float y[8];
    ref->exp_sub(x, 0.0f, 8, y);
    assert_int_equal(float_bits(y[0]), 0x3f800000u);
    assert_int_equal(float_bits(y[1]), 0x3f800000u);
    assert_int_equal(float_bits(y[2]), 0);
    assert_true(y[3] == INFINITY);
    assert_true(isnan(y[4]));
    assert_int_equal(float_bits(y[5]), 0);
    assert_true(y[6] == INFINITY);
    assert_int_equal(float_bits(y[7]), 0x3f800000u);
    float one = 3.0f;
    hr_lse got = ref->lse(&one, 1);
    assert_true(got.max == 3.0f);
    assert_int_equal(float_bits(got.log_sum), 0);
}

static void lse_is_log_of_the_sum_of_exponentials(void **state) {
    (void)state;
    const uint32_t lengths[] = {1, 17, 512, 513, 1500};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        rng r = {i};
        float *x = random_floats(&r, INPUT_NORMAL, lengths[i]);
        double sum = 0;
        for (uint32_t j = 0; j < lengths[i]; j++) {
            x[j] *= 8;
            sum += exp((double)x[j]);
        }
        hr_lse got = ref->lse(x, lengths[i]);
        expect_near((double)got.max + (double)got.log_sum, log(sum), 1e-5);
        free(x);
    }
    /* A block of ids that are all ruled out changes nothing. */
    static float x[1024];
    for (int j = 0; j < 512; j++)
        x[j] = -INFINITY;
    hr_lse got = ref->lse(x, 1024);
    assert_true(got.max == 0.0f);
    expect_near((double)got.log_sum, log(512), 1e-5);
}

static const float *sorted_values;

static int by_value_then_index(const void *a, const void *b) {
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    if (sorted_values[i] != sorted_values[j])
        return sorted_values[i] > sorted_values[j] ? -1 : 1;
    return i < j ? -1 : i > j;
}

static void top_k_is_the_head_of_a_sort(void **state) {
    (void)state;
    enum { N = 3000 };
    rng r = {5};
    static float x[N], values[N];
    static uint32_t order[N], ids[N];
    for (uint32_t i = 0; i < N; i++) {
        x[i] = (float)(int)rng_below(&r, 200) - 100; /* many ties */
        order[i] = i;
    }
    sorted_values = x;
    qsort(order, N, sizeof order[0], by_value_then_index);
    const uint32_t ks[] = {0, 1, 2, 5, 50, N - 1, N};
    for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) {
        ref->top_k(x, N, ks[i], ids, values, scratch);
        assert_memory_equal(ids, order, ks[i] * sizeof ids[0]);
        for (uint32_t j = 0; j < ks[i]; j++)
            assert_true(values[j] == x[order[j]]);
    }
    const float odd[] = {NAN, -INFINITY, -0.0f, 0.0f, 1e-40f, INFINITY};
    const uint32_t want[] = {5, 2, 3, 4, 0, 1};
    ref->top_k(odd, 6, 6, ids, values, scratch);
    assert_memory_equal(ids, want, sizeof want);
}

static void bf16_rounds_to_nearest_even_and_flushes_denormals(void **state) {
    (void)state;
    const struct {
        uint32_t in;
        uint16_t out;
    } cases[] = {
        {0x3f808000u, 0x3f80}, /* a tie goes to even */
        {0x3f818000u, 0x3f82}, {0x3f808001u, 0x3f81}, {0x3f807fffu, 0x3f80},
        {0x7f7fffffu, 0x7f80}, /* too large: infinity */
        {0x7f800000u, 0x7f80}, {0xff800000u, 0xff80}, {0x00000001u, 0x0000},
        {0x807fffffu, 0x8000}, {0x00800000u, 0x0080}, {0x80000000u, 0x8000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float x = float_of_bits(cases[i].in);
        uint16_t got = 0;
        ref->store[HR_COMPUTE_BF16](&x, 1, 1, &got);
        assert_int_equal(got, cases[i].out);
    }
    float nan = float_of_bits(0x7f800001u);
    uint16_t got = 0;
    ref->store[HR_COMPUTE_BF16](&nan, 1, 1, &got);
    assert_true((got & 0x7fffu) > 0x7f80u);
}

static void packing_rows_in_parts_is_packing_them_at_once(void **state) {
    (void)state;
    enum { N = 70, K = 45 };
    FOR_EACH_COMPUTE(c) {
        rng r = {6};
        char *src = random_elements(&r, INPUT_ANY, c, N * K);
        size_t bytes = hr_packed_bytes(c, N, K);
        char *whole = bytes_of(bytes), *parts = bytes_of(bytes);
        memset(whole, 0xff, bytes);
        memset(parts, 0xff, bytes);
        pack(c, src, N, K, whole);
        if (c == HR_COMPUTE_BF16) {
            hr_pack_weight_bf16((uint16_t *)src, N, K, 48, N, parts);
            hr_pack_weight_bf16((uint16_t *)src, N, K, 0, 48, parts);
        } else {
            hr_pack_weight_f32((float *)src, N, K, 48, N, parts);
            hr_pack_weight_f32((float *)src, N, K, 0, 48, parts);
        }
        assert_memory_equal(whole, parts, bytes);
        free(src);
        free(whole);
        free(parts);
    }
}

static void a_tier_is_chosen_by_name_or_speed(void **state) {
    (void)state;
    const hr_kernels *k = NULL, *fastest = NULL;
    char note[200] = "x";
    hr_error err;
    for (size_t i = 0; hr_kernels_tier(i) != NULL; i++) {
        fastest = hr_kernels_tier(i);
        assert_int_equal(hr_kernels_select(fastest->name, &k, note, sizeof note, &err), HR_OK);
        assert_ptr_equal(k, fastest);
        assert_string_equal(note, "");
        for (size_t j = 0; j < i; j++) { /* no tier stands in for another where it matters most */
            assert_true(hr_kernels_tier(j)->gemm[HR_COMPUTE_BF16] != k->gemm[HR_COMPUTE_BF16]);
            assert_string_not_equal(hr_kernels_tier(j)->name, k->name);
        }
    }
    assert_int_equal(hr_kernels_select(NULL, &k, note, sizeof note, &err), HR_OK);
    assert_ptr_equal(k, fastest);
    assert_int_equal(hr_kernels_select("", &k, NULL, 0, &err), HR_OK);
    assert_ptr_equal(k, fastest);
    assert_int_equal(hr_kernels_select("sse9", &k, note, sizeof note, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "sse9"));
    assert_ptr_equal(k, fastest);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gemm_is_a_matrix_product),
        cmocka_unit_test(a_leaf_sums_even_and_odd_inputs_apart),
        cmocka_unit_test(lora_adds_the_scaled_low_rank_product),
        cmocka_unit_test(attention_is_softmax_attention),
        cmocka_unit_test(norm_rope_and_silu_are_what_their_names_say),
        cmocka_unit_test(exp_and_log_are_within_one_unit_in_the_last_place),
        cmocka_unit_test(exp_and_log_meet_their_special_values),
        cmocka_unit_test(lse_is_log_of_the_sum_of_exponentials),
        cmocka_unit_test(top_k_is_the_head_of_a_sort),
        cmocka_unit_test(bf16_rounds_to_nearest_even_and_flushes_denormals),
        cmocka_unit_test(packing_rows_in_parts_is_packing_them_at_once),
        cmocka_unit_test(a_tier_is_chosen_by_name_or_speed),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
