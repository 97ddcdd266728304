/* From a PEFT directory to packed pairs. */
#include "model/lora.h"

#include "base/machine.h"
#include "model/adapter.h"
#include "tensor/convert.h"

#include <stdlib.h>
#include <string.h>

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

/* Packs a pair at *a and *b and moves both past it. */
static void pack_pair(const hr_model *model, const hr_peft_module *pair, void *scratch, char **a,
                      char **b, hr_lora *lora) {
    lora->modules[pair->module] = (hr_lora_module){.a = *a,
                                                   .b = *b,
                                                   .rank = pair->rank,
                                                   .n_leaves = leaves_of(pair->rank),
                                                   .scale = pair->scale};
    pack_a(model, pair, scratch, *a);
    pack_b(model, pair, scratch, *b);
    *a += a_bytes(model, pair);
    *b += b_bytes(model, pair);
}

/* All A's in the order of module ids, then all B's (adapter.h says why). */
static hr_status pack(const hr_model *model, const hr_peft *peft, hr_lora *lora, hr_error *err) {
    size_t all_a = 0, all_b = 0;
    for (size_t i = 0; i < peft->n_modules; i++) {
        all_a += a_bytes(model, &peft->modules[i]);
        all_b += b_bytes(model, &peft->modules[i]);
    }
    lora->max_rank = peft->max_rank;
    lora->max_leaves = leaves_of(peft->max_rank);
    lora->modules = calloc(model->n_modules, sizeof *lora->modules);
    lora->arena_bytes = hr_round_up(all_a, 64) + all_b;
    lora->arena = hr_pages_alloc(lora->arena_bytes); /* zeroed */
    void *scratch = aligned_alloc(64, scratch_bytes(model, peft));
    if (lora->modules == NULL || lora->arena == NULL || scratch == NULL) {
        free(scratch);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an adapter of %zu bytes",
                       lora->arena_bytes);
    }
    char *a = lora->arena, *b = lora->arena + hr_round_up(all_a, 64);
    for (size_t i = 0; i < peft->n_modules; i++)
        pack_pair(model, &peft->modules[i], scratch, &a, &b, lora);
    free(scratch);
    return HR_OK;
}

/* Row `row` of a base weight as floats of the compute values; a tied embedding lies in the head. */
static void base_row(const hr_model *model, const hr_linear *linear, uint32_t part, size_t row,
                     float *out) {
    hr_compute compute = model->info.compute;
    if (linear == NULL) {
        size_t hidden = model->config.hidden_size;
        const char *from = model->embed + row * hidden * hr_compute_bytes(compute);
        hr_convert(out, HR_DTYPE_F32, from, hr_compute_dtype(compute), hidden, NULL);
        return;
    }
    uint32_t packed_row = linear->part_panel[part] * HR_PANEL + (uint32_t)row;
    model->info.kernels->unpack_row[compute](linear->w, packed_row, linear->k, out);
}

/* The linear that holds a module and the module's part in it; NULL for a dense embedding. */
static const hr_linear *linear_of_module(const hr_model *model, size_t module, uint32_t *part) {
    *part = 0;
    if (module == model->embed_module)
        return model->embed != NULL ? NULL : &model->head;
    if (module == model->head_module)
        return &model->head;
    const hr_layer *layer = &model->layers[module / HR_LAYER_MODULES];
    const hr_linear *linears[] = {&layer->down, &layer->gate_up, &layer->o, &layer->qkv};
    size_t i = 0;
    while (linears[i]->module > module)
        i++;
    *part = (uint32_t)(module - linears[i]->module);
    return linears[i];
}

static bool rows_equal(const hr_model *model, size_t module, const hr_tensor *weight, uint64_t rows,
                       uint64_t k, float *rows_of_k) {
    uint32_t part;
    const hr_linear *linear = linear_of_module(model, module, &part);
    hr_dtype dtype = hr_compute_dtype(model->info.compute);
    float *base = rows_of_k, *theirs = base + k, *rounded = theirs + k;
    for (uint64_t row = 0; row < rows; row++) {
        const char *from = (const char *)weight->data + row * k * hr_dtype_size(weight->dtype);
        base_row(model, linear, part, row, base);
        hr_convert(rounded, dtype, from, weight->dtype, k, NULL);
        hr_convert(theirs, HR_DTYPE_F32, rounded, dtype, k, NULL);
        if (memcmp(base, theirs, k * sizeof(float)) != 0)
            return false;
    }
    return true;
}

/* hr_peft_base.equals: compares in the compute dtype, which is what the base is held in. */
static bool equals_base(void *ctx, size_t module, const hr_tensor *weight) {
    const hr_model *model = ctx;
    if (module >= model->n_modules || weight->ndim != 2 || !hr_dtype_is_weight(weight->dtype))
        return false;
    const hr_module_name *name = &model->module_names[module];
    uint64_t rows = name->is_embedding ? name->in : name->out;
    uint64_t k = name->is_embedding ? name->out : name->in;
    if (weight->shape[0] != rows || weight->shape[1] != k)
        return false;
    unsigned side;
    float *rows_of_k = malloc(3 * k * sizeof(float));
    if (rows_of_k == NULL || hr_guard_enter(model->guard, &side, NULL) != HR_OK) {
        free(rows_of_k);
        return false;
    }
    bool equal = rows_equal(model, module, weight, rows, k, rows_of_k);
    hr_guard_leave(model->guard, side);
    free(rows_of_k);
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
        hr_pages_free(lora->arena, lora->arena_bytes);
    free(lora->modules);
    free(lora);
}

size_t hr_lora_bytes(const hr_lora *lora) {
    return lora->arena_bytes;
}

uint32_t hr_lora_max_rank(const hr_lora *lora) {
    return lora->max_rank;
}
