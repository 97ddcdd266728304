/* The bar of bench/serve.py: how fast the engine alone is, without HTTP, when requests of one
 * length come in fixed batches. A batch is submitted together, and the next one only when all of it
 * is done; each size gets the same work, and one line of output for the script to read.
 *
 * Requests are what a rollout asks for: sampled at temperature 1, with logprobs. No two prompts
 * share a beginning. */
#include <headrace/engine.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const uint32_t SIZES[] = {16, 32, 64, 128, 256};
enum { N_SIZES = sizeof SIZES / sizeof SIZES[0], WARM_UP = 16, MAX_LENGTH = 4096 };

typedef struct bench {
    hr_engine *engine;
    uint32_t prompt, output, made; /* made: requests so far, so that every prompt is a new one */
    pthread_mutex_t lock;
    pthread_cond_t all_done;
    uint32_t left, wrong;
} bench;

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    (void)ctx;
    (void)token;
    return HR_TOKEN_CONTINUE;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    bench *b = ctx;
    pthread_mutex_lock(&b->lock);
    b->wrong += finish->type != HR_FINISH_LENGTH || finish->completion_tokens != b->output;
    if (--b->left == 0)
        pthread_cond_signal(&b->all_done);
    pthread_mutex_unlock(&b->lock);
}

static hr_status submit(bench *b, hr_error *err) {
    uint32_t ids[MAX_LENGTH];
    char rid[32];
    uint32_t request = b->made++;
    for (uint32_t i = 0; i < b->prompt; i++)
        ids[i] = 100 + (request * 7919u + i * 104729u) % 40000;
    snprintf(rid, sizeof rid, "%u", request);
    hr_request_params params = {
        .rid = rid,
        .input_ids = ids,
        .n_input_ids = b->prompt,
        .sampling = hr_sampling_params_default(),
        .return_logprob = true,
        .logprob_start_len = -1,
        .ctx = b,
        .on_token = on_token,
        .on_finish = on_finish,
    };
    params.sampling.max_new_tokens = b->output;
    params.sampling.ignore_eos = true;
    params.sampling.has_seed = true;
    params.sampling.seed = request;
    return hr_engine_submit(b->engine, &params, err);
}

static hr_status run_batch(bench *b, uint32_t size, hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&b->lock);
    b->left = size;
    pthread_mutex_unlock(&b->lock);
    uint32_t accepted = 0;
    while (accepted < size && (status = submit(b, err)) == HR_OK)
        accepted++;
    pthread_mutex_lock(&b->lock);
    b->left -= size - accepted;
    while (b->left > 0)
        pthread_cond_wait(&b->all_done, &b->lock);
    pthread_mutex_unlock(&b->lock);
    return status;
}

static hr_status run_size(bench *b, uint32_t size, uint32_t n_requests, hr_error *err) {
    double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    uint32_t n = 0;
    for (; n < n_requests; n += size) {
        hr_status status = run_batch(b, size, err);
        if (status != HR_OK)
            return status;
    }
    wall = seconds(CLOCK_MONOTONIC) - wall;
    cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    double tokens = (double)n * (b->prompt + b->output);
    printf("%u %.1f %.1f\n", size, tokens / wall, tokens / cpu);
    fflush(stdout);
    return HR_OK;
}

static hr_status run(bench *b, const char *model, uint32_t n_requests, hr_error *err) {
    hr_engine_options options = {.model_path = model,
                                 .max_running_requests = SIZES[N_SIZES - 1],
                                 .max_total_tokens =
                                     (uint64_t)SIZES[N_SIZES - 1] * (b->prompt + b->output + 64),
                                 .disable_prefix_cache = true};
    hr_status status = hr_engine_create(&options, &b->engine, err);
    if (status == HR_OK)
        status = run_batch(b, WARM_UP, err);
    for (int i = 0; status == HR_OK && i < N_SIZES; i++)
        status = run_size(b, SIZES[i], n_requests, err);
    hr_engine_destroy(b->engine);
    return status;
}

int main(int argc, char **argv) {
    bench b = {.lock = PTHREAD_MUTEX_INITIALIZER, .all_done = PTHREAD_COND_INITIALIZER};
    uint32_t n_requests = 0;
    if (argc == 5) {
        b.prompt = (uint32_t)strtoul(argv[2], NULL, 10);
        b.output = (uint32_t)strtoul(argv[3], NULL, 10);
        n_requests = (uint32_t)strtoul(argv[4], NULL, 10);
    }
    if (b.prompt == 0 || b.prompt > MAX_LENGTH || b.output == 0 || b.output > MAX_LENGTH) {
        fprintf(stderr,
                "usage: fixed_batch MODEL PROMPT_TOKENS OUTPUT_TOKENS REQUESTS\n"
                "prints, for each batch size: size, tokens (prompt and output) per second, tokens "
                "per second of CPU time\n");
        return 2;
    }
    hr_error err;
    if (run(&b, argv[1], n_requests, &err) != HR_OK) {
        fprintf(stderr, "fixed_batch: %s\n", err.message);
        return 1;
    }
    if (b.wrong > 0)
        fprintf(stderr, "fixed_batch: %u requests ended before their length\n", b.wrong);
    return b.wrong > 0;
}
