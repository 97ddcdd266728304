/* The compute pool: a fixed team of workers that run one job together, each knowing its index.
 *
 * The thread that calls hr_pool_run is worker 0 and takes part. Workers spin briefly between jobs,
 * then sleep, so an idle engine uses no CPU. Every job runs with a floating-point mode that the
 * arithmetic promise needs (round to nearest even, denormals flushed in and out), set on entry and
 * restored on exit. */
#ifndef HR_BASE_POOL_H
#define HR_BASE_POOL_H

#include "base/error.h"

#include <stddef.h>

typedef struct hr_pool hr_pool;

/* worker is 0..n_workers-1. */
typedef void (*hr_pool_job)(void *arg, unsigned worker, unsigned n_workers);

/* Starts n_workers - 1 threads (n_workers >= 1). They are pinned where the process has as many
 * cores reserved as there are workers, by an affinity mask smaller than the machine. */
hr_status hr_pool_create(unsigned n_workers, hr_pool **out, hr_error *err);
/* Joins the threads. NULL is allowed. */
void hr_pool_destroy(hr_pool *pool);

unsigned hr_pool_workers(const hr_pool *pool);

/* Runs job once on every worker and returns when all are done. One caller at a time. */
void hr_pool_run(hr_pool *pool, hr_pool_job job, void *arg);

/* Inside a job: returns when every worker of the pool has called it; what any wrote before is then
 * visible to all. Every worker must call it the same number of times. */
void hr_pool_barrier(hr_pool *pool, unsigned worker);

/* Sets the floating-point mode of a job on the calling thread; returns what hr_fp_restore takes.
 * For code that runs kernels outside a pool (tests, tools). */
unsigned hr_fp_enter(void);
void hr_fp_restore(unsigned saved);

/* Part `index` of `parts` near-equal contiguous parts of [0, n): [*begin, *end). */
static inline void hr_split(size_t n, unsigned index, unsigned parts, size_t *begin, size_t *end) {
    size_t base = n / parts, rest = n % parts;
    *begin = base * index + (index < rest ? index : rest);
    *end = *begin + base + (index < rest ? 1 : 0);
}

#endif
