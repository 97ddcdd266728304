/* Runs sequences through the model without an engine. */
#include "model_run.h"

#include "base/clock.h"
#include "base/machine.h"

#include <stdlib.h>
#include <string.h>

typedef struct step_rows {
    float **to; /* where the logits of each row go */
    uint32_t vocab;
} step_rows;

static void keep_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                        void *scratch, unsigned worker, unsigned n_workers) {
    (void)scratch;
    const step_rows *rows = ctx;
    for (uint32_t i = worker; i < n; i += n_workers)
        memcpy(rows->to[first + i], logits + i * ld, rows->vocab * sizeof(float));
}

typedef struct run {
    hr_kv kv;
    size_t kv_bytes;
    hr_model_workspace *ws;
    hr_seq_view *views;
    uint32_t *tokens, *rows, *pages;
    float **to;
} run;

static uint32_t pages_of(uint32_t n) {
    return (n + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS;
}

/* Pages n - 1, n - 3, ... for even sequences' needs and so on: any order but ascending would do. */
static void deal_pages(run *r, const hr_model *model, const run_seq *seqs, uint32_t n_seqs) {
    uint32_t left = r->kv.n_pages, *next = r->pages;
    for (uint32_t s = 0; s < n_seqs; s++) {
        r->views[s].pages = next;
        for (uint32_t i = 0; i < pages_of(seqs[s].n); i++)
            *next++ = --left;
    }
    memset(r->kv.base, 0xff, r->kv_bytes); /* NaN in what nobody clears */
    for (uint32_t page = 0; page < r->kv.n_pages; page++)
        hr_model_kv_clear_page(model, &r->kv, page);
}

static hr_status prepare(run *r, const hr_model *model, hr_pool *pool, const run_seq *seqs,
                         uint32_t n_seqs, uint32_t chunk, hr_error *err) {
    uint32_t rows = n_seqs * chunk;
    for (uint32_t s = 0; s < n_seqs; s++)
        r->kv.n_pages += pages_of(seqs[s].n);
    r->kv_bytes = r->kv.n_pages * hr_model_info_of(model)->kv_page_bytes;
    r->kv.base = hr_pages_alloc(r->kv_bytes);
    r->views = calloc(n_seqs, sizeof *r->views);
    r->tokens = calloc(rows, sizeof *r->tokens);
    r->rows = calloc(rows, sizeof *r->rows);
    r->pages = calloc(r->kv.n_pages, sizeof *r->pages);
    r->to = calloc(rows, sizeof *r->to);
    if (r->kv.base == NULL || r->views == NULL || r->tokens == NULL || r->rows == NULL ||
        r->pages == NULL || r->to == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %u rows", rows);
    return hr_model_workspace_create(model, hr_pool_workers(pool), rows, n_seqs, &r->ws, err);
}

/* One step: the next rows of every sequence that still has some; 0 when none has. */
static uint32_t fill_step(run *r, hr_view *view, hr_seq_view *step_seqs, const run_seq *seqs,
                          uint32_t n_seqs, uint32_t begin, uint32_t chunk, uint32_t vocab) {
    *view = (hr_view){.tokens = r->tokens, .seqs = step_seqs, .logit_rows = r->rows};
    for (uint32_t s = 0; s < n_seqs; s++) {
        if (begin >= seqs[s].n)
            continue;
        uint32_t n = seqs[s].n - begin < chunk ? seqs[s].n - begin : chunk;
        step_seqs[view->n_seqs++] = (hr_seq_view){.first_row = view->n_rows,
                                                  .n_rows = n,
                                                  .first_pos = begin,
                                                  .pages = r->views[s].pages,
                                                  .lora = seqs[s].lora};
        for (uint32_t i = 0; i < n; i++, view->n_rows++) {
            r->tokens[view->n_rows] = seqs[s].tokens[begin + i];
            r->rows[view->n_rows] = view->n_rows;
            r->to[view->n_rows] = seqs[s].logits + (size_t)(begin + i) * vocab;
        }
    }
    view->n_logit_rows = view->n_rows;
    return view->n_rows;
}

hr_status run_sequences(const hr_model *model, hr_pool *pool, run_seq *seqs, uint32_t n_seqs,
                        uint32_t chunk, uint64_t *times, hr_error *err) {
    run r = {0};
    uint32_t vocab = hr_model_info_of(model)->config->vocab_size;
    hr_seq_view *step_seqs = calloc(n_seqs, sizeof *step_seqs);
    hr_status status = step_seqs == NULL ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for sequences")
                                         : prepare(&r, model, pool, seqs, n_seqs, chunk, err);
    if (status == HR_OK) {
        deal_pages(&r, model, seqs, n_seqs);
        hr_clock clock = hr_clock_monotonic();
        hr_view view;
        for (uint32_t begin = 0;
             fill_step(&r, &view, step_seqs, seqs, n_seqs, begin, chunk, vocab) > 0;
             begin += chunk) {
            step_rows rows = {r.to, vocab};
            uint64_t started = hr_now_ns(&clock);
            hr_model_forward(model, r.ws, pool, &r.kv, &view, keep_logits, &rows);
            if (times != NULL)
                times[begin / chunk] = hr_now_ns(&clock) - started;
        }
    }
    hr_model_workspace_destroy(r.ws);
    if (r.kv.base != NULL)
        hr_pages_free(r.kv.base, r.kv_bytes);
    free(r.views);
    free(r.tokens);
    free(r.rows);
    free(r.pages);
    free(r.to);
    free(step_seqs);
    return status;
}
