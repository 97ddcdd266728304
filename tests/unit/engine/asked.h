/* A request of the engine's tests, and what came of it. */
#ifndef TESTS_ENGINE_ASKED_H
#define TESTS_ENGINE_ASKED_H

#include <headrace/engine.h>
#include <pthread.h>

enum { MAX_TOKENS = 128, MAX_SPANS = 8 };

typedef struct asked {
    char rid[16];
    uint32_t prompt[MAX_TOKENS];
    hr_request_params params;
    uint32_t tokens[MAX_TOKENS], n_tokens, n_prompt_seen;
    float logprobs[MAX_TOKENS], prompt_logprobs[MAX_TOKENS];
    hr_finish finish; /* without its pointers */
    hr_version_span spans[MAX_SPANS];
    char versions[MAX_SPANS][32], weight_version[32];
    char adapter_version[32]; /* "": none */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_ended;
    _Atomic long token_ns; /* every token takes so long: it still runs when the test looks */
} asked;

/* A request with all logprobs; greedy when index is even, else with index as its seed. */
void ask(asked *a, uint32_t index, uint32_t n_prompt, uint32_t max_new, const char *lora);
void submit(hr_engine *engine, asked *a);
void wait_for(asked *a);
/* Until so many requests run and one of them has made a token. */
void wait_running(hr_engine *engine, uint32_t n);

#endif
