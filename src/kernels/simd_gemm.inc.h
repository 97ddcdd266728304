/* Linear layers and LoRA over register tiles.
 *
 * One or two rows: weights are streamed once, in memory order, several leaves of one panel side by
 * side (leaves do not depend on each other before they are added), so that only memory bounds the
 * speed. More rows: rows are cut into blocks that stay in the second cache, inputs into blocks
 * whose panels stay in the first; chains go on through y, which is exact. */

enum {
    STREAM_AHEAD = 4096, /* bytes fetched ahead of the stream of weights */
    STREAM_ROWS = 2,
    ROW_BLOCK = 16 * HR_TILE_ROWS,
    INPUT_BLOCK = 1024,
    SCRATCH_FLOATS = HR_SCRATCH_BYTES / 4
};

/* Rows as words: x itself for F32, made in scratch for bf16. Returns the row stride. */
HR_INLINE size_t rows_to_words(hr_compute c, const void *x, size_t ldx, size_t rows, size_t begin,
                               size_t n, float *scratch, const float **out) {
    if (c == HR_COMPUTE_F32) {
        *out = (const float *)x + begin;
        return ldx;
    }
    /* An odd number of cache lines, so that rows do not fall on the same sets. */
    size_t stride = (words_of(c, n) / 16 | 1) * 16;
    for (size_t r = 0; r < rows; r++)
        to_words(c, (const uint16_t *)x + r * ldx + begin, n, scratch + r * stride);
    *out = scratch;
    return stride;
}

/* acc[rows] goes on by `leaves` leaves of one panel. */
HR_INLINE void stream_leaves(hr_compute c, const int rows, const int leaves, const float *x,
                             size_t ldx, const char *w, v16 *acc) {
    v16 even[8], odd[8];
    HR_UNROLL for (int i = 0; i < rows * leaves; i++) even[i] = odd[i] = v_zero();
    const size_t words = words_of(c, HR_LEAF);
    HR_UNROLL_4 for (size_t j = 0; j < words / 2; j++) {
        HR_UNROLL for (int l = 0; l < leaves; l++) {
            const char *step = w + (size_t)l * leaf_bytes(c) + j * step_bytes(c);
            v16 w_even = load_step(c, step, 0), w_odd = load_step(c, step, 1);
            HR_UNROLL for (size_t b = 0; b < step_bytes(c); b += 64)
                v_prefetch(step + STREAM_AHEAD + b);
            HR_UNROLL for (int r = 0; r < rows; r++) {
                const float *xl = x + (size_t)r * ldx + (size_t)l * words + 2 * j;
                even[r * leaves + l] = go_on(c, v_set(xl[0]), w_even, even[r * leaves + l]);
                odd[r * leaves + l] = go_on(c, v_set(xl[1]), w_odd, odd[r * leaves + l]);
            }
        }
    }
    HR_UNROLL for (int l = 0; l < leaves; l++) HR_UNROLL for (int r = 0; r < rows; r++) acc[r] =
        v_add(acc[r], v_add(even[r * leaves + l], odd[r * leaves + l]));
}

HR_INLINE void stream_panels(hr_compute c, const int rows, const hr_gemm_args *a) {
    const int side = HR_STREAM_LEAVES(rows);
    const size_t n_leaves = a->k / HR_LEAF;
    const float *x;
    size_t ldx = rows_to_words(c, a->x, a->ldx, rows, 0, a->k, a->scratch, &x);
    const char *w = (const char *)a->w + a->panel_begin * n_leaves * leaf_bytes(c);
    for (uint32_t panel = a->panel_begin; panel < a->panel_end;
         panel++, w += n_leaves * leaf_bytes(c)) {
        float *y = a->y + (size_t)panel * HR_PANEL;
        v16 acc[STREAM_ROWS];
        HR_UNROLL for (int r = 0; r < rows; r++) acc[r] =
            a->accumulate ? v_load(y + (size_t)r * a->ldy) : v_zero();
        size_t leaf = 0;
        for (; leaf + (size_t)side <= n_leaves; leaf += (size_t)side)
            stream_leaves(c, rows, side, x + leaf * words_of(c, HR_LEAF), ldx,
                          w + leaf * leaf_bytes(c), acc);
        for (; side > 2 && leaf + 2 <= n_leaves; leaf += 2)
            stream_leaves(c, rows, 2, x + leaf * words_of(c, HR_LEAF), ldx,
                          w + leaf * leaf_bytes(c), acc);
        for (; leaf < n_leaves; leaf++)
            stream_leaves(c, rows, 1, x + leaf * words_of(c, HR_LEAF), ldx,
                          w + leaf * leaf_bytes(c), acc);
        HR_UNROLL for (int r = 0; r < rows; r++) v_store(y + (size_t)r * a->ldy, acc[r]);
    }
}

/* All panels for rows [row, row + rows) and inputs [begin, begin + n). While a group of panels is
 * worked on, the next group is fetched, each tile of rows fetching its share. */
HR_INLINE void gemm_block(hr_compute c, const hr_gemm_args *a, size_t row, size_t rows,
                          size_t begin, size_t n) {
    const size_t element = hr_compute_bytes(c), panel_bytes = a->k * HR_PANEL * element;
    const size_t tiles = (rows + HR_TILE_ROWS - 1) / HR_TILE_ROWS;
    const bool from_zero = begin == 0 && !a->accumulate;
    const float *x;
    size_t ldx = rows_to_words(c, (const char *)a->x + row * a->ldx * element, a->ldx, rows, begin,
                               n, a->scratch, &x);
    for (size_t panel = a->panel_begin; panel < a->panel_end; panel += HR_TILE_PANELS) {
        const char *w = (const char *)a->w + panel * panel_bytes + begin * HR_PANEL * element;
        const bool full = panel + HR_TILE_PANELS <= a->panel_end;
        const bool more = panel + 2 * HR_TILE_PANELS <= a->panel_end;
        for (size_t t = 0; t < tiles; t++) {
            size_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
            const float *xt = x + first * ldx;
            float *y = a->y + (row + first) * a->ldy + panel * HR_PANEL;
            prefetch ahead = {more ? w + HR_TILE_PANELS * panel_bytes : NULL,
                              leaf_bytes(c) * t / tiles / 64 * 64,
                              leaf_bytes(c) * (t + 1) / tiles / 64 * 64};
            if (full)
                tile_rows(c, LEAF, end - first, HR_TILE_PANELS, xt, ldx, w, panel_bytes,
                          n / HR_LEAF, y, a->ldy, from_zero, ahead);
            else
                tile_rows(c, LEAF, end - first, 1, xt, ldx, w, panel_bytes, n / HR_LEAF, y, a->ldy,
                          from_zero, ahead);
        }
    }
}

HR_INLINE void gemm(hr_compute c, const hr_gemm_args *a) {
    bool stream_fits = (a->k / 16 + 1) * 16 * STREAM_ROWS <= SCRATCH_FLOATS;
    if (a->m == 1 && stream_fits) {
        stream_panels(c, 1, a);
        return;
    }
    if (a->m == 2 && stream_fits) {
        stream_panels(c, 2, a);
        return;
    }
    size_t row_blocks = (a->m + ROW_BLOCK - 1) / ROW_BLOCK;
    size_t leaves = a->k / HR_LEAF, input_blocks = (a->k + INPUT_BLOCK - 1) / INPUT_BLOCK;
    for (size_t rb = 0; rb < row_blocks; rb++) {
        size_t row = a->m * rb / row_blocks, row_end = a->m * (rb + 1) / row_blocks;
        for (size_t ib = 0; ib < input_blocks; ib++) {
            size_t begin = leaves * ib / input_blocks * HR_LEAF;
            size_t end = leaves * (ib + 1) / input_blocks * HR_LEAF;
            gemm_block(c, a, row, row_end - row, begin, end - begin);
        }
    }
}

void HR_TIER(gemm_bf16)(const hr_gemm_args *a) {
    gemm(HR_COMPUTE_BF16, a);
}

void HR_TIER(gemm_f32)(const hr_gemm_args *a) {
    gemm(HR_COMPUTE_F32, a);
}

void HR_TIER(lora_split_bf16)(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves,
                              float scale, void *out, size_t ldout) {
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t leaf = 0; leaf < n_leaves; leaf++) {
            uint16_t *to = (uint16_t *)out + row * ldout + leaf * HR_LEAF;
            v16 v = v_mul(v_set(scale), v_load(h + row * ldh + leaf * HR_LORA_LEAF));
            v_store_bf16_n(to, v, 16);
            v_store_bf16_n(to + HR_LORA_LEAF, v_sub(v, v_round_bf16(v)), 16);
        }
}

void HR_TIER(lora_split_f32)(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                             void *out, size_t ldout) {
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t leaf = 0; leaf < n_leaves; leaf++)
            v_store((float *)out + row * ldout + leaf * HR_LORA_LEAF,
                    v_mul(v_set(scale), v_load(h + row * ldh + leaf * HR_LORA_LEAF)));
}

/* Some leaves of all panels for some rows. B is read once from memory: all rows meet a pair of
 * panels before the next, and the first tile of rows fetches ahead of the stream. A bf16 leaf meets
 * its weights twice, and compilers keep them in registers in between, which leaves room for the
 * chains of fewer rows. */
HR_INLINE void expand_block(hr_compute c, leaf_shape shape, size_t rows, size_t n_panels,
                            const float *h, size_t ldh, const char *b, size_t panel_bytes,
                            size_t leaves, float *y, size_t ldy) {
    const size_t tile = dots(c) ? HR_TILE_ROWS / 2 : HR_TILE_ROWS;
    const size_t tiles = (rows + tile - 1) / tile, leaf = (size_t)shape.pairs * pair_bytes(c);
    const size_t distance = hr_round_up(STREAM_AHEAD, HR_TILE_PANELS * panel_bytes);
    for (size_t panel = 0; panel < n_panels; panel += HR_TILE_PANELS) {
        const char *w = b + panel * panel_bytes;
        for (size_t t = 0; t < tiles; t++) {
            size_t first = rows * t / tiles, n = rows * (t + 1) / tiles - first;
            const float *ht = h + first * ldh;
            float *yt = y + first * ldy + panel * HR_PANEL;
            prefetch ahead = {t == 0 ? w + distance : NULL, 0, leaf};
            if (panel + HR_TILE_PANELS <= n_panels)
                tile_rows(c, shape, n, HR_TILE_PANELS, ht, ldh, w, panel_bytes, leaves, yt, ldy,
                          false, ahead);
            else
                tile_rows(c, shape, n, 1, ht, ldh, w, panel_bytes, leaves, yt, ldy, false, ahead);
        }
    }
}

HR_INLINE void lora_expand(hr_compute c, const hr_lora_expand_args *a) {
    const leaf_shape shape = {HR_LORA_LEAF / 2, c == HR_COMPUTE_BF16 ? 2 : 1};
    const size_t inputs = (size_t)(2 * shape.pairs * shape.passes), element = hr_compute_bytes(c);
    const size_t panel_bytes = a->n_leaves * HR_LORA_LEAF * HR_PANEL * element;
    /* As many leaves at a time as leave room for a block of rows as words. */
    const size_t leaves_block = INPUT_BLOCK / HR_LEAF;
    for (size_t row = 0; row < a->m; row += ROW_BLOCK)
        for (size_t leaf = 0; leaf < a->n_leaves; leaf += leaves_block) {
            size_t rows = a->m - row < ROW_BLOCK ? a->m - row : ROW_BLOCK;
            size_t leaves = a->n_leaves - leaf < leaves_block ? a->n_leaves - leaf : leaves_block;
            const float *h;
            size_t ldh = rows_to_words(c, (const char *)a->h + row * a->ldh * element, a->ldh, rows,
                                       leaf * inputs, leaves * inputs, a->scratch, &h);
            const char *b = (const char *)a->b + a->panel_begin * panel_bytes +
                            leaf * HR_LORA_LEAF * HR_PANEL * element;
            expand_block(c, shape, rows, a->panel_end - a->panel_begin, h, ldh, b, panel_bytes,
                         leaves, a->y + row * a->ldy + (size_t)a->panel_begin * HR_PANEL, a->ldy);
        }
}

void HR_TIER(lora_expand_bf16)(const hr_lora_expand_args *a) {
    lora_expand(HR_COMPUTE_BF16, a);
}

void HR_TIER(lora_expand_f32)(const hr_lora_expand_args *a) {
    lora_expand(HR_COMPUTE_F32, a);
}
