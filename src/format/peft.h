/* PEFT LoRA adapters: reading a config and tensors, and resolving them against the modules of a
 * model.
 *
 * Resolving decides, from the config alone, which modules the adapter covers and with which rank
 * and scale, as PEFT does, and then demands that the tensors are exactly those. Nothing is skipped
 * silently: what is not computed here is refused by name. The tensors may come from a directory or
 * from the wire. */
#ifndef HR_FORMAT_PEFT_H
#define HR_FORMAT_PEFT_H

#include "base/buf.h"
#include "base/error.h"
#include "format/safetensors.h"

#include <headrace/tensor.h>

#define HR_PEFT_MAX_RANK 4096

/* One module of the model as Hugging Face names it, e.g. "model.layers.0.self_attn.q_proj",
 * "lm_head", "model.embed_tokens" (without ".weight"). The list has the separate projections
 * (q_proj, k_proj, v_proj, gate_proj, up_proj) also when an adapter names them fused (qkv_proj,
 * gate_up_proj). List every module that has a weight (norms too, as neither linear nor embedding),
 * or patterns that would hit them in PEFT are not seen here. */
typedef struct hr_module_name {
    const char *path;
    uint64_t in, out; /* linear: weight is [out, in]; embedding: in = vocabulary, out = hidden */
    bool is_linear;   /* a torch.nn.Linear; true for the output head too */
    bool is_embedding;
    bool is_output_head;
} hr_module_name;

/* The low-rank pair of one module: delta(x) = scale * (x A^T) B^T. Views into the tensors that were
 * resolved; dtype F32, F16 or BF16, not always the same for a and b. */
typedef struct hr_peft_module {
    size_t module; /* index into the caller's list */
    hr_tensor a;   /* [rank, in] */
    hr_tensor b;   /* [out, rank]; for a fused adapter the rows of this module */
    uint32_t rank;
    float scale; /* alpha / rank or alpha / sqrt(rank), computed in double as PEFT does */
} hr_peft_module;

typedef struct hr_peft {
    hr_peft_module *modules; /* in the order of the caller's list, each module once */
    size_t n_modules;
    uint32_t max_rank;
    char **warnings; /* what is odd but harmless: a pattern that matches nothing, unused files */
    size_t n_warnings;
    uint8_t config_digest[16]; /* XXH3-128 of the config text */
    hr_safetensors *file;      /* owned when opened from a directory, else NULL */
} hr_peft;

/* Asks the holder of the base weights whether the full weight of module (index into the list)
 * equals the one an adapter carries beside its pairs, bit for bit. NULL function: such a weight is
 * refused. */
typedef struct hr_peft_base {
    bool (*equals)(void *ctx, size_t module, const hr_tensor *weight);
    void *ctx;
} hr_peft_base;

/* Resolves an adapter from its config text and its tensors (names as PEFT saves them). The tensors'
 * bytes stay the caller's and must outlive *out. base may be NULL. On success the caller ends *out
 * with hr_peft_close. Values of pairs are not looked at (hr_peft_check_values). ERR_ADAPTER_CONFIG
 * (config), ERR_ADAPTER_INCOMPATIBLE (tensors against config or model), ERR_SHAPE, ERR_DTYPE,
 * ERR_NO_MEMORY. Thread-safe. */
hr_status hr_peft_resolve(const char *config, size_t config_len, const hr_tensor *tensors,
                          size_t n_tensors, const hr_module_name *modules, size_t n_modules,
                          const hr_peft_base *base, hr_peft *out, hr_error *err);

/* ERR_VALUE names the tensor of the pair that is not finite as the type that is computed with (F32
 * or BF16). Apart from the rest, so that whoever reads the values next reads them in a cache.
 * Thread-safe. */
hr_status hr_peft_check_values(const hr_peft_module *pair, hr_dtype as, hr_error *err);

/* What a config says by itself: the largest rank it gives to a module, fused names included. The
 * refusals of hr_peft_resolve that need no tensors; ERR_ADAPTER_CONFIG, ERR_NO_MEMORY. Thread-safe.
 */
hr_status hr_peft_check_config(const char *config, size_t config_len, const hr_module_name *modules,
                               size_t n_modules, uint32_t *max_rank, hr_error *err);

/* Resolves a directory with adapter_config.json and adapter_model.safetensors, which stays
 * mapped until hr_peft_close; messages begin with the path. Ids of an added_tokens.json at or above
 * the vocabulary (the embedding's in) are refused, below it they mean nothing. */
hr_status hr_peft_open(const char *dir, const hr_module_name *modules, size_t n_modules,
                       const hr_peft_base *base, hr_peft *out, hr_error *err);

void hr_peft_close(hr_peft *peft); /* back to zero; NULL is allowed */

/* What is done with each field of a LoraConfig: the closed list. */
typedef enum hr_peft_class {
    HR_PEFT_HANDLED,    /* read and computed */
    HR_PEFT_IRRELEVANT, /* does not change inference on a given base and given tensors */
    HR_PEFT_REFUSED     /* refused, by name, when set to anything but null or its default */
} hr_peft_class;

typedef struct hr_peft_field {
    const char *name;
    hr_peft_class field_class;
    const char *default_json; /* JSON of the default beside null; NULL when null is the only one */
    const char *reason;       /* why irrelevant or refused; what to do */
} hr_peft_field;

extern const hr_peft_field hr_peft_fields[];
extern const size_t hr_n_peft_fields;

#endif
