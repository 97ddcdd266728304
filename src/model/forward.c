/* The forward pass: one job on the pool, in phases with barriers between them.
 *
 * Workers share a phase by output columns (linears), rows (norms), heads (RoPE) or tasks
 * (attention). Every op computes each element the same way whoever calls it, so the split decides
 * only the time. */
#include "model/step.h"

#include "tensor/convert.h"

#include <string.h>

static char *element_at(const hr_step *step, char *base, size_t index) {
    return base + index * hr_compute_bytes(step->compute);
}

static float *residual_row(const hr_step *step, size_t row) {
    return step->ws->residual + row * step->ws->ld_residual;
}

static void embed_row(const hr_step *step, uint32_t token, float *out) {
    const hr_model *model = step->model;
    uint32_t hidden = model->config.hidden_size;
    if (model->embed == NULL) {
        step->kernels->unpack_row[step->compute](model->head.w, token, hidden, out);
        return;
    }
    hr_dtype dtype = step->compute == HR_COMPUTE_BF16 ? HR_DTYPE_BF16 : HR_DTYPE_F32;
    hr_convert(out, HR_DTYPE_F32, element_at(step, model->embed, (size_t)token * hidden), dtype,
               hidden, NULL);
}

static void embed(const hr_step *step, unsigned worker) {
    size_t begin, end;
    hr_split(step->view->n_rows, worker, step->ws->n_workers, &begin, &end);
    uint32_t hidden = step->model->config.hidden_size;
    for (size_t row = begin; row < end; row++) {
        float *out = residual_row(step, row);
        embed_row(step, step->view->tokens[row], out);
        for (size_t i = hidden; i < hr_round_up(hidden, HR_PANEL); i++)
            out[i] = 0;
        const hr_lora *lora = step->view->seqs[step->ws->row_seq[row]].lora;
        if (lora != NULL)
            hr_lora_embed(step, worker, lora, step->view->tokens[row], out);
    }
}

/* Norms n rows of the residual (those listed, or from 0 on); returns where they stand, complete for
 * every worker. Few rows are normed by every worker into a buffer of its own, which is faster than
 * a barrier. */
static const char *norm(const hr_step *step, unsigned worker, const float *weight, uint32_t n,
                        const uint32_t *list) {
    const hr_hf_config *c = &step->model->config;
    bool few = n <= HR_FEW_ROWS;
    char *out = few ? step->ws->workers[worker].x : step->ws->x;
    size_t begin = 0, end = n;
    if (!few)
        hr_split(n, worker, step->ws->n_workers, &begin, &end);
    for (size_t i = begin; i < end; i++)
        step->kernels->rmsnorm[step->compute](
            residual_row(step, list != NULL ? list[i] : i), weight, c->hidden_size,
            (uint32_t)hr_round_up(c->hidden_size, HR_LEAF), (float)c->rms_norm_eps,
            element_at(step, out, i * step->ws->ld_x));
    if (!few)
        hr_pool_barrier(step->pool, worker);
    return out;
}

/* The slot of page 0 of a layer and kv head, and the distance to the next page's. */
static char *kv_slot(const hr_step *step, uint32_t layer, uint32_t kv_head, size_t *page_stride) {
    const hr_hf_config *c = &step->model->config;
    size_t slot = hr_kv_slot_bytes(step->compute, c->head_dim);
    *page_stride = slot * c->num_key_value_heads;
    return step->kv->base + ((size_t)layer * step->kv->n_pages) * *page_stride + kv_head * slot;
}

/* Norm of a head where the architecture has one, then RoPE; in: a head of y, out: a worker's
 * buffer. */
static void turn_head(const hr_step *step, const float *in, const float *weight, uint32_t pos,
                      float *out) {
    const hr_model *model = step->model;
    uint32_t dim = model->config.head_dim;
    if (weight != NULL)
        step->kernels->rmsnorm[HR_COMPUTE_F32](in, weight, dim, dim,
                                               (float)model->config.rms_norm_eps, out);
    else
        memcpy(out, in, dim * sizeof *out);
    size_t angle = (size_t)pos * (dim / 2);
    step->kernels->rope(out, model->rope_cos + angle, model->rope_sin + angle, dim);
}

static void store_query(const hr_step *step, unsigned worker, const hr_layer *layer, uint32_t row,
                        uint32_t head) {
    const hr_model_workspace *ws = step->ws;
    uint32_t dim = step->model->config.head_dim;
    float *turned = ws->workers[worker].heads;
    turn_head(step, ws->y + row * ws->ld_y + head * dim, layer->q_norm, ws->row_pos[row], turned);
    step->kernels->store[step->compute](
        turned, dim, (uint32_t)ws->q_head_stride,
        element_at(step, ws->q, row * ws->ld_q + head * ws->q_head_stride));
}

static void store_key_value(const hr_step *step, unsigned worker, uint32_t layer_index,
                            uint32_t row, uint32_t kv_head) {
    const hr_model_workspace *ws = step->ws;
    const hr_layer *layer = &step->model->layers[layer_index];
    uint32_t dim = step->model->config.head_dim, pos = ws->row_pos[row];
    const float *k = ws->y + row * ws->ld_y + layer->qkv.part_panel[1] * HR_PANEL + kv_head * dim;
    const float *v = ws->y + row * ws->ld_y + layer->qkv.part_panel[2] * HR_PANEL + kv_head * dim;
    float *turned = ws->workers[worker].heads;
    turn_head(step, k, layer->k_norm, pos, turned);

    size_t page_stride;
    char *slot = kv_slot(step, layer_index, kv_head, &page_stride);
    uint32_t page = step->view->seqs[ws->row_seq[row]].pages[pos / HR_KV_PAGE_TOKENS];
    HR_ASSERT(page < step->kv->n_pages);
    step->kernels->kv_store[step->compute](turned, v, dim, pos % HR_KV_PAGE_TOKENS,
                                           slot + page * page_stride);
}

static void store_heads(const hr_step *step, unsigned worker, uint32_t layer) {
    const hr_hf_config *c = &step->model->config;
    size_t heads = c->num_attention_heads + c->num_key_value_heads, begin, end;
    hr_split(step->view->n_rows * heads, worker, step->ws->n_workers, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        uint32_t row = (uint32_t)(i / heads), head = (uint32_t)(i % heads);
        if (head < c->num_attention_heads)
            store_query(step, worker, &step->model->layers[layer], row, head);
        else
            store_key_value(step, worker, layer, row, head - c->num_attention_heads);
    }
}

static hr_attention_args attention_args(const hr_step *step, unsigned worker, uint32_t layer,
                                        const hr_attention_share *share, uint32_t kv_head) {
    const hr_model_workspace *ws = step->ws;
    const hr_hf_config *c = &step->model->config;
    const hr_seq_view *seq = &step->view->seqs[share->tile.seq];
    uint32_t head = kv_head * ws->attention.group + share->first_head;
    size_t row = seq->first_row + share->tile.first;
    hr_attention_args args = {
        .q = element_at(step, ws->q, row * ws->ld_q + head * ws->q_head_stride),
        .ldq = ws->ld_q,
        .head_stride = ws->q_head_stride,
        .n_rows = share->tile.n,
        .n_heads = share->n_heads,
        .head_dim = c->head_dim,
        .first_pos = seq->first_pos + share->tile.first,
        .pages = seq->pages,
        .scale = step->model->attention_scale,
        .out = element_at(step, ws->attended, row * ws->ld_attended + head * c->head_dim),
        .ldo = ws->ld_attended,
        .out_head_stride = c->head_dim,
        .scratch = ws->workers[worker].scratch,
    };
    args.kv = kv_slot(step, layer, kv_head, &args.page_stride);
    return args;
}

/* A run of a row's blocks. Whoever finishes the last run merges them, which needs no barrier: the
 * count makes what the others left visible. */
static void attend_run(const hr_step *step, hr_attention_args args, const hr_attention_share *share,
                       uint32_t kv_head) {
    hr_model_workspace *ws = step->ws;
    const hr_attention_split *split = &ws->attention.splits[share->split];
    size_t floats = hr_attention_partial_floats(args.head_dim);
    uint64_t slot = split->first_slot + (uint64_t)kv_head * split->n_blocks * share->n_heads;
    args.partials = ws->partials + slot * floats;

    hr_attention_args run = args;
    run.pages += share->first_block * (HR_ATTN_BLOCK / HR_KV_PAGE_TOKENS);
    run.partials += (size_t)share->first_block * share->n_heads * floats;
    run.first_pos -= share->first_block * HR_ATTN_BLOCK;
    if (share->end_block < split->n_blocks)
        run.first_pos = (share->end_block - share->first_block) * HR_ATTN_BLOCK - 1;
    step->kernels->attention[step->compute](&run);

    _Atomic uint32_t *left = &ws->runs_left[share->split * ws->attention.n_kv_heads + kv_head];
    if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) != 1)
        return;
    step->kernels->attention_merge[step->compute](&args);
    atomic_store_explicit(left, split->n_runs, memory_order_relaxed); /* for the next layer */
}

/* Tasks are (share, kv head), costliest first, taken from a counter that worker 0 reset before the
 * last barrier. */
static void attend(const hr_step *step, unsigned worker, uint32_t layer) {
    hr_model_workspace *ws = step->ws;
    const hr_attention_plan *plan = &ws->attention;
    for (;;) {
        uint32_t task =
            atomic_fetch_add_explicit(&ws->next_attention_task, 1, memory_order_relaxed);
        if (task >= plan->n_shares * plan->n_kv_heads)
            return;
        const hr_attention_share *share = &plan->shares[task / plan->n_kv_heads];
        uint32_t kv_head = task % plan->n_kv_heads;
        hr_attention_args args = attention_args(step, worker, layer, share, kv_head);
        if (share->split == HR_NOT_SPLIT)
            step->kernels->attention[step->compute](&args);
        else
            attend_run(step, args, share, kv_head);
    }
}

/* A linear whose columns one worker computes and adds to the residual itself. */
static void linear_onto_residual(const hr_step *step, unsigned worker, const hr_linear *linear,
                                 const char *x, size_t ldx) {
    hr_model_workspace *ws = step->ws;
    hr_panels mine = hr_worker_panels(linear->n_panels, worker, ws->n_workers);
    hr_linear_args args = {linear, x, ldx, ws->y, ws->ld_y, step->view->n_rows, &ws->rows, 0};
    hr_linear_apply(step, worker, &args, &mine, 1);
    size_t first = (size_t)mine.begin * HR_PANEL;
    for (uint32_t row = 0; row < step->view->n_rows; row++)
        step->kernels->add(residual_row(step, row) + first, ws->y + row * ws->ld_y + first,
                           (mine.end - mine.begin) * HR_PANEL);
}

static void attention_section(const hr_step *step, unsigned worker, uint32_t index) {
    hr_model_workspace *ws = step->ws;
    const hr_layer *layer = &step->model->layers[index];
    const char *x = norm(step, worker, layer->attention_norm, step->view->n_rows, NULL);
    hr_panels mine = hr_worker_panels(layer->qkv.n_panels, worker, ws->n_workers);
    hr_linear_args qkv = {&layer->qkv,        x,         ws->ld_x, ws->y, ws->ld_y,
                          step->view->n_rows, &ws->rows, 0};
    hr_linear_apply(step, worker, &qkv, &mine, 1);
    hr_pool_barrier(step->pool, worker);

    if (worker == 0)
        atomic_store_explicit(&ws->next_attention_task, 0, memory_order_relaxed);
    store_heads(step, worker, index);
    hr_pool_barrier(step->pool, worker);

    attend(step, worker, index);
    hr_pool_barrier(step->pool, worker);

    linear_onto_residual(step, worker, &layer->o, ws->attended, ws->ld_attended);
    hr_pool_barrier(step->pool, worker);
}

static void mlp_section(const hr_step *step, unsigned worker, uint32_t index) {
    hr_model_workspace *ws = step->ws;
    const hr_layer *layer = &step->model->layers[index];
    const char *x = norm(step, worker, layer->mlp_norm, step->view->n_rows, NULL);

    /* The same panels of gate and of up, so that their product needs no other worker. */
    uint32_t up = layer->gate_up.part_panel[1];
    hr_panels gate = hr_worker_panels(up, worker, ws->n_workers);
    hr_panels ranges[] = {gate, {up + gate.begin, up + gate.end}};
    hr_linear_args args = {&layer->gate_up,    x,         ws->ld_x, ws->y, ws->ld_y,
                           step->view->n_rows, &ws->rows, 0};
    hr_linear_apply(step, worker, &args, ranges, 2);
    size_t first = (size_t)gate.begin * HR_PANEL;
    uint32_t n = (gate.end - gate.begin) * HR_PANEL;
    for (uint32_t row = 0; row < step->view->n_rows; row++) {
        const float *y = ws->y + row * ws->ld_y + first;
        step->kernels->silu_mul[step->compute](y, y + (size_t)up * HR_PANEL, n, n,
                                               element_at(step, ws->act, row * ws->ld_act + first));
    }
    hr_pool_barrier(step->pool, worker);

    linear_onto_residual(step, worker, &layer->down, ws->act, ws->ld_act);
    hr_pool_barrier(step->pool, worker);
}

static void logits_section(const hr_step *step, unsigned worker) {
    hr_model_workspace *ws = step->ws;
    const hr_view *view = step->view;
    hr_panels mine = hr_worker_panels(step->model->head.n_panels, worker, ws->n_workers);
    for (uint32_t first = 0; first < view->n_logit_rows; first += HR_LOGIT_ROWS) {
        uint32_t n = view->n_logit_rows - first;
        n = n < HR_LOGIT_ROWS ? n : HR_LOGIT_ROWS;
        const char *x = norm(step, worker, step->model->final_norm, n, view->logit_rows + first);
        hr_linear_args args = {&step->model->head, x, ws->ld_x,        ws->logits,
                               ws->ld_logits,      n, &ws->logit_rows, first};
        hr_linear_apply(step, worker, &args, &mine, 1);
        hr_pool_barrier(step->pool, worker);
        step->on_logits(step->ctx, first, n, ws->logits, ws->ld_logits, ws->workers[worker].scratch,
                        worker, ws->n_workers);
        hr_pool_barrier(step->pool, worker);
    }
}

static void forward(void *arg, unsigned worker, unsigned n_workers) {
    const hr_step *step = arg;
    HR_ASSERT(n_workers == step->ws->n_workers);
    embed(step, worker);
    hr_pool_barrier(step->pool, worker);
    for (uint32_t layer = 0; layer < step->model->config.num_hidden_layers; layer++) {
        attention_section(step, worker, layer);
        mlp_section(step, worker, layer);
    }
    logits_section(step, worker);
}

void hr_model_forward(const hr_model *model, hr_model_workspace *workspace, hr_pool *pool,
                      const hr_kv *kv, const hr_view *view, hr_logits_fn on_logits, void *ctx) {
    HR_ASSERT(view->n_logit_rows == 0 || on_logits != NULL);
    hr_workspace_prepare(workspace, model, view);
    hr_step step = {.model = model,
                    .kernels = model->info.kernels,
                    .compute = model->info.compute,
                    .ws = workspace,
                    .pool = pool,
                    .kv = kv,
                    .view = view,
                    .on_logits = on_logits,
                    .ctx = ctx};
    hr_pool_run(pool, forward, &step);
}
