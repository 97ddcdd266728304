/* What one forward step is made of: the rows of a step plan that this rank computes.
 *
 * The engine plans, the model only reads. A row is one token of one sequence. Sequences are
 * contiguous in rows; the engine orders them so that those of one adapter are neighbours (fewer
 * segments, same bits). */
#ifndef HR_MODEL_VIEW_H
#define HR_MODEL_VIEW_H

#include <stdint.h>

typedef struct hr_lora hr_lora; /* model/lora.h */

typedef struct hr_seq_view {
    uint32_t first_row, n_rows; /* this sequence's rows in the step */
    uint32_t first_pos;         /* absolute position of its first row */
    const uint32_t *pages;      /* page ids of positions [0, first_pos + n_rows) */
    const hr_lora *lora;        /* NULL = base model */
} hr_seq_view;

typedef struct hr_view {
    uint32_t n_rows;
    const uint32_t *tokens; /* [n_rows], each < vocab_size */
    uint32_t n_seqs;
    const hr_seq_view *seqs; /* in row order, covering all rows */
    uint32_t n_logit_rows;
    const uint32_t *logit_rows; /* ascending rows whose logits are wanted */
} hr_view;

/* Called inside the step's pool job, on every worker, once per block of logit rows: logits of
 * logit_rows[first .. first + n) stand in logits[i * ld], vocab_size each, float, and may be
 * overwritten. All workers get the same block at the same time and share the work by index; the
 * model waits for all of them before it goes on. scratch: HR_SCRATCH_BYTES of this worker. */
typedef void (*hr_logits_fn)(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                             void *scratch, unsigned worker, unsigned n_workers);

#endif
