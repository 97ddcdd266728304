/* The plan of one step: which rows of which requests are computed, and whose logits are wanted.
 *
 * Built by the scheduler, read by the model as a hr_view; the arrays are made once, for the largest
 * step. Requests are added in the order of their adapters, so that those of one adapter are
 * neighbours. */
#ifndef HR_ENGINE_PLAN_H
#define HR_ENGINE_PLAN_H

#include "engine/request.h"

/* One logit row: what becomes of it. */
typedef struct hr_plan_task {
    hr_request *request;
    uint32_t position; /* of the row's token; the logits speak of position + 1 */
    uint32_t result;   /* index into the request's results */
    bool draw;         /* else score the prompt token at position + 1 */
} hr_plan_task;

typedef struct hr_plan {
    uint32_t max_rows, max_seqs;
    hr_view view;
    uint32_t *tokens;      /* [max_rows] */
    hr_seq_view *seqs;     /* [max_seqs] */
    hr_request **requests; /* [max_seqs], beside seqs */
    uint32_t *logit_rows;  /* [max_rows] */
    hr_plan_task *tasks;   /* [max_rows], beside logit_rows */
} hr_plan;

hr_status hr_plan_create(uint32_t max_rows, uint32_t max_seqs, const hr_alloc *alloc, hr_plan *out,
                         hr_error *err);
void hr_plan_destroy(hr_plan *plan, const hr_alloc *alloc);

void hr_plan_clear(hr_plan *plan);

/* Adds the next request->step_rows (at least 1) rows of a request that holds the pages for them. */
void hr_plan_add(hr_plan *plan, hr_request *request);

#endif
