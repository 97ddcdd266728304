/* Writes the tiny model of the golden bits. Changing anything here changes
 * tests/golden/tiny_llama.bits. */
#include "tiny_model.h"

#include "format/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    HIDDEN = 40,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 16,
    INTERMEDIATE = 56,
    LAYERS = 2,
    RANK = 5,
    MAX_TENSORS = 64
};

static const char model_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": 101,"
    " \"hidden_size\": 40, \"intermediate_size\": 56, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 16,"
    " \"max_position_embeddings\": 1024, \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0,"
    " \"tie_word_embeddings\": false, \"attention_bias\": true, \"hidden_act\": \"silu\"}";

static const char adapter_config[] =
    "{\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"r\": 5, \"lora_alpha\": 15,"
    " \"target_modules\": [\"q_proj\", \"v_proj\", \"o_proj\", \"up_proj\", \"down_proj\","
    " \"embed_tokens\", \"lm_head\"]}";

typedef struct tensor_list {
    hr_tensor items[MAX_TENSORS];
    size_t n;
} tensor_list;

/* splitmix64's finish over a counter. */
static uint64_t hash(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Uniform in [-1, 1), a multiple of 2^-23: exact in float. */
static float value(size_t tensor, size_t i) {
    int64_t bits = (int64_t)(hash(((uint64_t)tensor << 32) + i) >> 40);
    return (float)(bits - (1 << 23)) / (1 << 23);
}

/* Values are center + spread * [-1, 1); both are powers of two or zero. k 0: a vector. */
static void add(tensor_list *list, const char *name, size_t n, size_t k, float center,
                float spread) {
    HR_ASSERT(list->n < MAX_TENSORS);
    size_t elements = n * (k > 0 ? k : 1);
    float *data = malloc(elements * sizeof *data);
    HR_ASSERT(data != NULL);
    for (size_t i = 0; i < elements; i++)
        data[i] = center + spread * value(list->n, i);
    list->items[list->n++] = (hr_tensor){.name = strdup(name),
                                         .dtype = HR_DTYPE_F32,
                                         .ndim = k > 0 ? 2 : 1,
                                         .shape = {n, k},
                                         .data = data,
                                         .bytes = elements * sizeof *data};
}

static void add_in_layer(tensor_list *list, unsigned layer, const char *module, size_t n, size_t k,
                         float center, float spread) {
    char name[160];
    snprintf(name, sizeof name, "model.layers.%u.%s", layer, module);
    add(list, name, n, k, center, spread);
}

static void add_pair(tensor_list *list, const char *module, size_t out, size_t in) {
    char name[160];
    snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
    add(list, name, RANK, in, 0, 0.25f);
    snprintf(name, sizeof name, "base_model.model.%s.lora_B.weight", module);
    add(list, name, out, RANK, 0, 0.125f);
}

static void add_model(tensor_list *list) {
    add(list, "model.embed_tokens.weight", TINY_VOCAB, HIDDEN, 0, 1);
    for (unsigned i = 0; i < LAYERS; i++) {
        add_in_layer(list, i, "input_layernorm.weight", HIDDEN, 0, 1, 0.25f);
        add_in_layer(list, i, "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, 0, 0.25f);
        add_in_layer(list, i, "self_attn.q_proj.bias", HEADS * HEAD_DIM, 0, 0, 0.25f);
        add_in_layer(list, i, "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, 0, 0.25f);
        add_in_layer(list, i, "self_attn.k_proj.bias", KV_HEADS * HEAD_DIM, 0, 0, 0.25f);
        add_in_layer(list, i, "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, 0, 0.25f);
        add_in_layer(list, i, "self_attn.v_proj.bias", KV_HEADS * HEAD_DIM, 0, 0, 0.25f);
        add_in_layer(list, i, "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, 0, 0.25f);
        add_in_layer(list, i, "self_attn.o_proj.bias", HIDDEN, 0, 0, 0.25f);
        add_in_layer(list, i, "post_attention_layernorm.weight", HIDDEN, 0, 1, 0.25f);
        add_in_layer(list, i, "mlp.gate_proj.weight", INTERMEDIATE, HIDDEN, 0, 0.25f);
        add_in_layer(list, i, "mlp.up_proj.weight", INTERMEDIATE, HIDDEN, 0, 0.25f);
        add_in_layer(list, i, "mlp.down_proj.weight", HIDDEN, INTERMEDIATE, 0, 0.25f);
    }
    add(list, "model.norm.weight", HIDDEN, 0, 1, 0.25f);
    add(list, "lm_head.weight", TINY_VOCAB, HIDDEN, 0, 0.25f);
}

static void add_adapter(tensor_list *list) {
    static const struct {
        const char *name;
        size_t out, in;
    } modules[] = {{"self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN},
                   {"self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN},
                   {"self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM},
                   {"mlp.up_proj", INTERMEDIATE, HIDDEN},
                   {"mlp.down_proj", HIDDEN, INTERMEDIATE}};
    for (unsigned i = 0; i < LAYERS; i++)
        for (size_t m = 0; m < sizeof modules / sizeof modules[0]; m++) {
            char path[160];
            snprintf(path, sizeof path, "model.layers.%u.%s", i, modules[m].name);
            add_pair(list, path, modules[m].out, modules[m].in);
        }
    add(list, "base_model.model.model.embed_tokens.lora_embedding_A", RANK, TINY_VOCAB, 0, 0.5f);
    add(list, "base_model.model.model.embed_tokens.lora_embedding_B", HIDDEN, RANK, 0, 0.125f);
    add_pair(list, "lm_head", TINY_VOCAB, HIDDEN);
}

static void write_text(const char *dir, const char *name, const char *text) {
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    HR_ASSERT(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void write_part(const char *dir, const char *part, const char *config_name,
                       const char *config, const char *weights_name, void (*fill)(tensor_list *)) {
    char path[1200], weights[1300];
    snprintf(path, sizeof path, "%s/%s", dir, part);
    HR_ASSERT(mkdir(path, 0700) == 0);
    write_text(path, config_name, config);
    tensor_list list = {.n = 0};
    fill(&list);
    snprintf(weights, sizeof weights, "%s/%s", path, weights_name);
    hr_status status = hr_safetensors_save(weights, list.items, list.n, NULL);
    HR_ASSERT(status == HR_OK);
    for (size_t i = 0; i < list.n; i++) {
        union {
            const void *given;
            void *owned;
        } name = {list.items[i].name}, data = {list.items[i].data};
        free(name.owned);
        free(data.owned);
    }
}

void tiny_model_write(const char *dir) {
    write_part(dir, "model", "config.json", model_config, "model.safetensors", add_model);
    write_part(dir, "adapter", "adapter_config.json", adapter_config, "adapter_model.safetensors",
               add_adapter);
}

void tiny_model_remove(const char *dir) {
    static const char *const files[] = {"model/config.json",
                                        "model/model.safetensors",
                                        "model",
                                        "adapter/adapter_config.json",
                                        "adapter/adapter_model.safetensors",
                                        "adapter",
                                        "."};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        remove(i + 1 < sizeof files / sizeof files[0] ? path : dir);
    }
}
