/* config.json: both generations of transformers are read, and what cannot be computed is refused by
 * name. */
#include "format/hf_config.h"

#include "testing.h"

#define NAMES "\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
#define SIZES                                                                                      \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":4,\"max_position_embeddings\":128"

static hr_status parse(const char *text, hr_hf_config *out, hr_error *err) {
    return hr_hf_config_parse(text, strlen(text), NULL, 0, out, err);
}

/* The least that a config has, and then more keys ("" or ",\"key\":value"). */
static hr_status parse_more(const char *more, hr_hf_config *out, hr_error *err) {
    char text[2048];
    snprintf(text, sizeof text, "{" NAMES SIZES "%s}", more);
    return parse(text, out, err);
}

static void absent_keys_take_the_defaults_of_transformers(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
    assert_ok(parse_more("", &c, &err), &err);
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_string_equal(c.model_type, "llama");
    assert_int_equal(c.num_key_value_heads, 4);
    assert_int_equal(c.head_dim, 8);
    assert_true(c.rms_norm_eps == 1e-6);
    assert_int_equal(c.rope.type, HR_ROPE_DEFAULT);
    assert_true(c.rope.theta == 10000.0);
    assert_false(c.tie_word_embeddings || c.attention_bias || c.mlp_bias || c.has_dtype ||
                 c.has_bos);
    assert_int_equal(c.n_eos, 0);
}

static void qwen3_has_its_own_default_of_head_dim(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
    assert_ok(parse("{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\"," SIZES "}",
                    &c, &err),
              &err);
    assert_int_equal(c.head_dim, 128);
}

static void plain_keys_are_read(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
    assert_ok(
        parse_more(
            ",\"num_key_value_heads\":2,\"head_dim\":10,\"rms_norm_eps\":1e-5,\"tie_word_"
            "embeddings\":true,"
            "\"attention_bias\":true,\"mlp_bias\":true,\"dtype\":\"bfloat16\",\"bos_token_id\":1,"
            "\"eos_token_id\":[2,3,2],\"pretraining_tp\":4,\"hidden_act\":\"silu\",\"whatever\":{"
            "\"a\":1}",
            &c, &err),
        &err);
    assert_int_equal(c.num_key_value_heads, 2);
    assert_int_equal(c.head_dim, 10);
    assert_true(c.rms_norm_eps == 1e-5);
    assert_true(c.tie_word_embeddings && c.attention_bias && c.mlp_bias && c.has_dtype &&
                c.has_bos);
    assert_int_equal(c.dtype, HR_DTYPE_BF16);
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos_token_id[1], 3);
    assert_ok(parse_more(",\"torch_dtype\":\"float16\"", &c, &err), &err);
    assert_int_equal(c.dtype, HR_DTYPE_F16);
}

static void generation_config_adds_its_ends(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
    const char *config = "{" NAMES SIZES ",\"eos_token_id\":2}";
    const char *generation = "{\"eos_token_id\":[7,2],\"temperature\":0.6}";
    assert_ok(hr_hf_config_parse(config, strlen(config), generation, strlen(generation), &c, &err),
              &err);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos_token_id[0], 2);
    assert_int_equal(c.eos_token_id[1], 7);
    assert_refused(
        hr_hf_config_parse(config, strlen(config), "{\"eos_token_id\":\"x\"}", 20, &c, &err), &err,
        "generation_config.json: eos_token_id");
}

typedef struct rope_case {
    const char *more;
    hr_rope_config wanted;
} rope_case;

static const rope_case rope_cases[] = {
    {",\"rope_theta\":500000.0,\"rope_scaling\":null", {.type = HR_ROPE_DEFAULT, .theta = 500000}},
    {",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e6}",
     {.type = HR_ROPE_DEFAULT, .theta = 1e6}},
    {",\"rope_theta\":5000,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}",
     {.type = HR_ROPE_LINEAR, .theta = 5000, .factor = 2}},
    {",\"rope_parameters\":{\"factor\":2.0,\"rope_theta\":500.0,\"rope_type\":\"linear\",\"type\":"
     "\"linear\"}",
     {.type = HR_ROPE_LINEAR, .theta = 500, .factor = 2}},
    {",\"rope_theta\":500000,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_"
     "factor\":1,"
     "\"high_freq_factor\":4,\"original_max_position_embeddings\":64}",
     {.type = HR_ROPE_LLAMA3,
      .theta = 500000,
      .factor = 8,
      .low_freq_factor = 1,
      .high_freq_factor = 4,
      .original_max_position_embeddings = 64}},
    {",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":4,\"rope_theta\":100}",
     {.type = HR_ROPE_YARN,
      .theta = 100,
      .factor = 4,
      .original_max_position_embeddings = 128,
      .beta_fast = 32,
      .beta_slow = 1,
      .truncate = true}},
    {",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":null,\"original_max_position_"
     "embeddings\":32,"
     "\"beta_fast\":16,\"beta_slow\":2,\"attention_factor\":1.25,\"mscale\":0.7,\"mscale_all_dim\":"
     "0.5,"
     "\"truncate\":false}",
     {.type = HR_ROPE_YARN,
      .theta = 10000,
      .factor = 4,
      .original_max_position_embeddings = 32,
      .beta_fast = 16,
      .beta_slow = 2,
      .has_attention_factor = true,
      .attention_factor = 1.25,
      .mscale = 0.7,
      .mscale_all_dim = 0.5}},
};

static void rope_is_read_from_both_generations(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof rope_cases / sizeof *rope_cases; i++) {
        const hr_rope_config *w = &rope_cases[i].wanted;
        hr_hf_config c = {0};
        hr_error err = {0};
        assert_ok(parse_more(rope_cases[i].more, &c, &err), &err);
        assert_int_equal(c.rope.type, w->type);
        assert_true(c.rope.theta == w->theta && c.rope.factor == w->factor);
        assert_int_equal(c.rope.original_max_position_embeddings,
                         w->original_max_position_embeddings);
        assert_true(c.rope.low_freq_factor == w->low_freq_factor &&
                    c.rope.high_freq_factor == w->high_freq_factor);
        assert_true(c.rope.beta_fast == w->beta_fast && c.rope.beta_slow == w->beta_slow);
        assert_int_equal(c.rope.has_attention_factor, w->has_attention_factor);
        assert_true(c.rope.attention_factor == w->attention_factor);
        assert_true(c.rope.mscale == w->mscale && c.rope.mscale_all_dim == w->mscale_all_dim);
        assert_int_equal(c.rope.truncate, w->truncate);
    }
}

typedef struct refusal {
    const char *more, *names;
} refusal;

static const refusal refusals[] = {
    {",\"quantization_config\":{\"quant_method\":\"gptq\"}", "quantised (gptq)"},
    {",\"quantization_config\":{}", "quantization_config"},
    {",\"hidden_act\":\"gelu\"", "hidden_act: only silu is supported, came gelu"},
    {",\"sliding_window\":4096", "sliding_window"},
    {",\"use_sliding_window\":true", "use_sliding_window"},
    {",\"layer_types\":[\"full_attention\",\"sliding_attention\"]", "sliding_attention"},
    {",\"layer_types\":{}", "layer_types"},
    {",\"partial_rotary_factor\":0.5", "partial_rotary_factor: only 1 is supported, came 0.5"},
    {",\"rope_parameters\":{\"partial_rotary_factor\":0.25}", "partial_rotary_factor"},
    {",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}", "rope_type dynamic"},
    {",\"rope_scaling\":{\"rope_type\":\"longrope\"}", "rope_type longrope"},
    {",\"rope_scaling\":7", "rope_scaling: wanted an object"},
    {",\"rope_scaling\":{\"type\":\"linear\"}",
     "rope_scaling.factor: wanted a number, the key is absent"},
    {",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}", "rope_scaling.factor"},
    {",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_"
     "factor\":4}",
     "high_freq_factor"},
    {",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"attention_factor\":-1}",
     "rope_scaling.attention_factor"},
    {",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}",
     "rope_parameters.full_attention"},
    {",\"rope_theta\":1", "rope_theta"},
    {",\"rope_theta\":\"x\"", "rope_theta"},
    {",\"num_key_value_heads\":3",
     "num_key_value_heads: wanted a divisor of num_attention_heads 4, came 3"},
    {",\"head_dim\":7", "head_dim: wanted an even number"},
    {",\"head_dim\":4096", "head_dim"},
    {",\"dtype\":\"bf16\"", "dtype: wanted a torch dtype, came bf16"},
    {",\"tie_word_embeddings\":1", "tie_word_embeddings: wanted true or false"},
    {",\"rms_norm_eps\":-1", "rms_norm_eps"},
    {",\"eos_token_id\":-1", "eos_token_id"},
    {",\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]", "eos_token_id: more than 16"},
    {",\"bos_token_id\":1.5", "bos_token_id"},
};

static void what_cannot_be_computed_is_refused_by_name(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        hr_hf_config c = {0};
        hr_error err = {0};
        assert_refused(parse_more(refusals[i].more, &c, &err), &err, refusals[i].names);
        assert_non_null(strstr(err.message, "config.json: "));
        assert_int_equal(c.vocab_size, 0); /* outputs only on success */
    }
}

static void a_window_that_qwen_switches_off_is_no_window(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
#define QWEN                                                                                       \
    "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\"," SIZES                    \
    ",\"sliding_window\":131072"
    assert_ok(parse(QWEN ",\"use_sliding_window\":false}", &c, &err), &err);
    assert_ok(parse(QWEN "}", &c, &err), &err);
    assert_refused(parse(QWEN ",\"use_sliding_window\":true}", &c, &err), &err, "sliding_window");
}

static void every_size_is_required_and_bounded(void **state) {
    (void)state;
    static const char *const keys[] = {"vocab_size",          "hidden_size",
                                       "intermediate_size",   "num_hidden_layers",
                                       "num_attention_heads", "max_position_embeddings"};
    static const char *const values[] = {NULL, "0", "-1", "1e18", "2.5", "\"64\"", "null", "[]"};
    for (size_t k = 0; k < 6; k++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            char text[1024];
            hr_hf_config c = {0};
            hr_error err = {0};
            int used = snprintf(text, sizeof text, "{" NAMES "\"head_dim\":8");
            for (size_t other = 0; other < 6; other++) {
                const char *value = other != k ? "4" : values[v];
                if (value != NULL)
                    used += snprintf(text + used, sizeof text - (size_t)used, ",\"%s\":%s",
                                     keys[other], value);
            }
            strcat(text, "}");
            assert_refused(parse(text, &c, &err), &err, keys[k]);
        }
    }
}

static void a_config_names_its_architecture(void **state) {
    (void)state;
    hr_hf_config c = {0};
    hr_error err = {0};
    assert_refused(parse("{" SIZES "}", &c, &err), &err, "architectures");
    assert_refused(parse("{\"architectures\":[]," SIZES "}", &c, &err), &err, "architectures");
    assert_refused(parse("[]", &c, &err), &err, "wanted a JSON object");
    assert_refused(parse("{", &c, &err), &err, "malformed JSON");
}

static void a_directory_is_read_with_or_without_a_generation_config(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_hf_config c = {0};
    hr_error err = {0};
    assert_refused(hr_hf_config_load(dir, &c, &err), &err, "config.json");
    assert_int_equal(err.status, HR_ERR_NOT_FOUND);
    const char *config = "{" NAMES SIZES "}";
    write_file(dir, "config.json", config, strlen(config));
    err = (hr_error){0};
    assert_ok(hr_hf_config_load(dir, &c, &err), &err);
    assert_string_equal(err.message, "");
    assert_int_equal(c.n_eos, 0);
    write_file(dir, "generation_config.json", "{\"eos_token_id\":5}", 18);
    assert_ok(hr_hf_config_load(dir, &c, &err), &err);
    assert_int_equal(c.eos_token_id[0], 5);
    write_file(dir, "generation_config.json", "", 0);
    assert_refused(hr_hf_config_load(dir, &c, &err), &err, dir);
    remove_dir(dir, (const char *const[]){"config.json", "generation_config.json", NULL});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(absent_keys_take_the_defaults_of_transformers),
        cmocka_unit_test(qwen3_has_its_own_default_of_head_dim),
        cmocka_unit_test(plain_keys_are_read),
        cmocka_unit_test(generation_config_adds_its_ends),
        cmocka_unit_test(rope_is_read_from_both_generations),
        cmocka_unit_test(what_cannot_be_computed_is_refused_by_name),
        cmocka_unit_test(a_window_that_qwen_switches_off_is_no_window),
        cmocka_unit_test(every_size_is_required_and_bounded),
        cmocka_unit_test(a_config_names_its_architecture),
        cmocka_unit_test(a_directory_is_read_with_or_without_a_generation_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
