/* Whether the AMX tier may be used; asked once per selection. */
#ifndef HR_KERNELS_AMX_H
#define HR_KERNELS_AMX_H

#include <stdbool.h>

/* True when the processor has AMX tiles for bf16. */
bool hr_amx_present(void);
/* Asks the system for permission (once per process, all threads) and compares a small product with
 * the reference. NULL when AMX can be trusted, else why not (a static string). */
const char *hr_amx_refused(void);

#endif
