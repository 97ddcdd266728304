/* Measured roofs. */
#include "kernels/check/roof.h"

#include "base/clock.h"

#include <immintrin.h>
#include <stdint.h>
#include <time.h>

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* A burst is a fraction of a millisecond. */
enum { BURSTS = 200, ROUNDS = 50000 };

__attribute__((target("avx512f"))) static double fma_avx512(void) {
    const hr_clock clock = hr_clock_monotonic();
    __m512 a[16], b = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(0.001f);
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_set1_ps((float)i);
    uint64_t best = UINT64_MAX;
    for (int burst = 0; burst < BURSTS; burst++) {
        uint64_t start = hr_now_ns(&clock);
        for (int r = 0; r < ROUNDS; r++)
            UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_fmadd_ps(a[i], b, c);
        uint64_t passed = hr_now_ns(&clock) - start;
        best = passed < best ? passed : best;
    }
    volatile float sink = 0;
    for (int i = 0; i < 16; i++)
        sink = sink + _mm512_cvtss_f32(a[i]);
    return ROUNDS * 16.0 * 32 / (double)best;
}

__attribute__((target("avx2,fma"))) static double fma_avx2(void) {
    const hr_clock clock = hr_clock_monotonic();
    __m256 a[12], b = _mm256_set1_ps(0.999f), c = _mm256_set1_ps(0.001f);
    for (int i = 0; i < 12; i++)
        a[i] = _mm256_set1_ps((float)i);
    uint64_t best = UINT64_MAX;
    for (int burst = 0; burst < BURSTS; burst++) {
        uint64_t start = hr_now_ns(&clock);
        for (int r = 0; r < ROUNDS; r++)
            UNROLL for (int i = 0; i < 12; i++) a[i] = _mm256_fmadd_ps(a[i], b, c);
        uint64_t passed = hr_now_ns(&clock) - start;
        best = passed < best ? passed : best;
    }
    volatile float sink = 0;
    for (int i = 0; i < 12; i++)
        sink = sink + _mm256_cvtss_f32(a[i]);
    return ROUNDS * 12.0 * 16 / (double)best;
}

hr_roof hr_roof_fma(void) {
    __builtin_cpu_init();
    bool wide = __builtin_cpu_supports("avx512f");
    return (hr_roof){fma_avx2(), wide ? fma_avx512() : 0};
}

typedef struct reading {
    const char *buffer;
    size_t bytes;
} reading;

__attribute__((target("avx2"))) static void read_part(void *arg, unsigned worker,
                                                      unsigned n_workers) {
    enum { AHEAD = 4096, STEP = 128 };
    const reading *r = arg;
    size_t begin, end;
    hr_split(r->bytes / STEP, worker, n_workers, &begin, &end);
    __m256i sum[4] = {_mm256_setzero_si256()};
    for (const char *p = r->buffer + begin * STEP; p < r->buffer + end * STEP; p += STEP) {
        _mm_prefetch(p + AHEAD, _MM_HINT_T0);
        _mm_prefetch(p + AHEAD + 64, _MM_HINT_T0);
        for (size_t l = 0; l < 4; l++)
            sum[l] = _mm256_add_epi32(
                sum[l], _mm256_load_si256((const __m256i *)(const void *)(p + 32 * l)));
    }
    volatile int sink = 0;
    for (int l = 0; l < 4; l++)
        sink = sink + _mm256_cvtsi256_si32(sum[l]);
}

/* Processor time where one thread does it all, as for what is held against this roof. */
static uint64_t pass_clock(const hr_pool *pool) {
    struct timespec t;
    clock_gettime(hr_pool_workers(pool) == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

double hr_roof_stream(hr_pool *pool, const char *buffer, size_t bytes, unsigned passes) {
    reading all = {buffer, bytes};
    uint64_t best = UINT64_MAX;
    for (unsigned pass = 0; pass < passes; pass++) {
        uint64_t start = pass_clock(pool);
        hr_pool_run(pool, read_part, &all);
        uint64_t passed = pass_clock(pool) - start;
        best = passed < best ? passed : best;
    }
    return (double)bytes / (double)best;
}
