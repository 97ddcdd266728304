/* The bits of every op on fixed inputs, as digests: equal for each compiler, level of optimisation
 * and tier. A digest changes only with docs/arithmetic.md; the commit that changes one says why. */
#include "kernels/check/inputs.h"

#include "base/pool.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* FNV-1a over the bits; a NaN counts as one and the same. */
static uint64_t digest(hr_compute c, const void *x, size_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) {
        float value = element_at(c, x, i);
        uint32_t bits = isnan(value) ? 0x7fc00000u : float_bits(value);
        for (int byte = 0; byte < 4; byte++)
            h = (h ^ (bits >> (8 * byte) & 0xffu)) * 0x100000001b3u;
    }
    return h;
}

enum { M = 7, N = 80, K = 160, RANK = 20, LEAVES = 2, DIM = 20, PADDED = 32, POSITIONS = 530 };

/* Inputs of one kind, and room for any output. */
typedef struct fixture {
    float *a, *b;
    void *x, *w, *packed;
    float *y;
    char *kv;
    uint32_t pages[POSITIONS / HR_KV_PAGE_TOKENS + 1];
    void *scratch;
} fixture;

static fixture make(hr_compute c, input_kind kind) {
    rng r = {42 + kind};
    fixture f = {.a = random_floats(&r, kind, M * K), .b = random_floats(&r, kind, M * K)};
    f.x = random_elements(&r, kind, c, M * K);
    f.w = random_elements(&r, kind, c, N * K);
    f.packed = bytes_of(hr_packed_bytes(c, N, K));
    f.y = random_floats(&r, kind, M * K);
    f.kv = bytes_of((POSITIONS / HR_KV_PAGE_TOKENS + 1) * hr_kv_slot_bytes(c, DIM));
    f.scratch = bytes_of(HR_SCRATCH_BYTES);
    for (uint32_t i = 0; i <= POSITIONS / HR_KV_PAGE_TOKENS; i++)
        f.pages[i] = POSITIONS / HR_KV_PAGE_TOKENS - i;
    return f;
}

static void release(fixture *f) {
    free(f->a);
    free(f->b);
    free(f->x);
    free(f->w);
    free(f->packed);
    free(f->y);
    free(f->kv);
    free(f->scratch);
}

typedef uint64_t (*golden_op)(const hr_kernels *k, hr_compute c, fixture *f);

static uint64_t gemm(const hr_kernels *k, hr_compute c, fixture *f) {
    pack(c, f->w, N, K, f->packed);
    k->gemm[c](&(hr_gemm_args){.x = f->x,
                               .ldx = K,
                               .m = M,
                               .k = K,
                               .w = f->packed,
                               .panel_begin = 0,
                               .panel_end = N / HR_PANEL,
                               .y = f->y,
                               .ldy = N,
                               .accumulate = true,
                               .scratch = f->scratch});
    return digest(HR_COMPUTE_F32, f->y, M * N);
}

static uint64_t lora(const hr_kernels *k, hr_compute c, fixture *f) {
    size_t ldh = LEAVES * (c == HR_COMPUTE_BF16 ? HR_LEAF : HR_LORA_LEAF);
    if (c == HR_COMPUTE_BF16)
        hr_pack_lora_b_bf16(f->w, N, RANK, f->packed);
    else
        hr_pack_lora_b_f32(f->w, N, RANK, f->packed);
    k->lora_split[c](f->a, 32, M, LEAVES, 1.5f, f->x, ldh);
    k->lora_expand[c](&(hr_lora_expand_args){.h = f->x,
                                             .ldh = ldh,
                                             .m = M,
                                             .n_leaves = LEAVES,
                                             .b = f->packed,
                                             .panel_begin = 0,
                                             .panel_end = N / HR_PANEL,
                                             .y = f->y,
                                             .ldy = N,
                                             .scratch = f->scratch});
    return digest(HR_COMPUTE_F32, f->y, M * N);
}

static uint64_t attention(const hr_kernels *k, hr_compute c, fixture *f) {
    for (uint32_t pos = 0; pos < POSITIONS; pos++)
        k->kv_store[c](f->a + pos, f->b + pos, DIM, pos % HR_KV_PAGE_TOKENS,
                       f->kv + f->pages[pos / HR_KV_PAGE_TOKENS] * hr_kv_slot_bytes(c, DIM));
    k->store[c](f->y, DIM, PADDED, f->x);
    k->store[c](f->y + DIM, DIM, PADDED, (char *)f->x + PADDED * hr_compute_bytes(c));
    k->attention[c](&(hr_attention_args){.q = f->x,
                                         .ldq = PADDED,
                                         .head_stride = PADDED,
                                         .n_rows = 2,
                                         .n_heads = 1,
                                         .head_dim = DIM,
                                         .first_pos = POSITIONS - 2,
                                         .kv = f->kv,
                                         .page_stride = hr_kv_slot_bytes(c, DIM),
                                         .pages = f->pages,
                                         .scale = 0.22f,
                                         .out = f->y,
                                         .ldo = DIM,
                                         .out_head_stride = DIM,
                                         .scratch = f->scratch});
    return digest(c, f->y, 2 * DIM);
}

static uint64_t rmsnorm(const hr_kernels *k, hr_compute c, fixture *f) {
    k->rmsnorm[c](f->a, f->b, 333, 352, 1e-6f, f->y);
    return digest(c, f->y, 352);
}

static uint64_t silu_mul(const hr_kernels *k, hr_compute c, fixture *f) {
    k->silu_mul[c](f->a, f->b, 333, 352, f->y);
    return digest(c, f->y, 352);
}

static uint64_t rope_add_divide(const hr_kernels *k, hr_compute c, fixture *f) {
    (void)c;
    k->rope(f->y, f->a, f->b, 100);
    k->add(f->y, f->a, 333);
    k->divide(f->y, 0.7f, 333, f->y);
    return digest(HR_COMPUTE_F32, f->y, 333);
}

static uint64_t log_softmax(const hr_kernels *k, hr_compute c, fixture *f) {
    (void)c;
    hr_lse lse = k->lse(f->a, M * K);
    k->exp_sub(f->a, lse.max, 333, f->y);
    f->y[333] = lse.max;
    f->y[334] = lse.log_sum;
    return digest(HR_COMPUTE_F32, f->y, 335);
}

static const struct {
    const char *name;
    golden_op op;
    uint64_t want[HR_COMPUTE_COUNT][INPUT_KINDS];
} GOLDEN[] = {
#include "golden.inc.h"
};

static void every_op_has_its_golden_bits(void **state) {
    (void)state;
    unsigned saved = hr_fp_enter();
    int wrong = 0;
    for (size_t i = 0; i < sizeof GOLDEN / sizeof GOLDEN[0]; i++)
        for (hr_compute c = 0; c < HR_COMPUTE_COUNT; c++)
            for (input_kind kind = 0; kind < INPUT_KINDS; kind++)
                for (size_t t = 0; hr_kernels_tier(t) != NULL; t++) {
                    fixture f = make(c, kind);
                    uint64_t got = GOLDEN[i].op(hr_kernels_tier(t), c, &f);
                    release(&f);
                    if (got == GOLDEN[i].want[c][kind])
                        continue;
                    print_message("%s[%d][%d] on %s: 0x%016" PRIx64 "\n", GOLDEN[i].name, (int)c,
                                  (int)kind, hr_kernels_tier(t)->name, got);
                    wrong++;
                }
    hr_fp_restore(saved);
    assert_int_equal(wrong, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_op_has_its_golden_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
