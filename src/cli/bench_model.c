/* `headrace bench model`: how fast steps of a model are, beside what this machine can do in the
 * same minute: reading a buffer of the model's size (decode) and fused multiply-adds (prefill).
 *
 * Steps run without an engine: hr_model_forward over made-up tokens, then the largest logit of each
 * wanted row. Scenes are measured in turns and each counts by its best step, since other work on a
 * machine only ever takes away. */
#include "base/machine.h"
#include "cli/bench.h"
#include "kernels/check/roof.h"
#include "model/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ADAPTERS = 64, MAX_SEQS = 64, MAX_ROWS = 2048, ROUNDS = 8, STREAM_PASSES = 80 };

/* One kind of step: n_seqs sequences that already hold `context` positions get `rows` more each.
 * Sequence i runs on adapter i % n_adapters; 0 adapters: the base. */
typedef struct scene {
    const char *name;
    uint32_t n_seqs, rows, context, n_adapters;
    uint64_t best_ns;
} scene;

static const scene SCENES[] = {
    {"decode", 1, 1, 64, 0, 0},    {"decode", 2, 1, 64, 0, 0},    {"decode", 4, 1, 64, 0, 0},
    {"decode", 8, 1, 64, 0, 0},    {"decode", 16, 1, 64, 0, 0},   {"decode", 32, 1, 64, 0, 0},
    {"decode", 64, 1, 64, 0, 0},   {"decode", 1, 1, 1000, 0, 0},  {"decode", 1, 1, 4000, 0, 0},
    {"decode", 1, 1, 8000, 0, 0},  {"decode", 16, 1, 1000, 0, 0}, {"prefill", 1, 512, 0, 0, 0},
    {"prefill", 1, 2048, 0, 0, 0}, {"decode", 1, 1, 64, 1, 0},    {"decode", 16, 1, 64, 1, 0},
    {"decode", 16, 1, 64, 4, 0},   {"decode", 16, 1, 64, 16, 0},  {"decode", 32, 1, 64, 1, 0},
    {"decode", 32, 1, 64, 8, 0},   {"prefill", 1, 2048, 0, 1, 0}, {"prefill", 16, 128, 0, 16, 0},
};
enum { N_SCENES = sizeof SCENES / sizeof SCENES[0] };

typedef struct bench {
    const char *model_dir, *isa, *adapter_dirs[MAX_ADAPTERS];
    uint32_t n_adapters;
    unsigned threads;
    bool json;

    hr_pool *pool;
    hr_model *model;
    hr_model_workspace *workspace;
    hr_lora *adapters[MAX_ADAPTERS];
    hr_kv kv;
    size_t kv_bytes;
    scene scenes[N_SCENES];
    uint32_t tokens[MAX_ROWS], logit_rows[MAX_SEQS], *pages;
    hr_seq_view seqs[MAX_SEQS];
} bench;

static int parse(int argc, char **argv, bench *b, hr_error *err) {
    for (int i = 0; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--json") == 0) {
            b->json = true;
            continue;
        }
        if (value == NULL)
            return hr_fail(err, HR_ERR_INVALID, "unknown argument or missing value: %s", argv[i]);
        if (strcmp(argv[i], "--model") == 0)
            b->model_dir = value;
        else if (strcmp(argv[i], "--isa") == 0)
            b->isa = value;
        else if (strcmp(argv[i], "--threads") == 0)
            b->threads = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--adapter") == 0 && b->n_adapters < MAX_ADAPTERS)
            b->adapter_dirs[b->n_adapters++] = value;
        else
            return hr_fail(err, HR_ERR_INVALID, "unknown argument %s", argv[i]);
        i++;
    }
    if (b->model_dir == NULL)
        return hr_fail(err, HR_ERR_INVALID, "--model DIR is needed");
    return HR_OK;
}

static uint32_t pages_of(uint32_t positions) {
    return (positions + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS;
}

static bool possible(const bench *b, const scene *s) {
    return s->n_adapters <= b->n_adapters &&
           s->context + s->rows <= hr_model_info_of(b->model)->context_length;
}

static hr_status load(bench *b, hr_error *err) {
    HR_TRY(hr_pool_create(b->threads, &b->pool, err));
    hr_model_options options = {.dir = b->model_dir, .isa = b->isa, .pool = b->pool};
    HR_TRY(hr_model_load(&options, &b->model, err));
    HR_TRY(hr_model_workspace_create(b->model, b->threads, MAX_ROWS, MAX_SEQS, &b->workspace, err));
    for (uint32_t i = 0; i < b->n_adapters; i++)
        HR_TRY(hr_lora_load(b->model, b->adapter_dirs[i], &b->adapters[i], err));
    uint32_t n_pages = 0;
    for (size_t i = 0; i < N_SCENES; i++) {
        uint32_t n = SCENES[i].n_seqs * pages_of(SCENES[i].context + SCENES[i].rows);
        n_pages = n > n_pages ? n : n_pages;
    }
    b->kv.n_pages = n_pages;
    b->kv_bytes = n_pages * hr_model_info_of(b->model)->kv_page_bytes;
    b->kv.base = hr_pages_alloc(b->kv_bytes);
    b->pages = calloc(n_pages, sizeof *b->pages);
    if (b->kv.base == NULL || b->pages == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu bytes of KV cache", b->kv_bytes);
    for (uint32_t page = 0; page < n_pages; page++) {
        hr_model_kv_clear_page(b->model, &b->kv, page);
        b->pages[page] = n_pages - 1 - page;
    }
    memcpy(b->scenes, SCENES, sizeof SCENES);
    return HR_OK;
}

static void unload(bench *b) {
    for (uint32_t i = 0; i < b->n_adapters; i++)
        hr_lora_destroy(b->adapters[i]);
    hr_model_workspace_destroy(b->workspace);
    if (b->kv.base != NULL)
        hr_pages_free(b->kv.base, b->kv_bytes);
    free(b->pages);
    hr_model_destroy(b->model);
    hr_pool_destroy(b->pool);
}

static void pick_largest(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                         void *scratch, unsigned worker, unsigned n_workers) {
    (void)first;
    const hr_model_info *info = hr_model_info_of(((bench *)ctx)->model);
    for (uint32_t i = worker; i < n; i += n_workers) {
        uint32_t id;
        float value;
        info->kernels->top_k(logits + i * ld, info->config->vocab_size, 1, &id, &value, scratch);
    }
}

static hr_view view_of(bench *b, const scene *s) {
    uint32_t rows = s->n_seqs * s->rows, per_seq = pages_of(s->context + s->rows);
    uint32_t vocab = hr_model_info_of(b->model)->config->vocab_size;
    for (uint32_t row = 0; row < rows; row++)
        b->tokens[row] = (row * 2654435761u >> 8) % vocab;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        /* The engine orders sequences so that those of one adapter are neighbours. */
        uint32_t adapter = s->n_adapters > 0 ? i * s->n_adapters / s->n_seqs : 0;
        b->seqs[i] = (hr_seq_view){.first_row = i * s->rows,
                                   .n_rows = s->rows,
                                   .first_pos = s->context,
                                   .pages = b->pages + (size_t)i * per_seq,
                                   .lora = s->n_adapters > 0 ? b->adapters[adapter] : NULL};
        b->logit_rows[i] = (i + 1) * s->rows - 1;
    }
    return (hr_view){.n_rows = rows,
                     .tokens = b->tokens,
                     .n_seqs = s->n_seqs,
                     .seqs = b->seqs,
                     .n_logit_rows = s->n_seqs,
                     .logit_rows = b->logit_rows};
}

/* With one thread a step is nothing but computing, so the processor time of the process is taken:
 * what others do on the machine in between does not count. With more threads workers wait for each
 * other, and only the time on the wall says how long. */
static uint64_t step_clock(const bench *b) {
    struct timespec t;
    clock_gettime(b->threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A few steps of a scene, for about a tenth of a second, at least two. */
static void measure(bench *b, scene *s) {
    hr_view view = view_of(b, s);
    uint64_t begin = step_clock(b), start = begin, end;
    for (int step = 0; step < 2 || start - begin < 100000000; step++, start = end) {
        hr_model_forward(b->model, b->workspace, b->pool, &b->kv, &view, pick_largest, b);
        end = step_clock(b);
        if (s->best_ns == 0 || end - start < s->best_ns)
            s->best_ns = end - start;
    }
}

/* Multiply-adds of the linear layers, twice; of attention: scores and values. */
static double step_flop(const bench *b, const scene *s) {
    const hr_hf_config *c = hr_model_info_of(b->model)->config;
    double rows = (double)s->n_seqs * s->rows, heads = c->num_attention_heads;
    double q = heads * c->head_dim, kv = 2.0 * c->num_key_value_heads * c->head_dim;
    double layer = c->hidden_size * (2 * q + kv + 3.0 * c->intermediate_size);
    double seen = s->context + (s->rows + 1) / 2.0;
    double linear =
        rows * c->num_hidden_layers * layer + (double)s->n_seqs * c->vocab_size * c->hidden_size;
    return 2 * (linear + 2 * rows * c->num_hidden_layers * q * seen);
}

static double kv_bytes_read(const bench *b, const scene *s) {
    return (double)s->n_seqs * (s->context + s->rows) *
           (double)hr_model_info_of(b->model)->kv_page_bytes / HR_KV_PAGE_TOKENS;
}

static double adapter_bytes(const bench *b, const scene *s) {
    double bytes = 0;
    for (uint32_t i = 0; i < s->n_adapters; i++)
        bytes += (double)hr_lora_bytes(b->adapters[i]);
    return bytes;
}

static void report(const bench *b, double stream, double fma) {
    const hr_model_info *info = hr_model_info_of(b->model);
    if (b->json)
        printf("{\"model_bytes\": %" PRIu64 ", \"isa\": \"%s\", \"threads\": %u, "
               "\"stream_gbps\": %.2f, \"fma_gflops\": %.1f, \"scenes\": [",
               info->weight_bytes, info->kernels->name, b->threads, stream, fma);
    else
        printf("%s, %.1f MB of weights, %s, %u threads; stream %.1f GB/s, fma %.0f GFLOP/s\n"
               "%-8s %5s %5s %8s %9s %10s %10s %7s %9s %6s\n",
               b->model_dir, (double)info->weight_bytes / 1e6, info->kernels->name, b->threads,
               stream, fma, "step", "seqs", "rows", "context", "adapters", "ms", "tokens/s", "mem%",
               "GFLOP/s", "fma%");
    const char *comma = "";
    for (size_t i = 0; i < N_SCENES; i++) {
        const scene *s = &b->scenes[i];
        if (s->best_ns == 0)
            continue;
        double ns = (double)s->best_ns, rows = (double)s->n_seqs * s->rows;
        double gbps = ((double)info->weight_bytes + kv_bytes_read(b, s) + adapter_bytes(b, s)) / ns;
        double gflops = step_flop(b, s) / ns;
        if (b->json)
            printf("%s{\"step\": \"%s\", \"seqs\": %u, \"rows\": %u, \"context\": %u, "
                   "\"adapters\": %u, \"adapter_bytes\": %.0f, \"ms\": %.4f, \"tokens_per_s\": "
                   "%.2f, \"gbps\": %.3f, \"gflops\": %.2f}",
                   comma, s->name, s->n_seqs, s->rows, s->context, s->n_adapters,
                   adapter_bytes(b, s), ns / 1e6, rows / ns * 1e9, gbps, gflops);
        else
            printf("%-8s %5u %5u %8u %9u %10.3f %10.1f %7.1f %9.1f %6.1f\n", s->name, s->n_seqs,
                   s->rows, s->context, s->n_adapters, ns / 1e6, rows / ns * 1e9,
                   100 * gbps / stream, gflops, 100 * gflops / fma);
        comma = ", ";
    }
    if (b->json)
        printf("]}\n");
}

int hr_bench_model(int argc, char **argv) {
    hr_error err;
    bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return HR_EXIT_FAILURE;
    b->threads = hr_machine_threads();
    hr_status status = parse(argc, argv, b, &err);
    int code = status == HR_OK ? HR_EXIT_OK : HR_EXIT_USAGE;
    if (status == HR_OK && load(b, &err) != HR_OK)
        code = HR_EXIT_FAILURE;
    if (code != HR_EXIT_OK) {
        hr_exit_error(code, &err);
    } else {
        size_t bytes = (size_t)hr_model_info_of(b->model)->weight_bytes / 128 * 128;
        char *buffer = hr_pages_alloc(bytes);
        double stream = 0;
        if (buffer != NULL)
            memset(buffer, 1, bytes);
        for (int round = 0; round < ROUNDS; round++) {
            double now =
                buffer != NULL ? hr_roof_stream(b->pool, buffer, bytes, STREAM_PASSES / ROUNDS) : 0;
            stream = now > stream ? now : stream;
            for (size_t i = 0; i < N_SCENES; i++)
                if (possible(b, &b->scenes[i]) && (b->scenes[i].rows == 1 || round % 4 == 0))
                    measure(b, &b->scenes[i]);
        }
        hr_pages_free(buffer, bytes);
        hr_roof roof = hr_roof_fma();
        report(b, stream, b->threads * (roof.fma_avx512 > 0 ? roof.fma_avx512 : roof.fma_avx2));
    }
    unload(b);
    free(b);
    return code;
}
