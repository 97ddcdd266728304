/* Stop expressions in a stream: what is out is never taken back, costs are bounded, and strings and
 * expressions together stop at whichever ends first. */
#include "text/stop.h"
#include "text/stop_regex.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Streams text in pieces of `size` characters of one byte; the text that comes out. */
static void check(const char *stop_string, const char *pattern, const char *text, size_t size,
                  bool keep, const char *wanted, int wanted_match) {
    hr_stop *stop;
    hr_buf out = {0};
    hr_error err;
    int matched = -1;
    size_t n_strings = stop_string != NULL;
    assert_int_equal(hr_stop_create(&stop_string, n_strings, &stop, NULL), HR_OK);
    if (hr_stop_add_regexes(stop, &pattern, 1, &err) != HR_OK)
        fail_msg("%s: %s", pattern, err.message);
    for (size_t at = 0; at < strlen(text) && matched < 0; at += size) {
        size_t n = strlen(text) - at < size ? strlen(text) - at : size;
        assert_int_equal(hr_stop_push(stop, text + at, n, keep, &out, &matched, NULL), HR_OK);
        assert_true(out.len <= strlen(wanted));
        assert_memory_equal(out.len > 0 ? out.data : "", wanted, out.len);
    }
    if (matched < 0)
        assert_int_equal(hr_stop_flush(stop, &out, NULL), HR_OK);
    assert_int_equal(matched, wanted_match);
    assert_string_equal(out.data != NULL ? out.data : "", wanted);
    hr_buf_free(&out);
    hr_stop_free(stop);
}

static void check_sizes(const char *stop_string, const char *pattern, const char *text, bool keep,
                        const char *wanted, int wanted_match) {
    for (size_t size = 1; size <= strlen(text); size++)
        check(stop_string, pattern, text, size, keep, wanted, wanted_match);
}

static void a_match_is_cut_off_wherever_the_pieces_end(void **state) {
    (void)state;
    check_sizes(NULL, "E[NM]D", "xEEMD", false, "xE", 0);
    check_sizes(NULL, "E[NM]D", "xEEMD", true, "xEEMD", 0);
    check_sizes(NULL, "E[NM]D", "xEEM", false, "xEEM", -1);
    check_sizes(NULL, "\\n\\nHuman: ?", "hi\n\nHuman:", false, "hi", 0);
    check_sizes(NULL, "foo(?!d)[a-z]", "a food foot", false, "a food ", 0);
}

static void look_behind_sees_what_is_out_already(void **state) {
    (void)state;
    check_sizes(NULL, "(?<=ab)c", "xcabc", false, "xcab", 0);
    check_sizes(NULL, "^b", "ab", false, "ab", -1);
    check_sizes(NULL, "(?m)^b", "a\nb", false, "a\n", 0);
    check_sizes(NULL, "\\bend\\s", "bend end ", false, "bend ", 0);
}

static void the_beginning_of_a_long_stream_is_not_mistaken(void **state) {
    (void)state;
    char text[4001];
    memset(text, 'a', 4000);
    text[4000] = '\0';
    text[3000] = 'b';
    check(NULL, "^b", text, 7, false, text, -1);
}

static void strings_and_expressions_stop_at_the_first_end(void **state) {
    (void)state;
    check("END", "E.*D", "xEND", 1, false, "x", 0); /* both end there: the string */
    check("ND", "E.", "xENDy", 1, false, "x", 1);
    check("EN", "EN.", "xENDy", 1, false, "x", 0);
    check("zz", "b+c", "abbzz", 1, false, "abb", 0);
}

static void look_back_is_bounded(void **state) {
    (void)state;
    enum { N = 3 * HR_STOP_REGEX_WINDOW };
    hr_stop *stop;
    hr_buf out = {0};
    int matched;
    const char *pattern = "a[^b]*b";
    char text[N + 1];
    memset(text, 'x', N);
    text[0] = 'a';
    assert_int_equal(hr_stop_create(NULL, 0, &stop, NULL), HR_OK);
    assert_int_equal(hr_stop_add_regexes(stop, &pattern, 1, NULL), HR_OK);
    for (size_t at = 0; at < N; at += 16) {
        assert_int_equal(hr_stop_push(stop, text + at, 16, false, &out, &matched, NULL), HR_OK);
        assert_int_equal(matched, -1);
    }
    assert_true(out.len >= N - HR_STOP_REGEX_WINDOW - 4);
    hr_buf_free(&out);
    hr_stop_free(stop);
}

static void characters_are_not_split(void **state) {
    (void)state;
    hr_stop *stop;
    hr_buf out = {0};
    int matched;
    const char *pattern = "(?:\xC3\xA9)+!";
    assert_int_equal(hr_stop_create(NULL, 0, &stop, NULL), HR_OK);
    assert_int_equal(hr_stop_add_regexes(stop, &pattern, 1, NULL), HR_OK);
    for (int i = 0; i < 2000; i++) {
        assert_int_equal(hr_stop_push(stop, "\xC3\xA9", 2, false, &out, &matched, NULL), HR_OK);
        assert_int_equal(out.len % 2, 0);
    }
    hr_buf_free(&out);
    hr_stop_free(stop);
}

static void bad_expressions_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"(",  "a**b(", "[z-a]",  "a*",
                                      "x?", "\\C",   "(?=a)|", "(?<=.{257})x"};
    hr_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        hr_stop_regex *regex;
        if (hr_stop_regex_create(&bad[i], 1, &regex, &err) != HR_ERR_INVALID)
            fail_msg("%s was taken", bad[i]);
        assert_non_null(strstr(err.message, "expression 0"));
    }
    static char large[HR_STOP_REGEX_MAX_PATTERN + 2];
    memset(large, 'a', HR_STOP_REGEX_MAX_PATTERN + 1);
    const char *one = large, *many[HR_STOP_REGEX_MAX + 1];
    hr_stop_regex *regex;
    assert_int_equal(hr_stop_regex_create(&one, 1, &regex, &err), HR_ERR_LIMIT);
    for (size_t i = 0; i <= HR_STOP_REGEX_MAX; i++)
        many[i] = "a";
    assert_int_equal(hr_stop_regex_create(many, HR_STOP_REGEX_MAX + 1, &regex, &err), HR_ERR_LIMIT);
}

static void a_search_without_end_is_an_error(void **state) {
    (void)state;
    hr_stop *stop;
    hr_buf out = {0};
    hr_error err;
    int matched;
    const char *pattern = "(a+)+$b|(a|aa)+c";
    char text[65];
    memset(text, 'a', 64);
    text[64] = '\0';
    assert_int_equal(hr_stop_create(NULL, 0, &stop, NULL), HR_OK);
    assert_int_equal(hr_stop_add_regexes(stop, &pattern, 1, NULL), HR_OK);
    assert_int_equal(hr_stop_push(stop, text, 64, false, &out, &matched, &err), HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "stop_regex"));
    hr_buf_free(&out);
    hr_stop_free(stop);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_match_is_cut_off_wherever_the_pieces_end),
        cmocka_unit_test(look_behind_sees_what_is_out_already),
        cmocka_unit_test(the_beginning_of_a_long_stream_is_not_mistaken),
        cmocka_unit_test(strings_and_expressions_stop_at_the_first_end),
        cmocka_unit_test(look_back_is_bounded),
        cmocka_unit_test(characters_are_not_split),
        cmocka_unit_test(bad_expressions_are_refused),
        cmocka_unit_test(a_search_without_end_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
