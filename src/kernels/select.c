/* Chooses a tier for the processor at hand. */
#include "kernels/tiers.h"

#include <string.h>

static bool has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static const hr_kernels *const ALL[] = {&hr_kernels_ref};
enum { N_ALL = sizeof ALL / sizeof ALL[0] };

const hr_kernels *hr_kernels_tier(size_t i) {
    return has_avx2() && i < N_ALL ? ALL[i] : NULL;
}

hr_status hr_kernels_select(const char *isa, const hr_kernels **out, char *note, size_t note_size,
                            hr_error *err) {
    (void)isa;
    if (note != NULL && note_size > 0)
        note[0] = '\0';
    if (!has_avx2())
        return hr_fail(err, HR_ERR_CPU,
                       "this processor lacks AVX2, FMA or F16C, which Headrace needs");
    *out = ALL[N_ALL - 1];
    return HR_OK;
}
