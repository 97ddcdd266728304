/* Making requests of the engine's tests, and recording what comes. */
#include "asked.h"

#include "../model/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static void on_prompt(void *ctx, uint32_t first, uint32_t n,
                      const hr_position_logprobs *positions) {
    asked *a = ctx;
    for (uint32_t i = 0; i < n; i++)
        a->prompt_logprobs[first + i] = positions[i].has_logprob ? positions[i].logprob : 0;
    a->n_prompt_seen += n;
}

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    asked *a = ctx;
    a->logprobs[a->n_tokens] = token->logprob;
    a->tokens[a->n_tokens++] = token->token;
    if (a->token_ns > 0)
        nanosleep(&(struct timespec){0, a->token_ns}, NULL);
    return HR_TOKEN_CONTINUE;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    asked *a = ctx;
    pthread_mutex_lock(&a->lock);
    a->finish = *finish;
    a->finish.spans = a->spans;
    HR_ASSERT(finish->n_spans <= MAX_SPANS);
    for (size_t i = 0; i < finish->n_spans; i++) {
        snprintf(a->versions[i], sizeof a->versions[i], "%s", finish->spans[i].version);
        a->spans[i] =
            (hr_version_span){a->versions[i], finish->spans[i].start, finish->spans[i].end};
    }
    snprintf(a->weight_version, sizeof a->weight_version, "%s", finish->weight_version);
    a->finish.weight_version = a->weight_version;
    snprintf(a->adapter_version, sizeof a->adapter_version, "%s",
             finish->adapter_version != NULL ? finish->adapter_version : "");
    a->finish.adapter_version = NULL;
    a->finish.message = "";
    a->is_ended = true;
    pthread_cond_signal(&a->ended);
    pthread_mutex_unlock(&a->lock);
}

void ask(asked *a, uint32_t index, uint32_t n_prompt, uint32_t max_new, const char *lora) {
    memset(a, 0, sizeof *a);
    snprintf(a->rid, sizeof a->rid, "r%u", index);
    for (uint32_t i = 0; i < n_prompt; i++)
        a->prompt[i] = (index * 31 + i * i * 7 + i) % TINY_VOCAB;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->ended, NULL);
    a->params = (hr_request_params){.rid = a->rid,
                                    .input_ids = a->prompt,
                                    .n_input_ids = n_prompt,
                                    .sampling = hr_sampling_params_default(),
                                    .lora_name = lora,
                                    .return_logprob = true,
                                    .logprob_start_len = 0,
                                    .ctx = a,
                                    .on_prompt_logprobs = on_prompt,
                                    .on_token = on_token,
                                    .on_finish = on_finish};
    a->params.sampling.max_new_tokens = max_new;
    a->params.sampling.temperature = index % 2 == 0 ? 0 : 1;
    a->params.sampling.has_seed = true;
    a->params.sampling.seed = index;
}

void submit(hr_engine *engine, asked *a) {
    hr_error err = {0};
    if (hr_engine_submit(engine, &a->params, &err) != HR_OK)
        fail_msg("%s", err.message);
}

void wait_for(asked *a) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    pthread_mutex_lock(&a->lock);
    while (!a->is_ended)
        assert_int_equal(pthread_cond_timedwait(&a->ended, &a->lock, &until), 0);
    pthread_mutex_unlock(&a->lock);
    pthread_cond_destroy(&a->ended);
    pthread_mutex_destroy(&a->lock);
}

void wait_running(hr_engine *engine, uint32_t n) {
    hr_engine_stats stats = {0};
    for (int i = 0; i < 60000; i++) {
        hr_engine_stats_get(engine, &stats);
        if (stats.running == n && stats.generated_tokens > 0)
            return;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    fail_msg("%u requests run, %u were to", stats.running, n);
}
