/* Stop strings in a stream (field case 27): the same result however the text is cut, and nothing is
 * taken back. */
#include "text/stop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct outcome {
    size_t len; /* of the text that comes out */
    int matched;
} outcome;

/* The oracle: on the whole text, the first end of any string; of several there the longest. */
static outcome on_whole_text(const char *const *stops, size_t count, const char *text, bool keep) {
    for (size_t end = 1; end <= strlen(text); end++) {
        int hit = -1;
        for (size_t i = 0; i < count; i++) {
            size_t len = strlen(stops[i]);
            if (len <= end && memcmp(text + end - len, stops[i], len) == 0 &&
                (hit < 0 || len > strlen(stops[hit])))
                hit = (int)i;
        }
        if (hit >= 0)
            return (outcome){keep ? end : end - strlen(stops[hit]), hit};
    }
    return (outcome){strlen(text), -1};
}

/* Streams text cut at the set bits of cuts and checks that what is out is always a beginning of the
 * result. */
static void check_cut(const char *const *stops, size_t count, const char *text, uint32_t cuts,
                      bool keep) {
    outcome want = on_whole_text(stops, count, text, keep);
    hr_stop *stop;
    hr_buf out = {0};
    int matched = -1;
    assert_int_equal(hr_stop_create(stops, count, &stop, NULL), HR_OK);
    size_t len = strlen(text), from = 0;
    for (size_t i = 1; i <= len && matched < 0; i++) {
        if (i < len && (cuts >> (i - 1) & 1) == 0)
            continue;
        assert_int_equal(hr_stop_push(stop, text + from, i - from, keep, &out, &matched, NULL),
                         HR_OK);
        from = i;
        assert_true(out.len <= want.len);
    }
    if (matched < 0)
        assert_int_equal(hr_stop_flush(stop, &out, NULL), HR_OK);
    assert_int_equal(matched, want.matched);
    assert_int_equal(out.len, want.len);
    assert_memory_equal(out.len > 0 ? out.data : "", text, out.len);
    hr_buf_free(&out);
    hr_stop_free(stop);
}

static void check_every_cut(const char *const *stops, size_t count, const char *text) {
    for (uint32_t cuts = 0; cuts < 1u << (strlen(text) - 1); cuts++) {
        check_cut(stops, count, text, cuts, false);
        check_cut(stops, count, text, cuts, true);
    }
}

static void a_stop_is_found_across_any_cut(void **state) {
    (void)state;
    check_every_cut((const char *const[]){"END"}, 1, "xENDy");
    check_every_cut((const char *const[]){"END"}, 1, "END");
    check_every_cut((const char *const[]){"END"}, 1, "EENDEND");
    check_every_cut((const char *const[]){"END"}, 1, "the EN");
    check_every_cut((const char *const[]){"aab"}, 1, "aaaaaab");
    check_every_cut((const char *const[]){"abac"}, 1, "ababacx");
    check_every_cut((const char *const[]){"\n\n"}, 1, "a\nb\n\nc");
}

static void the_stop_that_ends_first_wins(void **state) {
    (void)state;
    check_every_cut((const char *const[]){"EN", "END"}, 2, "xENDy");
    check_every_cut((const char *const[]){"END", "EN"}, 2, "xENDy");
    check_every_cut((const char *const[]){"abcd", "bc"}, 2, "xabcdx");
    check_every_cut((const char *const[]){"bc", "abc", "c"}, 3, "xabcx");
    check_every_cut((const char *const[]){"same", "same"}, 2, "a same");
}

static void a_stop_in_the_middle_of_characters_is_found(void **state) {
    (void)state;
    check_every_cut((const char *const[]){"\xE4\xBD\xA0"}, 1, "a\xE4\xBD\xA0\xE5\xA5\xBD");
    check_every_cut((const char *const[]){"\xF0\x9F\x98\x81"}, 1,
                    "\xF0\x9F\x98\x80\xF0\x9F\x98\x81");
}

static void random_texts_agree_with_the_whole_text(void **state) {
    (void)state;
    uint32_t seed = 1;
    for (int round = 0; round < 20000; round++) {
        char text[13], strings[3][4];
        const char *stops[3];
        for (int i = 0; i < 12; i++)
            text[i] = (char)('a' + ((seed = seed * 1664525u + 1013904223u) >> 28) % 3);
        text[12] = '\0';
        for (int s = 0; s < 3; s++) {
            int len = 1 + (int)((seed >> 20) % 3);
            for (int i = 0; i < len; i++)
                strings[s][i] = (char)('a' + ((seed = seed * 1664525u + 1013904223u) >> 28) % 3);
            strings[s][len] = '\0';
            stops[s] = strings[s];
        }
        check_cut(stops, 1 + (size_t)round % 3, text, seed >> 8, round % 2 == 0);
    }
}

static void no_stops_let_all_text_through_at_once(void **state) {
    (void)state;
    hr_stop *stop;
    hr_buf out = {0};
    int matched;
    assert_int_equal(hr_stop_create(NULL, 0, &stop, NULL), HR_OK);
    assert_int_equal(hr_stop_push(stop, "abc", 3, false, &out, &matched, NULL), HR_OK);
    assert_int_equal(matched, -1);
    assert_string_equal(out.data, "abc");
    hr_buf_free(&out);
    hr_stop_free(stop);
}

static void empty_or_too_many_stops_are_refused(void **state) {
    (void)state;
    hr_stop *stop;
    const char *many[HR_STOP_MAX_STRINGS + 1];
    for (size_t i = 0; i <= HR_STOP_MAX_STRINGS; i++)
        many[i] = "x";
    assert_int_equal(hr_stop_create((const char *const[]){"a", ""}, 2, &stop, NULL),
                     HR_ERR_INVALID);
    assert_int_equal(hr_stop_create(many, HR_STOP_MAX_STRINGS + 1, &stop, NULL), HR_ERR_LIMIT);
    char *large = calloc(1, HR_STOP_MAX_BYTES + 2);
    assert_non_null(large);
    memset(large, 'x', HR_STOP_MAX_BYTES + 1);
    assert_int_equal(hr_stop_create((const char *const[]){large}, 1, &stop, NULL), HR_ERR_LIMIT);
    free(large);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_is_found_across_any_cut),
        cmocka_unit_test(the_stop_that_ends_first_wins),
        cmocka_unit_test(a_stop_in_the_middle_of_characters_is_found),
        cmocka_unit_test(random_texts_agree_with_the_whole_text),
        cmocka_unit_test(no_stops_let_all_text_through_at_once),
        cmocka_unit_test(empty_or_too_many_stops_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
