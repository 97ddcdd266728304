/* Sizes and addresses of everything a model holds. */
#include "model/layout.h"

#include "base/machine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODULE_PATH_SIZE = 128 }; /* the architecture table has no longer ones */

/* The arena is laid out twice by the same code: first without memory, to learn its size. */
typedef struct cursor {
    char *base; /* NULL in the first pass */
    size_t used;
} cursor;

static void *take(cursor *at, size_t bytes) {
    char *to = at->base == NULL ? NULL : at->base + at->used;
    at->used += hr_round_up(bytes, 64);
    return to;
}

static float *take_floats(cursor *at, size_t n) {
    return take(at, n * sizeof(float));
}

static void add_part(hr_linear *linear, uint32_t outputs) {
    uint32_t part = linear->n_parts++;
    linear->part_outputs[part] = outputs;
    linear->part_panel[part] = linear->n_panels;
    linear->n_panels += (uint32_t)(hr_round_up(outputs, HR_PANEL) / HR_PANEL);
    linear->part_panel[part + 1] = linear->n_panels;
}

static hr_linear linear_of(uint32_t module, uint32_t k) {
    return (hr_linear){.module = module, .k = k, .k_padded = (uint32_t)hr_round_up(k, HR_LEAF)};
}

static void take_linear(cursor *at, const hr_model *model, hr_linear *linear, bool bias) {
    size_t outputs = (size_t)linear->n_panels * HR_PANEL;
    linear->w = take(at, hr_packed_bytes(model->info.compute, outputs, linear->k));
    linear->bias = bias ? take_floats(at, outputs) : NULL;
}

static bool any_bias(const hr_model *model, hr_module_kind first, hr_module_kind last) {
    for (hr_module_kind kind = first; kind <= last; kind++)
        if (model->architecture->has_bias(&model->config, kind))
            return true;
    return false;
}

static void lay_out_layer(cursor *at, const hr_model *model, uint32_t index, hr_layer *layer) {
    const hr_hf_config *c = &model->config;
    uint32_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;

    layer->attention_norm = take_floats(at, c->hidden_size);
    layer->q_norm = model->architecture->qk_norm ? take_floats(at, c->head_dim) : NULL;
    layer->k_norm = model->architecture->qk_norm ? take_floats(at, c->head_dim) : NULL;

    layer->qkv = linear_of(hr_module_id(index, HR_MODULE_Q), c->hidden_size);
    add_part(&layer->qkv, q);
    add_part(&layer->qkv, kv);
    add_part(&layer->qkv, kv);
    take_linear(at, model, &layer->qkv, any_bias(model, HR_MODULE_Q, HR_MODULE_V));

    layer->o = linear_of(hr_module_id(index, HR_MODULE_O), q);
    add_part(&layer->o, c->hidden_size);
    take_linear(at, model, &layer->o, any_bias(model, HR_MODULE_O, HR_MODULE_O));

    layer->mlp_norm = take_floats(at, c->hidden_size);
    layer->gate_up = linear_of(hr_module_id(index, HR_MODULE_GATE), c->hidden_size);
    add_part(&layer->gate_up, c->intermediate_size);
    add_part(&layer->gate_up, c->intermediate_size);
    take_linear(at, model, &layer->gate_up, any_bias(model, HR_MODULE_GATE, HR_MODULE_UP));

    layer->down = linear_of(hr_module_id(index, HR_MODULE_DOWN), c->intermediate_size);
    add_part(&layer->down, c->hidden_size);
    take_linear(at, model, &layer->down, any_bias(model, HR_MODULE_DOWN, HR_MODULE_DOWN));
}

static void lay_out(cursor *at, const hr_model *model, hr_weights *weights) {
    const hr_hf_config *c = &model->config;
    weights->embed = c->tie_word_embeddings ? NULL
                                            : take(at, (size_t)c->vocab_size * c->hidden_size *
                                                           hr_compute_bytes(model->info.compute));
    for (uint32_t i = 0; i < c->num_hidden_layers; i++)
        lay_out_layer(at, model, i, &weights->layers[i]);
    weights->final_norm = take_floats(at, c->hidden_size);
    weights->head = linear_of(model->head_module, c->hidden_size);
    add_part(&weights->head, c->vocab_size);
    take_linear(at, model, &weights->head, false);
}

static void lay_out_tables(cursor *at, hr_model *model) {
    size_t angles = (size_t)model->info.context_length * (model->config.head_dim / 2);
    model->rope_cos = take_floats(at, angles);
    model->rope_sin = take_floats(at, angles);
}

/* Bounds that keep every later product far inside 64 bits and every count inside 32. */
static hr_status check_sizes(const hr_hf_config *c, hr_error *err) {
    const struct {
        const char *key;
        uint64_t value, max;
    } bounds[] = {
        {"vocab_size", c->vocab_size, 1u << 24},
        {"hidden_size", c->hidden_size, 1u << 18},
        {"intermediate_size", c->intermediate_size, 1u << 20},
        {"num_hidden_layers", c->num_hidden_layers, 4096},
        {"num_attention_heads", c->num_attention_heads, 4096},
        {"num_key_value_heads", c->num_key_value_heads, 4096},
        {"head_dim", c->head_dim, 512},
        {"max_position_embeddings", c->max_position_embeddings, 1u << 24},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++)
        if (bounds[i].value == 0 || bounds[i].value > bounds[i].max)
            return hr_fail(err, HR_ERR_MODEL, "config.json: %s is %llu, wanted 1 to %llu",
                           bounds[i].key, (unsigned long long)bounds[i].value,
                           (unsigned long long)bounds[i].max);
    if (c->num_attention_heads % c->num_key_value_heads != 0)
        return hr_fail(
            err, HR_ERR_MODEL,
            "config.json: num_attention_heads %u is no multiple of num_key_value_heads %u",
            c->num_attention_heads, c->num_key_value_heads);
    if (c->head_dim % 2 != 0)
        return hr_fail(err, HR_ERR_MODEL, "config.json: head_dim %u is odd, RoPE needs pairs",
                       c->head_dim);
    return HR_OK;
}

/* The next name in model->name_text: "<layers>.<layer>.<module>", or the module alone. */
static const char *module_path(char **text, const char *layers, uint32_t layer,
                               const char *module) {
    char *path = *text;
    int length = layers == NULL
                     ? snprintf(path, MODULE_PATH_SIZE, "%s", module)
                     : snprintf(path, MODULE_PATH_SIZE, "%s.%u.%s", layers, layer, module);
    HR_ASSERT(length > 0 && length < MODULE_PATH_SIZE);
    *text += length + 1;
    return path;
}

static hr_module_name linear_module(const char *path, const hr_linear *linear, uint32_t part) {
    return (hr_module_name){
        .path = path, .in = linear->k, .out = linear->part_outputs[part], .is_linear = true};
}

static hr_status name_modules(hr_model *model, hr_error *err) {
    const hr_hf_config *c = &model->config;
    const hr_architecture_names *names = model->architecture->names;
    size_t norms = (size_t)c->num_hidden_layers * (model->architecture->qk_norm ? 4 : 2) + 1;
    size_t n = model->n_modules + norms;
    model->module_names = calloc(n, sizeof *model->module_names);
    model->name_text = malloc(n * MODULE_PATH_SIZE);
    if (model->module_names == NULL || model->name_text == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the names of %zu modules", n);

    char *text = model->name_text;
    hr_module_name *to = model->module_names;
    for (uint32_t i = 0; i < c->num_hidden_layers; i++) {
        const hr_layer *layer = &model->layers[i];
        const hr_linear *linears[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        for (size_t l = 0; l < 4; l++)
            for (uint32_t part = 0; part < linears[l]->n_parts; part++) {
                uint32_t kind = linears[l]->module + part - hr_module_id(i, HR_MODULE_Q);
                const char *path = module_path(&text, names->layers, i, names->modules[kind]);
                *to++ = linear_module(path, linears[l], part);
            }
    }
    *to++ = (hr_module_name){.path = module_path(&text, NULL, 0, names->embed),
                             .in = c->vocab_size,
                             .out = c->hidden_size,
                             .is_embedding = true};
    *to = linear_module(module_path(&text, NULL, 0, names->head), &model->head, 0);
    (to++)->is_output_head = true;
    for (uint32_t i = 0; i < c->num_hidden_layers; i++) {
        (to++)->path = module_path(&text, names->layers, i, names->attention_norm);
        (to++)->path = module_path(&text, names->layers, i, names->mlp_norm);
        if (model->architecture->qk_norm) {
            (to++)->path = module_path(&text, names->layers, i, names->q_norm);
            (to++)->path = module_path(&text, names->layers, i, names->k_norm);
        }
    }
    (to++)->path = module_path(&text, NULL, 0, names->final_norm);
    model->n_module_names = (size_t)(to - model->module_names);
    HR_ASSERT(model->n_module_names == n);
    return HR_OK;
}

static hr_status take_pages(size_t bytes, const char *what, char **out, hr_error *err) {
    const char *source;
    uint64_t available = hr_machine_memory_available(&source);
    if (bytes > available)
        return hr_fail(err, HR_ERR_NO_MEMORY,
                       "%s needs %.2f GiB of memory, %.2f GiB are available (%s)", what,
                       (double)bytes / (1 << 30), (double)available / (1 << 30), source);
    *out = hr_pages_alloc(bytes);
    if (*out == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "the system refuses %.2f GiB for %s",
                       (double)bytes / (1 << 30), what);
    return HR_OK;
}

hr_status hr_weights_create(const hr_model *model, const char *what, hr_weights *out,
                            hr_error *err) {
    hr_weights weights = {.layers = calloc(model->config.num_hidden_layers, sizeof(hr_layer))};
    if (weights.layers == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %u layers",
                       model->config.num_hidden_layers);
    cursor at = {0};
    lay_out(&at, model, &weights);
    weights.arena_bytes = at.used;
    hr_status status = take_pages(at.used, what, &weights.arena, err);
    if (status != HR_OK) {
        free(weights.layers);
        return status;
    }
    at = (cursor){.base = weights.arena};
    memset(weights.layers, 0, model->config.num_hidden_layers * sizeof(hr_layer));
    lay_out(&at, model, &weights);
    *out = weights;
    return HR_OK;
}

void hr_weights_destroy(hr_weights *weights) {
    hr_pages_free(weights->arena, weights->arena_bytes);
    free(weights->layers);
    *weights = (hr_weights){0};
}

void hr_weights_exchange(hr_model *model, hr_weights *weights) {
    hr_weights live = {.layers = model->layers,
                       .embed = model->embed,
                       .final_norm = model->final_norm,
                       .head = model->head,
                       .arena = model->arena,
                       .arena_bytes = model->arena_bytes};
    model->layers = weights->layers;
    model->embed = weights->embed;
    model->final_norm = weights->final_norm;
    model->head = weights->head;
    model->arena = weights->arena;
    model->arena_bytes = weights->arena_bytes;
    *weights = live;
}

static hr_status make_tables(hr_model *model, hr_error *err) {
    cursor at = {0};
    lay_out_tables(&at, model);
    model->tables_bytes = at.used;
    HR_TRY(take_pages(at.used, "the model's position tables", &model->tables, err));
    at = (cursor){.base = model->tables};
    lay_out_tables(&at, model);
    return HR_OK;
}

hr_status hr_layout_build(hr_model *model, hr_error *err) {
    const hr_hf_config *c = &model->config;
    HR_TRY(check_sizes(c, err));
    model->embed_module = c->num_hidden_layers * HR_LAYER_MODULES;
    model->head_module = model->embed_module + 1;
    model->n_modules = model->head_module + 1;
    model->attention_scale = (float)(1 / sqrt((double)c->head_dim));
    model->info.kv_page_bytes = (uint64_t)c->num_hidden_layers * c->num_key_value_heads *
                                hr_kv_slot_bytes(model->info.compute, c->head_dim);

    hr_weights live;
    HR_TRY(hr_weights_create(model, "the model", &live, err));
    hr_weights_exchange(model, &live);
    model->info.weight_bytes = model->arena_bytes;
    HR_TRY(make_tables(model, err));
    HR_TRY(name_modules(model, err));
    HR_TRY(hr_places_build(model, &model->places, err));
    model->shadow_fresh = calloc(model->places.n, sizeof *model->shadow_fresh);
    return model->shadow_fresh != NULL ? HR_OK
                                       : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a model");
}
