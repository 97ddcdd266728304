#include "fake_weights.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct {
    const char *adapter, *name;
    size_t size;
} table[WEIGHTS_ALL] = {
    {"a", "base_model.model.l0.lora_A.weight", 40},
    {"a", "base_model.model.l0.lora_B.weight", 300},
    {"a", "base_model.model.l1.lora_A.weight", 64},
    {"a", "base_model.model.l1.lora_B.weight", 7},
    {"a", "base_model.model.l2.lora_A.weight", 128},
    {"b", "base_model.model.l0.lora_A.weight", 16},
    {"b", "base_model.model.l0.lora_B.weight", 700},
    {"b", "base_model.model.l1.lora_A.weight", 1},
    {"b", "base_model.model.l1.lora_B.weight", 0},
    {NULL, "layers.0", 200},
    {NULL, "layers.1", 64},
    {NULL, "layers.2", 5},
    {"b", "base_model.model.l2.lora_A.weight", 96},
};

static const char config_a[] = "{\"r\": 8}", config_b[] = "{\"r\": 4}";
const hr_push_adapter fake_adapters[2] = {{"a", config_a, sizeof config_a - 1, false},
                                          {"b", config_b, sizeof config_b - 1, false}};

static void make_bytes(uint64_t generation, unsigned i, uint8_t *out) {
    uint64_t state = generation * 1000 + i + 1;
    for (size_t k = 0; k < table[i].size; k++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        out[k] = (uint8_t)(state >> 33);
    }
}

static hr_tensor tensor_of(unsigned i, const void *bytes) {
    return (hr_tensor){.name = table[i].name,
                       .dtype = HR_DTYPE_U8,
                       .ndim = 1,
                       .shape = {table[i].size},
                       .data = bytes,
                       .bytes = table[i].size};
}

/* ---- the source ---- */

typedef struct held_unit {
    fake_source *source;
    hr_tensor tensor;
    uint8_t *bytes;
} held_unit;

static void release(void *owner) {
    held_unit *held = owner;
    held->source->released++;
    held->source->live -= held->tensor.bytes;
    memset(held->bytes, 0xee, held->tensor.bytes + 1);
    free(held->bytes);
    free(held);
}

static bool is_first(unsigned i) {
    return i == 0 || i == 5;
}

static bool is_mine(const fake_source *s, unsigned i) {
    bool wanted = table[i].adapter != NULL ? s->adapters : s->base;
    return wanted && (s->ranks <= 1 || is_first(i) || i % s->ranks == s->rank);
}

static hr_status next(void *self, hr_unit *unit, hr_error *err) {
    fake_source *s = self;
    *unit = (hr_unit){0};
    while (s->at < WEIGHTS_ALL && !is_mine(s, s->at))
        s->at++;
    if (s->fail_at >= 0 && s->pulled == (unsigned)s->fail_at)
        return hr_fail(err, HR_ERR_IO, "the disk of the trainer is full");
    if (s->at == WEIGHTS_ALL)
        return HR_OK;
    unsigned i = s->at++;
    held_unit *held = calloc(1, sizeof *held);
    held->source = s;
    held->bytes = malloc(table[i].size + 1);
    make_bytes(s->generation, i, held->bytes);
    if (is_first(i))
        held->bytes[0] = (uint8_t)(held->bytes[0] ^ s->twist);
    held->tensor = tensor_of(i, held->bytes);
    s->pulled++;
    s->live += table[i].size;
    s->most_live = s->live > s->most_live ? s->live : s->most_live;
    s->largest_unit = table[i].size > s->largest_unit ? table[i].size : s->largest_unit;
    *unit = (hr_unit){.tensors = &held->tensor,
                      .n = 1,
                      .adapter = table[i].adapter,
                      .owner = held,
                      .release = release};
    return HR_OK;
}

hr_unit_source fake_source_units(fake_source *source) {
    return (hr_unit_source){source, next};
}

hr_push fake_push(fake_source *source, char version[32]) {
    snprintf(version, 32, "v%llu", (unsigned long long)source->generation);
    return (hr_push){.adapters = fake_adapters,
                     .n_adapters = source->adapters ? 2 : 0,
                     .sync_base = source->base,
                     .complete_base = source->base,
                     .weight_version = version,
                     .source = fake_source_units(source)};
}

/* ---- what it becomes ---- */

static uint64_t value_of(uint64_t generation, const hr_push_adapter *adapter) {
    hr_tensor tensors[WEIGHTS_ALL];
    uint8_t *bytes[WEIGHTS_ALL];
    size_t n = 0;
    for (unsigned i = 0; i < WEIGHTS_ALL; i++) {
        if (table[i].adapter == NULL || strcmp(table[i].adapter, adapter->name) != 0)
            continue;
        bytes[n] = malloc(table[i].size + 1);
        make_bytes(generation, i, bytes[n]);
        tensors[n] = tensor_of(i, bytes[n]);
        n++;
    }
    uint64_t value = fake_adapter_value(adapter->config, adapter->config_len, tensors, n);
    while (n > 0)
        free(bytes[--n]);
    return value;
}

bool fake_engine_serves(const fleet_engine *engine, uint64_t generation) {
    char version[32];
    snprintf(version, sizeof version, "v%llu", (unsigned long long)generation);
    bool same = strcmp(engine->sink.version, version) == 0;
    for (size_t a = 0; a < 2; a++)
        same = same && fake_sink_value(&engine->sink, fake_adapters[a].name) ==
                           value_of(generation, &fake_adapters[a]);
    for (unsigned i = 0; i < WEIGHTS_ALL; i++) {
        uint8_t bytes[1024];
        if (table[i].adapter != NULL)
            continue;
        make_bytes(generation, i, bytes);
        hr_tensor t = tensor_of(i, bytes);
        same = same && engine->sink.base[table[i].name[7] - '0'] == fake_base_value(&t);
    }
    return same;
}
