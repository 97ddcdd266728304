/* Time through a small struct, so that tests can stop and turn it; and deadlines, which every wait
 * has. */
#ifndef HR_BASE_CLOCK_H
#define HR_BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

/* now_ns never goes back. */
typedef struct hr_clock {
    uint64_t (*now_ns)(void *self);
    void *self;
} hr_clock;

/* The machine's monotonic clock. */
hr_clock hr_clock_monotonic(void);

static inline uint64_t hr_now_ns(const hr_clock *clock) {
    return clock->now_ns(clock->self);
}

/* An absolute time on one clock, in nanoseconds; UINT64_MAX is never reached. */
typedef uint64_t hr_deadline;

static inline hr_deadline hr_deadline_after_ms(const hr_clock *clock, uint64_t ms) {
    return hr_now_ns(clock) + ms * 1000000u;
}

static inline bool hr_deadline_passed(const hr_clock *clock, hr_deadline deadline) {
    return hr_now_ns(clock) >= deadline;
}

#endif
