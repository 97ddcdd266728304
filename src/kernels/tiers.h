/* The tables of the tiers, one per instruction set, for select.c. */
#ifndef HR_KERNELS_TIERS_H
#define HR_KERNELS_TIERS_H

#include "kernels/kernels.h"

extern const hr_kernels hr_kernels_ref;
extern const hr_kernels hr_kernels_avx2;
extern const hr_kernels hr_kernels_avx512;
extern const hr_kernels hr_kernels_avx512bf16;
extern const hr_kernels hr_kernels_amx;

#endif
