/* /generate: a body becomes a job of one engine request per sequence; the engine's callbacks fill
 * the job, and an I/O thread writes the answer, or the events of a stream, from it.
 *
 * A job belongs to its exchange and dies with it. While any of its requests lives in the engine,
 * the engine's callbacks hold one reference to the exchange. */
#include "format/json_writer.h"
#include "server/app.h"
#include "server/generate_output.h"
#include "server/generate_reply.h"
#include "server/generate_request.h"
#include "server/reply.h"

#include <stdlib.h>
#include <string.h>

#define MAX_EXTRA_LOGPROBS                                                                         \
    (UINT64_C(1) << 26) /* top and asked-for logprobs of a request, over all positions */

struct job;

typedef struct sequence {
    struct job *job;
    hr_generate_output output;
    bool submitted;
    bool dirty;    /* stream: there is something that no event has shown */
    bool all_sent; /* stream: the final event is out */
} sequence;

typedef struct job {
    hr_server *server;
    hr_exchange *exchange;
    hr_generate_request request;
    uint32_t **prompts; /* ids of texts, one array per prompt; NULL entries for input_ids */

    pthread_mutex_t lock; /* everything below */
    sequence *sequences;
    size_t n_busy; /* sequences in the engine, + 1 while they are being submitted */
    bool failed;
    hr_error error;

    hr_generate_output snapshot; /* stream: what the next event shows; I/O thread only */
    bool done_sent;
} job;

/* ---- life ---- */

static void free_job(void *ctx) {
    job *j = ctx;
    for (size_t i = 0; j->sequences != NULL && i < j->request.n_items; i++)
        hr_generate_output_free(&j->sequences[i].output);
    for (size_t p = 0; j->prompts != NULL && p < j->request.n_prompts; p++)
        free(j->prompts[p]);
    free(j->prompts);
    free(j->sequences);
    hr_generate_output_free(&j->snapshot);
    hr_generate_request_free(&j->request);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

static job *new_job(hr_server *server, hr_exchange *exchange) {
    job *j = calloc(1, sizeof *j);
    if (j == NULL)
        return NULL;
    j->server = server;
    j->exchange = exchange;
    pthread_mutex_init(&j->lock, NULL);
    return j;
}

/* One busy part is done; with the last one the answer can be written. The lock is held, and gone on
 * return. */
static void leave(job *j) {
    hr_exchange *exchange = j->exchange;
    bool last = --j->n_busy == 0;
    pthread_mutex_unlock(&j->lock);
    if (!last)
        return;
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange); /* the job may be freed here */
}

/* Aborts what still runs. A finished sequence's rid may be in use again by somebody else, so only
 * live ones. */
static void abort_sequences(job *j) {
    for (size_t i = 0; i < j->request.n_items; i++) {
        pthread_mutex_lock(&j->lock);
        bool live = j->sequences[i].submitted && !j->sequences[i].output.finished;
        pthread_mutex_unlock(&j->lock);
        if (live)
            hr_engine_abort(j->server->options.engine, j->request.items[i].rid);
    }
}

static void on_gone(void *ctx) {
    abort_sequences(ctx);
}

/* ---- the engine's callbacks ---- */

static void on_prompt(void *ctx, uint32_t first, uint32_t n,
                      const hr_position_logprobs *positions) {
    (void)first;
    sequence *s = ctx;
    pthread_mutex_lock(&s->job->lock);
    hr_generate_output_prompt(&s->output, n, positions);
    pthread_mutex_unlock(&s->job->lock);
}

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    sequence *s = ctx;
    job *j = s->job;
    pthread_mutex_lock(&j->lock);
    hr_token_verdict verdict = hr_generate_output_token(&s->output, token);
    s->dirty = true;
    pthread_mutex_unlock(&j->lock);
    if (j->request.stream)
        hr_exchange_wake(j->exchange);
    return verdict;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    sequence *s = ctx;
    job *j = s->job;
    pthread_mutex_lock(&j->lock);
    hr_generate_output_finish(&s->output, finish);
    s->dirty = true;
    bool first_failure = !j->failed && (s->output.failed || finish->type == HR_FINISH_ERROR);
    if (first_failure) {
        j->failed = true;
        if (s->output.failed)
            hr_fail(&j->error, HR_ERR_NO_MEMORY, "out of memory for the answer");
        else
            hr_fail(&j->error, finish->status, "%s", s->output.message);
    }
    pthread_mutex_unlock(&j->lock);
    if (first_failure)
        abort_sequences(j);
    if (j->request.stream)
        hr_exchange_wake(j->exchange);
    pthread_mutex_lock(&j->lock);
    leave(j);
}

/* ---- answers ---- */

static hr_reply_options reply_options(const job *j, const char *weight_version) {
    return (hr_reply_options){.text_in_logprobs = j->request.return_text_in_logprobs,
                              .weight_version = weight_version,
                              .index = -1};
}

/* All sequences have finished, or none was taken. */
static void answer(hr_exchange *exchange, void *ctx) {
    job *j = ctx;
    if (j->failed) {
        hr_reply_failure(exchange, &j->error);
        return;
    }
    hr_reply_options options = reply_options(j, "");
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    if (j->request.is_list)
        hr_json_array_begin(&w);
    for (size_t i = 0; i < j->request.n_items; i++)
        hr_generate_reply_write(&j->sequences[i].output, &options, &w);
    if (j->request.is_list)
        hr_json_array_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}

static void append_event(job *j, size_t i, const char *weight_version, hr_buf *out) {
    hr_reply_options options = reply_options(j, weight_version);
    options.index = j->request.is_list ? (int64_t)i : -1;
    hr_json_writer w;
    hr_buf_puts(out, "data: ");
    hr_json_writer_init(&w, out);
    hr_generate_reply_write(&j->snapshot, &options, &w);
    hr_buf_puts(out, "\n\n");
}

/* Takes what is new of sequence i into the snapshot; false when nothing is. */
static bool take_snapshot(job *j, size_t i) {
    sequence *s = &j->sequences[i];
    pthread_mutex_lock(&j->lock);
    bool show = s->dirty && !s->all_sent && !j->failed;
    if (show) {
        s->dirty = false;
        s->all_sent = s->output.finished;
        show = hr_generate_output_copy(&j->snapshot, &s->output);
        if (!show) {
            j->failed = true;
            hr_fail(&j->error, HR_ERR_NO_MEMORY, "out of memory for the answer");
        }
    }
    pthread_mutex_unlock(&j->lock);
    return show;
}

/* The next events: one for each sequence that has got further. A slow client gets fewer and larger
 * steps. */
static bool next_events(void *ctx, hr_buf *out) {
    job *j = ctx;
    char version[256];
    bool all_sent = true;
    hr_engine_weight_version(j->server->options.engine, version, sizeof version);
    for (size_t i = 0; i < j->request.n_items; i++) {
        if (take_snapshot(j, i))
            append_event(j, i, version, out);
        all_sent &= j->sequences[i].all_sent;
    }
    pthread_mutex_lock(&j->lock);
    bool failed = j->failed;
    pthread_mutex_unlock(&j->lock);
    if (failed) {
        hr_buf_puts(out, "data: ");
        hr_error_body(hr_http_status_of(j->error.status), j->error.message, out);
        hr_buf_puts(out, "\n\n");
    }
    if (!failed && !all_sent)
        return false;
    hr_buf_puts(out, "data: [DONE]\n\n");
    return true;
}

/* ---- requests ---- */

static hr_status tokenize_prompts(job *j, hr_error *err) {
    hr_generate_request *r = &j->request;
    const hr_tokenizer *tokenizer = j->server->options.tokenizer;
    j->prompts = calloc(r->n_prompts, sizeof *j->prompts);
    if (j->prompts == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the prompts");
    for (size_t p = 0; p < r->n_prompts; p++) {
        hr_generate_item *first = &r->items[p * r->n_samples];
        size_t n = 0;
        if (first->text == NULL)
            continue;
        if (tokenizer == NULL)
            return hr_fail(
                err, HR_ERR_INVALID,
                "text: this server runs with --skip-tokenizer-init; send input_ids instead");
        hr_status status = hr_tokenizer_encode(tokenizer, first->text, strlen(first->text), true,
                                               &j->prompts[p], &n, err);
        if (status != HR_OK)
            return hr_fail_context(err, status, "text");
        for (size_t s = 0; s < r->n_samples; s++) {
            first[s].input_ids = j->prompts[p];
            first[s].n_input_ids = n;
        }
    }
    return HR_OK;
}

static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void give_seeds(job *j) {
    hr_server *server = j->server;
    for (size_t i = 0; server->options.has_random_seed && i < j->request.n_items; i++) {
        hr_sampling_params *sampling = &j->request.items[i].sampling;
        if (sampling->has_seed)
            continue;
        sampling->has_seed = true;
        sampling->seed =
            mix(server->options.random_seed + mix(atomic_fetch_add(&server->seeds_given, 1)));
    }
}

static hr_status make_sequences(job *j, hr_error *err) {
    const hr_engine_info *info = hr_engine_info_of(j->server->options.engine);
    j->sequences = calloc(j->request.n_items, sizeof *j->sequences);
    if (j->sequences == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the answer");
    for (size_t i = 0; i < j->request.n_items; i++) {
        j->sequences[i].job = j;
        HR_TRY(hr_generate_output_init(&j->sequences[i].output, &j->request.items[i],
                                       j->server->options.tokenizer, info->eos_token_ids,
                                       info->n_eos_token_ids, err));
    }
    return HR_OK;
}

static hr_request_params engine_params(sequence *s) {
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

/* A few bytes of request must not make gigabytes of answer. */
static hr_status check_size(const job *j, hr_error *err) {
    uint64_t context = hr_engine_info_of(j->server->options.engine)->context_length, total = 0;
    for (size_t i = 0; i < j->request.n_items; i++) {
        const hr_generate_item *item = &j->request.items[i];
        uint64_t prompt = item->logprob_start_len < 0 ? 0 : item->n_input_ids;
        uint64_t most = prompt + item->sampling.max_new_tokens;
        total += (most < context ? most : context) *
                 ((uint64_t)item->top_logprobs_num + (uint64_t)item->n_token_ids_logprob);
        if (total > MAX_EXTRA_LOGPROBS)
            return hr_fail(err, HR_ERR_LIMIT,
                           "top_logprobs_num and token_ids_logprob: more than %llu values asked "
                           "for in one request",
                           (unsigned long long)MAX_EXTRA_LOGPROBS);
    }
    return HR_OK;
}

/* The whole batch, before anything of it runs. */
static hr_status check_sequences(job *j, hr_error *err) {
    HR_TRY(check_size(j, err));
    for (size_t i = 0; i < j->request.n_items; i++) {
        hr_request_params params = engine_params(&j->sequences[i]);
        hr_status status = hr_engine_check(j->server->options.engine, &params, err);
        if (status != HR_OK)
            return j->request.n_prompts > 1
                       ? hr_fail_context(err, status, "prompt %zu", i / j->request.n_samples)
                       : status;
    }
    return HR_OK;
}

static hr_status prepare(job *j, hr_error *err) {
    size_t len = 0;
    const char *body = hr_exchange_body(j->exchange, &len);
    HR_TRY(hr_generate_request_parse(body, len, &j->request, err));
    for (size_t i = 0; i < j->request.n_unknown_keys; i++)
        hr_app_note_unknown_key(j->server, j->request.unknown_keys[i]);
    HR_TRY(tokenize_prompts(j, err));
    HR_TRY(make_sequences(j, err));
    HR_TRY(check_sequences(j, err));
    give_seeds(j);
    return HR_OK;
}

/* Hands every sequence to the engine; when one is refused those before it are aborted. */
static void submit(job *j) {
    hr_error err;
    hr_exchange_ref(j->exchange);
    j->n_busy = 1;
    for (size_t i = 0; i < j->request.n_items; i++) {
        sequence *s = &j->sequences[i];
        hr_request_params params = engine_params(s);
        pthread_mutex_lock(&j->lock);
        s->submitted = true;
        j->n_busy++;
        pthread_mutex_unlock(&j->lock);
        if (hr_engine_submit(j->server->options.engine, &params, &err) == HR_OK)
            continue;
        pthread_mutex_lock(&j->lock);
        s->submitted = false;
        j->n_busy--;
        if (!j->failed)
            j->error = err;
        j->failed = true;
        pthread_mutex_unlock(&j->lock);
        abort_sequences(j);
        break;
    }
    pthread_mutex_lock(&j->lock);
    leave(j);
}

void hr_route_generate(hr_exchange *exchange, void *app) {
    hr_error err;
    job *j = new_job(app, exchange);
    if (j == NULL) {
        hr_reply_error(exchange, 500, "out of memory for the request");
        return;
    }
    if (prepare(j, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        free_job(j);
        return;
    }
    submit(j); /* the exchange is ours until this handler returns, so the job is too */
    pthread_mutex_lock(&j->lock);
    bool stream = j->request.stream && !j->failed;
    pthread_mutex_unlock(&j->lock);
    hr_exchange_async async = {.ctx = j, .gone = on_gone, .release = free_job};
    if (stream) {
        async.next = next_events;
        hr_exchange_stream(exchange, &async);
    } else {
        async.ready = answer;
        hr_exchange_defer(exchange, &async);
    }
}
