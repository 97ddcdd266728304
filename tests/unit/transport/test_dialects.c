/* What each form puts on the wire, stage by stage. */
#include "base/buf.h"
#include "format/base64.h"
#include "format/json.h"
#include "format/torch_payload.h"
#include "transport/dialect.h"
#include "transport/sglang_body.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char config[] = "{\"r\": 8}";
static const hr_push_adapter adapters[] = {{"a", config, sizeof config - 1, true},
                                           {"a b", config, sizeof config - 1, false}};
static const float values[6] = {1, 2, 3, 4, 5, 6};
static const hr_tensor tensors[] = {{.name = "a:l.lora_A.weight",
                                     .dtype = HR_DTYPE_F32,
                                     .ndim = 2,
                                     .shape = {2, 3},
                                     .data = values,
                                     .bytes = 24},
                                    {.name = "a:l.lora_B.weight",
                                     .dtype = HR_DTYPE_F32,
                                     .ndim = 1,
                                     .shape = {2},
                                     .data = values,
                                     .bytes = 8}};

typedef struct exchange {
    hr_endpoint engine;
    hr_step step;
    hr_stage_request request;
    hr_wire_bucket bucket;
    hr_manifest_digest manifest[3];
} exchange;

static void open_exchange(exchange *x, hr_stage stage, uint64_t tp_size) {
    static char url[] = "http://e";
    memset(x, 0, sizeof *x);
    x->engine = (hr_endpoint){url, tp_size};
    x->step.engine = &x->engine;
    assert_int_equal(hr_wire_bucket_open(tensors, 2, &x->bucket, NULL), HR_OK);
    hr_wire_bucket_sha256(&x->bucket);
    const char *names[] = {"a:l.lora_A.weight", "a:l.lora_B.weight", "layers.0"};
    for (size_t i = 0; i < 3; i++) {
        x->manifest[i].name = names[i];
        memset(x->manifest[i].xxh3, (int)i + 1, HR_XXH3_SIZE);
        memset(x->manifest[i].sha256, 'a' + (int)i, HR_SHA256_HEX - 1);
    }
    x->request = (hr_stage_request){.stage = stage,
                                    .session_id = "s 1",
                                    .pause = HR_PUSH_PAUSE_IN_PLACE,
                                    .registrations = &adapters[0],
                                    .n_registrations = 1,
                                    .adapters = adapters,
                                    .n_adapters = 2,
                                    .sync_base = true,
                                    .lease_ms = 1500,
                                    .bucket = &x->bucket,
                                    .stream = "r0",
                                    .index = 3,
                                    .manifest = x->manifest,
                                    .n_manifest = 3,
                                    .weight_version = "v9",
                                    .requests_ms = 2250,
                                    .timeout_ms = 2500};
}

static void clear_call(exchange *x) {
    hr_buf_free(&x->step.path);
    hr_buf_free(&x->step.text);
    free(x->step.body_state);
    x->step.body_state = NULL;
    x->step.body = (hr_http_body){0};
}

static void close_exchange(exchange *x) {
    clear_call(x);
    hr_wire_bucket_close(&x->bucket);
}

static void expect_call(exchange *x, const hr_dialect *d, const char *path, const char *text) {
    assert_true(d->next(&x->request, &x->step));
    assert_string_equal(x->step.path.data, path);
    if (text != NULL)
        assert_string_equal(x->step.text.data, text);
}

static void expect_done(exchange *x, const hr_dialect *d, hr_status status) {
    clear_call(x);
    x->step.number++;
    assert_false(d->next(&x->request, &x->step));
    assert_int_equal(x->step.status, status);
}

static void native_calls(void **state) {
    (void)state;
    static const struct {
        hr_stage stage;
        const char *path, *text;
    } rows[] = {
        {HR_STAGE_PAUSE, "/pause_generation", "{\"mode\": \"in_place\"}"},
        {HR_STAGE_CONTINUE, "/continue_generation", "{}"},
        {HR_STAGE_REGISTER, "/register_lora_adapter",
         "{\"lora_name\":\"a\",\"config_dict\":{\"r\": 8},"
         "\"config_digest\":\"f26bd9b6ad61de80433b3bfa21d9f273\",\"pinned\":true}"},
        {HR_STAGE_BEGIN, "/begin_weight_update",
         "{\"session_id\":\"s 1\",\"sync_base\":true,\"adapters\":[\"a\",\"a b\"],"
         "\"lease_seconds\":1.5,\"timeout_seconds\":2.25}"},
        {HR_STAGE_BUCKET, "/update_weights_from_safetensors?session_id=s%201&stream=r0&index=3",
         NULL},
        {HR_STAGE_PREPARE, "/prepare_weight_update",
         "{\"session_id\":\"s 1\",\"manifest\":{"
         "\"a:l.lora_A.weight\":\"01010101010101010101010101010101\","
         "\"a:l.lora_B.weight\":\"02020202020202020202020202020202\","
         "\"layers.0\":\"03030303030303030303030303030303\"},"
         "\"covers_base\":true,\"complete_base\":false,\"weight_version\":\"v9\","
         "\"flush_cache\":false,\"audit\":false,\"timeout_seconds\":2.25}"},
        {HR_STAGE_COMMIT, "/commit_weight_update", "{\"session_id\":\"s 1\"}"},
        {HR_STAGE_ABORT, "/abort_weight_update", "{\"session_id\":\"s 1\"}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        exchange x;
        open_exchange(&x, rows[i].stage, 1);
        expect_call(&x, &hr_dialect_safetensors, rows[i].path, rows[i].text);
        if (rows[i].stage == HR_STAGE_BUCKET) {
            assert_int_equal(x.step.body.size, x.bucket.size);
            assert_string_equal(x.step.content_type, "application/octet-stream");
        }
        x.step.reply = cJSON_CreateObject();
        assert_non_null(cJSON_AddTrueToObject(x.step.reply, "success"));
        expect_done(&x, &hr_dialect_safetensors, HR_OK);
        cJSON_Delete(x.step.reply);
        close_exchange(&x);
    }
}

static void a_native_call_is_done_when_the_engine_says_so(void **state) {
    (void)state;
    exchange x;
    open_exchange(&x, HR_STAGE_BUCKET, 1);
    expect_call(&x, &hr_dialect_safetensors,
                "/update_weights_from_safetensors?session_id=s%201&stream=r0&index=3", NULL);
    expect_done(&x, &hr_dialect_safetensors, HR_ERR_PEER); /* 200, and no word */
    close_exchange(&x);
}

static void session_calls_of_sglang(void **state) {
    (void)state;
    exchange x;
    open_exchange(&x, HR_STAGE_BEGIN, 1);
    expect_call(&x, &hr_dialect_sglang, "/begin_weight_update",
                "{\"selector\": \"all\", \"sync_base\": true}");
    expect_done(&x, &hr_dialect_sglang, HR_OK);
    close_exchange(&x);

    open_exchange(&x, HR_STAGE_PREPARE, 1);
    assert_false(hr_dialect_sglang.next(&x.request, &x.step));
    close_exchange(&x);

    open_exchange(&x, HR_STAGE_ABORT, 1);
    expect_call(&x, &hr_dialect_sglang, "/end_weight_update", "{\"abort\":true}");
    close_exchange(&x);
}

/* The version is set after the end, without aborting requests, and not when the end was refused. */
static void commit_of_sglang(void **state) {
    (void)state;
    char a[HR_SHA256_HEX] = "", b[HR_SHA256_HEX] = "";
    hr_buf want = {0};
    exchange x;
    memset(a, 'a', HR_SHA256_HEX - 1);
    memset(b, 'b', HR_SHA256_HEX - 1);
    hr_buf_printf(&want,
                  "{\"expected_lora_checksums\":{\"a\":{\"l.lora_A.weight\":\"%s\","
                  "\"l.lora_B.weight\":\"%s\"}}}",
                  a, b);
    open_exchange(&x, HR_STAGE_COMMIT, 1);
    expect_call(&x, &hr_dialect_sglang, "/end_weight_update", want.data);
    clear_call(&x);
    x.step.number = 1;
    expect_call(&x, &hr_dialect_sglang, "/update_weight_version",
                "{\"new_version\":\"v9\",\"abort_all_requests\":false}");
    expect_done(&x, &hr_dialect_sglang, HR_OK);
    close_exchange(&x);

    open_exchange(&x, HR_STAGE_COMMIT, 1);
    expect_call(&x, &hr_dialect_sglang, "/end_weight_update", want.data);
    x.step.status = HR_ERR_DIGEST;
    expect_done(&x, &hr_dialect_sglang, HR_ERR_DIGEST);
    close_exchange(&x);
    hr_buf_free(&want);
}

/* The body in pieces of every size is one JSON text; each rank's text is the same pickle, which
 * holds the tensors and no name of shared memory. */
static void expect_payload(exchange *x, bool flattened, const char *first_name) {
    static const size_t pieces[] = {1, 5, 64, 1000, 1 << 20};
    for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; p++) {
        hr_buf text = {0};
        char *piece = malloc(pieces[p]);
        while (text.len < x->step.body.size) {
            size_t got = x->step.body.read(x->step.body.self, text.len, piece, pieces[p]);
            assert_in_range(got, 1, pieces[p]);
            hr_buf_append(&text, piece, got);
        }
        free(piece);
        cJSON *tree = NULL;
        assert_int_equal(hr_json_parse(text.data, text.len, 0, &tree, NULL), HR_OK);
        const cJSON *list = hr_json_get(tree, "serialized_named_tensors"), *item;
        assert_int_equal(cJSON_GetArraySize(list), x->engine.tp_size);
        cJSON_ArrayForEach(item, list) {
            size_t len = strlen(item->valuestring), size = 0;
            char *bytes = malloc(len + 1);
            hr_torch_payload *payload = NULL;
            hr_torch_options options = {.flattened = flattened};
            assert_int_equal(hr_base64_decode(item->valuestring, len, bytes, &size, NULL), HR_OK);
            assert_true(size >= 32);
            assert_null(memmem(bytes, size, "/torch_", 7));
            assert_int_equal(hr_torch_payload_read(bytes, size, &options, &payload, NULL), HR_OK);
            assert_int_equal(hr_torch_payload_count(payload), 2);
            const hr_tensor *t = hr_torch_payload_tensors(payload);
            size_t at = strcmp(t[0].name, first_name) == 0 ? 0 : 1;
            assert_string_equal(t[at].name, first_name);
            assert_int_equal(t[at].bytes, 24);
            assert_memory_equal(t[at].data, values, 24);
            hr_torch_payload_close(payload);
            free(bytes);
        }
        cJSON_Delete(tree);
        hr_buf_free(&text);
    }
}

static void buckets_of_sglang_are_flattened_for_every_rank(void **state) {
    (void)state;
    for (uint64_t tp = 1; tp <= 3; tp++) {
        exchange x;
        open_exchange(&x, HR_STAGE_BUCKET, tp);
        expect_call(&x, &hr_dialect_sglang, "/update_weights_from_tensor", NULL);
        expect_payload(&x, true, "a:l.lora_A.weight");
        expect_done(&x, &hr_dialect_sglang, HR_OK);
        close_exchange(&x);
    }
}

/* An adapter is a load; where the engine knows no upsert: unload, then load. */
static void loads_of_sglang(void **state) {
    (void)state;
    exchange x;
    open_exchange(&x, HR_STAGE_BUCKET, 2);
    expect_call(&x, &hr_dialect_sglang_load, "/load_lora_adapter_from_tensors", NULL);
    expect_payload(&x, false, "l.lora_A.weight");
    expect_done(&x, &hr_dialect_sglang_load, HR_OK);
    clear_call(&x);
    x.step.number = 1;
    x.step.status = hr_fail(&x.step.err, HR_ERR_INVALID, "upsert is not supported here");
    expect_call(&x, &hr_dialect_sglang_load, "/unload_lora_adapter", "{\"lora_name\":\"a\"}");
    clear_call(&x);
    x.step.number = 2;
    x.step.status = hr_fail(&x.step.err, HR_ERR_INVALID, "LoRA with name a does not exist");
    expect_call(&x, &hr_dialect_sglang_load, "/load_lora_adapter_from_tensors", NULL);
    clear_call(&x);
    x.step.status = hr_fail(&x.step.err, HR_ERR_INVALID, "rank 64 is incompatible");
    expect_done(&x, &hr_dialect_sglang_load, HR_ERR_INVALID);
    assert_false(x.step.untouched); /* what was served under the name is gone */
    close_exchange(&x);
}

/* What the engine has must stay when the new one does not fit. */
static void a_refused_load_unloads_nothing(void **state) {
    (void)state;
    exchange x;
    open_exchange(&x, HR_STAGE_BUCKET, 1);
    expect_call(&x, &hr_dialect_sglang_load, "/load_lora_adapter_from_tensors", NULL);
    x.step.status = hr_fail(&x.step.err, HR_ERR_INVALID, "rank 64 is incompatible");
    expect_done(&x, &hr_dialect_sglang_load, HR_ERR_INVALID);
    assert_true(x.step.untouched);
    close_exchange(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(native_calls),
        cmocka_unit_test(a_native_call_is_done_when_the_engine_says_so),
        cmocka_unit_test(session_calls_of_sglang),
        cmocka_unit_test(commit_of_sglang),
        cmocka_unit_test(buckets_of_sglang_are_flattened_for_every_rank),
        cmocka_unit_test(loads_of_sglang),
        cmocka_unit_test(a_refused_load_unloads_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
