/* Reading weights of a loaded model: values and digests are those of the checkpoint's tensors in
 * the compute dtype, the checker's snapshot names what differs, and a publish never mixes one
 * tensor. */
#include "base/machine.h"
#include "format/checkpoint.h"
#include "model/base_update.h"
#include "model/layout.h"
#include "random_model.h"
#include "tensor/convert.h"
#include "tensor/digest.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static const random_kind biased = {"LlamaForCausalLM", .bias = true, .dtype = HR_DTYPE_F32};
static const random_kind tied = {"Qwen3ForCausalLM", .tied = true, .dtype = HR_DTYPE_F16};

static char dir[] = "/tmp/headrace-values-XXXXXX";
static char biased_dir[2][64], tied_dir[64];
static hr_pool *pool;

static hr_model *load(const char *path, const char *dtype) {
    hr_model *model = NULL;
    hr_model_options options = {.dir = path, .dtype = dtype, .pool = pool};
    assert_int_equal(hr_model_load(&options, &model, NULL), HR_OK);
    return model;
}

static hr_checkpoint *open_checkpoint(const char *path) {
    hr_checkpoint *checkpoint = NULL;
    assert_int_equal(hr_checkpoint_open(path, &checkpoint, NULL), HR_OK);
    return checkpoint;
}

/* Element i of a tensor, rounded to the dtype. */
static float element(const hr_tensor *tensor, size_t i, hr_dtype dtype) {
    float rounded, out;
    const char *from = (const char *)tensor->data + i * hr_dtype_size(tensor->dtype);
    assert_int_equal(hr_convert(&rounded, dtype, from, tensor->dtype, 1, NULL), HR_OK);
    assert_int_equal(hr_convert(&out, HR_DTYPE_F32, &rounded, dtype, 1, NULL), HR_OK);
    return out;
}

typedef struct values {
    float *at;
    size_t rows, columns;
    bool is_vector;
} values;

static values read_values(const hr_model *model, const char *name, size_t rows) {
    values v = {0};
    hr_error err = {0};
    if (hr_model_weight_values(model, name, rows, &v.at, &v.rows, &v.columns, &v.is_vector, &err) !=
        HR_OK)
        fail_msg("%s", err.message);
    return v;
}

/* ---- values ---- */

static void values_are_those_of_the_checkpoint(void **state) {
    (void)state;
    for (int f32 = 0; f32 < 2; f32++) {
        hr_model *model = load(biased_dir[0], f32 ? "float32" : "bfloat16");
        hr_checkpoint *checkpoint = open_checkpoint(biased_dir[0]);
        for (size_t t = 0; t < model->places.n; t++) {
            const hr_place *place = &model->places.items[t];
            const hr_tensor *tensor = hr_checkpoint_find(checkpoint, place->name);
            hr_dtype dtype = f32 || tensor->ndim == 1 ? HR_DTYPE_F32 : HR_DTYPE_BF16;
            values v = read_values(model, place->name, 1000);
            assert_int_equal(v.is_vector, tensor->ndim == 1);
            assert_int_equal(v.rows, v.is_vector ? 1 : tensor->shape[0]);
            assert_int_equal(v.columns, tensor->shape[tensor->ndim - 1]);
            for (size_t i = 0; i < v.rows * v.columns; i++)
                assert_true(v.at[i] == element(tensor, i, dtype));
            free(v.at);
        }
        hr_checkpoint_close(checkpoint);
        hr_model_destroy(model);
    }
}

static void values_can_be_cut_and_fused(void **state) {
    (void)state;
    hr_model *model = load(biased_dir[0], NULL);
    values v = read_values(model, "model.layers.1.self_attn.qkv_proj.weight", 45);
    values q = read_values(model, "model.layers.1.self_attn.q_proj.weight", 1000);
    values k = read_values(model, "model.layers.1.self_attn.k_proj.weight", 1000);
    values part = read_values(model, "model.layers.1.self_attn.v_proj.weight", 5);
    assert_int_equal(v.rows, 45); /* 30 of q, 10 of k, 5 of v */
    size_t n = v.columns;
    assert_memory_equal(v.at, q.at, 30 * n * sizeof(float));
    assert_memory_equal(v.at + 30 * n, k.at, 10 * n * sizeof(float));
    assert_memory_equal(v.at + 40 * n, part.at, 5 * n * sizeof(float));
    values bias = read_values(model, "model.layers.0.self_attn.qkv_proj.bias", 3);
    assert_true(bias.is_vector);
    assert_int_equal(bias.rows, 1);
    assert_int_equal(bias.columns, 50); /* whole */
    values *all[] = {&v, &q, &k, &part, &bias};
    for (size_t i = 0; i < 5; i++)
        free(all[i]->at);
    hr_model_destroy(model);
}

static void a_tied_head_reads_as_the_embedding(void **state) {
    (void)state;
    hr_model *model = load(tied_dir, NULL);
    values head = read_values(model, "lm_head.weight", 1000);
    values embed = read_values(model, "model.embed_tokens.weight", 1000);
    assert_int_equal(head.rows, 101);
    assert_memory_equal(head.at, embed.at, head.rows * head.columns * sizeof(float));
    free(head.at);
    free(embed.at);
    hr_model_destroy(model);
}

static void unknown_names_are_refused(void **state) {
    (void)state;
    hr_model *model = load(biased_dir[0], NULL);
    static const char *const names[] = {"", "lm_head", "model.layers.2.mlp.up_proj.weight",
                                        "model.layers.0.mlp.gate_up_proj.bias",
                                        "model.layers.0.self_attn.rotary_emb.inv_freq"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        values v = {0};
        hr_error err = {0};
        assert_int_equal(hr_model_weight_values(model, names[i], 1, &v.at, &v.rows, &v.columns,
                                                &v.is_vector, &err),
                         HR_ERR_NOT_FOUND);
        assert_non_null(strstr(err.message, names[i]));
        assert_null(v.at);
    }
    hr_model_destroy(model);
}

/* ---- digests ---- */

typedef struct digest_check {
    const hr_model *model;
    const hr_checkpoint *checkpoint;
    size_t n, wrong;
    const hr_checkpoint *other; /* a tensor may be of this one instead */
} digest_check;

static void digest_of(const hr_tensor *tensor, hr_dtype dtype, uint8_t out[16]) {
    size_t n = hr_tensor_elements(tensor);
    char *converted = malloc(n * hr_dtype_size(dtype));
    hr_convert(converted, dtype, tensor->data, tensor->dtype, n, NULL);
    hr_xxh3(converted, n * hr_dtype_size(dtype), out);
    free(converted);
}

static void check_digest(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                         uint32_t ndim, const uint8_t xxh3[16]) {
    digest_check *check = ctx;
    uint8_t want[16];
    const hr_tensor *tensor = hr_checkpoint_find(check->checkpoint, name);
    assert_non_null(tensor);
    assert_string_equal(name, check->model->places.items[check->n++].name);
    assert_int_equal(ndim, tensor->ndim);
    assert_memory_equal(shape, tensor->shape, ndim * sizeof *shape);
    assert_int_equal(dtype,
                     ndim == 1 ? HR_DTYPE_F32 : hr_compute_dtype(check->model->info.compute));
    digest_of(tensor, dtype, want);
    bool equal = memcmp(want, xxh3, sizeof want) == 0;
    if (!equal && check->other != NULL) {
        digest_of(hr_checkpoint_find(check->other, name), dtype, want);
        equal = memcmp(want, xxh3, sizeof want) == 0;
    }
    check->wrong += !equal;
}

static void digests_are_those_of_the_converted_tensors(void **state) {
    (void)state;
    const char *const dirs[] = {biased_dir[0], tied_dir};
    for (int i = 0; i < 4; i++) {
        hr_model *model = load(dirs[i / 2], i % 2 ? "float32" : "bfloat16");
        hr_checkpoint *checkpoint = open_checkpoint(dirs[i / 2]);
        digest_check check = {.model = model, .checkpoint = checkpoint};
        assert_int_equal(hr_model_weight_digests(model, check_digest, &check, NULL), HR_OK);
        assert_int_equal(check.n, hr_checkpoint_count(checkpoint));
        assert_int_equal(check.wrong, 0);
        hr_checkpoint_close(checkpoint);
        hr_model_destroy(model);
    }
}

/* ---- readers beside an update ---- */

typedef struct flipping {
    hr_model *model;
    hr_tensor tensors[2][64];
    size_t n;
    bool shadow, failed;
    atomic_bool done;
} flipping;

static void *flip(void *arg) {
    flipping *f = arg;
    for (int round = 0; round < 60; round++) {
        hr_base_update *update = NULL;
        bool ok = hr_base_update_begin(f->model, f->shadow, &update, NULL) == HR_OK &&
                  hr_base_update_write(update, f->tensors[round % 2], f->n, NULL) == HR_OK &&
                  hr_base_update_seal(update, true, NULL) == HR_OK;
        f->failed = f->failed || !ok;
        if (!ok)
            hr_base_update_abandon(update);
        else
            hr_base_update_publish(update);
    }
    return NULL;
}

static void each_tensor_that_is_read_is_of_one_version(void **state) {
    (void)state;
    for (int shadow = 0; shadow < 2; shadow++) {
        hr_checkpoint *checkpoints[] = {open_checkpoint(biased_dir[0]),
                                        open_checkpoint(biased_dir[1])};
        flipping f = {.model = load(biased_dir[0], NULL), .shadow = shadow};
        f.n = f.model->places.n;
        for (size_t i = 0; i < f.n; i++)
            for (int side = 0; side < 2; side++)
                f.tensors[side][i] =
                    *hr_checkpoint_find(checkpoints[1 - side], f.model->places.items[i].name);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, flip, &f), 0);
        for (int round = 0; round < 60; round++) {
            digest_check check = {
                .model = f.model, .checkpoint = checkpoints[0], .other = checkpoints[1]};
            assert_int_equal(hr_model_weight_digests(f.model, check_digest, &check, NULL), HR_OK);
            assert_int_equal(check.wrong, 0);
        }
        pthread_join(thread, NULL);
        assert_false(f.failed);
        hr_model_destroy(f.model);
        hr_checkpoint_close(checkpoints[0]);
        hr_checkpoint_close(checkpoints[1]);
    }
}

static void *publish_all(void *arg) {
    flipping *f = arg;
    hr_base_update *update = NULL;
    f->failed = hr_base_update_begin(f->model, true, &update, NULL) != HR_OK ||
                hr_base_update_write(update, f->tensors[0], f->n, NULL) != HR_OK ||
                hr_base_update_seal(update, true, NULL) != HR_OK;
    if (f->failed)
        hr_base_update_abandon(update);
    else
        hr_base_update_publish(update);
    atomic_store(&f->done, true);
    return NULL;
}

static void a_publish_waits_for_no_reader_but_the_next_update_does(void **state) {
    (void)state;
    hr_checkpoint *checkpoint = open_checkpoint(biased_dir[1]);
    hr_model *old = load(biased_dir[0], NULL), *new = load(biased_dir[1], NULL);
    flipping f = {.model = load(biased_dir[0], NULL)};
    f.n = f.model->places.n;
    for (size_t i = 0; i < f.n; i++)
        f.tensors[0][i] = *hr_checkpoint_find(checkpoint, f.model->places.items[i].name);
    hr_reading reading;
    assert_int_equal(hr_guard_enter(f.model->guard, &f.model->arena, &reading, NULL), HR_OK);
    publish_all(&f);
    assert_false(f.failed);
    assert_memory_equal(f.model->arena, new->arena, new->arena_bytes);
    assert_memory_equal(reading.memory, old->arena, old->arena_bytes);

    pthread_t thread;
    atomic_store(&f.done, false);
    assert_int_equal(pthread_create(&thread, NULL, publish_all, &f), 0);
    usleep(50000);
    assert_false(atomic_load(&f.done)); /* it would write what is being read */
    assert_memory_equal(reading.memory, old->arena, old->arena_bytes);
    hr_guard_leave(f.model->guard, &reading);
    pthread_join(thread, NULL);
    assert_false(f.failed);
    hr_model_destroy(f.model);
    hr_model_destroy(old);
    hr_model_destroy(new);
    hr_checkpoint_close(checkpoint);
}

/* ---- the weights checker ---- */

static void update_one(hr_model *model, const hr_tensor *tensor, bool shadow) {
    hr_base_update *update = NULL;
    assert_int_equal(hr_base_update_begin(model, shadow, &update, NULL), HR_OK);
    assert_int_equal(hr_base_update_write(update, tensor, 1, NULL), HR_OK);
    assert_int_equal(hr_base_update_seal(update, false, NULL), HR_OK);
    hr_base_update_publish(update);
}

/* Compares until there is a snapshot. */
static void *compare_with_the_first(void *arg) {
    static bool equal;
    char name[160];
    double most;
    hr_status status = HR_ERR_NOT_FOUND;
    equal = false;
    while (status == HR_ERR_NOT_FOUND)
        status = hr_model_compare_snapshot(arg, name, &most, &equal, NULL);
    return status == HR_OK && equal ? &equal : NULL;
}

static void who_compares_meets_no_snapshot_or_a_whole_one(void **state) {
    (void)state;
    hr_model *model = load(biased_dir[0], "float32");
    for (int round = 0; round < 60; round++) {
        pthread_t thread;
        void *whole;
        assert_int_equal(pthread_create(&thread, NULL, compare_with_the_first, model), 0);
        usleep(1000); /* it has begun to ask */
        assert_int_equal(hr_model_snapshot(model, NULL), HR_OK);
        assert_int_equal(pthread_join(thread, &whole), 0);
        assert_non_null(whole);
        hr_pages_free(model->snapshot, model->arena_bytes);
        model->snapshot = NULL;
    }
    hr_model_destroy(model);
}

static void a_snapshot_tells_what_differs_by_its_fused_name(void **state) {
    (void)state;
    hr_model *model = load(biased_dir[0], "float32");
    hr_checkpoint *old = open_checkpoint(biased_dir[0]), *new = open_checkpoint(biased_dir[1]);
    char name[160];
    double most = 0;
    bool equal = false;
    hr_error err = {0};
    assert_int_equal(hr_model_compare_snapshot(model, name, &most, &equal, &err), HR_ERR_NOT_FOUND);
    assert_int_equal(hr_model_snapshot(model, &err), HR_OK);
    assert_int_equal(hr_model_compare_snapshot(model, name, &most, &equal, &err), HR_OK);
    assert_true(equal);
    assert_string_equal(name, "");

    static const char *const changed[][2] = {
        {"model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"},
        {"model.layers.0.self_attn.v_proj.bias", "model.layers.0.self_attn.qkv_proj.bias"},
        {"model.norm.weight", "model.norm.weight"},
        {"lm_head.weight", "lm_head.weight"},
    };
    for (size_t i = 0; i < sizeof changed / sizeof changed[0]; i++) {
        const hr_tensor *was = hr_checkpoint_find(old, changed[i][0]);
        const hr_tensor *is = hr_checkpoint_find(new, changed[i][0]);
        double want = 0;
        for (size_t e = 0; e < hr_tensor_elements(was); e++)
            want = fmax(want, fabs((double)element(was, e, HR_DTYPE_F32) -
                                   (double)element(is, e, HR_DTYPE_F32)));
        update_one(model, is, i % 2);
        assert_int_equal(hr_model_compare_snapshot(model, name, &most, &equal, &err), HR_OK);
        assert_false(equal);
        assert_string_equal(name, changed[i][1]);
        assert_true(most == want && want > 0);
        update_one(model, was, i / 2 % 2);
        assert_int_equal(hr_model_compare_snapshot(model, name, &most, &equal, &err), HR_OK);
        assert_true(equal);
    }
    hr_checkpoint_close(old);
    hr_checkpoint_close(new);
    hr_model_destroy(model);
}

static void random_weights_differ_everywhere_and_an_update_heals_them(void **state) {
    (void)state;
    hr_model *model = load(biased_dir[0], NULL), *reference = load(biased_dir[0], NULL);
    hr_checkpoint *checkpoint = open_checkpoint(biased_dir[0]);
    update_one(model, hr_checkpoint_at(checkpoint, 0), true); /* so that there is a shadow */
    assert_int_equal(hr_model_randomize(model, 7, NULL), HR_OK);
    for (size_t i = 0; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        assert_memory_not_equal(model->arena + place->at, reference->arena + place->at,
                                place->bytes);
        values v = read_values(model, place->name, 1000);
        for (size_t e = 0; e < v.rows * v.columns; e++)
            assert_true(fabsf(v.at[e]) <= 1.0f / 32);
        free(v.at);
    }
    /* An update of one tensor through the shadow must not bring back what the shadow held. */
    assert_int_equal(hr_model_snapshot(model, NULL), HR_OK);
    const hr_place *first = &model->places.items[0];
    update_one(model, hr_checkpoint_find(checkpoint, first->name), true);
    for (size_t i = 1; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        assert_memory_equal(model->arena + place->at, model->snapshot + place->at, place->bytes);
    }
    /* Padding stayed zero, or this would see it. */
    for (size_t i = 0; i < model->places.n; i++)
        update_one(model, hr_checkpoint_at(checkpoint, i), i % 2);
    assert_memory_equal(model->arena, reference->arena, model->arena_bytes);
    hr_checkpoint_close(checkpoint);
    hr_model_destroy(model);
    hr_model_destroy(reference);
}

static int set_up(void **state) {
    (void)state;
    for (int seed = 0; seed < 2; seed++) {
        snprintf(biased_dir[seed], sizeof biased_dir[seed], "%s/biased-%d", dir, seed);
        random_model_write(biased_dir[seed], &biased, (uint64_t)seed + 1);
    }
    snprintf(tied_dir, sizeof tied_dir, "%s/tied", dir);
    random_model_write(tied_dir, &tied, 3);
    return hr_pool_create(1, &pool, NULL) == HR_OK ? 0 : 1;
}

static int tear_down(void **state) {
    (void)state;
    hr_pool_destroy(pool);
    random_model_remove(biased_dir[0]);
    random_model_remove(biased_dir[1]);
    random_model_remove(tied_dir);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_those_of_the_checkpoint),
        cmocka_unit_test(values_can_be_cut_and_fused),
        cmocka_unit_test(a_tied_head_reads_as_the_embedding),
        cmocka_unit_test(unknown_names_are_refused),
        cmocka_unit_test(digests_are_those_of_the_converted_tensors),
        cmocka_unit_test(each_tensor_that_is_read_is_of_one_version),
        cmocka_unit_test(a_publish_waits_for_no_reader_but_the_next_update_does),
        cmocka_unit_test(a_snapshot_tells_what_differs_by_its_fused_name),
        cmocka_unit_test(who_compares_meets_no_snapshot_or_a_whole_one),
        cmocka_unit_test(random_weights_differ_everywhere_and_an_update_heals_them),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    int rc = cmocka_run_group_tests(tests, set_up, tear_down);
    rmdir(dir);
    return rc;
}
