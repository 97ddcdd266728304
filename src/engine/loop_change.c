/* Changes of what requests are computed with. They wait in a list, on the stacks of those who ask,
 * until the thread makes them between two steps. */
#include "base/cond.h"
#include "engine/loop_parts.h"

#include <stdio.h>
#include <string.h>

/* A change that waits for its turn; on the stack of who asks for it. */
struct hr_pending_change {
    hr_pending_change *next;
    const hr_loop_change *change;
    hr_version_label *label; /* NULL: the version stays */
    bool begun, made;
};

/* ---- the thread ---- */

bool hr_loop_waits_for_requests(const hr_loop *loop) {
    return loop->changes != NULL && loop->changes->change->base && !hr_loop_is_frozen(loop);
}

bool hr_loop_may_change(const hr_loop *loop) {
    return loop->changes != NULL &&
           (!hr_loop_waits_for_requests(loop) || hr_scheduler_begun(loop->scheduler) == 0);
}

/* The next change that may be made, taken out of the list; NULL when there is none. */
static hr_pending_change *take_change(hr_loop *loop, bool *frozen) {
    pthread_mutex_lock(&loop->lock);
    hr_pending_change *next = hr_loop_may_change(loop) ? loop->changes : NULL;
    if (next != NULL) {
        loop->changes = next->next;
        next->begun = true;
        *frozen = hr_loop_is_frozen(loop);
        loop->holds += next->change->hold;
    }
    pthread_mutex_unlock(&loop->lock);
    return next;
}

/* The same version again is no new one. Only this thread changes the version. */
static hr_version_label *new_label(hr_loop *loop, hr_pending_change *pending) {
    if (pending->label == NULL || strcmp(pending->label->text, loop->weight_version) != 0)
        return pending->label;
    hr_version_label_release(pending->label, &loop->c.scheduler.alloc);
    return NULL;
}

void hr_loop_make_changes(hr_loop *loop) {
    hr_pending_change *next;
    bool frozen;
    while ((next = take_change(loop, &frozen)) != NULL) {
        const hr_loop_change *change = next->change;
        if (change->apply != NULL)
            change->apply(change->self);
        hr_scheduler_change scheduled = {.base = change->base && !change->hold,
                                         .frozen = frozen && !change->hold,
                                         .flush = change->flush_cache,
                                         .label = new_label(loop, next)};
        hr_scheduler_changed(loop->scheduler, &scheduled);
        pthread_mutex_lock(&loop->lock);
        if (scheduled.label != NULL)
            memcpy(loop->weight_version, scheduled.label->text, sizeof loop->weight_version);
        next->made = true;
        loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
        pthread_cond_broadcast(&loop->done);
        pthread_mutex_unlock(&loop->lock);
    }
}

bool hr_loop_is_held(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    bool held = loop->holds > 0;
    pthread_mutex_unlock(&loop->lock);
    return held;
}

/* ---- who asks ---- */

/* Inside the lock. */
static void append_change(hr_loop *loop, hr_pending_change *pending) {
    hr_pending_change **end = &loop->changes;
    while (*end != NULL)
        end = &(*end)->next;
    *end = pending;
}

static void drop_change(hr_loop *loop, const hr_pending_change *pending) {
    hr_pending_change **link = &loop->changes;
    while (*link != pending)
        link = &(*link)->next;
    *link = pending->next;
    pthread_cond_signal(&loop->work);
}

/* Inside the lock: whether it was made; what has begun is waited for. */
static bool wait_change(hr_loop *loop, const hr_pending_change *pending, uint64_t timeout_ms) {
    struct timespec until = hr_cond_deadline(timeout_ms), step = hr_cond_deadline(HR_LOOP_STEP_MS);
    uint64_t order = hr_loop_give_order(loop);
    bool in_time = true, step_in_time = true;
    while (!pending->made && in_time)
        in_time = hr_loop_wait_done(loop, &until);
    while (!pending->made && loop->orders_done < order && step_in_time)
        step_in_time = hr_loop_wait_done(loop, &step);
    while (!pending->made && pending->begun)
        pthread_cond_wait(&loop->done, &loop->lock); /* apply does not block */
    return pending->made;
}

hr_status hr_loop_change_apply(hr_loop *loop, const hr_loop_change *change, hr_error *err) {
    const hr_alloc *alloc = &loop->c.scheduler.alloc;
    hr_pending_change pending = {.change = change};
    hr_status status = HR_OK;
    if (change->weight_version != NULL)
        HR_TRY(hr_version_label_create(change->weight_version, alloc, &pending.label, err));
    pthread_mutex_lock(&loop->lock);
    if (loop->stopping) {
        status = hr_fail(err, HR_ERR_STOPPING, "the engine is stopping; nothing was changed");
    } else {
        if (change->abort_all_requests)
            hr_loop_ask_ending_of_all(loop, HR_ENDING_ABORT);
        append_change(loop, &pending);
        if (!wait_change(loop, &pending, change->timeout_ms)) {
            drop_change(loop, &pending);
            status = hr_fail(err, HR_ERR_TIMEOUT,
                             "%u requests still ran after %llu ms; nothing was changed: wait "
                             "longer, abort them, or pause generation",
                             loop->scheduled.running, (unsigned long long)change->timeout_ms);
        }
    }
    pthread_mutex_unlock(&loop->lock);
    if (status != HR_OK)
        hr_version_label_release(pending.label, alloc);
    return status;
}

void hr_loop_resume(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    HR_ASSERT(loop->holds > 0);
    loop->holds--;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_set_unservable(hr_loop *loop, const char *reason) {
    pthread_mutex_lock(&loop->lock);
    snprintf(loop->unservable, sizeof loop->unservable, "%s", reason != NULL ? reason : "");
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_renew_waiting(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}
