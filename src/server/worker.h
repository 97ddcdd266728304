/* A few threads that run tasks in the order they come: management calls that take long or wait. */
#ifndef HR_SERVER_WORKER_H
#define HR_SERVER_WORKER_H

#include "base/error.h"

typedef struct hr_worker hr_worker;

#define HR_WORKER_MAX_THREADS 8

/* n_threads: 1 to HR_WORKER_MAX_THREADS. */
hr_status hr_worker_create(unsigned n_threads, hr_worker **out, hr_error *err);

/* Queues run(arg). ERR_STOPPING after hr_worker_finish, ERR_BUSY when too many wait; run is not
 * called then. */
hr_status hr_worker_submit(hr_worker *worker, void (*run)(void *arg), void *arg, hr_error *err);

/* Takes no more tasks and returns when all that were taken have run. */
void hr_worker_finish(hr_worker *worker);

/* Finishes and frees. NULL is allowed. */
void hr_worker_destroy(hr_worker *worker);

#endif
