/* KV pages: each to one owner, and how many there are. */
#include "engine/kv_cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static hr_kv_pages *open_pages(uint32_t n) {
    hr_alloc alloc = hr_alloc_system();
    hr_kv_pages *pages = NULL;
    assert_int_equal(hr_kv_pages_create(n, &alloc, &pages, NULL), HR_OK);
    return pages;
}

static void each_page_has_one_owner(void **state) {
    (void)state;
    hr_kv_pages *pages = open_pages(7);
    uint32_t taken[7];
    bool seen[7] = {false};
    assert_true(hr_kv_pages_take(pages, 3, taken));
    assert_true(hr_kv_pages_take(pages, 4, taken + 3));
    for (int i = 0; i < 7; i++) {
        assert_true(taken[i] < 7 && !seen[taken[i]]);
        seen[taken[i]] = true;
    }
    assert_int_equal(hr_kv_pages_free(pages), 0);
    hr_kv_pages_give(pages, 7, taken);
    assert_int_equal(hr_kv_pages_free(pages), 7);
    hr_kv_pages_destroy(pages);
}

static void too_many_pages_are_refused_whole(void **state) {
    (void)state;
    hr_kv_pages *pages = open_pages(4);
    uint32_t taken[5] = {9, 9, 9, 9, 9};
    assert_false(hr_kv_pages_take(pages, 5, taken));
    assert_int_equal(taken[0], 9);
    assert_int_equal(hr_kv_pages_free(pages), 4);
    hr_kv_pages_destroy(pages);
}

static void pages_given_back_are_taken_first(void **state) {
    (void)state;
    hr_kv_pages *pages = open_pages(100);
    uint32_t first[3], second[3];
    assert_true(hr_kv_pages_take(pages, 3, first));
    hr_kv_pages_give(pages, 3, first);
    assert_true(hr_kv_pages_take(pages, 3, second));
    assert_memory_equal(first, second, sizeof first);
    hr_kv_pages_give(pages, 3, second);
    hr_kv_pages_destroy(pages);
}

static void assert_size(hr_kv_sizing sizing, uint32_t wanted, const char *wanted_source) {
    uint32_t n = 0;
    const char *source = NULL;
    assert_int_equal(hr_kv_size(&sizing, &n, &source, NULL), HR_OK);
    assert_int_equal(n, wanted);
    assert_string_equal(source, wanted_source);
}

static void the_least_of_three_bounds_sets_the_size(void **state) {
    (void)state;
    hr_kv_sizing sizing = {.page_bytes = 1000,
                           .memory_bytes = 50999,
                           .memory_source = "cgroup memory limit",
                           .max_running_requests = 64,
                           .context_length = 2048};
    assert_size(sizing, 50, "cgroup memory limit");
    sizing.max_total_tokens = 40 * HR_KV_PAGE_TOKENS + 31;
    assert_size(sizing, 40, "--max-total-tokens");
    sizing.max_total_tokens = 1;
    assert_size(sizing, 1, "--max-total-tokens");
    sizing.max_total_tokens = 1000000;
    assert_size(sizing, 50, "cgroup memory limit");
    sizing.max_running_requests = 2;
    sizing.context_length = 33;
    assert_size(sizing, 4, "--max-running-requests x --context-length");
}

static void no_room_for_one_page_is_an_error(void **state) {
    (void)state;
    hr_kv_sizing sizing = {.page_bytes = 1000,
                           .memory_bytes = 999,
                           .memory_source = "available memory",
                           .max_running_requests = 1,
                           .context_length = 1};
    uint32_t n;
    const char *source;
    hr_error err;
    assert_int_equal(hr_kv_size(&sizing, &n, &source, &err), HR_ERR_NO_MEMORY);
    assert_non_null(strstr(err.message, "available memory"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_page_has_one_owner),
        cmocka_unit_test(too_many_pages_are_refused_whole),
        cmocka_unit_test(pages_given_back_are_taken_first),
        cmocka_unit_test(the_least_of_three_bounds_sets_the_size),
        cmocka_unit_test(no_room_for_one_page_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
