/* Waiting for the thread, from any other: every wait has a deadline. */
#include "base/cond.h"
#include "engine/loop_parts.h"

#include <errno.h>

bool hr_loop_wait_done(hr_loop *loop, const struct timespec *until) {
    return pthread_cond_timedwait(&loop->done, &loop->lock, until) != ETIMEDOUT;
}

uint64_t hr_loop_give_order(hr_loop *loop) {
    pthread_cond_signal(&loop->work);
    return ++loop->orders;
}

hr_status hr_loop_wait_order(hr_loop *loop, uint64_t order, uint64_t timeout_ms, hr_error *err) {
    struct timespec until = hr_cond_deadline(timeout_ms);
    while (loop->orders_done < order)
        if (!hr_loop_wait_done(loop, &until) && loop->orders_done < order)
            return hr_fail(err, HR_ERR_TIMEOUT,
                           "the scheduler's step did not end within %llu ms (%u requests run)",
                           (unsigned long long)timeout_ms, loop->scheduled.running);
    return HR_OK;
}
