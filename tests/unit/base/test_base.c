/* Errors, buffers and machine facts of the base room. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/cond.h"
#include "base/error.h"
#include "base/log.h"
#include "base/machine.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void a_failure_carries_its_status_and_text(void **state) {
    (void)state;
    hr_error err = {0};
    assert_int_equal(hr_fail(&err, HR_ERR_SHAPE, "wanted %d, came %d", 3, 4), HR_ERR_SHAPE);
    assert_int_equal(err.status, HR_ERR_SHAPE);
    assert_string_equal(err.message, "wanted 3, came 4");
    assert_string_equal(hr_status_name(HR_ERR_SHAPE), "ERR_SHAPE");
    assert_string_equal(hr_status_text(HR_ERR_SHAPE), "shape mismatch");
}

static void nobody_needs_to_want_the_text(void **state) {
    (void)state;
    assert_int_equal(hr_fail(NULL, HR_ERR_IO, "lost"), HR_ERR_IO);
    assert_int_equal(hr_fail_context(NULL, HR_ERR_IO, "where"), HR_ERR_IO);
}

static void context_stands_before_the_cause(void **state) {
    (void)state;
    hr_error err = {0};
    hr_fail(&err, HR_ERR_CORRUPT, "header too long");
    assert_int_equal(hr_fail_context(&err, HR_ERR_IO, "%s", "a.safetensors"), HR_ERR_CORRUPT);
    assert_string_equal(err.message, "a.safetensors: header too long");
}

static void a_long_message_is_cut_between_characters(void **state) {
    (void)state;
    for (size_t shift = 0; shift < 4; shift++) {
        hr_buf text = {0};
        for (size_t i = 0; i < shift; i++)
            hr_buf_putc(&text, 'x');
        for (int i = 0; i < 600; i++)
            hr_buf_puts(&text, "\xe2\x82\xac"); /* three bytes each */
        hr_error err = {0};
        hr_fail(&err, HR_ERR_INVALID, "%s", text.data);
        size_t len = strlen(err.message);
        assert_true(len < sizeof err.message && len > sizeof err.message - 5);
        assert_int_equal((len - shift) % 3, 0);
        hr_buf_free(&text);
    }
}

static void a_buffer_grows_and_stays_terminated(void **state) {
    (void)state;
    hr_buf buf = {0};
    for (int i = 0; i < 1000; i++)
        hr_buf_printf(&buf, "%d,", i);
    assert_false(buf.failed);
    assert_int_equal(strlen(buf.data), buf.len);
    assert_int_equal(buf.len, 10 * 2 + 90 * 3 + 900 * 4);
    assert_memory_equal(buf.data + buf.len - 4, "999,", 5);
    hr_buf_clear(&buf);
    assert_int_equal(buf.len, 0);
    hr_buf_append(&buf, "a\0b", 3);
    assert_int_equal(buf.len, 3);
    assert_memory_equal(buf.data, "a\0b", 4);
    hr_buf_free(&buf);
    assert_null(buf.data);
}

static void a_buffer_that_cannot_grow_keeps_what_it_has(void **state) {
    (void)state;
    hr_buf buf = {0};
    hr_buf_puts(&buf, "kept");
    buf.failed = true; /* as after a refused allocation */
    hr_buf_puts(&buf, "lost");
    assert_string_equal(buf.data, "kept");
    hr_buf_free(&buf);
}

static void the_machine_grants_something(void **state) {
    (void)state;
    const char *source = NULL;
    assert_true(hr_machine_threads() >= 1);
    assert_true(hr_machine_memory_available(&source) > 0);
    assert_non_null(source);
    assert_true(hr_machine_resident_bytes() > 0);
}

static void pages_are_zeroed_and_aligned(void **state) {
    (void)state;
    size_t bytes = 3 * 1000 * 1000;
    unsigned char *pages = hr_pages_alloc(bytes);
    assert_non_null(pages);
    assert_int_equal((uintptr_t)pages % (2 << 20), 0);
    for (size_t i = 0; i < bytes; i += 4096)
        assert_int_equal(pages[i], 0);
    memset(pages, 1, bytes);
    hr_pages_free(pages, bytes);
    assert_null(hr_pages_alloc(0));
    assert_null(hr_pages_alloc(SIZE_MAX));
}

static void a_deadline_passes(void **state) {
    (void)state;
    hr_clock clock = hr_clock_monotonic();
    hr_deadline soon = hr_deadline_after_ms(&clock, 1);
    while (!hr_deadline_passed(&clock, soon)) {
    }
    assert_true(hr_now_ns(&clock) >= soon);
    assert_false(hr_deadline_passed(&clock, UINT64_MAX));
}

static uint64_t ns_of(struct timespec t) {
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void a_wait_ends_at_its_deadline_on_the_monotonic_clock(void **state) {
    (void)state;
    hr_clock clock = hr_clock_monotonic();
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    hr_cond_init(&cond);
    uint64_t begun_ns = hr_now_ns(&clock);
    struct timespec until = hr_cond_deadline(1001);
    assert_in_range(ns_of(until) - begun_ns, 1001000000u, 60000000000u);
    assert_in_range(until.tv_nsec, 0, 999999999);
    until = hr_cond_deadline(5);
    pthread_mutex_lock(&lock);
    assert_int_equal(pthread_cond_timedwait(&cond, &lock, &until), ETIMEDOUT);
    pthread_mutex_unlock(&lock);
    assert_true(hr_now_ns(&clock) >= ns_of(until));
    pthread_cond_destroy(&cond);
    /* what is too long to be added is still a long wait */
    assert_true(ns_of(hr_cond_deadline(UINT64_MAX)) - begun_ns > 365ull * 86400 * 1000000000u);
}

/* A client's words in a log line write no line of their own, move no cursor, and are text. */
static void control_characters_and_bad_bytes_do_not_reach_the_log(void **state) {
    (void)state;
    int ends[2];
    char said[256] = "";
    assert_int_equal(pipe(ends), 0);
    int kept = dup(STDERR_FILENO);
    assert_true(kept >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    hr_log(HR_LOG_ERROR, "the key \"%s\"",
           "a\n[now] INFO all is well\x1b[2J\x7f\xc3\xa9\xff\xe4\xbd");
    assert_true(dup2(kept, STDERR_FILENO) >= 0);
    assert_true(read(ends[0], said, sizeof said - 1) > 0);
    assert_non_null(strstr(said, "ERROR the key \"a [now] INFO all is well [2J \xc3\xa9???\"\n"));
    close(kept);
    close(ends[0]);
    close(ends[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(control_characters_and_bad_bytes_do_not_reach_the_log),
        cmocka_unit_test(a_failure_carries_its_status_and_text),
        cmocka_unit_test(nobody_needs_to_want_the_text),
        cmocka_unit_test(context_stands_before_the_cause),
        cmocka_unit_test(a_long_message_is_cut_between_characters),
        cmocka_unit_test(a_buffer_grows_and_stays_terminated),
        cmocka_unit_test(a_buffer_that_cannot_grow_keeps_what_it_has),
        cmocka_unit_test(the_machine_grants_something),
        cmocka_unit_test(pages_are_zeroed_and_aligned),
        cmocka_unit_test(a_deadline_passes),
        cmocka_unit_test(a_wait_ends_at_its_deadline_on_the_monotonic_clock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
