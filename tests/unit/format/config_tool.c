/* Prints how a model directory's config is understood, for tests that hold it against transformers
 * itself.
 *
 *   config_tool DIR     JSON on stdout; on a refusal the message on stderr and exit status 1 */
#include "format/hf_config.h"
#include "format/json_writer.h"

#include <stdio.h>

static void print_rope(const hr_rope_config *rope, hr_json_writer *w) {
    static const char *const types[] = {"default", "linear", "llama3", "yarn"};
    hr_json_object_begin(w);
    hr_json_put_string(w, "rope_type", types[rope->type]);
    hr_json_put_f64(w, "rope_theta", rope->theta);
    hr_json_put_f64(w, "factor", rope->factor);
    hr_json_put_u64(w, "original_max_position_embeddings", rope->original_max_position_embeddings);
    hr_json_put_f64(w, "low_freq_factor", rope->low_freq_factor);
    hr_json_put_f64(w, "high_freq_factor", rope->high_freq_factor);
    hr_json_put_f64(w, "beta_fast", rope->beta_fast);
    hr_json_put_f64(w, "beta_slow", rope->beta_slow);
    hr_json_put_f64(w, "attention_factor", rope->attention_factor);
    hr_json_put_f64(w, "mscale", rope->mscale);
    hr_json_put_f64(w, "mscale_all_dim", rope->mscale_all_dim);
    hr_json_put_bool(w, "truncate", rope->truncate);
    hr_json_object_end(w);
}

static void print_config(const hr_hf_config *c, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "architecture", c->architecture);
    hr_json_put_string(w, "model_type", c->model_type);
    hr_json_put_u64(w, "vocab_size", c->vocab_size);
    hr_json_put_u64(w, "hidden_size", c->hidden_size);
    hr_json_put_u64(w, "intermediate_size", c->intermediate_size);
    hr_json_put_u64(w, "num_hidden_layers", c->num_hidden_layers);
    hr_json_put_u64(w, "num_attention_heads", c->num_attention_heads);
    hr_json_put_u64(w, "num_key_value_heads", c->num_key_value_heads);
    hr_json_put_u64(w, "head_dim", c->head_dim);
    hr_json_put_u64(w, "max_position_embeddings", c->max_position_embeddings);
    hr_json_put_f64(w, "rms_norm_eps", c->rms_norm_eps);
    hr_json_put_bool(w, "tie_word_embeddings", c->tie_word_embeddings);
    hr_json_put_bool(w, "attention_bias", c->attention_bias);
    hr_json_put_bool(w, "mlp_bias", c->mlp_bias);
    hr_json_put_string(w, "dtype", c->has_dtype ? hr_dtype_torch_name(c->dtype) : "");
    hr_json_put_i64(w, "bos_token_id", c->has_bos ? (int64_t)c->bos_token_id : -1);
    hr_json_key(w, "eos_token_id");
    hr_json_array_begin(w);
    for (uint32_t i = 0; i < c->n_eos; i++)
        hr_json_write_u64(w, c->eos_token_id[i]);
    hr_json_array_end(w);
    hr_json_key(w, "rope");
    print_rope(&c->rope, w);
    hr_json_object_end(w);
}

int main(int argc, char **argv) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_error err = {0};
    hr_hf_config config = {0};
    if (argc != 2 || hr_hf_config_load(argv[1], &config, &err) != HR_OK) {
        fprintf(stderr, "%s\n", argc == 2 ? err.message : "usage: config_tool DIR");
        return 1;
    }
    hr_json_writer_init(&w, &text);
    print_config(&config, &w);
    printf("%s\n", text.data);
    hr_buf_free(&text);
    return 0;
}
