/* What the update and session routes are asked: defaults, laxness, and every refusal by name. */
#include "server/update_request.h"

#include "format/json.h"
#include "server/update_args.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define HEX64 "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define HEX32 "0123456789abcdef0123456789abcdef"

static cJSON *args_of(const char *json) {
    cJSON *args = NULL;
    assert_int_equal(hr_json_parse(json, strlen(json), 0, &args, NULL), HR_OK);
    return args;
}

/* ---- keys and values ---- */

static void unknown_keys_are_refused_by_name(void **state) {
    (void)state;
    static const char *const known[] = {"flush_cache", "weight_version", NULL};
    hr_error err = {.status = HR_OK};
    cJSON *args = args_of("{\"flush_cahce\": false}");
    assert_int_equal(hr_args_check(args, known, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "flush_cahce"));
    assert_non_null(strstr(err.message, "flush_cache, weight_version"));
    cJSON_Delete(args);
    args = args_of("{\"flush_cache\": false, \"flush_cache\": true}");
    assert_int_equal(hr_args_check(args, known, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "twice"));
    cJSON_Delete(args);
    args = args_of("{\"rid\": null, \"http_worker_ipc\": null, \"torch_empty_cache\": true, "
                   "\"disable_draft_model\": null, \"weight_version\": \"7\"}");
    assert_int_equal(hr_args_check(args, known, &err), HR_OK);
    cJSON_Delete(args);
}

static void a_boolean_may_be_written_in_several_ways(void **state) {
    (void)state;
    static const struct {
        const char *json;
        int value; /* -1: refused */
    } cases[] = {
        {"{\"b\": true}", 1},     {"{\"b\": false}", 0},
        {"{\"b\": 1}", 1},        {"{\"b\": 0}", 0},
        {"{\"b\": \"true\"}", 1}, {"{\"b\": \"False\"}", 0},
        {"{\"b\": \"1\"}", 1},    {"{\"b\": \"0\"}", 0},
        {"{\"b\": null}", 1},     {"{}", 1},
        {"{\"b\": 2}", -1},       {"{\"b\": \"yes\"}", -1},
        {"{\"b\": \"\"}", -1},    {"{\"b\": []}", -1},
        {"{\"b\": {}}", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_error err = {.status = HR_OK};
        bool out = true;
        cJSON *args = args_of(cases[i].json);
        hr_status status = hr_args_bool(args, "b", &out, &err);
        assert_int_equal(status, cases[i].value < 0 ? HR_ERR_INVALID : HR_OK);
        assert_int_equal(out, cases[i].value < 0 ? 1 : cases[i].value);
        assert_true(cases[i].value >= 0 || strstr(err.message, "b: wanted true or false") != NULL);
        cJSON_Delete(args);
    }
}

static void a_number_may_be_a_string_of_digits(void **state) {
    (void)state;
    uint64_t out = 5;
    cJSON *args = args_of("{\"a\": \"17\", \"b\": 18, \"c\": null, \"d\": \"x\", \"e\": -1}");
    assert_int_equal(hr_args_u64(args, "a", 0, 100, &out, NULL), HR_OK);
    assert_int_equal(out, 17);
    assert_int_equal(hr_args_u64(args, "b", 0, 100, &out, NULL), HR_OK);
    assert_int_equal(out, 18);
    assert_int_equal(hr_args_u64(args, "c", 0, 100, &out, NULL), HR_OK);
    assert_int_equal(out, 18);
    assert_int_equal(hr_args_u64(args, "d", 0, 100, &out, NULL), HR_ERR_INVALID);
    assert_int_equal(hr_args_u64(args, "e", 0, 100, &out, NULL), HR_ERR_INVALID);
    assert_int_equal(hr_args_u64(args, "b", 0, 17, &out, NULL), HR_ERR_INVALID);
    cJSON_Delete(args);
}

static void seconds_are_positive_and_end(void **state) {
    (void)state;
    uint64_t ms = 0;
    cJSON *args = args_of("{\"a\": 1.5, \"b\": \"0.25\", \"c\": 0, \"d\": -1, \"e\": \"nan\", "
                          "\"f\": 1e9, \"g\": \"2x\", \"h\": \"0x10\", \"i\": \" 1\"}");
    assert_int_equal(hr_args_seconds(args, "a", &ms, NULL), HR_OK);
    assert_int_equal(ms, 1500);
    assert_int_equal(hr_args_seconds(args, "b", &ms, NULL), HR_OK);
    assert_int_equal(ms, 250);
    for (const char *key = "cdefghi"; *key != '\0'; key++) {
        char name[2] = {*key, '\0'};
        assert_int_equal(hr_args_seconds(args, name, &ms, NULL), HR_ERR_INVALID);
    }
    cJSON_Delete(args);
}

static void a_key_of_the_query_must_not_come_twice(void **state) {
    (void)state;
    hr_error err = {.status = HR_OK};
    cJSON *args = args_of("{\"name\": \"x\"}");
    assert_int_equal(hr_args_add(args, "truncate_size", "5", &err), HR_OK);
    assert_int_equal(hr_args_add(args, "name", "y", &err), HR_ERR_INVALID);
    assert_int_equal(hr_args_add(args, "truncate_size", "6", &err), HR_ERR_INVALID);
    assert_int_equal(hr_args_add(args, "lora_name", "caf\xc3\xa9", &err), HR_OK);
    assert_int_equal(hr_args_add(args, "other", "caf\xc3", &err), HR_ERR_INVALID);
    assert_int_equal(hr_args_add(args, "\xed\xa0\x80", "x", &err), HR_ERR_INVALID);
    cJSON_Delete(args);
}

/* ---- registrations ---- */

static hr_status registration_of(const char *json, bool required, hr_update_registration *out,
                                 hr_error *err) {
    cJSON *args = args_of(json);
    hr_status status = hr_update_registration_read(args, 100, required, out, err);
    out->registration.name = out->registration.path = NULL; /* they were of args */
    cJSON_Delete(args);
    return status;
}

static void a_registration_keeps_its_config_as_text(void **state) {
    (void)state;
    hr_update_registration r;
    assert_int_equal(registration_of("{\"lora_name\": \"a\", \"config_dict\": {\"r\": 8}, "
                                     "\"pinned\": true, \"defer_publish\": true}",
                                     true, &r, NULL),
                     HR_OK);
    assert_string_equal(r.registration.config, "{\"r\":8}");
    assert_int_equal(r.registration.config_len, 7);
    assert_true(r.registration.pinned && r.registration.defer_publish);
    assert_false(r.registration.refuse_existing);
    hr_update_registration_free(&r);
    /* a query string has it as text */
    assert_int_equal(registration_of("{\"lora_name\": \"a\", \"config_dict\": \"{\\\"r\\\": 4}\"}",
                                     true, &r, NULL),
                     HR_OK);
    assert_string_equal(r.registration.config, "{\"r\":4}");
    assert_false(r.registration.pinned || r.registration.defer_publish);
    hr_update_registration_free(&r);
}

static void a_registration_that_is_not_whole_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"{\"config_dict\": {}}", "lora_name"},
        {"{\"lora_name\": \"a\"}", "config_dict"},
        {"{\"lora_name\": 5, \"config_dict\": {}}", "lora_name"},
        {"{\"lora_name\": \"a\", \"config_dict\": []}", "config_dict"},
        {"{\"lora_name\": \"a\", \"config_dict\": \"{\"}", "config_dict"},
        {"{\"lora_name\": \"a\", \"config_dict\": \"[]\"}", "config_dict"},
        {"{\"lora_name\": \"a\", \"config_dict\": {\"r\": 1, \"r\": 2}}", "twice"},
        {"{\"lora_name\": \"a\", \"config_dict\": {}, \"added_tokens_config\": {\"<x>\": 100}}",
         "doesn't support adapters that add tokens"},
        {"{\"lora_name\": \"a\", \"config_dict\": {}, \"added_tokens_config\": [1]}",
         "added_tokens_config"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_error err = {.status = HR_OK};
        hr_update_registration r;
        assert_int_not_equal(registration_of(cases[i].json, true, &r, &err), HR_OK);
        assert_non_null(strstr(err.message, cases[i].says));
        hr_update_registration_free(&r);
    }
    hr_update_registration r;
    assert_int_equal(registration_of("{\"lora_name\": \"a\", \"added_tokens_config\": {\"x\": 99}}",
                                     false, &r, NULL),
                     HR_OK); /* a token that the base has */
    assert_null(r.registration.config);
    hr_update_registration_free(&r);
}

/* ---- manifests ---- */

static void a_manifest_is_read_in_every_form(void **state) {
    (void)state;
    static const struct {
        const char *json;
        bool sha256, xxh3, covers_base;
    } cases[] = {
        {"{\"manifest\": {\"a:b\": {\"xxh3\": \"" HEX32 "\", \"sha256\": \"" HEX64 "\"}}}", true,
         true, false},
        {"{\"manifest\": {\"a:b\": {}}, \"covers_base\": true}", false, false, true},
        {"{\"manifest\": {\"a:b\": \"" HEX64 "\"}}", true, false, false},
        {"{\"manifest\": {\"a:b\": \"" HEX32 "\"}}", false, true, false},
        {"{\"manifest\": {\"a:b\": null}}", false, false, false},
        {"{\"manifest\": [\"a:b\"]}", false, false, false},
        {"{\"expected_lora_checksums\": {\"a\": {\"b\": \"" HEX64 "\"}}}", true, false, false},
        {"{\"expected_lora_checksums\": {\"a\": {\"b\": null}}}", false, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_update_manifest m;
        cJSON *args = args_of(cases[i].json);
        assert_int_equal(hr_update_manifest_read(args, &m, NULL), HR_OK);
        assert_non_null(m.manifest);
        assert_int_equal(m.manifest->n, 1);
        assert_int_equal(m.manifest->covers_base, cases[i].covers_base);
        assert_string_equal(m.entries[0].name, "a:b");
        assert_int_equal(m.entries[0].sha256 != NULL, cases[i].sha256);
        assert_int_equal(m.entries[0].xxh3 != NULL, cases[i].xxh3);
        hr_update_manifest_free(&m);
        cJSON_Delete(args);
    }
}

static void an_empty_manifest_is_not_none(void **state) {
    (void)state;
    static const char *const given[] = {"{\"manifest\": {}}", "{\"manifest\": []}",
                                        "{\"expected_lora_checksums\": {}}"};
    static const char *const none[] = {"{}", "{\"manifest\": null}",
                                       "{\"expected_lora_checksums\": null}"};
    hr_update_manifest m;
    for (size_t i = 0; i < 3; i++) {
        cJSON *args = args_of(given[i]);
        assert_int_equal(hr_update_manifest_read(args, &m, NULL), HR_OK);
        assert_non_null(m.manifest);
        assert_int_equal(m.manifest->n, 0);
        hr_update_manifest_free(&m);
        cJSON_Delete(args);
        args = args_of(none[i]);
        assert_int_equal(hr_update_manifest_read(args, &m, NULL), HR_OK);
        assert_null(m.manifest);
        hr_update_manifest_free(&m);
        cJSON_Delete(args);
    }
}

static void a_manifest_that_says_nothing_certain_is_refused(void **state) {
    (void)state;
    static const char *const cases[] = {
        "{\"manifest\": 5}",
        "{\"manifest\": \"x\"}",
        "{\"manifest\": [5]}",
        "{\"manifest\": {\"a\": 5}}",
        "{\"manifest\": {\"a\": \"" HEX32 "0\"}}",
        "{\"manifest\": {\"a\": {\"md5\": \"" HEX32 "\"}}}",
        "{\"manifest\": {\"a\": {\"sha256\": \"" HEX32 "\"}}}",
        "{\"manifest\": {\"a\": {\"xxh3\": \"" HEX64 "\"}}}",
        "{\"manifest\": {\"a\": {\"xxh3\": \"0123456789abcdef0123456789abcdeg\"}}}",
        "{\"expected_lora_checksums\": {\"a\": {\"b\": \"" HEX32 "\"}}}",
        "{\"expected_lora_checksums\": {\"a\": [\"b\"]}}",
        "{\"expected_lora_checksums\": {\"a:b\": {}}}",
        "{\"expected_lora_checksums\": []}",
        "{\"manifest\": {}, \"expected_lora_checksums\": {}}",
        "{\"covers_base\": true}",
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_error err = {.status = HR_OK};
        hr_update_manifest m;
        cJSON *args = args_of(cases[i]);
        assert_int_equal(hr_update_manifest_read(args, &m, &err), HR_ERR_INVALID);
        assert_true(err.message[0] != '\0');
        hr_update_manifest_free(&m);
        cJSON_Delete(args);
    }
}

static void the_checksums_of_one_adapter_get_its_prefix(void **state) {
    (void)state;
    hr_update_manifest m;
    cJSON *args = args_of("{\"expected_checksums\": {\"x.weight\": \"" HEX64 "\", \"y\": null}}");
    assert_int_equal(hr_update_manifest_read_adapter(args, "mine", &m, NULL), HR_OK);
    assert_int_equal(m.manifest->n, 2);
    assert_string_equal(m.entries[0].name, "mine:x.weight");
    assert_string_equal(m.entries[1].name, "mine:y");
    hr_update_manifest_free(&m);
    cJSON_Delete(args);
}

/* ---- options ---- */

static void options_have_their_defaults(void **state) {
    (void)state;
    hr_update_options o;
    hr_update_begin b;
    bool flattened = true;
    cJSON *args = args_of("{}");
    assert_int_equal(hr_update_options_read(args, true, &o, NULL), HR_OK);
    assert_true(o.flush_cache);
    assert_false(o.abort_all_requests || o.complete_base || o.audit);
    assert_null(o.session_id);
    assert_null(o.weight_version);
    assert_int_equal(o.timeout_ms, 600000);
    assert_int_equal(hr_update_options_read(args, false, &o, NULL), HR_OK);
    assert_false(o.flush_cache);
    assert_int_equal(hr_update_begin_read(args, &b, NULL), HR_OK);
    assert_true(b.session.sync_base);
    assert_null(b.session.adapters);
    assert_int_equal(b.session.lease_ms, 0);
    hr_update_begin_free(&b);
    assert_int_equal(hr_update_load_format_read(args, &flattened, NULL), HR_OK);
    assert_false(flattened);
    cJSON_Delete(args);
}

static void declared_adapters_are_those_of_the_list(void **state) {
    (void)state;
    static const char *const forms[] = {
        "{\"adapters\": [\"a\", \"b\"], \"sync_base\": false, \"lease_seconds\": 2}",
        "{\"new_lora_names\": [\"a\", \"b\"], \"sync_base\": 0, \"lease_seconds\": \"2\"}"};
    hr_update_begin b;
    for (size_t i = 0; i < 2; i++) {
        cJSON *args = args_of(forms[i]);
        assert_int_equal(hr_update_begin_read(args, &b, NULL), HR_OK);
        assert_int_equal(b.session.n_adapters, 2);
        assert_string_equal(b.session.adapters[1], "b");
        assert_false(b.session.sync_base);
        assert_int_equal(b.session.lease_ms, 2000);
        hr_update_begin_free(&b);
        cJSON_Delete(args);
    }
    cJSON *args = args_of("{\"adapters\": []}"); /* none may come, which is not the same as all */
    assert_int_equal(hr_update_begin_read(args, &b, NULL), HR_OK);
    assert_non_null(b.session.adapters);
    assert_int_equal(b.session.n_adapters, 0);
    hr_update_begin_free(&b);
    cJSON_Delete(args);
}

static void what_cannot_be_begun_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"{\"selector\": \"draft\"}", "draft model"},
        {"{\"selector\": \"some\"}", "selector"},
        {"{\"selector\": 5}", "selector"},
        {"{\"sync_base\": \"maybe\"}", "sync_base"},
        {"{\"adapters\": \"a\"}", "adapters"},
        {"{\"adapters\": [5]}", "adapters"},
        {"{\"adapters\": [], \"new_lora_names\": []}", "not both"},
        {"{\"lease_seconds\": -1}", "lease_seconds"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_error err = {.status = HR_OK};
        hr_update_begin b;
        cJSON *args = args_of(cases[i].json);
        assert_int_not_equal(hr_update_begin_read(args, &b, &err), HR_OK);
        assert_non_null(strstr(err.message, cases[i].says));
        hr_update_begin_free(&b);
        cJSON_Delete(args);
    }
}

static void loaders_that_are_not_served_are_named(void **state) {
    (void)state;
    static const struct {
        const char *json, *says; /* NULL: taken */
        bool flattened;
    } cases[] = {
        {"{\"load_format\": null}", NULL, false},
        {"{\"load_format\": \"direct\"}", NULL, false},
        {"{\"load_format\": \"flattened_bucket\"}", NULL, true},
        {"{\"load_format\": \"nccl_m2n\"}", "NCCL", false},
        {"{\"load_format\": \"my.module.loader\"}", "my.module.loader", false},
        {"{\"load_format\": 5}", "load_format", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_error err = {.status = HR_OK};
        bool flattened = false;
        cJSON *args = args_of(cases[i].json);
        hr_status status = hr_update_load_format_read(args, &flattened, &err);
        assert_int_equal(status == HR_OK, cases[i].says == NULL);
        assert_true(cases[i].says == NULL || strstr(err.message, cases[i].says) != NULL);
        assert_int_equal(status == HR_OK && flattened, cases[i].flattened);
        cJSON_Delete(args);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unknown_keys_are_refused_by_name),
        cmocka_unit_test(a_boolean_may_be_written_in_several_ways),
        cmocka_unit_test(a_number_may_be_a_string_of_digits),
        cmocka_unit_test(seconds_are_positive_and_end),
        cmocka_unit_test(a_key_of_the_query_must_not_come_twice),
        cmocka_unit_test(a_registration_keeps_its_config_as_text),
        cmocka_unit_test(a_registration_that_is_not_whole_is_refused),
        cmocka_unit_test(a_manifest_is_read_in_every_form),
        cmocka_unit_test(an_empty_manifest_is_not_none),
        cmocka_unit_test(a_manifest_that_says_nothing_certain_is_refused),
        cmocka_unit_test(the_checksums_of_one_adapter_get_its_prefix),
        cmocka_unit_test(options_have_their_defaults),
        cmocka_unit_test(declared_adapters_are_those_of_the_list),
        cmocka_unit_test(what_cannot_be_begun_is_refused),
        cmocka_unit_test(loaders_that_are_not_served_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
