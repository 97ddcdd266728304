/* Bodies: one piece of memory however they arrive, kept for the next one, bounded by what there is.
 */
#include "server/body.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MIB ((size_t)1 << 20)

static hr_body_pool *new_pool(size_t max_kept) {
    hr_body_pool *pool = NULL;
    assert_int_equal(hr_body_pool_create(max_kept, &pool, NULL), HR_OK);
    return pool;
}

/* Appends n bytes in pieces of at most piece; byte i is i modulo 251. */
static void fill(hr_body *body, hr_body_pool *pool, size_t n, size_t piece) {
    uint8_t *bytes = malloc(n > 0 ? n : 1);
    assert_non_null(bytes);
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(i % 251);
    for (size_t at = 0; at < n; at += piece) {
        size_t len = n - at < piece ? n - at : piece;
        assert_int_equal(hr_body_append(body, pool, bytes + at, len, NULL), HR_OK);
    }
    assert_int_equal(body->len, n);
    assert_memory_equal(body->data, bytes, n);
    assert_int_equal(body->data[n], '\0');
    free(bytes);
}

static void an_announced_body_never_moves(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 100, MIB - 1, MIB, MIB + 1, 5 * MIB + 77};
    hr_body_pool *pool = new_pool(16 * MIB);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        hr_body body = {0};
        assert_int_equal(hr_body_announce(&body, pool, sizes[i], NULL), HR_OK);
        const char *where = body.data;
        fill(&body, pool, sizes[i], 65536);
        assert_ptr_equal(body.data, where);
        hr_body_complete(&body);
        hr_body_free(&body);
    }
    hr_body_pool_unref(pool);
}

static void a_body_of_unknown_length_grows(void **state) {
    (void)state;
    hr_body_pool *pool = new_pool(16 * MIB);
    hr_body body = {0};
    fill(&body, pool, 5 * MIB + 3, 8191);
    hr_body_free(&body);
    hr_body_pool_unref(pool);
}

static void pages_of_large_bodies_serve_the_next(void **state) {
    (void)state;
    hr_body_pool *pool = new_pool(16 * MIB);
    hr_body body = {0};
    assert_int_equal(hr_body_announce(&body, pool, 8 * MIB, NULL), HR_OK);
    const char *where = body.data;
    hr_body_free(&body);
    assert_true(hr_body_pool_kept(pool) >= 8 * MIB);
    assert_int_equal(hr_body_announce(&body, pool, 7 * MIB, NULL), HR_OK);
    assert_ptr_equal(body.data, where);
    assert_int_equal(hr_body_pool_kept(pool), 0);
    hr_body_free(&body);
    /* not for one that would waste most of them */
    assert_int_equal(hr_body_announce(&body, pool, MIB + 1, NULL), HR_OK);
    assert_true(hr_body_pool_kept(pool) >= 8 * MIB);
    hr_body_free(&body);
    hr_body_pool_unref(pool);
}

static void what_is_kept_has_a_bound(void **state) {
    (void)state;
    hr_body_pool *pool = new_pool(16 * MIB);
    hr_body bodies[12] = {0};
    for (size_t i = 0; i < 12; i++)
        assert_int_equal(hr_body_announce(&bodies[i], pool, 3 * MIB, NULL), HR_OK);
    for (size_t i = 0; i < 12; i++) {
        hr_body_free(&bodies[i]);
        assert_true(hr_body_pool_kept(pool) <= 16 * MIB);
    }
    assert_int_equal(hr_body_announce(&bodies[0], pool, 20 * MIB, NULL), HR_OK);
    hr_body_free(&bodies[0]);
    assert_true(hr_body_pool_kept(pool) <= 16 * MIB);
    hr_body_pool_unref(pool);
}

static void more_than_there_is_memory_for_is_refused(void **state) {
    (void)state;
    hr_error err = {.status = HR_OK};
    hr_body_pool *pool = new_pool(16 * MIB);
    hr_body body = {0};
    /* two pebibytes are address space that no system gives, a terabyte may be */
    hr_status status = hr_body_announce(&body, pool, (size_t)1 << 51, &err);
    assert_true(status == HR_ERR_LIMIT || status == HR_ERR_NO_MEMORY);
    hr_body_free(&body);
    status = hr_body_announce(&body, pool, (size_t)1 << 42, &err);
    assert_true(status == HR_ERR_LIMIT || status == HR_ERR_NO_MEMORY);
    assert_non_null(strstr(err.message, "4398046511104"));
    hr_body_free(&body);
    assert_int_equal(hr_body_announce(&body, pool, SIZE_MAX, &err), HR_ERR_LIMIT);
    hr_body_free(&body);
    /* nothing of it counts against the next */
    assert_int_equal(hr_body_announce(&body, pool, 2 * MIB, &err), HR_OK);
    hr_body_free(&body);
    hr_body_pool_unref(pool);
}

static void a_body_outlives_the_server_it_came_to(void **state) {
    (void)state;
    hr_body_pool *pool = new_pool(16 * MIB);
    hr_body body = {0};
    assert_int_equal(hr_body_announce(&body, pool, 2 * MIB, NULL), HR_OK);
    fill(&body, pool, 2 * MIB, 65536);
    hr_body mine = hr_body_move(&body);
    assert_null(body.data);
    hr_body_free(&body);
    hr_body_pool_unref(pool);
    assert_int_equal(mine.data[250], (char)250);
    hr_body_free(&mine);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_announced_body_never_moves),
        cmocka_unit_test(a_body_of_unknown_length_grows),
        cmocka_unit_test(pages_of_large_bodies_serve_the_next),
        cmocka_unit_test(what_is_kept_has_a_bound),
        cmocka_unit_test(more_than_there_is_memory_for_is_refused),
        cmocka_unit_test(a_body_outlives_the_server_it_came_to),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
