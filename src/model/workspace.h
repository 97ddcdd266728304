/* The buffers of a step and what is worked out about it before the workers start. */
#ifndef HR_MODEL_WORKSPACE_H
#define HR_MODEL_WORKSPACE_H

#include "model/attention_plan.h"
#include "model/layout.h"

#include <stdatomic.h>

enum {
    HR_FEW_ROWS = 8,    /* up to here every worker norms all rows itself, which saves a barrier */
    HR_LOGIT_ROWS = 64, /* rows of logits handed out at a time */
    HR_ATTENTION_ROWS = 32,     /* rows of one sequence in an attention task, at most */
    HR_SHRINK_ROWS = 32,        /* rows of one segment in a shrink task, at most */
    HR_SHRINK_RANK = 256,       /* rank for which the shrink buffer holds every row of a step */
    HR_PARTIAL_BYTES = 64 << 20 /* of attention blocks that wait for their merge, at most */
};

/* A maximal run of rows (or of logit rows) with one adapter. Runs of the base are not listed. */
typedef struct hr_segment {
    const hr_lora *lora;
    uint32_t first, n;
} hr_segment;

typedef struct hr_segments {
    hr_segment *items;
    uint32_t n;
    uint32_t max_leaves; /* largest over the adapters of this step */
} hr_segments;

typedef struct hr_worker_buffers {
    char *x;       /* [HR_FEW_ROWS][ldx] compute elements */
    float *heads;  /* [3][head_dim padded] */
    float *shrink; /* [HR_SHRINK_ROWS][HR_MAX_PARTS * HR_PEFT_MAX_RANK] */
    void *scratch; /* HR_SCRATCH_BYTES */
} hr_worker_buffers;

struct hr_model_workspace {
    unsigned n_workers;
    uint32_t max_rows, max_seqs;
    char *arena;
    size_t arena_bytes;

    /* Leading dimensions in elements; each leaves 64 bytes between rows at least, so that rows of a
     * power-of-two width do not fall on the same cache sets. */
    size_t ld_residual, ld_x, ld_y, ld_q, ld_attended, ld_act, ld_logits;
    size_t q_head_stride;
    float *residual; /* [max_rows] */
    char *x;         /* normed rows, compute elements [max_rows] */
    float *y;        /* outputs of a linear [max_rows] */
    char *q;         /* compute elements [max_rows][heads][q_head_stride] */
    char *attended;  /* compute elements [max_rows] */
    char *act;       /* silu(gate) * up, compute elements [max_rows] */
    char *h;         /* shrunk rows of up to HR_MAX_PARTS modules, compute elements */
    size_t h_elements;
    float *logits; /* [HR_LOGIT_ROWS] */

    uint32_t *row_seq, *row_pos; /* [max_rows] */
    hr_segments rows, logit_rows;
    hr_row_tile *tiles;
    uint32_t n_tiles, max_tiles;
    hr_attention_plan attention;
    float *partials;             /* a slot of the plan: hr_attention_partial_floats */
    _Atomic uint32_t *runs_left; /* [split][kv head]: runs of this layer that are not done yet */
    _Atomic uint32_t next_attention_task;
    hr_worker_buffers *workers;
};

/* Fills row_seq, row_pos, segments, tiles and the attention plan for a view. */
void hr_workspace_prepare(hr_model_workspace *ws, const hr_model *model, const hr_view *view);

#endif
