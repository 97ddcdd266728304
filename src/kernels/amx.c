/* The AMX tier: bf16 linear layers of eight rows or more on tiles, everything else as in avx512.
 *
 * A tile product is a leaf for 16 rows and 16 outputs by definition of the arithmetic: rows of x
 * are read where they lie, a panel's leaf is a tile as packed. Two row tiles by two panels share
 * four sums. */
#include "kernels/amx.h"

#include "kernels/tiers.h"
#include "kernels/trial.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HR_TIER(op) hr_avx512_##op
#include "kernels/tier_decl.inc.h"

enum {
    MIN_ROWS = 8, /* below, the vector path reads the same weights as fast */
    TILE_ROWS = 16,
    ROW_BLOCK = 256,   /* rows of x that stay in the second cache.. */
    INPUT_BLOCK = 1024 /* ..with these inputs */
};

/* Tile registers: sums of (row tile, panel), then rows, then panels. Macros, because gcc pastes the
 * number into the instruction. */
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define ROWS_0 4
#define ROWS_1 5
#define PANEL_0 6
#define PANEL_1 7

static void configure(size_t rows_0, size_t rows_1) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t column_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    for (int t = 0; t < 8; t++)
        config.column_bytes[t] = 64;
    config.rows[SUM_00] = config.rows[SUM_01] = config.rows[ROWS_0] = (uint8_t)rows_0;
    /* A register needs at least one row even where it stays unused. */
    config.rows[SUM_10] = config.rows[SUM_11] = config.rows[ROWS_1] =
        (uint8_t)(rows_1 > 0 ? rows_1 : 1);
    config.rows[PANEL_0] = config.rows[PANEL_1] = TILE_ROWS;
    _tile_loadconfig(&config);
}

/* The memory that one step of two row tiles by two panels works on. */
typedef struct tile_step {
    const uint16_t *x;
    size_t x_stride; /* bytes */
    const char *w;
    size_t panel_bytes;
    float *y;
    size_t y_stride; /* bytes */
    size_t n_leaves;
    bool from_zero, second_rows, second_panel;
} tile_step;

static float *sum_at(const tile_step *s, int row_tile, int panel) {
    return (float *)(void *)((char *)s->y + (size_t)(row_tile * TILE_ROWS) * s->y_stride) +
           panel * HR_PANEL;
}

static void load_sums(const tile_step *s) {
    _tile_zero(SUM_00);
    _tile_zero(SUM_01);
    _tile_zero(SUM_10);
    _tile_zero(SUM_11);
    if (s->from_zero)
        return;
    _tile_loadd(SUM_00, sum_at(s, 0, 0), s->y_stride);
    if (s->second_panel)
        _tile_loadd(SUM_01, sum_at(s, 0, 1), s->y_stride);
    if (s->second_rows)
        _tile_loadd(SUM_10, sum_at(s, 1, 0), s->y_stride);
    if (s->second_rows && s->second_panel)
        _tile_loadd(SUM_11, sum_at(s, 1, 1), s->y_stride);
}

static void store_sums(const tile_step *s) {
    _tile_stored(SUM_00, sum_at(s, 0, 0), s->y_stride);
    if (s->second_panel)
        _tile_stored(SUM_01, sum_at(s, 0, 1), s->y_stride);
    if (s->second_rows)
        _tile_stored(SUM_10, sum_at(s, 1, 0), s->y_stride);
    if (s->second_rows && s->second_panel)
        _tile_stored(SUM_11, sum_at(s, 1, 1), s->y_stride);
}

static void run_step(const tile_step *s) {
    const size_t leaf_bytes = HR_LEAF * HR_PANEL * 2;
    const char *second_x = (const char *)s->x + TILE_ROWS * s->x_stride;
    load_sums(s);
    for (size_t leaf = 0; leaf < s->n_leaves; leaf++) {
        _tile_loadd(ROWS_0, s->x + leaf * HR_LEAF, s->x_stride);
        _tile_loadd(PANEL_0, s->w + leaf * leaf_bytes, 64);
        _tile_dpbf16ps(SUM_00, ROWS_0, PANEL_0);
        if (s->second_panel) {
            _tile_loadd(PANEL_1, s->w + s->panel_bytes + leaf * leaf_bytes, 64);
            _tile_dpbf16ps(SUM_01, ROWS_0, PANEL_1);
        }
        if (s->second_rows) {
            _tile_loadd(ROWS_1, second_x + leaf * HR_LEAF * 2, s->x_stride);
            _tile_dpbf16ps(SUM_10, ROWS_1, PANEL_0);
            if (s->second_panel)
                _tile_dpbf16ps(SUM_11, ROWS_1, PANEL_1);
        }
    }
    store_sums(s);
}

/* Rows [row, end) in steps of one configuration: 32 rows at a time, or once what is left. */
static void rows_by_panels(const hr_gemm_args *a, size_t row, size_t end, size_t begin, size_t n) {
    const size_t panel_bytes = (size_t)a->k * HR_PANEL * 2;
    for (size_t panel = a->panel_begin; panel < a->panel_end; panel += 2)
        for (size_t r = row; r < end; r += 2 * TILE_ROWS)
            run_step(&(tile_step){
                .x = (const uint16_t *)a->x + r * a->ldx + begin,
                .x_stride = a->ldx * 2,
                .w = (const char *)a->w + panel * panel_bytes + begin * HR_PANEL * 2,
                .panel_bytes = panel_bytes,
                .y = a->y + r * a->ldy + panel * HR_PANEL,
                .y_stride = a->ldy * sizeof(float),
                .n_leaves = n / HR_LEAF,
                .from_zero = begin == 0 && !a->accumulate,
                .second_rows = end - r > TILE_ROWS,
                .second_panel = panel + 1 < a->panel_end,
            });
}

static void rows_by_inputs(const hr_gemm_args *a, size_t row, size_t end) {
    for (size_t begin = 0; begin < a->k; begin += INPUT_BLOCK)
        rows_by_panels(a, row, end, begin, a->k - begin < INPUT_BLOCK ? a->k - begin : INPUT_BLOCK);
}

static void gemm_bf16(const hr_gemm_args *a) {
    if (a->m < MIN_ROWS) {
        hr_avx512_gemm_bf16(a);
        return;
    }
    size_t whole = a->m / (2 * TILE_ROWS) * (2 * TILE_ROWS), rest = a->m - whole;
    if (whole > 0)
        configure(TILE_ROWS, TILE_ROWS);
    for (size_t row = 0; row < whole; row += ROW_BLOCK)
        rows_by_inputs(a, row, whole - row < ROW_BLOCK ? whole : row + ROW_BLOCK);
    if (rest > 0) {
        configure(rest < TILE_ROWS ? rest : TILE_ROWS, rest < TILE_ROWS ? 0 : rest - TILE_ROWS);
        rows_by_inputs(a, whole, a->m);
    }
    _tile_release();
}

const hr_kernels hr_kernels_amx = {
    .name = "amx",
    .gemm[HR_COMPUTE_BF16] = gemm_bf16,
#include "kernels/tier_table.inc.h"
};

bool hr_amx_present(void) {
    unsigned a, b, c, d;
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx_bf16) != 0 && (d & amx_tile) != 0;
}

const char *hr_amx_refused(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0)
        return "the system does not permit it";
    return hr_kernels_trial(&hr_kernels_amx) ? NULL : "a trial product differs from the reference";
}
