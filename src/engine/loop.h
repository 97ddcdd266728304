/* The scheduler's thread, and the door to it: submit, abort and drain from any thread.
 *
 * The thread is worker 0 of the compute pool. It sleeps on a condition while there is nothing to
 * do. Requests come through an inbox under the one mutex, which is never held while a step runs or
 * a callback is called, so callbacks may abort. The table of live rids, the counters and the flags
 * stand under the same mutex. */
#ifndef HR_ENGINE_LOOP_H
#define HR_ENGINE_LOOP_H

#include "engine/scheduler.h"

/* No step takes longer; who waits for a step boundary longer than this gives up. */
enum { HR_LOOP_STEP_MS = 60000 };

typedef struct hr_loop hr_loop;

typedef struct hr_loop_config {
    hr_scheduler_config scheduler; /* finish and finish_self are set by the loop */
    hr_adapter_store *store;       /* outlives the loop */
    uint32_t max_queued;
} hr_loop_config;

hr_status hr_loop_create(const hr_loop_config *config, hr_loop **out, hr_error *err);
/* Drains with 0 ms, joins the thread, frees. NULL is allowed. */
void hr_loop_destroy(hr_loop *loop);

/* As the functions of headrace/engine.h with these names. */
hr_status hr_loop_submit(hr_loop *loop, const hr_request_params *params, hr_error *err);
hr_status hr_loop_check(hr_loop *loop, const hr_request_params *params, hr_error *err);
bool hr_loop_abort(hr_loop *loop, const char *rid);
void hr_loop_abort_all(hr_loop *loop);
void hr_loop_drain(hr_loop *loop, uint64_t drain_ms);
hr_status hr_loop_pause(hr_loop *loop, hr_pause_mode mode, uint64_t timeout_ms, hr_error *err);
void hr_loop_continue(hr_loop *loop);
hr_status hr_loop_flush_cache(hr_loop *loop, uint64_t timeout_ms, hr_error *err);

/* A change of what requests are computed with, made by the scheduler's thread between two steps. */
typedef struct hr_loop_change {
    void *self;
    /* Makes it so; must not fail or block. Called at most once; NULL: nothing to do. */
    void (*apply)(void *self);
    bool base; /* base weights change: waits until no request runs, unless paused or held; nobody
                  begins meanwhile */
    bool
        hold; /* no step runs from apply until hr_loop_resume (writing in place, memory released) */
    const char *weight_version; /* NULL: unchanged */
    bool flush_cache, abort_all_requests;
    uint64_t timeout_ms;
} hr_loop_change;
/* Returns when it is made; changes are made in the order of these calls. HR_ERR_TIMEOUT (names how
 * many requests still run; a timeout of 0 too is for them, not for the step under way),
 * HR_ERR_STOPPING, HR_ERR_INVALID (the version), HR_ERR_NO_MEMORY: it is not made and never will
 * be. */
hr_status hr_loop_change_apply(hr_loop *loop, const hr_loop_change *change, hr_error *err);
/* Undoes one hold; when the last is undone steps go on, unless paused. */
void hr_loop_resume(hr_loop *loop);
/* Refuses every request with HR_ERR_UNSERVABLE and this reason, and ends those that are there as
 * soon as steps would run (not while paused or held); NULL: serves again. reason is copied. */
void hr_loop_set_unservable(hr_loop *loop, const char *reason);
/* An adapter's name is gone or changed without hr_loop_change_apply: has the thread look at those
 * that wait for it, also while paused. Does not wait. */
void hr_loop_renew_waiting(hr_loop *loop);
/* Copied, cut at size. */
void hr_loop_weight_version(hr_loop *loop, char *out, size_t size);

/* A snapshot in which requests_started = finished + aborted + running + queued. */
void hr_loop_stats_get(hr_loop *loop, hr_engine_stats *out);

#endif
