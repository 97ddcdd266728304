/* Digests of a packed adapter, by the names and in the shapes of its file. */
#include "model/adapter.h"
#include "model/base_update.h"
#include "tensor/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*digest_fn)(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                          uint32_t ndim, const uint8_t xxh3[16]);

/* A dense table [in][16 * n_leaves] back to [rank][in]. */
static void transpose_table(const hr_lora_module *pair, size_t in, size_t element, char *out) {
    size_t padded = (size_t)pair->n_leaves * HR_LORA_LEAF;
    for (size_t row = 0; row < pair->rank; row++)
        for (size_t i = 0; i < in; i++)
            memcpy(out + (row * in + i) * element, pair->a + (i * padded + row) * element, element);
}

static void tell(const hr_model *model, const char *path, const char *part, uint64_t rows,
                 uint64_t columns, const char *elements, digest_fn fn, void *ctx) {
    char name[HR_WEIGHT_NAME_SIZE];
    uint64_t shape[] = {rows, columns};
    uint8_t digest[HR_XXH3_SIZE];
    snprintf(name, sizeof name, "%s.%s", path, part);
    hr_xxh3(elements, rows * columns * hr_compute_bytes(model->info.compute), digest);
    fn(ctx, name, hr_compute_dtype(model->info.compute), shape, 2, digest);
}

/* What the product of the two is multiplied by: alpha and rank are no tensors of a file. */
static void tell_scaling(const char *path, float scale, digest_fn fn, void *ctx) {
    char name[HR_WEIGHT_NAME_SIZE];
    uint64_t no_shape[1] = {0};
    uint8_t digest[HR_XXH3_SIZE];
    snprintf(name, sizeof name, "%s.scaling", path);
    hr_xxh3(&scale, sizeof scale, digest);
    fn(ctx, name, HR_DTYPE_F32, no_shape, 0, digest);
}

/* elements: room for the larger of the two. */
static void digest_pair(const hr_model *model, const hr_lora_module *pair,
                        const hr_module_name *module, char *elements, digest_fn fn, void *ctx) {
    hr_compute compute = model->info.compute;
    bool table = module->is_embedding;
    if (table)
        transpose_table(pair, module->in, hr_compute_bytes(compute), elements);
    else
        hr_unpack_weight(compute, pair->a, module->in, 0, pair->rank, elements);
    tell(model, module->path, table ? "lora_embedding_A" : "lora_A.weight", pair->rank, module->in,
         elements, fn, ctx);
    hr_unpack_lora_b(compute, pair->b, module->out, pair->rank, elements);
    tell(model, module->path, table ? "lora_embedding_B" : "lora_B.weight", module->out, pair->rank,
         elements, fn, ctx);
    tell_scaling(module->path, pair->scale, fn, ctx);
}

hr_status hr_lora_digests(const hr_model *model, const hr_lora *lora, digest_fn fn, void *ctx,
                          hr_error *err) {
    size_t most = 0;
    for (size_t i = 0; i < model->n_modules; i++) {
        const hr_module_name *module = &model->module_names[i];
        size_t longer = module->in > module->out ? module->in : module->out;
        most = longer * lora->modules[i].rank > most ? longer * lora->modules[i].rank : most;
    }
    char *elements = malloc(most * hr_compute_bytes(model->info.compute) + 1);
    if (elements == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to digest an adapter");
    for (size_t i = 0; i < model->n_modules; i++)
        if (lora->modules[i].a != NULL)
            digest_pair(model, &lora->modules[i], &model->module_names[i], elements, fn, ctx);
    free(elements);
    return HR_OK;
}
