#include "fake_group.h"

#include "base/error.h"

#include <errno.h>
#include <string.h>
#include <time.h>

void fake_group_init(fake_group *group) {
    memset(group, 0, sizeof *group);
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->changed, NULL);
}

void fake_group_destroy(fake_group *group) {
    pthread_mutex_destroy(&group->lock);
    pthread_cond_destroy(&group->changed);
}

/* Until all have come (or gone on) or patience is over; the lock is held. */
static bool wait_for(fake_group *g, const unsigned *count, unsigned round) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += GROUP_PATIENCE_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (!g->broken && g->round == round && *count < GROUP_RANKS) {
        if (pthread_cond_timedwait(&g->changed, &g->lock, &until) == ETIMEDOUT)
            g->broken = true;
    }
    pthread_cond_broadcast(&g->changed);
    return !g->broken;
}

static hr_status gone(hr_error *err) {
    return hr_fail(err, HR_ERR_PEER, "a rank is gone");
}

static hr_status allgather(void *self, const void *mine, size_t n,
                           void (*each)(void *ctx, uint32_t rank, const void *bytes, size_t n),
                           void *ctx, hr_error *err) {
    fake_rank *r = self;
    fake_group *g = r->group;
    bool loses = r->rounds == r->lose_at;
    if (r->rounds++ >= r->leave_at)
        return gone(err);
    pthread_mutex_lock(&g->lock);
    unsigned round = g->round;
    g->bytes[r->rank] = mine;
    g->sizes[r->rank] = n;
    g->arrived++;
    bool whole = wait_for(g, &g->arrived, round);
    pthread_mutex_unlock(&g->lock);
    if (!whole)
        return gone(err);
    for (uint32_t i = 0; i < GROUP_RANKS && !loses; i++)
        each(ctx, i, g->bytes[i], g->sizes[i]);
    /* Nobody goes on while another still reads what it gave. */
    pthread_mutex_lock(&g->lock);
    if (++g->left == GROUP_RANKS) {
        g->arrived = g->left = 0;
        g->round++;
        pthread_cond_broadcast(&g->changed);
    }
    whole = wait_for(g, &g->left, round);
    pthread_mutex_unlock(&g->lock);
    return whole && !loses ? HR_OK : gone(err);
}

hr_group fake_group_of(fake_rank *rank) {
    return (hr_group){rank, rank->rank, GROUP_RANKS, allgather};
}
