/* From logits to tokens and logprobs, and from there to those who asked for them. */
#include "engine/scheduler_parts.h"

/* ---- logits: on every worker of the pool ---- */

static void run_task(hr_scheduler *s, const hr_plan_task *task, float *logits, void *scratch,
                     unsigned worker) {
    hr_request *r = task->request;
    hr_row_result *result = &r->results[task->result];
    uint32_t n_vocab = s->c.limits.vocab_size;
    if (!task->draw) {
        hr_sampler_score(s->c.kernels, logits, n_vocab, r->ids[task->position + 1], &r->wish,
                         result, scratch);
        return;
    }
    bool masked = r->n_ids - r->n_prompt < r->min_new_tokens;
    hr_sampler_draw(s->c.kernels, &r->sampler, logits, n_vocab, task->position + 1, masked,
                    &r->wish, result, &s->spaces[worker], scratch);
}

void hr_schedule_on_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                           void *scratch, unsigned worker, unsigned n_workers) {
    hr_scheduler *s = ctx;
    for (uint32_t i = worker; i < n; i += n_workers)
        run_task(s, &s->plan.tasks[first + i], logits + i * ld, scratch, worker);
}

/* ---- delivery ---- */

static hr_position_logprobs position_of(const hr_request *r, uint32_t token,
                                        const hr_row_result *result) {
    hr_position_logprobs p = {.token = token};
    if (!r->wish.any || result == NULL)
        return p;
    p.has_logprob = true;
    p.logprob = result->logprob;
    p.n_top = r->wish.n_top;
    p.top_ids = result->top_ids;
    p.top_logprobs = result->top_logprobs;
    p.n_ids = r->wish.n_ids;
    p.ids_logprobs = result->ids_logprobs;
    return p;
}

static hr_finish not_finite(const hr_row_result *result) {
    if (result->overflowed)
        return (hr_finish){
            .type = HR_FINISH_ERROR,
            .status = HR_ERR_INVALID,
            .message = "the temperature, penalties and logit_bias of this request push its logits "
                       "beyond the largest float; use less extreme ones"};
    return (hr_finish){
        .type = HR_FINISH_ERROR,
        .status = HR_ERR_INTERNAL,
        .message =
            "the logits of this request are not finite (NaN or infinity); check the weights of "
            "the model and of the adapter"};
}

/* Hands over the prompt positions whose rows are computed now; false when the request ended. */
static bool deliver_prompt(hr_scheduler *s, hr_request *r) {
    if (!r->want_prompt || r->next_prompt_pos >= r->n_prompt)
        return true;
    if (r->next_prompt_pos == 0) {
        hr_position_logprobs first = position_of(r, r->ids[0], NULL);
        r->on_prompt_logprobs(r->ctx, 0, 1, &first);
        r->next_prompt_pos = 1;
    }
    uint32_t n = 0;
    while (r->next_prompt_pos + n < r->n_prompt && r->next_prompt_pos + n <= r->n_computed) {
        if (!r->results[n].finite) {
            hr_schedule_end_running(s, r, not_finite(&r->results[n]));
            return false;
        }
        r->positions[n] = position_of(r, r->ids[r->next_prompt_pos + n], &r->results[n]);
        n++;
    }
    if (n > 0)
        r->on_prompt_logprobs(r->ctx, r->next_prompt_pos, n, r->positions);
    r->next_prompt_pos += n;
    return true;
}

static bool contains(const uint32_t *ids, uint32_t n, uint32_t id) {
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* Length first, as SGLang has it. */
static bool is_over(const hr_scheduler *s, const hr_request *r, uint32_t token,
                    hr_token_verdict verdict, hr_finish *f) {
    *f = (hr_finish){.type = HR_FINISH_LENGTH};
    if (r->n_ids >= hr_request_max_len(r, &s->c.limits))
        return true;
    *f = (hr_finish){.type = HR_FINISH_STOP_TOKEN, .matched_token = token};
    uint32_t skip = r->ignore_eos ? r->n_eos_ids : 0;
    if (contains(r->stop_ids + skip, r->n_stop_ids - skip, token))
        return true;
    *f = (hr_finish){.type = HR_FINISH_STOP_CALLER};
    return verdict == HR_TOKEN_STOP;
}

static void deliver_token(hr_scheduler *s, hr_request *r) {
    const hr_row_result *result = &r->results[r->result_rows];
    if (!result->finite) {
        hr_schedule_end_running(s, r, not_finite(result));
        return;
    }
    uint32_t token = result->token;
    r->ids[r->n_ids++] = token;
    if (r->sampler.counts != NULL)
        r->sampler.counts[token]++;
    if (r->first_token_ns == 0)
        r->first_token_ns = hr_now_ns(&s->c.clock);
    s->stats.generated_tokens++;
    hr_position_logprobs position = position_of(r, token, result);
    hr_token_verdict verdict = r->on_token(r->ctx, &position);
    hr_finish f;
    if (is_over(s, r, token, verdict, &f))
        hr_schedule_end_running(s, r, f);
}

void hr_schedule_deliver(hr_scheduler *s) {
    uint32_t n = s->plan.view.n_seqs;
    for (uint32_t i = 0; i < n; i++) {
        hr_request *r = s->plan.requests[i];
        r->n_computed += r->step_rows;
        hr_schedule_share_pages(s, r);
        if (!deliver_prompt(s, r) || r->n_computed < r->n_ids)
            continue;
        if (r->max_new_tokens == 0)
            hr_schedule_end_running(s, r, (hr_finish){.type = HR_FINISH_LENGTH});
        else
            deliver_token(s, r);
    }
}
