/* A job's life: from a parsed request to its end, by whichever of engine, client and abort comes
 * first. */
#include "server/generate_job.h"

#include "server/generate_job_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LONG_TEXT ((size_t)64 << 10) /* bytes that may be tokenized on an I/O thread */

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

void hr_job_release(void *ctx) {
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

void hr_job_leave(hr_job *j) {
    hr_exchange *exchange = j->exchange;
    bool last = --j->n_busy == 0;
    pthread_mutex_unlock(&j->lock);
    if (!last)
        return;
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange); /* the job may be freed here */
}

void hr_job_fail(hr_job *j, const hr_error *err) {
    pthread_mutex_lock(&j->lock);
    if (!j->failed)
        j->error = *err;
    j->failed = true;
    pthread_mutex_unlock(&j->lock);
}

static void run_tokenize(void *arg) {
    hr_job *j = arg;
    hr_error err;
    if (hr_job_tokenize(j, &err) == HR_OK) {
        hr_job_submit(j);
        return;
    }
    hr_job_fail(j, &err);
    hr_job_end_submitting(j);
}

/* False: it goes on on a thread for texts. Megabytes take seconds, for which nobody else's
 * connection should stand still. */
static bool tokenize_elsewhere(hr_job *j) {
    hr_error err;
    if (hr_worker_submit(j->server->texts, run_tokenize, j, &err) == HR_OK)
        return false;
    hr_job_fail(j, &err);
    hr_job_end_submitting(j);
    return true;
}

void hr_job_start(hr_job *j) {
    hr_exchange *exchange = j->exchange;
    hr_error err;
    bool is_long = hr_job_text_bytes(j) > LONG_TEXT;
    if (hr_job_prepare(j, &err) != HR_OK || (!is_long && hr_job_tokenize(j, &err) != HR_OK)) {
        j->style->fail(exchange, &err);
        hr_job_free(j);
        return;
    }
    /* The exchange is ours until the handler returns, so the job is too. */
    hr_exchange_ref(exchange);
    j->n_busy = 1;
    j->submitting = true;
    link_job(j);
    bool submitted = is_long ? tokenize_elsewhere(j) : hr_job_submit(j);
    if (submitted && hr_job_can_stream(j)) {
        hr_job_start_stream(exchange, j);
        return;
    }
    hr_exchange_async async = {
        .ctx = j, .ready = hr_job_on_ready, .gone = hr_job_on_gone, .release = hr_job_release};
    hr_exchange_defer(exchange, &async);
}

/* ---- aborts ---- */

/* A finished sequence's rid may be in use again by somebody else, so only live ones. */
void hr_job_abort_sequences(hr_job *j) {
    for (size_t i = 0; i < j->request.n_items; i++) {
        pthread_mutex_lock(&j->lock);
        bool live = j->sequences[i].submitted && !j->sequences[i].output.finished;
        pthread_mutex_unlock(&j->lock);
        if (live)
            hr_engine_abort(j->server->options.engine, j->request.items[i].rid);
    }
}

void hr_job_on_gone(void *ctx) {
    hr_job *j = ctx;
    pthread_mutex_lock(&j->lock);
    j->gone = true;
    pthread_mutex_unlock(&j->lock);
    hr_job_abort_sequences(j);
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
