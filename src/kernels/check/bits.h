/* Does every op of a tier have the bits of the reference? One set of cases, for the tests and for
 * `headrace bench kernels`: every number of rows from 1 to 70, every adapter rank from 1 to 256,
 * normal, wide, denormal, huge, zero and arbitrary inputs, ragged sizes, page and block borders. */
#ifndef HR_KERNELS_CHECK_BITS_H
#define HR_KERNELS_CHECK_BITS_H

#include "kernels/kernels.h"

enum { HR_BITS_RESULTS = 128 };

typedef struct hr_bits_result {
    const hr_kernels *tier; /* as passed */
    const char *op;
    uint64_t compared;  /* values */
    uint64_t different; /* cases in which some value differs */
    char first[160];    /* the first difference, in words */
} hr_bits_result;

/* tiers: ends with NULL. Returns the number of results, one per tier and op. Takes a few seconds of
 * the calling thread; aborts without memory, as a check may. */
size_t hr_bits_check(const hr_kernels *ref, const hr_kernels *const *tiers,
                     hr_bits_result results[HR_BITS_RESULTS]);

#endif
