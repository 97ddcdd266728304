/* The table of model classes. */
#include "model/architecture.h"

#include "base/buf.h"

#include <string.h>

static const hr_architecture_names common_names = {
    .embed = "model.embed_tokens",
    .layers = "model.layers",
    .final_norm = "model.norm",
    .head = "lm_head",
    .modules = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    .attention_norm = "input_layernorm",
    .mlp_norm = "post_attention_layernorm",
    .q_norm = "self_attn.q_norm",
    .k_norm = "self_attn.k_norm",
};

static bool is_mlp(hr_module_kind kind) {
    return kind >= HR_MODULE_GATE;
}

static bool llama_has_bias(const hr_hf_config *config, hr_module_kind kind) {
    return is_mlp(kind) ? config->mlp_bias : config->attention_bias;
}

/* No key of its config tells of these biases: they are always there. */
static bool qwen2_has_bias(const hr_hf_config *config, hr_module_kind kind) {
    (void)config;
    return kind <= HR_MODULE_V;
}

static bool qwen3_has_bias(const hr_hf_config *config, hr_module_kind kind) {
    return !is_mlp(kind) && config->attention_bias;
}

static const hr_architecture architectures[] = {
    {"LlamaForCausalLM", &common_names, .qk_norm = false, .has_bias = llama_has_bias},
    {"Qwen2ForCausalLM", &common_names, .qk_norm = false, .has_bias = qwen2_has_bias},
    {"Qwen3ForCausalLM", &common_names, .qk_norm = true, .has_bias = qwen3_has_bias},
};
enum { N_ARCHITECTURES = sizeof architectures / sizeof architectures[0] };

hr_status hr_architecture_find(const char *name, const hr_architecture **out, hr_error *err) {
    for (size_t i = 0; i < N_ARCHITECTURES; i++) {
        if (strcmp(architectures[i].name, name) == 0) {
            *out = &architectures[i];
            return HR_OK;
        }
    }
    hr_buf known = {0};
    for (size_t i = 0; i < N_ARCHITECTURES; i++)
        hr_buf_printf(&known, "%s%s", i == 0 ? "" : ", ", architectures[i].name);
    hr_fail(err, HR_ERR_MODEL, "architecture %s is not supported; supported are %s", name,
            known.data != NULL ? known.data : "?");
    hr_buf_free(&known);
    return HR_ERR_MODEL;
}
