/* The model: packed weights, and the forward pass over them.
 *
 * A model is immutable after loading (this slice), so any thread may read its description; only one
 * thread at a time runs hr_model_forward with one hr_model_workspace. */
#ifndef HR_MODEL_MODEL_H
#define HR_MODEL_MODEL_H

#include "base/error.h"
#include "base/pool.h"
#include "format/hf_config.h"
#include "kernels/kernels.h"
#include "model/lora.h"
#include "model/view.h"

typedef struct hr_model_options {
    const char *dir;         /* Hugging Face model directory */
    const char *dtype;       /* "auto" (NULL): bfloat16; "bfloat16"; "float32" */
    const char *isa;         /* see hr_kernels_select */
    uint32_t context_length; /* 0 = the config's max_position_embeddings; more is refused */
    hr_pool *pool;           /* packs in parallel; also the pool of later steps */
    /* Called now and then while loading, on the calling thread; may be NULL. */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
} hr_model_options;

typedef struct hr_model_info {
    const hr_hf_config *config;
    const hr_kernels *kernels;
    char kernels_note[256]; /* "" or why a faster tier was refused */
    hr_compute compute;
    uint32_t context_length;
    uint64_t weight_bytes;  /* packed bytes held */
    uint64_t kv_page_bytes; /* bytes of one page over all layers and kv heads */
} hr_model_info;

/* Loads and packs the checkpoint: one resident copy (tied heads share it), file pages dropped as
 * they are packed. Every tensor of the architecture must be there with its shape, and no unknown
 * one may be left over (known ignorable buffers apart). Errors name file and tensor. */
hr_status hr_model_load(const hr_model_options *options, hr_model **out, hr_error *err);
void hr_model_destroy(hr_model *model);
const hr_model_info *hr_model_info_of(const hr_model *model);

/* The KV arena is owned by the engine: n_pages * kv_page_bytes, 64-byte aligned, layer-major:
 * [layer][page][kv head][slot]. A page must be zeroed (hr_model_kv_clear_page) before its first use
 * by a sequence: stale values would meet P = +0, and NaN * 0 is NaN. */
typedef struct hr_kv {
    char *base;
    uint32_t n_pages;
} hr_kv;
void hr_model_kv_clear_page(const hr_model *model, const hr_kv *kv, uint32_t page);

/* Buffers of a step, sized once: nothing is allocated on the step path. */
typedef struct hr_model_workspace hr_model_workspace;
hr_status hr_model_workspace_create(const hr_model *model, unsigned n_workers, uint32_t max_rows,
                                    uint32_t max_seqs, hr_model_workspace **out, hr_error *err);
void hr_model_workspace_destroy(hr_model_workspace *workspace);
uint64_t hr_model_workspace_bytes(const hr_model_workspace *workspace);

/* One step: writes the rows' K and V into the cache and hands the wanted logits to on_logits (which
 * may be NULL when n_logit_rows is 0). The view must be valid (tokens < vocab_size, pages <
 * n_pages, positions < context_length, rows <= max_rows); checked by assert, since the engine made
 * it. Runs on the pool, of which the caller is worker 0. */
void hr_model_forward(const hr_model *model, hr_model_workspace *workspace, hr_pool *pool,
                      const hr_kv *kv, const hr_view *view, hr_logits_fn on_logits, void *ctx);

#endif
