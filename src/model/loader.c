/* From a Hugging Face directory to a packed model in memory.
 *
 * Tensors go one after the other, in slices of some megabytes: all workers convert and pack a
 * slice, then its file pages are dropped, so the process never holds the checkpoint beside the
 * packed copy. */
#include "model/layout.h"

#include "base/machine.h"
#include "base/page_pool.h"
#include "format/checkpoint.h"
#include "model/rope.h"
#include "tensor/finite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLICE_BYTES = 16 << 20, MAX_KEPT_ADAPTERS = 256 << 20 };

/* What the workers are packing. */
typedef struct slice {
    const hr_place *place;
    const hr_tensor *tensor;
    const hr_model *model;
    size_t row_begin, row_end; /* row_begin: a multiple of HR_PANEL */
    char *scratch;             /* scratch_bytes per worker */
    size_t scratch_bytes;
    _Atomic bool not_finite;
} slice;

static void pack_slice(void *arg, unsigned worker, unsigned n_workers) {
    slice *s = arg;
    size_t begin, end;
    hr_split((s->row_end - s->row_begin + HR_PANEL - 1) / HR_PANEL, worker, n_workers, &begin,
             &end);
    begin = s->row_begin + begin * HR_PANEL;
    end = s->row_begin + end * HR_PANEL;
    end = end < s->row_end ? end : s->row_end;
    if (begin < end && !hr_place_pack_finite(s->place, s->model->info.compute, s->tensor, 0, begin,
                                             end, s->scratch + worker * s->scratch_bytes,
                                             s->model->arena + s->place->at))
        s->not_finite = true;
}

/* The rows [begin, end) of a tensor as a tensor of their own, for dropping their pages. */
static hr_tensor rows_of(const hr_tensor *tensor, size_t begin, size_t end, size_t k) {
    size_t row_bytes = k * hr_dtype_size(tensor->dtype);
    hr_tensor rows = *tensor;
    rows.shape[0] = end - begin;
    rows.data = (const char *)tensor->data + begin * row_bytes;
    rows.bytes = (end - begin) * row_bytes;
    return rows;
}

typedef struct loading {
    const hr_model_options *options;
    hr_model *model;
    hr_checkpoint *checkpoint;
    const hr_place *places;
    const hr_tensor **tensors; /* of each place */
    size_t n_places;
    char *scratch;
    size_t scratch_bytes;
    uint64_t done;
} loading;

static void advance(loading *l, uint64_t bytes) {
    l->done += bytes;
    if (l->options->progress != NULL)
        l->options->progress(l->options->progress_ctx, l->done, hr_checkpoint_bytes(l->checkpoint));
}

static hr_status not_finite(const loading *l, const hr_place *place, const hr_tensor *tensor,
                            hr_error *err) {
    hr_dtype as = hr_place_dtype(place, l->model->info.compute);
    return hr_fail_context(err, hr_fail_not_finite(tensor, as, err), "%s", l->options->dir);
}

static hr_status load_matrix(loading *l, const hr_place *place, const hr_tensor *tensor,
                             hr_error *err) {
    size_t row_bytes = place->k * hr_dtype_size(tensor->dtype);
    size_t rows = hr_round_up(SLICE_BYTES / row_bytes + 1, HR_PANEL);
    for (size_t begin = 0; begin < place->n; begin += rows) {
        size_t end = place->n - begin < rows ? place->n : begin + rows;
        slice s = {.place = place,
                   .tensor = tensor,
                   .model = l->model,
                   .row_begin = begin,
                   .row_end = end,
                   .scratch = l->scratch,
                   .scratch_bytes = l->scratch_bytes};
        hr_pool_run(l->options->pool, pack_slice, &s);
        if (s.not_finite)
            return not_finite(l, place, tensor, err);
        hr_tensor done = rows_of(tensor, begin, end, place->k);
        hr_checkpoint_drop(l->checkpoint, &done);
        advance(l, done.bytes);
    }
    return HR_OK;
}

static hr_status load_vector(loading *l, const hr_place *place, const hr_tensor *tensor,
                             hr_error *err) {
    if (!hr_place_pack_finite(place, l->model->info.compute, tensor, 0, 0, place->n, l->scratch,
                              l->model->arena + place->at))
        return not_finite(l, place, tensor, err);
    hr_checkpoint_drop(l->checkpoint, tensor);
    advance(l, tensor->bytes);
    return HR_OK;
}

static hr_status load_places(loading *l, hr_error *err) {
    for (size_t i = 0; i < l->n_places; i++) {
        const hr_place *place = &l->places[i];
        HR_TRY(place->kind == HR_PLACE_VECTOR ? load_vector(l, place, l->tensors[i], err)
                                              : load_matrix(l, place, l->tensors[i], err));
    }
    return HR_OK;
}

static hr_status check_tensor(const hr_place *place, const hr_tensor *tensor, const char *dir,
                              hr_error *err) {
    if (tensor == NULL)
        return hr_fail(err, HR_ERR_MODEL, "%s: tensor %s is missing from the safetensors files",
                       dir, place->name);
    if (!hr_dtype_is_weight(tensor->dtype))
        return hr_fail(err, HR_ERR_DTYPE,
                       "%s: tensor %s is %s; BF16, F16 or F32 wanted (quantised checkpoints are "
                       "not supported)",
                       dir, place->name, hr_dtype_name(tensor->dtype));
    uint64_t want[] = {place->n, place->k};
    uint32_t ndim = place->kind == HR_PLACE_VECTOR ? 1 : 2;
    if (tensor->ndim != ndim || memcmp(tensor->shape, want, ndim * sizeof want[0]) != 0) {
        char came[128], wanted[128];
        return hr_fail(err, HR_ERR_SHAPE, "%s: tensor %s has shape %s, config.json asks for %s",
                       dir, place->name,
                       hr_shape_format(tensor->shape, tensor->ndim, came, sizeof came),
                       hr_shape_format(want, ndim, wanted, sizeof wanted));
    }
    return HR_OK;
}

static bool is_place(const loading *l, const hr_tensor *tensor) {
    for (size_t i = 0; i < l->n_places; i++)
        if (l->tensors[i] == tensor)
            return true;
    return false;
}

/* A tied checkpoint may hold the head once more, if it is the same matrix. */
static hr_status check_tied_head(const loading *l, const hr_tensor *head, hr_error *err) {
    const hr_module_name *embed = &l->model->module_names[l->model->embed_module];
    for (size_t i = 0; i < l->n_places; i++) {
        if (strncmp(l->places[i].name, embed->path, strlen(embed->path)) != 0)
            continue;
        const hr_tensor *tied = l->tensors[i];
        if (tied->dtype == head->dtype && tied->bytes == head->bytes &&
            memcmp(tied->data, head->data, head->bytes) == 0)
            return HR_OK;
    }
    return hr_fail(err, HR_ERR_MODEL,
                   "%s: config.json ties the word embeddings, but %s differs from %s.weight; set "
                   "tie_word_embeddings to false if it is a head of its own",
                   l->options->dir, head->name, embed->path);
}

/* Every tensor of the files must be used or known to hold nothing. */
static hr_status check_left_over(const loading *l, hr_error *err) {
    const hr_model *model = l->model;
    for (size_t i = 0; i < hr_checkpoint_count(l->checkpoint); i++) {
        const hr_tensor *tensor = hr_checkpoint_at(l->checkpoint, i);
        if (is_place(l, tensor) || hr_places_ignored(tensor->name))
            continue;
        if (strcmp(tensor->name, model->places.tied_head) != 0)
            return hr_fail(err, HR_ERR_MODEL,
                           "%s: tensor %s belongs to no module of %s as config.json describes it",
                           l->options->dir, tensor->name, model->architecture->name);
        HR_TRY(check_tied_head(l, tensor, err));
    }
    return HR_OK;
}

static hr_status find_tensors(loading *l, hr_error *err) {
    l->places = l->model->places.items;
    l->n_places = l->model->places.n;
    l->tensors = calloc(l->n_places, sizeof *l->tensors);
    if (l->tensors == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", l->n_places);
    for (size_t i = 0; i < l->n_places; i++) {
        l->tensors[i] = hr_checkpoint_find(l->checkpoint, l->places[i].name);
        HR_TRY(check_tensor(&l->places[i], l->tensors[i], l->options->dir, err));
    }
    HR_TRY(check_left_over(l, err));
    l->scratch_bytes = hr_place_scratch_bytes(&l->model->places);
    l->scratch = aligned_alloc(64, l->scratch_bytes * hr_pool_workers(l->options->pool));
    if (l->scratch == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to pack rows of %zu bytes",
                       l->scratch_bytes / HR_PANEL);
    return HR_OK;
}

typedef struct rope_job {
    const hr_model *model;
    const float *inv_freq;
    float attention_factor;
} rope_job;

static void fill_rope(void *arg, unsigned worker, unsigned n_workers) {
    const rope_job *job = arg;
    const hr_model *model = job->model;
    size_t begin, end;
    hr_split(model->info.context_length, worker, n_workers, &begin, &end);
    hr_rope_fill(job->inv_freq, model->config.head_dim / 2, job->attention_factor, begin, end,
                 model->rope_cos, model->rope_sin);
}

static void make_rope(hr_model *model, hr_pool *pool) {
    float inv_freq[256]; /* head_dim is at most 512 (layout) */
    rope_job job = {.model = model, .inv_freq = inv_freq};
    hr_rope_frequencies(&model->config.rope, model->config.head_dim, inv_freq,
                        &job.attention_factor);
    hr_pool_run(pool, fill_rope, &job);
}

static hr_status choose_compute(const char *dtype, hr_compute *out, hr_error *err) {
    if (dtype == NULL || strcmp(dtype, "auto") == 0 || strcmp(dtype, "bfloat16") == 0)
        *out = HR_COMPUTE_BF16;
    else if (strcmp(dtype, "float32") == 0)
        *out = HR_COMPUTE_F32;
    else
        return hr_fail(err, HR_ERR_INVALID,
                       "dtype %s is not supported; auto, bfloat16 or float32 are", dtype);
    return HR_OK;
}

static hr_status choose_context(hr_model *model, uint32_t wanted, hr_error *err) {
    uint32_t most = model->config.max_position_embeddings;
    if (wanted > most)
        return hr_fail(err, HR_ERR_INVALID,
                       "context length %u is more than the %u positions of the model", wanted,
                       most);
    model->info.context_length = wanted != 0 ? wanted : most;
    return HR_OK;
}

static hr_status load_into(hr_model *model, const hr_model_options *options, hr_error *err) {
    loading l = {.options = options, .model = model};
    HR_TRY(choose_compute(options->dtype, &model->info.compute, err));
    HR_TRY(hr_kernels_select(options->isa, &model->info.kernels, model->info.kernels_note,
                             sizeof model->info.kernels_note, err));
    HR_TRY(hr_hf_config_load(options->dir, &model->config, err));
    hr_status status = hr_architecture_find(model->config.architecture, &model->architecture, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "%s", options->dir);
    HR_TRY(choose_context(model, options->context_length, err));
    model->info.config = &model->config;
    model->packers = hr_pool_workers(options->pool);
    model->pages = hr_page_pool_create(MAX_KEPT_ADAPTERS);
    if (model->pages == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a model");

    status = hr_checkpoint_open(options->dir, &l.checkpoint, err);
    if (status != HR_OK)
        return status;
    status = hr_layout_build(model, err);
    if (status == HR_OK)
        status = hr_guard_create(&model->guard, err);
    if (status == HR_OK)
        status = find_tensors(&l, err);
    if (status == HR_OK)
        status = load_places(&l, err);
    if (status == HR_OK)
        make_rope(model, options->pool);
    free(l.scratch);
    free(l.tensors);
    hr_checkpoint_close(l.checkpoint);
    return status;
}

hr_status hr_model_load(const hr_model_options *options, hr_model **out, hr_error *err) {
    hr_model *model = calloc(1, sizeof *model);
    if (model == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a model");
    pthread_mutex_init(&model->snapshot_lock, NULL);
    hr_status status = load_into(model, options, err);
    if (status != HR_OK) {
        hr_model_destroy(model);
        return status;
    }
    *out = model;
    return HR_OK;
}

void hr_model_destroy(hr_model *model) {
    if (model == NULL)
        return;
    hr_pages_free(model->snapshot, model->arena_bytes);
    hr_weights live = {0};
    hr_weights_exchange(model, &live);
    hr_weights_destroy(&live);
    hr_weights_destroy(&model->shadow);
    free(model->shadow_fresh);
    hr_pages_free(model->tables, model->tables_bytes);
    hr_page_pool_unref(model->pages);
    hr_places_free(&model->places);
    hr_guard_destroy(model->guard);
    pthread_mutex_destroy(&model->snapshot_lock);
    free(model->module_names);
    free(model->name_text);
    free(model);
}

const hr_model_info *hr_model_info_of(const hr_model *model) {
    return &model->info;
}

void hr_model_kv_clear_page(const hr_model *model, const hr_kv *kv, uint32_t page) {
    size_t in_layer = model->info.kv_page_bytes / model->config.num_hidden_layers;
    for (uint32_t layer = 0; layer < model->config.num_hidden_layers; layer++)
        memset(kv->base + ((size_t)layer * kv->n_pages + page) * in_layer, 0, in_layer);
}
