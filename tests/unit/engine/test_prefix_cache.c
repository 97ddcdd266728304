/* The prefix cache: what is found, what is never found, who goes first, and that no page is lost.
 */
#include "engine/prefix_cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { N_PAGES = 8, PAGE = HR_KV_PAGE_TOKENS };

typedef struct stand {
    hr_kv_pages *pages;
    hr_prefix_cache *cache;
} stand;

static stand open_stand(void) {
    stand s;
    hr_alloc alloc = hr_alloc_system();
    assert_int_equal(hr_kv_pages_create(N_PAGES, &alloc, &s.pages, NULL), HR_OK);
    assert_int_equal(hr_prefix_cache_create(s.pages, &alloc, &s.cache, NULL), HR_OK);
    return s;
}

/* Every page is back. */
static void close_stand(stand *s) {
    hr_prefix_cache_destroy(s->cache);
    assert_int_equal(hr_kv_pages_free(s->pages), N_PAGES);
    hr_kv_pages_destroy(s->pages);
}

static void fill(uint32_t *tokens, uint32_t first) {
    for (uint32_t i = 0; i < PAGE; i++)
        tokens[i] = first + i;
}

/* A page of the tokens first, first + 1, ... after parent, held by the caller. */
static uint32_t make(stand *s, uint64_t adapter, uint32_t parent, uint32_t first) {
    uint32_t tokens[PAGE], page;
    fill(tokens, first);
    assert_true(hr_kv_pages_take(s->pages, 1, &page));
    hr_prefix_cache_insert(s->cache, adapter, parent, tokens, page);
    return page;
}

static uint32_t find(const stand *s, uint64_t adapter, uint32_t parent, uint32_t first) {
    uint32_t tokens[PAGE];
    fill(tokens, first);
    return hr_prefix_cache_find(s->cache, adapter, parent, tokens);
}

static void a_page_is_found_by_adapter_place_and_every_token(void **state) {
    (void)state;
    stand s = open_stand();
    uint32_t chain[2], tokens[PAGE];
    chain[0] = make(&s, 5, HR_PREFIX_NONE, 100);
    chain[1] = make(&s, 5, chain[0], 200);
    assert_int_equal(find(&s, 5, HR_PREFIX_NONE, 100), chain[0]);
    assert_int_equal(find(&s, 5, chain[0], 200), chain[1]);
    assert_int_equal(find(&s, 6, HR_PREFIX_NONE, 100), HR_PREFIX_NONE); /* another adapter */
    assert_int_equal(find(&s, 0, HR_PREFIX_NONE, 100), HR_PREFIX_NONE); /* the base */
    assert_int_equal(find(&s, 5, HR_PREFIX_NONE, 200), HR_PREFIX_NONE); /* another place */
    assert_int_equal(find(&s, 5, chain[1], 200), HR_PREFIX_NONE);
    for (uint32_t i = 0; i < PAGE; i++) {
        fill(tokens, 100);
        tokens[i]++;
        assert_int_equal(hr_prefix_cache_find(s.cache, 5, HR_PREFIX_NONE, tokens), HR_PREFIX_NONE);
    }
    hr_prefix_cache_release(s.cache, 2, chain);
    assert_int_equal(find(&s, 5, chain[0], 200), chain[1]); /* still there without a holder */
    close_stand(&s);
}

static void held_pages_stay_and_the_least_recently_used_leaf_goes(void **state) {
    (void)state;
    stand s = open_stand();
    uint32_t old[2], young[2];
    old[0] = young[0] = make(&s, 0, HR_PREFIX_NONE, 1);
    old[1] = make(&s, 0, old[0], 2);
    hr_prefix_cache_hold(s.cache, old[0]);
    young[1] = make(&s, 0, young[0], 3);
    assert_false(hr_prefix_cache_evict(s.cache)); /* all are held */
    hr_prefix_cache_release(s.cache, 2, old);
    assert_int_equal(hr_prefix_cache_unheld(s.cache), 1); /* the root has another holder */
    assert_true(hr_prefix_cache_is_held(s.cache, old[0]));
    hr_prefix_cache_release(s.cache, 2, young);
    assert_int_equal(hr_prefix_cache_unheld(s.cache), 3);
    hr_prefix_cache_hold(s.cache, old[0]); /* used again: from now on younger than the other leaf */
    hr_prefix_cache_hold(s.cache, old[1]);
    hr_prefix_cache_release(s.cache, 2, old);
    assert_true(hr_prefix_cache_evict(s.cache));
    assert_int_equal(find(&s, 0, old[0], 3), HR_PREFIX_NONE);
    assert_true(hr_prefix_cache_evict(s.cache));
    assert_int_equal(find(&s, 0, old[0], 2), HR_PREFIX_NONE);
    assert_int_equal(find(&s, 0, HR_PREFIX_NONE, 1), old[0]); /* the root goes last */
    assert_true(hr_prefix_cache_evict(s.cache));
    assert_false(hr_prefix_cache_evict(s.cache));
    close_stand(&s);
}

static void a_forgotten_adapter_leaves_the_others_pages(void **state) {
    (void)state;
    stand s = open_stand();
    uint32_t gone[2], kept, held;
    gone[0] = make(&s, 1, HR_PREFIX_NONE, 1);
    gone[1] = make(&s, 1, gone[0], 2);
    kept = make(&s, 2, HR_PREFIX_NONE, 1);
    held = make(&s, 1, HR_PREFIX_NONE, 7);
    hr_prefix_cache_release(s.cache, 2, gone);
    hr_prefix_cache_release(s.cache, 1, &kept);
    hr_prefix_cache_forget(s.cache, 1);
    assert_int_equal(find(&s, 1, HR_PREFIX_NONE, 1), HR_PREFIX_NONE);
    assert_int_equal(find(&s, 2, HR_PREFIX_NONE, 1), kept);
    assert_int_equal(find(&s, 1, HR_PREFIX_NONE, 7), held);
    assert_int_equal(hr_kv_pages_free(s.pages), N_PAGES - 2);
    hr_prefix_cache_release(s.cache, 1, &held);
    close_stand(&s);
}

static void a_new_epoch_finds_nothing_of_the_old_one(void **state) {
    (void)state;
    stand s = open_stand();
    uint32_t unheld = make(&s, 0, HR_PREFIX_NONE, 1), held = make(&s, 0, HR_PREFIX_NONE, 2);
    hr_prefix_cache_release(s.cache, 1, &unheld);
    uint64_t before = hr_prefix_cache_epoch(s.cache);
    hr_prefix_cache_clear(s.cache);
    assert_true(hr_prefix_cache_epoch(s.cache) != before);
    assert_int_equal(find(&s, 0, HR_PREFIX_NONE, 1), HR_PREFIX_NONE);
    assert_int_equal(find(&s, 0, HR_PREFIX_NONE, 2), HR_PREFIX_NONE);
    assert_int_equal(hr_kv_pages_free(s.pages), N_PAGES - 1);
    uint32_t again = make(&s, 0, HR_PREFIX_NONE, 2);
    hr_prefix_cache_release(s.cache, 1, &held);
    assert_int_equal(hr_kv_pages_free(s.pages), N_PAGES - 1); /* freed, not kept */
    assert_int_equal(find(&s, 0, HR_PREFIX_NONE, 2), again);
    hr_prefix_cache_release(s.cache, 1, &again);
    close_stand(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_is_found_by_adapter_place_and_every_token),
        cmocka_unit_test(held_pages_stay_and_the_least_recently_used_leaf_goes),
        cmocka_unit_test(a_forgotten_adapter_leaves_the_others_pages),
        cmocka_unit_test(a_new_epoch_finds_nothing_of_the_old_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
