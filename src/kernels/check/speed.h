/* How long each op takes on a tier, on one thread, with operands as a model has them: weights
 * stream from memory, everything else is in a cache. */
#ifndef HR_KERNELS_CHECK_SPEED_H
#define HR_KERNELS_CHECK_SPEED_H

#include "kernels/kernels.h"

typedef struct hr_speed hr_speed;

typedef struct hr_speed_result {
    bool same_bits; /* as the reference on these operands */
    double seconds, gflops, gbps;
} hr_speed_result;

/* Operands; aborts without memory (about 0.3 GB), as a check may. */
hr_speed *hr_speed_create(void);
void hr_speed_destroy(hr_speed *s);
/* The large buffer that stands for weights, for measuring the stream roof. */
const char *hr_speed_buffer(const hr_speed *s, size_t *bytes);

size_t hr_speed_ops(void);
const char *hr_speed_name(size_t op);
/* The best of many short runs within about a tenth of a second of processor time. */
hr_speed_result hr_speed_measure(hr_speed *s, const hr_kernels *ref, const hr_kernels *k,
                                 size_t op);

#endif
