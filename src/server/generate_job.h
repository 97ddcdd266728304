/* A job: one HTTP request for text on its way through the engine. /generate and the OpenAI routes
 * turn their bodies into the same job and differ in how the answer is written: that is a style.
 *
 * A job belongs to its exchange and dies with it. While any of its sequences lives in the engine,
 * or its text is tokenized or its adapters are read back elsewhere, one more reference to the
 * exchange is held. */
#ifndef HR_SERVER_GENERATE_JOB_H
#define HR_SERVER_GENERATE_JOB_H

#include "format/json_writer.h"
#include "server/app.h"
#include "server/completions_request.h"
#include "server/generate_output.h"
#include "server/generate_request.h"

typedef struct hr_job hr_job;

typedef struct hr_sequence {
    hr_job *job;
    hr_generate_output output;
    bool submitted;
    bool abort_asked;
    bool dirty;           /* stream: there is something that no event has shown */
    bool all_sent;        /* stream: the final event is out */
    hr_output_mark shown; /* stream: what the events so far have shown */
} hr_sequence;

typedef struct hr_job_style {
    bool deltas; /* an event shows what is new, not all there is */
    void (*fail)(hr_exchange *exchange, const hr_error *err);
    void (*answer)(const hr_job *job, hr_json_writer *w);
    /* The object of one event. output shows all there is, or what is new; first: nothing of this
     * sequence was shown yet; weight_version is the current one. */
    void (*event)(const hr_job *job, size_t index, const hr_generate_output *output, bool first,
                  const char *weight_version, hr_json_writer *w);
    void (*error_event)(const hr_error *err, hr_buf *out); /* the object of an error */
    /* After the last sequence, before [DONE]: whole events, or nothing. May be NULL. */
    void (*last)(const hr_job *job, hr_buf *out);
} hr_job_style;

struct hr_job {
    hr_server *server;
    hr_exchange *exchange;
    const hr_job_style *style;
    int64_t created; /* Unix seconds */
    hr_generate_request request;
    hr_completion completion; /* of /v1/completions */
    uint32_t **prompts;       /* ids of texts, one array per prompt; NULL entries for input_ids */
    const char **lora_names;  /* distinct, sorted */
    size_t n_lora_names;

    hr_job *link_prev, *link_next; /* live jobs of the server, under its lock */
    bool linked;

    /* of whoever submits: the I/O thread, then perhaps a worker */
    size_t next_item;
    bool checked;
    unsigned reloads;

    pthread_mutex_t lock; /* everything below */
    hr_sequence *sequences;
    size_t n_busy; /* sequences in the engine, + 1 while they are being submitted */
    bool submitting, gone, failed;
    hr_error error;
    char abort_message[256]; /* "" = what the engine says */

    hr_generate_output snapshot; /* stream: what the next event shows; I/O thread only */
};

/* NULL when out of memory. */
hr_job *hr_job_new(hr_server *server, hr_exchange *exchange, const hr_job_style *style);
void hr_job_free(hr_job *job);

/* The request is filled in: sees to it that the exchange is answered, and takes the job over. */
void hr_job_start(hr_job *job);

/* Aborts the sequences whose rid is `rid`, or of a batch that was sent with it; all when NULL.
 * Their answers come as usual, with message (NULL: the engine's) as the reason. Thread-safe. */
void hr_jobs_abort(hr_server *server, const char *rid, const char *message);

#endif
