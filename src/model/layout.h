/* How a model lies in memory: one arena that holds every packed matrix, vector and table, and the
 * structs that point into it.
 *
 * A linear is one packed matrix of one or more modules that read the same input (q, k, v; gate,
 * up). Each module is a part that starts on a panel border, so a part is a range of panels and of
 * output columns, and an adapter's B lines up with it. With tied embeddings the head's packed
 * matrix is the only copy. */
#ifndef HR_MODEL_LAYOUT_H
#define HR_MODEL_LAYOUT_H

#include "format/peft.h"
#include "model/architecture.h"
#include "model/model.h"

enum { HR_MAX_PARTS = 3 };

typedef struct hr_linear {
    char *w;              /* packed [16 * n_panels][k] */
    float *bias;          /* [16 * n_panels], zero where there is none; NULL when no part has one */
    uint32_t k, k_padded; /* inputs; rounded up to HR_LEAF */
    uint32_t n_parts, n_panels;
    uint32_t part_outputs[HR_MAX_PARTS];
    uint32_t part_panel[HR_MAX_PARTS + 1]; /* part i is panels [part_panel[i], part_panel[i + 1]) */
    uint32_t module;                       /* id of part 0's module; part i is module + i */
} hr_linear;

typedef struct hr_layer {
    float *attention_norm, *mlp_norm;
    float *q_norm, *k_norm; /* NULL without q/k norm */
    hr_linear qkv, o, gate_up, down;
} hr_layer;

/* Module ids: layer * HR_LAYER_MODULES + kind for those of layers, then the embedding, then the
 * head. */
static inline uint32_t hr_module_id(uint32_t layer, hr_module_kind kind) {
    return layer * HR_LAYER_MODULES + kind;
}

struct hr_model {
    hr_model_info info;
    hr_hf_config config;
    const hr_architecture *architecture;
    uint32_t n_modules, embed_module, head_module;

    hr_layer *layers;
    char *embed; /* dense [vocab][hidden] compute elements; NULL when tied to head */
    float *final_norm;
    hr_linear head;
    float *rope_cos, *rope_sin; /* [context_length][head_dim / 2] */
    float attention_scale;

    char *arena;
    size_t arena_bytes;

    /* What format/peft.h is told about the model: first the modules by id, then the norms. */
    hr_module_name *module_names;
    size_t n_module_names;
    char *name_text; /* the strings of module_names */
};

/* Fills everything of the model but the arena's contents: needs config, architecture, info.compute
 * and info.context_length. ERR_MODEL for sizes that cannot be addressed, ERR_NO_MEMORY. On failure
 * hr_model_destroy frees what was made. */
hr_status hr_layout_build(hr_model *model, hr_error *err);

/* Where one tensor of the checkpoint goes. */
typedef enum hr_place_kind { HR_PLACE_PACKED, HR_PLACE_DENSE, HR_PLACE_VECTOR } hr_place_kind;
typedef struct hr_place {
    char name[160];
    hr_place_kind kind;
    uint32_t n, k; /* shape [n, k]; a vector: [n] */
    char *to;
} hr_place;

/* The tensors that the checkpoint must hold, each once; the caller frees *out. */
hr_status hr_layout_places(const hr_model *model, hr_place **out, size_t *n_out, hr_error *err);

#endif
