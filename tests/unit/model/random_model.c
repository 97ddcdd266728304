#include "random_model.h"

#include "format/safetensors.h"
#include "model/layout.h"
#include "tensor/convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* splitmix64's finish over a counter; uniform in [-1/2, 1/2). */
static float value(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (float)((int64_t)(x >> 40) - (1 << 23)) * 0x1p-24f;
}

/* Of a value below one half; rounding is of no interest here. */
static uint16_t f16_bits(float x) {
    uint32_t bits = hr_f32_bits(x), exponent = (bits >> 23) & 255;
    if (exponent < 113)
        return 0;
    return (uint16_t)((bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
}

static void *values(hr_dtype dtype, size_t n, uint64_t seed) {
    char *data = malloc(n * hr_dtype_size(dtype));
    HR_ASSERT(data != NULL);
    for (size_t i = 0; i < n; i++) {
        float x = value(seed + i);
        uint16_t half = dtype == HR_DTYPE_F16 ? f16_bits(x) : hr_f32_to_bf16(x);
        if (dtype == HR_DTYPE_F32)
            memcpy(data + i * sizeof x, &x, sizeof x);
        else
            memcpy(data + i * sizeof half, &half, sizeof half);
    }
    return data;
}

static void write_config(const char *dir, const random_kind *kind) {
    char path[1200];
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *file = fopen(path, "w");
    HR_ASSERT(file != NULL);
    fprintf(file,
            "{\"architectures\": [\"%s\"], \"vocab_size\": 101, \"hidden_size\": 40,"
            " \"intermediate_size\": 56, \"num_hidden_layers\": 2, \"num_attention_heads\": 3,"
            " \"num_key_value_heads\": 1, \"head_dim\": 10, \"max_position_embeddings\": 64,"
            " \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\","
            " \"tie_word_embeddings\": %s, \"attention_bias\": %s}",
            kind->architecture, kind->tied ? "true" : "false", kind->bias ? "true" : "false");
    HR_ASSERT(fclose(file) == 0);
}

/* What a checkpoint must hold is asked of the layout; test_golden and the parity tests hold that
 * against the world. */
static void lay_out(const char *dir, hr_model **out) {
    hr_model *model = calloc(1, sizeof *model);
    HR_ASSERT(model != NULL);
    hr_status status = hr_hf_config_load(dir, &model->config, NULL);
    if (status == HR_OK)
        status = hr_architecture_find(model->config.architecture, &model->architecture, NULL);
    model->info.context_length = 1;
    if (status == HR_OK)
        status = hr_layout_build(model, NULL);
    HR_ASSERT(status == HR_OK);
    *out = model;
}

void random_model_write(const char *dir, const random_kind *kind, uint64_t seed) {
    hr_model *model;
    HR_ASSERT(mkdir(dir, 0700) == 0);
    write_config(dir, kind);
    lay_out(dir, &model);
    hr_tensor *tensors = calloc(model->places.n, sizeof *tensors);
    void **data = calloc(model->places.n, sizeof *data);
    HR_ASSERT(tensors != NULL && data != NULL);
    for (size_t i = 0; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        size_t n = place->n * hr_place_row_elements(place);
        data[i] = values(kind->dtype, n, (seed << 40) + ((uint64_t)i << 24));
        tensors[i] = (hr_tensor){.name = place->name,
                                 .dtype = kind->dtype,
                                 .ndim = place->k > 0 ? 2 : 1,
                                 .shape = {place->n, place->k},
                                 .data = data[i],
                                 .bytes = n * hr_dtype_size(kind->dtype)};
    }
    char path[1200];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    hr_status status = hr_safetensors_save(path, tensors, model->places.n, NULL);
    HR_ASSERT(status == HR_OK);
    for (size_t i = 0; i < model->places.n; i++)
        free(data[i]);
    free(data);
    free(tensors);
    hr_model_destroy(model);
}

void random_model_remove(const char *dir) {
    static const char *const files[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < 2; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        remove(path);
    }
    rmdir(dir);
}
