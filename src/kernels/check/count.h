/* Dispatch counters: which entries of a tier's table were called, how often, and whose code they
 * are. For checks on one thread; steps run on the tables themselves. */
#ifndef HR_KERNELS_CHECK_COUNT_H
#define HR_KERNELS_CHECK_COUNT_H

#include "kernels/kernels.h"

enum { HR_COUNT_ENTRIES = 26 };

/* Fills counting with a table of the same name whose entries count and then call tier's. Counters
 * of the calling thread start at zero; one table counts at a time. */
void hr_count_start(const hr_kernels *tier, hr_kernels *counting);
uint64_t hr_count_calls(size_t entry);
/* "gemm bf16", "rope". Static. */
const char *hr_count_name(size_t entry);
/* The slowest of tiers[0 .. t] whose entry is the same function as that of tiers[t]. */
const hr_kernels *hr_count_owner(const hr_kernels *const *tiers, size_t t, size_t entry);

#endif
