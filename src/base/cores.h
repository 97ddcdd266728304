/* Which cores threads that work together run on: hints to the kernel that keep two off one core.
 *
 * Only hints: a call that fails changes nothing and says nothing. */
#ifndef HR_BASE_CORES_H
#define HR_BASE_CORES_H

#include <pthread.h>
#include <stdatomic.h>

/* Written by its worker, read by the others; a line of cache each. */
typedef struct hr_core_note {
    _Alignas(64) _Atomic int core; /* where the worker was last seen; -1: nowhere yet */
} hr_core_note;

/* The calling worker notes where it runs. Costs a few ns. */
void hr_core_note_here(hr_core_note *notes, unsigned worker);

/* The calling worker moves to a core where none of the n workers was seen, if one of them shares
 * its core and the thread may run on such a one. The kernel would not always: it looks for an idle
 * core only while the machine is not busy on average, and never moves a thread that ran a moment
 * ago. */
void hr_core_leave_shared(hr_core_note *notes, unsigned worker, unsigned n);

/* pthread_create for a few milliseconds of work that the caller shares: the thread runs on any core
 * but the caller's, where there is another. Started as usual it would often wait on that very core
 * until the caller is done. 0, or an error number. */
int hr_core_start_apart(pthread_t *thread, void *(*work)(void *arg), void *arg);

/* Pins threads[1..n-1] to a core each, where cores were reserved for this process, one per worker:
 * an affinity mask of as many cores as workers, on a machine that has more. On a machine shared
 * with others a pinned worker only waits behind them (docs/performance.md). Worker 0 is the
 * caller's thread and stays as it is; it finds the core that is left. */
void hr_cores_pin(const pthread_t *threads, unsigned n);

#endif
