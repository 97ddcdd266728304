/* A tier that leans on what an instruction does inside is tried once before it is used. */
#ifndef HR_KERNELS_TRIAL_H
#define HR_KERNELS_TRIAL_H

#include "kernels/kernels.h"

/* True when bf16 products of odd sizes, with values far apart, sums that cancel and denormals, have
 * the bits of the reference. A fraction of a millisecond. Thread-safe. */
bool hr_kernels_trial(const hr_kernels *kernels);

#endif
