/* config.json (and the end-of-sequence ids of generation_config.json) of a Hugging Face model
 * directory.
 *
 * Reads what both transformers 4 and 5 write. What the engine cannot compute is refused here by
 * name; keys that do not change the forward pass are ignored. */
#ifndef HR_FORMAT_HF_CONFIG_H
#define HR_FORMAT_HF_CONFIG_H

#include "base/error.h"

#include <headrace/tensor.h>

typedef enum hr_rope_type {
    HR_ROPE_DEFAULT,
    HR_ROPE_LINEAR,
    HR_ROPE_LLAMA3,
    HR_ROPE_YARN
} hr_rope_type;

/* Fields beyond theta are set for the types that use them, else 0/false. */
typedef struct hr_rope_config {
    hr_rope_type type;
    double theta;
    double factor;                             /* linear, llama3, yarn */
    uint32_t original_max_position_embeddings; /* llama3, yarn (default max_position_embeddings) */
    double low_freq_factor, high_freq_factor;  /* llama3 */
    double beta_fast, beta_slow;               /* yarn, defaults 32 and 1 */
    bool has_attention_factor;                 /* yarn: else it follows from factor and mscale */
    double attention_factor;
    double mscale, mscale_all_dim; /* yarn; 0 when absent */
    bool truncate;                 /* yarn, default true */
} hr_rope_config;

#define HR_HF_MAX_EOS 16

typedef struct hr_hf_config {
    char architecture[64]; /* architectures[0] */
    char model_type[64];   /* "" when absent */
    uint32_t vocab_size, hidden_size, intermediate_size, num_hidden_layers;
    uint32_t num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings;
    double rms_norm_eps;
    hr_rope_config rope;
    bool tie_word_embeddings;
    /* Absent keys take the default of transformers: false. Whether an architecture has biases that
     * no key tells of (Qwen2's q, k, v) is the architecture's business. */
    bool attention_bias, mlp_bias;
    bool has_dtype; /* dtype says what the checkpoint was saved in */
    hr_dtype dtype;
    bool has_bos;
    uint32_t bos_token_id;
    uint32_t n_eos;
    uint32_t eos_token_id[HR_HF_MAX_EOS]; /* of config.json and generation_config.json, each once */
} hr_hf_config;

/* Reads dir/config.json and, when there, dir/generation_config.json. ERR_NOT_FOUND, ERR_IO,
 * ERR_INVALID, ERR_MODEL (what the engine cannot compute, by name). */
hr_status hr_hf_config_load(const char *dir, hr_hf_config *out, hr_error *err);

/* The same from text; generation (may be NULL) is the generation_config.json. */
hr_status hr_hf_config_parse(const char *config, size_t config_len, const char *generation,
                             size_t generation_len, hr_hf_config *out, hr_error *err);

#endif
