/* Planning: how the rows of a step are shared among those that run. */
#include "engine/scheduler_parts.h"

#include <string.h>

static uint32_t rows_left(const hr_request *r) {
    return r->n_ids - r->n_computed;
}

/* What n rows of a prompt take of a chunk: at least n. */
static uint32_t cost_of(const hr_scheduler *s, const hr_request *r, uint32_t n) {
    uint64_t depth = s->c.attention_depth;
    return depth == 0 ? n : (uint32_t)(n * (depth + r->n_computed) / depth);
}

/* The most rows that cost no more than the budget, but one at least. */
static uint32_t affordable(const hr_scheduler *s, const hr_request *r, uint32_t budget) {
    uint64_t depth = s->c.attention_depth;
    uint32_t n = depth == 0 ? budget : (uint32_t)(budget * depth / (depth + r->n_computed));
    return n > 0 ? n : 1;
}

/* A chunk must not score more rows than the request has results for. */
static uint32_t chunk_of(const hr_scheduler *s, const hr_request *r, uint32_t budget) {
    uint32_t n = affordable(s, r, budget);
    n = rows_left(r) < n ? rows_left(r) : n;
    if (!r->want_prompt || r->next_prompt_pos >= r->n_prompt)
        return n;
    uint32_t first_scored = r->next_prompt_pos > 0 ? r->next_prompt_pos - 1 : 0; /* row of it */
    uint32_t plain = first_scored > r->n_computed ? first_scored - r->n_computed : 0;
    uint32_t most = plain + r->result_rows;
    return n < most ? n : most;
}

/* The page that r would compute next is computed in this step for another request, who makes it
 * known: r is better off waiting for it. */
static bool has_twin(const hr_scheduler *s, const hr_request *r) {
    uint32_t at = r->n_shared * HR_KV_PAGE_TOKENS;
    if (!hr_schedule_may_share(s, r) || r->n_computed != at ||
        r->n_shared >= hr_schedule_reusable_pages(s, r))
        return false;
    for (uint32_t i = 0; i < s->n_running; i++) {
        const hr_request *p = s->running[i];
        if (p->step_rows > 0 && p->adapter_id == r->adapter_id && hr_schedule_may_share(s, p) &&
            p->n_shared == r->n_shared && p->n_computed + p->step_rows >= at + HR_KV_PAGE_TOKENS &&
            (at == 0 || p->pages[r->n_shared - 1] == r->pages[r->n_shared - 1]) &&
            memcmp(hr_schedule_page_ids(p, r->n_shared), hr_schedule_page_ids(r, r->n_shared),
                   HR_KV_PAGE_TOKENS * sizeof *r->ids) == 0)
            return true;
    }
    return false;
}

typedef bool (*goes_first)(const hr_request *a, const hr_request *b);

static bool is_older(const hr_request *a, const hr_request *b) {
    return a->serial < b->serial;
}

static bool is_shorter(const hr_request *a, const hr_request *b) {
    return rows_left(a) != rows_left(b) ? rows_left(a) < rows_left(b) : is_older(a, b);
}

/* The first, by that order, of the prompts that are not planned yet. One that waits for a twin is
 * planned without rows. */
static hr_request *plan_next(const hr_scheduler *s, goes_first order) {
    for (;;) {
        hr_request *first = NULL;
        for (uint32_t i = 0; i < s->n_running; i++) {
            hr_request *r = s->running[i];
            if (!r->planned && (first == NULL || order(r, first)))
                first = r;
        }
        if (first == NULL)
            return NULL;
        first->planned = true;
        if (!has_twin(s, first))
            return first;
    }
}

/* Plans a prompt's next rows; returns what they cost. */
static uint32_t take_chunk(const hr_scheduler *s, hr_request *r, uint32_t budget) {
    r->step_rows = chunk_of(s, r, budget);
    uint32_t cost = cost_of(s, r, r->step_rows);
    return cost < budget ? cost : budget;
}

static void share_rows(hr_scheduler *s) {
    uint32_t chunk = s->c.limits.chunked_prefill_size, generating = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        hr_schedule_skip_known(s, r);
        r->planned = rows_left(r) == 1;
        r->step_rows = r->planned ? 1 : 0;
        generating += r->step_rows;
    }
    uint32_t budget = generating > 0 ? (chunk + 3) / 4 : chunk;
    hr_request *oldest = plan_next(s, is_older), *r;
    if (oldest == NULL)
        return;
    uint32_t sure = take_chunk(s, oldest, (budget + 3) / 4);
    budget -= sure;
    while (budget > 0 && (r = plan_next(s, is_shorter)) != NULL)
        budget -= take_chunk(s, r, budget);
    take_chunk(s, oldest, sure + budget);
}

static void clear_pages(hr_scheduler *s, hr_request *r) {
    uint32_t needed = hr_kv_pages_for((uint64_t)r->n_computed + r->step_rows);
    for (; r->n_clear_pages < needed; r->n_clear_pages++)
        s->c.executor.clear_page(s->c.executor.self, r->pages[r->n_clear_pages]);
}

void hr_schedule_plan(hr_scheduler *s) {
    share_rows(s);
    hr_plan_clear(&s->plan);
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        if (r->step_rows == 0)
            continue;
        clear_pages(s, r);
        hr_plan_add(&s->plan, r);
    }
}
