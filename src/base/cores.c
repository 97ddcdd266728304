/* Cores by what sched.h tells and takes: sched_getcpu and affinity masks. */
#include "base/cores.h"

#include <sched.h>
#include <stdbool.h>
#include <unistd.h>

void hr_core_note_here(hr_core_note *notes, unsigned worker) {
    atomic_store_explicit(&notes[worker].core, sched_getcpu(), memory_order_relaxed);
}

void hr_core_leave_shared(hr_core_note *notes, unsigned worker, unsigned n) {
    cpu_set_t allowed, others;
    hr_core_note_here(notes, worker);
    int here = atomic_load_explicit(&notes[worker].core, memory_order_relaxed);
    bool shared = false;
    CPU_ZERO(&others);
    for (unsigned w = 0; w < n; w++) {
        int core = atomic_load_explicit(&notes[w].core, memory_order_relaxed);
        if (w == worker || core < 0 || core >= CPU_SETSIZE)
            continue;
        shared |= core == here;
        CPU_SET(core, &others);
    }
    if (!shared || sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    cpu_set_t left;
    CPU_AND(&others, &others, &allowed);
    CPU_XOR(&left, &allowed, &others);
    if (CPU_COUNT(&left) == 0 || sched_setaffinity(0, sizeof left, &left) != 0)
        return;
    hr_core_note_here(notes, worker);
    sched_setaffinity(0, sizeof allowed, &allowed);
}

int hr_core_start_apart(pthread_t *thread, void *(*work)(void *arg), void *arg) {
    pthread_attr_t attr;
    cpu_set_t allowed;
    int here = sched_getcpu(), error = pthread_attr_init(&attr);
    if (error != 0)
        return error;
    if (here >= 0 && sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        CPU_CLR(here, &allowed);
        if (CPU_COUNT(&allowed) > 0)
            pthread_attr_setaffinity_np(&attr, sizeof allowed, &allowed);
    }
    error = pthread_create(thread, &attr, work, arg);
    pthread_attr_destroy(&attr);
    return error;
}

void hr_cores_pin(const pthread_t *threads, unsigned n) {
    cpu_set_t reserved;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof reserved, &reserved) != 0 ||
        (unsigned)CPU_COUNT(&reserved) != n || CPU_COUNT(&reserved) >= online)
        return;
    unsigned worker = 0;
    for (int core = 0; core < CPU_SETSIZE && worker < n; core++) {
        if (!CPU_ISSET(core, &reserved))
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        if (worker > 0)
            pthread_setaffinity_np(threads[worker], sizeof one, &one);
        worker++;
    }
}
