/* Waiting for the thread, from any other: every wait has a deadline. */
#include "engine/loop_parts.h"

#include <errno.h>

struct timespec hr_loop_after_ms(uint64_t ms) {
    const uint64_t most_ms = 366ull * 86400 * 1000; /* keeps the sum below in range */
    ms = ms < most_ms ? ms : most_ms;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(ms / 1000);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    return until;
}

bool hr_loop_wait_done(hr_loop *loop, const struct timespec *until) {
    return pthread_cond_timedwait(&loop->done, &loop->lock, until) != ETIMEDOUT;
}

uint64_t hr_loop_give_order(hr_loop *loop) {
    pthread_cond_signal(&loop->work);
    return ++loop->orders;
}

hr_status hr_loop_wait_order(hr_loop *loop, uint64_t order, uint64_t timeout_ms, hr_error *err) {
    struct timespec until = hr_loop_after_ms(timeout_ms);
    while (loop->orders_done < order)
        if (!hr_loop_wait_done(loop, &until) && loop->orders_done < order)
            return hr_fail(err, HR_ERR_TIMEOUT,
                           "the scheduler's step did not end within %llu ms (%u requests run)",
                           (unsigned long long)timeout_ms, loop->scheduled.running);
    return HR_OK;
}
