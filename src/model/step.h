/* A running step as its workers see it, and the linear layer that they share. */
#ifndef HR_MODEL_STEP_H
#define HR_MODEL_STEP_H

#include "model/workspace.h"

typedef struct hr_step {
    const hr_model *model;
    const hr_kernels *kernels;
    hr_compute compute;
    hr_model_workspace *ws;
    hr_pool *pool;
    const hr_kv *kv;
    const hr_view *view;
    hr_logits_fn on_logits;
    void *ctx;
} hr_step;

/* y = x W, then each adapter's share on its own rows, then the bias; y's columns are those of
 * linear. */
typedef struct hr_linear_args {
    const hr_linear *linear;
    const char *x; /* compute elements [m][ldx] */
    size_t ldx;
    float *y; /* [m][ldy] */
    size_t ldy;
    uint32_t m;
    const hr_segments *segments;
    uint32_t first_row; /* row of the segments' numbering that row 0 of x and y is */
} hr_linear_args;

typedef struct hr_panels {
    uint32_t begin, end;
} hr_panels;

/* The panels of [0, n) that a worker computes: pairs, which kernels take together. */
hr_panels hr_worker_panels(uint32_t n, unsigned worker, unsigned n_workers);

/* Computes the columns of n_ranges panel ranges. Every worker calls it with its own ranges at the
 * same point of the step: where an adapter takes part it holds barriers, otherwise none. x must be
 * complete for all workers before; the caller puts a barrier before anybody reads another worker's
 * columns and before the next linear. */
void hr_linear_apply(const hr_step *step, unsigned worker, const hr_linear_args *args,
                     const hr_panels *ranges, uint32_t n_ranges);

/* Adds an adapter's share of the embedding of one token to row. For any worker, without barriers.
 */
void hr_lora_embed(const hr_step *step, unsigned worker, const hr_lora *lora, uint32_t token,
                   float *row);

#endif
