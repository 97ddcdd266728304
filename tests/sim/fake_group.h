/* A collective among threads, of which any may leave. */
#ifndef HR_SIM_FAKE_GROUP_H
#define HR_SIM_FAKE_GROUP_H

#include <headrace/publisher.h>
#include <pthread.h>

enum { GROUP_RANKS = 4, GROUP_PATIENCE_MS = 300 };

typedef struct fake_group {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const void *bytes[GROUP_RANKS];
    size_t sizes[GROUP_RANKS];
    unsigned arrived, left, round;
    bool broken;
} fake_group;

typedef struct fake_rank {
    fake_group *group;
    uint32_t rank;
    unsigned rounds;   /* made */
    unsigned leave_at; /* at this round, counted from 0, the rank is gone; UINT32_MAX: never */
    unsigned lose_at;  /* in this round it is heard but hears nobody */
} fake_rank;

void fake_group_init(fake_group *group);
void fake_group_destroy(fake_group *group);
hr_group fake_group_of(fake_rank *rank);

#endif
