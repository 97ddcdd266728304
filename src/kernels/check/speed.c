/* Speeds of the ops. */
#include "kernels/check/speed.h"

#include "base/machine.h"
#include "base/pool.h"
#include "kernels/check/inputs.h"

#include <stdlib.h>
#include <time.h>

/* Processor time of this thread: what others do on the machine in between does not count. */
static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { BUFFER = 256 << 20, N = 4096, K = 1024, MAX_M = 256, VOCAB = 49152 };

struct hr_speed {
    char *weights; /* BUFFER bytes, of which each call takes another part */
    void *x, *scratch;
    float *floats, *y, *want;
    uint32_t pages[64];
};

typedef struct timed_op {
    const char *name;
    /* Runs once on part `turn` of the weights; results are in y. */
    void (*run)(hr_speed *s, const hr_kernels *k, uint32_t size, unsigned turn);
    uint32_t size;
    size_t results;     /* floats of y to compare */
    double flop, bytes; /* per run; the larger share of a roof is what counts */
} timed_op;

static char *part(hr_speed *s, size_t bytes, unsigned turn) {
    return s->weights + turn % (BUFFER / bytes) * bytes;
}

static void run_gemm(hr_speed *s, const hr_kernels *k, uint32_t m, unsigned turn) {
    k->gemm[HR_COMPUTE_BF16](&(hr_gemm_args){.x = s->x,
                                             .ldx = K,
                                             .m = m,
                                             .k = K,
                                             .w = part(s, (size_t)N * K * 2, turn),
                                             .panel_begin = 0,
                                             .panel_end = N / HR_PANEL,
                                             .y = s->y,
                                             .ldy = N + 16,
                                             .scratch = s->scratch});
}

static void run_gemm_f32(hr_speed *s, const hr_kernels *k, uint32_t m, unsigned turn) {
    k->gemm[HR_COMPUTE_F32](&(hr_gemm_args){.x = s->floats,
                                            .ldx = K,
                                            .m = m,
                                            .k = K,
                                            .w = part(s, (size_t)N * K * 4, turn),
                                            .panel_begin = 0,
                                            .panel_end = N / HR_PANEL,
                                            .y = s->y,
                                            .ldy = N + 16,
                                            .scratch = s->scratch});
}

static void run_lora(hr_speed *s, const hr_kernels *k, uint32_t m, unsigned turn) {
    memset(s->y, 0, (size_t)m * N * sizeof *s->y);
    k->lora_split[HR_COMPUTE_BF16](s->floats, 16, m, 1, 2.0f, s->scratch, 32);
    k->lora_expand[HR_COMPUTE_BF16](
        &(hr_lora_expand_args){.h = s->scratch,
                               .ldh = 32,
                               .m = m,
                               .n_leaves = 1,
                               .b = part(s, (size_t)N * 32, turn),
                               .panel_begin = 0,
                               .panel_end = N / HR_PANEL,
                               .y = s->y,
                               .ldy = N,
                               .scratch = (char *)s->scratch + (1 << 20)});
}

static void run_attention(hr_speed *s, const hr_kernels *k, uint32_t rows, unsigned turn) {
    k->attention[HR_COMPUTE_BF16](&(hr_attention_args){.q = s->x,
                                                       .ldq = 192,
                                                       .head_stride = 64,
                                                       .n_rows = rows,
                                                       .n_heads = 3,
                                                       .head_dim = 64,
                                                       .first_pos = 1000,
                                                       .kv = part(s, 1 << 19, turn),
                                                       .page_stride = 8192,
                                                       .pages = s->pages,
                                                       .scale = 0.125f,
                                                       .out = s->y,
                                                       .ldo = 192,
                                                       .out_head_stride = 64,
                                                       .scratch = s->scratch});
}

static void run_rmsnorm(hr_speed *s, const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->rmsnorm[HR_COMPUTE_BF16](s->floats, s->floats + n, n, n, 1e-5f, s->y);
}

static void run_silu(hr_speed *s, const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->silu_mul[HR_COMPUTE_BF16](s->floats, s->floats + n, n, n, s->y);
}

static void run_lse(hr_speed *s, const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    hr_lse lse = k->lse(s->floats, n);
    s->y[0] = lse.max;
    s->y[1] = lse.log_sum;
}

static void run_top_k(hr_speed *s, const hr_kernels *k, uint32_t n, unsigned turn) {
    (void)turn;
    k->top_k(s->floats, n, 20, (uint32_t *)(void *)(s->y + 20), s->y, s->scratch);
}

#define GEMM(m)                                                                                    \
    { "gemm bf16 4096x1024 m=" #m, run_gemm, m, (size_t)(m) * (N + 16), 2.0 * (m)*N *K, 2.0 * N *K }

static const timed_op OPS[] = {
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
static double time_of(hr_speed *s, const hr_kernels *k, const timed_op *o) {
    double best = 1e9, begin = now_s(), start = begin, end;
    unsigned runs = 1, turn = 0;
    do {
        for (unsigned r = 0; r < runs; r++)
            o->run(s, k, o->size, turn++);
        end = now_s();
        best = (end - start) / runs < best ? (end - start) / runs : best;
        if (end - start < 20e-6)
            runs *= 2;
        start = end;
    } while (end - begin < 0.1);
    return best;
}

static bool same_bits(hr_speed *s, const hr_kernels *ref, const hr_kernels *k, const timed_op *o) {
    memset(s->y, 0, o->results * sizeof *s->y);
    o->run(s, ref, o->size, 1);
    memcpy(s->want, s->y, o->results * sizeof *s->y);
    memset(s->y, 0, o->results * sizeof *s->y);
    o->run(s, k, o->size, 1);
    return memcmp(s->want, s->y, o->results * sizeof *s->y) == 0;
}

hr_speed *hr_speed_create(void) {
    rng r = {1};
    hr_speed *s = calloc(1, sizeof *s);
    if (s == NULL)
        abort();
    s->weights = hr_pages_alloc(BUFFER);
    if (s->weights == NULL)
        abort();
    for (size_t i = 0; i < BUFFER / 2; i++) {
        uint16_t value = (uint16_t)(random_bits(&r, INPUT_NORMAL) >> 16);
        memcpy(s->weights + 2 * i, &value, 2);
    }
    s->x = random_elements(&r, INPUT_NORMAL, HR_COMPUTE_BF16, MAX_M * K);
    s->floats = random_floats(&r, INPUT_NORMAL, VOCAB + MAX_M * K);
    s->y = bytes_of((size_t)MAX_M * (N + 16) * sizeof *s->y);
    s->want = bytes_of((size_t)MAX_M * (N + 16) * sizeof *s->want);
    s->scratch = bytes_of(HR_SCRATCH_BYTES);
    for (uint32_t i = 0; i < 64; i++)
        s->pages[i] = i;
    return s;
}

void hr_speed_destroy(hr_speed *s) {
    hr_pages_free(s->weights, BUFFER);
    free(s->x);
    free(s->floats);
    free(s->y);
    free(s->want);
    free(s->scratch);
    free(s);
}

size_t hr_speed_ops(void) {
    return sizeof OPS / sizeof OPS[0];
}

const char *hr_speed_name(size_t op) {
    return OPS[op].name;
}

const char *hr_speed_buffer(const hr_speed *s, size_t *bytes) {
    *bytes = BUFFER;
    return s->weights;
}

hr_speed_result hr_speed_measure(hr_speed *s, const hr_kernels *ref, const hr_kernels *k,
                                 size_t op) {
    unsigned saved = hr_fp_enter();
    bool same = same_bits(s, ref, k, &OPS[op]);
    double seconds = time_of(s, k, &OPS[op]);
    hr_fp_restore(saved);
    return (hr_speed_result){same, seconds, OPS[op].flop / seconds / 1e9,
                             OPS[op].bytes / seconds / 1e9};
}
