/* One comparison an element: of its bits without the sign, with the least ones that become an
 * infinity or a NaN. */
#include "tensor/finite.h"

#include <inttypes.h>

typedef int16_t hr_i16 __attribute__((aligned(1)));
typedef int32_t hr_i32 __attribute__((aligned(1)));

enum {
    F16_INFINITY = 0x7c00,
    BF16_INFINITY = 0x7f80,
    F32_INFINITY = 0x7f800000,
    F32_ROUNDS_TO_BF16_INFINITY = 0x7f7f8000, /* the tie goes to even, which is up */
};

static bool below16(const hr_i16 *bits, size_t n, int16_t limit) {
    int16_t over = 0;
    for (size_t i = 0; i < n; i++)
        over |= (int16_t)((bits[i] & 0x7fff) >= limit);
    return over == 0;
}

static bool below32(const hr_i32 *bits, size_t n, int32_t limit) {
    int32_t over = 0;
    for (size_t i = 0; i < n; i++)
        over |= (bits[i] & 0x7fffffff) >= limit;
    return over == 0;
}

static bool all_below(const void *data, hr_dtype dtype, size_t n, int32_t f32_limit) {
    switch (dtype) {
    case HR_DTYPE_F16:
        return below16(data, n, F16_INFINITY);
    case HR_DTYPE_BF16:
        return below16(data, n, BF16_INFINITY);
    case HR_DTYPE_F32:
        return below32(data, n, f32_limit);
    default:
        return true;
    }
}

bool hr_all_finite(const void *data, hr_dtype dtype, hr_dtype as, size_t n) {
    return all_below(data, dtype, n,
                     as == HR_DTYPE_BF16 ? F32_ROUNDS_TO_BF16_INFINITY : F32_INFINITY);
}

hr_status hr_fail_not_finite(const hr_tensor *tensor, hr_dtype as, hr_error *err) {
    uint64_t n = hr_tensor_elements(tensor), not_finite = 0, too_large = 0;
    for (uint64_t i = 0; i < n; i++) {
        const char *value = (const char *)tensor->data + i * hr_dtype_size(tensor->dtype);
        if (!hr_all_finite(value, tensor->dtype, tensor->dtype, 1))
            not_finite++;
        else
            too_large += !hr_all_finite(value, tensor->dtype, as, 1);
    }
    if (not_finite == 0)
        return hr_fail(err, HR_ERR_VALUE,
                       "tensor %.200s: %" PRIu64 " of %" PRIu64 " values are too large for %s, "
                       "which this engine computes with; has the training diverged?",
                       tensor->name, too_large, n, hr_dtype_name(as));
    return hr_fail(err, HR_ERR_VALUE,
                   "tensor %.200s: %" PRIu64 " of %" PRIu64 " values are NaN or infinite; has the "
                   "training diverged?",
                   tensor->name, not_finite, n);
}
