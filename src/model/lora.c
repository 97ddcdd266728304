/* From a PEFT directory to packed pairs. */
#include "model/lora.h"

#include "base/cores.h"
#include "model/adapter.h"
#include "tensor/convert.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Threads that pack one adapter, and the least that each is worth starting for. */
enum { MAX_PACKERS = 4, PACKER_BYTES = 4 << 20 };

static uint32_t leaves_of(uint32_t rank) {
    return (uint32_t)(hr_round_up(rank, HR_LORA_LEAF) / HR_LORA_LEAF);
}

static size_t a_bytes(const hr_model *model, const hr_peft_module *pair) {
    const hr_module_name *module = &model->module_names[pair->module];
    hr_compute compute = model->info.compute;
    if (module->is_embedding)
        return module->in * leaves_of(pair->rank) * HR_LORA_LEAF * hr_compute_bytes(compute);
    return hr_packed_bytes(compute, pair->rank, module->in);
}

static size_t b_bytes(const hr_model *model, const hr_peft_module *pair) {
    return hr_pack_lora_b_bytes(model->info.compute, model->module_names[pair->module].out,
                                pair->rank);
}

/* Converted rows on their way: a panel of A or B, or one row of an embedding's A. */
static size_t scratch_bytes(const hr_model *model, const hr_peft *peft) {
    size_t most = 1;
    for (size_t i = 0; i < peft->n_modules; i++) {
        const hr_peft_module *pair = &peft->modules[i];
        const hr_module_name *module = &model->module_names[pair->module];
        size_t a = module->is_embedding ? module->in : HR_PANEL * module->in;
        size_t b = (size_t)HR_PANEL * pair->rank;
        most = a > most ? a : most;
        most = b > most ? b : most;
    }
    return hr_round_up(most * sizeof(float), 64);
}

/* Rows [begin, end) in compute elements: where they lie, or converted into scratch. */
static const void *compute_rows(const hr_model *model, const hr_tensor *tensor, size_t begin,
                                size_t end, void *scratch) {
    size_t k = tensor->shape[1];
    const char *from = (const char *)tensor->data + begin * k * hr_dtype_size(tensor->dtype);
    hr_dtype dtype = hr_compute_dtype(model->info.compute);
    if (tensor->dtype == dtype)
        return from;
    hr_status status = hr_convert(scratch, dtype, from, tensor->dtype, (end - begin) * k, NULL);
    HR_ASSERT(status == HR_OK); /* peft.h hands out weight dtypes only */
    return scratch;
}

static void pack_table(const hr_model *model, const hr_peft_module *pair, void *scratch, char *to) {
    size_t element = hr_compute_bytes(model->info.compute), vocab = pair->a.shape[1];
    size_t padded = (size_t)leaves_of(pair->rank) * HR_LORA_LEAF;
    memset(to, 0, a_bytes(model, pair)); /* rows are padded */
    for (size_t row = 0; row < pair->rank; row++) {
        const char *from = compute_rows(model, &pair->a, row, row + 1, scratch);
        for (size_t v = 0; v < vocab; v++)
            memcpy(to + (v * padded + row) * element, from + v * element, element);
    }
}

static void pack_a(const hr_model *model, const hr_peft_module *pair, void *scratch, char *to) {
    hr_place place = {.kind = HR_PLACE_PACKED, .n = pair->rank, .k = (uint32_t)pair->a.shape[1]};
    if (model->module_names[pair->module].is_embedding)
        pack_table(model, pair, scratch, to);
    else
        hr_place_pack(&place, model->info.compute, &pair->a, 0, 0, pair->rank, scratch, to);
}

static void pack_b(const hr_model *model, const hr_peft_module *pair, void *scratch, char *to) {
    size_t out = pair->b.shape[0];
    hr_compute compute = model->info.compute;
    for (size_t row = 0; row < out; row += HR_PANEL) {
        size_t n = out - row < HR_PANEL ? out - row : HR_PANEL;
        const void *rows = compute_rows(model, &pair->b, row, row + n, scratch);
        if (compute == HR_COMPUTE_BF16)
            hr_pack_lora_b_bf16(rows, n, pair->rank, to);
        else
            hr_pack_lora_b_f32(rows, n, pair->rank, to);
        to += hr_pack_lora_b_bytes(compute, n, pair->rank);
    }
}

/* The pairs [begin, end) of an adapter, packed by one thread. */
typedef struct pack_job {
    const hr_model *model;
    const hr_peft *peft;
    const hr_lora *lora;
    size_t begin, end;
    void *scratch;
    pthread_t thread;
    bool started;
    hr_status status;
    hr_error err;
} pack_job;

static void *pack_pairs(void *arg) {
    pack_job *job = arg;
    hr_dtype as = hr_compute_dtype(job->model->info.compute);
    for (size_t i = job->begin; i < job->end; i++) {
        const hr_peft_module *pair = &job->peft->modules[i];
        job->status = hr_peft_check_values(pair, as, &job->err);
        if (job->status != HR_OK)
            break;
        const hr_lora_module *module = &job->lora->modules[pair->module];
        pack_a(job->model, pair, job->scratch, module->a);
        pack_b(job->model, pair, job->scratch, module->b);
    }
    return NULL;
}

/* Gives each job near-equal bytes of the arena. */
static void share_pairs(const hr_model *model, const hr_peft *peft, pack_job *jobs, unsigned n,
                        size_t total) {
    size_t i = 0, bytes = 0;
    for (unsigned j = 0; j < n; j++) {
        jobs[j].begin = i;
        while (i < peft->n_modules && (j + 1 == n || bytes < total / n * (j + 1))) {
            bytes += a_bytes(model, &peft->modules[i]) + b_bytes(model, &peft->modules[i]);
            i++;
        }
        jobs[j].end = i;
    }
}

/* The pool is the scheduler's, so a large adapter gets threads of its own for its few
 * milliseconds. One that does not start leaves its share to the caller. */
static hr_status pack_shared(const hr_model *model, const hr_peft *peft, const hr_lora *lora,
                             hr_error *err) {
    pack_job jobs[MAX_PACKERS];
    size_t scratch_size = scratch_bytes(model, peft), wanted = lora->arena_bytes / PACKER_BYTES;
    unsigned most = model->packers < MAX_PACKERS ? model->packers : MAX_PACKERS;
    unsigned n = wanted < 1 ? 1 : wanted < most ? (unsigned)wanted : most;
    char *scratch = aligned_alloc(64, n * scratch_size);
    if (scratch == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to pack an adapter");
    for (unsigned j = 0; j < n; j++)
        jobs[j] = (pack_job){model, peft, lora, .scratch = scratch + j * scratch_size};
    share_pairs(model, peft, jobs, n, lora->arena_bytes);
    for (unsigned j = 1; j < n; j++)
        jobs[j].started = hr_core_start_apart(&jobs[j].thread, pack_pairs, &jobs[j]) == 0;
    for (unsigned j = 0; j < n; j++)
        if (!jobs[j].started)
            pack_pairs(&jobs[j]);
    for (unsigned j = 1; j < n; j++)
        if (jobs[j].started)
            pthread_join(jobs[j].thread, NULL);
    free(scratch);
    for (unsigned j = 0; j < n; j++)
        if (jobs[j].status != HR_OK) /* the first in the order of modules */
            return hr_fail(err, jobs[j].status, "%s", jobs[j].err.message);
    return HR_OK;
}

/* All A's in the order of module ids, then all B's (adapter.h says why). */
static void lay_out(const hr_model *model, const hr_peft *peft, char *a, char *b, hr_lora *lora) {
    for (size_t i = 0; i < peft->n_modules; i++) {
        const hr_peft_module *pair = &peft->modules[i];
        lora->modules[pair->module] = (hr_lora_module){.a = a,
                                                       .b = b,
                                                       .rank = pair->rank,
                                                       .n_leaves = leaves_of(pair->rank),
                                                       .scale = pair->scale};
        a += a_bytes(model, pair);
        b += b_bytes(model, pair);
    }
}

static hr_status pack(const hr_model *model, const hr_peft *peft, hr_lora *lora, hr_error *err) {
    size_t all_a = 0, all_b = 0;
    for (size_t i = 0; i < peft->n_modules; i++) {
        all_a += a_bytes(model, &peft->modules[i]);
        all_b += b_bytes(model, &peft->modules[i]);
    }
    lora->max_rank = peft->max_rank;
    lora->max_leaves = leaves_of(peft->max_rank);
    lora->modules = calloc(model->n_modules, sizeof *lora->modules);
    size_t b_at = hr_round_up(all_a, 64);
    lora->arena_bytes = lora->pages_bytes = b_at + all_b;
    lora->pages = model->pages;
    lora->arena = hr_page_pool_take(lora->pages, &lora->pages_bytes);
    if (lora->modules == NULL || lora->arena == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an adapter of %zu bytes",
                       lora->arena_bytes);
    memset(lora->arena + all_a, 0, b_at - all_a); /* pairs fill all the rest */
    lay_out(model, peft, lora->arena, lora->arena + b_at, lora);
    return pack_shared(model, peft, lora, err);
}

/* Whether a weight, as it would be packed, is what arena holds. elements: room for two panels. */
static bool rows_equal(const hr_place *place, hr_compute compute, const char *arena,
                       const hr_tensor *weight, char *elements) {
    hr_dtype dtype = hr_place_dtype(place, compute);
    size_t row_bytes = place->k * hr_dtype_size(dtype);
    char *ours = elements, *theirs = elements + HR_PANEL * row_bytes;
    for (size_t row = 0; row < place->n; row += HR_PANEL) {
        size_t end = place->n - row < HR_PANEL ? place->n : row + HR_PANEL;
        const char *from =
            (const char *)weight->data + row * place->k * hr_dtype_size(weight->dtype);
        hr_place_unpack(place, compute, arena + place->at, row, end, ours);
        hr_convert(theirs, dtype, from, weight->dtype, (end - row) * place->k, NULL);
        if (memcmp(ours, theirs, (end - row) * row_bytes) != 0)
            return false;
    }
    return true;
}

/* The place of a module's weight; that of a tied head is the embedding's. */
static const hr_place *place_of_module(const hr_model *model, size_t module) {
    char name[HR_WEIGHT_NAME_SIZE];
    snprintf(name, sizeof name, "%s.weight", model->module_names[module].path);
    const hr_weight_name *found = hr_places_find(&model->places, name);
    HR_ASSERT(found != NULL); /* every module has a weight */
    return &model->places.items[found->places[0]];
}

/* hr_peft_base.equals: compares in the compute dtype, which is what the base is held in. */
static bool equals_base(void *ctx, size_t module, const hr_tensor *weight) {
    const hr_model *model = ctx;
    if (module >= model->n_modules || weight->ndim != 2 || !hr_dtype_is_weight(weight->dtype))
        return false;
    const hr_place *place = place_of_module(model, module);
    if (weight->shape[0] != place->n || weight->shape[1] != place->k)
        return false;
    hr_reading reading;
    char *elements = malloc(2 * hr_place_scratch_bytes(&model->places));
    if (elements == NULL || hr_guard_enter(model->guard, &model->arena, &reading, NULL) != HR_OK) {
        free(elements);
        return false;
    }
    bool equal = rows_equal(place, model->info.compute, reading.memory, weight, elements);
    hr_guard_leave(model->guard, &reading);
    free(elements);
    return equal;
}

/* Packs what was resolved, and closes it. */
static hr_status pack_resolved(const hr_model *model, hr_peft *peft, hr_lora **out, hr_error *err) {
    hr_lora *lora = calloc(1, sizeof *lora);
    hr_status status = lora == NULL ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an adapter")
                                    : pack(model, peft, lora, err);
    hr_peft_close(peft);
    if (status != HR_OK) {
        hr_lora_destroy(lora);
        return status;
    }
    *out = lora;
    return HR_OK;
}

static hr_peft_base base_of(const hr_model *model) {
    union {
        const hr_model *model;
        void *ctx;
    } holder = {model}; /* equals_base only reads */
    return (hr_peft_base){equals_base, holder.ctx};
}

hr_status hr_lora_load(const hr_model *model, const char *dir, hr_lora **out, hr_error *err) {
    hr_peft_base base = base_of(model);
    hr_peft peft = {0};
    HR_TRY(hr_peft_open(dir, model->module_names, model->n_module_names, &base, &peft, err));
    return pack_resolved(model, &peft, out, err);
}

hr_status hr_lora_create(const hr_model *model, const char *config, size_t config_len,
                         const hr_tensor *tensors, size_t n_tensors, hr_lora **out, hr_error *err) {
    hr_peft_base base = base_of(model);
    hr_peft peft = {0};
    HR_TRY(hr_peft_resolve(config, config_len, tensors, n_tensors, model->module_names,
                           model->n_module_names, &base, &peft, err));
    return pack_resolved(model, &peft, out, err);
}

hr_status hr_lora_check_config(const hr_model *model, const char *config, size_t config_len,
                               uint32_t *max_rank, hr_error *err) {
    return hr_peft_check_config(config, config_len, model->module_names, model->n_module_names,
                                max_rank, err);
}

void hr_lora_destroy(hr_lora *lora) {
    if (lora == NULL)
        return;
    if (lora->arena != NULL)
        hr_page_pool_give(lora->pages, lora->arena, lora->pages_bytes);
    free(lora->modules);
    free(lora);
}

void hr_lora_contents(const hr_model *model, const hr_lora *lora, uint8_t out[HR_XXH3_SIZE]) {
    hr_xxh3(lora->arena, lora->arena_bytes, out);
    for (uint32_t i = 0; i < model->n_modules; i++) {
        const hr_lora_module *module = &lora->modules[i];
        unsigned char link[HR_XXH3_SIZE + sizeof module->rank + sizeof module->scale];
        memcpy(link, out, HR_XXH3_SIZE);
        memcpy(link + HR_XXH3_SIZE, &module->rank, sizeof module->rank);
        memcpy(link + HR_XXH3_SIZE + sizeof module->rank, &module->scale, sizeof module->scale);
        hr_xxh3(link, sizeof link, out);
    }
}

size_t hr_lora_bytes(const hr_lora *lora) {
    return lora->arena_bytes;
}

uint32_t hr_lora_max_rank(const hr_lora *lora) {
    return lora->max_rank;
}
