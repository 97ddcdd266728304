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

static void lay_out(cursor *at, hr_model *model) {
    const hr_hf_config *c = &model->config;
    model->embed = c->tie_word_embeddings ? NULL
                                          : take(at, (size_t)c->vocab_size * c->hidden_size *
                                                         hr_compute_bytes(model->info.compute));
    for (uint32_t i = 0; i < c->num_hidden_layers; i++)
        lay_out_layer(at, model, i, &model->layers[i]);
    model->final_norm = take_floats(at, c->hidden_size);
    model->head = linear_of(model->head_module, c->hidden_size);
    add_part(&model->head, c->vocab_size);
    take_linear(at, model, &model->head, false);
    model->info.weight_bytes = at->used;

    size_t angles = (size_t)model->info.context_length * (c->head_dim / 2);
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

hr_status hr_layout_build(hr_model *model, hr_error *err) {
    const hr_hf_config *c = &model->config;
    HR_TRY(check_sizes(c, err));
    model->embed_module = c->num_hidden_layers * HR_LAYER_MODULES;
    model->head_module = model->embed_module + 1;
    model->n_modules = model->head_module + 1;
    model->attention_scale = (float)(1 / sqrt((double)c->head_dim));
    model->info.kv_page_bytes = (uint64_t)c->num_hidden_layers * c->num_key_value_heads *
                                hr_kv_slot_bytes(model->info.compute, c->head_dim);
    model->layers = calloc(c->num_hidden_layers, sizeof *model->layers);
    if (model->layers == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %u layers", c->num_hidden_layers);

    cursor at = {0};
    lay_out(&at, model);
    const char *source;
    uint64_t available = hr_machine_memory_available(&source);
    if (at.used > available)
        return hr_fail(err, HR_ERR_NO_MEMORY,
                       "the model needs %.2f GiB of memory, %.2f GiB are available (%s)",
                       (double)at.used / (1 << 30), (double)available / (1 << 30), source);
    model->arena_bytes = at.used;
    model->arena = hr_pages_alloc(at.used);
    if (model->arena == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "the system refuses %.2f GiB for the model",
                       (double)at.used / (1 << 30));
    at = (cursor){.base = model->arena};
    lay_out(&at, model);
    return name_modules(model, err);
}

typedef struct place_list {
    hr_place *items;
    size_t n;
} place_list;

static hr_place *add_place(place_list *list, const hr_module_name *module, const char *suffix,
                           hr_place_kind kind, uint32_t n, uint32_t k, void *to) {
    hr_place *place = &list->items[list->n++];
    *place = (hr_place){.kind = kind, .n = n, .k = k, .to = to};
    snprintf(place->name, sizeof place->name, "%s%s", module->path, suffix);
    return place;
}

static void add_linear_places(place_list *list, const hr_model *model, const hr_linear *linear) {
    for (uint32_t part = 0; part < linear->n_parts; part++) {
        const hr_module_name *module = &model->module_names[linear->module + part];
        size_t first = (size_t)linear->part_panel[part] * HR_PANEL;
        char *w = linear->w + hr_packed_bytes(model->info.compute, first, linear->k);
        add_place(list, module, ".weight", HR_PLACE_PACKED, linear->part_outputs[part], linear->k,
                  w);
        hr_module_kind kind = (linear->module + part) % HR_LAYER_MODULES;
        if (linear->bias != NULL && model->architecture->has_bias(&model->config, kind))
            add_place(list, module, ".bias", HR_PLACE_VECTOR, linear->part_outputs[part], 0,
                      linear->bias + first);
    }
}

hr_status hr_layout_places(const hr_model *model, hr_place **out, size_t *n_out, hr_error *err) {
    const hr_hf_config *c = &model->config;
    size_t most = 2 * model->n_module_names;
    place_list list = {calloc(most, sizeof(hr_place)), 0};
    if (list.items == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", most);

    const hr_module_name *embed = &model->module_names[model->embed_module];
    if (model->embed != NULL) {
        add_place(&list, embed, ".weight", HR_PLACE_DENSE, c->vocab_size, c->hidden_size,
                  model->embed);
        add_linear_places(&list, model, &model->head);
    } else {
        add_place(&list, embed, ".weight", HR_PLACE_PACKED, c->vocab_size, c->hidden_size,
                  model->head.w);
    }
    const hr_module_name *norm = &model->module_names[model->n_modules];
    for (uint32_t i = 0; i < c->num_hidden_layers; i++) {
        const hr_layer *layer = &model->layers[i];
        add_linear_places(&list, model, &layer->qkv);
        add_linear_places(&list, model, &layer->o);
        add_linear_places(&list, model, &layer->gate_up);
        add_linear_places(&list, model, &layer->down);
        add_place(&list, norm++, ".weight", HR_PLACE_VECTOR, c->hidden_size, 0,
                  layer->attention_norm);
        add_place(&list, norm++, ".weight", HR_PLACE_VECTOR, c->hidden_size, 0, layer->mlp_norm);
        if (layer->q_norm != NULL) {
            add_place(&list, norm++, ".weight", HR_PLACE_VECTOR, c->head_dim, 0, layer->q_norm);
            add_place(&list, norm++, ".weight", HR_PLACE_VECTOR, c->head_dim, 0, layer->k_norm);
        }
    }
    add_place(&list, norm++, ".weight", HR_PLACE_VECTOR, c->hidden_size, 0, model->final_norm);
    HR_ASSERT(list.n <= most && (size_t)(norm - model->module_names) == model->n_module_names);
    *out = list.items;
    *n_out = list.n;
    return HR_OK;
}
