/* Counts of readers by side. */
#include "model/guard.h"

#include "base/cond.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

enum { PATIENCE_S = 30 }; /* far longer than reading the largest tensor takes */

struct hr_guard {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a reader left, or the live side was released */
    unsigned readers[2];
    unsigned live;
    bool taken; /* a writer has the live side, or waits for it */
};

hr_status hr_guard_create(hr_guard **out, hr_error *err) {
    hr_guard *guard = calloc(1, sizeof *guard);
    if (guard == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the guard of the weights");
    hr_cond_init(&guard->changed);
    pthread_mutex_init(&guard->lock, NULL);
    *out = guard;
    return HR_OK;
}

void hr_guard_destroy(hr_guard *guard) {
    if (guard == NULL)
        return;
    pthread_cond_destroy(&guard->changed);
    pthread_mutex_destroy(&guard->lock);
    free(guard);
}

/* False when until came first. Holds the lock. */
static bool wait_change(hr_guard *guard, const struct timespec *until) {
    return pthread_cond_timedwait(&guard->changed, &guard->lock, until) != ETIMEDOUT;
}

static bool wait_readers(hr_guard *guard, unsigned side) {
    struct timespec until = hr_cond_deadline(PATIENCE_S * 1000);
    while (guard->readers[side] > 0)
        if (!wait_change(guard, &until))
            return guard->readers[side] == 0;
    return true;
}

static hr_status too_long(hr_error *err) {
    return hr_fail(err, HR_ERR_BUSY,
                   "somebody has been reading weights for %d seconds (digests, values by name, an "
                   "adapter being loaded); try again",
                   PATIENCE_S);
}

hr_status hr_guard_enter(hr_guard *guard, char *const *live, hr_reading *out, hr_error *err) {
    struct timespec until = hr_cond_deadline(PATIENCE_S * 1000);
    pthread_mutex_lock(&guard->lock);
    bool free_now = !guard->taken;
    while (!free_now && wait_change(guard, &until))
        free_now = !guard->taken;
    if (free_now) {
        *out = (hr_reading){*live, guard->live};
        guard->readers[guard->live]++;
    }
    pthread_mutex_unlock(&guard->lock);
    return free_now ? HR_OK
                    : hr_fail(err, HR_ERR_BUSY,
                              "an update has been writing the weights for %d seconds; try again",
                              PATIENCE_S);
}

void hr_guard_leave(hr_guard *guard, const hr_reading *reading) {
    pthread_mutex_lock(&guard->lock);
    if (--guard->readers[reading->side] == 0)
        pthread_cond_broadcast(&guard->changed);
    pthread_mutex_unlock(&guard->lock);
}

hr_status hr_guard_wait_shadow(hr_guard *guard, hr_error *err) {
    pthread_mutex_lock(&guard->lock);
    bool left = wait_readers(guard, 1 - guard->live);
    pthread_mutex_unlock(&guard->lock);
    return left ? HR_OK : too_long(err);
}

hr_status hr_guard_take_live(hr_guard *guard, hr_error *err) {
    pthread_mutex_lock(&guard->lock);
    guard->taken = true;
    bool left = wait_readers(guard, guard->live);
    if (!left) {
        guard->taken = false;
        pthread_cond_broadcast(&guard->changed);
    }
    pthread_mutex_unlock(&guard->lock);
    return left ? HR_OK : too_long(err);
}

void hr_guard_release_live(hr_guard *guard) {
    pthread_mutex_lock(&guard->lock);
    guard->taken = false;
    pthread_cond_broadcast(&guard->changed);
    pthread_mutex_unlock(&guard->lock);
}

void hr_guard_exchange(hr_guard *guard, void (*exchange)(void *ctx), void *ctx) {
    pthread_mutex_lock(&guard->lock);
    exchange(ctx);
    guard->live = 1 - guard->live;
    pthread_mutex_unlock(&guard->lock);
}
