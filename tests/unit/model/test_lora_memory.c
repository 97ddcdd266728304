/* Adapters from a config and tensors in memory: packed as those of a directory are, digested as
 * their file's tensors are, and refused for the same reasons. */
#include "format/checkpoint.h"
#include "format/safetensors.h"
#include "model/adapter.h"
#include "model/base_update.h"
#include "random_model.h"
#include "tensor/convert.h"
#include "tensor/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static const random_kind kind = {"Qwen3ForCausalLM", .dtype = HR_DTYPE_BF16};
static char dir[] = "/tmp/headrace-lora-XXXXXX";
static char model_dir[64], adapter_dir[64];
static hr_pool *pool;

static const char config[] =
    "{\"peft_type\": \"LORA\", \"r\": 5, \"lora_alpha\": 10, \"rank_pattern\": {\"down_proj\": 18},"
    " \"target_modules\": [\"q_proj\", \"v_proj\", \"down_proj\", \"embed_tokens\", \"lm_head\"]}";

enum { MAX_TENSORS = 32, RANK = 5, DOWN_RANK = 18 };

typedef struct adapter {
    hr_tensor tensors[MAX_TENSORS];
    char names[MAX_TENSORS][160];
    void *data[MAX_TENSORS];
    size_t n;
} adapter;

static void add(adapter *to, const char *name, hr_dtype dtype, size_t rows, size_t columns) {
    size_t elements = rows * columns, i = to->n++;
    char *data = malloc(elements * hr_dtype_size(dtype));
    for (size_t e = 0; e < elements; e++) {
        float x = (float)((e * 7 + i * 13) % 101) / 256 - 0.2f;
        uint16_t half = hr_f32_to_bf16(x);
        if (dtype == HR_DTYPE_F32)
            memcpy(data + e * sizeof x, &x, sizeof x);
        else
            memcpy(data + e * sizeof half, &half, sizeof half);
    }
    snprintf(to->names[i], sizeof to->names[i], "base_model.model.%s", name);
    to->data[i] = data;
    to->tensors[i] = (hr_tensor){.name = to->names[i],
                                 .dtype = dtype,
                                 .ndim = 2,
                                 .shape = {rows, columns},
                                 .data = data,
                                 .bytes = elements * hr_dtype_size(dtype)};
}

static void add_pair(adapter *to, const char *module, size_t rank, size_t out, size_t in) {
    char name[160];
    snprintf(name, sizeof name, "%s.lora_A.weight", module);
    add(to, name, HR_DTYPE_F32, rank, in);
    snprintf(name, sizeof name, "%s.lora_B.weight", module);
    add(to, name, HR_DTYPE_BF16, out, rank);
}

static void make_adapter(adapter *to) {
    *to = (adapter){.n = 0};
    for (int layer = 0; layer < 2; layer++) {
        char module[120];
        snprintf(module, sizeof module, "model.layers.%d.self_attn.q_proj", layer);
        add_pair(to, module, RANK, 30, 40);
        snprintf(module, sizeof module, "model.layers.%d.self_attn.v_proj", layer);
        add_pair(to, module, RANK, 10, 40);
        snprintf(module, sizeof module, "model.layers.%d.mlp.down_proj", layer);
        add_pair(to, module, DOWN_RANK, 40, 56);
    }
    add(to, "model.embed_tokens.lora_embedding_A", HR_DTYPE_BF16, RANK, 101);
    add(to, "model.embed_tokens.lora_embedding_B", HR_DTYPE_F32, 40, RANK);
    add_pair(to, "lm_head", RANK, 101, 40);
}

static void free_adapter(adapter *a) {
    for (size_t i = 0; i < a->n; i++)
        free(a->data[i]);
}

static hr_model *load(const char *dtype) {
    hr_model *model = NULL;
    hr_model_options options = {.dir = model_dir, .dtype = dtype, .pool = pool};
    assert_int_equal(hr_model_load(&options, &model, NULL), HR_OK);
    return model;
}

static hr_lora *create(const hr_model *model, const adapter *from) {
    hr_lora *lora = NULL;
    hr_error err = {0};
    if (hr_lora_create(model, config, sizeof config - 1, from->tensors, from->n, &lora, &err) !=
        HR_OK)
        fail_msg("%s", err.message);
    return lora;
}

static void it_is_packed_as_from_a_directory(void **state) {
    (void)state;
    for (int f32 = 0; f32 < 2; f32++) {
        hr_model *model = load(f32 ? "float32" : "bfloat16");
        adapter from;
        make_adapter(&from);
        hr_lora *read = NULL, *made = create(model, &from);
        free_adapter(&from); /* tensors are read inside the call only */
        assert_int_equal(hr_lora_load(model, adapter_dir, &read, NULL), HR_OK);
        assert_int_equal(hr_lora_bytes(made), hr_lora_bytes(read));
        assert_memory_equal(made->arena, read->arena, read->arena_bytes);
        assert_int_equal(hr_lora_max_rank(made), DOWN_RANK);
        for (uint32_t i = 0; i < model->n_modules; i++) {
            const hr_lora_module *a = &made->modules[i], *b = &read->modules[i];
            assert_int_equal(a->a != NULL, b->a != NULL);
            assert_int_equal(a->rank, b->rank);
            assert_int_equal(a->n_leaves, b->n_leaves);
            assert_true(a->scale == b->scale);
        }
        hr_lora_destroy(made);
        hr_lora_destroy(read);
        hr_model_destroy(model);
    }
}

static void memory_that_served_another_gives_the_same_bytes(void **state) {
    (void)state;
    hr_model *model = load(NULL);
    adapter from;
    make_adapter(&from);
    hr_lora *kept = create(model, &from), *gone = create(model, &from);
    char *where = gone->arena;
    memset(gone->arena, 0xff, gone->pages_bytes);
    hr_lora_destroy(gone);
    hr_lora *again = create(model, &from);
    assert_ptr_equal(again->arena, where);
    assert_int_equal(again->arena_bytes, kept->arena_bytes);
    assert_memory_equal(again->arena, kept->arena, kept->arena_bytes);
    free_adapter(&from);
    hr_lora_destroy(kept);
    hr_model_destroy(model);
    hr_lora_destroy(again); /* memory outlives its model */
}

/* The largest rank makes an adapter of a tiny model large enough to be shared out. */
static void several_threads_pack_the_bytes_of_one(void **state) {
    (void)state;
    static const char large[] = "{\"peft_type\": \"LORA\", \"r\": 4096, \"target_modules\":"
                                " [\"q_proj\", \"o_proj\", \"down_proj\", \"lm_head\"]}";
    hr_model *model = load("float32");
    adapter from = {.n = 0};
    for (int layer = 0; layer < 2; layer++) {
        char module[120];
        snprintf(module, sizeof module, "model.layers.%d.self_attn.q_proj", layer);
        add_pair(&from, module, 4096, 30, 40);
        snprintf(module, sizeof module, "model.layers.%d.self_attn.o_proj", layer);
        add_pair(&from, module, 4096, 40, 30);
        snprintf(module, sizeof module, "model.layers.%d.mlp.down_proj", layer);
        add_pair(&from, module, 4096, 40, 56);
    }
    add_pair(&from, "lm_head", 4096, 101, 40);
    hr_lora *one = NULL, *several = NULL;
    model->packers = 1;
    assert_int_equal(
        hr_lora_create(model, large, sizeof large - 1, from.tensors, from.n, &one, NULL), HR_OK);
    for (unsigned packers = 2; packers < 6; packers++) {
        model->packers = packers;
        assert_int_equal(
            hr_lora_create(model, large, sizeof large - 1, from.tensors, from.n, &several, NULL),
            HR_OK);
        assert_true(several->arena_bytes > 8 << 20);
        assert_int_equal(several->arena_bytes, one->arena_bytes);
        assert_memory_equal(several->arena, one->arena, one->arena_bytes);
        hr_lora_destroy(several);
    }
    hr_lora_destroy(one);
    free_adapter(&from);
    hr_model_destroy(model);
}

typedef struct digest_check {
    const adapter *of;
    hr_dtype dtype;
    size_t n, n_scalings;
} digest_check;

static void check_digest(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                         uint32_t ndim, const uint8_t xxh3[16]) {
    digest_check *check = ctx;
    size_t i = 0;
    if (strstr(name, ".scaling") != NULL) {
        const float scaling = 10.0f / (strstr(name, "down_proj") != NULL ? DOWN_RANK : RANK);
        uint8_t of_scaling[16];
        hr_xxh3(&scaling, sizeof scaling, of_scaling);
        assert_int_equal(dtype, HR_DTYPE_F32);
        assert_int_equal(ndim, 0);
        assert_memory_equal(xxh3, of_scaling, sizeof of_scaling);
        check->n_scalings++;
        return;
    }
    while (i < check->of->n && strcmp(check->of->names[i] + strlen("base_model.model."), name) != 0)
        i++;
    assert_true(i < check->of->n);
    const hr_tensor *tensor = &check->of->tensors[i];
    size_t elements = hr_tensor_elements(tensor);
    uint8_t want[16];
    char *converted = malloc(elements * hr_dtype_size(dtype));
    assert_int_equal(dtype, check->dtype);
    assert_int_equal(ndim, 2);
    assert_memory_equal(shape, tensor->shape, 2 * sizeof *shape);
    assert_int_equal(hr_convert(converted, dtype, tensor->data, tensor->dtype, elements, NULL),
                     HR_OK);
    hr_xxh3(converted, elements * hr_dtype_size(dtype), want);
    assert_memory_equal(xxh3, want, sizeof want);
    free(converted);
    check->n++;
}

static void digests_are_those_of_the_converted_tensors(void **state) {
    (void)state;
    for (int f32 = 0; f32 < 2; f32++) {
        hr_model *model = load(f32 ? "float32" : "bfloat16");
        adapter from;
        make_adapter(&from);
        hr_lora *lora = create(model, &from);
        digest_check check = {&from, f32 ? HR_DTYPE_F32 : HR_DTYPE_BF16, 0, 0};
        assert_int_equal(hr_lora_digests(model, lora, check_digest, &check, NULL), HR_OK);
        assert_int_equal(check.n, from.n);
        assert_int_equal(check.n_scalings, from.n / 2);
        free_adapter(&from);
        hr_lora_destroy(lora);
        hr_model_destroy(model);
    }
}

static void bad_tensors_are_refused_by_name(void **state) {
    (void)state;
    hr_model *model = load(NULL);
    for (int way = 0; way < 3; way++) {
        adapter from;
        hr_error err = {0};
        hr_lora *lora = NULL;
        make_adapter(&from);
        hr_tensor *bad = &from.tensors[4];
        float nan = hr_f32_from_bits(0x7fc00000u);
        if (way == 0)
            bad->shape[0]++;
        if (way == 1)
            bad->dtype = HR_DTYPE_I32;
        if (way == 2)
            memcpy((char *)from.data[4] + bad->bytes - sizeof nan, &nan, sizeof nan);
        static const hr_status statuses[] = {HR_ERR_SHAPE, HR_ERR_DTYPE, HR_ERR_VALUE};
        assert_int_equal(
            hr_lora_create(model, config, sizeof config - 1, from.tensors, from.n, &lora, &err),
            statuses[way]);
        assert_non_null(strstr(err.message, bad->name));
        assert_null(lora);
        free_adapter(&from);
    }
    hr_model_destroy(model);
}

/* ---- weights of the base beside the pairs ---- */

static const char saving_config[] =
    "{\"peft_type\": \"LORA\", \"r\": 5, \"target_modules\": [\"q_proj\"],"
    " \"modules_to_save\": [\"embed_tokens\", \"lm_head\"]}";

static void a_whole_weight_must_equal_the_base_of_now(void **state) {
    (void)state;
    static const char *const names[] = {"model.embed_tokens.weight", "lm_head.weight"};
    hr_checkpoint *checkpoint = NULL;
    hr_model *model = load(NULL);
    adapter from = {.n = 0};
    hr_lora *lora = NULL;
    hr_error err = {0};
    assert_int_equal(hr_checkpoint_open(model_dir, &checkpoint, NULL), HR_OK);
    add_pair(&from, "model.layers.0.self_attn.q_proj", RANK, 30, 40);
    add_pair(&from, "model.layers.1.self_attn.q_proj", RANK, 30, 40);
    for (size_t i = 0; i < 2; i++)
        from.tensors[from.n + i] = *hr_checkpoint_find(checkpoint, names[i]);
    size_t n = from.n + 2, len = sizeof saving_config - 1;
    assert_int_equal(hr_lora_create(model, saving_config, len, from.tensors, n, &lora, &err),
                     HR_OK);
    hr_lora_destroy(lora);

    hr_tensor head = from.tensors[n - 1];
    char *changed = malloc(head.bytes);
    memcpy(changed, head.data, head.bytes);
    changed[head.bytes - 2] ^= 1; /* the last bit of the last value */
    head.data = changed;
    hr_base_update *update = NULL;
    assert_int_equal(hr_base_update_begin(model, true, &update, NULL), HR_OK);
    assert_int_equal(hr_base_update_write(update, &head, 1, NULL), HR_OK);
    assert_int_equal(hr_base_update_seal(update, false, NULL), HR_OK);
    hr_base_update_publish(update);
    assert_int_equal(hr_lora_create(model, saving_config, len, from.tensors, n, &lora, &err),
                     HR_ERR_ADAPTER_INCOMPATIBLE);
    assert_non_null(strstr(err.message, "lm_head.weight"));
    from.tensors[n - 1] = head;
    assert_int_equal(hr_lora_create(model, saving_config, len, from.tensors, n, &lora, &err),
                     HR_OK);
    hr_lora_destroy(lora);
    free(changed);
    free_adapter(&from);
    hr_checkpoint_close(checkpoint);
    hr_model_destroy(model);
}

/* ---- a config alone ---- */

static void expect_rank(const hr_model *model, const char *text, uint32_t rank) {
    uint32_t most = 0;
    hr_error err = {0};
    if (hr_lora_check_config(model, text, strlen(text), &most, &err) != HR_OK)
        fail_msg("%s: %s", text, err.message);
    assert_int_equal(most, rank);
}

static void the_largest_rank_of_a_config_is_told(void **state) {
    (void)state;
    hr_model *model = load(NULL);
    expect_rank(model, config, DOWN_RANK);
    expect_rank(model, "{\"peft_type\": \"LORA\", \"r\": 5, \"target_modules\": \"all-linear\"}",
                5);
    /* A pattern that hits no targeted module raises nothing; a fused name counts. */
    expect_rank(model,
                "{\"peft_type\": \"LORA\", \"r\": 5, \"rank_pattern\": {\"down_proj\": 64},"
                " \"target_modules\": [\"q_proj\"]}",
                5);
    expect_rank(model,
                "{\"peft_type\": \"LORA\", \"r\": 5, \"rank_pattern\": {\"qkv_proj\": 7},"
                " \"target_modules\": [\"qkv_proj\"]}",
                7);
    hr_model_destroy(model);
}

static void a_config_is_refused_as_with_its_tensors(void **state) {
    (void)state;
    static const char *const configs[] = {
        "{",
        "{\"peft_type\": \"LORA\", \"r\": 0, \"target_modules\": [\"q_proj\"]}",
        "{\"peft_type\": \"LORA\", \"r\": 5, \"use_dora\": true, \"target_modules\": [\"q_proj\"]}",
        "{\"peft_type\": \"LORA\", \"r\": 5, \"target_modules\": [\"input_layernorm\"]}",
    };
    hr_model *model = load(NULL);
    adapter from;
    make_adapter(&from);
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        hr_error alone = {0}, whole = {0};
        hr_lora *lora = NULL;
        uint32_t most = 77;
        size_t len = strlen(configs[i]);
        hr_status status = hr_lora_check_config(model, configs[i], len, &most, &alone);
        assert_int_equal(status, HR_ERR_ADAPTER_CONFIG);
        assert_int_equal(most, 77);
        assert_int_equal(
            hr_lora_create(model, configs[i], len, from.tensors, from.n, &lora, &whole), status);
        assert_string_equal(alone.message, whole.message);
    }
    free_adapter(&from);
    hr_model_destroy(model);
}

static void a_config_that_names_no_module_is_refused(void **state) {
    (void)state;
    static const char other[] =
        "{\"peft_type\": \"LORA\", \"r\": 5, \"target_modules\": [\"c_attn\"]}";
    hr_model *model = load(NULL);
    hr_error err = {0};
    uint32_t most = 77;
    assert_int_equal(hr_lora_check_config(model, other, sizeof other - 1, &most, &err),
                     HR_ERR_ADAPTER_CONFIG);
    assert_non_null(strstr(err.message, "names no module of this model"));
    assert_int_equal(most, 77);
    hr_model_destroy(model);
}

static int set_up(void **state) {
    (void)state;
    char path[128];
    adapter a;
    snprintf(model_dir, sizeof model_dir, "%s/model", dir);
    snprintf(adapter_dir, sizeof adapter_dir, "%s/adapter", dir);
    random_model_write(model_dir, &kind, 1);
    make_adapter(&a);
    snprintf(path, sizeof path, "%s/adapter_config.json", adapter_dir);
    if (mkdir(adapter_dir, 0700) != 0)
        return 1;
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(config, file) < 0 || fclose(file) != 0)
        return 1;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", adapter_dir);
    hr_status status = hr_safetensors_save(path, a.tensors, a.n, NULL);
    free_adapter(&a);
    return status == HR_OK && hr_pool_create(1, &pool, NULL) == HR_OK ? 0 : 1;
}

static int tear_down(void **state) {
    (void)state;
    static const char *const files[] = {"adapter_config.json", "adapter_model.safetensors", ""};
    hr_pool_destroy(pool);
    random_model_remove(model_dir);
    for (size_t i = 0; i < 3; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", adapter_dir, files[i]);
        remove(path);
    }
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_packed_as_from_a_directory),
        cmocka_unit_test(memory_that_served_another_gives_the_same_bytes),
        cmocka_unit_test(several_threads_pack_the_bytes_of_one),
        cmocka_unit_test(digests_are_those_of_the_converted_tensors),
        cmocka_unit_test(bad_tensors_are_refused_by_name),
        cmocka_unit_test(a_whole_weight_must_equal_the_base_of_now),
        cmocka_unit_test(the_largest_rank_of_a_config_is_told),
        cmocka_unit_test(a_config_is_refused_as_with_its_tensors),
        cmocka_unit_test(a_config_that_names_no_module_is_refused),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    int rc = cmocka_run_group_tests(tests, set_up, tear_down);
    rmdir(dir);
    return rc;
}
