/* Chooses a tier for the processor at hand. */
#include "kernels/amx.h"
#include "kernels/tiers.h"
#include "kernels/trial.h"

#include <cpuid.h>
#include <stdio.h>
#include <string.h>

static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static bool has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static bool has_bf16_dot(void) {
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVX512BF16) != 0;
}

static bool has_avx512bf16(void) {
    return has_bf16_dot() && hr_kernels_trial(&hr_kernels_avx512bf16);
}

static bool has_amx(void) {
    return has_avx512() && hr_amx_present() && hr_amx_refused() == NULL;
}

/* Slowest first. */
static const struct {
    const hr_kernels *kernels;
    bool (*available)(void);
} TIERS[] = {
    {&hr_kernels_ref, has_avx2},      {&hr_kernels_avx2, has_avx2},
    {&hr_kernels_avx512, has_avx512}, {&hr_kernels_avx512bf16, has_avx512bf16},
    {&hr_kernels_amx, has_amx},
};
enum { N_TIERS = sizeof TIERS / sizeof TIERS[0] };

const hr_kernels *hr_kernels_tier(size_t i) {
    for (size_t t = 0; t < N_TIERS; t++)
        if (TIERS[t].available() && i-- == 0)
            return TIERS[t].kernels;
    return NULL;
}

static hr_status select_named(const char *isa, const hr_kernels **out, hr_error *err) {
    for (size_t t = 0; t < N_TIERS; t++) {
        if (strcmp(isa, TIERS[t].kernels->name) != 0)
            continue;
        if (TIERS[t].available()) {
            *out = TIERS[t].kernels;
            return HR_OK;
        }
        const char *why = "this processor lacks it";
        if (TIERS[t].available == has_amx && has_avx512() && hr_amx_present())
            why = hr_amx_refused();
        if (TIERS[t].available == has_avx512bf16 && has_bf16_dot())
            why = "its dot product differs from the reference";
        return hr_fail(err, HR_ERR_CPU,
                       "instruction set %s is not to be had: %s; leave it out to use the fastest",
                       isa, why);
    }
    return hr_fail(err, HR_ERR_INVALID,
                   "unknown instruction set \"%s\": use ref, avx2, avx512, avx512bf16 or amx", isa);
}

hr_status hr_kernels_select(const char *isa, const hr_kernels **out, char *note, size_t note_size,
                            hr_error *err) {
    if (!has_avx2())
        return hr_fail(err, HR_ERR_CPU,
                       "this processor lacks AVX2, FMA or F16C, which Headrace needs");
    if (note != NULL && note_size > 0)
        note[0] = '\0';
    if (isa != NULL && isa[0] != '\0')
        return select_named(isa, out, err);
    const hr_kernels *fastest = NULL;
    for (size_t i = 0; hr_kernels_tier(i) != NULL; i++)
        fastest = hr_kernels_tier(i);
    if (note != NULL && fastest != &hr_kernels_amx && has_avx512() && hr_amx_present())
        snprintf(note, note_size, "AMX is there but not used: %s; using %s", hr_amx_refused(),
                 fastest->name);
    *out = fastest;
    return HR_OK;
}
