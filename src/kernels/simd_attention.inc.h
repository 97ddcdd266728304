/* Attention over the paged cache with the tiles of linear layers: keys of a page are two panels,
 * values of a page one leaf.
 *
 * A "line" is one query head of one row. Lines are taken in groups that go through the cache
 * together, block by block; inside a block, tile by tile. */

enum {
    LINES = 8 * HR_TILE_ROWS,
    SCORE_STRIDE = HR_ATTN_BLOCK + 16, /* rows on different cache sets */
    PAGE_PANELS = HR_KV_PAGE_TOKENS / HR_PANEL,
    FETCH_AHEAD = 2 /* half pages */
};

typedef struct attention_state {
    const hr_attention_args *a;
    size_t padded;           /* head_dim, to a multiple of HR_LEAF */
    float *q, *o;            /* [LINES][padded] */
    float *scores, *block_o; /* one tile: [HR_TILE_ROWS][SCORE_STRIDE], [HR_TILE_ROWS][padded] */
    float m[LINES], l[LINES];
} attention_state;

HR_INLINE const char *page_at(const hr_attention_args *a, uint32_t position) {
    return a->kv + a->pages[position / HR_KV_PAGE_TOKENS] * a->page_stride;
}

/* Asks for the i-th half page that a block of n_pages reads: all its keys, then all its values,
 * then the next block's keys. Pages lie anywhere, so no hardware guesses the next one; asking in
 * the order of reading keeps memory busy while scores and while values are computed. */
HR_INLINE void fetch_half(hr_compute c, const hr_attention_args *a, uint32_t block,
                          uint32_t n_pages, uint32_t i) {
    const size_t bytes = hr_kv_slot_bytes(c, a->head_dim) / 2;
    bool values = false;
    if (i >= 2 * n_pages) {
        block += HR_ATTN_BLOCK;
        i -= 2 * n_pages;
    } else if (i >= n_pages) {
        values = true;
        i -= n_pages;
    }
    const uint32_t position = block + i * HR_KV_PAGE_TOKENS;
    if (position >= a->first_pos + a->n_rows)
        return;
    const char *half = page_at(a, position) + (values ? bytes : 0);
    for (size_t at = 0; at < bytes; at += 64)
        v_prefetch(half + at);
}

/* Positions of the block that a line sees. */
HR_INLINE uint32_t seen_in_block(const hr_attention_args *a, size_t line, uint32_t block) {
    uint32_t n = a->first_pos + (uint32_t)(line / a->n_heads) + 1;
    if (n <= block)
        return 0;
    return n - block < HR_ATTN_BLOCK ? n - block : HR_ATTN_BLOCK;
}

/* Scores to rounded probabilities, in place; lanes past n become +0. */
HR_INLINE void softmax_line(hr_compute c, float *s, uint32_t n, float scale, float *m_b,
                            float *l_b) {
    v16 m = v_set(-INFINITY), sum = v_zero();
    for (uint32_t i = 0; i < n; i += 16) {
        v16 v = v_first_n(v_mul(v_load(s + i), v_set(scale)), n - i, -INFINITY);
        m = v_max(m, v);
        v_store(s + i, v);
    }
    *m_b = lane_max(m);
    v16 shift = v_set(shift_of(*m_b));
    for (uint32_t i = 0; i < n; i += 16) {
        v16 p = v_exp(v_sub(v_load(s + i), shift));
        if (c == HR_COMPUTE_BF16)
            p = v_round_bf16(p);
        sum = v_add(sum, p);
        v_store(s + i, p);
    }
    *l_b = lane_tree(sum);
}

/* One line's share of a page of which it sees only the first n < 32 positions. */
HR_INLINE void partial_page(hr_compute c, size_t panels, const float *p, const char *values,
                            uint32_t n, float *o, bool from_zero) {
    for (size_t panel = 0; panel < panels; panel++, values += leaf_bytes(c)) {
        v16 even = v_zero(), odd = v_zero();
        for (uint32_t i = 0; i < n; i++) {
            const char *pair = values + i / 2 * pair_bytes(c);
            if (i % 2 == 0)
                even = v_fma(v_set(p[i]), load_weights(c, pair, 0), even);
            else
                odd = v_fma(v_set(p[i]), load_weights(c, pair, 1), odd);
        }
        v16 acc = from_zero ? v_zero() : v_load(o + panel * HR_PANEL);
        v_store(o + panel * HR_PANEL, v_add(acc, v_add(even, odd)));
    }
}

/* The first n probabilities of a line as words, in place; n is a multiple of HR_LEAF. */
HR_INLINE void probabilities_to_words(hr_compute c, float *p, uint32_t n) {
#if HR_TILE_DOT
    for (uint32_t i = 0; dots(c) && i < n; i += HR_LEAF)
        v_store(p + i / 2, v_words_of_floats(v_load(p + i), v_load(p + i + 16)));
#else
    (void)c;
    (void)p;
    (void)n;
#endif
}

/* Pages that the last of a tile's lines sees of a block. */
HR_INLINE uint32_t pages_of(const uint32_t *seen, size_t lines) {
    return (seen[lines - 1] + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS;
}

/* block_o = P * V for the lines of a tile. Pages that all lines see whole go through the tile; what
 * is left of each line goes alone. */
HR_INLINE void block_values(hr_compute c, const attention_state *st, uint32_t block, size_t lines,
                            const uint32_t *seen, bool fetch) {
    const size_t panels = st->padded / HR_PANEL;
    const size_t values_at = hr_kv_slot_bytes(c, st->a->head_dim) / 2;
    const uint32_t shared = seen[0] / HR_KV_PAGE_TOKENS * HR_KV_PAGE_TOKENS;
    for (size_t i = 0; i < lines; i++)
        probabilities_to_words(c, st->scores + i * SCORE_STRIDE, shared);
    const uint32_t n_pages = pages_of(seen, lines);
    for (uint32_t at = 0; at < shared; at += HR_KV_PAGE_TOKENS) {
        if (fetch)
            fetch_half(c, st->a, block, n_pages, n_pages + at / HR_KV_PAGE_TOKENS + FETCH_AHEAD);
        tile_panels(c, LEAF, lines, panels, st->scores + words_of(c, at), SCORE_STRIDE,
                    page_at(st->a, block + at) + values_at, leaf_bytes(c), 1, st->block_o,
                    st->padded, at == 0);
    }
    for (size_t i = 0; i < lines; i++)
        for (uint32_t at = shared; at < seen[i]; at += HR_KV_PAGE_TOKENS) {
            uint32_t n = seen[i] - at < HR_KV_PAGE_TOKENS ? seen[i] - at : HR_KV_PAGE_TOKENS;
            partial_page(c, panels, st->scores + i * SCORE_STRIDE + at,
                         page_at(st->a, block + at) + values_at, n, st->block_o + i * st->padded,
                         at == 0);
        }
}

/* Merges a block into a line. */
HR_INLINE void merge_block(attention_state *st, size_t line, bool first, float m_b, float l_b,
                           const float *block_o) {
    float *o = st->o + line * st->padded;
    if (first) {
        st->m[line] = m_b;
        st->l[line] = l_b;
        for (size_t d = 0; d < st->padded; d += 16)
            v_store(o + d, v_add(v_load(block_o + d), v_zero()));
        return;
    }
    float m = max_of(st->m[line], m_b), shift = shift_of(m);
    float keep = exp_of(st->m[line] - shift), take = exp_of(m_b - shift);
    st->m[line] = m;
    st->l[line] = fmaf(l_b, take, st->l[line] * keep);
    for (size_t d = 0; d < st->padded; d += 16) {
        v16 canonical = v_add(v_load(block_o + d), v_zero());
        v_store(o + d, v_fma(canonical, v_set(take), v_mul(v_load(o + d), v_set(keep))));
    }
}

HR_INLINE float *partial_of(const hr_attention_args *a, size_t block, size_t head) {
    return a->partials + (block * a->n_heads + head) * hr_attention_partial_floats(a->head_dim);
}

/* Leaves a block's results for attention_merge. */
HR_INLINE void keep_block(const attention_state *st, size_t head, uint32_t block, float m_b,
                          float l_b, const float *block_o) {
    float *to = partial_of(st->a, block / HR_ATTN_BLOCK, head);
    for (size_t d = 0; d < st->padded; d += 16)
        v_store(to + d, v_load(block_o + d));
    to[st->padded] = m_b;
    to[st->padded + 1] = l_b;
}

/* Lines [line, line + lines) of the group that begins at line `group` meet one block. */
HR_INLINE void attend_tile(hr_compute c, attention_state *st, size_t group, size_t line,
                           size_t lines, uint32_t block) {
    const hr_attention_args *a = st->a;
    uint32_t seen[HR_TILE_ROWS] = {0};
    for (size_t i = 0; i < lines; i++)
        seen[i] = seen_in_block(a, group + line + i, block);
    const uint32_t n_pages = pages_of(seen, lines);
    for (uint32_t at = 0; at < seen[lines - 1]; at += HR_KV_PAGE_TOKENS) {
        if (line == 0)
            fetch_half(c, a, block, n_pages, at / HR_KV_PAGE_TOKENS + FETCH_AHEAD);
        tile_panels(c, LEAF, lines, PAGE_PANELS, st->q + line * st->padded, st->padded,
                    page_at(a, block + at), st->padded * HR_PANEL * hr_compute_bytes(c),
                    st->padded / HR_LEAF, st->scores + at, SCORE_STRIDE, true);
    }
    float m_b[HR_TILE_ROWS] = {0}, l_b[HR_TILE_ROWS] = {0};
    for (size_t i = 0; i < lines; i++)
        softmax_line(c, st->scores + i * SCORE_STRIDE, seen[i], a->scale, &m_b[i], &l_b[i]);
    block_values(c, st, block, lines, seen, line == 0);
    for (size_t i = 0; i < lines; i++) {
        const float *block_o = st->block_o + i * st->padded;
        if (a->partials != NULL)
            keep_block(st, group + line + i, block, m_b[i], l_b[i], block_o);
        else if (seen[i] > 0)
            merge_block(st, line + i, block == 0, m_b[i], l_b[i], block_o);
    }
}

/* Writes what line i of the state holds, which is line `of_all` of the call. */
HR_INLINE void store_line(hr_compute c, const attention_state *st, size_t i, size_t of_all) {
    const hr_attention_args *a = st->a;
    size_t row = of_all / a->n_heads, head = of_all % a->n_heads;
    for (uint32_t d = 0; d < a->head_dim; d += 16)
        store_n(c, a->out, row * a->ldo + head * a->out_head_stride + d,
                v_div(v_load(st->o + i * st->padded + d), v_set(st->l[i])), a->head_dim - d);
}

HR_INLINE void attend_group(hr_compute c, attention_state *st, size_t group, size_t lines) {
    const hr_attention_args *a = st->a;
    const size_t element = hr_compute_bytes(c);
    for (uint32_t i = 0; i < FETCH_AHEAD; i++)
        fetch_half(c, a, 0, HR_ATTN_BLOCK / HR_KV_PAGE_TOKENS, i);
    for (size_t i = 0; i < lines; i++) {
        size_t row = (group + i) / a->n_heads, head = (group + i) % a->n_heads;
        to_words(c, (const char *)a->q + (row * a->ldq + head * a->head_stride) * element,
                 st->padded, st->q + i * st->padded);
    }
    for (uint32_t block = 0; seen_in_block(a, group + lines - 1, block) > 0; block += HR_ATTN_BLOCK)
        for (size_t line = 0; line < lines; line += HR_TILE_ROWS)
            attend_tile(c, st, group, line,
                        lines - line < HR_TILE_ROWS ? lines - line : HR_TILE_ROWS, block);
    for (size_t i = 0; a->partials == NULL && i < lines; i++)
        store_line(c, st, i, group + i);
}

HR_INLINE void attention(hr_compute c, const hr_attention_args *a) {
    attention_state st = {.a = a, .padded = hr_round_up(a->head_dim, HR_LEAF)};
    st.q = a->scratch;
    st.o = st.q + LINES * st.padded;
    st.block_o = st.o + LINES * st.padded;
    st.scores = st.block_o + HR_TILE_ROWS * st.padded;
    size_t lines = (size_t)a->n_rows * a->n_heads;
    for (size_t group = 0; group < lines; group += LINES)
        attend_group(c, &st, group, lines - group < LINES ? lines - group : LINES);
}

HR_INLINE void merge(hr_compute c, const hr_attention_args *a) {
    attention_state st = {.a = a, .padded = hr_round_up(a->head_dim, HR_LEAF)};
    st.o = a->scratch;
    for (size_t head = 0; head < a->n_heads; head++) {
        for (uint32_t block = 0; block * HR_ATTN_BLOCK <= a->first_pos; block++) {
            const float *partial = partial_of(a, block, head);
            merge_block(&st, 0, block == 0, partial[st.padded], partial[st.padded + 1], partial);
        }
        store_line(c, &st, 0, head);
    }
}

void HR_TIER(attention_bf16)(const hr_attention_args *a) {
    attention(HR_COMPUTE_BF16, a);
}

void HR_TIER(attention_f32)(const hr_attention_args *a) {
    attention(HR_COMPUTE_F32, a);
}

void HR_TIER(attention_merge_bf16)(const hr_attention_args *a) {
    merge(HR_COMPUTE_BF16, a);
}

void HR_TIER(attention_merge_f32)(const hr_attention_args *a) {
    merge(HR_COMPUTE_F32, a);
}
