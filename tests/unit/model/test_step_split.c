/* Decode attention shared by blocks of positions has the bits of decode attention that is not:
 * every tier, both dtypes, 1 to 5 workers, contexts around the borders of blocks, alone and mixed.
 *
 * A step at a position writes what stands in the cache already, so one filled cache serves them
 * all. */
#include "model/step.h"
#include "tiny_model.h"

#include "base/machine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static char dir[] = "/tmp/headrace-split-XXXXXX";

/* Positions that the row to decode sees, itself included. */
static const uint32_t LENGTHS[] = {7, 511, 512, 513, 1023, 1024, 1025, 4001};
enum { N_SEQS = sizeof LENGTHS / sizeof LENGTHS[0], LONGEST = 4001, CHUNK = 500, MAX_WORKERS = 5 };

typedef struct scene {
    const char *dtype;
    hr_kv kv;
    size_t kv_bytes;
    uint32_t tokens[N_SEQS][LONGEST];
    uint32_t pages[N_SEQS][LONGEST / HR_KV_PAGE_TOKENS + 1];
    float want[N_SEQS][TINY_VOCAB]; /* logits of the last row of each */
} scene;

/* A loaded model, its pool and its buffers. */
typedef struct rig {
    hr_pool *pool;
    hr_model *model;
    hr_model_workspace *ws;
} rig;

static rig make_rig(const scene *s, const char *isa, unsigned n_workers) {
    rig r = {0};
    char path[64];
    hr_error err = {0};
    snprintf(path, sizeof path, "%s/model", dir);
    assert_int_equal(hr_pool_create(n_workers, &r.pool, &err), HR_OK);
    hr_model_options options = {.dir = path, .dtype = s->dtype, .isa = isa, .pool = r.pool};
    if (hr_model_load(&options, &r.model, &err) != HR_OK ||
        hr_model_workspace_create(r.model, n_workers, CHUNK + N_SEQS, N_SEQS + 1, &r.ws, &err) !=
            HR_OK)
        fail_msg("%s", err.message);
    return r;
}

static void drop_rig(rig *r) {
    hr_model_workspace_destroy(r->ws);
    hr_model_destroy(r->model);
    hr_pool_destroy(r->pool);
}

typedef struct outputs {
    float logits[N_SEQS + 1][TINY_VOCAB];
} outputs;

static void keep_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                        void *scratch, unsigned worker, unsigned n_workers) {
    (void)scratch;
    for (uint32_t i = worker; i < n; i += n_workers)
        memcpy(((outputs *)ctx)->logits[first + i], logits + i * ld, sizeof(float) * TINY_VOCAB);
}

/* Rows [begin, end) of some sequences as one step; logits of each one's last row. */
typedef struct part {
    uint32_t seq, begin, end;
} part;

static void run_step(const rig *r, const scene *s, const part *parts, uint32_t n, outputs *out) {
    uint32_t tokens[CHUNK + N_SEQS], logit_rows[N_SEQS + 1];
    hr_seq_view seqs[N_SEQS + 1];
    hr_view view = {.tokens = tokens, .n_seqs = n, .seqs = seqs, .logit_rows = logit_rows};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rows = parts[i].end - parts[i].begin;
        seqs[i] = (hr_seq_view){.first_row = view.n_rows,
                                .n_rows = rows,
                                .first_pos = parts[i].begin,
                                .pages = s->pages[parts[i].seq]};
        memcpy(tokens + view.n_rows, s->tokens[parts[i].seq] + parts[i].begin,
               rows * sizeof *tokens);
        view.n_rows += rows;
        logit_rows[i] = view.n_rows - 1;
    }
    view.n_logit_rows = n;
    hr_model_forward(r->model, r->ws, r->pool, &s->kv, &view, keep_logits, out);
}

static part last_row(uint32_t seq) {
    return (part){seq, LENGTHS[seq] - 1, LENGTHS[seq]};
}

static void fill_cache(scene *s) {
    rig r = make_rig(s, "", 1);
    uint32_t next = 0;
    outputs out;
    for (uint32_t i = 0; i < N_SEQS; i++)
        s->kv.n_pages += LENGTHS[i] / HR_KV_PAGE_TOKENS + 1;
    s->kv_bytes = s->kv.n_pages * hr_model_info_of(r.model)->kv_page_bytes;
    s->kv.base = hr_pages_alloc(s->kv_bytes);
    assert_non_null(s->kv.base);
    for (uint32_t page = 0; page < s->kv.n_pages; page++)
        hr_model_kv_clear_page(r.model, &s->kv, page);
    for (uint32_t i = 0; i < N_SEQS; i++) {
        for (uint32_t p = 0; p <= LENGTHS[i] / HR_KV_PAGE_TOKENS; p++)
            s->pages[i][p] = s->kv.n_pages - ++next;
        for (uint32_t t = 0; t < LENGTHS[i]; t++)
            s->tokens[i][t] = (t * t * 7 + i * 13 + t / 3) % TINY_VOCAB;
        for (uint32_t begin = 0; begin < LENGTHS[i]; begin += CHUNK) {
            uint32_t end = LENGTHS[i] - begin < CHUNK ? LENGTHS[i] : begin + CHUNK;
            run_step(&r, s, &(part){i, begin, end}, 1, &out);
        }
    }
    drop_rig(&r);
}

/* What counts: the reference tier, one worker, one sequence a step. */
static void find_wanted(scene *s) {
    rig r = make_rig(s, "ref", 1);
    outputs out;
    for (uint32_t i = 0; i < N_SEQS; i++) {
        run_step(&r, s, &(part){i, LENGTHS[i] - 1, LENGTHS[i]}, 1, &out);
        assert_int_equal(r.ws->attention.n_splits, 0);
        memcpy(s->want[i], out.logits[0], sizeof s->want[i]);
    }
    drop_rig(&r);
}

/* Returns how many rows the step split. */
static uint32_t expect_wanted(const rig *r, const scene *s, const part *parts, uint32_t n) {
    outputs out;
    run_step(r, s, parts, n, &out);
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].end == LENGTHS[parts[i].seq])
            assert_memory_equal(out.logits[i], s->want[parts[i].seq], sizeof out.logits[i]);
    return r->ws->attention.n_splits;
}

static uint32_t expect_wanted_alone_and_mixed(const rig *r, const scene *s) {
    part all[N_SEQS], long_and_short[] = {last_row(0), last_row(7), last_row(3)};
    part chunk_and_long[] = {{6, 300, 700}, last_row(7), last_row(5)};
    uint32_t n_splits = 0;
    for (uint32_t i = 0; i < N_SEQS; i++) {
        all[i] = last_row(i);
        n_splits += expect_wanted(r, s, &all[i], 1);
    }
    n_splits += expect_wanted(r, s, all, N_SEQS);
    n_splits += expect_wanted(r, s, long_and_short, 3);
    return n_splits + expect_wanted(r, s, chunk_and_long, 3);
}

static void splits_change_no_bit(const char *dtype) {
    scene *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->dtype = dtype;
    fill_cache(s);
    find_wanted(s);
    for (size_t tier = 0; hr_kernels_tier(tier) != NULL; tier++)
        for (unsigned workers = 1; workers <= MAX_WORKERS; workers++) {
            rig r = make_rig(s, hr_kernels_tier(tier)->name, workers);
            uint32_t n_splits = expect_wanted_alone_and_mixed(&r, s);
            /* The model has two kv heads: two workers share most steps well as they are. */
            assert_true(workers == 1 ? n_splits == 0 : workers == 2 || n_splits >= 2);
            drop_rig(&r);
        }
    hr_pages_free(s->kv.base, s->kv_bytes);
    free(s);
}

static void splits_change_no_bit_in_bfloat16(void **state) {
    (void)state;
    splits_change_no_bit("bfloat16");
}

static void splits_change_no_bit_in_float32(void **state) {
    (void)state;
    splits_change_no_bit("float32");
}

/* The tiny model, for longer contexts: nothing else of it depends on the number. */
static int lengthen_context(void) {
    char path[64], text[1024], *at;
    snprintf(path, sizeof path, "%s/model/config.json", dir);
    FILE *file = fopen(path, "r+");
    if (file == NULL)
        return 1;
    size_t n = fread(text, 1, sizeof text - 1, file);
    text[n] = '\0';
    at = strstr(text, "\"max_position_embeddings\": 1024");
    if (at == NULL)
        return 1;
    memcpy(strstr(at, "1024"), "8192", 4);
    rewind(file);
    return fwrite(text, 1, n, file) == n && fclose(file) == 0 ? 0 : 1;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splits_change_no_bit_in_bfloat16),
        cmocka_unit_test(splits_change_no_bit_in_float32),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    tiny_model_write(dir);
    int rc = lengthen_context() == 0 ? cmocka_run_group_tests(tests, NULL, NULL) : 2;
    tiny_model_remove(dir);
    return rc;
}
