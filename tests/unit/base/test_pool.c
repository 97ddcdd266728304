/* The compute pool: every worker runs every job, barriers order memory, the floating-point mode
 * holds. */
#include "base/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_WORKERS = 9 };

typedef struct counts {
    hr_pool *pool;
    unsigned ran[MAX_WORKERS];
    unsigned sum_seen[MAX_WORKERS];
    float tiny[MAX_WORKERS];
} counts;

static void count_job(void *arg, unsigned worker, unsigned n_workers) {
    counts *c = arg;
    c->ran[worker]++;
    hr_pool_barrier(c->pool, worker);
    unsigned sum = 0;
    for (unsigned w = 0; w < n_workers; w++)
        sum += c->ran[w];
    c->sum_seen[worker] = sum;
    hr_pool_barrier(c->pool, worker);
    volatile float smallest = 1.17549435e-38f; /* the smallest normal: half of it is denormal */
    c->tiny[worker] = smallest * 0.5f;
}

static void every_worker_runs_every_job_and_sees_the_others(void **state) {
    (void)state;
    for (unsigned n = 1; n <= MAX_WORKERS; n += 2) {
        hr_pool *pool = NULL;
        assert_int_equal(hr_pool_create(n, &pool, NULL), HR_OK);
        assert_int_equal(hr_pool_workers(pool), n);
        counts c = {.pool = pool};
        for (unsigned job = 1; job <= 200; job++) {
            hr_pool_run(pool, count_job, &c);
            for (unsigned w = 0; w < n; w++) {
                assert_int_equal(c.ran[w], job);
                assert_int_equal(c.sum_seen[w], job * n);
            }
        }
        hr_pool_destroy(pool);
    }
}

static void denormals_are_flushed_inside_a_job_and_only_there(void **state) {
    (void)state;
    hr_pool *pool = NULL;
    assert_int_equal(hr_pool_create(3, &pool, NULL), HR_OK);
    counts c = {.pool = pool};
    hr_pool_run(pool, count_job, &c);
    for (unsigned w = 0; w < 3; w++)
        assert_true(c.tiny[w] == 0.0f);
    volatile float smallest = 1.17549435e-38f;
    assert_true(smallest * 0.5f > 0.0f);
    hr_pool_destroy(pool);
}

static double cpu_seconds(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static void an_idle_pool_sleeps(void **state) {
    (void)state;
    hr_pool *pool = NULL;
    assert_int_equal(hr_pool_create(4, &pool, NULL), HR_OK);
    counts c = {.pool = pool};
    hr_pool_run(pool, count_job, &c);
    usleep(100 * 1000);
    double before = cpu_seconds();
    usleep(300 * 1000);
    assert_true(cpu_seconds() - before < 0.05);
    hr_pool_run(pool, count_job, &c); /* and it wakes again */
    assert_int_equal(c.ran[3], 2);
    hr_pool_destroy(pool);
}

static void come_late(void *arg, unsigned worker, unsigned n_workers) {
    (void)n_workers;
    if (worker == 0)
        usleep(300 * 1000);
    hr_pool_barrier(arg, worker);
}

static void workers_that_wait_for_a_late_one_sleep(void **state) {
    (void)state;
    hr_pool *pool = NULL;
    assert_int_equal(hr_pool_create(4, &pool, NULL), HR_OK);
    double before = cpu_seconds();
    hr_pool_run(pool, come_late, pool);
    assert_true(cpu_seconds() - before < 0.1); /* of 0.9 */
    hr_pool_destroy(pool);
}

static void a_pool_of_none_is_refused(void **state) {
    (void)state;
    hr_pool *pool = NULL;
    hr_error err = {0};
    assert_int_equal(hr_pool_create(0, &pool, &err), HR_ERR_INVALID);
    assert_null(pool);
    assert_non_null(strstr(err.message, "1 to 1024"));
    hr_pool_destroy(NULL);
}

static void split_covers_everything_once(void **state) {
    (void)state;
    for (size_t n = 0; n < 40; n++)
        for (unsigned parts = 1; parts < 9; parts++) {
            size_t next = 0, begin, end;
            for (unsigned i = 0; i < parts; i++) {
                hr_split(n, i, parts, &begin, &end);
                assert_int_equal(begin, next);
                assert_true(end >= begin && end - begin <= n / parts + 1);
                next = end;
            }
            assert_int_equal(next, n);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_worker_runs_every_job_and_sees_the_others),
        cmocka_unit_test(denormals_are_flushed_inside_a_job_and_only_there),
        cmocka_unit_test(an_idle_pool_sleeps),
        cmocka_unit_test(workers_that_wait_for_a_late_one_sleep),
        cmocka_unit_test(a_pool_of_none_is_refused),
        cmocka_unit_test(split_covers_everything_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
