/* The machine's monotonic clock. */
#include "base/clock.h"

#include <stddef.h>
#include <time.h>

static uint64_t monotonic_now_ns(void *self) {
    (void)self;
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

hr_clock hr_clock_monotonic(void) {
    return (hr_clock){.now_ns = monotonic_now_ns, .self = NULL};
}
