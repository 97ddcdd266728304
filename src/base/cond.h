/* Conditions that are waited for with a deadline, as every wait is. They go by the monotonic clock,
 * so that a change of the machine's date neither ends a wait nor prolongs it. */
#ifndef HR_BASE_COND_H
#define HR_BASE_COND_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* For pthread_cond_timedwait with hr_cond_deadline. */
void hr_cond_init(pthread_cond_t *cond);

/* So many milliseconds from now; a year when it is more. */
struct timespec hr_cond_deadline(uint64_t ms);

#endif
