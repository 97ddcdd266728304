/* What the engine is asked for, and what it calls back with: tokens go into the output of their
 * sequence. */
#include "server/generate_job_parts.h"

static void on_prompt(void *ctx, uint32_t first, uint32_t n,
                      const hr_position_logprobs *positions) {
    (void)first;
    hr_sequence *s = ctx;
    pthread_mutex_lock(&s->job->lock);
    hr_generate_output_prompt(&s->output, n, positions);
    pthread_mutex_unlock(&s->job->lock);
}

static uint32_t interval_of(const hr_sequence *s) {
    uint32_t own = s->output.item->stream_interval;
    return own > 0 ? own : s->job->server->options.stream_interval;
}

/* The first token is shown at once, the others in steps. */
static bool is_due(const hr_sequence *s) {
    return s->output.tokens.n == 1 || s->output.tokens.n - s->shown.tokens >= interval_of(s);
}

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    hr_sequence *s = ctx;
    hr_job *j = s->job;
    pthread_mutex_lock(&j->lock);
    hr_token_verdict verdict = hr_generate_output_token(&s->output, token);
    bool wake = j->request.stream && is_due(s);
    s->dirty |= wake;
    wake &= !j->submitting;
    pthread_mutex_unlock(&j->lock);
    if (wake)
        hr_exchange_wake(j->exchange);
    return verdict;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    hr_sequence *s = ctx;
    hr_job *j = s->job;
    hr_finish f = *finish;
    pthread_mutex_lock(&j->lock);
    if (f.type == HR_FINISH_ABORT && s->abort_asked && j->abort_message[0] != '\0')
        f.message = j->abort_message;
    hr_generate_output_finish(&s->output, &f);
    s->dirty = true;
    bool first_failure = !j->failed && (s->output.failed || f.type == HR_FINISH_ERROR);
    if (first_failure) {
        j->failed = true;
        if (s->output.failed)
            j->error = s->output.error;
        else
            hr_fail(&j->error, f.status, "%s", s->output.message);
    }
    bool wake = j->request.stream && !j->submitting;
    pthread_mutex_unlock(&j->lock);
    if (first_failure)
        hr_job_abort_sequences(j);
    if (wake)
        hr_exchange_wake(j->exchange);
    pthread_mutex_lock(&j->lock);
    hr_job_leave(j);
}

hr_request_params hr_job_engine_params(hr_sequence *s) {
    const hr_generate_item *item = s->output.item;
    return (hr_request_params){
        .rid = item->rid,
        .input_ids = item->input_ids,
        .n_input_ids = item->n_input_ids,
        .sampling = item->sampling,
        .lora_name = item->lora_name,
        .return_logprob = item->return_logprob,
        .logprob_start_len = item->logprob_start_len,
        .top_logprobs_num = item->top_logprobs_num,
        .token_ids_logprob = item->token_ids_logprob,
        .n_token_ids_logprob = item->n_token_ids_logprob,
        .ctx = s,
        .on_prompt_logprobs = item->return_logprob ? on_prompt : NULL,
        .on_token = on_token,
        .on_finish = on_finish,
    };
}
