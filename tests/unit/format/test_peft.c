/* Adapters against a small model: what is accepted, with which rank and scale, and what is refused
 * by name. The same is checked against PEFT itself in tests/e2e/test_peft_fields.py. */
#include "format/json_writer.h"
#include "format/peft.h"
#include "tensor/convert.h"

#include "testing.h"

#include <math.h>

enum { VOCAB = 16, HIDDEN = 4, MIDDLE = 6, KV = 2 };

#define LAYER(n)                                                                                   \
    {"model.layers." #n ".self_attn.q_proj", HIDDEN, HIDDEN, .is_linear = true},                   \
        {"model.layers." #n ".self_attn.k_proj", HIDDEN, KV, .is_linear = true},                   \
        {"model.layers." #n ".self_attn.v_proj", HIDDEN, KV, .is_linear = true},                   \
        {"model.layers." #n ".self_attn.o_proj", HIDDEN, HIDDEN, .is_linear = true},               \
        {"model.layers." #n ".mlp.gate_proj", HIDDEN, MIDDLE, .is_linear = true},                  \
        {"model.layers." #n ".mlp.up_proj", HIDDEN, MIDDLE, .is_linear = true},                    \
        {"model.layers." #n ".mlp.down_proj", MIDDLE, HIDDEN, .is_linear = true}, {                \
        "model.layers." #n ".input_layernorm", HIDDEN, HIDDEN                                      \
    }

static const hr_module_name modules[] = {
    {"model.embed_tokens", VOCAB, HIDDEN, .is_embedding = true},
    LAYER(0),
    LAYER(1),
    {"model.norm", HIDDEN, HIDDEN},
    {"lm_head", HIDDEN, VOCAB, .is_linear = true, .is_output_head = true},
};
enum { N_MODULES = sizeof modules / sizeof *modules };

/* Storage for all tensors of a case; element i of a tensor is i. */
static float numbers[4096];

typedef struct tensor_spec {
    const char *name;
    uint64_t rows, columns;
} tensor_spec;

#define L0 "base_model.model.model.layers.0."
#define L1 "base_model.model.model.layers.1."
#define PAIR(module, out, in, r)                                                                   \
    {module ".lora_A.weight", r, in}, {                                                            \
        module ".lora_B.weight", out, r                                                            \
    }
#define Q0 PAIR(L0 "self_attn.q_proj", HIDDEN, HIDDEN, 2)
#define Q1 PAIR(L1 "self_attn.q_proj", HIDDEN, HIDDEN, 2)
#define EMBED                                                                                      \
    {"base_model.model.model.embed_tokens.lora_embedding_A", 2, VOCAB}, {                          \
        "base_model.model.model.embed_tokens.lora_embedding_B", HIDDEN, 2                          \
    }
#define HEAD PAIR("base_model.model.lm_head", VOCAB, HIDDEN, 2)
#define EMBED_FULL                                                                                 \
    { "base_model.model.model.embed_tokens.weight", VOCAB, HIDDEN }
#define HEAD_FULL                                                                                  \
    { "base_model.model.lm_head.base_layer.weight", VOCAB, HIDDEN }

static size_t make_tensors(const tensor_spec *specs, hr_tensor *out) {
    size_t n = 0;
    for (; specs[n].name != NULL; n++) {
        out[n] = (hr_tensor){.name = specs[n].name,
                             .dtype = HR_DTYPE_F32,
                             .ndim = 2,
                             .shape = {specs[n].rows, specs[n].columns},
                             .data = numbers,
                             .bytes = specs[n].rows * specs[n].columns * 4};
    }
    return n;
}

/* Says yes to every weight while *ctx is true. */
static bool base_equals(void *ctx, size_t module, const hr_tensor *weight) {
    (void)module;
    (void)weight;
    return *(bool *)ctx;
}

static hr_status resolve(const char *config, const tensor_spec *specs, bool base_is_equal,
                         hr_peft *out, hr_error *err) {
    hr_tensor tensors[16];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        numbers[i] = (float)i;
    size_t n = make_tensors(specs, tensors);
    hr_peft_base base = {base_equals, &base_is_equal};
    return hr_peft_resolve(config, strlen(config), tensors, n, modules, N_MODULES, &base, out, err);
}

#define CONFIG(targets)                                                                            \
    "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4,\"target_modules\":" targets "}"
#define CONFIG_AND(targets, more)                                                                  \
    "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4,\"target_modules\":" targets "," more "}"

typedef struct accepted_case {
    const char *config;
    tensor_spec tensors[8];
    struct {
        const char *path;
        uint32_t rank;
        double scale;
    } wanted[8];
} accepted_case;

#define Q0_PATH "model.layers.0.self_attn.q_proj"
#define Q1_PATH "model.layers.1.self_attn.q_proj"

static const accepted_case accepted[] = {
    {CONFIG("[\"q_proj\"]"), {Q0, Q1}, {{Q0_PATH, 2, 2}, {Q1_PATH, 2, 2}}},
    {CONFIG("[\"" Q0_PATH "\"]"), {Q0}, {{Q0_PATH, 2, 2}}},
    {CONFIG("\".*\\\\.0\\\\.self_attn\\\\.q_proj\""), {Q0}, {{Q0_PATH, 2, 2}}},
    /* a list is narrowed by layers, an exact name is not */
    {CONFIG_AND("[\"q_proj\"]", "\"layers_to_transform\":[1]"), {Q1}, {{Q1_PATH, 2, 2}}},
    {CONFIG_AND("[\"q_proj\"]", "\"layers_to_transform\":0,\"layers_pattern\":\"layers\""),
     {Q0},
     {{Q0_PATH, 2, 2}}},
    {CONFIG_AND("[\"q_proj\"]",
                "\"layers_to_transform\":[0],\"layers_pattern\":[\"h\",\"layers\"]"),
     {Q0},
     {{Q0_PATH, 2, 2}}},
    {CONFIG_AND("[\"q_proj\"]", "\"layers_to_transform\":[]"),
     {Q0, Q1},
     {{Q0_PATH, 2, 2}, {Q1_PATH, 2, 2}}},
    {CONFIG_AND("[\"" Q0_PATH "\"]", "\"layers_to_transform\":[1]"), {Q0}, {{Q0_PATH, 2, 2}}},
    {CONFIG_AND("[\"q_proj\"]", "\"exclude_modules\":[\"1.self_attn.q_proj\"]"),
     {Q0},
     {{Q0_PATH, 2, 2}}},
    {CONFIG_AND("[\"q_proj\"]", "\"exclude_modules\":\".*1.*\""), {Q0}, {{Q0_PATH, 2, 2}}},
    /* scales: alpha / r, alpha / sqrt(r), by patterns of which the first that matches counts */
    {CONFIG_AND("[\"q_proj\"]", "\"use_rslora\":true,\"exclude_modules\":\".*1.*\""),
     {Q0},
     {{Q0_PATH, 2, 2.8284271247461903}}},
    {CONFIG_AND("[\"q_proj\"]", "\"rank_pattern\":{\"layers.1.*\":3},\"alpha_pattern\":{\"^model."
                                "layers.0.*\":5,\"q_proj\":6}"),
     {Q0, PAIR(L1 "self_attn.q_proj", HIDDEN, HIDDEN, 3)},
     {{Q0_PATH, 2, 2.5}, {Q1_PATH, 3, 2}}},
    {CONFIG_AND("[\"q_proj\"]", "\"rank_pattern\":{\"proj\":7},\"exclude_modules\":\".*1.*\""),
     {Q0},
     {{Q0_PATH, 2, 2}}},
    /* embedding and head, with the base's own weights beside them */
    {CONFIG("[\"embed_tokens\",\"lm_head\"]"),
     {EMBED, HEAD, EMBED_FULL, HEAD_FULL},
     {{"model.embed_tokens", 2, 2}, {"lm_head", 2, 2}}},
    {CONFIG_AND("[\"" Q0_PATH "\"]", "\"modules_to_save\":[\"embed_tokens\"]"),
     {Q0, EMBED_FULL},
     {{Q0_PATH, 2, 2}}},
    /* names as trainers write them */
    {CONFIG("[\"" Q0_PATH "\"]"),
     {{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", 2, HIDDEN},
      {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", HIDDEN, 2}},
     {{Q0_PATH, 2, 2}}},
    {CONFIG("[\"" Q0_PATH "\"]"),
     {PAIR("base_model.model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN, 2)},
     {{Q0_PATH, 2, 2}}},
    {CONFIG("[\"" Q0_PATH "\"]"),
     {PAIR("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN, 2)},
     {{Q0_PATH, 2, 2}}},
    {CONFIG("[\"" Q0_PATH "\"]"),
     {{"layers.0.self_attn.q_proj.lora_A", 2, HIDDEN},
      {"layers.0.self_attn.q_proj.lora_B", HIDDEN, 2}},
     {{Q0_PATH, 2, 2}}},
    /* all that says nothing */
    {"{\"target_modules\":[\"" Q0_PATH
     "\"],\"r\":2,\"peft_version\":\"0.21.2\",\"unknown_off\":false,\"unknown_null\":null,"
     "\"loftq_config\":{},\"bias\":\"none\",\"auto_mapping\":{\"base_model_class\":\"X\"},\"init_"
     "lora_weights\":\"gaussian\"}",
     {Q0},
     {{Q0_PATH, 2, 4}}},
};

static void an_adapter_resolves_to_modules_ranks_and_scales(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        hr_peft peft = {0};
        hr_error err = {0};
        assert_ok(resolve(accepted[i].config, accepted[i].tensors, true, &peft, &err), &err);
        size_t n = 0;
        for (; accepted[i].wanted[n].path != NULL; n++) {
            const hr_peft_module *m = &peft.modules[n];
            assert_true(n < peft.n_modules);
            assert_string_equal(modules[m->module].path, accepted[i].wanted[n].path);
            assert_int_equal(m->rank, accepted[i].wanted[n].rank);
            assert_true(m->scale == (float)accepted[i].wanted[n].scale);
            assert_int_equal(m->a.shape[0], m->rank);
            assert_int_equal(m->a.shape[1], modules[m->module].in);
            assert_int_equal(m->b.shape[0], modules[m->module].out);
            assert_int_equal(m->b.shape[1], m->rank);
        }
        assert_int_equal(peft.n_modules, n);
        hr_peft_close(&peft);
    }
}

static void a_fused_adapter_shares_a_and_slices_b(void **state) {
    (void)state;
    const tensor_spec specs[] = {PAIR(L0 "self_attn.qkv_proj", HIDDEN + KV + KV, HIDDEN, 2),
                                 PAIR(L0 "mlp.gate_up_proj", MIDDLE + MIDDLE, HIDDEN, 3),
                                 {NULL, 0, 0}};
    static const struct {
        const char *path;
        size_t first_row;
    } wanted[] = {{"model.layers.0.self_attn.q_proj", 0},
                  {"model.layers.0.self_attn.k_proj", HIDDEN},
                  {"model.layers.0.self_attn.v_proj", HIDDEN + KV},
                  {"model.layers.0.mlp.gate_proj", 0},
                  {"model.layers.0.mlp.up_proj", MIDDLE}};
    hr_peft peft = {0};
    hr_error err = {0};
    assert_ok(resolve(CONFIG_AND("[\"qkv_proj\",\"gate_up_proj\"]",
                                 "\"rank_pattern\":{\"gate_up_proj\":3}"),
                      specs, false, &peft, &err),
              &err);
    assert_int_equal(peft.n_modules, 5);
    assert_int_equal(peft.max_rank, 3);
    for (size_t i = 0; i < 5; i++) {
        const hr_peft_module *m = &peft.modules[i];
        assert_string_equal(modules[m->module].path, wanted[i].path);
        assert_ptr_equal(m->a.data, numbers);
        assert_int_equal(m->b.shape[0], modules[m->module].out);
        assert_int_equal(m->b.bytes, modules[m->module].out * m->rank * 4);
        assert_true(*(const float *)m->b.data == (float)(wanted[i].first_row * m->rank));
    }
    hr_peft_close(&peft);
}

/* Every hidden linear layer, whatever their names; never the head. */
static void all_linear_means_every_linear_layer_but_the_head(void **state) {
    (void)state;
    hr_tensor tensors[2 * N_MODULES];
    char names[2 * N_MODULES][96];
    size_t n = 0, linear = 0;
    hr_error err = {0};
    for (size_t i = 0; i < N_MODULES; i++) {
        if (!modules[i].is_linear || modules[i].is_output_head)
            continue;
        linear++;
        for (int b = 0; b < 2; b++) {
            uint64_t rows = b ? modules[i].out : 2, columns = b ? 2 : modules[i].in;
            snprintf(names[n], 96, "base_model.model.%s.lora_%c.weight", modules[i].path,
                     b ? 'B' : 'A');
            tensors[n] = (hr_tensor){.name = names[n],
                                     .dtype = HR_DTYPE_F32,
                                     .ndim = 2,
                                     .shape = {rows, columns},
                                     .data = numbers,
                                     .bytes = rows * columns * 4};
            n++;
        }
    }
    const char *config = CONFIG("\"All-Linear\"");
    hr_peft peft = {0};
    assert_ok(
        hr_peft_resolve(config, strlen(config), tensors, n, modules, N_MODULES, NULL, &peft, &err),
        &err);
    assert_int_equal(peft.n_modules, linear);
    hr_peft_close(&peft);
    assert_refused(hr_peft_resolve(config, strlen(config), tensors, n - 1, modules, N_MODULES, NULL,
                                   &peft, &err),
                   &err, "missing: model.layers.1.mlp.down_proj.lora_B");
}

static void a_pattern_that_applies_nowhere_is_a_warning(void **state) {
    (void)state;
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    hr_peft peft = {0};
    hr_error err = {0};
    assert_ok(
        resolve(CONFIG_AND("[\"" Q0_PATH "\"]",
                           "\"rank_pattern\":{\"nowhere\":3},\"alpha_pattern\":{\"v_proj\":3},"
                           "\"modules_to_save\":[\"score\"]"),
                specs, false, &peft, &err),
        &err);
    assert_int_equal(peft.n_warnings, 3);
    assert_string_equal(peft.warnings[0], "rank_pattern: \"nowhere\" applies to no module");
    assert_string_equal(peft.warnings[1], "alpha_pattern: \"v_proj\" applies to no module");
    assert_string_equal(peft.warnings[2], "modules_to_save: \"score\" applies to no module");
    hr_peft_close(&peft);
}

static void an_all_zero_b_is_accepted(void **state) {
    (void)state;
    static const float zeros[HIDDEN * 2];
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    hr_tensor tensors[2];
    hr_peft peft = {0};
    hr_error err = {0};
    make_tensors(specs, tensors);
    tensors[1].data = zeros;
    const char *config = CONFIG("[\"" Q0_PATH "\"]");
    assert_ok(
        hr_peft_resolve(config, strlen(config), tensors, 2, modules, N_MODULES, NULL, &peft, &err),
        &err);
    hr_peft_close(&peft);
}

typedef struct refused_case {
    const char *config;
    tensor_spec tensors[8];
    const char *names;
} refused_case;

#define ONE(more) CONFIG_AND("[\"" Q0_PATH "\"]", more)

static const refused_case refused[] = {
    /* the config */
    {"", {Q0}, "adapter_config.json: malformed JSON"},
    {"[]", {Q0}, "wanted a JSON object"},
    {"{\"r\":2,\"r\":2}", {Q0}, "the key r stands twice"},
    {"{\"peft_type\":\"IA3\"}", {Q0}, "peft_type: only LORA is supported, came IA3"},
    {CONFIG("null"), {Q0}, "target_modules"},
    {CONFIG("[]"), {Q0}, "target_modules: wanted at least one name"},
    {CONFIG("\"\""), {Q0}, "target_modules: wanted at least one name"},
    {CONFIG("[1]"), {Q0}, "target_modules: wanted names"},
    {CONFIG("{}"), {Q0}, "target_modules: wanted a list"},
    {CONFIG("\"(q_proj\""),
     {Q0},
     "target_modules: pattern \"(q_proj\" is not a regular expression"},
    {CONFIG("\"q{,3}_proj\""), {Q0}, "{,"},
    {CONFIG("\"(([a-z._0-9]+)+)+[!?]\""), {Q0}, "cannot be matched"},
    {CONFIG("[\"mamba\"]"), {Q0}, "q_proj.lora_A"},
    {"{\"r\":0,\"target_modules\":[\"q_proj\"]}", {Q0}, "r: wanted 1 to 4096, came 0"},
    {"{\"r\":-8,\"target_modules\":[\"q_proj\"]}", {Q0}, "r: wanted 1 to 4096, came -8"},
    {"{\"r\":4097,\"target_modules\":[\"q_proj\"]}", {Q0}, "r: wanted 1 to 4096"},
    {"{\"r\":2.5,\"target_modules\":[\"q_proj\"]}", {Q0}, "r: wanted an integer"},
    {"{\"r\":\"8\",\"target_modules\":[\"q_proj\"]}", {Q0}, "r: wanted an integer"},
    {"{\"lora_alpha\":1e999,\"target_modules\":[\"q_proj\"]}", {Q0}, "lora_alpha"},
    {ONE("\"rank_pattern\":{\"q_proj\":0}"), {Q0}, "rank_pattern: q_proj: wanted 1 to 4096"},
    {ONE("\"rank_pattern\":{\"q_proj\":99999}"), {Q0}, "rank_pattern: q_proj"},
    {ONE("\"rank_pattern\":[]"), {Q0}, "rank_pattern: wanted an object"},
    {ONE("\"rank_pattern\":{\"q_(proj\":2}"), {Q0}, "rank_pattern: pattern \"q_(proj\""},
    {ONE("\"alpha_pattern\":{\"q_proj\":\"x\"}"), {Q0}, "alpha_pattern: q_proj: wanted a number"},
    {ONE("\"use_rslora\":\"yes\""), {Q0}, "use_rslora"},
    {ONE("\"init_lora_weights\":\"pissa\""), {Q0}, "init_lora_weights: pissa"},
    {ONE("\"init_lora_weights\":\"pissa_niter_16\""), {Q0}, "init_lora_weights: pissa_niter_16"},
    {ONE("\"init_lora_weights\":\"olora\""), {Q0}, "init_lora_weights: olora"},
    {ONE("\"use_dora\":true"), {Q0}, "use_dora"},
    {ONE("\"fan_in_fan_out\":true"), {Q0}, "fan_in_fan_out"},
    {ONE("\"bias\":\"lora_only\""), {Q0}, "bias"},
    {ONE("\"layer_replication\":[[0,1]]"), {Q0}, "layer_replication"},
    {ONE("\"sparkle\":1"), {Q0}, "sparkle"},
    {CONFIG_AND("\"all-linear\"", "\"layers_to_transform\":[0]"), {Q0}, "layers_to_transform"},
    {CONFIG_AND("\".*q_proj\"", "\"layers_pattern\":\"layers\""), {Q0}, "layers_pattern"},
    {ONE("\"layers_pattern\":\"layers\""), {Q0}, "layers_pattern: wanted layers_to_transform"},
    {ONE("\"layers_to_transform\":[\"a\"]"), {Q0}, "layers_to_transform"},
    {CONFIG("\".*norm\""), {Q0}, "model.layers.0.input_layernorm, which is neither"},
    /* names of tensors */
    {CONFIG("[\"q_proj\"]"), {{NULL, 0, 0}}, "no tensors"},
    {CONFIG("[\"q_proj\"]"),
     {PAIR("language_model.model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN, 2)},
     "none of the 2 tensors belongs to a module of this model; tensors: "
     "language_model.model.layers.0"},
    {CONFIG("[\"q_proj\"]"),
     {Q0, Q1, {L1 "self_attn.q_porj.lora_A.weight", 2, HIDDEN}},
     "1 of 5 tensors belong to no module of this model: " L1
     "self_attn.q_porj.lora_A.weight; modules: embed_tokens, q_proj, k_proj, "},
    {CONFIG("[\"q_proj\"]"),
     {Q0, Q1, {"model.layers.2.self_attn.q_proj.lora_A.weight", 2, HIDDEN}},
     ", lm_head (model.layers.0.self_attn.q_proj to model.layers.1."},
    {CONFIG("[\"q_proj\"]"), {Q0, {L0 "self_attn.q_proj.lora_C.weight", 2, HIDDEN}}, "lora_C"},
    {CONFIG("[\"q_proj\"]"),
     {Q0, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", 2, HIDDEN}},
     "mean the same part of module " Q0_PATH},
    {ONE("\"use_dora\":false"),
     {Q0, {L0 "self_attn.q_proj.lora_magnitude_vector", HIDDEN, 1}},
     "lora_magnitude_vector belongs to DoRA"},
    {ONE("\"use_dora\":false"),
     {Q0, {L0 "self_attn.q_proj.lora_magnitude_vector.default.weight", HIDDEN, 1}},
     "belongs to DoRA"},
    {ONE("\"bias\":\"none\""),
     {Q0, {L0 "self_attn.q_proj.base_layer.bias", HIDDEN, 1}},
     "q_proj.base_layer.bias is a bias"},
    {ONE("\"bias\":\"none\""),
     {Q0, {L0 "self_attn.q_proj.lora_B.bias", HIDDEN, 1}},
     "q_proj.lora_B.bias is a bias"},
    {CONFIG("[\"embed_tokens\"]"),
     {PAIR("model.embed_tokens", HIDDEN, VOCAB, 2)},
     "model.embed_tokens is an embedding"},
    {ONE("\"bias\":\"none\""),
     {{L0 "self_attn.q_proj.lora_embedding_A", 2, HIDDEN}},
     "is not an embedding"},
    /* config against tensors */
    {CONFIG("[\"q_proj\"]"),
     {Q0},
     "missing: model.layers.1.self_attn.q_proj.lora_A, model.layers.1.self_attn.q_proj.lora_B"},
    {CONFIG("[\"" Q0_PATH "\"]"),
     {Q0, Q1},
     "2 tensors are for modules that the config does not name"},
    {CONFIG_AND("[\"q_proj\"]", "\"exclude_modules\":\".*1.*\""), {Q0, Q1}, "exclude_modules"},
    {CONFIG("[\"q_proj\",\"k_proj\",\"v_proj\"]"),
     {PAIR(L0 "self_attn.qkv_proj", 8, HIDDEN, 2)},
     "qkv_proj.lora_A.weight"},
    {CONFIG("[\"mamba\"]"),
     {EMBED_FULL},
     "names no module of this model; modules: embed_tokens, q_proj, "},
    /* whole weights */
    {ONE("\"modules_to_save\":[\"o_proj\"]"),
     {Q0},
     "modules_to_save: trained weights of model.layers.0.self_attn.o_proj"},
    {ONE("\"modules_to_save\":[\"norm\"]"),
     {Q0},
     "modules_to_save: trained weights of model.layers.0.input_layernorm"},
    {ONE("\"modules_to_save\":[\"lm_head\"]"),
     {Q0},
     "modules_to_save: names lm_head, whose weight is missing"},
    {ONE("\"modules_to_save\":[\"lm_head\"]"),
     {Q0, HEAD_FULL},
     "lm_head.base_layer.weight is a whole weight that is not the base's"},
    {ONE("\"bias\":\"none\""),
     {Q0, EMBED_FULL},
     "embed_tokens.weight is a whole weight that is not the base's"},
    {ONE("\"bias\":\"none\""),
     {Q0, {L0 "self_attn.o_proj.weight", HIDDEN, HIDDEN}},
     "o_proj.weight is a whole weight"},
    {ONE("\"bias\":\"none\""),
     {Q0, {"base_model.model.lm_head.weight", VOCAB + 8, HIDDEN}},
     "came [24, 4]"},
    /* shapes */
    {ONE("\"bias\":\"none\""),
     {PAIR(L0 "self_attn.q_proj", HIDDEN, HIDDEN, 3)},
     "lora_A.weight: wanted [rank, in] [2, 4], came [3, 4]; the config says r=2"},
    {ONE("\"bias\":\"none\""),
     {PAIR(L0 "self_attn.q_proj", HIDDEN, HIDDEN + 4, 2)},
     "came [2, 8]; was it trained for another base model?"},
    {ONE("\"bias\":\"none\""),
     {PAIR(L0 "self_attn.q_proj", HIDDEN + 1, HIDDEN, 2)},
     "lora_B.weight: wanted [out, rank] [4, 2], came [5, 2]; was it"},
    {ONE("\"rank_pattern\":{\"q_proj\":3}"),
     {Q0},
     "lora_A.weight: wanted [rank, in] [3, 4], came [2, 4]; its rank_pattern says 3"},
    {CONFIG("[\"embed_tokens\"]"),
     {{"model.embed_tokens.lora_embedding_A", VOCAB, 2},
      {"model.embed_tokens.lora_embedding_B", HIDDEN, 2}},
     "wanted [rank, in] [2, 16]"},
};

static void what_does_not_fit_is_refused_by_name(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        hr_peft peft = {0};
        hr_error err = {0};
        assert_refused(resolve(refused[i].config, refused[i].tensors, false, &peft, &err), &err,
                       refused[i].names);
        assert_null(peft.modules);
    }
}

/* The closed list itself: each refused field is refused when it is set, and passes as null or its
 * default. */
static void every_refused_field_is_refused_when_set(void **state) {
    (void)state;
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    for (size_t i = 0; i < hr_n_peft_fields; i++) {
        const hr_peft_field *field = &hr_peft_fields[i];
        char config[512], standard[256];
        hr_peft peft = {0};
        hr_error err = {0};
        snprintf(config, sizeof config, ONE("\"%s\":{\"set\":1}"), field->name);
        hr_status status = resolve(config, specs, false, &peft, &err);
        if (field->field_class == HR_PEFT_REFUSED)
            assert_refused(status, &err, field->name);
        if (field->field_class == HR_PEFT_IRRELEVANT)
            assert_ok(status, &err);
        hr_peft_close(&peft);
        snprintf(standard, sizeof standard, "\"%s\":%s", field->name,
                 field->default_json ? field->default_json : "null");
        if (field->field_class == HR_PEFT_HANDLED)
            continue;
        snprintf(config, sizeof config, ONE("%s"), standard);
        assert_ok(resolve(config, specs, false, &peft, &err), &err);
        hr_peft_close(&peft);
    }
}

static void types_that_are_not_weights_are_refused(void **state) {
    (void)state;
    const char *config = CONFIG("[\"" Q0_PATH "\"]");
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    for (int type = 0; type < HR_DTYPE_COUNT; type++) {
        hr_tensor tensors[2];
        hr_peft peft = {0};
        hr_error err = {0};
        make_tensors(specs, tensors);
        memset(numbers, 0, sizeof numbers);
        tensors[1].dtype = (hr_dtype)type;
        tensors[1].bytes = 8 * hr_dtype_size((hr_dtype)type);
        hr_status status = hr_peft_resolve(config, strlen(config), tensors, 2, modules, N_MODULES,
                                           NULL, &peft, &err);
        if (hr_dtype_is_weight((hr_dtype)type))
            assert_ok(status, &err);
        else
            assert_refused(status, &err, hr_dtype_name((hr_dtype)type));
        hr_peft_close(&peft);
    }
}

static void values_that_are_not_finite_as_computed_with_are_refused(void **state) {
    (void)state;
    const char *config = CONFIG("[\"" Q0_PATH "\"]");
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    const float bad[] = {INFINITY, -INFINITY, NAN, 3.4e38f};
    for (size_t i = 0; i < 8; i++) {
        float data[8] = {0};
        hr_tensor tensors[2];
        hr_peft peft = {0};
        hr_error err = {0};
        make_tensors(specs, tensors);
        data[i % 3] = bad[i % 4];
        tensors[i / 4].data = data;
        assert_ok(hr_peft_resolve(config, strlen(config), tensors, 2, modules, N_MODULES, NULL,
                                  &peft, &err),
                  &err);
        assert_refused(hr_peft_check_values(&peft.modules[0], HR_DTYPE_BF16, &err), &err,
                       i < 4 ? "q_proj.lora_A.weight: 1 of" : "q_proj.lora_B.weight: 1 of");
        assert_int_equal(err.status, HR_ERR_VALUE);
        if (i % 4 == 3)
            assert_ok(hr_peft_check_values(&peft.modules[0], HR_DTYPE_F32, &err), &err);
        hr_peft_close(&peft);
    }
}

/* ---- directories ---- */

static void save_adapter(const char *dir) {
    const tensor_spec specs[] = {Q0, {NULL, 0, 0}};
    hr_tensor tensors[2];
    hr_error err = {0};
    size_t n = make_tensors(specs, tensors);
    assert_ok(hr_safetensors_save(path_in(dir, "adapter_model.safetensors"), tensors, n, &err),
              &err);
}

static void a_directory_has_a_config_and_tensors(void **state) {
    (void)state;
    const char *config = CONFIG("[\"" Q0_PATH "\"]"), *dir = new_dir();
    hr_peft peft = {0};
    hr_error err = {0};
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err,
                   "adapter_config.json");
    assert_int_equal(err.status, HR_ERR_NOT_FOUND);
    write_file(dir, "adapter_config.json", config, strlen(config));
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err,
                   "adapter_model.safetensors");
    write_file(dir, "adapter_model.bin", "x", 1);
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err,
                   "adapter_model.bin: pickled");
    save_adapter(dir);
    assert_ok(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err);
    assert_int_equal(peft.n_modules, 1);
    hr_peft_close(&peft);
    write_file(dir, "adapter_config.json", "{}", 2);
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err, dir);
    remove_dir(dir, (const char *const[]){"adapter_config.json", "adapter_model.bin",
                                          "adapter_model.safetensors", NULL});
}

static void only_tokens_beyond_the_vocabulary_are_new(void **state) {
    (void)state;
    const char *config = CONFIG("[\"" Q0_PATH "\"]"), *dir = new_dir();
    hr_peft peft = {0};
    hr_error err = {0};
    write_file(dir, "adapter_config.json", config, strlen(config));
    save_adapter(dir);
    write_file(dir, "added_tokens.json", "{\"<a>\":0,\"<b>\":15}", 18);
    assert_ok(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err);
    hr_peft_close(&peft);
    write_file(dir, "added_tokens.json", "{\"<a>\":0,\"<b>\":16}", 18);
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err,
                   "token <b> has id 16");
    write_file(dir, "added_tokens.json", "{\"<a>\":\"0\"}", 11);
    assert_refused(hr_peft_open(dir, modules, N_MODULES, NULL, &peft, &err), &err,
                   "added_tokens.json");
    remove_dir(dir, (const char *const[]){"adapter_config.json", "added_tokens.json",
                                          "adapter_model.safetensors", NULL});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_adapter_resolves_to_modules_ranks_and_scales),
        cmocka_unit_test(a_fused_adapter_shares_a_and_slices_b),
        cmocka_unit_test(all_linear_means_every_linear_layer_but_the_head),
        cmocka_unit_test(a_pattern_that_applies_nowhere_is_a_warning),
        cmocka_unit_test(an_all_zero_b_is_accepted),
        cmocka_unit_test(what_does_not_fit_is_refused_by_name),
        cmocka_unit_test(every_refused_field_is_refused_when_set),
        cmocka_unit_test(types_that_are_not_weights_are_refused),
        cmocka_unit_test(values_that_are_not_finite_as_computed_with_are_refused),
        cmocka_unit_test(a_directory_has_a_config_and_tensors),
        cmocka_unit_test(only_tokens_beyond_the_vocabulary_are_new),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
