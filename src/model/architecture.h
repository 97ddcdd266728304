/* What is particular about one Hugging Face model class, as data.
 *
 * The forward pass computes one family: pre-norm decoder layers of attention and a gated MLP. A
 * class is an entry of the table in architecture.c that names its tensors and says which optional
 * parts it has; see docs/adding-an-architecture.md. */
#ifndef HR_MODEL_ARCHITECTURE_H
#define HR_MODEL_ARCHITECTURE_H

#include "base/error.h"
#include "format/hf_config.h"

/* The linear modules of a layer, in the order in which fused matrices hold them. */
typedef enum hr_module_kind {
    HR_MODULE_Q,
    HR_MODULE_K,
    HR_MODULE_V,
    HR_MODULE_O,
    HR_MODULE_GATE,
    HR_MODULE_UP,
    HR_MODULE_DOWN,
    HR_LAYER_MODULES
} hr_module_kind;

/* Names are module paths without ".weight"; those of a layer come after "<layers>.<index>.". */
typedef struct hr_architecture_names {
    const char *embed, *layers, *final_norm, *head;
    const char *modules[HR_LAYER_MODULES];
    const char *attention_norm, *mlp_norm, *q_norm, *k_norm;
} hr_architecture_names;

typedef struct hr_architecture {
    const char *name; /* class name in config.json */
    const hr_architecture_names *names;
    bool qk_norm; /* RMS norm over each q and k head before RoPE */
    bool (*has_bias)(const hr_hf_config *config, hr_module_kind kind);
} hr_architecture;

/* The entry of a class; ERR_MODEL, naming the classes that there are, for an unknown one. Static.
 * Thread-safe. */
hr_status hr_architecture_find(const char *name, const hr_architecture **out, hr_error *err);

#endif
