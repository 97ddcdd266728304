/* The roofs that speeds are held against, measured where and when the speeds are.
 *
 * Other work on a machine only ever takes away, so a roof is the best of many short bursts. */
#ifndef HR_KERNELS_CHECK_ROOF_H
#define HR_KERNELS_CHECK_ROOF_H

#include "base/pool.h"

#include <stddef.h>

typedef struct hr_roof {
    double fma_avx2, fma_avx512; /* GFLOP/s of fused multiply-adds in registers; 0: not there */
} hr_roof;

/* On the calling thread, a few tens of milliseconds. */
hr_roof hr_roof_fma(void);

/* GB/s of reading `bytes` at `buffer` (64-byte aligned, a multiple of 128) once, in order, all
 * workers of the pool at the same time, each its own part; the best of `passes` passes. A pool of
 * one worker is timed by the thread's processor time. */
double hr_roof_stream(hr_pool *pool, const char *buffer, size_t bytes, unsigned passes);

#endif
