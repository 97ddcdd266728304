/* The list of places, its index by name, and the way of rows into a place and back. */
#include "model/places.h"

#include "model/layout.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/finite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGEST_CHUNK = 64 << 10, PACK_CHUNK = 128 << 10 }; /* stay in cache */

/* Names under which the parts of one linear come together, by the number of parts. */
static const char *const fused_modules[HR_MAX_PARTS + 1] = {NULL, NULL, "gate_up_proj", "qkv_proj"};

/* ---- the list ---- */

static hr_place *add_place(hr_places *list, const hr_model *model, const hr_module_name *module,
                           const char *suffix, hr_place_kind kind, uint32_t n, uint32_t k,
                           const void *to) {
    size_t element = hr_compute_bytes(model->info.compute);
    hr_place *place = &list->items[list->n++];
    *place =
        (hr_place){.kind = kind,
                   .n = n,
                   .k = k,
                   .at = (size_t)((const char *)to - model->arena),
                   .bytes = kind == HR_PLACE_PACKED  ? hr_packed_bytes(model->info.compute, n, k)
                            : kind == HR_PLACE_DENSE ? (size_t)n * k * element
                                                     : n * sizeof(float)};
    snprintf(place->name, sizeof place->name, "%s%s", module->path, suffix);
    snprintf(place->in_memory, sizeof place->in_memory, "%s", place->name);
    return place;
}

static void name_in_memory(hr_place *place, const char *path, uint32_t n_parts,
                           const char *suffix) {
    const char *last = strrchr(path, '.');
    size_t before = last == NULL ? 0 : (size_t)(last + 1 - path);
    if (fused_modules[n_parts] != NULL)
        snprintf(place->in_memory, sizeof place->in_memory, "%.*s%s%s", (int)before, path,
                 fused_modules[n_parts], suffix);
}

static void add_linear_places(hr_places *list, const hr_model *model, const hr_linear *linear) {
    for (uint32_t part = 0; part < linear->n_parts; part++) {
        const hr_module_name *module = &model->module_names[linear->module + part];
        size_t first = (size_t)linear->part_panel[part] * HR_PANEL;
        const char *w = linear->w + hr_packed_bytes(model->info.compute, first, linear->k);
        uint32_t outputs = linear->part_outputs[part];
        hr_place *place =
            add_place(list, model, module, ".weight", HR_PLACE_PACKED, outputs, linear->k, w);
        name_in_memory(place, module->path, linear->n_parts, ".weight");
        hr_module_kind kind = (linear->module + part) % HR_LAYER_MODULES;
        if (linear->bias == NULL || !model->architecture->has_bias(&model->config, kind))
            continue;
        place = add_place(list, model, module, ".bias", HR_PLACE_VECTOR, outputs, 0,
                          linear->bias + first);
        name_in_memory(place, module->path, linear->n_parts, ".bias");
    }
}

static void add_norm(hr_places *list, const hr_model *model, const hr_module_name *norm, uint32_t n,
                     const float *to) {
    add_place(list, model, norm, ".weight", HR_PLACE_VECTOR, n, 0, to);
}

static void list_places(hr_places *list, const hr_model *model) {
    const hr_hf_config *c = &model->config;
    const hr_module_name *embed = &model->module_names[model->embed_module];
    if (model->embed != NULL) {
        add_place(list, model, embed, ".weight", HR_PLACE_DENSE, c->vocab_size, c->hidden_size,
                  model->embed);
        add_linear_places(list, model, &model->head);
    } else {
        add_place(list, model, embed, ".weight", HR_PLACE_PACKED, c->vocab_size, c->hidden_size,
                  model->head.w);
        snprintf(list->tied_head, sizeof list->tied_head, "%s.weight",
                 model->module_names[model->head_module].path);
    }
    const hr_module_name *norm = &model->module_names[model->n_modules];
    for (uint32_t i = 0; i < c->num_hidden_layers; i++) {
        const hr_layer *layer = &model->layers[i];
        add_linear_places(list, model, &layer->qkv);
        add_linear_places(list, model, &layer->o);
        add_linear_places(list, model, &layer->gate_up);
        add_linear_places(list, model, &layer->down);
        add_norm(list, model, norm++, c->hidden_size, layer->attention_norm);
        add_norm(list, model, norm++, c->hidden_size, layer->mlp_norm);
        if (layer->q_norm != NULL) {
            add_norm(list, model, norm++, c->head_dim, layer->q_norm);
            add_norm(list, model, norm++, c->head_dim, layer->k_norm);
        }
    }
    add_norm(list, model, norm++, c->hidden_size, model->final_norm);
    HR_ASSERT((size_t)(norm - model->module_names) == model->n_module_names);
}

/* ---- the index ---- */

static int compare_names(const void *a, const void *b) {
    const hr_weight_name *x = a, *y = b;
    return strcmp(x->text, y->text);
}

/* The fused name of a place when it is the first of a whole set of parts. */
static bool begins_fused(const hr_places *list, uint32_t first, hr_weight_name *out) {
    const hr_place *place = &list->items[first];
    uint32_t wanted = 0;
    *out = (hr_weight_name){.text = place->in_memory};
    if (strcmp(place->in_memory, place->name) == 0)
        return false;
    for (uint32_t parts = 2; parts <= HR_MAX_PARTS; parts++)
        if (strstr(place->in_memory, fused_modules[parts]) != NULL)
            wanted = parts;
    /* Parts stand near each other: at most weight and bias of each. */
    for (size_t i = first; i < list->n && i < first + 2 * HR_MAX_PARTS; i++)
        if (strcmp(list->items[i].in_memory, place->in_memory) == 0)
            out->places[out->n_places++] = (uint32_t)i;
    return out->n_places == wanted;
}

static void index_names(hr_places *list) {
    for (uint32_t i = 0; i < list->n; i++) {
        hr_weight_name *next = &list->names[list->n_names];
        *next = (hr_weight_name){.text = list->items[i].name, .places = {i}, .n_places = 1};
        list->n_names++;
        if (begins_fused(list, i, next + 1))
            list->n_names++;
    }
    if (list->tied_head[0] != '\0') /* the embedding is the first place */
        list->names[list->n_names++] =
            (hr_weight_name){.text = list->tied_head, .n_places = 1, .tied_head = true};
    qsort(list->names, list->n_names, sizeof *list->names, compare_names);
}

hr_status hr_places_build(const hr_model *model, hr_places *out, hr_error *err) {
    size_t most = 2 * model->n_module_names;
    *out = (hr_places){.items = calloc(most, sizeof(hr_place)),
                       .names = calloc(2 * most + 1, sizeof(hr_weight_name))};
    if (out->items == NULL || out->names == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", most);
    list_places(out, model);
    HR_ASSERT(out->n <= most);
    index_names(out);
    return HR_OK;
}

void hr_places_free(hr_places *places) {
    free(places->items);
    free(places->names);
    *places = (hr_places){0};
}

const hr_weight_name *hr_places_find(const hr_places *places, const char *name) {
    hr_weight_name wanted = {.text = name};
    return bsearch(&wanted, places->names, places->n_names, sizeof *places->names, compare_names);
}

bool hr_places_ignored(const char *name) {
    static const char end[] = ".rotary_emb.inv_freq";
    size_t n = strlen(name);
    return n >= sizeof end - 1 && strcmp(name + n - (sizeof end - 1), end) == 0;
}

uint32_t hr_weight_shape(const hr_places *places, const hr_weight_name *name, uint64_t shape[2]) {
    const hr_place *first = &places->items[name->places[0]];
    shape[0] = 0;
    shape[1] = first->k;
    for (uint32_t i = 0; i < name->n_places; i++)
        shape[0] += places->items[name->places[i]].n;
    return first->kind == HR_PLACE_VECTOR ? 1 : 2;
}

/* ---- rows ---- */

hr_dtype hr_compute_dtype(hr_compute compute) {
    return compute == HR_COMPUTE_BF16 ? HR_DTYPE_BF16 : HR_DTYPE_F32;
}

hr_dtype hr_place_dtype(const hr_place *place, hr_compute compute) {
    return place->kind == HR_PLACE_VECTOR ? HR_DTYPE_F32 : hr_compute_dtype(compute);
}

size_t hr_place_scratch_bytes(const hr_places *places) {
    size_t longest = 1;
    for (size_t i = 0; i < places->n; i++)
        longest = places->items[i].k > longest ? places->items[i].k : longest;
    return hr_round_up(HR_PANEL * longest * sizeof(float), 64);
}

static void convert(void *to, hr_dtype to_dtype, const void *from, hr_dtype from_dtype, size_t n) {
    hr_status status = hr_convert(to, to_dtype, from, from_dtype, n, NULL);
    HR_ASSERT(status == HR_OK); /* dtypes were checked */
}

static void pack_rows(hr_compute compute, const void *rows, size_t n, size_t k, char *to) {
    if (compute == HR_COMPUTE_BF16)
        hr_pack_weight_bf16(rows, n, k, 0, n, to);
    else
        hr_pack_weight_f32(rows, n, k, 0, n, to);
}

void hr_place_pack(const hr_place *place, hr_compute compute, const hr_tensor *tensor,
                   size_t first_row, size_t begin, size_t end, void *scratch, char *to) {
    hr_dtype dtype = hr_place_dtype(place, compute);
    size_t k = hr_place_row_elements(place), from_element = hr_dtype_size(tensor->dtype);
    const char *from = (const char *)tensor->data + (first_row + begin) * k * from_element;
    if (place->kind != HR_PLACE_PACKED) {
        convert(to + begin * k * hr_dtype_size(dtype), dtype, from, tensor->dtype,
                (end - begin) * k);
        return;
    }
    to += hr_packed_bytes(compute, begin, k);
    if (tensor->dtype == dtype) {
        pack_rows(compute, from, end - begin, k, to);
        return;
    }
    for (size_t row = begin; row < end; row += HR_PANEL) {
        size_t n = end - row < HR_PANEL ? end - row : HR_PANEL;
        convert(scratch, dtype, from, tensor->dtype, n * k);
        pack_rows(compute, scratch, n, k, to);
        from += n * k * from_element;
        to += hr_packed_bytes(compute, n, k);
    }
}

bool hr_place_pack_finite(const hr_place *place, hr_compute compute, const hr_tensor *tensor,
                          size_t first_row, size_t begin, size_t end, void *scratch, char *to) {
    hr_dtype dtype = hr_place_dtype(place, compute);
    size_t k = hr_place_row_elements(place), row_bytes = k * hr_dtype_size(tensor->dtype);
    size_t chunk = hr_round_up(PACK_CHUNK / row_bytes + 1, HR_PANEL);
    for (size_t row = begin; row < end; row += chunk) {
        size_t n = end - row < chunk ? end - row : chunk;
        const char *from = (const char *)tensor->data + (first_row + row) * row_bytes;
        if (!hr_all_finite(from, tensor->dtype, dtype, n * k))
            return false;
        hr_place_pack(place, compute, tensor, first_row, row, row + n, scratch, to);
    }
    return true;
}

void hr_place_unpack(const hr_place *place, hr_compute compute, const char *from, size_t begin,
                     size_t end, void *out) {
    size_t k = hr_place_row_elements(place);
    size_t row_bytes = k * hr_dtype_size(hr_place_dtype(place, compute));
    if (place->kind == HR_PLACE_PACKED)
        hr_unpack_weight(compute, from, k, begin, end, out);
    else
        memcpy(out, from + begin * row_bytes, (end - begin) * row_bytes);
}

hr_status hr_place_digest(const hr_place *place, hr_compute compute, const char *from,
                          uint8_t out[16], hr_error *err) {
    size_t row_bytes = hr_place_row_elements(place) * hr_dtype_size(hr_place_dtype(place, compute));
    size_t chunk = hr_round_up(DIGEST_CHUNK / row_bytes + 1, HR_PANEL);
    hr_xxh3_stream *stream = hr_xxh3_stream_create();
    char *rows = malloc(chunk * row_bytes);
    hr_status status = HR_OK;
    if (stream == NULL || rows == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory to digest %s", place->name);
    for (size_t begin = 0; status == HR_OK && begin < place->n; begin += chunk) {
        size_t end = place->n - begin < chunk ? place->n : begin + chunk;
        hr_place_unpack(place, compute, from, begin, end, rows);
        hr_xxh3_stream_update(stream, rows, (end - begin) * row_bytes);
    }
    if (status == HR_OK)
        hr_xxh3_stream_digest(stream, out);
    free(rows);
    hr_xxh3_stream_destroy(stream);
    return status;
}
