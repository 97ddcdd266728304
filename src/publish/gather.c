/* Adapters put together on one rank. */
#include "publish/gather.h"

#include <stdlib.h>
#include <string.h>

static bool grow(hr_gather *gather) {
    if (gather->n < gather->cap)
        return true;
    size_t cap = gather->cap > 0 ? 2 * gather->cap : 64;
    hr_tensor *tensors = realloc(gather->tensors, cap * sizeof *tensors);
    if (tensors != NULL)
        gather->tensors = tensors;
    const char **adapters = realloc(gather->adapters, cap * sizeof *adapters);
    if (adapters != NULL)
        gather->adapters = adapters;
    if (tensors == NULL || adapters == NULL)
        return false;
    gather->cap = cap;
    return true;
}

hr_status hr_gather_add(hr_gather *gather, const char *adapter, const char *name,
                        const hr_tensor *tensor, const void *bytes, hr_error *err) {
    void *copy = malloc(tensor->bytes + 1);
    if (copy == NULL || !grow(gather)) {
        free(copy);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to gather adapter %.200s", adapter);
    }
    if (tensor->bytes > 0)
        memcpy(copy, bytes, tensor->bytes);
    gather->tensors[gather->n] = *tensor;
    gather->tensors[gather->n].name = name;
    gather->tensors[gather->n].data = copy;
    gather->adapters[gather->n++] = adapter;
    return HR_OK;
}

size_t hr_gather_list(const hr_gather *gather, const char *adapter, hr_tensor *list) {
    size_t n = 0;
    for (size_t i = 0; i < gather->n; i++) {
        if (strcmp(gather->adapters[i], adapter) == 0)
            list[n++] = gather->tensors[i];
    }
    return n;
}

void hr_gather_free(hr_gather *gather) {
    for (size_t i = 0; i < gather->n; i++)
        free((void *)(uintptr_t)gather->tensors[i].data);
    free(gather->tensors);
    free(gather->adapters);
    *gather = (hr_gather){0};
}
