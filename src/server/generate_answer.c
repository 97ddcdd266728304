/* Answers of jobs: whole, or as the events of a stream. */
#include "server/generate_job_parts.h"

#include "server/reply.h"

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

void hr_job_start_stream(hr_exchange *exchange, hr_job *j) {
    hr_exchange_async async = {
        .ctx = j, .next = next_events, .gone = hr_job_on_gone, .release = hr_job_release};
    hr_exchange_stream(exchange, &async);
}

bool hr_job_can_stream(hr_job *j) {
    pthread_mutex_lock(&j->lock);
    bool stream = j->request.stream && !j->failed;
    pthread_mutex_unlock(&j->lock);
    return stream;
}

void hr_job_on_ready(hr_exchange *exchange, void *ctx) {
    hr_job *j = ctx;
    if (hr_job_can_stream(j))
        hr_job_start_stream(exchange, j);
    else
        answer(exchange, j);
}
