/* How a model lies in memory: one arena that holds every packed matrix and vector, and the structs
 * that point into it. A second set of both can be made and exchanged with the live one.
 *
 * A linear is one packed matrix of one or more modules that read the same input (q, k, v; gate,
 * up). Each module is a part that starts on a panel border, so a part is a range of panels and of
 * output columns, and an adapter's B lines up with it. With tied embeddings the head's packed
 * matrix is the only copy. */
#ifndef HR_MODEL_LAYOUT_H
#define HR_MODEL_LAYOUT_H

#include "base/page_pool.h"
#include "format/peft.h"
#include "model/architecture.h"
#include "model/guard.h"
#include "model/model.h"
#include "model/places.h"

#include <pthread.h>
#include <stdatomic.h>

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

/* Weights that are not live: what hr_model holds of live ones, at other addresses. */
typedef struct hr_weights {
    hr_layer *layers;
    char *embed;
    float *final_norm;
    hr_linear head;
    char *arena;
    size_t arena_bytes;
} hr_weights;

struct hr_model {
    hr_model_info info;
    hr_hf_config config;
    const hr_architecture *architecture;
    uint32_t n_modules, embed_module, head_module;
    unsigned packers;    /* threads that may pack an adapter: as many as run steps */
    hr_page_pool *pages; /* of adapters that are gone, for those to come */

    hr_layer *layers;
    char *embed; /* dense [vocab][hidden] compute elements; NULL when tied to head */
    float *final_norm;
    hr_linear head;
    float *rope_cos, *rope_sin; /* [context_length][head_dim / 2] */
    float attention_scale;

    char *arena; /* the weights */
    size_t arena_bytes;
    char *tables; /* those of RoPE, which no update touches */
    size_t tables_bytes;

    hr_places places;
    hr_guard *guard; /* between readers and writers of weights outside steps */

    /* Of base_update.c. */
    atomic_bool updating;
    hr_weights shadow;  /* zero until one was wanted */
    bool *shadow_fresh; /* by place: the shadow holds what is live */

    /* Of weight_values.c. */
    pthread_mutex_t snapshot_lock;
    char *snapshot; /* a copy of arena, or NULL */

    /* What format/peft.h is told about the model: first the modules by id, then the norms. */
    hr_module_name *module_names;
    size_t n_module_names;
    char *name_text; /* the strings of module_names */
};

/* Fills everything of the model but the contents of arena and tables: needs config, architecture,
 * info.compute and info.context_length. ERR_MODEL for sizes that cannot be addressed,
 * ERR_NO_MEMORY. On failure hr_model_destroy frees what was made. */
hr_status hr_layout_build(hr_model *model, hr_error *err);

/* A set of weights, zeroed; hr_weights_destroy frees it. what: for the message. ERR_NO_MEMORY. */
hr_status hr_weights_create(const hr_model *model, const char *what, hr_weights *out,
                            hr_error *err);
void hr_weights_destroy(hr_weights *weights); /* back to zero, which is allowed */
/* Makes *weights the live ones and hands out those that were; no step may run. */
void hr_weights_exchange(hr_model *model, hr_weights *weights);

#endif
