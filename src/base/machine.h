/* What this machine grants the process: cores and memory, cgroup limits included. */
#ifndef HR_BASE_MACHINE_H
#define HR_BASE_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* Threads worth starting: min(affinity mask, cgroup v2/v1 CPU quota rounded up), at least 1. */
unsigned hr_machine_threads(void);

/* Bytes of memory this process may still take: min(MemAvailable, cgroup limit - cgroup use), and
 * the smallest limit that is in force. source (when not NULL) gets a static string naming what set
 * it. */
uint64_t hr_machine_memory_available(const char **source);

/* Resident bytes of this process (VmRSS); 0 when it cannot be read. */
uint64_t hr_machine_resident_bytes(void);

/* This thread, and those that it starts from now on, no longer interrupt others when there is work
 * for them; they get their share of the cores as before. */
void hr_machine_work_behind(void);

/* Zeroed, 2 MiB-aligned memory straight from the system, huge pages asked for. NULL when refused.
 * hr_pages_free takes the same size. */
void *hr_pages_alloc(size_t bytes);
void hr_pages_free(void *pages, size_t bytes);

#endif
