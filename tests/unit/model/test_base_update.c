/* A base update writes into a loaded model what loading the new checkpoint would have made, bit for
 * bit over the whole arena, or leaves it as it was. */
#include "format/checkpoint.h"
#include "model/base_update.h"
#include "model/layout.h"
#include "random_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static const random_kind kinds[] = {
    {"LlamaForCausalLM", .tied = false, .bias = true, HR_DTYPE_BF16},
    {"Qwen2ForCausalLM", .tied = true, .bias = false, HR_DTYPE_F32},
    {"Qwen3ForCausalLM", .tied = false, .bias = false, HR_DTYPE_F16},
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0], BIASED = 0, TIED = 1, NORMED = 2 };
enum { MAX_TENSORS = 64 };

static char dir[] = "/tmp/headrace-update-XXXXXX";
static hr_pool *pool;

/* Two checkpoints of one model: old is live, new is what comes. */
typedef struct pair {
    hr_model *live, *old_loaded, *new_loaded;
    hr_checkpoint *checkpoint;      /* the new one */
    hr_tensor tensors[MAX_TENSORS]; /* its tensors, in layout order */
    size_t n;
} pair;

static const char *path_of(int kind, int seed) {
    static char path[2][64];
    snprintf(path[seed], sizeof path[seed], "%s/%d-%d", dir, kind, seed);
    return path[seed];
}

static hr_model *load(int kind, int seed, const char *dtype) {
    hr_model *model = NULL;
    hr_error err = {0};
    hr_model_options options = {.dir = path_of(kind, seed), .dtype = dtype, .pool = pool};
    assert_int_equal(hr_model_load(&options, &model, &err), HR_OK);
    return model;
}

static void open_pair(pair *p, int kind, const char *dtype) {
    *p = (pair){.live = load(kind, 0, dtype),
                .old_loaded = load(kind, 0, dtype),
                .new_loaded = load(kind, 1, dtype)};
    assert_int_equal(hr_checkpoint_open(path_of(kind, 1), &p->checkpoint, NULL), HR_OK);
    p->n = p->live->places.n;
    assert_true(p->n < MAX_TENSORS);
    for (size_t i = 0; i < p->n; i++)
        p->tensors[i] = *hr_checkpoint_find(p->checkpoint, p->live->places.items[i].name);
}

static void close_pair(pair *p) {
    hr_checkpoint_close(p->checkpoint);
    hr_model_destroy(p->live);
    hr_model_destroy(p->old_loaded);
    hr_model_destroy(p->new_loaded);
}

static hr_tensor *tensor_named(pair *p, const char *name) {
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->tensors[i].name, name) == 0)
            return &p->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void expect_weights(const hr_model *model, const hr_model *of) {
    assert_int_equal(model->arena_bytes, of->arena_bytes);
    assert_memory_equal(model->arena, of->arena, of->arena_bytes);
    const char *w = model->layers[1].down.w; /* what steps follow points into what was compared */
    assert_true(w > model->arena && w < model->arena + model->arena_bytes);
    assert_int_equal(w - model->arena, of->layers[1].down.w - of->arena);
    assert_int_equal(model->head.w - model->arena, of->head.w - of->arena);
    assert_int_equal((char *)model->final_norm - model->arena, (char *)of->final_norm - of->arena);
}

static hr_base_update *begin(hr_model *model, bool shadow) {
    hr_base_update *update = NULL;
    hr_error err = {0};
    assert_int_equal(hr_base_update_begin(model, shadow, &update, &err), HR_OK);
    return update;
}

static void write_ok(hr_base_update *update, const hr_tensor *tensors, size_t n) {
    hr_error err = {0};
    if (hr_base_update_write(update, tensors, n, &err) != HR_OK)
        fail_msg("%s", err.message);
}

static void publish(hr_base_update *update, bool complete) {
    hr_error err = {0};
    if (hr_base_update_seal(update, complete, &err) != HR_OK)
        fail_msg("%s", err.message);
    hr_base_update_publish(update);
}

static void update_all(hr_model *model, const hr_tensor *tensors, size_t n, bool shadow) {
    hr_base_update *update = begin(model, shadow);
    write_ok(update, tensors, n);
    publish(update, true);
}

/* ---- whole updates ---- */

static void an_update_of_all_tensors_makes_the_model_of_that_checkpoint(void **state) {
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int f32 = 0; f32 < 2; f32++)
            for (int shadow = 0; shadow < 2; shadow++) {
                pair p;
                open_pair(&p, kind, f32 ? "float32" : "bfloat16");
                assert_memory_not_equal(p.live->arena, p.new_loaded->arena, p.live->arena_bytes);
                update_all(p.live, p.tensors, p.n, shadow);
                expect_weights(p.live, p.new_loaded);
                close_pair(&p);
            }
}

static void the_order_and_number_of_calls_change_nothing(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    hr_base_update *update = begin(p.live, true);
    for (size_t i = p.n; i-- > 0;)
        write_ok(update, &p.tensors[i], 1);
    expect_weights(p.live, p.old_loaded); /* nothing shows before the publish */
    assert_int_equal(hr_base_update_seal(update, true, NULL), HR_OK);
    expect_weights(p.live, p.old_loaded);
    hr_base_update_publish(update);
    expect_weights(p.live, p.new_loaded);
    close_pair(&p);
}

static void bytes_need_no_alignment(void **state) {
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++) {
        pair p;
        open_pair(&p, kind, "bfloat16");
        hr_base_update *update = begin(p.live, true);
        for (size_t i = 0; i < p.n; i++) {
            char *odd = malloc(p.tensors[i].bytes + 1);
            memcpy(odd + 1, p.tensors[i].data, p.tensors[i].bytes);
            p.tensors[i].data = odd + 1;
            write_ok(update, &p.tensors[i], 1);
            free(odd); /* bytes are read inside the call only */
        }
        publish(update, true);
        expect_weights(p.live, p.new_loaded);
        close_pair(&p);
    }
}

static void a_missing_tensor_is_named_where_all_are_wanted(void **state) {
    (void)state;
    pair p;
    open_pair(&p, TIED, "bfloat16");
    for (size_t i = 0; i < p.n; i++) {
        hr_error err = {0};
        hr_base_update *update = begin(p.live, true);
        write_ok(update, p.tensors, i);
        write_ok(update, p.tensors + i + 1, p.n - i - 1);
        assert_int_equal(hr_base_update_seal(update, true, &err), HR_ERR_INVALID);
        assert_non_null(strstr(err.message, p.tensors[i].name));
        assert_true(hr_base_update_abandon(update));
        expect_weights(p.live, p.old_loaded);
    }
    close_pair(&p);
}

/* ---- partial updates ---- */

/* A model updated in place, tensor by tensor, says what must be there. */
static void any_sequence_of_partial_updates_equals_the_same_in_place(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    hr_checkpoint *old;
    assert_int_equal(hr_checkpoint_open(path_of(BIASED, 0), &old, NULL), HR_OK);
    uint32_t random = 1;
    for (int round = 0; round < 300; round++) {
        hr_tensor some[MAX_TENSORS];
        size_t n = 0;
        for (size_t i = 0; i < p.n; i++) {
            random = random * 1664525u + 1013904223u;
            if (random >> 28 > 2)
                continue;
            some[n++] =
                random >> 27 & 1 ? p.tensors[i] : *hr_checkpoint_find(old, p.tensors[i].name);
        }
        hr_base_update *update = begin(p.live, round % 5 != 4);
        write_ok(update, some, n / 2);
        if (round % 5 != 4 && round % 3 == 0) {
            assert_true(hr_base_update_abandon(update));
        } else {
            write_ok(update, some + n / 2, n - n / 2);
            publish(update, false);
            update = begin(p.old_loaded, false);
            write_ok(update, some, n);
            publish(update, false);
        }
        expect_weights(p.live, p.old_loaded);
    }
    hr_checkpoint_close(old);
    close_pair(&p);
}

static void only_what_came_is_stale_in_the_next_shadow(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    for (size_t first = 0; first + 3 <= p.n; first += 5) {
        hr_base_update *update = begin(p.live, true);
        write_ok(update, p.tensors + first, 3);
        publish(update, false);
        for (size_t i = 0; i < p.n; i++) {
            const hr_place *place = &p.live->places.items[i];
            bool came = i >= first && i < first + 3;
            assert_int_equal(p.live->shadow_fresh[i], !came);
            if (!came)
                assert_memory_equal(p.live->shadow.arena + place->at, p.live->arena + place->at,
                                    place->bytes);
        }
    }
    close_pair(&p);
}

static void an_update_tells_which_weights_came(void **state) {
    (void)state;
    pair p;
    bool written[MAX_TENSORS];
    open_pair(&p, BIASED, "bfloat16");
    assert_int_equal(hr_base_update_weights(p.live), p.n);
    hr_base_update *update = begin(p.live, true);
    hr_tensor bad = p.tensors[3];
    bad.shape[0]++;
    write_ok(update, &p.tensors[1], 1);
    assert_int_equal(hr_base_update_write(update, &bad, 1, NULL), HR_ERR_SHAPE);
    write_ok(update, &p.tensors[p.n - 1], 1);
    hr_base_update_written(update, written);
    for (size_t i = 0; i < p.n; i++)
        assert_int_equal(written[i], i == 1 || i == p.n - 1);
    hr_base_update_abandon(update);
    close_pair(&p);
}

static void an_update_of_nothing_changes_nothing(void **state) {
    (void)state;
    pair p;
    open_pair(&p, NORMED, "bfloat16");
    publish(begin(p.live, true), false);
    expect_weights(p.live, p.old_loaded);
    publish(begin(p.live, false), false);
    expect_weights(p.live, p.old_loaded);
    close_pair(&p);
}

/* ---- names ---- */

/* Rows of several tensors, one after the other; the caller frees the data. */
static hr_tensor fuse(pair *p, const char *const *parts, size_t n, const char *name) {
    hr_tensor whole = *tensor_named(p, parts[0]);
    char *data = NULL;
    whole.name = name;
    whole.shape[0] = whole.bytes = 0;
    for (size_t i = 0; i < n; i++) {
        const hr_tensor *part = tensor_named(p, parts[i]);
        data = realloc(data, whole.bytes + part->bytes);
        memcpy(data + whole.bytes, part->data, part->bytes);
        whole.bytes += part->bytes;
        whole.shape[0] += part->shape[0];
    }
    whole.data = data;
    return whole;
}

static void free_data(hr_tensor *tensor) {
    union {
        const void *given;
        void *owned;
    } data = {tensor->data};
    free(data.owned);
}

#define ATTENTION(part) "model.layers.1.self_attn." part
static const char *const qkv_weights[] = {ATTENTION("q_proj.weight"), ATTENTION("k_proj.weight"),
                                          ATTENTION("v_proj.weight")};
static const char *const qkv_biases[] = {ATTENTION("q_proj.bias"), ATTENTION("k_proj.bias"),
                                         ATTENTION("v_proj.bias")};
static const char *const gate_up[] = {"model.layers.0.mlp.gate_proj.weight",
                                      "model.layers.0.mlp.up_proj.weight"};

static void fused_tensors_are_split_by_rows(void **state) {
    (void)state;
    for (int shadow = 0; shadow < 2; shadow++) {
        pair p;
        open_pair(&p, BIASED, "bfloat16");
        hr_tensor fused[] = {fuse(&p, qkv_weights, 3, ATTENTION("qkv_proj.weight")),
                             fuse(&p, qkv_biases, 3, ATTENTION("qkv_proj.bias")),
                             fuse(&p, gate_up, 2, "model.layers.0.mlp.gate_up_proj.weight")};
        hr_base_update *update = begin(p.live, shadow);
        write_ok(update, fused, 3);
        publish(update, false);
        update = begin(p.old_loaded, false);
        for (size_t i = 0; i < 3; i++) {
            write_ok(update, tensor_named(&p, qkv_weights[i]), 1);
            write_ok(update, tensor_named(&p, qkv_biases[i]), 1);
        }
        write_ok(update, tensor_named(&p, gate_up[0]), 1);
        write_ok(update, tensor_named(&p, gate_up[1]), 1);
        publish(update, false);
        expect_weights(p.live, p.old_loaded);
        for (size_t i = 0; i < 3; i++)
            free_data(&fused[i]);
        close_pair(&p);
    }
}

static void every_weight_can_come_alone(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    for (size_t i = 0; i < p.n; i++) {
        hr_base_update *update = begin(p.live, true);
        write_ok(update, &p.tensors[i], 1);
        publish(update, false);
        const hr_place *place = &p.live->places.items[i];
        assert_memory_equal(p.live->arena + place->at, p.new_loaded->arena + place->at,
                            place->bytes);
    }
    expect_weights(p.live, p.new_loaded);
    close_pair(&p);
}

static void buffers_that_the_model_computes_are_passed_over(void **state) {
    (void)state;
    pair p;
    open_pair(&p, TIED, "bfloat16");
    hr_tensor buffer = {.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                        .dtype = HR_DTYPE_F32};
    update_all(p.live, p.tensors, p.n, true);
    hr_base_update *update = begin(p.live, false);
    write_ok(update, &buffer, 1);
    assert_true(hr_base_update_abandon(update)); /* nothing was written */
    expect_weights(p.live, p.new_loaded);
    close_pair(&p);
}

static void a_tied_head_may_come_when_it_equals_the_embedding(void **state) {
    (void)state;
    pair p;
    hr_error err = {0};
    open_pair(&p, TIED, "bfloat16");
    hr_tensor embed = *tensor_named(&p, "model.embed_tokens.weight"), head = embed, both[2];
    head.name = "lm_head.weight";
    /* In one call, either order; in two calls, either order. */
    for (int order = 0; order < 2; order++) {
        both[order] = embed;
        both[1 - order] = head;
        hr_base_update *update = begin(p.live, true);
        write_ok(update, both, 2);
        publish(update, false);
        update = begin(p.live, order);
        write_ok(update, &both[0], 1);
        write_ok(update, &both[1], 1);
        publish(update, false);
    }
    /* Alone, equal to the live embedding, also in another dtype of the same compute values. */
    hr_base_update *update = begin(p.live, true);
    write_ok(update, &head, 1);
    assert_int_equal(hr_base_update_write(update, &head, 1, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "lm_head.weight"));
    publish(update, false);
    update_all(p.live, p.tensors, p.n, true);
    expect_weights(p.live, p.new_loaded);
    close_pair(&p);
}

static void a_tied_head_of_its_own_is_refused(void **state) {
    (void)state;
    pair p;
    hr_error err = {0};
    open_pair(&p, TIED, "bfloat16");
    hr_tensor embed = *tensor_named(&p, "model.embed_tokens.weight");
    float *other = malloc(embed.bytes);
    memcpy(other, embed.data, embed.bytes);
    other[embed.bytes / sizeof(float) - 1] += 0.25f;
    hr_tensor head = embed;
    head.name = "lm_head.weight";
    head.data = other;
    hr_tensor both[] = {embed, head}, turned[] = {head, embed};
    for (int way = 0; way < 5; way++) {
        hr_base_update *update = begin(p.live, way % 2);
        err = (hr_error){0};
        if (way == 0)
            assert_int_equal(hr_base_update_write(update, both, 2, &err), HR_ERR_INVALID);
        if (way == 1)
            assert_int_equal(hr_base_update_write(update, turned, 2, &err), HR_ERR_INVALID);
        if (way == 2 || way == 4) /* against the live embedding */
            write_ok(update, &head, 1);
        if (way == 2)
            assert_int_equal(hr_base_update_seal(update, false, &err), HR_ERR_INVALID);
        if (way == 3) {
            write_ok(update, &embed, 1);
            assert_int_equal(hr_base_update_write(update, &head, 1, &err), HR_ERR_INVALID);
        }
        if (way == 4)
            assert_int_equal(hr_base_update_write(update, &embed, 1, &err), HR_ERR_INVALID);
        assert_non_null(strstr(err.message, "tie_word_embeddings"));
        assert_true(hr_base_update_abandon(update));
        expect_weights(p.live, p.old_loaded);
    }
    free(other);
    close_pair(&p);
}

/* ---- refusals ---- */

typedef struct spoiling {
    const char *what;
    hr_status status;
} spoiling;

static const spoiling spoilings[] = {
    {"name", HR_ERR_NOT_FOUND}, {"rows", HR_ERR_SHAPE},    {"dimensions", HR_ERR_SHAPE},
    {"dtype", HR_ERR_DTYPE},    {"bytes", HR_ERR_INVALID}, {"nan", HR_ERR_VALUE},
    {"infinity", HR_ERR_VALUE}, {"twice", HR_ERR_INVALID},
};
enum { N_SPOILINGS = sizeof spoilings / sizeof spoilings[0] };

/* Makes tensors[i] wrong; returns data to free. */
static void *spoil(const char *what, hr_tensor *tensors, size_t i) {
    hr_tensor *tensor = &tensors[i];
    if (strcmp(what, "name") == 0)
        tensor->name = "model.layers.9.nothing.weight";
    if (strcmp(what, "rows") == 0)
        tensor->shape[0]++;
    if (strcmp(what, "dimensions") == 0)
        tensor->shape[tensor->ndim++] = 1;
    if (strcmp(what, "dtype") == 0)
        tensor->dtype = HR_DTYPE_U8;
    if (strcmp(what, "bytes") == 0)
        tensor->bytes -= 2;
    if (strcmp(what, "twice") == 0)
        *tensor = tensors[i > 0 ? i - 1 : i + 1];
    if (strcmp(what, "nan") != 0 && strcmp(what, "infinity") != 0)
        return NULL;
    char *copy = malloc(tensor->bytes); /* BF16: the last element */
    memcpy(copy, tensor->data, tensor->bytes);
    uint16_t bad = strcmp(what, "nan") == 0 ? 0x7fc1 : 0xff80;
    memcpy(copy + tensor->bytes - sizeof bad, &bad, sizeof bad);
    tensor->data = copy;
    return copy;
}

static void a_call_that_fails_at_any_tensor_writes_nothing(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    for (int shadow = 0; shadow < 2; shadow++)
        for (size_t s = 0; s < N_SPOILINGS; s++)
            for (size_t i = 0; i < p.n; i++) {
                hr_tensor tensors[MAX_TENSORS];
                hr_error err = {0};
                memcpy(tensors, p.tensors, sizeof tensors);
                void *data = spoil(spoilings[s].what, tensors, i);
                hr_base_update *update = begin(p.live, shadow);
                assert_int_equal(hr_base_update_write(update, tensors, p.n, &err),
                                 spoilings[s].status);
                assert_non_null(strstr(err.message, tensors[i].name));
                /* Nothing came: the rest of the update is what it would have been. */
                publish(update, false);
                expect_weights(p.live, p.old_loaded);
                free(data);
            }
    close_pair(&p);
}

/* A matrix is held as bf16, a norm as f32: the same value is infinite in one of them only. */
static void a_value_is_refused_where_it_is_held_as_an_infinity(void **state) {
    (void)state;
    pair p;
    open_pair(&p, BIASED, "bfloat16");
    const hr_tensor *held[] = {tensor_named(&p, ATTENTION("q_proj.weight")),
                               tensor_named(&p, "model.norm.weight")};
    for (int shadow = 0; shadow < 2; shadow++)
        for (size_t k = 0; k < 2; k++) {
            hr_tensor wide = *held[k];
            hr_error err = {0};
            size_t n = hr_tensor_elements(&wide);
            float *values = calloc(n, sizeof *values);
            values[n - 1] = -3.4e38f;
            wide.dtype = HR_DTYPE_F32;
            wide.data = values;
            wide.bytes = n * sizeof *values;
            hr_base_update *update = begin(p.live, shadow);
            if (k == 0) {
                assert_int_equal(hr_base_update_write(update, &wide, 1, &err), HR_ERR_VALUE);
                assert_non_null(strstr(err.message, "q_proj.weight: 1 of 1200 values are too "
                                                    "large for BF16"));
            } else if (shadow) {
                write_ok(update, &wide, 1);
            }
            assert_true(hr_base_update_abandon(update));
            expect_weights(p.live, p.old_loaded);
            free(values);
        }
    close_pair(&p);
}

static void a_refused_dtype_is_told_with_its_shape(void **state) {
    (void)state;
    pair p;
    hr_error err = {0};
    open_pair(&p, BIASED, "bfloat16");
    hr_tensor packed = {.name = ATTENTION("q_proj.weight"),
                        .dtype = HR_DTYPE_U8,
                        .ndim = 2,
                        .shape = {32, 1},
                        .data = "",
                        .bytes = 32};
    hr_base_update *update = begin(p.live, true);
    assert_int_equal(hr_base_update_write(update, &packed, 1, &err), HR_ERR_DTYPE);
    assert_non_null(strstr(err.message, "U8 [32, 1]; quantised weights are not supported"));
    assert_non_null(strstr(err.message, "[30, 40]"));
    packed.dtype = HR_DTYPE_F64;
    assert_int_equal(hr_base_update_write(update, &packed, 1, &err), HR_ERR_DTYPE);
    assert_non_null(strstr(err.message, "F64 [32, 1]; cast it with .float()"));
    hr_base_update_abandon(update);
    close_pair(&p);
}

static void a_weight_comes_once_alone_or_fused(void **state) {
    (void)state;
    pair p;
    hr_error err = {0};
    open_pair(&p, BIASED, "bfloat16");
    hr_tensor fused = fuse(&p, qkv_weights, 3, ATTENTION("qkv_proj.weight"));
    hr_base_update *update = begin(p.live, true);
    write_ok(update, tensor_named(&p, qkv_weights[2]), 1);
    assert_int_equal(hr_base_update_write(update, &fused, 1, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "v_proj"));
    /* The parts that the refused tensor also had are free. */
    write_ok(update, tensor_named(&p, qkv_weights[0]), 1);
    assert_true(hr_base_update_abandon(update));
    expect_weights(p.live, p.old_loaded);
    free_data(&fused);
    close_pair(&p);
}

static void one_update_at_a_time_and_none_after_the_seal(void **state) {
    (void)state;
    pair p;
    hr_error err = {0};
    open_pair(&p, TIED, "bfloat16");
    hr_base_update *update = begin(p.live, true), *second = NULL;
    assert_int_equal(hr_base_update_begin(p.live, true, &second, &err), HR_ERR_BUSY);
    assert_int_equal(hr_model_randomize(p.live, 1, &err), HR_ERR_BUSY);
    assert_null(second);
    assert_int_equal(hr_base_update_seal(update, false, NULL), HR_OK);
    assert_int_equal(hr_base_update_write(update, p.tensors, 1, &err), HR_ERR_INVALID);
    assert_true(hr_base_update_abandon(update));
    assert_true(hr_base_update_abandon(NULL));
    expect_weights(p.live, p.old_loaded);
    close_pair(&p);
}

static void an_update_in_place_that_began_cannot_be_taken_back(void **state) {
    (void)state;
    pair p;
    open_pair(&p, TIED, "bfloat16");
    assert_true(hr_base_update_abandon(begin(p.live, false)));
    expect_weights(p.live, p.old_loaded);
    hr_base_update *update = begin(p.live, false);
    write_ok(update, p.tensors, 1);
    assert_false(hr_base_update_abandon(update));
    update_all(p.live, p.tensors, p.n, false); /* a full update heals it */
    expect_weights(p.live, p.new_loaded);
    close_pair(&p);
}

/* ---- memory ---- */

static void released_weights_come_back_with_a_full_update(void **state) {
    (void)state;
    for (int shadow = 0; shadow < 2; shadow++) {
        pair p;
        open_pair(&p, NORMED, "bfloat16");
        hr_base_update *update = begin(p.live, true); /* so that there is a shadow to drop */
        write_ok(update, p.tensors, 3);
        publish(update, false);
        hr_model_release_weights(p.live);
        assert_int_equal(p.live->arena[0], 0);
        assert_memory_equal(p.live->tables, p.new_loaded->tables, p.live->tables_bytes);
        update_all(p.live, p.tensors, p.n, shadow);
        expect_weights(p.live, p.new_loaded);
        close_pair(&p);
    }
}

static int set_up(void **state) {
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int seed = 0; seed < 2; seed++)
            random_model_write(path_of(kind, seed), &kinds[kind], (uint64_t)seed + 1);
    return hr_pool_create(1, &pool, NULL) == HR_OK ? 0 : 1;
}

static int tear_down(void **state) {
    (void)state;
    hr_pool_destroy(pool);
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int seed = 0; seed < 2; seed++)
            random_model_remove(path_of(kind, seed));
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_update_of_all_tensors_makes_the_model_of_that_checkpoint),
        cmocka_unit_test(the_order_and_number_of_calls_change_nothing),
        cmocka_unit_test(bytes_need_no_alignment),
        cmocka_unit_test(a_missing_tensor_is_named_where_all_are_wanted),
        cmocka_unit_test(any_sequence_of_partial_updates_equals_the_same_in_place),
        cmocka_unit_test(only_what_came_is_stale_in_the_next_shadow),
        cmocka_unit_test(an_update_tells_which_weights_came),
        cmocka_unit_test(an_update_of_nothing_changes_nothing),
        cmocka_unit_test(fused_tensors_are_split_by_rows),
        cmocka_unit_test(every_weight_can_come_alone),
        cmocka_unit_test(buffers_that_the_model_computes_are_passed_over),
        cmocka_unit_test(a_tied_head_may_come_when_it_equals_the_embedding),
        cmocka_unit_test(a_tied_head_of_its_own_is_refused),
        cmocka_unit_test(a_call_that_fails_at_any_tensor_writes_nothing),
        cmocka_unit_test(a_value_is_refused_where_it_is_held_as_an_infinity),
        cmocka_unit_test(a_refused_dtype_is_told_with_its_shape),
        cmocka_unit_test(a_weight_comes_once_alone_or_fused),
        cmocka_unit_test(one_update_at_a_time_and_none_after_the_seal),
        cmocka_unit_test(an_update_in_place_that_began_cannot_be_taken_back),
        cmocka_unit_test(released_weights_come_back_with_a_full_update),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    int rc = cmocka_run_group_tests(tests, set_up, tear_down);
    rmdir(dir);
    return rc;
}
