/* The scheduler's thread: it takes what has come in out of the lock, a turn at a time, and does it
 * between two steps. */
#include "engine/loop_parts.h"

#include <stdio.h>
#include <string.h>

/* The lease and the rid are back before the caller hears of it, so what he does next finds them
 * free. */
void hr_loop_end_request(void *self, hr_request *r, const hr_finish *finish) {
    hr_loop *loop = self;
    hr_finish told = *finish;
    char adapter_version[HR_WEIGHT_VERSION_SIZE];
    if (told.adapter_version != NULL) { /* its text goes with the lease */
        snprintf(adapter_version, sizeof adapter_version, "%s", told.adapter_version);
        told.adapter_version = adapter_version;
    }
    hr_adapter_store_release(loop->c.store, &r->lease);
    pthread_mutex_lock(&loop->lock);
    hr_loop_rid_remove(loop, r);
    loop->live--;
    *(finish->type == HR_FINISH_ABORT ? &loop->aborted : &loop->finished) += 1;
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    pthread_mutex_unlock(&loop->lock);

    r->on_finish(r->ctx, &told);
    hr_request_destroy(r, &loop->c.scheduler.alloc);

    pthread_mutex_lock(&loop->lock);
    if (--loop->unfinished == 0)
        pthread_cond_broadcast(&loop->done);
    pthread_mutex_unlock(&loop->lock);
}

/* What the thread takes out of the lock at a time. */
typedef struct hr_loop_turn {
    hr_request *inbox;
    bool reap, retract, flush, change, step, fail, quit;
    uint64_t orders;
    uint64_t gone[HR_LOOP_MAX_GONE];
    uint32_t n_gone;
} hr_loop_turn;

/* Inside the lock. Running requests hold pages of the cache; waiting ones are about to, unless
 * paused. */
static bool may_flush(const hr_loop *loop) {
    hr_scheduler_stats now = hr_scheduler_stats_of(loop->scheduler);
    return now.running == 0 &&
           (hr_loop_is_frozen(loop) || (now.queued == 0 && loop->inbox_head == NULL));
}

static bool has_turn(const hr_loop *loop) {
    return loop->inbox_head != NULL || loop->reap || loop->quit || loop->n_gone > 0 ||
           loop->orders != loop->orders_done || (loop->flush_callers > 0 && may_flush(loop)) ||
           hr_loop_may_change(loop) || hr_scheduler_is_outdated(loop->scheduler) ||
           (!hr_loop_is_frozen(loop) && hr_scheduler_has_work(loop->scheduler));
}

static hr_loop_turn take_turn(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    while (!has_turn(loop))
        pthread_cond_wait(&loop->work, &loop->lock);
    hr_loop_turn turn = {.inbox = loop->inbox_head,
                         .reap = loop->reap,
                         .retract = loop->retract,
                         .flush = loop->flush_callers > 0,
                         .change = loop->changes != NULL,
                         .step = !hr_loop_is_frozen(loop),
                         .fail = loop->unservable[0] != '\0',
                         .quit = loop->quit,
                         .orders = loop->orders};
    loop->inbox_head = loop->inbox_tail = NULL;
    loop->reap = loop->retract = false;
    memcpy(turn.gone, loop->gone, loop->n_gone * sizeof *loop->gone);
    turn.n_gone = loop->n_gone;
    loop->n_gone = 0;
    hr_scheduler_close(loop->scheduler, hr_loop_waits_for_requests(loop));
    pthread_mutex_unlock(&loop->lock);
    return turn;
}

/* Steps would run, but the weights are not whole. */
static void fail_requests(hr_loop *loop) {
    char reason[sizeof loop->unservable];
    pthread_mutex_lock(&loop->lock);
    memcpy(reason, loop->unservable, sizeof reason);
    pthread_mutex_unlock(&loop->lock);
    if (reason[0] != '\0')
        hr_scheduler_fail_all(loop->scheduler, HR_ERR_UNSERVABLE, reason);
}

/* The thread stands between two steps and has done what was ordered. */
static void report_orders(hr_loop *loop, uint64_t orders) {
    pthread_mutex_lock(&loop->lock);
    if (loop->flush_callers > 0 && may_flush(loop)) {
        hr_scheduler_flush_cache(loop->scheduler);
        loop->flushes++;
    }
    loop->orders_done = orders;
    loop->scheduled = hr_scheduler_stats_of(loop->scheduler);
    pthread_cond_broadcast(&loop->done);
    pthread_mutex_unlock(&loop->lock);
}

void *hr_loop_main(void *arg) {
    hr_loop *loop = arg;
    hr_loop_turn turn;
    do {
        turn = take_turn(loop);
        while (turn.inbox != NULL) {
            hr_request *r = turn.inbox;
            turn.inbox = r->next;
            hr_scheduler_add(loop->scheduler, r);
        }
        if (turn.reap)
            hr_scheduler_reap(loop->scheduler);
        if (turn.retract)
            hr_scheduler_retract_all(loop->scheduler);
        for (uint32_t i = 0; i < turn.n_gone; i++)
            hr_scheduler_forget_adapter(loop->scheduler, turn.gone[i]);
        if (hr_scheduler_is_outdated(loop->scheduler))
            hr_scheduler_renew_waiting(loop->scheduler);
        if (turn.change) {
            hr_loop_make_changes(loop);
            turn.step = turn.step && !hr_loop_is_held(loop);
        }
        if (turn.flush || turn.orders != loop->orders_done)
            report_orders(loop, turn.orders);
        if (turn.step && turn.fail)
            fail_requests(loop);
        else if (turn.step && hr_scheduler_has_work(loop->scheduler))
            hr_scheduler_step(loop->scheduler);
    } while (!turn.quit);
    return NULL;
}

void hr_loop_adapter_gone(void *self, uint64_t id) {
    hr_loop *loop = self;
    pthread_mutex_lock(&loop->lock);
    if (loop->n_gone < HR_LOOP_MAX_GONE)
        loop->gone[loop->n_gone++] = id;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
}
