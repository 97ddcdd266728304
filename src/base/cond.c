/* Monotonic conditions and their deadlines. */
#include "base/cond.h"

void hr_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

struct timespec hr_cond_deadline(uint64_t ms) {
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
