/* weights_tool DTYPE MODEL [update CHECKPOINT | adapter DIR]: the weights of a model as another
 * program can check them. Prints "NAME DTYPE SHAPE XXH3" of each weight, after an update with all
 * tensors of another checkpoint when one is named; or of each tensor of an adapter. */
#include "format/checkpoint.h"
#include "model/base_update.h"
#include "tensor/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_digest(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                         uint32_t ndim, const uint8_t xxh3[16]) {
    (void)ctx;
    char text[128], hex[HR_XXH3_HEX];
    printf("%s %s %s %s\n", name, hr_dtype_name(dtype),
           hr_shape_format(shape, ndim, text, sizeof text), hr_xxh3_format(xxh3, hex));
}

static hr_status write_all(hr_base_update *update, const hr_checkpoint *checkpoint, hr_error *err) {
    for (size_t i = 0; i < hr_checkpoint_count(checkpoint); i++)
        HR_TRY(hr_base_update_write(update, hr_checkpoint_at(checkpoint, i), 1, err));
    return hr_base_update_seal(update, true, err);
}

static hr_status update(hr_model *model, const char *dir, hr_error *err) {
    hr_checkpoint *checkpoint;
    hr_base_update *one = NULL;
    HR_TRY(hr_checkpoint_open(dir, &checkpoint, err));
    hr_status status = hr_base_update_begin(model, true, &one, err);
    if (status == HR_OK)
        status = write_all(one, checkpoint, err);
    if (status == HR_OK)
        hr_base_update_publish(one);
    else
        hr_base_update_abandon(one);
    hr_checkpoint_close(checkpoint);
    return status;
}

static hr_status print_adapter(const hr_model *model, const char *dir, hr_error *err) {
    hr_lora *lora;
    HR_TRY(hr_lora_load(model, dir, &lora, err));
    hr_status status = hr_lora_digests(model, lora, print_digest, NULL, err);
    hr_lora_destroy(lora);
    return status;
}

static hr_status act(hr_model *model, const char *what, const char *dir, hr_error *err) {
    if (strcmp(what, "adapter") == 0)
        return print_adapter(model, dir, err);
    if (strcmp(what, "update") == 0)
        HR_TRY(update(model, dir, err));
    return hr_model_weight_digests(model, print_digest, NULL, err);
}

int main(int argc, char **argv) {
    hr_error err = {0};
    hr_pool *pool = NULL;
    hr_model *model = NULL;
    if (argc != 3 && argc != 5) {
        fprintf(stderr, "weights_tool: DTYPE MODEL [update CHECKPOINT | adapter DIR]\n");
        return 2;
    }
    hr_status status = hr_pool_create(1, &pool, &err);
    hr_model_options options = {.dir = argv[2], .dtype = argv[1], .pool = pool};
    if (status == HR_OK)
        status = hr_model_load(&options, &model, &err);
    if (status == HR_OK)
        status = act(model, argc == 5 ? argv[3] : "", argc == 5 ? argv[4] : NULL, &err);
    if (status != HR_OK)
        fprintf(stderr, "weights_tool: %s\n", err.message);
    hr_model_destroy(model);
    hr_pool_destroy(pool);
    return status == HR_OK ? 0 : 1;
}
