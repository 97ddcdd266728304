/* Adapters whose parts lie on several ranks, put together on one: for transports that need them
 * whole. Private to the room. */
#ifndef HR_PUBLISH_GATHER_H
#define HR_PUBLISH_GATHER_H

#include "base/error.h"

#include <headrace/tensor.h>

typedef struct hr_gather {
    hr_tensor *tensors;    /* bytes are copies */
    const char **adapters; /* by tensor */
    size_t n, cap;
} hr_gather;

/* Copies the tensor's bytes; name (as on the wire) and adapter stay the caller's. ERR_NO_MEMORY. */
hr_status hr_gather_add(hr_gather *gather, const char *adapter, const char *name,
                        const hr_tensor *tensor, const void *bytes, hr_error *err);

/* Copies the views of one adapter's tensors into list (room for all); returns their number. */
size_t hr_gather_list(const hr_gather *gather, const char *adapter, hr_tensor *list);

void hr_gather_free(hr_gather *gather); /* back to zero */

#endif
