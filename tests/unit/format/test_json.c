/* JSON from outside is read strictly and within bounds; what is written reads back. */
#include "format/json.h"
#include "format/json_writer.h"

#include "testing.h"

#include <math.h>

static hr_status parse(const char *text, size_t len, cJSON **out, hr_error *err) {
    /* A copy without anything behind it, so that reading too far is caught. */
    char *copy = malloc(len ? len : 1);
    memcpy(copy, text, len);
    hr_status status = hr_json_parse(copy, len, 0, out, err);
    free(copy);
    return status;
}

static void good_json_is_read(void **state) {
    (void)state;
    static const char *const good[] = {"null",
                                       " true\n",
                                       "0",
                                       "-0.5e+3",
                                       "\"\"",
                                       "[]",
                                       "{}",
                                       "[1,[2,{\"a\":[]}]]",
                                       "{\"a\":1,\"b\":\"\\ud83d\\ude00\\u00e9\\n\"}",
                                       "\"\xf0\x9f\x98\x80\xc3\xa9\"",
                                       "1e999"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        cJSON *tree = NULL;
        hr_error err = {0};
        assert_ok(parse(good[i], strlen(good[i]), &tree, &err), &err);
        cJSON_Delete(tree);
    }
}

static void bad_json_is_refused_with_the_place(void **state) {
    (void)state;
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "[",
                                      "[1",
                                      "[1,]",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "{'a':1}",
                                      "tru",
                                      "nul",
                                      "nullx",
                                      "1 2",
                                      "{} x",
                                      "01",
                                      "1.",
                                      ".5",
                                      "+1",
                                      "-",
                                      "1e",
                                      "0x10",
                                      "NaN",
                                      "Infinity",
                                      "\"",
                                      "\"\\x\"",
                                      "\"\\u12g4\"",
                                      "\"\\ud800\"",
                                      "\"\\udc00\"",
                                      "\"\\ud800\\u0041\"",
                                      "\"\t\"",
                                      "\"\x80\"",
                                      "\"\xc0\xaf\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xe2\x82\"",
                                      "\f1",
                                      "[1\v]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cJSON *tree = NULL;
        hr_error err = {0};
        assert_refused(parse(bad[i], strlen(bad[i]), &tree, &err), &err, "at byte");
        assert_null(tree);
    }
}

/* Strings are read in steps of several bytes: what is special is seen wherever it stands. */
static void every_byte_of_a_string_is_looked_at(void **state) {
    (void)state;
    static const struct {
        const char *raw, *value; /* NULL: refused */
    } kinds[] = {{"x", "x"},
                 {" ", " "},
                 {"\x7f", "\x7f"},
                 {"\\\"", "\""},
                 {"\\\\", "\\"},
                 {"\\/\\b\\f\\n\\r\\t", "/\b\f\n\r\t"},
                 {"\\u0041\\u00e9\\u20aC", "A\xc3\xa9\xe2\x82\xac"},
                 {"\\uD83d\\uDe00", "\xf0\x9f\x98\x80"},
                 {"\xc3\xa9\xf0\x9f\x98\x80", "\xc3\xa9\xf0\x9f\x98\x80"},
                 {"\x1f", NULL},
                 {"\x01", NULL},
                 {"\xff", NULL}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        for (int before = 0; before < 20; before++) {
            for (int after = 0; after < 20; after += 3) {
                char text[128], wanted[128];
                cJSON *tree = NULL;
                hr_error err = {0};
                int n = snprintf(text, sizeof text, "{\"%.*s%s%.*s\": \"%.*s%s%.*s\"}", before,
                                 "aaaaaaaaaaaaaaaaaaaa", kinds[k].raw, after,
                                 "zzzzzzzzzzzzzzzzzzzz", before, "bbbbbbbbbbbbbbbbbbbb",
                                 kinds[k].raw, after, "yyyyyyyyyyyyyyyyyyyy");
                hr_status status = parse(text, (size_t)n, &tree, &err);
                assert_int_equal(status, kinds[k].value != NULL ? HR_OK : HR_ERR_INVALID);
                if (kinds[k].value == NULL)
                    continue;
                snprintf(wanted, sizeof wanted, "%.*s%s%.*s", before, "aaaaaaaaaaaaaaaaaaaa",
                         kinds[k].value, after, "zzzzzzzzzzzzzzzzzzzz");
                assert_string_equal(tree->child->string, wanted);
                snprintf(wanted, sizeof wanted, "%.*s%s%.*s", before, "bbbbbbbbbbbbbbbbbbbb",
                         kinds[k].value, after, "yyyyyyyyyyyyyyyyyyyy");
                assert_string_equal(tree->child->valuestring, wanted);
                cJSON_Delete(tree);
            }
        }
    }
}

static void numbers_are_the_nearest_doubles(void **state) {
    (void)state;
    static const char *const texts[] = {"0",
                                        "-0",
                                        "7",
                                        "-12",
                                        "2147483648",
                                        "-2147483649",
                                        "999999999999999",
                                        "-99999999999999",
                                        "9007199254740993",
                                        "18446744073709551616",
                                        "0.1",
                                        "-2.5e-3",
                                        "1E5",
                                        "123456789012345678901234567890"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cJSON *tree = NULL;
        hr_error err = {0};
        assert_ok(parse(texts[i], strlen(texts[i]), &tree, &err), &err);
        double wanted = strtod(texts[i], NULL);
        assert_memory_equal(&tree->valuedouble, &wanted, sizeof wanted);
        cJSON_Delete(tree);
    }
}

static void nul_is_refused_raw_and_escaped(void **state) {
    (void)state;
    cJSON *tree = NULL;
    hr_error err = {0};
    assert_refused(parse("\"a\0b\"", 5, &tree, &err), &err, "control character");
    assert_refused(parse("1\0", 2, &tree, &err), &err, "more text");
    assert_refused(parse("\"\\u0000\"", 8, &tree, &err), &err, "\\u0000");
}

static void depth_and_size_are_bounded(void **state) {
    (void)state;
    char deep[200];
    cJSON *tree = NULL;
    hr_error err = {0};
    memset(deep, '[', 100);
    memset(deep + 100, ']', 100);
    assert_refused(parse(deep, 200, &tree, &err), &err, "nested");
    assert_int_equal(err.status, HR_ERR_LIMIT);
    assert_ok(parse(deep + 100 - HR_JSON_MAX_DEPTH, 2 * HR_JSON_MAX_DEPTH, &tree, &err), &err);
    cJSON_Delete(tree);
    assert_refused(hr_json_parse("[1,2]", 5, 4, &tree, &err), &err, "limit of 4");
    char digits[80];
    memset(digits, '1', sizeof digits);
    assert_refused(parse(digits, 64, &tree, &err), &err, "63 characters");
}

static void a_key_that_stands_twice_is_found_at_any_depth(void **state) {
    (void)state;
    static const char *const table[][2] = {{"[{\"a\":1},{\"b\":{\"x\":1,\"y\":2,\"x\":3}}]", "x"},
                                           {"[{\"a\":1},{\"a\":1}]", NULL},
                                           {"{\"a\":1,\"A\":1}", NULL}};
    for (size_t i = 0; i < 3; i++) {
        cJSON *tree = NULL;
        hr_error err = {0};
        assert_ok(hr_json_parse(table[i][0], strlen(table[i][0]), 0, &tree, &err), &err);
        const char *found = hr_json_duplicate_key(tree);
        if (table[i][1] == NULL)
            assert_null(found);
        else
            assert_string_equal(found, table[i][1]);
        cJSON_Delete(tree);
    }
}

static const char *const object_text = "{\"n\":7,\"neg\":-3,\"half\":1.5,\"big\":1e300,\"inf\":"
                                       "1e999,\"s\":\"x\",\"digits\":\"18446744073709551615\","
                                       "\"more\":\"18446744073709551616\",\"sign\":\"+1\",\"min\":"
                                       "\"-9223372036854775808\",\"t\":true,\"z\":null,\"l\":[1],"
                                       "\"edge\":9007199254740992}";

static void numbers_are_checked_for_kind_and_range(void **state) {
    (void)state;
    cJSON *o = NULL;
    hr_error err = {0};
    uint64_t u = 5;
    int64_t i = 5;
    double d = 5;
    assert_ok(hr_json_parse(object_text, strlen(object_text), 0, &o, &err), &err);
    assert_ok(hr_json_get_u64(o, "n", 0, 10, &u, &err), &err);
    assert_int_equal(u, 7);
    assert_ok(hr_json_get_u64(o, "edge", 0, UINT64_MAX, &u, &err), &err);
    assert_int_equal(u, 1ull << 53);
    assert_ok(hr_json_get_i64(o, "neg", -5, 5, &i, &err), &err);
    assert_int_equal(i, -3);
    assert_ok(hr_json_get_double(o, "half", 0, 2, &d, &err), &err);
    assert_ok(hr_json_opt_u64(o, "z", 0, 1, &u, &err), &err);
    assert_ok(hr_json_opt_u64(o, "absent", 0, 1, &u, &err), &err);
    assert_int_equal(u, 1ull << 53);

    assert_refused(hr_json_get_u64(o, "n", 8, 10, &u, &err), &err, "n: wanted 8 to 10, came 7");
    assert_refused(hr_json_get_u64(o, "neg", 0, 10, &u, &err), &err, "came -3");
    assert_refused(hr_json_get_u64(o, "half", 0, 10, &u, &err), &err, "integer, came 1.5");
    assert_refused(hr_json_get_u64(o, "big", 0, UINT64_MAX, &u, &err), &err, "2^53");
    assert_refused(hr_json_get_u64(o, "inf", 0, UINT64_MAX, &u, &err), &err, "2^53");
    assert_refused(hr_json_get_double(o, "inf", 0, 1e308, &d, &err), &err, "inf:");
    assert_refused(hr_json_get_u64(o, "s", 0, 10, &u, &err), &err, "came a string");
    assert_refused(hr_json_get_u64(o, "t", 0, 10, &u, &err), &err, "came a bool");
    assert_refused(hr_json_get_u64(o, "digits", 0, 10, &u, &err), &err, "came a string");
    assert_refused(hr_json_get_u64(o, "absent", 0, 10, &u, &err), &err, "absent");
    assert_refused(hr_json_get_u64(o, "z", 0, 10, &u, &err), &err, "absent");
    assert_int_equal(u, 1ull << 53);
    cJSON_Delete(o);
}

static void digit_strings_are_exact_where_they_are_taken(void **state) {
    (void)state;
    cJSON *o = NULL;
    hr_error err = {0};
    uint64_t u = 0;
    int64_t i = 0;
    assert_ok(hr_json_parse(object_text, strlen(object_text), 0, &o, &err), &err);
    assert_ok(
        hr_json_u64(hr_json_get(o, "digits"), "seed", 0, UINT64_MAX, HR_JSON_DIGITS, &u, &err),
        &err);
    assert_true(u == UINT64_MAX);
    assert_ok(hr_json_i64(hr_json_get(o, "min"), "seed", INT64_MIN, 0, HR_JSON_DIGITS, &i, &err),
              &err);
    assert_true(i == INT64_MIN);
    static const char *const wrong[] = {"more", "sign", "s"};
    for (size_t k = 0; k < 3; k++)
        assert_refused(
            hr_json_u64(hr_json_get(o, wrong[k]), "seed", 0, UINT64_MAX, HR_JSON_DIGITS, &u, &err),
            &err, "seed: wanted an integer of 64 bits");
    cJSON_Delete(o);
}

static void integers_are_exact_over_64_bits(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t value;
    } good[] = {{"9007199254740993", 9007199254740993u},
                {"9223372036854775807", INT64_MAX},
                {"18446744073709551615", UINT64_MAX},
                {"1000000000000000", 1000000000000000u},
                {"1e15", 1000000000000000u}};
    static const char *const bad[] = {
        "18446744073709551616",     "9007199254740995.0", "1e19",
        "123456789012345678901234", "-9007199254740993",  "1234567890.12345678"};
    hr_error err = {0};
    for (size_t k = 0; k < sizeof good / sizeof *good; k++) {
        cJSON *tree = NULL;
        uint64_t u = 0;
        assert_ok(hr_json_parse(good[k].text, strlen(good[k].text), 0, &tree, &err), &err);
        assert_ok(hr_json_u64(tree, "x", 0, UINT64_MAX, HR_JSON_NUMBER, &u, &err), &err);
        assert_true(u == good[k].value);
        cJSON_Delete(tree);
    }
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        cJSON *tree = NULL;
        uint64_t u = 0;
        assert_ok(hr_json_parse(bad[k], strlen(bad[k]), 0, &tree, &err), &err);
        assert_refused(hr_json_u64(tree, "x", 0, UINT64_MAX, HR_JSON_NUMBER, &u, &err), &err,
                       "x: wanted an integer");
        cJSON_Delete(tree);
    }
    static const char least[] = "-9223372036854775808", less[] = "-9223372036854775809";
    cJSON *tree = NULL;
    int64_t i = 0;
    assert_ok(hr_json_parse(least, strlen(least), 0, &tree, &err), &err);
    assert_ok(hr_json_i64(tree, "x", INT64_MIN, 0, HR_JSON_NUMBER, &i, &err), &err);
    assert_true(i == INT64_MIN);
    cJSON_Delete(tree);
    assert_ok(hr_json_parse(less, strlen(less), 0, &tree, &err), &err);
    assert_refused(hr_json_i64(tree, "x", INT64_MIN, 0, HR_JSON_NUMBER, &i, &err), &err, "x:");
    cJSON_Delete(tree);
}

static void other_kinds_are_named_when_they_come_instead(void **state) {
    (void)state;
    cJSON *o = NULL;
    hr_error err = {0};
    bool b = false;
    const char *s = NULL;
    assert_ok(hr_json_parse(object_text, strlen(object_text), 0, &o, &err), &err);
    assert_ok(hr_json_get_bool(o, "t", &b, &err), &err);
    assert_true(b);
    assert_ok(hr_json_get_string(o, "s", &s, &err), &err);
    assert_string_equal(s, "x");
    assert_refused(hr_json_get_bool(o, "l", &b, &err), &err,
                   "l: wanted true or false, came an array");
    assert_refused(hr_json_get_string(o, "n", &s, &err), &err, "n: wanted a string, came a number");
    cJSON_Delete(o);
}

static void a_document_is_written_as_json(void **state) {
    (void)state;
    hr_buf buf = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &buf);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "s", "a\"b\\\n\x01\x7f/");
    hr_json_key(&w, "l");
    hr_json_array_begin(&w);
    hr_json_write_i64(&w, INT64_MIN);
    hr_json_write_u64(&w, UINT64_MAX);
    hr_json_write_null(&w);
    hr_json_array_begin(&w);
    hr_json_array_end(&w);
    hr_json_write_raw(&w, "{}", 2);
    hr_json_array_end(&w);
    hr_json_put_bool(&w, "t", true);
    hr_json_put_f64(&w, "d", 0.1);
    hr_json_object_end(&w);
    assert_false(buf.failed);
    assert_string_equal(
        buf.data,
        "{\"s\":\"a\\\"b\\\\\\n\\u0001\x7f/\",\"l\":[-9223372036854775808,18446744073709551615,"
        "null,[],{}],\"t\":true,\"d\":0.1}");
    hr_buf_free(&buf);
}

static void strings_keep_valid_utf8_and_replace_the_rest(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"h\xc3\xa9\xf0\x9f\x98\x80", "\"h\xc3\xa9\xf0\x9f\x98\x80\""},
        {"a\x80z", "\"a\xef\xbf\xbdz\""},
        {"\xe2\x82", "\"\xef\xbf\xbd\xef\xbf\xbd\""},
        {"\xed\xa0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        hr_buf buf = {0};
        hr_json_writer w;
        hr_json_writer_init(&w, &buf);
        hr_json_write_string(&w, table[i][0]);
        assert_string_equal(buf.data, table[i][1]);
        hr_buf_free(&buf);
    }
    hr_buf buf = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &buf);
    hr_json_write_string_n(&w, "\0", 1);
    assert_string_equal(buf.data, "\"\\u0000\"");
    hr_buf_free(&buf);
}

static void assert_f32_text(float value) {
    char wanted[48];
    hr_buf buf = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &buf);
    hr_json_write_f32(&w, value);
    snprintf(wanted, sizeof wanted - 2, "%.9g", (double)value);
    if (strcspn(wanted, ".e") == strlen(wanted))
        strcat(wanted, ".0");
    if (value == 0)
        strcpy(wanted, "0.0");
    assert_string_equal(buf.data, wanted);
    assert_true(strtof(buf.data, NULL) == value);
    hr_buf_free(&buf);
}

static void f32_is_printed_with_nine_digits_and_reads_back(void **state) {
    (void)state;
    static const float some[] = {
        0.0f,        -0.0f,       1.0f,        -1.0f,         0.1f,      -12.3456789f,
        1e-4f,       9.9999e-5f,  99999999.0f, 1e8f,          1e9f,      123456789.0f,
        0.5f,        0.25f,       1e-45f,      3.4028235e38f, 999999.9f, 0.00099999999f,
        16777216.0f, 1.00000012f, 100.0f,      120.0f,        4194304.5f};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++)
        assert_f32_text(some[i]);
    uint32_t bits = 12345;
    for (int i = 0; i < 300000; i++) {
        float value;
        bits = bits * 1664525u + 1013904223u;
        /* magnitudes of logprobs, and any others */
        uint32_t pattern =
            i % 3 ? (bits >> 9) | (0x38000000u + (bits % 19) * 0x00800000u) | 0x80000000u : bits;
        memcpy(&value, &pattern, 4);
        if (isfinite(value))
            assert_f32_text(value);
    }
}

static void what_is_not_a_number_becomes_null(void **state) {
    (void)state;
    hr_buf buf = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &buf);
    hr_json_array_begin(&w);
    hr_json_write_f32(&w, -INFINITY);
    hr_json_write_f32(&w, NAN);
    hr_json_write_f64(&w, INFINITY);
    hr_json_array_end(&w);
    assert_string_equal(buf.data, "[null,null,null]");
    hr_buf_free(&buf);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_json_is_read),
        cmocka_unit_test(bad_json_is_refused_with_the_place),
        cmocka_unit_test(every_byte_of_a_string_is_looked_at),
        cmocka_unit_test(numbers_are_the_nearest_doubles),
        cmocka_unit_test(nul_is_refused_raw_and_escaped),
        cmocka_unit_test(depth_and_size_are_bounded),
        cmocka_unit_test(a_key_that_stands_twice_is_found_at_any_depth),
        cmocka_unit_test(numbers_are_checked_for_kind_and_range),
        cmocka_unit_test(digit_strings_are_exact_where_they_are_taken),
        cmocka_unit_test(integers_are_exact_over_64_bits),
        cmocka_unit_test(other_kinds_are_named_when_they_come_instead),
        cmocka_unit_test(a_document_is_written_as_json),
        cmocka_unit_test(strings_keep_valid_utf8_and_replace_the_rest),
        cmocka_unit_test(f32_is_printed_with_nine_digits_and_reads_back),
        cmocka_unit_test(what_is_not_a_number_becomes_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
