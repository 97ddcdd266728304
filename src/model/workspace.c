/* Sizes and addresses of a step's buffers; the preparation of a step. */
#include "model/workspace.h"

#include "base/machine.h"
#include "model/adapter.h"

#include <stdlib.h>
#include <string.h>

typedef struct cursor {
    char *base; /* NULL while sizes are counted */
    size_t used;
} cursor;

static void *take(cursor *at, size_t bytes) {
    char *to = at->base == NULL ? NULL : at->base + at->used;
    at->used += hr_round_up(bytes, 64);
    return to;
}

/* n elements and the gap, a multiple of 64 bytes for elements of 2 and 4 bytes. */
static size_t leading(size_t n) {
    return hr_round_up(n, 32) + 32;
}

static void lay_out_worker(cursor *at, const hr_model *model, const hr_model_workspace *ws,
                           hr_worker_buffers *worker) {
    size_t head = hr_round_up(model->config.head_dim, HR_LEAF);
    worker->x = take(at, HR_FEW_ROWS * ws->ld_x * hr_compute_bytes(model->info.compute));
    worker->heads = take(at, 3 * head * sizeof(float));
    worker->shrink =
        take(at, (size_t)HR_SHRINK_ROWS * HR_MAX_PARTS * HR_PEFT_MAX_RANK * sizeof(float));
    worker->scratch = take(at, HR_SCRATCH_BYTES);
}

static void lay_out_attention(cursor *at, const hr_model *model, hr_model_workspace *ws) {
    const hr_hf_config *c = &model->config;
    hr_attention_plan *plan = &ws->attention;
    size_t slot = hr_attention_partial_floats(c->head_dim) * sizeof(float);
    hr_attention_plan_bound(plan, ws->n_workers, c->num_key_value_heads,
                            c->num_attention_heads / c->num_key_value_heads, ws->max_tiles,
                            ws->max_seqs, model->info.context_length, slot, HR_PARTIAL_BYTES);
    plan->shares = take(at, plan->max_shares * sizeof *plan->shares);
    plan->splits = take(at, plan->max_splits * sizeof *plan->splits);
    plan->loads = take(at, plan->n_workers * sizeof *plan->loads);
    ws->runs_left =
        take(at, (size_t)plan->max_splits * c->num_key_value_heads * sizeof *ws->runs_left);
    ws->partials = take(at, plan->max_slots * slot);
}

static void lay_out(cursor *at, const hr_model *model, hr_model_workspace *ws) {
    const hr_hf_config *c = &model->config;
    size_t element = hr_compute_bytes(model->info.compute), rows = ws->max_rows;
    const hr_layer *layer = &model->layers[0];
    size_t hidden_outputs = (size_t)layer->o.n_panels * HR_PANEL;
    size_t widest = layer->qkv.n_panels > layer->gate_up.n_panels ? layer->qkv.n_panels
                                                                  : layer->gate_up.n_panels;
    widest *= HR_PANEL;
    widest = widest > hidden_outputs ? widest : hidden_outputs;

    ws->ld_residual = leading(hidden_outputs);
    ws->ld_x = leading(c->hidden_size);
    ws->ld_y = leading(widest);
    ws->q_head_stride = hr_round_up(c->head_dim, HR_LEAF);
    ws->ld_q = leading(c->num_attention_heads * ws->q_head_stride);
    ws->ld_attended = leading((size_t)c->num_attention_heads * c->head_dim);
    ws->ld_act = leading((size_t)layer->gate_up.part_panel[1] * HR_PANEL);
    ws->ld_logits = leading((size_t)model->head.n_panels * HR_PANEL);

    size_t shrunk_row = HR_MAX_PARTS * HR_SHRINK_RANK * 2,
           one_row = HR_MAX_PARTS * HR_PEFT_MAX_RANK * 2;
    ws->h_elements = rows * shrunk_row > one_row ? rows * shrunk_row : one_row;

    ws->residual = take(at, rows * ws->ld_residual * sizeof(float));
    ws->x = take(at, rows * ws->ld_x * element);
    ws->y = take(at, rows * ws->ld_y * sizeof(float));
    ws->q = take(at, rows * ws->ld_q * element);
    ws->attended = take(at, rows * ws->ld_attended * element);
    ws->act = take(at, rows * ws->ld_act * element);
    ws->h = take(at, ws->h_elements * element);
    size_t logit_rows = rows < HR_LOGIT_ROWS ? rows : HR_LOGIT_ROWS;
    ws->logits = take(at, logit_rows * ws->ld_logits * sizeof(float));
    ws->row_seq = take(at, rows * sizeof(uint32_t));
    ws->row_pos = take(at, rows * sizeof(uint32_t));
    ws->rows.items = take(at, ws->max_seqs * sizeof(hr_segment));
    ws->logit_rows.items = take(at, ws->max_seqs * sizeof(hr_segment));
    ws->max_tiles = ws->max_seqs + (uint32_t)(rows / HR_ATTENTION_ROWS);
    ws->tiles = take(at, ws->max_tiles * sizeof(hr_row_tile));
    lay_out_attention(at, model, ws);
    for (unsigned w = 0; w < ws->n_workers; w++)
        lay_out_worker(at, model, ws, &ws->workers[w]);
}

hr_status hr_model_workspace_create(const hr_model *model, unsigned n_workers, uint32_t max_rows,
                                    uint32_t max_seqs, hr_model_workspace **out, hr_error *err) {
    if (n_workers == 0 || n_workers > 1024 || max_rows == 0 || max_rows > 1u << 20 ||
        max_seqs == 0 || max_seqs > max_rows)
        return hr_fail(err, HR_ERR_INVALID,
                       "a step of %u workers, %u rows and %u sequences is out of bounds", n_workers,
                       max_rows, max_seqs);
    hr_model_workspace *ws = aligned_alloc(64, hr_round_up(sizeof *ws, 64));
    if (ws == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a step's buffers");
    memset(ws, 0, sizeof *ws);
    ws->n_workers = n_workers;
    ws->max_rows = max_rows;
    ws->max_seqs = max_seqs;
    ws->workers = calloc(n_workers, sizeof *ws->workers);
    if (ws->workers == NULL)
        goto no_memory;
    cursor at = {0};
    lay_out(&at, model, ws);
    ws->arena_bytes = at.used;
    ws->arena = hr_pages_alloc(at.used); /* zeroed: padding that nobody writes stays zero */
    if (ws->arena == NULL)
        goto no_memory;
    at = (cursor){.base = ws->arena};
    lay_out(&at, model, ws);
    *out = ws;
    return HR_OK;

no_memory:
    hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the %zu bytes of a step's buffers",
            ws->arena_bytes);
    hr_model_workspace_destroy(ws);
    return HR_ERR_NO_MEMORY;
}

void hr_model_workspace_destroy(hr_model_workspace *workspace) {
    if (workspace == NULL)
        return;
    if (workspace->arena != NULL)
        hr_pages_free(workspace->arena, workspace->arena_bytes);
    free(workspace->workers);
    free(workspace);
}

uint64_t hr_model_workspace_bytes(const hr_model_workspace *workspace) {
    return workspace->arena_bytes;
}

/* Adds rows [first, first + n) of an adapter, joining them to the run before when they go on from
 * it. */
static void add_rows(hr_segments *segments, const hr_lora *lora, uint32_t first, uint32_t n) {
    if (lora == NULL || n == 0)
        return;
    hr_segment *last = segments->n > 0 ? &segments->items[segments->n - 1] : NULL;
    if (last != NULL && last->lora == lora && last->first + last->n == first) {
        last->n += n;
        return;
    }
    segments->items[segments->n++] = (hr_segment){lora, first, n};
    if (lora->max_leaves > segments->max_leaves)
        segments->max_leaves = lora->max_leaves;
}

static void prepare_rows(hr_model_workspace *ws, const hr_model *model, const hr_view *view) {
    uint32_t row = 0;
    ws->rows.n = ws->rows.max_leaves = ws->n_tiles = 0;
    for (uint32_t s = 0; s < view->n_seqs; s++) {
        const hr_seq_view *seq = &view->seqs[s];
        HR_ASSERT(seq->first_row == row && seq->n_rows <= view->n_rows - row);
        HR_ASSERT(seq->first_pos <= model->info.context_length &&
                  seq->n_rows <= model->info.context_length - seq->first_pos);
        add_rows(&ws->rows, seq->lora, row, seq->n_rows);
        for (uint32_t i = 0; i < seq->n_rows; i++, row++) {
            HR_ASSERT(view->tokens[row] < model->config.vocab_size);
            ws->row_seq[row] = s;
            ws->row_pos[row] = seq->first_pos + i;
        }
        /* Later rows see more keys: the costliest tiles come first. */
        for (uint32_t end = seq->n_rows; end > 0;) {
            uint32_t first = (end - 1) / HR_ATTENTION_ROWS * HR_ATTENTION_ROWS;
            ws->tiles[ws->n_tiles++] = (hr_row_tile){s, first, end - first, seq->first_pos + end};
            end = first;
        }
    }
    HR_ASSERT(row == view->n_rows);
}

static void prepare_logit_rows(hr_model_workspace *ws, const hr_view *view) {
    ws->logit_rows.n = ws->logit_rows.max_leaves = 0;
    for (uint32_t i = 0; i < view->n_logit_rows; i++) {
        uint32_t row = view->logit_rows[i];
        HR_ASSERT(row < view->n_rows && (i == 0 || row > view->logit_rows[i - 1]));
        const hr_lora *lora = view->seqs[ws->row_seq[row]].lora;
        add_rows(&ws->logit_rows, lora, i, 1);
    }
}

static void prepare_attention(hr_model_workspace *ws) {
    hr_attention_plan *plan = &ws->attention;
    hr_attention_plan_make(plan, ws->tiles, ws->n_tiles);
    for (uint32_t s = 0; s < plan->n_splits; s++)
        for (uint32_t head = 0; head < plan->n_kv_heads; head++)
            atomic_store_explicit(&ws->runs_left[s * plan->n_kv_heads + head],
                                  plan->splits[s].n_runs, memory_order_relaxed);
}

void hr_workspace_prepare(hr_model_workspace *ws, const hr_model *model, const hr_view *view) {
    HR_ASSERT(view->n_rows <= ws->max_rows && view->n_seqs <= ws->max_seqs);
    prepare_rows(ws, model, view);
    prepare_logit_rows(ws, view);
    prepare_attention(ws);
}
