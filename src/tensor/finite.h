/* Whether values can be computed with: finite, and still finite as the type they are converted to.
 *
 * A value beyond the range of bf16 is a number in an F32 file and an infinity in the engine, so
 * values are judged as what they become. Integer operations only, like the conversions. */
#ifndef HR_TENSOR_FINITE_H
#define HR_TENSOR_FINITE_H

#include "base/error.h"

#include <headrace/tensor.h>

/* True when hr_convert to `as` (F32 or BF16) makes a finite number of each of n elements of an F32,
 * BF16 or F16 array, which may be unaligned; true for any other dtype. */
bool hr_all_finite(const void *data, hr_dtype dtype, hr_dtype as, size_t n);

/* The refusal of a tensor for which that is false: ERR_VALUE with its name, how many values of how
 * many, and whether they came so or are too large for `as`. Reads all of the tensor. */
hr_status hr_fail_not_finite(const hr_tensor *tensor, hr_dtype as, hr_error *err);

#endif
