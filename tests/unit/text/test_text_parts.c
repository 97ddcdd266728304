/* The pieces below the tokenizer: UTF-8, normal forms, regular expressions. */
#include "text/regex.h"
#include "text/unicode_form.h"
#include "text/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <utf8proc.h>

static void utf8_is_checked_to_the_byte(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t len, valid;
    } cases[] = {
        {"", 0, 0},
        {"abc", 3, 3},
        {"a\0b", 3, 3},
        {"\xC3\xA9", 2, 2},
        {"\xF4\x8F\xBF\xBF", 4, 4},
        {"a\xC3", 2, 1},             /* unfinished */
        {"a\xC0\x80", 3, 1},         /* overlong */
        {"a\xE0\x80\x80", 4, 1},     /* overlong */
        {"a\xED\xA0\x80", 4, 1},     /* surrogate */
        {"a\xF4\x90\x80\x80", 5, 1}, /* above U+10FFFF */
        {"\x80", 1, 0},
        {"ab\xFF", 3, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(hr_utf8_valid_prefix(cases[i].text, cases[i].len), cases[i].valid);
}

static void one_replacement_covers_the_maximal_subpart(void **state) {
    (void)state;
    hr_utf8_unit unit = hr_utf8_examine("\xF0\x9F\x98", 3);
    assert_int_equal(unit.kind, HR_UTF8_INCOMPLETE);
    assert_int_equal(unit.len, 3);
    unit = hr_utf8_examine("\xF0\x9F\x41", 3);
    assert_int_equal(unit.kind, HR_UTF8_INVALID);
    assert_int_equal(unit.len, 2);
    unit = hr_utf8_examine("\xED\xA0\x80", 3);
    assert_int_equal(unit.kind, HR_UTF8_INVALID);
    assert_int_equal(unit.len, 1);
}

static void every_character_survives_a_round_trip(void **state) {
    (void)state;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000)
            continue;
        char bytes[4];
        size_t n = hr_utf8_put(cp, bytes), used;
        assert_int_equal(hr_utf8_valid_prefix(bytes, n), n);
        assert_int_equal(hr_utf8_next(bytes, &used), cp);
        assert_int_equal(used, n);
    }
}

/* utf8proc's own whole-string call is the oracle; only its ordering of marks is replaced here. */
static void check_form(const char *text, size_t len, bool compose, bool compat) {
    utf8proc_option_t options = UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    utf8proc_uint8_t *want;
    utf8proc_ssize_t want_len = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)len,
                                             &want, options | (compat ? UTF8PROC_COMPAT : 0));
    assert_true(want_len >= 0);
    hr_buf got = {0};
    assert_int_equal(hr_unicode_form(text, len, compose, compat, &got, NULL), HR_OK);
    assert_int_equal(got.len, want_len);
    assert_memory_equal(got.data, want, got.len);
    hr_buf_free(&got);
    free(want);
}

static void normal_forms_agree_with_the_library(void **state) {
    (void)state;
    static const uint32_t pool[] = {'a',    'e',    0xE9,   0x300,  0x301,  0x323,  0x327,  0x345,
                                    0x1100, 0x1161, 0x11A8, 0xAC00, 0x212B, 0xFB01, 0x1E9B, 0xFDFA,
                                    0x5D0,  0x5B0,  0x5BC,  0x93C,  0x915,  ' ',    0x1F600};
    uint32_t seed = 5;
    for (int round = 0; round < 5000; round++) {
        char text[256];
        size_t len = 0;
        for (uint32_t i = 0, n = 1 + (seed >> 16) % 40; i < n; i++) {
            seed = seed * 1664525u + 1013904223u;
            len += hr_utf8_put(pool[(seed >> 16) % (sizeof pool / sizeof *pool)], text + len);
        }
        for (int form = 0; form < 4; form++)
            check_form(text, len, form % 2 == 0, form >= 2);
    }
}

/* The matches of pattern in text, one [..] each. */
static void check_matches(const char *pattern, hr_regex_dialect dialect, const char *text,
                          const char *want) {
    hr_regex *regex;
    hr_matcher *matcher;
    hr_error err;
    if (hr_regex_compile(&regex, pattern, strlen(pattern), dialect, &err) != HR_OK)
        fail_msg("%s", err.message);
    assert_int_equal(hr_matcher_create(&matcher, NULL), HR_OK);
    hr_match_walk walk = hr_match_walk_start(regex, text, strlen(text));
    hr_buf got = {0};
    hr_buf_puts(&got, "");
    size_t start, end;
    bool found = true;
    while (hr_match_walk_next(&walk, matcher, &found, &start, &end, NULL) == HR_OK && found)
        hr_buf_printf(&got, "[%.*s]", (int)(end - start), text + start);
    assert_string_equal(got.data, want);
    hr_buf_free(&got);
    hr_matcher_free(matcher);
    hr_regex_free(regex);
}

static void patterns_mean_what_they_mean_in_tokenizer_files(void **state) {
    (void)state;
    check_matches("\\d{1,2}+", HR_REGEX_FROM_FILE, "12345 6", "[12345][6]");
    check_matches("(?:a|(b)){2}+c", HR_REGEX_FROM_FILE, "ababc abc abac", "[ababc][abc][bac]");
    check_matches("[x-z]{,2}y", HR_REGEX_FROM_FILE, "xxxy", "[xxy]");
    check_matches("a++a|b", HR_REGEX_FROM_FILE, "aaab", "[b]");
    check_matches("\\h+", HR_REGEX_FROM_FILE, "xBEEF g", "[BEEF]");
    check_matches("\\u4f60", HR_REGEX_FROM_FILE, "\xE4\xBD\xA0", "[\xE4\xBD\xA0]");
    check_matches("^.", HR_REGEX_FROM_FILE, "ab\ncd", "[a][c]");
    check_matches("{a}", HR_REGEX_FROM_FILE, "{a}", "[{a}]");
    check_matches("(?i:'S)", HR_REGEX_FROM_FILE, "it's", "['s]");
    check_matches("\\s", HR_REGEX_FROM_FILE, "\xE1\xA0\x8E \xE3\x80\x80", "[ ][\xE3\x80\x80]");
    check_matches("x*", HR_REGEX_FROM_FILE, "axxb", "[][xx][]");
    check_matches("a.b", HR_REGEX_LITERAL, "axb a.b", "[a.b]");
}

static void patterns_that_would_mean_something_else_are_refused_by_name(void **state) {
    (void)state;
    static const char *const refused[] = {
        "[a&&b]",  "[a[b]]", "[\\W]", "(?m:a)", "(?<n>a)", "\\Qa\\E",     "\\Ka",  "a{2}?",
        "(*FAIL)", "(",      "a)",    "\\",     "[a",      "\\p{NoSuch}", "\\u12", "*",
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        hr_regex *regex = NULL;
        hr_error err = {0};
        assert_int_equal(
            hr_regex_compile(&regex, refused[i], strlen(refused[i]), HR_REGEX_FROM_FILE, &err),
            HR_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.message, refused[i]));
    }
}

/* A pattern that backtracks without end stops with an error, not after hours. */
static void matching_has_a_limit(void **state) {
    (void)state;
    hr_regex *regex;
    hr_matcher *matcher;
    static const char pattern[] = "(?:a|a|aa)*c";
    char text[200];
    memset(text, 'a', sizeof text);
    assert_int_equal(hr_regex_compile(&regex, pattern, strlen(pattern), HR_REGEX_FROM_FILE, NULL),
                     HR_OK);
    assert_int_equal(hr_matcher_create(&matcher, NULL), HR_OK);
    hr_match_walk walk = hr_match_walk_start(regex, text, sizeof text);
    bool found;
    size_t start, end;
    text[0] = 'b';
    text[100] =
        'c'; /* so that the required last character exists, but no match can end there for all */
    text[99] = 'b';
    text[199] = 'c';
    text[198] = 'b';
    hr_error err = {0};
    hr_status status = HR_OK;
    do
        status = hr_match_walk_next(&walk, matcher, &found, &start, &end, &err);
    while (status == HR_OK && found);
    assert_int_equal(status, HR_ERR_LIMIT);
    hr_matcher_free(matcher);
    hr_regex_free(regex);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_is_checked_to_the_byte),
        cmocka_unit_test(one_replacement_covers_the_maximal_subpart),
        cmocka_unit_test(every_character_survives_a_round_trip),
        cmocka_unit_test(normal_forms_agree_with_the_library),
        cmocka_unit_test(patterns_mean_what_they_mean_in_tokenizer_files),
        cmocka_unit_test(patterns_that_would_mean_something_else_are_refused_by_name),
        cmocka_unit_test(matching_has_a_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
