/* Answers of engines in every form they come in. */
#include "transport/engine_receipt.h"
#include "transport/reply.h"

#include "format/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void answers_become_statuses(void **state) {
    (void)state;
    static const struct {
        unsigned http_status;
        const char *text;
        hr_status status;
        const char *message;
    } rows[] = {
        {200, "{\"success\": true}", HR_OK, NULL},
        {200, "", HR_OK, NULL},
        {200, "Cache flushed.", HR_OK, NULL},
        {200, " {\"success\": tr", HR_ERR_PEER,
         "HTTP 200 with JSON that cannot be read (cut short?):  {\"success\": tr"},
        {200, "{\"success\": false, \"message\": \"no\"}", HR_ERR_INVALID, "no"},
        {400, "{\"success\": false, \"message\": \"x\", \"status\": \"ERR_DIGEST\"}", HR_ERR_DIGEST,
         "x"},
        {400, "{\"success\": false, \"message\": \"x\", \"status\": \"OK\"}", HR_ERR_INTERNAL, "x"},
        {400, "{\"success\": false, \"message\": \"x\", \"status\": 7}", HR_ERR_INVALID, "x"},
        {400, "{\"success\": false, \"error_message\": \"bad rank\"}", HR_ERR_INVALID, "bad rank"},
        {400, "{\"error\": {\"message\": \"deep\", \"code\": 400}}", HR_ERR_INVALID, "deep"},
        {404, "{\"detail\": \"Not Found\"}", HR_ERR_UNSUPPORTED, "Not Found"},
        {500, "Internal Server Error", HR_ERR_INTERNAL, "HTTP 500: Internal Server Error"},
        {502, "", HR_ERR_INTERNAL, "HTTP 502 without a word"},
        {503, "{}", HR_ERR_BUSY, "HTTP 503: {}"},
        {504, "{}", HR_ERR_TIMEOUT, "HTTP 504: {}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        cJSON *tree = NULL;
        hr_error err;
        assert_int_equal(
            hr_reply_read(rows[i].http_status, rows[i].text, strlen(rows[i].text), &tree, &err),
            rows[i].status);
        if (rows[i].message != NULL)
            assert_string_equal(err.message, rows[i].message);
        cJSON_Delete(tree);
    }
}

static hr_status read_receipt(const char *text, hr_engine_receipt *out, hr_error *err) {
    cJSON *tree = NULL;
    assert_int_equal(hr_json_parse(text, strlen(text), 0, &tree, NULL), HR_OK);
    hr_status status = hr_engine_receipt_read(tree, out, err);
    cJSON_Delete(tree);
    return status;
}

static void a_receipt_is_read(void **state) {
    (void)state;
    hr_engine_receipt r;
    assert_int_equal(
        read_receipt("{\"state\": \"prepared\", \"session_id\": \"s\", \"instance\": \"i\", "
                     "\"weight_version\": \"v\", \"base_mode\": \"shadow\", \"ranks\": 2, "
                     "\"tensors\": 3, \"bytes\": 4, \"xxh3\": "
                     "\"000102030405060708090a0b0c0d0e0f\", \"adapters\": "
                     "[{\"name\": \"old\"}, {\"name\": \"a\", \"config_digest\": "
                     "\"000102030405060708090a0b0c0d0e0f\"}], "
                     "\"milliseconds\": {\"receive\": 1.5, \"verify\": 0.25}}",
                     &r, NULL),
        HR_OK);
    assert_int_equal(r.state, HR_SESSION_PREPARED);
    assert_string_equal(r.weight_version, "v");
    assert_string_equal(r.base_mode, "shadow");
    assert_int_equal(r.ranks, 2);
    assert_int_equal(r.tensors, 3);
    assert_int_equal(r.bytes, 4);
    assert_true(r.has_xxh3);
    assert_int_equal(r.xxh3[15], 15);
    assert_int_equal(r.receive_ns, 1500000);
    assert_int_equal(r.verify_ns, 250000);
    assert_int_equal(r.n_adapters, 1);
    assert_string_equal(r.adapters[0].name, "a");
    assert_int_equal(r.adapters[0].config_digest[15], 15);
    assert_non_null(strstr(r.json, "\"adapters\":[{\"name\":\"old\"}"));
    hr_engine_receipt_clear(&r);
}

#define A64 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

static void what_is_no_receipt_is_refused(void **state) {
    (void)state;
    static const char *const rows[] = {
        "[]",
        "{}",
        "{\"state\": \"odd\"}",
        "{\"state\": 3}",
        "{\"state\": \"open\", \"xxh3\": \"12\"}",
        "{\"state\": \"open\", \"tensors\": -1}",
        "{\"state\": \"open\", \"adapters\": [{\"name\": \"a\", \"config_digest\": \"12\"}]}",
        "{\"state\": \"open\", \"adapters\": [{\"name\": 3}]}",
        "{\"state\": \"open\", \"tensors\": 1.5}",
        "{\"state\": \"open\", \"milliseconds\": {\"receive\": -1}}",
        /* one more than an id may have */
        ("{\"state\": \"open\", \"weight_version\": \"" A64 A64 A64 A64 "a\"}"),
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        hr_engine_receipt r;
        hr_error err;
        assert_int_equal(read_receipt(rows[i], &r, &err), HR_ERR_INVALID);
        assert_non_null(strstr(err.message, "receipt"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_become_statuses),
        cmocka_unit_test(a_receipt_is_read),
        cmocka_unit_test(what_is_no_receipt_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
