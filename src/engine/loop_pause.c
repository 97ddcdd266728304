/* Standing still: pause and continue, a cache without users, and the last requests of a stop. */
#include "base/cond.h"
#include "base/log.h"
#include "engine/loop_parts.h"

/* Inside the lock: waits until no request is unfinished, at most ms; false when some are left. */
static bool wait_idle(hr_loop *loop, uint64_t ms) {
    struct timespec until = hr_cond_deadline(ms);
    while (loop->unfinished > 0)
        if (!hr_loop_wait_done(loop, &until))
            return loop->unfinished == 0;
    return true;
}

/* What is frozen by a pause cannot finish, so a paused loop does not wait for it. */
void hr_loop_drain(hr_loop *loop, uint64_t drain_ms) {
    pthread_mutex_lock(&loop->lock);
    loop->stopping = true;
    if (!wait_idle(loop, hr_loop_is_frozen(loop) ? 0 : drain_ms)) {
        hr_loop_ask_ending_of_all(loop, HR_ENDING_STOP);
        while (!wait_idle(loop, 10000))
            hr_log(HR_LOG_WARN,
                   "stopping: waiting for the scheduler's step to end, %u requests left",
                   loop->unfinished);
    }
    pthread_mutex_unlock(&loop->lock);
}

hr_status hr_loop_pause(hr_loop *loop, hr_pause_mode mode, uint64_t timeout_ms, hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&loop->lock);
    if (loop->stopping) {
        status = hr_fail(err, HR_ERR_STOPPING, "the engine is stopping and cannot be paused");
    } else {
        loop->paused = true;
        loop->retract |= mode == HR_PAUSE_RETRACT;
        if (mode == HR_PAUSE_ABORT)
            hr_loop_ask_ending_of_all(loop, HR_ENDING_ABORT);
        status = hr_loop_wait_order(loop, hr_loop_give_order(loop), timeout_ms, err);
    }
    pthread_mutex_unlock(&loop->lock);
    return status;
}

void hr_loop_continue(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    loop->paused = false;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

hr_status hr_loop_flush_cache(hr_loop *loop, uint64_t timeout_ms, hr_error *err) {
    hr_status status = HR_OK;
    struct timespec until = hr_cond_deadline(timeout_ms);
    pthread_mutex_lock(&loop->lock);
    loop->flush_callers++;
    uint64_t before = loop->flushes, order = hr_loop_give_order(loop);
    bool in_time = true;
    while (loop->flushes == before && in_time)
        in_time = hr_loop_wait_done(loop, &until);
    if (loop->flushes == before) /* a timeout of 0 too is for requests, not for the thread */
        status = hr_loop_wait_order(loop, order, HR_LOOP_STEP_MS, err);
    loop->flush_callers--;
    if (status == HR_OK && loop->flushes == before)
        status =
            hr_fail(err, HR_ERR_BUSY, "the cache is not flushed: %u requests run and %u wait%s",
                    loop->scheduled.running, loop->live - loop->scheduled.running,
                    loop->paused ? " while generation is paused in place; pause with mode "
                                   "retract or abort"
                                 : "; wait for them, abort them or pause");
    pthread_mutex_unlock(&loop->lock);
    return status;
}
