/* Workers leave a core that they share, and only then; where they may run stays as it was. */
#include "base/cores.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static cpu_set_t affinity(void) {
    cpu_set_t set;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    return set;
}

static int core_of(hr_core_note *notes, unsigned worker) {
    return atomic_load(&notes[worker].core);
}

/* Two notes on the core of the calling thread. */
static int meet(hr_core_note notes[2]) {
    hr_core_note_here(notes, 0);
    int here = core_of(notes, 0);
    assert_true(here >= 0);
    atomic_store(&notes[1].core, here);
    return here;
}

static void a_worker_leaves_the_core_of_another(void **state) {
    (void)state;
    cpu_set_t before = affinity(), after;
    for (int round = 0; round < 100; round++) {
        hr_core_note notes[2];
        int here = meet(notes);
        hr_core_leave_shared(notes, 0, 2);
        /* the kernel itself may have moved the thread off that core before it looked */
        assert_true(core_of(notes, 0) != here || CPU_COUNT(&before) == 1);
        after = affinity();
        assert_true(CPU_EQUAL(&before, &after));
    }
}

static void a_worker_alone_on_its_core_stays(void **state) {
    (void)state;
    cpu_set_t before = affinity(), one;
    hr_core_note notes[2];
    hr_core_note_here(notes, 0);
    CPU_ZERO(&one);
    CPU_SET(core_of(notes, 0), &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    hr_core_note_here(notes, 0);
    int here = core_of(notes, 0);
    atomic_store(&notes[1].core, -1);
    hr_core_leave_shared(notes, 0, 2);
    assert_int_equal(core_of(notes, 0), here);
    /* nor when there is no other core for it */
    atomic_store(&notes[1].core, here);
    hr_core_leave_shared(notes, 0, 2);
    assert_int_equal(core_of(notes, 0), here);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

static void *note_core(void *arg) {
    *(int *)arg = sched_getcpu();
    return NULL;
}

static void a_thread_that_shares_work_starts_on_another_core(void **state) {
    (void)state;
    cpu_set_t before = affinity();
    for (int round = 0; round < 100; round++) {
        hr_core_note note;
        int core = -1;
        pthread_t thread;
        hr_core_note_here(&note, 0);
        assert_int_equal(hr_core_start_apart(&thread, note_core, &core), 0);
        int same = sched_getcpu() == core_of(&note, 0); /* else the caller itself was moved */
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_true(core >= 0 && (core != core_of(&note, 0) || !same || CPU_COUNT(&before) == 1));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_leaves_the_core_of_another),
        cmocka_unit_test(a_worker_alone_on_its_core_stays),
        cmocka_unit_test(a_thread_that_shares_work_starts_on_another_core),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
