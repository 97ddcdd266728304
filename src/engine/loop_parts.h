/* The loop's state, and what its parts do for each other: loop_thread.c (the thread and its turns),
 * loop_rids.c (live requests by their rid), loop_submit.c, loop_change.c (weights between two
 * steps), loop_pause.c and loop_wait.c (who waits for the thread); loop.c begins and ends them.
 * Private to them. */
#ifndef HR_ENGINE_LOOP_PARTS_H
#define HR_ENGINE_LOOP_PARTS_H

#include "engine/loop.h"

#include <pthread.h>
#include <time.h>

/* Adapters that may go for good between two steps with their pages dropped at once; pages of more
 * of them are simply not used again, and leave the cache as the least recently used. */
enum { HR_LOOP_MAX_GONE = 64 };

/* A change that waits for its turn: loop_change.c. */
typedef struct hr_pending_change hr_pending_change;

struct hr_loop {
    hr_loop_config c;
    hr_scheduler *scheduler; /* the thread's own */
    pthread_t thread;

    pthread_mutex_t lock; /* all below */
    pthread_cond_t work;  /* something for the thread to do */
    pthread_cond_t done;  /* unfinished fell to 0, an order is carried out, or the cache is empty */
    hr_request *inbox_head, *inbox_tail;
    bool reap, stopping, quit;
    bool paused;                /* no step begins */
    uint32_t holds;             /* nor while any of these is left */
    hr_pending_change *changes; /* in the order in which they are to be made */
    char weight_version[HR_WEIGHT_VERSION_SIZE];
    char unservable[256];         /* why no request is taken; "": all is well */
    bool retract;                 /* order: running requests go back to the queue */
    uint64_t orders, orders_done; /* the thread has stood between two steps after each of these */
    uint32_t flush_callers;       /* waiting for the cache to be emptied */
    uint64_t flushes;             /* how often it was */
    uint64_t gone[HR_LOOP_MAX_GONE]; /* adapters whose pages nobody will look for again */
    uint32_t n_gone;
    hr_request **rids; /* [n_buckets], live requests */
    size_t n_buckets;
    uint32_t live;       /* accepted and not ended */
    uint32_t unfinished; /* accepted and on_finish has not returned */
    uint64_t started, finished, aborted;
    hr_scheduler_stats scheduled; /* as of the last change of running or queue */
    uint64_t seeds;               /* counter of requests without a seed */
};

/* Inside the lock: no step may begin, so what runs stands still with its KV. */
static inline bool hr_loop_is_frozen(const hr_loop *loop) {
    return loop->paused || loop->holds > 0;
}

/* ---- loop_thread.c ---- */

void *hr_loop_main(void *loop);
/* Called by the scheduler for every request it ends. */
void hr_loop_end_request(void *loop, hr_request *r, const hr_finish *finish);
/* Called by the store, on any thread, the scheduler's too. */
void hr_loop_adapter_gone(void *loop, uint64_t id);

/* ---- loop_rids.c; all inside the lock ---- */

hr_request *hr_loop_rid_find(hr_loop *loop, const char *rid); /* NULL: no such live request */
void hr_loop_rid_insert(hr_loop *loop, hr_request *r);
void hr_loop_rid_remove(hr_loop *loop, hr_request *r);
/* Has every live request end, at the thread's next turn; the first reason stays. */
void hr_loop_ask_ending_of_all(hr_loop *loop, int ending);

/* ---- loop_change.c ---- */

/* Inside the lock: the next change waits until nobody runs on the weights that it changes. */
bool hr_loop_waits_for_requests(const hr_loop *loop);
/* Inside the lock, on the thread: the next change may be made now. */
bool hr_loop_may_change(const hr_loop *loop);
/* On the thread, between two steps: makes every change that may be made. */
void hr_loop_make_changes(hr_loop *loop);
/* A change that was just made may hold the steps. */
bool hr_loop_is_held(hr_loop *loop);

/* ---- loop_wait.c: every wait has a deadline; inside the lock ---- */

/* Waits for the next change of what `done` stands for; false when until has passed, an
 * hr_cond_deadline. */
bool hr_loop_wait_done(hr_loop *loop, const struct timespec *until);
/* Has the thread look at the orders; returns what orders_done must reach. */
uint64_t hr_loop_give_order(hr_loop *loop);
/* HR_ERR_TIMEOUT names what the thread is busy with. */
hr_status hr_loop_wait_order(hr_loop *loop, uint64_t order, uint64_t timeout_ms, hr_error *err);

#endif
