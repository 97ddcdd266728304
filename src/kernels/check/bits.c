/* Every op of every tier against the reference: each kind of input, ragged sizes. */
#include "kernels/check/bits.h"

#include "kernels/check/inputs.h"

#include "base/pool.h"

#include <stdio.h>

typedef struct check {
    const hr_kernels *ref, *const *tiers;
    void *scratch;
    hr_bits_result *results;
    size_t n_results;
} check;

#define FOR_EACH_TIER(k)                                                                           \
    for (size_t tier_ = 0; ch->tiers[tier_] != NULL; tier_++)                                      \
        for (const hr_kernels *k = ch->tiers[tier_]; k != NULL; k = NULL)
#define FOR_EACH_KIND(kind) for (input_kind kind = 0; kind < INPUT_KINDS; kind++)
#define FOR_EACH_COMPUTE(c) for (hr_compute c = 0; c < HR_COMPUTE_COUNT; c++)

static hr_bits_result *result_of(check *ch, const hr_kernels *k, const char *what) {
    for (size_t i = 0; i < ch->n_results; i++)
        if (ch->results[i].tier == k && strcmp(ch->results[i].op, what) == 0)
            return &ch->results[i];
    if (ch->n_results == HR_BITS_RESULTS)
        abort();
    ch->results[ch->n_results] = (hr_bits_result){.tier = k, .op = what};
    return &ch->results[ch->n_results++];
}

static void expect_same(check *ch, const hr_kernels *k, hr_compute c, input_kind kind,
                        const void *got, const void *want, size_t n, const char *what) {
    hr_bits_result *r = result_of(ch, k, what);
    r->compared += n;
    size_t at = first_difference(c, got, want, n);
    if (at == n)
        return;
    if (r->different++ == 0)
        snprintf(r->first, sizeof r->first, "%s, %s: element %zu is %a, the reference gives %a",
                 c == HR_COMPUTE_BF16 ? "bf16" : "f32", INPUT_NAMES[kind], at,
                 (double)element_at(c, got, at), (double)element_at(c, want, at));
}

static void expect_same_floats(check *ch, const hr_kernels *k, input_kind kind, const float *got,
                               const float *want, size_t n, const char *what) {
    expect_same(ch, k, HR_COMPUTE_F32, kind, got, want, n, what);
}

/* The reference computes max_m rows once; each tier then any m of them, so a row's bits cannot
 * depend on m. */
static void check_gemm(check *ch, hr_compute c, input_kind kind, uint32_t max_m, uint32_t m_step,
                       uint32_t n, uint32_t k_inputs, bool accumulate, uint64_t seed) {
    rng r = {seed};
    uint32_t k_padded = (uint32_t)hr_round_up(k_inputs, HR_LEAF);
    size_t ldx = k_padded + 32, ldy = hr_round_up(n, HR_PANEL) + 3;
    char *x = random_elements(&r, kind, c, max_m * ldx);
    for (size_t row = 0; row < max_m; row++)
        memset(x + (row * ldx + k_inputs) * hr_compute_bytes(c), 0,
               (k_padded - k_inputs) * hr_compute_bytes(c));
    void *w_rows = random_elements(&r, kind, c, (size_t)n * k_inputs);
    void *w = bytes_of(hr_packed_bytes(c, n, k_inputs));
    float *y0 = random_floats(&r, kind, max_m * ldy);
    float *want = bytes_of(max_m * ldy * 4), *got = bytes_of(max_m * ldy * 4);
    pack(c, w_rows, n, k_inputs, w);
    memcpy(want, y0, max_m * ldy * 4);
    uint32_t panels = (uint32_t)hr_round_up(n, HR_PANEL) / HR_PANEL;
    hr_gemm_args a = {.x = x,
                      .ldx = ldx,
                      .m = max_m,
                      .k = k_padded,
                      .w = w,
                      .panel_begin = 0,
                      .panel_end = panels,
                      .y = want,
                      .ldy = ldy,
                      .accumulate = accumulate,
                      .scratch = ch->scratch};
    ch->ref->gemm[c](&a);
    FOR_EACH_TIER(k)
    for (uint32_t m = 1; m <= max_m; m += m_step) {
        memcpy(got, y0, max_m * ldy * 4);
        a.y = got;
        a.m = m;
        /* Two workers' shares; the cut must not show. */
        a.panel_begin = 0;
        a.panel_end = panels / 2;
        k->gemm[c](&a);
        a.panel_begin = panels / 2;
        a.panel_end = panels;
        k->gemm[c](&a);
        expect_same_floats(ch, k, kind, got, want, m * ldy, "gemm");
        expect_same_floats(ch, k, kind, got + m * ldy, y0 + m * ldy, (max_m - m) * ldy,
                           "rows past m");
    }
    free(x);
    free(w_rows);
    free(w);
    free(y0);
    free(want);
    free(got);
}

static void gemm_matches_for_every_number_of_rows(check *ch) {
    FOR_EACH_COMPUTE(c) FOR_EACH_KIND(kind) {
        check_gemm(ch, c, kind, 70, 1, 80, 96, false, 1 + kind);
        check_gemm(ch, c, kind, 70, 1, 48, 32, true, 11 + kind);
    }
}

static void gemm_matches_across_blocks_of_inputs_and_rows(check *ch) {
    FOR_EACH_COMPUTE(c) {
        check_gemm(ch, c, INPUT_NORMAL, 9, 1, 20, 1, false, 19);
        check_gemm(ch, c, INPUT_WIDE, 9, 1, 20, 33, true, 20);
        check_gemm(ch, c, INPUT_NORMAL, 9, 1, 48, 1070, false, 18);
        check_gemm(ch, c, INPUT_NORMAL, 3, 1, 33, 576, false, 21);
        check_gemm(ch, c, INPUT_NORMAL, 7, 3, 48, 1056, true, 22);
        check_gemm(ch, c, INPUT_WIDE, 7, 2, 16, 2080, false, 23);
        check_gemm(ch, c, INPUT_NORMAL, 200, 33, 48, 64, false, 24);
        check_gemm(ch, c, INPUT_DENORMAL, 5, 1, 160, 224, false, 25);
    }
}

static void check_lora(check *ch, hr_compute c, input_kind kind, uint32_t m, uint32_t n,
                       uint32_t rank, uint64_t seed) {
    rng r = {seed};
    uint32_t leaves = (rank + HR_LORA_LEAF - 1) / HR_LORA_LEAF;
    size_t ldh = leaves * HR_LORA_LEAF + 16, ldout = leaves * HR_LEAF,
           ldy = hr_round_up(n, HR_PANEL);
    float *h = random_floats(&r, kind, m * ldh);
    void *split_want = bytes_of(m * ldout * 4), *split_got = bytes_of(m * ldout * 4);
    void *b_rows = random_elements(&r, kind, c, (size_t)n * rank);
    void *b = bytes_of(hr_pack_lora_b_bytes(c, n, rank));
    float *y0 = random_floats(&r, kind, m * ldy);
    float *want = bytes_of(m * ldy * 4), *got = bytes_of(m * ldy * 4);
    if (c == HR_COMPUTE_BF16)
        hr_pack_lora_b_bf16(b_rows, n, rank, b);
    else
        hr_pack_lora_b_f32(b_rows, n, rank, b);
    ch->ref->lora_split[c](h, ldh, m, leaves, 1.7f, split_want, ldout);
    memcpy(want, y0, m * ldy * 4);
    hr_lora_expand_args a = {.h = split_want,
                             .ldh = ldout,
                             .m = m,
                             .n_leaves = leaves,
                             .b = b,
                             .panel_begin = 0,
                             .panel_end = (uint32_t)(ldy / HR_PANEL),
                             .y = want,
                             .ldy = ldy,
                             .scratch = ch->scratch};
    ch->ref->lora_expand[c](&a);
    FOR_EACH_TIER(k) {
        k->lora_split[c](h, ldh, m, leaves, 1.7f, split_got, ldout);
        expect_same(ch, k, c, kind, split_got, split_want, m * ldout, "lora_split");
        memcpy(got, y0, m * ldy * 4);
        a.y = got;
        k->lora_expand[c](&a);
        expect_same_floats(ch, k, kind, got, want, m * ldy, "lora_expand");
    }
    free(h);
    free(split_want);
    free(split_got);
    free(b_rows);
    free(b);
    free(y0);
    free(want);
    free(got);
}

static void lora_matches_for_every_kind_of_rank(check *ch) {
    FOR_EACH_COMPUTE(c)
    for (uint32_t rank = 1; rank <= 256; rank++)
        check_lora(ch, c, (input_kind)(rank % INPUT_KINDS), 1 + rank * 5 % 13, rank % 2 ? 48 : 40,
                   rank, 100 + rank);
    FOR_EACH_COMPUTE(c)
    FOR_EACH_KIND(kind)
    check_lora(ch, c, kind, 7, 40, 33, 400 + kind);
    FOR_EACH_COMPUTE(c) {
        check_lora(ch, c, INPUT_NORMAL, 110, 24, 1040, 130);
    }
}

/* One sequence whose pages lie in any order among pages full of leftovers, NaN included. */
typedef struct sequence {
    hr_compute c;
    uint32_t head_dim, n_positions;
    char *kv;
    size_t page_stride;
    uint32_t *pages;
} sequence;

static sequence make_sequence(check *ch, rng *r, hr_compute c, input_kind kind, uint32_t head_dim,
                              uint32_t n_positions) {
    uint32_t n_pages = (n_positions + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS;
    sequence s = {c,
                  head_dim,
                  n_positions,
                  NULL,
                  hr_kv_slot_bytes(c, head_dim) * 2,
                  bytes_of(n_pages * sizeof *s.pages)};
    s.kv = random_elements(r, INPUT_ANY, c, n_pages * s.page_stride / hr_compute_bytes(c));
    for (uint32_t i = 0; i < n_pages; i++)
        s.pages[i] = (i * 7 + 3) % n_pages;
    if (n_pages % 7 == 0)
        for (uint32_t i = 0; i < n_pages; i++)
            s.pages[i] = n_pages - 1 - i;
    for (uint32_t pos = 0; pos < n_positions; pos++) {
        float *k = random_floats(r, kind, head_dim), *v = random_floats(r, kind, head_dim);
        ch->ref->kv_store[c](k, v, head_dim, pos % HR_KV_PAGE_TOKENS,
                             s.kv + s.pages[pos / HR_KV_PAGE_TOKENS] * s.page_stride);
        free(k);
        free(v);
    }
    return s;
}

static void free_sequence(sequence *s) {
    free(s->kv);
    free(s->pages);
}

/* Queries [n_rows][n_heads][padded], zero past head_dim. */
static void *make_queries(rng *r, hr_compute c, input_kind kind, size_t n, uint32_t head_dim) {
    size_t padded = hr_round_up(head_dim, HR_LEAF), element = hr_compute_bytes(c);
    char *q = random_elements(r, kind, c, n * padded);
    for (size_t i = 0; i < n; i++)
        memset(q + (i * padded + head_dim) * element, 0, (padded - head_dim) * element);
    return q;
}

static hr_attention_args attention_of(check *ch, const sequence *s, const void *q, uint32_t n_rows,
                                      uint32_t n_heads, uint32_t first_pos, void *out) {
    size_t padded = hr_round_up(s->head_dim, HR_LEAF);
    return (hr_attention_args){.q = q,
                               .ldq = n_heads * padded,
                               .head_stride = padded,
                               .n_rows = n_rows,
                               .n_heads = n_heads,
                               .head_dim = s->head_dim,
                               .first_pos = first_pos,
                               .kv = s->kv,
                               .page_stride = s->page_stride,
                               .pages = s->pages,
                               .scale = 0.125f,
                               .out = out,
                               .ldo = (size_t)n_heads * s->head_dim,
                               .out_head_stride = s->head_dim,
                               .scratch = ch->scratch};
}

static void check_attention(check *ch, hr_compute c, input_kind kind, uint32_t head_dim,
                            uint32_t n_heads, uint32_t n_rows, uint32_t first_pos, uint64_t seed) {
    rng r = {seed};
    sequence s = make_sequence(ch, &r, c, kind, head_dim, first_pos + n_rows);
    void *q = make_queries(&r, c, kind, (size_t)n_rows * n_heads, head_dim);
    size_t n = (size_t)n_rows * n_heads * head_dim;
    void *want = bytes_of(n * 4), *got = bytes_of(n * 4);
    hr_attention_args a = attention_of(ch, &s, q, n_rows, n_heads, first_pos, want);
    ch->ref->attention[c](&a);
    FOR_EACH_TIER(k) {
        a.out = got;
        k->attention[c](&a);
        expect_same(ch, k, c, kind, got, want, n, "attention");
    }
    free_sequence(&s);
    free(q);
    free(want);
    free(got);
}

/* One row whose blocks are computed in runs of run_blocks, the last run first, and merged. */
static void check_split_attention(check *ch, hr_compute c, input_kind kind, uint32_t head_dim,
                                  uint32_t n_heads, uint32_t first_pos, uint32_t run_blocks,
                                  uint64_t seed) {
    rng r = {seed};
    sequence s = make_sequence(ch, &r, c, kind, head_dim, first_pos + 1);
    void *q = make_queries(&r, c, kind, n_heads, head_dim);
    size_t n = (size_t)n_heads * head_dim;
    uint32_t n_blocks = first_pos / HR_ATTN_BLOCK + 1;
    size_t n_partials = n_blocks * n_heads * hr_attention_partial_floats(head_dim);
    void *want = bytes_of(n * 4), *got = bytes_of(n * 4);
    hr_attention_args a = attention_of(ch, &s, q, 1, n_heads, first_pos, want);
    ch->ref->attention[c](&a);
    a.out = got;
    FOR_EACH_TIER(k) {
        a.partials = random_floats(&r, INPUT_ANY, n_partials);
        for (uint32_t end = n_blocks, first; end > 0; end = first) {
            first = (end - 1) / run_blocks * run_blocks;
            hr_attention_args run = a;
            run.pages += first * (HR_ATTN_BLOCK / HR_KV_PAGE_TOKENS);
            run.partials += (size_t)first * n_heads * hr_attention_partial_floats(head_dim);
            run.first_pos = end < n_blocks ? (end - first) * HR_ATTN_BLOCK - 1
                                           : first_pos - first * HR_ATTN_BLOCK;
            k->attention[c](&run);
        }
        k->attention_merge[c](&a);
        free(a.partials);
        expect_same(ch, k, c, kind, got, want, n, "split attention");
    }
    free_sequence(&s);
    free(q);
    free(want);
    free(got);
}

static void split_attention_matches_around_block_borders(check *ch) {
    const uint32_t positions[] = {0, 33, 510, 511, 512, 1022, 1023, 1024, 1025, 2100};
    const uint32_t dims[] = {16, 20, 64, 80, 128}, heads[] = {1, 3, 4, 7, 50};
    rng r = {8};
    FOR_EACH_COMPUTE(c)
    for (size_t p = 0; p < sizeof positions / sizeof positions[0]; p++)
        for (uint32_t run = 1; run <= 3; run++)
            check_split_attention(ch, c, (input_kind)(run == 1 ? 0 : rng_below(&r, INPUT_KINDS)),
                                  dims[rng_below(&r, 5)], heads[rng_below(&r, 5)], positions[p],
                                  run, rng_next(&r));
}

static void attention_matches_around_page_and_block_borders(check *ch) {
    const uint32_t first[] = {0, 1, 30, 31, 32, 33, 500, 510, 511, 512, 513, 1030};
    const uint32_t dims[] = {16, 20, 32, 64, 80, 128}, heads[] = {1, 3, 4, 7},
                   rows[] = {1, 2, 5, 17};
    rng r = {7};
    FOR_EACH_COMPUTE(c)
    for (size_t f = 0; f < sizeof first / sizeof first[0]; f++)
        for (int i = 0; i < 5; i++)
            check_attention(ch, c, (input_kind)(i == 0 ? 0 : rng_below(&r, INPUT_KINDS)),
                            dims[rng_below(&r, 6)], heads[rng_below(&r, 4)], rows[rng_below(&r, 4)],
                            first[f], rng_next(&r));
}

static void attention_of_a_row_does_not_depend_on_the_chunk(check *ch) {
    enum { N = 70, HEADS = 3, DIM = 64 };
    const uint32_t chunks[] = {1, 3, 32, 33, 64, 70};
    rng r = {9};
    FOR_EACH_COMPUTE(c) {
        sequence s = make_sequence(ch, &r, c, INPUT_NORMAL, DIM, 490 + N);
        void *q = make_queries(&r, c, INPUT_NORMAL, N * HEADS, DIM);
        size_t element = hr_compute_bytes(c);
        char *want = bytes_of(N * HEADS * DIM * 4), *got = bytes_of(N * HEADS * DIM * 4);
        hr_attention_args whole = attention_of(ch, &s, q, N, HEADS, 490, want);
        ch->ref->attention[c](&whole);
        FOR_EACH_TIER(k)
        for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
            memset(got, 0, N * HEADS * DIM * element);
            for (uint32_t row = 0; row < N; row += chunks[i]) {
                uint32_t n = N - row < chunks[i] ? N - row : chunks[i];
                hr_attention_args part =
                    attention_of(ch, &s, (char *)q + row * HEADS * DIM * element, n, HEADS,
                                 490 + row, got + row * HEADS * DIM * element);
                k->attention[c](&part);
            }
            expect_same(ch, k, c, INPUT_NORMAL, got, want, N * HEADS * DIM, "chunked attention");
        }
        free_sequence(&s);
        free(q);
        free(want);
        free(got);
    }
}

static void cache_writes_match(check *ch) {
    const uint32_t dims[] = {16, 20, 64, 80, 128};
    FOR_EACH_COMPUTE(c)
    FOR_EACH_KIND(kind) for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        rng r = {300 + i};
        size_t n = hr_kv_slot_bytes(c, dims[i]) / hr_compute_bytes(c);
        char *want = random_elements(&r, INPUT_NORMAL, c, n), *got = bytes_of(n * 4);
        char *before = bytes_of(n * 4);
        memcpy(before, want, n * hr_compute_bytes(c));
        for (uint32_t slot = 0; slot < HR_KV_PAGE_TOKENS; slot += 5) {
            float *k = random_floats(&r, kind, dims[i]), *v = random_floats(&r, kind, dims[i]);
            memcpy(want, before, n * hr_compute_bytes(c));
            ch->ref->kv_store[c](k, v, dims[i], slot, want);
            FOR_EACH_TIER(tier) {
                memcpy(got, before, n * hr_compute_bytes(c));
                tier->kv_store[c](k, v, dims[i], slot, got);
                expect_same(ch, tier, c, kind, got, want, n, "kv_store");
            }
            free(k);
            free(v);
        }
        free(want);
        free(got);
        free(before);
    }
}

static const uint32_t LENGTHS[] = {1, 2, 15, 16, 17, 31, 33, 64, 80, 511, 512, 513, 576, 1030};
enum { N_LENGTHS = sizeof LENGTHS / sizeof LENGTHS[0] };

static void check_elementwise(check *ch, hr_compute c, input_kind kind, uint32_t n, uint64_t seed) {
    rng r = {seed};
    uint32_t padded = (uint32_t)hr_round_up(n, HR_LEAF);
    float *x = random_floats(&r, kind, n), *w = random_floats(&r, kind, n);
    void *want = random_floats(&r, INPUT_NORMAL, padded),
         *got = random_floats(&r, INPUT_NORMAL, padded);
    void *packed = bytes_of(hr_packed_bytes(c, 19, n)),
         *rows = random_elements(&r, kind, c, 19 * n);
    pack(c, rows, 19, n, packed);
    FOR_EACH_TIER(k) {
        ch->ref->rmsnorm[c](x, w, n, padded, 1e-5f, want);
        k->rmsnorm[c](x, w, n, padded, 1e-5f, got);
        expect_same(ch, k, c, kind, got, want, padded, "rmsnorm");
        ch->ref->silu_mul[c](x, w, n, padded, want);
        k->silu_mul[c](x, w, n, padded, got);
        expect_same(ch, k, c, kind, got, want, padded, "silu_mul");
        ch->ref->store[c](x, n, padded, want);
        k->store[c](x, n, padded, got);
        expect_same(ch, k, c, kind, got, want, padded, "store");
        ch->ref->unpack_row[c](packed, 18, n, want);
        k->unpack_row[c](packed, 18, n, got);
        expect_same_floats(ch, k, kind, got, want, n, "unpack_row");
        for (uint32_t i = 0; i < n; i++)
            ((float *)want)[i] = element_at(c, rows, 18 * n + i);
        expect_same_floats(ch, k, kind, got, want, n, "unpack_row");
    }
    free(x);
    free(w);
    free(want);
    free(got);
    free(packed);
    free(rows);
}

static void elementwise_ops_match(check *ch) {
    FOR_EACH_COMPUTE(c)
    FOR_EACH_KIND(kind)
    for (size_t i = 0; i < N_LENGTHS; i++)
        check_elementwise(ch, c, kind, LENGTHS[i], 400 + i);
}

static void check_floats(check *ch, input_kind kind, uint32_t n, uint64_t seed) {
    rng r = {seed};
    uint32_t half = n / 2;
    float *x = random_floats(&r, kind, n), *u = random_floats(&r, kind, n);
    float *want = bytes_of(n * 4), *got = bytes_of(n * 4);
    FOR_EACH_TIER(k) {
        memcpy(want, x, n * 4);
        memcpy(got, x, n * 4);
        ch->ref->rope(want, u, u + half, 2 * half);
        k->rope(got, u, u + half, 2 * half);
        expect_same_floats(ch, k, kind, got, want, n, "rope");
        ch->ref->add(want, u, n);
        k->add(got, u, n);
        expect_same_floats(ch, k, kind, got, want, n, "add");
        ch->ref->divide(x, 0.7f, n, want);
        memcpy(got, x, n * 4);
        k->divide(got, 0.7f, n, got);
        expect_same_floats(ch, k, kind, got, want, n, "divide");
        ch->ref->exp_sub(x, 0.5f, n, want);
        k->exp_sub(x, 0.5f, n, got);
        expect_same_floats(ch, k, kind, got, want, n, "exp_sub");
        hr_lse a = ch->ref->lse(x, n), b = k->lse(x, n);
        expect_same_floats(ch, k, kind, &b.max, &a.max, 1, "lse max");
        expect_same_floats(ch, k, kind, &b.log_sum, &a.log_sum, 1, "lse log_sum");
    }
    free(x);
    free(u);
    free(want);
    free(got);
}

static void float_ops_match(check *ch) {
    FOR_EACH_KIND(kind)
    for (size_t i = 0; i < N_LENGTHS; i++)
        check_floats(ch, kind, LENGTHS[i], 500 + i);
}

static void top_k_matches_with_ties_and_nan(check *ch) {
    FOR_EACH_KIND(kind)
    for (size_t i = 0; i < N_LENGTHS; i++) {
        rng r = {600 + i};
        uint32_t n = LENGTHS[i], ks[] = {1, 5, n / 2, n};
        float *x = random_floats(&r, kind, n);
        uint32_t *want = bytes_of(n * 4), *got = bytes_of(n * 4);
        float *want_values = bytes_of(n * 4), *got_values = bytes_of(n * 4);
        for (int j = 0; j < 4; j++)
            FOR_EACH_TIER(k) {
                uint32_t count = ks[j] < n ? ks[j] : n;
                ch->ref->top_k(x, n, count, want, want_values, ch->scratch);
                k->top_k(x, n, count, got, got_values, ch->scratch);
                /* Indices as bits of floats: equality to the bit is all that counts. */
                expect_same_floats(ch, k, kind, (float *)got, (float *)want, count, "top_k");
                expect_same_floats(ch, k, kind, got_values, want_values, count, "top_k");
            }
        free(x);
        free(want);
        free(got);
        free(want_values);
        free(got_values);
    }
}

size_t hr_bits_check(const hr_kernels *ref, const hr_kernels *const *tiers,
                     hr_bits_result results[HR_BITS_RESULTS]) {
    check ch = {
        .ref = ref, .tiers = tiers, .scratch = bytes_of(HR_SCRATCH_BYTES), .results = results};
    unsigned saved = hr_fp_enter();
    gemm_matches_for_every_number_of_rows(&ch);
    gemm_matches_across_blocks_of_inputs_and_rows(&ch);
    lora_matches_for_every_kind_of_rank(&ch);
    attention_matches_around_page_and_block_borders(&ch);
    attention_of_a_row_does_not_depend_on_the_chunk(&ch);
    split_attention_matches_around_block_borders(&ch);
    cache_writes_match(&ch);
    elementwise_ops_match(&ch);
    float_ops_match(&ch);
    top_k_matches_with_ties_and_nan(&ch);
    hr_fp_restore(saved);
    free(ch.scratch);
    return ch.n_results;
}
