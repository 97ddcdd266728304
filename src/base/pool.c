/* The compute pool. */
#include "base/pool.h"

#include "base/cores.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A waiting worker spins, then sleeps. For its next job it spins about 100 us, longer than the gap
 * between two steps of a busy engine. In a barrier it spins for less: workers come there together,
 * and the one that comes late has often lost its core, perhaps to the very worker that waits. It
 * yields for about a millisecond then, since waking many sleepers takes longer than most waits. */
enum { SPINS_FOR_A_JOB = 8000, SPINS_IN_A_BARRIER = 2000, YIELDS_IN_A_BARRIER = 2000 };

struct hr_pool {
    unsigned n_workers, n_started;
    pthread_t *threads;
    hr_core_note *cores; /* of each worker */
    hr_pool_job job;
    void *arg;
    _Alignas(64) _Atomic uint32_t generation; /* futex: raised once per job */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic uint32_t arrived; /* barrier */
    _Alignas(64) _Atomic uint32_t phase;   /* futex: raised once per barrier */
    _Atomic uint32_t barrier_sleepers;
    _Atomic int stop;
};

typedef struct worker_start {
    hr_pool *pool;
    unsigned worker;
} worker_start;

enum {
    FP_MODE = 0x8000 /* FTZ */ | 0x0040 /* DAZ */ | 0x1F80 /* all exceptions masked, nearest */
};

unsigned hr_fp_enter(void) {
    unsigned saved = _mm_getcsr();
    _mm_setcsr(FP_MODE);
    return saved;
}

void hr_fp_restore(unsigned saved) {
    _mm_setcsr(saved);
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void run_job(hr_pool *pool, unsigned worker) {
    hr_core_note_here(pool->cores, worker);
    unsigned saved = hr_fp_enter();
    pool->job(pool->arg, worker, pool->n_workers);
    HR_ASSERT((_mm_getcsr() & 0xFFC0u) == FP_MODE);
    hr_fp_restore(saved);
}

static uint32_t wait_for_generation_after(hr_pool *pool, uint32_t seen) {
    for (int i = 0; i < SPINS_FOR_A_JOB; i++) {
        uint32_t now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        if (now != seen)
            return now;
        _mm_pause();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    uint32_t now;
    while ((now = atomic_load(&pool->generation)) == seen)
        futex_wait(&pool->generation, seen);
    atomic_fetch_sub(&pool->sleepers, 1);
    return now;
}

static bool is_over(const hr_pool *pool, uint32_t phase) {
    return atomic_load_explicit(&pool->phase, memory_order_acquire) != phase;
}

static void wait_for_phase_after(hr_pool *pool, unsigned worker, uint32_t phase) {
    for (int i = 0; i < SPINS_IN_A_BARRIER; i++) {
        if (is_over(pool, phase))
            return;
        _mm_pause();
    }
    hr_core_leave_shared(pool->cores, worker, pool->n_workers);
    for (int i = 0; i < YIELDS_IN_A_BARRIER; i++) {
        if (is_over(pool, phase))
            return;
        sched_yield();
    }
    atomic_fetch_add(&pool->barrier_sleepers, 1);
    while (!is_over(pool, phase))
        futex_wait(&pool->phase, phase);
    atomic_fetch_sub(&pool->barrier_sleepers, 1);
}

void hr_pool_barrier(hr_pool *pool, unsigned worker) {
    uint32_t phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) + 1 < pool->n_workers) {
        wait_for_phase_after(pool, worker, phase);
        return;
    }
    atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
    atomic_store(&pool->phase, phase + 1); /* before sleepers is read, as they add and then look */
    if (atomic_load(&pool->barrier_sleepers) > 0)
        futex_wake_all(&pool->phase);
}

static void *worker_main(void *arg) {
    worker_start start = *(worker_start *)arg;
    free(arg);
    hr_pool *pool = start.pool;
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for_generation_after(pool, seen);
        if (atomic_load(&pool->stop))
            return NULL;
        run_job(pool, start.worker);
        hr_pool_barrier(pool, start.worker);
    }
}

hr_status hr_pool_create(unsigned n_workers, hr_pool **out, hr_error *err) {
    if (n_workers == 0 || n_workers > 1024)
        return hr_fail(err, HR_ERR_INVALID, "a pool needs 1 to 1024 workers, got %u", n_workers);
    hr_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (pool == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a pool");
    memset(pool, 0, sizeof *pool);
    pool->n_workers = n_workers;
    pool->threads = calloc(n_workers, sizeof *pool->threads);
    pool->cores = aligned_alloc(64, n_workers * sizeof *pool->cores);
    if (pool->threads == NULL || pool->cores == NULL)
        goto no_memory;
    for (unsigned w = 0; w < n_workers; w++)
        atomic_init(&pool->cores[w].core, -1);
    for (unsigned w = 1; w < n_workers; w++) {
        worker_start *start = malloc(sizeof *start);
        if (start == NULL)
            goto no_memory;
        *start = (worker_start){pool, w};
        int rc = pthread_create(&pool->threads[w], NULL, worker_main, start);
        if (rc != 0) {
            free(start);
            hr_pool_destroy(pool);
            return hr_fail(err, HR_ERR_NO_MEMORY, "cannot start worker thread %u of %u: %s", w,
                           n_workers, strerror(rc));
        }
        pthread_setname_np(pool->threads[w], "hr-compute");
        pool->n_started = w;
    }
    hr_cores_pin(pool->threads, n_workers);
    *out = pool;
    return HR_OK;

no_memory:
    hr_pool_destroy(pool);
    return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a pool of %u workers", n_workers);
}

void hr_pool_destroy(hr_pool *pool) {
    if (pool == NULL)
        return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->generation, 1);
    futex_wake_all(&pool->generation);
    for (unsigned w = 1; w <= pool->n_started; w++)
        pthread_join(pool->threads[w], NULL);
    free(pool->threads);
    free(pool->cores);
    free(pool);
}

unsigned hr_pool_workers(const hr_pool *pool) {
    return pool->n_workers;
}

void hr_pool_run(hr_pool *pool, hr_pool_job job, void *arg) {
    pool->job = job;
    pool->arg = arg;
    if (pool->n_workers > 1) {
        atomic_fetch_add(&pool->generation, 1);
        if (atomic_load(&pool->sleepers) > 0)
            futex_wake_all(&pool->generation);
    }
    run_job(pool, 0);
    hr_pool_barrier(pool, 0);
}
