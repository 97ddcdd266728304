/* A table of every op on every tier of this machine: are the bits those of the reference, how fast,
 * and which part of the roof is that. The roofs are measured in the same run, on one thread: fused
 * multiply-adds in registers, and reading a buffer that no cache holds. Run by hand; the tests
 * proper are beside it. */
#include "cases.h"

#include "base/pool.h"

#include <immintrin.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* A roof is the best of many bursts of a fraction of a millisecond. */
enum { BURSTS = 200, ROUNDS = 50000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

__attribute__((target("avx512f"))) static double fma_roof_avx512(void) {
    __m512 a[16], b = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(0.001f);
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_set1_ps((float)i);
    double seconds = 1e9;
    for (int burst = 0; burst < BURSTS; burst++) {
        double start = now(), passed;
        for (int r = 0; r < ROUNDS; r++)
            UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_fmadd_ps(a[i], b, c);
        passed = now() - start;
        seconds = passed < seconds ? passed : seconds;
    }
    volatile float sink = 0;
    for (int i = 0; i < 16; i++)
        sink = sink + _mm512_cvtss_f32(a[i]);
    return ROUNDS * 16.0 * 32 / seconds / 1e9;
}

__attribute__((target("avx2,fma"))) static double fma_roof_avx2(void) {
    __m256 a[12], b = _mm256_set1_ps(0.999f), c = _mm256_set1_ps(0.001f);
    for (int i = 0; i < 12; i++)
        a[i] = _mm256_set1_ps((float)i);
    double seconds = 1e9;
    for (int burst = 0; burst < BURSTS; burst++) {
        double start = now(), passed;
        for (int r = 0; r < ROUNDS; r++)
            UNROLL for (int i = 0; i < 12; i++) a[i] = _mm256_fmadd_ps(a[i], b, c);
        passed = now() - start;
        seconds = passed < seconds ? passed : seconds;
    }
    volatile float sink = 0;
    for (int i = 0; i < 12; i++)
        sink = sink + _mm256_cvtss_f32(a[i]);
    return ROUNDS * 12.0 * 16 / seconds / 1e9;
}

enum { BUFFER = 256 << 20, N = 4096, K = 1024, MAX_M = 256, VOCAB = 49152 };

/* Reading, part by part as the weights of one layer are read; the best part. */
__attribute__((target("avx2"))) static double stream_roof(const char *buffer) {
    const size_t part = (size_t)N * K * 2;
    double best = 0;
    for (size_t at = 0; at < 32 * (size_t)BUFFER; at += part) {
        const char *p = buffer + at % BUFFER;
        __m256i sum[4] = {_mm256_setzero_si256()};
        double start = now();
        for (size_t i = 0; i < part; i += 128) {
            _mm_prefetch(p + i + 4096, _MM_HINT_T0);
            _mm_prefetch(p + i + 4096 + 64, _MM_HINT_T0);
            for (size_t l = 0; l < 4; l++)
                sum[l] = _mm256_add_epi32(
                    sum[l], _mm256_load_si256((const __m256i *)(const void *)(p + i + 32 * l)));
        }
        double rate = (double)part / (now() - start) / 1e9;
        volatile int sink = 0;
        for (int l = 0; l < 4; l++)
            sink = sink + _mm256_cvtsi256_si32(sum[l]);
        best = rate > best ? rate : best;
    }
    return best;
}

/* Everything an op may read or write. */
static char *weights; /* BUFFER bytes, of which each call takes another part */
static void *x, *scratch;
static float *floats, *y;
static uint32_t pages[64];

typedef struct op {
    const char *name;
    /* Runs once on part `turn` of the weights; results are in y. */
    void (*run)(const hr_kernels *k, uint32_t size, unsigned turn);
    uint32_t size;
    size_t results;     /* floats of y to compare */
    double flop, bytes; /* per run; the larger share of a roof is what counts */
} op;

static char *part(size_t bytes, unsigned turn) {
    return weights + turn % (BUFFER / bytes) * bytes;
}

static void run_gemm(const hr_kernels *k, uint32_t m, unsigned turn) {
    k->gemm[HR_COMPUTE_BF16](&(hr_gemm_args){.x = x,
                                             .ldx = K,
                                             .m = m,
                                             .k = K,
                                             .w = part((size_t)N * K * 2, turn),
                                             .panel_begin = 0,
                                             .panel_end = N / HR_PANEL,
                                             .y = y,
                                             .ldy = N + 16,
                                             .scratch = scratch});
}

static void run_gemm_f32(const hr_kernels *k, uint32_t m, unsigned turn) {
    k->gemm[HR_COMPUTE_F32](&(hr_gemm_args){.x = floats,
                                            .ldx = K,
                                            .m = m,
                                            .k = K,
                                            .w = part((size_t)N * K * 4, turn),
                                            .panel_begin = 0,
                                            .panel_end = N / HR_PANEL,
                                            .y = y,
                                            .ldy = N + 16,
                                            .scratch = scratch});
}

static void run_lora(const hr_kernels *k, uint32_t m, unsigned turn) {
    memset(y, 0, (size_t)m * N * sizeof *y);
    k->lora_split[HR_COMPUTE_BF16](floats, 16, m, 1, 2.0f, scratch, 32);
    k->lora_expand[HR_COMPUTE_BF16](&(hr_lora_expand_args){.h = scratch,
                                                           .ldh = 32,
                                                           .m = m,
                                                           .n_leaves = 1,
                                                           .b = part((size_t)N * 32, turn),
                                                           .panel_begin = 0,
                                                           .panel_end = N / HR_PANEL,
                                                           .y = y,
                                                           .ldy = N,
                                                           .scratch = (char *)scratch + (1 << 20)});
}

static void run_attention(const hr_kernels *k, uint32_t rows, unsigned turn) {
    k->attention[HR_COMPUTE_BF16](&(hr_attention_args){.q = x,
                                                       .ldq = 192,
                                                       .head_stride = 64,
                                                       .n_rows = rows,
                                                       .n_heads = 3,
                                                       .head_dim = 64,
                                                       .first_pos = 1000,
                                                       .kv = part(1 << 19, turn),
                                                       .page_stride = 8192,
                                                       .pages = pages,
                                                       .scale = 0.125f,
                                                       .out = y,
                                                       .ldo = 192,
                                                       .out_head_stride = 64,
                                                       .scratch = scratch});
}

static void run_rmsnorm(const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->rmsnorm[HR_COMPUTE_BF16](floats, floats + n, n, n, 1e-5f, y);
}

static void run_silu(const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->silu_mul[HR_COMPUTE_BF16](floats, floats + n, n, n, y);
}

static void run_lse(const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    hr_lse lse = k->lse(floats, n);
    y[0] = lse.max;
    y[1] = lse.log_sum;
}

static void run_top_k(const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->top_k(floats, n, 20, (uint32_t *)(void *)(y + 20), y, scratch);
}

#define GEMM(m)                                                                                    \
    { "gemm bf16 4096x1024 m=" #m, run_gemm, m, (size_t)(m) * (N + 16), 2.0 * (m)*N *K, 2.0 * N *K }

static const op OPS[] = {
    GEMM(1),
    GEMM(2),
    GEMM(4),
    GEMM(8),
    GEMM(16),
    GEMM(32),
    GEMM(64),
    GEMM(256),
    {"gemm f32  4096x1024 m=1", run_gemm_f32, 1, N, 2.0 * N *K, 4.0 * N *K},
    {"gemm f32  4096x1024 m=32", run_gemm_f32, 32, 32 * (N + 16), 64.0 * N *K, 4.0 * N *K},
    {"lora expand r=16 n=4096 m=1", run_lora, 1, N, 64.0 * N, 32.0 * N},
    {"lora expand r=16 n=4096 m=64", run_lora, 64, 64 * N, 64 * 64.0 * N, 32.0 * N},
    {"attention 3x64 pos 1000, 1 row", run_attention, 1, 96, 3 * 1001 * 256.0, 1001 * 256.0},
    {"attention 3x64 pos 1000, 64 rows", run_attention, 64, 64 * 96, 64 * 3 * 1032 * 256.0,
     1032 * 256.0},
    {"rmsnorm 576", run_rmsnorm, 576, 288, 0, 576 * 10.0},
    {"silu_mul 1536", run_silu, 1536, 768, 0, 1536 * 10.0},
    {"lse 49152", run_lse, VOCAB, 2, 0, VOCAB * 4.0},
    {"top_k 20 of 49152", run_top_k, VOCAB, 40, 0, VOCAB * 4.0},
};

/* Seconds per run: the best of many short batches, since other work on the machine only ever adds.
 */
static double time_of(const hr_kernels *k, const op *o) {
    double best = 1e9, begin = now(), start = begin, end;
    unsigned runs = 1, turn = 0;
    do {
        for (unsigned r = 0; r < runs; r++)
            o->run(k, o->size, turn++);
        end = now();
        best = (end - start) / runs < best ? (end - start) / runs : best;
        if (end - start < 20e-6)
            runs *= 2;
        start = end;
    } while (end - begin < 0.1);
    return best;
}

static bool same_bits(const hr_kernels *k, const op *o, float *want) {
    memset(y, 0, o->results * sizeof *y);
    o->run(hr_kernels_tier(0), o->size, 1);
    memcpy(want, y, o->results * sizeof *y);
    memset(y, 0, o->results * sizeof *y);
    o->run(k, o->size, 1);
    return memcmp(want, y, o->results * sizeof *y) == 0;
}

static void fill(void) {
    rng r = {1};
    weights = aligned_alloc(2 << 20, BUFFER);
    if (weights == NULL)
        abort();
    madvise(weights, BUFFER, MADV_HUGEPAGE);
    for (size_t i = 0; i < BUFFER / 2; i++) {
        uint16_t value = (uint16_t)(random_bits(&r, INPUT_NORMAL) >> 16);
        memcpy(weights + 2 * i, &value, 2);
    }
    x = random_elements(&r, INPUT_NORMAL, HR_COMPUTE_BF16, MAX_M * K);
    floats = random_floats(&r, INPUT_NORMAL, VOCAB + MAX_M * K);
    y = bytes_of((size_t)MAX_M * (N + 16) * sizeof *y);
    scratch = bytes_of(HR_SCRATCH_BYTES);
    for (uint32_t i = 0; i < 64; i++)
        pages[i] = i;
}

int main(void) {
    unsigned saved = hr_fp_enter();
    bool all_same = true;
    fill();
    float *want = bytes_of((size_t)MAX_M * (N + 16) * sizeof *want);
    double stream = stream_roof(weights), fma[2] = {fma_roof_avx2(), 0};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        fma[1] = fma_roof_avx512();
    printf("one thread: stream %.1f GB/s, fma avx2 %.0f GFLOP/s, avx512 %.0f GFLOP/s\n", stream,
           fma[0], fma[1]);
    printf("%-34s %-7s %-5s %10s %9s %8s %6s %6s\n", "op", "tier", "bits", "us", "GFLOP/s", "GB/s",
           "fma%", "mem%");
    for (size_t i = 0; i < sizeof OPS / sizeof OPS[0]; i++)
        for (size_t t = 0; hr_kernels_tier(t) != NULL; t++) {
            const hr_kernels *k = hr_kernels_tier(t);
            bool same = same_bits(k, &OPS[i], want);
            double seconds = time_of(k, &OPS[i]);
            double gflops = OPS[i].flop / seconds / 1e9, gbytes = OPS[i].bytes / seconds / 1e9;
            all_same = all_same && same;
            printf("%-34s %-7s %-5s %10.2f %9.1f %8.1f %6.0f %6.0f\n", OPS[i].name, k->name,
                   same ? "same" : "DIFF", seconds * 1e6, gflops, gbytes,
                   100 * gflops / fma[t >= 2], 100 * gbytes / stream);
        }
    free(want);
    free(weights);
    free(x);
    free(floats);
    free(y);
    free(scratch);
    hr_fp_restore(saved);
    return all_same ? 0 : 1;
}
