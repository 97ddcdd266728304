/* Weights that come while the engine serves: adapters and base weights through the engine's
 * receiver, from disk, in a shadow and in place; and memory given back. What a request gets is
 * compared, to the bit, with an engine that never had other weights. */
#include "../model/tiny_model.h"
#include "asked.h"

#include "base/error.h"
#include "engine/update.h"
#include "format/checkpoint.h"
#include "format/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static char work_dir[64], model_dir[96], adapter_dir[96], other_dir[96];

/* ---- weights to send ---- */

typedef struct weights {
    hr_tensor *items;
    size_t n;
} weights;

/* All tensors, times scale; names after prefix. */
static weights scaled(const hr_tensor *(*at)(const void *, size_t), const void *from, size_t n,
                      float scale, const char *prefix) {
    weights w = {calloc(n, sizeof *w.items), n};
    assert_non_null(w.items);
    for (size_t i = 0; i < n; i++) {
        w.items[i] = *at(from, i);
        size_t size = strlen(prefix) + strlen(w.items[i].name) + 1;
        char *name = malloc(size);
        float *data = malloc(w.items[i].bytes);
        assert_true(name != NULL && data != NULL && w.items[i].dtype == HR_DTYPE_F32);
        snprintf(name, size, "%s%s", prefix, w.items[i].name);
        memcpy(data, w.items[i].data, w.items[i].bytes);
        for (size_t j = 0; j < w.items[i].bytes / sizeof *data; j++)
            data[j] *= scale;
        w.items[i].name = name;
        w.items[i].data = data;
    }
    return w;
}

static const hr_tensor *checkpoint_at(const void *checkpoint, size_t i) {
    return hr_checkpoint_at(checkpoint, i);
}

static const hr_tensor *file_at(const void *file, size_t i) {
    return hr_safetensors_at(file, i);
}

static weights base_weights(float scale) {
    hr_checkpoint *checkpoint = NULL;
    assert_int_equal(hr_checkpoint_open(model_dir, &checkpoint, NULL), HR_OK);
    weights w = scaled(checkpoint_at, checkpoint, hr_checkpoint_count(checkpoint), scale, "");
    hr_checkpoint_close(checkpoint);
    return w;
}

static weights adapter_weights(const char *prefix, float scale) {
    char path[160];
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", adapter_dir);
    hr_safetensors *file = NULL;
    assert_int_equal(hr_safetensors_open(path, &file, NULL), HR_OK);
    weights w = scaled(file_at, file, hr_safetensors_count(file), scale, prefix);
    hr_safetensors_close(file);
    return w;
}

static void weights_free(weights *w) {
    for (size_t i = 0; i < w->n; i++) {
        union {
            const void *given;
            void *owned;
        } name = {w->items[i].name}, data = {w->items[i].data};
        free(name.owned);
        free(data.owned);
    }
    free(w->items);
}

static const char adapter_config[] =
    "{\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"r\": 5, \"lora_alpha\": 15,"
    " \"target_modules\": [\"q_proj\", \"v_proj\", \"o_proj\", \"up_proj\", \"down_proj\","
    " \"embed_tokens\", \"lm_head\"]}";

static hr_registration registration(const char *name) {
    return (hr_registration){
        .name = name, .config = adapter_config, .config_len = strlen(adapter_config)};
}

/* ---- engines ---- */

static hr_engine *open_engine(const char *dir) {
    hr_engine_options o = {.model_path = dir,
                           .threads = 1,
                           .enable_lora = true,
                           .max_total_tokens = 4096,
                           .max_running_requests = 16};
    hr_engine *engine = NULL;
    hr_error err = {0};
    if (hr_engine_create(&o, &engine, &err) != HR_OK)
        fail_msg("%s", err.message);
    assert_string_equal(hr_engine_base_mode(engine), "shadow");
    return engine;
}

static void ok(hr_status status, const hr_error *err) {
    if (status != HR_OK)
        fail_msg("%s", err->message);
}

static void register_name(hr_engine *engine, const char *name) {
    hr_error err = {0};
    bool pending = true;
    hr_registration r = registration(name);
    ok(hr_receiver_register(hr_engine_receiver(engine), &r, &pending, &err), &err);
    assert_false(pending);
}

/* One session that brings all of it. */
static hr_status push(hr_engine *engine, const weights *w, const hr_end_options *end,
                      hr_error *err) {
    hr_receiver *receiver = hr_engine_receiver(engine);
    char id[HR_SESSION_ID_SIZE];
    HR_TRY(hr_receiver_begin(receiver, &(hr_session_options){.sync_base = true}, id, err));
    hr_bucket bucket = {.tensors = w->items, .n = w->n};
    hr_status status = hr_receiver_bucket(receiver, &bucket, err);
    if (status != HR_OK) {
        assert_int_equal(hr_receiver_abort(receiver, id, NULL), HR_OK);
        return status;
    }
    return hr_receiver_end(receiver, end, NULL, err);
}

static void push_adapter(hr_engine *engine, const char *name, float scale, const char *version) {
    char prefix[40];
    hr_error err = {0};
    snprintf(prefix, sizeof prefix, "%s:", name);
    weights w = adapter_weights(prefix, scale);
    ok(push(engine, &w, &(hr_end_options){.weight_version = version}, &err), &err);
    weights_free(&w);
}

static void push_base(hr_engine *engine, float scale, const hr_end_options *end) {
    hr_error err = {0};
    weights w = base_weights(scale);
    ok(push(engine, &w, end, &err), &err);
    weights_free(&w);
}

static void run(hr_engine *engine, asked *a, uint32_t index, const char *lora) {
    ask(a, index, 70, 40, lora);
    submit(engine, a);
    wait_for(a);
    assert_int_equal(a->finish.type, HR_FINISH_LENGTH);
}

static bool same(const asked *a, const asked *b) {
    return memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0 &&
           memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0 &&
           memcmp(a->prompt_logprobs, b->prompt_logprobs, sizeof a->prompt_logprobs) == 0;
}

static void assert_version(hr_engine *engine, const char *wanted) {
    char version[HR_WEIGHT_VERSION_SIZE];
    hr_engine_weight_version(engine, version, sizeof version);
    assert_string_equal(version, wanted);
}

static void close_engine(hr_engine *engine) {
    hr_engine_stats stats;
    hr_engine_stats_get(engine, &stats);
    assert_int_equal(stats.leases, 0);
    assert_int_equal(stats.kv_pages_free + stats.kv_pages_cached, stats.kv_pages);
    hr_engine_destroy(engine);
}

/* What an engine that never had other weights answers: base weights of other_dir. */
static void answer_of_other_model(asked *a, uint32_t index) {
    hr_engine *engine = open_engine(other_dir);
    run(engine, a, index, NULL);
    close_engine(engine);
}

/* ---- adapters ---- */

static void a_streamed_adapter_is_the_one_on_disk(void **state) {
    (void)state;
    static asked disk, stream, base;
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    ok(hr_engine_load_adapter(engine, "disk", adapter_dir, false, &err), &err);
    run(engine, &disk, 0, "disk");
    register_name(engine, "x");
    ask(&stream, 1, 9, 10, "x");
    assert_int_equal(hr_engine_submit(engine, &stream.params, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "awaiting publication"));
    assert_non_null(strstr(err.message, "not loaded"));
    push_adapter(engine, "x", 1, "one");
    assert_version(engine, "one");
    run(engine, &stream, 0, "x");
    assert_true(same(&disk, &stream));
    assert_int_equal(stream.finish.n_spans, 1);
    assert_string_equal(stream.spans[0].version, "one");
    run(engine, &base, 0, NULL);
    assert_false(same(&base, &stream));
    hr_adapter_info *list = NULL;
    size_t n = 0;
    ok(hr_engine_list_adapters(engine, &list, &n, &err), &err);
    assert_int_equal(n, 2);
    assert_string_equal(list[1].path, "__stream__");
    free(list);
    close_engine(engine);
}

/* The running one keeps its version, the next one has the new one; nothing cached is shared. */
static void an_upsert_leaves_running_requests_alone(void **state) {
    (void)state;
    static asked one, two, running, next;
    hr_engine *engine = open_engine(model_dir);
    register_name(engine, "x");
    push_adapter(engine, "x", 1, "one");
    run(engine, &one, 0, "x");
    ask(&running, 0, 70, 40, "x");
    snprintf(running.rid, sizeof running.rid, "running");
    running.token_ns = 3000000;
    submit(engine, &running);
    wait_running(engine, 1);
    push_adapter(engine, "x", 0.5f, "two");
    running.token_ns = 0;
    run(engine, &next, 0, "x");
    wait_for(&running);
    assert_true(same(&one, &running));
    assert_string_equal(running.weight_version, "one");
    assert_int_equal(running.finish.n_spans, 1);
    assert_int_equal(next.finish.cached_tokens, 0);
    assert_string_equal(next.weight_version, "two");
    assert_string_equal(running.adapter_version, "one");
    assert_string_equal(next.adapter_version, "two");
    assert_false(same(&one, &next));
    assert_true(running.finish.adapter_id < next.finish.adapter_id);

    hr_engine *fresh = open_engine(model_dir);
    register_name(fresh, "y");
    push_adapter(fresh, "y", 0.5f, NULL);
    run(fresh, &two, 0, "y");
    assert_true(same(&two, &next));
    assert_version(fresh, "default");
    assert_string_equal(two.weight_version, "default");
    assert_string_equal(two.adapter_version, ""); /* its publication named none */
    close_engine(fresh);
    close_engine(engine);
}

static void a_session_that_fails_changes_nothing(void **state) {
    (void)state;
    static asked before, after;
    hr_engine *engine = open_engine(model_dir);
    register_name(engine, "x");
    push_adapter(engine, "x", 1, "one");
    run(engine, &before, 0, "x");
    hr_error err = {0};
    weights w = adapter_weights("x:", 0.5f), base = base_weights(0.5f);
    w.n--; /* a part of it */
    assert_int_not_equal(push(engine, &w, &(hr_end_options){.weight_version = "bad"}, &err), HR_OK);
    base.items[base.n - 1].shape[0]--; /* the last one does not fit */
    assert_int_not_equal(push(engine, &base, &(hr_end_options){.weight_version = "bad"}, &err),
                         HR_OK);
    w.n++;
    weights_free(&w);
    base.items[base.n - 1].shape[0]++;
    weights_free(&base);
    run(engine, &after, 0, "x");
    assert_true(same(&before, &after));
    assert_version(engine, "one");
    push_adapter(engine, "x", 0.5f, "two"); /* the next push works */
    run(engine, &after, 0, "x");
    assert_false(same(&before, &after));
    close_engine(engine);
}

/* One load call that brings all of it; known: without a config, as that of its registration. */
static void load_call(hr_engine *engine, const char *name, bool known) {
    char prefix[40];
    hr_error err = {0};
    hr_registration r = registration(name);
    snprintf(prefix, sizeof prefix, "%s:", name);
    weights w = adapter_weights(prefix, 1);
    hr_bucket bucket = {.tensors = w.items, .n = w.n};
    ok(hr_receiver_apply(hr_engine_receiver(engine), known ? NULL : &r, &bucket,
                         &(hr_end_options){0}, NULL, &err),
       &err);
    weights_free(&w);
}

static hr_status prepare_adapter(hr_engine *engine, const char *prefix, char *id, hr_error *err) {
    hr_receiver *receiver = hr_engine_receiver(engine);
    weights w = adapter_weights(prefix, 1);
    hr_bucket bucket = {.tensors = w.items, .n = w.n};
    ok(hr_receiver_begin(receiver, &(hr_session_options){0}, id, err), err);
    ok(hr_receiver_bucket(receiver, &bucket, err), err);
    weights_free(&w);
    return hr_receiver_prepare(receiver, &(hr_end_options){.session_id = id}, NULL, err);
}

static bool is_loaded(hr_engine *engine, const char *name) {
    return hr_engine_adapter_state(engine, name) == HR_ADAPTER_LOADED;
}

/* Prepared on some engines and refused by commit on another would be two versions in one fleet. */
static void a_name_that_gave_way_has_a_place_again_before_it_is_prepared(void **state) {
    (void)state;
    hr_engine_options o = {.model_path = model_dir,
                           .threads = 1,
                           .enable_lora = true,
                           .max_total_tokens = 1024,
                           .max_loaded_loras = 1};
    hr_engine *engine = NULL;
    hr_error err = {0};
    char id[HR_SESSION_ID_SIZE];
    ok(hr_engine_create(&o, &engine, &err), &err);
    hr_receiver *receiver = hr_engine_receiver(engine);
    register_name(engine, "x");
    push_adapter(engine, "x", 1, "one");
    load_call(engine, "y", false);
    assert_false(is_loaded(engine, "x"));
    assert_int_equal(prepare_adapter(engine, "x:", id, &err), HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "max-loaded-loras"));
    assert_true(is_loaded(engine, "y"));

    ok(hr_engine_unload_adapter(engine, "y", &err), &err);
    ok(prepare_adapter(engine, "x:", id, &err), &err);
    assert_int_equal(hr_engine_load_adapter(engine, "z", adapter_dir, false, &err), HR_ERR_LIMIT);
    ok(hr_receiver_commit(receiver, id, NULL, &err), &err);
    assert_true(is_loaded(engine, "x"));

    ok(hr_engine_unload_adapter(engine, "x", &err), &err);
    load_call(engine, "y", false);
    load_call(engine, "x", false);
    assert_false(is_loaded(engine, "y"));
    load_call(engine, "y", true); /* pushed again, as it is told to be */
    assert_true(is_loaded(engine, "y"));

    register_name(engine, "y");
    load_call(engine, "x", false);
    ok(hr_engine_unload_adapter(engine, "x", &err), &err);
    ok(prepare_adapter(engine, "y:", id, &err), &err);
    ok(hr_receiver_abort(receiver, id, &err), &err); /* gives the place back */
    ok(hr_engine_load_adapter(engine, "z", adapter_dir, false, &err), &err);
    close_engine(engine);
}

static void a_load_call_that_fails_leaves_no_pin_on_a_waiting_name(void **state) {
    (void)state;
    hr_engine_options o = {.model_path = model_dir,
                           .threads = 1,
                           .enable_lora = true,
                           .max_total_tokens = 1024,
                           .max_loras_per_batch = 2};
    hr_engine *engine = NULL;
    hr_error err = {0};
    ok(hr_engine_create(&o, &engine, &err), &err);
    register_name(engine, "x");
    hr_registration pinned = registration("x");
    pinned.pinned = true;
    weights w = adapter_weights("x:", 1);
    hr_bucket part = {.tensors = w.items, .n = w.n - 1};
    assert_int_not_equal(hr_receiver_apply(hr_engine_receiver(engine), &pinned, &part,
                                           &(hr_end_options){0}, NULL, &err),
                         HR_OK);
    weights_free(&w);
    ok(hr_engine_load_adapter(engine, "the one that may be pinned", adapter_dir, true, &err), &err);
    close_engine(engine);
}

static void registered_names_can_be_refused_listed_and_forgotten(void **state) {
    (void)state;
    hr_engine_options o = {.model_path = model_dir,
                           .threads = 1,
                           .enable_lora = true,
                           .max_total_tokens = 1024,
                           .max_loaded_loras = 1,
                           .max_lora_rank = 5};
    hr_engine *engine = NULL;
    hr_error err = {0};
    ok(hr_engine_create(&o, &engine, &err), &err);
    hr_receiver *receiver = hr_engine_receiver(engine);
    bool pending;
    hr_registration r = registration("a:b");
    assert_int_equal(hr_receiver_register(receiver, &r, &pending, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "must not contain ':'"));
    r = registration("x");
    r.config = "{\"peft_type\": \"LORA\", \"r\": 6, \"lora_alpha\": 6,"
               " \"target_modules\": [\"q_proj\"]}";
    r.config_len = strlen(r.config);
    assert_int_equal(hr_receiver_register(receiver, &r, &pending, &err),
                     HR_ERR_ADAPTER_INCOMPATIBLE);
    assert_non_null(strstr(err.message, "incompatible"));
    register_name(engine, "x");
    r = registration("y");
    assert_int_equal(hr_receiver_register(receiver, &r, &pending, &err), HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "max-loaded-loras"));
    assert_int_equal(hr_engine_load_adapter(engine, "x", adapter_dir, false, &err),
                     HR_ERR_ADAPTER_EXISTS);
    ok(hr_engine_unload_adapter(engine, "x", &err), &err); /* forgotten: its place is free */
    assert_int_equal(hr_engine_unload_adapter(engine, "x", &err), HR_ERR_ADAPTER_UNKNOWN);
    ok(hr_engine_load_adapter(engine, "y", adapter_dir, false, &err), &err);
    r = registration("y");
    r.defer_publish = true;
    assert_int_equal(hr_receiver_register(receiver, &r, &pending, &err), HR_ERR_ADAPTER_EXISTS);
    r.defer_publish = false;
    r.refuse_existing = true;
    assert_int_equal(hr_receiver_register(receiver, &r, &pending, &err), HR_ERR_ADAPTER_EXISTS);
    register_name(engine, "y"); /* an upsert of one that came from disk needs no place */
    push_adapter(engine, "y", 0.5f, NULL);
    close_engine(engine);
}

/* ---- base weights ---- */

static void a_base_update_is_as_if_there_had_never_been_other_weights(void **state) {
    (void)state;
    static asked old, new, got, cached;
    answer_of_other_model(&new, 0);
    for (int flush = 0; flush < 2; flush++) { /* stale KV is never found, flushed or not */
        hr_engine *engine = open_engine(model_dir);
        run(engine, &old, 0, NULL);
        run(engine, &cached, 2, NULL);
        push_base(engine, 0.5f,
                  &(hr_end_options){
                      .weight_version = "two", .complete_base = true, .flush_cache = flush});
        run(engine, &got, 0, NULL);
        assert_int_equal(got.finish.cached_tokens, 0);
        assert_true(same(&new, &got));
        assert_false(same(&old, &got));
        assert_string_equal(got.weight_version, "two");
        push_base(engine, 1, &(hr_end_options){.weight_version = "three"}); /* the other arena */
        run(engine, &got, 0, NULL);
        assert_true(same(&old, &got));
        close_engine(engine);
    }
}

static void frozen_requests_go_on_with_new_base_weights(void **state) {
    (void)state;
    static asked a, fresh, after;
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    ask(&a, 0, 40, 60, NULL);
    a.token_ns = 3000000;
    submit(engine, &a);
    wait_running(engine, 1);
    ok(hr_engine_pause(engine, HR_PAUSE_IN_PLACE, 10000, &err), &err);
    uint32_t before = a.n_tokens;
    push_base(engine, 0.5f, &(hr_end_options){.weight_version = "two"});
    hr_engine_continue(engine);
    a.token_ns = 0;
    wait_for(&a);
    assert_int_equal(a.finish.type, HR_FINISH_LENGTH);
    assert_int_equal(a.finish.n_spans, 2);
    assert_string_equal(a.spans[0].version, "default");
    assert_int_equal(a.spans[0].end, before);
    assert_string_equal(a.spans[1].version, "two");
    assert_int_equal(a.spans[1].end, 60);
    answer_of_other_model(&fresh, 0); /* its prompt of 70 begins as that of 40 */
    run(engine, &after, 0, NULL);
    assert_int_equal(after.finish.cached_tokens, 0); /* kept KV is not shared */
    assert_true(same(&fresh, &after));
    close_engine(engine);
}

static void a_directory_replaces_all_base_weights_or_none(void **state) {
    (void)state;
    static asked old, new, got;
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    run(engine, &old, 0, NULL);
    char path[160], config[2048];
    snprintf(path, sizeof path, "%s/config.json", other_dir);
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    config[fread(config, 1, sizeof config - 1, file)] = '\0';
    char *hidden = strstr(config, "\"hidden_size\": 40");
    assert_non_null(hidden);
    hidden[15] = '8';
    rewind(file);
    assert_true(fputs(config, file) >= 0 && fflush(file) == 0);
    hr_disk_update update = {.model_path = other_dir, .weight_version = "two"};
    assert_int_equal(hr_engine_update_from_disk(engine, &update, NULL, &err), HR_ERR_MODEL);
    assert_non_null(strstr(err.message, "hidden_size"));
    hidden[15] = '4';
    rewind(file);
    assert_true(fputs(config, file) >= 0 && fclose(file) == 0);
    run(engine, &got, 0, NULL);
    assert_true(same(&old, &got));
    assert_version(engine, "default");

    hr_receipt *receipt = NULL;
    ok(hr_engine_update_from_disk(engine, &update, &receipt, &err), &err);
    assert_int_equal(receipt->state, HR_SESSION_PUBLISHED);
    assert_string_equal(receipt->base_mode, "shadow");
    assert_int_equal(receipt->ranks, 1);
    hr_receipt_free(receipt);
    answer_of_other_model(&new, 0);
    run(engine, &got, 0, NULL);
    assert_true(same(&new, &got));
    assert_version(engine, "two");
    close_engine(engine);
}

/* ---- memory ---- */

static void memory_comes_back_and_weights_must_come_again(void **state) {
    (void)state;
    static asked old, got, waits;
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    run(engine, &old, 0, NULL);
    ask(&waits, 0, 70, 40, NULL);
    waits.token_ns = 5000000;
    submit(engine, &waits);
    wait_running(engine, 1);
    assert_int_equal(hr_engine_release_memory(engine, HR_MEMORY_KV_CACHE, &err), HR_ERR_BUSY);
    ok(hr_engine_pause(engine, HR_PAUSE_RETRACT, 10000, &err), &err);
    waits.token_ns = 0;
    ok(hr_engine_release_memory(engine, HR_MEMORY_KV_CACHE, &err), &err);
    ok(hr_engine_release_memory(engine, HR_MEMORY_KV_CACHE | HR_MEMORY_WEIGHTS, &err), &err);
    ok(hr_engine_release_memory(engine, HR_MEMORY_WEIGHTS, &err), &err);
    weights w = base_weights(1);
    assert_int_equal(push(engine, &w, &(hr_end_options){0}, &err), HR_ERR_BUSY);
    hr_engine_resume_memory(engine, HR_MEMORY_WEIGHTS);
    ask(&got, 0, 70, 40, NULL);
    assert_int_equal(hr_engine_submit(engine, &got.params, &err), HR_ERR_UNSERVABLE);
    w.n--; /* not all: taken, but not enough to serve */
    ok(push(engine, &w, &(hr_end_options){0}, &err), &err);
    assert_int_equal(hr_engine_submit(engine, &got.params, &err), HR_ERR_UNSERVABLE);
    w.n++;
    weights last = {w.items + w.n - 1, 1};
    ok(push(engine, &last, &(hr_end_options){0}, &err), &err);
    weights_free(&w);
    hr_engine_resume_memory(engine, HR_MEMORY_KV_CACHE);
    hr_engine_resume_memory(engine, HR_MEMORY_KV_CACHE | HR_MEMORY_WEIGHTS);
    hr_engine_continue(engine);
    wait_for(&waits); /* it waited all the time, and is computed anew */
    assert_true(same(&old, &waits));
    run(engine, &got, 0, NULL);
    assert_true(same(&old, &got));
    close_engine(engine);
}

static void the_weights_checker_finds_what_changed(void **state) {
    (void)state;
    static asked old, got;
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    run(engine, &old, 0, NULL);
    assert_int_equal(hr_engine_check_compare(engine, &err), HR_ERR_NOT_FOUND);
    ok(hr_engine_check_snapshot(engine, &err), &err);
    ok(hr_engine_check_compare(engine, &err), &err);
    ok(hr_engine_check_reset(engine, &err), &err);
    assert_int_equal(hr_engine_check_compare(engine, &err), HR_ERR_DIGEST);
    assert_non_null(strstr(err.message, "max_abs_err"));
    push_base(engine, 1, &(hr_end_options){.complete_base = true});
    ok(hr_engine_check_compare(engine, &err), &err);
    run(engine, &got, 0, NULL);
    assert_true(same(&old, &got));
    close_engine(engine);
}

/* ---- everything at once ---- */

enum { N_CLIENTS = 3, N_ASKED = 40, N_PUSHES = 60 };

/* A version is named by the weights it has: "x1b0" is adapter 1 on base 0, each halved when 1. */
static void name_version(char text[8], uint32_t adapter, uint32_t base) {
    snprintf(text, 8, "x%ub%u", adapter, base);
}

typedef struct client {
    hr_engine *engine;
    uint32_t index, n_whole, n_mixed, n_refused;
    const asked *of_adapter; /* [adapter * 2 + base]: what each version answers */
    const asked *of_base;    /* [base] */
} client;

/* One version made all of it: then it has the bits of that version. A request of the base alone is
 * not changed by a new adapter. */
static void check_answer(client *me, const asked *a) {
    bool of_adapter = a->params.lora_name != NULL;
    const char *version = a->spans[0].version;
    bool mixed = false;
    for (size_t i = 1; i < a->finish.n_spans; i++)
        mixed = mixed || of_adapter || a->spans[i].version[3] != version[3];
    if (mixed) { /* it was paused in between */
        me->n_mixed++;
        return;
    }
    uint32_t base = (uint32_t)(version[3] - '0'), adapter = (uint32_t)(version[1] - '0');
    const asked *wanted = of_adapter ? &me->of_adapter[adapter * 2 + base] : &me->of_base[base];
    HR_ASSERT(same(wanted, a));
    me->n_whole++;
}

static void *client_main(void *arg) {
    client *me = arg;
    asked *a = malloc(sizeof *a);
    HR_ASSERT(a != NULL);
    for (uint32_t i = 0; i < N_ASKED; i++) {
        ask(a, 0, 40, 20, i % 3 == 0 ? NULL : "x");
        snprintf(a->rid, sizeof a->rid, "%u-%u", me->index, i);
        hr_status status = hr_engine_submit(me->engine, &a->params, NULL);
        HR_ASSERT(status == HR_OK || status == HR_ERR_ADAPTER_UNKNOWN);
        if (status == HR_OK) {
            wait_for(a);
            HR_ASSERT(a->finish.type == HR_FINISH_LENGTH ||
                      a->finish.status == HR_ERR_ADAPTER_UNKNOWN);
        }
        if (status == HR_OK && a->finish.type == HR_FINISH_LENGTH)
            check_answer(me, a);
        else
            me->n_refused++;
    }
    free(a);
    return NULL;
}

/* One session: the adapter, and the base when it changes. */
static void push_both(hr_engine *engine, uint32_t adapter, uint32_t base, bool with_base) {
    char version[8];
    hr_error err = {0};
    name_version(version, adapter, base);
    weights w = adapter_weights("x:", adapter ? 0.5f : 1);
    if (with_base) {
        weights b = base_weights(base ? 0.5f : 1);
        w.items = realloc(w.items, (w.n + b.n) * sizeof *w.items);
        assert_non_null(w.items);
        memcpy(w.items + w.n, b.items, b.n * sizeof *w.items);
        w.n += b.n;
        free(b.items);
    }
    ok(push(engine, &w, &(hr_end_options){.weight_version = version}, &err), &err);
    weights_free(&w);
}

static void run_version(hr_engine *engine, asked *a, const char *lora) {
    ask(a, 0, 40, 20, lora);
    submit(engine, a);
    wait_for(a);
}

static void everything_at_once_gives_each_request_its_version(void **state) {
    (void)state;
    static asked of_adapter[4], of_base[2];
    hr_engine *engine = open_engine(model_dir);
    hr_error err = {0};
    register_name(engine, "x");
    for (uint32_t v = 0; v < 4; v++) {
        push_both(engine, v / 2, v % 2, true);
        run_version(engine, &of_adapter[v], "x");
        run_version(engine, &of_base[v % 2], NULL);
    }
    pthread_t threads[N_CLIENTS];
    client clients[N_CLIENTS];
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        clients[i] =
            (client){.engine = engine, .index = i, .of_adapter = of_adapter, .of_base = of_base};
        assert_int_equal(pthread_create(&threads[i], NULL, client_main, &clients[i]), 0);
    }
    uint32_t base = 1;
    for (uint32_t i = 0; i < N_PUSHES; i++) {
        bool with_base = i % 4 == 3;
        base ^= with_base;
        if (i % 7 == 6)
            ok(hr_engine_pause(engine, i % 2 ? HR_PAUSE_RETRACT : HR_PAUSE_IN_PLACE, 30000, &err),
               &err);
        if (i % 11 == 10) {
            ok(hr_engine_unload_adapter(engine, "x", &err), &err);
            register_name(engine, "x");
        }
        push_both(engine, i % 2, base, with_base);
        hr_engine_continue(engine);
    }
    uint32_t whole = 0, ended = 0;
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        pthread_join(threads[i], NULL);
        whole += clients[i].n_whole;
        ended += clients[i].n_whole + clients[i].n_mixed + clients[i].n_refused;
    }
    assert_int_equal(ended, N_CLIENTS * N_ASKED);
    assert_true(whole > N_CLIENTS * N_ASKED / 4);
    close_engine(engine);
}

/* ---- in place: the sink without an engine around it ---- */

static void no_step(void *self, const hr_view *view, hr_logits_fn on_logits, void *ctx) {
    (void)self, (void)view, (void)on_logits, (void)ctx;
    fail_msg("no request was made");
}

static void no_page(void *self, uint32_t page) {
    (void)self, (void)page;
}

typedef struct stand {
    hr_pool *pool;
    hr_model *model;
    hr_adapter_store *store;
    hr_loop *loop;
    hr_update *update;
    hr_receiver *receiver;
} stand;

static void stand_open(stand *s) {
    hr_error err = {0};
    hr_alloc alloc = hr_alloc_system();
    ok(hr_pool_create(1, &s->pool, &err), &err);
    ok(hr_model_load(&(hr_model_options){.dir = model_dir, .pool = s->pool}, &s->model, &err),
       &err);
    hr_adapter_store_limits limits = {0, 8};
    ok(hr_adapter_store_create(&limits, &alloc, &s->store, &err), &err);
    hr_loop_config loop = {.scheduler = {.limits = {.vocab_size = TINY_VOCAB,
                                                    .context_length = 100,
                                                    .kv_tokens = 128,
                                                    .chunked_prefill_size = 16},
                                         .max_running = 2,
                                         .max_adapters = 8,
                                         .n_pages = 4,
                                         .n_workers = 1,
                                         .kernels = hr_kernels_tier(0),
                                         .executor = {s, no_step, no_page},
                                         .clock = hr_clock_monotonic(),
                                         .alloc = alloc,
                                         .weight_version = "one"},
                           .store = s->store,
                           .max_queued = 8};
    ok(hr_loop_create(&loop, &s->loop, &err), &err);
    hr_update_config update = {.model = s->model,
                               .store = s->store,
                               .loop = s->loop,
                               .enable_lora = true,
                               .shadow = false,
                               .alloc = alloc};
    ok(hr_update_create(&update, &s->update, &err), &err);
    hr_receiver_sink sink = hr_update_sink(s->update);
    hr_receiver_options options = {.instance = "test", .base_mode = "in_place"};
    ok(hr_receiver_create(&options, &sink, &s->receiver, &err), &err);
}

static void stand_close(stand *s) {
    hr_receiver_destroy(s->receiver);
    hr_update_destroy(s->update);
    hr_loop_destroy(s->loop);
    hr_adapter_store_destroy(s->store);
    hr_model_destroy(s->model);
    hr_pool_destroy(s->pool);
}

static hr_token_verdict any_token(void *ctx, const hr_position_logprobs *token) {
    (void)ctx, (void)token;
    return HR_TOKEN_CONTINUE;
}

static void any_finish(void *ctx, const hr_finish *finish) {
    *(hr_finish_type *)ctx = finish->type;
}

static hr_status try_request(stand *s, hr_error *err) {
    static const uint32_t prompt[] = {1};
    hr_request_params p = {.rid = "r",
                           .input_ids = prompt,
                           .n_input_ids = 1,
                           .sampling = hr_sampling_params_default(),
                           .on_token = any_token,
                           .on_finish = any_finish};
    return hr_loop_check(s->loop, &p, err);
}

static void first_value(stand *s, const char *name, float *first) {
    float *values = NULL;
    size_t rows, columns;
    bool is_vector;
    hr_error err = {0};
    ok(hr_model_weight_values(s->model, name, 1, &values, &rows, &columns, &is_vector, &err), &err);
    *first = values[0];
    free(values);
}

static void in_place_a_failure_is_unservable_until_all_weights_came(void **state) {
    (void)state;
    stand s;
    stand_open(&s);
    weights w = base_weights(0.5f);
    hr_error err = {0};
    char id[HR_SESSION_ID_SIZE];
    float before, now;
    first_value(&s, "model.norm.weight", &before);

    /* Given up before a byte was written: nothing is lost. */
    hr_session_options begin = {.sync_base = true};
    hr_bucket wrong = {.tensors = w.items, .n = 1};
    ok(hr_receiver_begin(s.receiver, &begin, id, &err), &err);
    w.items[0].shape[0]--;
    assert_int_not_equal(hr_receiver_bucket(s.receiver, &wrong, &err), HR_OK);
    w.items[0].shape[0]++;
    ok(hr_receiver_abort(s.receiver, id, &err), &err);
    ok(try_request(&s, &err), &err);

    /* Half of the weights, then the end of it. */
    ok(hr_receiver_begin(s.receiver, &begin, id, &err), &err);
    hr_bucket half = {.tensors = w.items, .n = w.n / 2};
    ok(hr_receiver_bucket(s.receiver, &half, &err), &err);
    ok(hr_receiver_abort(s.receiver, id, &err), &err);
    assert_int_equal(try_request(&s, &err), HR_ERR_UNSERVABLE);
    assert_non_null(strstr(err.message, "incomplete"));

    /* A part does not make it whole; once the rest has come too it is. */
    hr_bucket rest = {.tensors = w.items + half.n, .n = w.n - half.n};
    ok(hr_receiver_apply(s.receiver, NULL, &half, &(hr_end_options){0}, NULL, &err), &err);
    assert_int_equal(try_request(&s, &err), HR_ERR_UNSERVABLE);
    ok(hr_receiver_apply(s.receiver, NULL, &half, &(hr_end_options){0}, NULL, &err), &err);
    assert_int_equal(try_request(&s, &err), HR_ERR_UNSERVABLE);
    hr_end_options end = {.weight_version = "two"};
    ok(hr_receiver_apply(s.receiver, NULL, &rest, &end, NULL, &err), &err);
    ok(try_request(&s, &err), &err);
    first_value(&s, "model.norm.weight", &now);
    assert_true(now == before * 0.5f);
    char version[16];
    hr_loop_weight_version(s.loop, version, sizeof version);
    assert_string_equal(version, "two");
    weights_free(&w);
    stand_close(&s);
}

/* ---- */

/* A second model: the tiny one with all weights halved. */
static void write_other_model(void) {
    char from[160], to[160], text[2048];
    HR_ASSERT(mkdir(other_dir, 0700) == 0);
    snprintf(from, sizeof from, "%s/config.json", model_dir);
    snprintf(to, sizeof to, "%s/config.json", other_dir);
    FILE *in = fopen(from, "r"), *out = fopen(to, "w");
    HR_ASSERT(in != NULL && out != NULL);
    size_t n = fread(text, 1, sizeof text, in);
    HR_ASSERT(n > 0 && n < sizeof text && fwrite(text, 1, n, out) == n);
    HR_ASSERT(fclose(in) == 0 && fclose(out) == 0);
    weights w = base_weights(0.5f);
    snprintf(to, sizeof to, "%s/model.safetensors", other_dir);
    HR_ASSERT(hr_safetensors_save(to, w.items, w.n, NULL) == HR_OK);
    weights_free(&w);
}

static void remove_other_model(void) {
    char path[160];
    snprintf(path, sizeof path, "%s/config.json", other_dir);
    remove(path);
    snprintf(path, sizeof path, "%s/model.safetensors", other_dir);
    remove(path);
    rmdir(other_dir);
}

int main(void) {
    snprintf(work_dir, sizeof work_dir, "/tmp/headrace-updates-XXXXXX");
    HR_ASSERT(mkdtemp(work_dir) != NULL);
    tiny_model_write(work_dir);
    snprintf(model_dir, sizeof model_dir, "%s/model", work_dir);
    snprintf(adapter_dir, sizeof adapter_dir, "%s/adapter", work_dir);
    snprintf(other_dir, sizeof other_dir, "%s/other", work_dir);
    write_other_model();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_streamed_adapter_is_the_one_on_disk),
        cmocka_unit_test(an_upsert_leaves_running_requests_alone),
        cmocka_unit_test(a_session_that_fails_changes_nothing),
        cmocka_unit_test(a_name_that_gave_way_has_a_place_again_before_it_is_prepared),
        cmocka_unit_test(a_load_call_that_fails_leaves_no_pin_on_a_waiting_name),
        cmocka_unit_test(registered_names_can_be_refused_listed_and_forgotten),
        cmocka_unit_test(a_base_update_is_as_if_there_had_never_been_other_weights),
        cmocka_unit_test(frozen_requests_go_on_with_new_base_weights),
        cmocka_unit_test(a_directory_replaces_all_base_weights_or_none),
        cmocka_unit_test(memory_comes_back_and_weights_must_come_again),
        cmocka_unit_test(the_weights_checker_finds_what_changed),
        cmocka_unit_test(everything_at_once_gives_each_request_its_version),
        cmocka_unit_test(in_place_a_failure_is_unservable_until_all_weights_came),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    remove_other_model();
    tiny_model_remove(work_dir);
    return failed;
}
