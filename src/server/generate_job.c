/* Jobs: from a parsed request to the engine, and from the engine's callbacks to an answer or the
 * events of a stream. */
#include "server/generate_job.h"

#include "server/reply.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_EXTRA_LOGPROBS                                                                         \
    (UINT64_C(1) << 26) /* top and asked-for logprobs of a request, over all positions */
#define LONG_TEXT ((size_t)64 << 10) /* bytes that may be tokenized on an I/O thread */
#define MAX_RELOADS 8 /* rounds in which load calls drop the adapters that were just read back */

/* ---- life ---- */

static void link_job(hr_job *j) {
    hr_server *server = j->server;
    pthread_mutex_lock(&server->lock);
    j->linked = true;
    j->link_next = server->jobs;
    if (j->link_next != NULL)
        j->link_next->link_prev = j;
    server->jobs = j;
    pthread_mutex_unlock(&server->lock);
}

static void unlink_job(hr_job *j) {
    hr_server *server = j->server;
    if (!j->linked)
        return;
    pthread_mutex_lock(&server->lock);
    if (j->link_prev != NULL)
        j->link_prev->link_next = j->link_next;
    else
        server->jobs = j->link_next;
    if (j->link_next != NULL)
        j->link_next->link_prev = j->link_prev;
    pthread_mutex_unlock(&server->lock);
}

void hr_job_free(hr_job *j) {
    unlink_job(j);
    hr_generate_output_free(&j->snapshot);
    for (size_t i = 0; j->sequences != NULL && i < j->request.n_items; i++)
        hr_generate_output_free(&j->sequences[i].output);
    for (size_t p = 0; j->prompts != NULL && p < j->request.n_prompts; p++)
        free(j->prompts[p]);
    free(j->prompts);
    free(j->sequences);
    free(j->lora_names);
    hr_generate_request_free(&j->request);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

static void release(void *ctx) {
    hr_job_free(ctx);
}

hr_job *hr_job_new(hr_server *server, hr_exchange *exchange, const hr_job_style *style) {
    hr_job *j = calloc(1, sizeof *j);
    if (j == NULL)
        return NULL;
    j->server = server;
    j->exchange = exchange;
    j->style = style;
    j->created = (int64_t)time(NULL);
    pthread_mutex_init(&j->lock, NULL);
    return j;
}

/* One busy part is done; with the last one the answer can be written. The lock is held, and gone on
 * return. */
static void leave(hr_job *j) {
    hr_exchange *exchange = j->exchange;
    bool last = --j->n_busy == 0;
    pthread_mutex_unlock(&j->lock);
    if (!last)
        return;
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange); /* the job may be freed here */
}

static void fail_job(hr_job *j, const hr_error *err) {
    pthread_mutex_lock(&j->lock);
    if (!j->failed)
        j->error = *err;
    j->failed = true;
    pthread_mutex_unlock(&j->lock);
}

/* Aborts what still runs. A finished sequence's rid may be in use again by somebody else, so only
 * live ones. */
static void abort_sequences(hr_job *j) {
    for (size_t i = 0; i < j->request.n_items; i++) {
        pthread_mutex_lock(&j->lock);
        bool live = j->sequences[i].submitted && !j->sequences[i].output.finished;
        pthread_mutex_unlock(&j->lock);
        if (live)
            hr_engine_abort(j->server->options.engine, j->request.items[i].rid);
    }
}

static void on_gone(void *ctx) {
    hr_job *j = ctx;
    pthread_mutex_lock(&j->lock);
    j->gone = true;
    pthread_mutex_unlock(&j->lock);
    abort_sequences(j);
}

static bool goes_by(const hr_generate_item *item, const char *rid) {
    return rid == NULL || strcmp(item->rid, rid) == 0 ||
           (item->batch_rid != NULL && strcmp(item->batch_rid, rid) == 0);
}

/* Marks the sequences and appends the rids, each with its NUL, of those that the engine has. */
static void mark_aborted(hr_job *j, const char *rid, const char *message, hr_buf *rids) {
    pthread_mutex_lock(&j->lock);
    for (size_t i = 0; i < j->request.n_items; i++) {
        hr_sequence *s = &j->sequences[i];
        if (s->output.finished || !goes_by(&j->request.items[i], rid))
            continue;
        s->abort_asked = true;
        if (message != NULL)
            snprintf(j->abort_message, sizeof j->abort_message, "%s", message);
        if (s->submitted)
            hr_buf_append(rids, j->request.items[i].rid, strlen(j->request.items[i].rid) + 1);
    }
    pthread_mutex_unlock(&j->lock);
}

void hr_jobs_abort(hr_server *server, const char *rid, const char *message) {
    hr_buf rids = {0};
    pthread_mutex_lock(&server->lock);
    for (hr_job *j = server->jobs; j != NULL; j = j->link_next)
        mark_aborted(j, rid, message, &rids);
    pthread_mutex_unlock(&server->lock);
    for (size_t at = 0; at < rids.len; at += strlen(rids.data + at) + 1)
        hr_engine_abort(server->options.engine, rids.data + at);
    hr_buf_free(&rids);
}

/* ---- the engine's callbacks ---- */

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
        abort_sequences(j);
    if (wake)
        hr_exchange_wake(j->exchange);
    pthread_mutex_lock(&j->lock);
    leave(j);
}

/* ---- answers ---- */

/* All sequences have finished, or none was taken. */
static void answer(hr_exchange *exchange, hr_job *j) {
    if (j->failed) {
        j->style->fail(exchange, &j->error);
        return;
    }
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    j->style->answer(j, &w);
    hr_exchange_reply(exchange, 200, &body);
}

/* Takes sequence i, or what is new of it, into the snapshot; false when there is nothing new. */
static bool take_snapshot(hr_job *j, size_t i, bool *first) {
    hr_sequence *s = &j->sequences[i];
    bool deltas = j->style->deltas || j->server->options.incremental_output;
    pthread_mutex_lock(&j->lock);
    bool show = s->dirty && !s->all_sent && !j->failed;
    if (show) {
        *first = s->shown.tokens == 0 && s->shown.prompt == 0;
        s->dirty = false;
        s->all_sent = s->output.finished;
        show = hr_generate_output_copy(&j->snapshot, &s->output,
                                       deltas ? s->shown : (hr_output_mark){0});
        s->shown = hr_generate_output_mark(&s->output);
        if (!show) {
            j->failed = true;
            hr_fail(&j->error, HR_ERR_NO_MEMORY, "out of memory for the answer");
        }
    }
    pthread_mutex_unlock(&j->lock);
    return show;
}

static void append_event(hr_job *j, size_t i, bool first, const char *weight_version, hr_buf *out) {
    hr_json_writer w;
    hr_buf_puts(out, "data: ");
    hr_json_writer_init(&w, out);
    j->style->event(j, i, &j->snapshot, first, weight_version, &w);
    hr_buf_puts(out, "\n\n");
}

/* The next events: one for each sequence that has got further. A slow client gets fewer and larger
 * steps. */
static bool next_events(void *ctx, hr_buf *out) {
    hr_job *j = ctx;
    char version[HR_WEIGHT_VERSION_SIZE];
    bool all_sent = true;
    hr_engine_weight_version(j->server->options.engine, version, sizeof version);
    for (size_t i = 0; i < j->request.n_items; i++) {
        bool first = false;
        if (take_snapshot(j, i, &first))
            append_event(j, i, first, version, out);
        all_sent &= j->sequences[i].all_sent;
    }
    pthread_mutex_lock(&j->lock);
    bool failed = j->failed;
    pthread_mutex_unlock(&j->lock);
    if (failed) {
        hr_buf_puts(out, "data: ");
        j->style->error_event(&j->error, out);
        hr_buf_puts(out, "\n\n");
    }
    if (!failed && !all_sent)
        return false;
    if (!failed && j->style->last != NULL)
        j->style->last(j, out);
    hr_buf_puts(out, "data: [DONE]\n\n");
    return true;
}

static void start_stream(hr_exchange *exchange, hr_job *j) {
    hr_exchange_async async = {.ctx = j, .next = next_events, .gone = on_gone, .release = release};
    hr_exchange_stream(exchange, &async);
}

static bool can_stream(hr_job *j) {
    pthread_mutex_lock(&j->lock);
    bool stream = j->request.stream && !j->failed;
    pthread_mutex_unlock(&j->lock);
    return stream;
}

static void on_ready(hr_exchange *exchange, void *ctx) {
    hr_job *j = ctx;
    if (can_stream(j))
        start_stream(exchange, j);
    else
        answer(exchange, j);
}

/* ---- requests ---- */

static hr_status tokenize_prompts(hr_job *j, hr_error *err) {
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

static void give_seeds(hr_job *j) {
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

static hr_status make_sequences(hr_job *j, hr_error *err) {
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

static hr_request_params engine_params(hr_sequence *s) {
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
static hr_status check_size(const hr_job *j, hr_error *err) {
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

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static hr_status collect_adapters(hr_job *j, hr_error *err) {
    uint32_t most = hr_engine_info_of(j->server->options.engine)->max_loaded_loras;
    size_t n = 0;
    j->lora_names = calloc(j->request.n_items, sizeof *j->lora_names);
    if (j->lora_names == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the request");
    for (size_t i = 0; i < j->request.n_items; i++) {
        if (j->request.items[i].lora_name != NULL)
            j->lora_names[n++] = j->request.items[i].lora_name;
    }
    qsort(j->lora_names, n, sizeof *j->lora_names, compare_strings);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(j->lora_names[i], j->lora_names[j->n_lora_names - 1]) != 0)
            j->lora_names[j->n_lora_names++] = j->lora_names[i];
    }
    if (most > 0 && j->n_lora_names > most)
        return hr_fail(
            err, HR_ERR_INVALID,
            "Received request with %zu unique loras requested but max loaded loras is %u",
            j->n_lora_names, most);
    return HR_OK;
}

static hr_status prepare(hr_job *j, hr_error *err) {
    for (size_t i = 0; i < j->request.n_unknown_keys; i++)
        hr_app_note_unknown_key(j->server, hr_exchange_path(j->exchange),
                                j->request.unknown_keys[i]);
    HR_TRY(make_sequences(j, err));
    HR_TRY(collect_adapters(j, err));
    give_seeds(j);
    return HR_OK;
}

static size_t text_bytes(const hr_job *j) {
    size_t n = 0;
    for (size_t i = 0; i < j->request.n_items; i += j->request.n_samples)
        n += j->request.items[i].text != NULL ? strlen(j->request.items[i].text) : 0;
    return n;
}

static hr_status tokenize(hr_job *j, hr_error *err) {
    HR_TRY(tokenize_prompts(j, err));
    return check_size(j, err);
}

/* ---- handing over to the engine ---- */

static bool is_evicted(hr_job *j, const char *name) {
    return name != NULL &&
           hr_engine_adapter_state(j->server->options.engine, name) == HR_ADAPTER_EVICTED;
}

/* After a refusal for item i: true when its adapter has only given way to others meanwhile; it may
 * be back already, for another request. */
static bool can_reload(hr_job *j, size_t i, hr_status status) {
    const char *name = j->request.items[i].lora_name;
    return status == HR_ERR_ADAPTER_UNKNOWN && name != NULL &&
           hr_engine_adapter_state(j->server->options.engine, name) != HR_ADAPTER_UNKNOWN &&
           j->reloads++ < MAX_RELOADS;
}

/* The whole batch, before anything of it runs. False: an adapter must be read back first. */
static bool check_sequences(hr_job *j, hr_status *status, hr_error *err) {
    for (size_t i = 0; i < j->request.n_items; i++) {
        hr_request_params params = engine_params(&j->sequences[i]);
        *status = hr_engine_check(j->server->options.engine, &params, err);
        if (*status == HR_OK)
            continue;
        if (can_reload(j, i, *status))
            return false;
        if (j->request.n_prompts > 1)
            hr_fail_context(err, *status, "prompt %zu", i / j->request.n_samples);
        return true;
    }
    return true;
}

/* What is decided about sequence i before it goes to the engine. */
typedef enum fate { FATE_SUBMIT, FATE_SKIP, FATE_GIVE_UP } fate;

static fate enter(hr_job *j, size_t i, const char *weight_version) {
    hr_sequence *s = &j->sequences[i];
    fate decided = FATE_SUBMIT;
    pthread_mutex_lock(&j->lock);
    if (j->gone || j->failed) {
        decided = FATE_GIVE_UP;
    } else if (s->abort_asked) {
        hr_generate_output_abort(
            &s->output, j->abort_message[0] != '\0' ? j->abort_message : "Abort in waiting queue",
            weight_version);
        s->dirty = true;
        decided = FATE_SKIP;
    } else {
        s->submitted = true;
        j->n_busy++;
    }
    pthread_mutex_unlock(&j->lock);
    return decided;
}

static void take_back(hr_job *j, size_t i) {
    pthread_mutex_lock(&j->lock);
    j->sequences[i].submitted = false;
    j->n_busy--;
    pthread_mutex_unlock(&j->lock);
}

/* Somebody asked for an abort while the sequence was on its way. */
static void abort_if_asked(hr_job *j, size_t i) {
    pthread_mutex_lock(&j->lock);
    bool asked = j->gone || j->sequences[i].abort_asked;
    pthread_mutex_unlock(&j->lock);
    if (asked)
        hr_engine_abort(j->server->options.engine, j->request.items[i].rid);
}

/* Hands every sequence to the engine, from where the last call stopped; when one is refused those
 * before it are aborted. False: an adapter must be read back before it can go on. */
static bool submit_all(hr_job *j) {
    hr_engine *engine = j->server->options.engine;
    char version[HR_WEIGHT_VERSION_SIZE];
    hr_error err = {.status = HR_ERR_CANCELLED};
    hr_status status = HR_OK;
    if (!j->checked && !check_sequences(j, &status, &err))
        return false;
    j->checked = true;
    hr_engine_weight_version(engine, version, sizeof version);
    for (; status == HR_OK && j->next_item < j->request.n_items; j->next_item++) {
        size_t i = j->next_item;
        hr_request_params params = engine_params(&j->sequences[i]);
        fate decided = enter(j, i, version);
        if (decided == FATE_SKIP)
            continue;
        if (decided == FATE_GIVE_UP) {
            status = hr_fail(&err, HR_ERR_CANCELLED, "the client has gone");
            break;
        }
        status = hr_engine_submit(engine, &params, &err);
        if (status == HR_OK) {
            abort_if_asked(j, i);
            continue;
        }
        take_back(j, i);
        if (can_reload(j, i, status))
            return false;
    }
    if (status != HR_OK) {
        fail_job(j, &err);
        abort_sequences(j);
    }
    return true;
}

static void end_submitting(hr_job *j) {
    pthread_mutex_lock(&j->lock);
    j->submitting = false;
    pthread_mutex_unlock(&j->lock);
    if (j->request.stream)
        hr_exchange_wake(j->exchange);
    pthread_mutex_lock(&j->lock);
    leave(j);
}

static hr_status reload_adapters(hr_job *j, hr_error *err) {
    for (size_t i = 0; i < j->n_lora_names; i++) {
        if (is_evicted(j, j->lora_names[i]))
            HR_TRY(hr_engine_ensure_adapter(j->server->options.engine, j->lora_names[i], err));
    }
    return HR_OK;
}

/* Reads back what gave way and submits. False: some of it gave way again before it was leased. */
static bool reload_and_submit(hr_job *j) {
    hr_error err;
    if (reload_adapters(j, &err) == HR_OK)
        return submit_all(j);
    fail_job(j, &err);
    abort_sequences(j);
    return true;
}

/* On the one thread for it: requests for more adapters than may be loaded, served side by side,
 * would push out each other's for ever. */
static void run_reload(void *arg) {
    hr_job *j = arg;
    while (!reload_and_submit(j)) {
    }
    end_submitting(j);
}

static bool any_evicted(hr_job *j) {
    for (size_t i = 0; i < j->n_lora_names; i++) {
        if (is_evicted(j, j->lora_names[i]))
            return true;
    }
    return false;
}

/* False: it goes on on the thread for recalls. */
static bool submit_or_recall(hr_job *j) {
    hr_error err;
    if (!any_evicted(j) && submit_all(j)) {
        end_submitting(j);
        return true;
    }
    if (hr_worker_submit(j->server->recalls, run_reload, j, &err) == HR_OK)
        return false;
    fail_job(j, &err);
    abort_sequences(j);
    end_submitting(j);
    return true;
}

static void run_tokenize(void *arg) {
    hr_job *j = arg;
    hr_error err;
    if (tokenize(j, &err) == HR_OK) {
        submit_or_recall(j);
        return;
    }
    fail_job(j, &err);
    end_submitting(j);
}

/* False: it goes on on a thread for texts. Megabytes take seconds, for which nobody else's
 * connection should stand still. */
static bool tokenize_elsewhere(hr_job *j) {
    hr_error err;
    if (hr_worker_submit(j->server->texts, run_tokenize, j, &err) == HR_OK)
        return false;
    fail_job(j, &err);
    end_submitting(j);
    return true;
}

void hr_job_start(hr_job *j) {
    hr_exchange *exchange = j->exchange;
    hr_error err;
    bool is_long = text_bytes(j) > LONG_TEXT;
    if (prepare(j, &err) != HR_OK || (!is_long && tokenize(j, &err) != HR_OK)) {
        j->style->fail(exchange, &err);
        hr_job_free(j);
        return;
    }
    /* The exchange is ours until the handler returns, so the job is too. */
    hr_exchange_ref(exchange);
    j->n_busy = 1;
    j->submitting = true;
    link_job(j);
    bool submitted = is_long ? tokenize_elsewhere(j) : submit_or_recall(j);
    if (submitted && can_stream(j)) {
        start_stream(exchange, j);
        return;
    }
    hr_exchange_async async = {.ctx = j, .ready = on_ready, .gone = on_gone, .release = release};
    hr_exchange_defer(exchange, &async);
}
