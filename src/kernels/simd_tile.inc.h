/* Register tiles: a few rows by a few panels, the innermost loops of linear layers, LoRA and
 * attention.
 *
 * Weights are panels as packed. Rows are "words": floats (bf16 ones were widened before), or, where
 * the instruction set multiplies bf16 (HR_TILE_DOT), words of the two inputs that come next in a
 * chain, of which one instruction takes both steps. Everything is inlined with constant sizes, so
 * that sums stay in registers; HR_TILE_ROWS and the like come from the instruction set. */
#include "kernels/kernels.h"

#ifdef HR_KERNELS_SMALL_CODE /* unoptimised and sanitized builds: same steps, no specialised       \
                                copies */
#define HR_INLINE static
#else
#define HR_INLINE static inline __attribute__((always_inline))
#endif
#ifdef HR_KERNELS_SMALL_CODE
#define HR_UNROLL
#define HR_UNROLL_4
#elif defined(__clang__)
#define HR_UNROLL _Pragma("clang loop unroll(full)")
#define HR_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define HR_UNROLL _Pragma("GCC unroll 32")
#define HR_UNROLL_4 _Pragma("GCC unroll 4")
#endif

/* A leaf: chains of `passes` times over `pairs` pairs of weights (LoRA's bf16 leaf meets its
 * weights twice). */
typedef struct leaf_shape {
    int pairs, passes;
} leaf_shape;

static const leaf_shape LEAF = {HR_LEAF / 2, 1};

/* Bytes of a pair of inputs of a panel, and of a leaf of it. */
HR_INLINE size_t pair_bytes(hr_compute c) {
    return 2 * HR_PANEL * hr_compute_bytes(c);
}

HR_INLINE size_t leaf_bytes(hr_compute c) {
    return HR_LEAF * HR_PANEL * hr_compute_bytes(c);
}

/* The even (which = 0) or odd (1) weights of a pair. */
HR_INLINE v16 load_weights(hr_compute c, const char *pair, int which) {
    if (c == HR_COMPUTE_F32)
        return v_load((const float *)(const void *)pair + which * HR_PANEL);
    return which == 0 ? v_load_even(pair) : v_load_odd(pair);
}

HR_INLINE bool dots(hr_compute c) {
    return HR_TILE_DOT && c == HR_COMPUTE_BF16;
}

/* Words that n inputs of a row take; n is a multiple of HR_LORA_LEAF. */
HR_INLINE size_t words_of(hr_compute c, size_t n) {
    return dots(c) ? n / 2 : n;
}

/* Bytes of a panel that one step (an even word and an odd word of a row) meets. */
HR_INLINE size_t step_bytes(hr_compute c) {
    return dots(c) ? 2 * pair_bytes(c) : pair_bytes(c);
}

/* The weights of a step's even (which = 0) or odd (1) word. */
HR_INLINE v16 load_step(hr_compute c, const char *w, int which) {
#if HR_TILE_DOT
    if (dots(c))
        return v_load_weight_words(w, which);
#endif
    return load_weights(c, w, which);
}

HR_INLINE v16 go_on(hr_compute c, v16 words, v16 weights, v16 chain) {
#if HR_TILE_DOT
    if (dots(c))
        return v_dot(words, weights, chain);
#endif
    (void)c;
    return v_fma(words, weights, chain);
}

/* Where a tile should fetch ahead: the same leaves of the panels that come next, bytes [begin, end)
 * of each. */
typedef struct prefetch {
    const char *w; /* NULL: nowhere */
    size_t begin, end;
} prefetch;

static const prefetch NO_PREFETCH = {NULL, 0, 0};

/* The steps of chains [first, last] (0 even, 1 odd) for one leaf; chain[which][row * panels +
 * panel]. */
HR_INLINE void leaf_chains(hr_compute c, leaf_shape shape, const int rows, const int panels,
                           const int first, const int last, const float *x, size_t ldx,
                           const char *w, size_t panel_bytes,
                           v16 chain[2][HR_TILE_ROWS * HR_TILE_PANELS]) {
    HR_UNROLL for (int which = first; which <= last; which++)
        HR_UNROLL for (int i = 0; i < rows * panels; i++) chain[which][i] = v_zero();
    const int steps = dots(c) ? shape.pairs / 2 : shape.pairs;
    for (int pass = 0; pass < shape.passes; pass++) {
        const float *xp = x + 2 * pass * steps;
        HR_UNROLL_4 for (int j = 0; j < steps; j++) {
            v16 weights[2][HR_TILE_PANELS];
            HR_UNROLL for (int p = 0; p < panels; p++)
                HR_UNROLL for (int which = first; which <= last; which++) weights[which][p] =
                    load_step(c, w + (size_t)p * panel_bytes + (size_t)j * step_bytes(c), which);
            HR_UNROLL for (int r = 0; r < rows; r++)
                HR_UNROLL for (int which = first; which <= last; which++) {
                v16 words = v_set(xp[(size_t)r * ldx + 2 * (size_t)j + (size_t)which]);
                HR_UNROLL for (int p = 0; p < panels; p++) chain[which][r * panels + p] =
                    go_on(c, words, weights[which][p], chain[which][r * panels + p]);
            }
        }
    }
}

/* y[rows][panels * 16] goes on by n_leaves leaves (from +0 when from_zero). x: row stride ldx
 * words. w: panels panel_bytes apart. */
HR_INLINE void tile(hr_compute c, leaf_shape shape, const int rows, const int panels,
                    const float *x, size_t ldx, const char *w, size_t panel_bytes, size_t n_leaves,
                    float *y, size_t ldy, bool from_zero, prefetch ahead) {
    const size_t step = (size_t)shape.pairs * pair_bytes(c);
    for (size_t leaf = 0; leaf < n_leaves; leaf++) {
        v16 chain[2][HR_TILE_ROWS * HR_TILE_PANELS];
        const char *wl = w + leaf * step;
        const float *xl = x + leaf * words_of(c, 2 * (size_t)(shape.pairs * shape.passes));
#if HR_TILE_SPLIT
        leaf_chains(c, shape, rows, panels, 0, 0, xl, ldx, wl, panel_bytes, chain);
        leaf_chains(c, shape, rows, panels, 1, 1, xl, ldx, wl, panel_bytes, chain);
#else
        leaf_chains(c, shape, rows, panels, 0, 1, xl, ldx, wl, panel_bytes, chain);
#endif
        if (ahead.w != NULL)
            for (int p = 0; p < panels; p++)
                for (size_t b = ahead.begin; b < ahead.end; b += 64)
                    v_prefetch(ahead.w + (size_t)p * panel_bytes + leaf * step + b);
        HR_UNROLL for (int r = 0; r < rows; r++) HR_UNROLL for (int p = 0; p < panels; p++) {
            float *out = y + (size_t)r * ldy + p * HR_PANEL;
            v16 acc = from_zero && leaf == 0 ? v_zero() : v_load(out);
            v_store(out, v_add(acc, v_add(chain[0][r * panels + p], chain[1][r * panels + p])));
        }
    }
}

/* tile for a number of rows known at run time, 1 <= rows <= HR_TILE_ROWS. */
HR_INLINE void tile_rows(hr_compute c, leaf_shape shape, size_t rows, const int panels,
                         const float *x, size_t ldx, const char *w, size_t panel_bytes,
                         size_t n_leaves, float *y, size_t ldy, bool from_zero, prefetch ahead) {
    switch (rows) {
#define HR_CASE(n)                                                                                 \
    case n:                                                                                        \
        tile(c, shape, n, panels, x, ldx, w, panel_bytes, n_leaves, y, ldy, from_zero, ahead);     \
        break;
        HR_CASE(1)
        HR_CASE(2)
        HR_CASE(3)
        HR_CASE(4)
        HR_CASE(5)
        HR_CASE(6)
#undef HR_CASE
    }
}

/* tile_rows over any number of panels: as many at a time as fit in registers. */
HR_INLINE void tile_panels(hr_compute c, leaf_shape shape, size_t rows, size_t n_panels,
                           const float *x, size_t ldx, const char *w, size_t panel_bytes,
                           size_t n_leaves, float *y, size_t ldy, bool from_zero) {
    size_t p = 0;
    for (; p + HR_TILE_PANELS <= n_panels; p += HR_TILE_PANELS)
        tile_rows(c, shape, rows, HR_TILE_PANELS, x, ldx, w + p * panel_bytes, panel_bytes,
                  n_leaves, y + p * HR_PANEL, ldy, from_zero, NO_PREFETCH);
    if (p < n_panels)
        tile_rows(c, shape, rows, 1, x, ldx, w + p * panel_bytes, panel_bytes, n_leaves,
                  y + p * HR_PANEL, ldy, from_zero, NO_PREFETCH);
}

/* n compute elements of a row as words; n is a multiple of HR_LEAF. */
HR_INLINE void to_words(hr_compute c, const void *x, size_t n, float *out) {
#if HR_TILE_DOT
    if (dots(c)) {
        for (size_t i = 0; i < n; i += HR_LEAF)
            v_store(out + i / 2, v_load_words((const uint16_t *)x + i));
        return;
    }
#endif
    for (size_t i = 0; i < n; i += 16)
        v_store(out + i, c == HR_COMPUTE_BF16 ? v_load_bf16((const uint16_t *)x + i)
                                              : v_load((const float *)x + i));
}

/* Rounds the first n <= 16 lanes into compute elements. */
HR_INLINE void store_n(hr_compute c, void *out, size_t at, v16 x, uint32_t n) {
    if (c == HR_COMPUTE_BF16)
        v_store_bf16_n((uint16_t *)out + at, x, n);
    else
        v_store_n((float *)out + at, x, n);
}
