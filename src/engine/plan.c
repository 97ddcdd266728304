/* Building the plan of a step. */
#include "engine/plan.h"

#include <string.h>

hr_status hr_plan_create(uint32_t max_rows, uint32_t max_seqs, const hr_alloc *alloc, hr_plan *out,
                         hr_error *err) {
    hr_plan plan = {.max_rows = max_rows, .max_seqs = max_seqs};
    plan.tokens = hr_alloc_array(alloc, max_rows, sizeof *plan.tokens);
    plan.logit_rows = hr_alloc_array(alloc, max_rows, sizeof *plan.logit_rows);
    plan.tasks = hr_alloc_array(alloc, max_rows, sizeof *plan.tasks);
    plan.seqs = hr_alloc_array(alloc, max_seqs, sizeof *plan.seqs);
    plan.requests = hr_alloc_array(alloc, max_seqs, sizeof *plan.requests);
    if (plan.tokens == NULL || plan.logit_rows == NULL || plan.tasks == NULL || plan.seqs == NULL ||
        plan.requests == NULL) {
        hr_plan_destroy(&plan, alloc);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the plan of a step of %u rows",
                       max_rows);
    }
    plan.view = (hr_view){.tokens = plan.tokens, .seqs = plan.seqs, .logit_rows = plan.logit_rows};
    *out = plan;
    return HR_OK;
}

void hr_plan_destroy(hr_plan *plan, const hr_alloc *alloc) {
    hr_alloc_free(alloc, plan->requests);
    hr_alloc_free(alloc, plan->seqs);
    hr_alloc_free(alloc, plan->tasks);
    hr_alloc_free(alloc, plan->logit_rows);
    hr_alloc_free(alloc, plan->tokens);
    *plan = (hr_plan){0};
}

void hr_plan_clear(hr_plan *plan) {
    plan->view.n_rows = plan->view.n_seqs = plan->view.n_logit_rows = 0;
}

static void add_task(hr_plan *plan, uint32_t row, hr_plan_task task) {
    uint32_t i = plan->view.n_logit_rows++;
    plan->logit_rows[i] = row;
    plan->tasks[i] = task;
}

void hr_plan_add(hr_plan *plan, hr_request *r) {
    hr_view *view = &plan->view;
    HR_ASSERT(view->n_rows + r->step_rows <= plan->max_rows && view->n_seqs < plan->max_seqs);
    plan->requests[view->n_seqs] = r;
    plan->seqs[view->n_seqs++] = (hr_seq_view){
        .first_row = view->n_rows,
        .n_rows = r->step_rows,
        .first_pos = r->n_computed,
        .pages = r->pages,
        .lora = r->lora,
    };
    memcpy(plan->tokens + view->n_rows, r->ids + r->n_computed, r->step_rows * sizeof *r->ids);
    uint32_t n_scored = 0;
    for (uint32_t i = 0; i < r->step_rows; i++) {
        uint32_t position = r->n_computed + i;
        if (hr_request_scores(r, position + 1))
            add_task(plan, view->n_rows + i, (hr_plan_task){r, position, n_scored++, false});
        else if (position + 1 == r->n_ids && r->max_new_tokens > 0)
            add_task(plan, view->n_rows + i, (hr_plan_task){r, position, r->result_rows, true});
    }
    HR_ASSERT(n_scored <= r->result_rows);
    view->n_rows += r->step_rows;
}
