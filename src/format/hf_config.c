/* Reading config.json. Every number is bounded here, so that products of them fit 64 bits
 * everywhere else. */
#include "format/hf_config.h"

#include "format/file.h"
#include "format/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)
#define MAX_VOCAB (1u << 24)
#define MAX_WIDTH (1u << 20)
#define MAX_LAYERS 4096u
#define MAX_HEADS 4096u
#define MAX_HEAD_DIM 1024u
#define MAX_POSITIONS (1u << 28)

/* A required number; absent or outside [min, max] is refused. */
static hr_status get_u32(const cJSON *obj, const char *key, uint32_t min, uint32_t max,
                         uint32_t *out, hr_error *err) {
    uint64_t value = 0;
    HR_TRY(hr_json_get_u64(obj, key, min, max, &value, err));
    *out = (uint32_t)value;
    return HR_OK;
}

/* *out stays when the key is absent or null. */
static hr_status opt_u32(const cJSON *obj, const char *key, uint32_t min, uint32_t max,
                         uint32_t *out, hr_error *err) {
    uint64_t value = *out;
    HR_TRY(hr_json_opt_u64(obj, key, min, max, &value, err));
    *out = (uint32_t)value;
    return HR_OK;
}

static hr_status copy_name(const char *key, const char *value, char out[64], hr_error *err) {
    if (strlen(value) >= 64)
        return hr_fail(err, HR_ERR_INVALID, "%s: \"%.80s...\" is longer than 63 bytes", key, value);
    memcpy(out, value, strlen(value) + 1);
    return HR_OK;
}

static hr_status read_names(const cJSON *root, hr_hf_config *out, hr_error *err) {
    const cJSON *list = hr_json_get_present(root, "architectures");
    const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
    if (!cJSON_IsString(first))
        return hr_fail(err, HR_ERR_INVALID,
                       "architectures: wanted a list with the name of a model class, came %s",
                       list ? hr_json_kind(list) : "nothing");
    HR_TRY(copy_name("architectures", first->valuestring, out->architecture, err));
    const char *type = "";
    HR_TRY(hr_json_opt_string(root, "model_type", &type, err));
    return copy_name("model_type", type, out->model_type, err);
}

static hr_status refuse_quantised(const cJSON *root, hr_error *err) {
    static const char *const keys[] = {"quantization_config", "compression_config"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const cJSON *quant = hr_json_get_present(root, keys[i]);
        const cJSON *method = hr_json_get(quant, "quant_method");
        if (quant != NULL)
            return hr_fail(err, HR_ERR_MODEL,
                           "%s: checkpoint is quantised (%.64s), which is not supported; use the "
                           "bf16, f16 or f32 one",
                           keys[i],
                           cJSON_IsString(method) ? method->valuestring : "method not named");
    }
    return HR_OK;
}

static bool is_qwen(const hr_hf_config *config) {
    return strcmp(config->model_type, "qwen2") == 0 || strcmp(config->model_type, "qwen3") == 0;
}

/* Only full attention is computed. Qwen files name a window that use_sliding_window (default false)
 * switches; other files mean the window they name. */
static hr_status refuse_windows(const cJSON *root, const hr_hf_config *config, hr_error *err) {
    bool use = !is_qwen(config);
    const cJSON *window = hr_json_get_present(root, "sliding_window");
    HR_TRY(hr_json_opt_bool(root, "use_sliding_window", &use, err));
    if (use && (window != NULL || hr_json_get_present(root, "use_sliding_window") != NULL))
        return hr_fail(err, HR_ERR_MODEL, "%s: sliding-window attention is not supported",
                       window ? "sliding_window" : "use_sliding_window");
    const cJSON *types = hr_json_get_present(root, "layer_types");
    if (types == NULL)
        return HR_OK;
    if (!cJSON_IsArray(types))
        return hr_fail(err, HR_ERR_INVALID, "layer_types: wanted a list, came %s",
                       hr_json_kind(types));
    for (const cJSON *type = types->child; type != NULL; type = type->next) {
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "full_attention") != 0)
            return hr_fail(err, HR_ERR_MODEL,
                           "layer_types: only full_attention is supported, came %.64s",
                           cJSON_IsString(type) ? type->valuestring : hr_json_kind(type));
    }
    return HR_OK;
}

static hr_status refuse_unsupported(const cJSON *root, const hr_hf_config *config, hr_error *err) {
    HR_TRY(refuse_quantised(root, err));
    HR_TRY(refuse_windows(root, config, err));
    const char *act = "silu";
    HR_TRY(hr_json_opt_string(root, "hidden_act", &act, err));
    if (strcmp(act, "silu") != 0)
        return hr_fail(err, HR_ERR_MODEL, "hidden_act: only silu is supported, came %.64s", act);
    return HR_OK;
}

static hr_status read_sizes(const cJSON *root, hr_hf_config *out, hr_error *err) {
    HR_TRY(get_u32(root, "vocab_size", 1, MAX_VOCAB, &out->vocab_size, err));
    HR_TRY(get_u32(root, "hidden_size", 1, MAX_WIDTH, &out->hidden_size, err));
    HR_TRY(get_u32(root, "intermediate_size", 1, MAX_WIDTH, &out->intermediate_size, err));
    HR_TRY(get_u32(root, "num_hidden_layers", 1, MAX_LAYERS, &out->num_hidden_layers, err));
    HR_TRY(get_u32(root, "num_attention_heads", 1, MAX_HEADS, &out->num_attention_heads, err));
    HR_TRY(get_u32(root, "max_position_embeddings", 1, MAX_POSITIONS, &out->max_position_embeddings,
                   err));
    out->num_key_value_heads = out->num_attention_heads;
    HR_TRY(opt_u32(root, "num_key_value_heads", 1, MAX_HEADS, &out->num_key_value_heads, err));
    if (out->num_attention_heads % out->num_key_value_heads != 0)
        return hr_fail(err, HR_ERR_INVALID,
                       "num_key_value_heads: wanted a divisor of num_attention_heads %u, came %u",
                       out->num_attention_heads, out->num_key_value_heads);
    return HR_OK;
}

static hr_status read_head_dim(const cJSON *root, hr_hf_config *out, hr_error *err) {
    bool named = hr_json_get_present(root, "head_dim") != NULL;
    if (named) {
        HR_TRY(get_u32(root, "head_dim", 1, MAX_HEAD_DIM, &out->head_dim, err));
    } else if (strcmp(out->model_type, "qwen3") == 0) {
        out->head_dim = 128; /* the default of the class, whatever the width */
    } else {
        out->head_dim = out->hidden_size / out->num_attention_heads;
        if (out->hidden_size % out->num_attention_heads != 0)
            return hr_fail(err, HR_ERR_INVALID,
                           "hidden_size: wanted a multiple of num_attention_heads %u, came %u; or "
                           "head_dim must be given",
                           out->num_attention_heads, out->hidden_size);
    }
    if (out->head_dim % 2 != 0 || out->head_dim > MAX_HEAD_DIM)
        return hr_fail(err, HR_ERR_INVALID, "head_dim: wanted an even number up to %u, came %u",
                       MAX_HEAD_DIM, out->head_dim);
    return HR_OK;
}

/* Where the parameters of RoPE stand: transformers 5 writes rope_parameters, 4 wrote rope_scaling;
 * when both are there transformers takes rope_scaling. */
typedef struct hr_rope_source {
    const cJSON *root, *dict; /* dict may be NULL */
    const char *name;
} hr_rope_source;

static hr_status find_rope(const cJSON *root, hr_rope_source *out, hr_error *err) {
    const cJSON *scaling = hr_json_get_present(root, "rope_scaling");
    const cJSON *parameters = hr_json_get_present(root, "rope_parameters");
    bool old = scaling != NULL && (!cJSON_IsObject(scaling) || scaling->child != NULL);
    *out = (hr_rope_source){.root = root,
                            .dict = old ? scaling : parameters,
                            .name = old ? "rope_scaling" : "rope_parameters"};
    if (out->dict == NULL)
        return HR_OK;
    if (!cJSON_IsObject(out->dict))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an object, came %s", out->name,
                       hr_json_kind(out->dict));
    for (const cJSON *item = out->dict->child; item != NULL; item = item->next) {
        if (cJSON_IsObject(item))
            return hr_fail(err, HR_ERR_MODEL,
                           "%s.%.64s: parameters of their own for some layers are not supported",
                           out->name, item->string);
    }
    return HR_OK;
}

/* Optional: *out stays when absent. The message names dict and key. */
static hr_status rope_double(const hr_rope_source *rope, const char *key, double min, double max,
                             double *out, hr_error *err) {
    char what[96];
    const cJSON *item = hr_json_get_present(rope->dict, key);
    snprintf(what, sizeof what, "%s.%s", rope->name, key);
    return item ? hr_json_double(item, what, min, max, out, err) : HR_OK;
}

static hr_status rope_required(const hr_rope_source *rope, const char *key, double min, double max,
                               double *out, hr_error *err) {
    if (hr_json_get_present(rope->dict, key) == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s.%s: wanted a number, the key is absent", rope->name,
                       key);
    return rope_double(rope, key, min, max, out, err);
}

static hr_status rope_type(const hr_rope_source *rope, hr_rope_type *out, hr_error *err) {
    static const char *const names[] = {"default", "linear", "llama3", "yarn"};
    const char *name = "default";
    HR_TRY(hr_json_opt_string(rope->dict, "type", &name, err));
    HR_TRY(hr_json_opt_string(rope->dict, "rope_type", &name, err));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (hr_rope_type)i;
            return HR_OK;
        }
    }
    return hr_fail(err, HR_ERR_MODEL,
                   "%s: rope_type %.64s is not supported; default, linear, llama3 and yarn are",
                   rope->name, name);
}

static hr_status rope_theta(const hr_rope_source *rope, double *out, hr_error *err) {
    *out = 10000.0;
    HR_TRY(hr_json_opt_double(rope->root, "rope_theta", 1.001, 1e15, out, err));
    return rope_double(rope, "rope_theta", 1.001, 1e15, out, err);
}

static hr_status refuse_partial(const hr_rope_source *rope, hr_error *err) {
    double part = 1.0;
    HR_TRY(hr_json_opt_double(rope->root, "partial_rotary_factor", 0, 1e6, &part, err));
    HR_TRY(rope_double(rope, "partial_rotary_factor", 0, 1e6, &part, err));
    if (part != 1.0)
        return hr_fail(err, HR_ERR_MODEL, "partial_rotary_factor: only 1 is supported, came %g",
                       part);
    return HR_OK;
}

/* In the dict, or beside it, which goes first; else the model's own length. */
static hr_status rope_original(const hr_rope_source *rope, const hr_hf_config *config,
                               uint32_t *out, hr_error *err) {
    *out = config->max_position_embeddings;
    HR_TRY(opt_u32(rope->dict, "original_max_position_embeddings", 1, MAX_POSITIONS, out, err));
    return opt_u32(rope->root, "original_max_position_embeddings", 1, MAX_POSITIONS, out, err);
}

static hr_status read_llama3(const hr_rope_source *rope, const hr_hf_config *config,
                             hr_rope_config *out, hr_error *err) {
    HR_TRY(rope_required(rope, "factor", 1, 1e6, &out->factor, err));
    HR_TRY(rope_required(rope, "low_freq_factor", 1e-6, 1e6, &out->low_freq_factor, err));
    HR_TRY(rope_required(rope, "high_freq_factor", 1e-6, 1e6, &out->high_freq_factor, err));
    HR_TRY(rope_original(rope, config, &out->original_max_position_embeddings, err));
    if (out->high_freq_factor <= out->low_freq_factor)
        return hr_fail(err, HR_ERR_INVALID,
                       "%s.high_freq_factor: wanted more than low_freq_factor %g, came %g",
                       rope->name, out->low_freq_factor, out->high_freq_factor);
    return HR_OK;
}

static hr_status read_yarn(const hr_rope_source *rope, const hr_hf_config *config,
                           hr_rope_config *out, hr_error *err) {
    HR_TRY(rope_original(rope, config, &out->original_max_position_embeddings, err));
    out->factor = (double)config->max_position_embeddings / out->original_max_position_embeddings;
    HR_TRY(rope_double(rope, "factor", 1e-6, 1e6, &out->factor, err));
    out->beta_fast = 32;
    out->beta_slow = 1;
    HR_TRY(rope_double(rope, "beta_fast", 0, 1e6, &out->beta_fast, err));
    HR_TRY(rope_double(rope, "beta_slow", 0, 1e6, &out->beta_slow, err));
    /* transformers takes a zero for an absent value here */
    out->beta_fast = out->beta_fast > 0 ? out->beta_fast : 32;
    out->beta_slow = out->beta_slow > 0 ? out->beta_slow : 1;
    HR_TRY(rope_double(rope, "mscale", 0, 1e6, &out->mscale, err));
    HR_TRY(rope_double(rope, "mscale_all_dim", 0, 1e6, &out->mscale_all_dim, err));
    out->truncate = true;
    HR_TRY(hr_json_opt_bool(rope->dict, "truncate", &out->truncate, err));
    out->has_attention_factor = hr_json_get_present(rope->dict, "attention_factor") != NULL;
    return rope_double(rope, "attention_factor", 1e-6, 1e6, &out->attention_factor, err);
}

static hr_status read_rope(const cJSON *root, hr_hf_config *out, hr_error *err) {
    hr_rope_source rope = {0};
    HR_TRY(find_rope(root, &rope, err));
    HR_TRY(rope_type(&rope, &out->rope.type, err));
    HR_TRY(rope_theta(&rope, &out->rope.theta, err));
    HR_TRY(refuse_partial(&rope, err));
    switch (out->rope.type) {
    case HR_ROPE_DEFAULT:
        return HR_OK;
    case HR_ROPE_LINEAR:
        return rope_required(&rope, "factor", 1e-6, 1e6, &out->rope.factor, err);
    case HR_ROPE_LLAMA3:
        return read_llama3(&rope, out, &out->rope, err);
    case HR_ROPE_YARN:
        return read_yarn(&rope, out, &out->rope, err);
    }
    return HR_OK;
}

static hr_status read_dtype(const cJSON *root, hr_hf_config *out, hr_error *err) {
    const char *name = NULL;
    HR_TRY(hr_json_opt_string(root, "torch_dtype", &name, err));
    HR_TRY(hr_json_opt_string(root, "dtype", &name, err));
    if (name == NULL || strcmp(name, "auto") == 0)
        return HR_OK;
    if (!hr_dtype_from_torch_name(name, &out->dtype))
        return hr_fail(err, HR_ERR_INVALID, "dtype: wanted a torch dtype, came %.64s", name);
    out->has_dtype = true;
    return HR_OK;
}

static hr_status read_switches(const cJSON *root, hr_hf_config *out, hr_error *err) {
    out->rms_norm_eps = 1e-6;
    HR_TRY(hr_json_opt_double(root, "rms_norm_eps", 0, 1, &out->rms_norm_eps, err));
    HR_TRY(hr_json_opt_bool(root, "tie_word_embeddings", &out->tie_word_embeddings, err));
    HR_TRY(hr_json_opt_bool(root, "attention_bias", &out->attention_bias, err));
    return hr_json_opt_bool(root, "mlp_bias", &out->mlp_bias, err);
}

static hr_status add_eos(const cJSON *item, hr_hf_config *out, hr_error *err) {
    uint64_t id = 0;
    HR_TRY(hr_json_u64(item, "eos_token_id", 0, INT32_MAX, HR_JSON_NUMBER, &id, err));
    for (uint32_t i = 0; i < out->n_eos; i++) {
        if (out->eos_token_id[i] == id)
            return HR_OK;
    }
    if (out->n_eos == HR_HF_MAX_EOS)
        return hr_fail(err, HR_ERR_LIMIT, "eos_token_id: more than %d ids", HR_HF_MAX_EOS);
    out->eos_token_id[out->n_eos++] = (uint32_t)id;
    return HR_OK;
}

static hr_status read_eos(const cJSON *root, hr_hf_config *out, hr_error *err) {
    const cJSON *eos = hr_json_get_present(root, "eos_token_id");
    if (eos == NULL)
        return HR_OK;
    if (!cJSON_IsArray(eos))
        return add_eos(eos, out, err);
    for (const cJSON *item = eos->child; item != NULL; item = item->next)
        HR_TRY(add_eos(item, out, err));
    return HR_OK;
}

static hr_status read_tokens(const cJSON *root, hr_hf_config *out, hr_error *err) {
    out->has_bos = hr_json_get_present(root, "bos_token_id") != NULL;
    HR_TRY(opt_u32(root, "bos_token_id", 0, INT32_MAX, &out->bos_token_id, err));
    return read_eos(root, out, err);
}

static hr_status read_config(const cJSON *root, hr_hf_config *out, hr_error *err) {
    HR_TRY(read_names(root, out, err));
    HR_TRY(refuse_unsupported(root, out, err));
    HR_TRY(read_sizes(root, out, err));
    HR_TRY(read_head_dim(root, out, err));
    HR_TRY(read_rope(root, out, err));
    HR_TRY(read_switches(root, out, err));
    HR_TRY(read_dtype(root, out, err));
    return read_tokens(root, out, err);
}

static hr_status parse_object(const char *text, size_t len, cJSON **out, hr_error *err) {
    cJSON *tree = NULL;
    HR_TRY(hr_json_parse(text, len, CONFIG_MAX_BYTES, &tree, err));
    if (!cJSON_IsObject(tree)) {
        hr_status status =
            hr_fail(err, HR_ERR_INVALID, "wanted a JSON object, came %s", hr_json_kind(tree));
        cJSON_Delete(tree);
        return status;
    }
    *out = tree;
    return HR_OK;
}

hr_status hr_hf_config_parse(const char *config, size_t config_len, const char *generation,
                             size_t generation_len, hr_hf_config *out, hr_error *err) {
    hr_hf_config result = {0};
    cJSON *root = NULL;
    hr_status status = parse_object(config, config_len, &root, err);
    if (status == HR_OK)
        status = read_config(root, &result, err);
    cJSON_Delete(root);
    if (status != HR_OK)
        return hr_fail_context(err, status, "config.json");
    if (generation != NULL) {
        root = NULL;
        status = parse_object(generation, generation_len, &root, err);
        if (status == HR_OK)
            status = read_eos(root, &result, err);
        cJSON_Delete(root);
        if (status != HR_OK)
            return hr_fail_context(err, status, "generation_config.json");
    }
    *out = result;
    return HR_OK;
}

/* *found says whether the file exists; one that is optional may be missing. */
static hr_status read_in(const char *dir, const char *name, bool optional, hr_buf *out, bool *found,
                         hr_error *err) {
    char *path = hr_path_join(dir, name);
    if (path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    hr_status status = HR_OK;
    *found = !optional || hr_file_exists(path);
    if (*found)
        status = hr_file_read(path, CONFIG_MAX_BYTES, out, err);
    free(path);
    return status;
}

static const char *text_of(const hr_buf *buf) {
    return buf->data ? buf->data : "";
}

hr_status hr_hf_config_load(const char *dir, hr_hf_config *out, hr_error *err) {
    hr_buf config = {0}, generation = {0};
    bool found = false;
    hr_status status = read_in(dir, "config.json", false, &config, &found, err);
    if (status == HR_OK)
        status = read_in(dir, "generation_config.json", true, &generation, &found, err);
    if (status != HR_OK)
        goto out;
    status = hr_hf_config_parse(text_of(&config), config.len, !found ? NULL : text_of(&generation),
                                generation.len, out, err);
    if (status != HR_OK)
        hr_fail_context(err, status, "%s", dir);
out:
    hr_buf_free(&config);
    hr_buf_free(&generation);
    return status;
}
