/* Reference: softmax attention of one kv head over the paged cache, one row and one head at a time.
 */
#include "kernels/ref.h"

#include <math.h>

/* acc goes on by one leaf of n inputs (n may be odd or 0: the rest of the leaf adds nothing). */
static float leaf(float acc, const float *x, const float *w, uint32_t n) {
    float even = 0, odd = 0;
    for (uint32_t i = 0; i < n; i += 2)
        even = fmaf(x[i], w[i], even);
    for (uint32_t i = 1; i < n; i += 2)
        odd = fmaf(x[i], w[i], odd);
    return acc + (even + odd);
}

static const char *page_of(const hr_attention_args *a, uint32_t position) {
    return a->kv + a->pages[position / HR_KV_PAGE_TOKENS] * a->page_stride;
}

/* scale * (q . k) for the key at an absolute position. */
static float score(hr_compute c, const hr_attention_args *a, const float *q, uint32_t position) {
    uint32_t padded = (uint32_t)hr_round_up(a->head_dim, HR_LEAF);
    const char *keys = page_of(a, position);
    float dot = 0;
    for (uint32_t begin = 0; begin < padded; begin += HR_LEAF) {
        float k[HR_LEAF];
        for (uint32_t i = 0; i < HR_LEAF; i++)
            k[i] = ref_load(c, keys,
                            ref_packed_index(c, padded, position % HR_KV_PAGE_TOKENS, begin + i));
        dot = leaf(dot, q + begin, k, HR_LEAF);
    }
    return dot * a->scale;
}

/* Sum over the block's positions of p * v[.][d], a leaf per page; n positions are seen. */
static float weighted_value(hr_compute c, const hr_attention_args *a, const float *p,
                            uint32_t block, uint32_t n, uint32_t d) {
    float acc = 0;
    for (uint32_t begin = 0; begin < n; begin += HR_LEAF) {
        const char *values = page_of(a, block + begin) + hr_kv_slot_bytes(c, a->head_dim) / 2;
        uint32_t seen = n - begin < HR_LEAF ? n - begin : HR_LEAF;
        float v[HR_LEAF];
        for (uint32_t i = 0; i < seen; i++)
            v[i] = ref_load(c, values, ref_packed_index(c, HR_KV_PAGE_TOKENS, d, i));
        acc = leaf(acc, p + begin, v, seen);
    }
    return acc + 0.0f;
}

/* One block for one query: o[d] = sum of p * v, m[0] the maximum, m[1] the sum of p. */
static void attend_block(hr_compute c, const hr_attention_args *a, const float *q, uint32_t block,
                         uint32_t n, float *o, float m[2]) {
    float p[HR_ATTN_BLOCK], lane[16] = {0};
    float m_b = -INFINITY;
    for (uint32_t j = 0; j < n; j++) {
        p[j] = score(c, a, q, block + j);
        m_b = ref_max(m_b, p[j]);
    }
    m_b = m_b + 0.0f;
    for (uint32_t j = 0; j < n; j++) {
        p[j] = ref_round(c, ref_exp(p[j] - ref_shift(m_b)));
        lane[j % 16] = lane[j % 16] + p[j];
    }
    m[0] = m_b;
    m[1] = ref_lane_tree(lane);
    for (uint32_t d = 0; d < a->head_dim; d++)
        o[d] = weighted_value(c, a, p, block, n, d);
}

/* o, m go on by a block's o_b, m_b. */
static void merge_block(uint32_t head_dim, bool first, float *o, float m[2], const float *o_b,
                        const float m_b[2]) {
    if (first) {
        memcpy(o, o_b, head_dim * sizeof *o);
        m[0] = m_b[0];
        m[1] = m_b[1];
        return;
    }
    float m_new = ref_max(m[0], m_b[0]);
    float keep = ref_exp(m[0] - ref_shift(m_new)), take = ref_exp(m_b[0] - ref_shift(m_new));
    m[0] = m_new;
    m[1] = fmaf(m_b[1], take, m[1] * keep);
    for (uint32_t d = 0; d < head_dim; d++)
        o[d] = fmaf(o_b[d], take, o[d] * keep);
}

static void store_out(hr_compute c, const hr_attention_args *a, uint32_t row, uint32_t head,
                      const float *o, float l) {
    for (uint32_t d = 0; d < a->head_dim; d++)
        ref_store(c, a->out, row * a->ldo + head * a->out_head_stride + d, o[d] / l);
}

static float *partial_of(const hr_attention_args *a, uint32_t block, uint32_t head) {
    return a->partials +
           ((size_t)block * a->n_heads + head) * hr_attention_partial_floats(a->head_dim);
}

static void attend(hr_compute c, const hr_attention_args *a, uint32_t row, uint32_t head) {
    uint32_t padded = (uint32_t)hr_round_up(a->head_dim, HR_LEAF);
    uint32_t n_seen = a->first_pos + row + 1;
    float *q = a->scratch, *o = q + padded, *o_b = o + padded, m[2] = {0}, m_b[2];
    for (uint32_t d = 0; d < padded; d++)
        q[d] = ref_load(c, a->q, row * a->ldq + head * a->head_stride + d);
    for (uint32_t block = 0; block < n_seen; block += HR_ATTN_BLOCK) {
        uint32_t n = n_seen - block < HR_ATTN_BLOCK ? n_seen - block : HR_ATTN_BLOCK;
        if (a->partials != NULL) {
            float *partial = partial_of(a, block / HR_ATTN_BLOCK, head);
            attend_block(c, a, q, block, n, partial, partial + padded);
            continue;
        }
        attend_block(c, a, q, block, n, o_b, m_b);
        merge_block(a->head_dim, block == 0, o, m, o_b, m_b);
    }
    if (a->partials == NULL)
        store_out(c, a, row, head, o, m[1]);
}

static void attention(hr_compute c, const hr_attention_args *a) {
    for (uint32_t row = 0; row < a->n_rows; row++)
        for (uint32_t head = 0; head < a->n_heads; head++)
            attend(c, a, row, head);
}

static void merge(hr_compute c, const hr_attention_args *a) {
    uint32_t padded = (uint32_t)hr_round_up(a->head_dim, HR_LEAF);
    for (uint32_t head = 0; head < a->n_heads; head++) {
        float *o = a->scratch, m[2] = {0};
        for (uint32_t block = 0; block * HR_ATTN_BLOCK <= a->first_pos; block++) {
            const float *partial = partial_of(a, block, head);
            merge_block(a->head_dim, block == 0, o, m, partial, partial + padded);
        }
        store_out(c, a, 0, head, o, m[1]);
    }
}

void ref_attention_bf16(const hr_attention_args *a) {
    attention(HR_COMPUTE_BF16, a);
}

void ref_attention_f32(const hr_attention_args *a) {
    attention(HR_COMPUTE_F32, a);
}

void ref_attention_merge_bf16(const hr_attention_args *a) {
    merge(HR_COMPUTE_BF16, a);
}

void ref_attention_merge_f32(const hr_attention_args *a) {
    merge(HR_COMPUTE_F32, a);
}
