/* What the parts of a job do for each other: generate_prepare.c (all that is known before the
 * engine hears of it), generate_submit.c (handing over), generate_callbacks.c (the engine's calls)
 * and generate_answer.c; generate_job.c is its life. Private to them. */
#ifndef HR_SERVER_GENERATE_JOB_PARTS_H
#define HR_SERVER_GENERATE_JOB_PARTS_H

#include "server/generate_job.h"

/* ---- generate_job.c ---- */

/* One busy part is done; with the last one the answer can be written. The lock is held, and gone on
 * return; the job may be too. */
void hr_job_leave(hr_job *j);
/* Keeps the first failure. */
void hr_job_fail(hr_job *j, const hr_error *err);
/* Aborts what still runs. */
void hr_job_abort_sequences(hr_job *j);
/* Of hr_exchange_async: the client went away; the exchange is gone. */
void hr_job_on_gone(void *job);
void hr_job_release(void *job);

/* ---- generate_prepare.c ---- */

/* Sequences, names of adapters, seeds. */
hr_status hr_job_prepare(hr_job *j, hr_error *err);
size_t hr_job_text_bytes(const hr_job *j);
/* Texts become ids, which takes long for long ones; then the size of the answer is known. */
hr_status hr_job_tokenize(hr_job *j, hr_error *err);

/* ---- generate_submit.c ---- */

/* Submits the sequences. False: it goes on on the thread for recalls. */
bool hr_job_submit(hr_job *j);
void hr_job_end_submitting(hr_job *j);

/* ---- generate_callbacks.c ---- */

/* Of a sequence, with its callbacks. */
hr_request_params hr_job_engine_params(hr_sequence *s);

/* ---- generate_answer.c ---- */

/* A stream is wanted, and nothing has failed yet. */
bool hr_job_can_stream(hr_job *j);
void hr_job_start_stream(hr_exchange *exchange, hr_job *j);
/* Of hr_exchange_async: the job is done, or its stream can begin. */
void hr_job_on_ready(hr_exchange *exchange, void *job);

#endif
