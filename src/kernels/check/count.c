/* A table of trampolines. */
#include "kernels/check/count.h"

#include <string.h>

static _Thread_local const hr_kernels *inner;
static _Thread_local uint64_t calls[HR_COUNT_ENTRIES];

/* Entry number, name, field, parameters, arguments. */
#define BOTH(X, entry, op, params, args)                                                           \
    X(entry, #op " bf16", op, _bf16, [HR_COMPUTE_BF16], params, args)                              \
    X(entry + 1, #op " f32", op, _f32, [HR_COMPUTE_F32], params, args)
#define ENTRIES(X)                                                                                 \
    BOTH(X, 0, gemm, (const hr_gemm_args *a), (a))                                                 \
    BOTH(X, 2, lora_split,                                                                         \
         (const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale, void *out,       \
          size_t ldout),                                                                           \
         (h, ldh, m, n_leaves, scale, out, ldout))                                                 \
    BOTH(X, 4, lora_expand, (const hr_lora_expand_args *a), (a))                                   \
    BOTH(X, 6, attention, (const hr_attention_args *a), (a))                                       \
    BOTH(X, 8, attention_merge, (const hr_attention_args *a), (a))                                 \
    BOTH(X, 10, rmsnorm,                                                                           \
         (const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps, void *out),    \
         (x, w, n, n_padded, eps, out))                                                            \
    X(12, "rope", rope, , , (float *x, const float *cos, const float *sin, uint32_t n),            \
      (x, cos, sin, n))                                                                            \
    BOTH(X, 13, store, (const float *x, uint32_t n, uint32_t n_padded, void *out),                 \
         (x, n, n_padded, out))                                                                    \
    BOTH(X, 15, kv_store,                                                                          \
         (const float *k, const float *v, uint32_t head_dim, uint32_t slot, char *kv),             \
         (k, v, head_dim, slot, kv))                                                               \
    BOTH(X, 17, silu_mul,                                                                          \
         (const float *gate, const float *up, uint32_t n, uint32_t n_padded, void *out),           \
         (gate, up, n, n_padded, out))                                                             \
    BOTH(X, 19, unpack_row, (const void *w, uint32_t row, uint32_t k, float *out),                 \
         (w, row, k, out))                                                                         \
    X(21, "add", add, , , (float *y, const float *x, uint32_t n), (y, x, n))                       \
    X(22, "divide", divide, , , (const float *x, float t, uint32_t n, float *y), (x, t, n, y))     \
    X(24, "exp_sub", exp_sub, , , (const float *x, float max, uint32_t n, float *out),             \
      (x, max, n, out))                                                                            \
    X(25, "top_k", top_k, , ,                                                                      \
      (const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values, void *scratch),       \
      (x, n, k, ids, values, scratch))

#define TRAMPOLINE(entry, name, op, suffix, index, params, args)                                   \
    static void count_##op##suffix params {                                                        \
        calls[entry]++;                                                                            \
        inner->op index args;                                                                      \
    }
ENTRIES(TRAMPOLINE)

static hr_lse count_lse(const float *x, uint32_t n) { /* the one that returns something */
    calls[23]++;
    return inner->lse(x, n);
}

void hr_count_start(const hr_kernels *tier, hr_kernels *counting) {
    inner = tier;
    memset(calls, 0, sizeof calls);
    counting->name = tier->name;
    counting->lse = count_lse;
#define FILL(entry, name, op, suffix, index, params, args) counting->op index = count_##op##suffix;
    ENTRIES(FILL)
}

uint64_t hr_count_calls(size_t entry) {
    return calls[entry];
}

const char *hr_count_name(size_t entry) {
    static const char *const names[HR_COUNT_ENTRIES] = {
#define NAME(entry, name, op, suffix, index, params, args) [entry] = name,
        ENTRIES(NAME)[23] = "lse"};
    return names[entry];
}

static bool same_entry(const hr_kernels *a, const hr_kernels *b, size_t entry) {
    switch (entry) {
#define COMPARE(entry, name, op, suffix, index, params, args)                                      \
    case entry:                                                                                    \
        return a->op index == b->op index;
        ENTRIES(COMPARE)
    default:
        return a->lse == b->lse;
    }
}

const hr_kernels *hr_count_owner(const hr_kernels *const *tiers, size_t t, size_t entry) {
    size_t owner = 0;
    while (!same_entry(tiers[owner], tiers[t], entry))
        owner++;
    return tiers[owner];
}
