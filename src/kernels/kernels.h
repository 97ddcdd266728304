/* The op table: every arithmetic step of a forward pass, in one struct of functions per instruction
 * set.
 *
 * All tiers give the same bits (docs/arithmetic.md): order, rounding points and functions are fixed
 * there, so a tier is chosen for speed alone. Ops neither allocate, lock nor call the system. They
 * run on pool workers, whose floating-point mode (nearest even, denormals flushed both ways) they
 * rely on; code outside a pool calls hr_fp_enter first.
 *
 * Compute dtype: HR_COMPUTE_BF16 keeps weights, GEMM inputs and the KV cache in bfloat16;
 * HR_COMPUTE_F32 keeps them in float (for checks). Sums, residual stream, norms and logits are
 * float in both. Ops that differ have one entry per compute dtype. "Compute elements" below are
 * uint16_t (bf16 bits) or float.
 *
 * Packed weights. A matrix W[n][k] is cut into panels of 16 outputs; inside a panel inputs go in
 * pairs: panel p, pair j, lane l holds W[16p+l][2j], W[16p+l][2j+1] (bf16), so that 16 pairs of a
 * panel are one AMX tile. For F32 panel p, input j, lane l holds W[16p+l][j]. k is padded to a
 * multiple of 32 and n to a multiple of 16 with zeros, which change no bit.
 *
 * KV slots. A page holds HR_KV_PAGE_TOKENS positions of one sequence; in it each layer and kv head
 * has a slot: keys packed as the weight matrix [n = position][k = dim], then values packed as the
 * weight matrix [n = dim][k = position], both over head_dim padded to a multiple of 32. */
#ifndef HR_KERNELS_KERNELS_H
#define HR_KERNELS_KERNELS_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    HR_PANEL = 16,             /* outputs in a panel */
    HR_LEAF = 32,              /* inputs in a leaf of the sum */
    HR_KV_PAGE_TOKENS = 32,    /* positions in a page: one leaf of the P*V sum */
    HR_ATTN_BLOCK = 512,       /* positions in a softmax block */
    HR_VOCAB_BLOCK = 512,      /* ids in a log-softmax block */
    HR_LORA_LEAF = 16,         /* adapter ranks in a leaf of the expand: hi parts, then lo parts */
    HR_SCRATCH_BYTES = 4 << 20 /* scratch each worker hands to the ops, 64-byte aligned */
};

typedef enum hr_compute { HR_COMPUTE_BF16, HR_COMPUTE_F32, HR_COMPUTE_COUNT } hr_compute;

static inline size_t hr_compute_bytes(hr_compute c) {
    return c == HR_COMPUTE_BF16 ? 2 : 4;
}

static inline size_t hr_round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

/* Bytes of a packed [n][k] matrix, and of one KV slot. */
static inline size_t hr_packed_bytes(hr_compute c, size_t n, size_t k) {
    return hr_round_up(n, HR_PANEL) * hr_round_up(k, HR_LEAF) * hr_compute_bytes(c);
}
static inline size_t hr_kv_slot_bytes(hr_compute c, size_t head_dim) {
    return 2 * HR_KV_PAGE_TOKENS * hr_round_up(head_dim, HR_LEAF) * hr_compute_bytes(c);
}

/* y[m][16 p + l] = chain over leaves of x[m][.] . W panel p, for p in [panel_begin, panel_end). */
typedef struct hr_gemm_args {
    const void *x; /* compute elements, row-major; columns [0, k) readable */
    size_t ldx;    /* elements between rows */
    uint32_t m, k; /* k: a multiple of HR_LEAF */
    const void *w; /* packed; start of panel 0 */
    uint32_t panel_begin, panel_end;
    float *y; /* start of panel 0's column; 64-byte aligned rows not required */
    size_t ldy;
    bool accumulate; /* chains go on from y instead of starting at +0 */
    void *scratch;
} hr_gemm_args;

/* y[m][16 p + l] goes on by leaves of h[m][.] . B panel p: the expand of one adapter on one module.
 * h is what lora_split wrote. B[n][rank] is packed by hr_pack_lora_b: per panel ceil(rank/16)
 * leaves; bf16: [8 pairs][16 lanes][2], each used twice (hi, then lo); F32: [16][16 lanes]. */
typedef struct hr_lora_expand_args {
    const void *h;
    size_t ldh;
    uint32_t m, n_leaves;
    const void *b;
    uint32_t panel_begin, panel_end;
    float *y;
    size_t ldy;
    void *scratch;
} hr_lora_expand_args;

/* One sequence, one kv head, the n_heads query heads that share it, rows of this step.
 * Row i sits at absolute position first_pos + i and sees keys 0 .. first_pos + i, which are all in
 * the cache already. */
typedef struct hr_attention_args {
    const void
        *q; /* q[i * ldq + h * head_stride + d], compute elements, zero up to padded head_dim */
    size_t ldq, head_stride; /* elements */
    uint32_t n_rows, n_heads, head_dim;
    uint32_t first_pos;
    const char *kv;        /* slot of page 0 for this layer and kv head */
    size_t page_stride;    /* bytes from a page's slot to the next page's */
    const uint32_t *pages; /* page id of positions [32 j, 32 j + 32) */
    float scale;
    void *out; /* out[i * ldo + h * out_head_stride + d], compute elements, head_dim of them written
                */
    size_t ldo, out_head_stride;
    void *scratch;
    /* NULL, or for one row (n_rows 1) room for the results of its blocks, each for itself: those of
     * block b and head h go to the hr_attention_partial_floats at partials[b * n_heads + h], and
     * out is not touched. So the blocks of a long row can be computed in several calls: for those
     * from block b on, pages, partials and first_pos count from there. 64-byte aligned. */
    float *partials;
} hr_attention_args;

/* What one block gives to one query head: padded head_dim sums of p * v, the maximum, the sum of p.
 */
static inline size_t hr_attention_partial_floats(size_t head_dim) {
    return hr_round_up(head_dim, HR_LEAF) + 16;
}

typedef struct hr_lse {
    float max, log_sum; /* log-softmax of x is (x - max) - log_sum */
} hr_lse;

typedef struct hr_kernels {
    const char *name; /* "ref", "avx2", "avx512", "amx" */

    void (*gemm[HR_COMPUTE_COUNT])(const hr_gemm_args *args);
    /* h fp32 [m][rank_padded to 16] -> s*h, split: bf16 rows of [16 hi][16 lo] per leaf, F32 rows
     * of [16]. */
    void (*lora_split[HR_COMPUTE_COUNT])(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves,
                                         float scale, void *out, size_t ldout);
    void (*lora_expand[HR_COMPUTE_COUNT])(const hr_lora_expand_args *args);
    void (*attention[HR_COMPUTE_COUNT])(const hr_attention_args *args);
    /* Merges all blocks of args->partials from left to right into out; q, kv and pages are not
     * read. The bits are those of one attention call without partials. */
    void (*attention_merge[HR_COMPUTE_COUNT])(const hr_attention_args *args);

    /* out[i] = (x[i] * (1 / sqrt(mean(x^2) + eps))) * w[i]; zeros up to n_padded. */
    void (*rmsnorm[HR_COMPUTE_COUNT])(const float *x, const float *w, uint32_t n, uint32_t n_padded,
                                      float eps, void *out);
    /* In place on one head: x[i], x[i + n/2] turned by cos[i], sin[i], i < n/2. */
    void (*rope)(float *x, const float *cos, const float *sin, uint32_t n);
    /* Rounds n floats to compute elements; zeros up to n_padded. */
    void (*store[HR_COMPUTE_COUNT])(const float *x, uint32_t n, uint32_t n_padded, void *out);
    /* Rounds and writes one position (slot = position % HR_KV_PAGE_TOKENS) of one kv head into its
     * page slot. */
    void (*kv_store[HR_COMPUTE_COUNT])(const float *k, const float *v, uint32_t head_dim,
                                       uint32_t slot, char *kv);
    /* out[i] = compute(silu(gate[i]) * up[i]); zeros up to n_padded. */
    void (*silu_mul[HR_COMPUTE_COUNT])(const float *gate, const float *up, uint32_t n,
                                       uint32_t n_padded, void *out);
    /* out[0..k) = row `row` of a packed [n][k] matrix, as float. */
    void (*unpack_row[HR_COMPUTE_COUNT])(const void *w, uint32_t row, uint32_t k, float *out);
    /* y[i] += x[i]. */
    void (*add)(float *y, const float *x, uint32_t n);

    /* y[i] = x[i] / t (in place allowed). */
    void (*divide)(const float *x, float t, uint32_t n, float *y);
    /* Blocks of HR_VOCAB_BLOCK folded in id order. */
    hr_lse (*lse)(const float *x, uint32_t n);
    /* out[i] = exp(x[i] - max). */
    void (*exp_sub)(const float *x, float max, uint32_t n, float *out);
    /* The k largest of x (k <= n), largest first, ties to the lowest index. O(n + k log k) in
     * practice. */
    void (*top_k)(const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values,
                  void *scratch);
} hr_kernels;

/* Packing, at load time and on bucket arrival; any tier's layout. src rows are dense [n][k] of
 * float or bf16 bits; rows [row_begin, row_end) of src are packed as outputs [row_begin ..) of dst;
 * row_begin must be a multiple of HR_PANEL and the last panel is zero-filled. src may be
 * unaligned. */
void hr_pack_weight_bf16(const uint16_t *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                         void *dst);
void hr_pack_weight_f32(const float *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                        void *dst);
/* The way back: rows [row_begin, row_end) of a packed matrix as dense compute elements, of which
 * the first lands at dst; row_begin must be a multiple of HR_PANEL. */
void hr_unpack_weight(hr_compute c, const void *packed, size_t k, size_t row_begin, size_t row_end,
                      void *dst);
/* B[n][rank], dense, to the layout of lora_expand, and the way back. */
size_t hr_pack_lora_b_bytes(hr_compute c, size_t n, size_t rank);
void hr_pack_lora_b_bf16(const uint16_t *src, size_t n, size_t rank, void *dst);
void hr_pack_lora_b_f32(const float *src, size_t n, size_t rank, void *dst);
void hr_unpack_lora_b(hr_compute c, const void *packed, size_t n, size_t rank, void *dst);

/* Chooses the fastest tier that this processor and system allow, or the one named by isa ("ref",
 * "avx2", "avx512", "amx"; NULL or "" = fastest). note (may be NULL) gets one line when a faster
 * tier was there but refused (AMX not permitted by the system), else "". HR_ERR_CPU below
 * AVX2+FMA+F16C, or when the named tier is not to be had; HR_ERR_INVALID for an unknown name. The
 * table is static. Thread-safe. */
hr_status hr_kernels_select(const char *isa, const hr_kernels **out, char *note, size_t note_size,
                            hr_error *err);

/* The i-th tier that this machine can run, slowest first (0 is ref); NULL past the last. For
 * checks. */
const hr_kernels *hr_kernels_tier(size_t i);

#endif
