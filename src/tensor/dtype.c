/* Lookups over the dtype map, and the few things one asks of a shape. */
#include <headrace/tensor.h>
#include <stdio.h>
#include <string.h>

size_t hr_dtype_size(hr_dtype dtype) {
    switch (dtype) {
#define HR_DTYPE_CASE(name, size, torch)                                                           \
    case HR_DTYPE_##name:                                                                          \
        return size;
        HR_DTYPE_MAP(HR_DTYPE_CASE)
#undef HR_DTYPE_CASE
    case HR_DTYPE_COUNT:
        break;
    }
    return 0;
}

const char *hr_dtype_name(hr_dtype dtype) {
    switch (dtype) {
#define HR_DTYPE_CASE(name, size, torch)                                                           \
    case HR_DTYPE_##name:                                                                          \
        return #name;
        HR_DTYPE_MAP(HR_DTYPE_CASE)
#undef HR_DTYPE_CASE
    case HR_DTYPE_COUNT:
        break;
    }
    return "unknown";
}

const char *hr_dtype_torch_name(hr_dtype dtype) {
    switch (dtype) {
#define HR_DTYPE_CASE(name, size, torch)                                                           \
    case HR_DTYPE_##name:                                                                          \
        return torch;
        HR_DTYPE_MAP(HR_DTYPE_CASE)
#undef HR_DTYPE_CASE
    case HR_DTYPE_COUNT:
        break;
    }
    return "unknown";
}

bool hr_dtype_from_name(const char *name, hr_dtype *out) {
    for (int i = 0; i < HR_DTYPE_COUNT; i++) {
        if (strcmp(name, hr_dtype_name((hr_dtype)i)) == 0) {
            *out = (hr_dtype)i;
            return true;
        }
    }
    return false;
}

bool hr_dtype_from_torch_name(const char *name, hr_dtype *out) {
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (int i = 0; i < HR_DTYPE_COUNT; i++) {
        if (strcmp(name, hr_dtype_torch_name((hr_dtype)i)) == 0) {
            *out = (hr_dtype)i;
            return true;
        }
    }
    return false;
}

bool hr_dtype_is_weight(hr_dtype dtype) {
    return dtype == HR_DTYPE_F32 || dtype == HR_DTYPE_F16 || dtype == HR_DTYPE_BF16;
}

bool hr_shape_elements(const uint64_t *shape, uint32_t ndim, uint64_t *out) {
    uint64_t product = 1;
    for (uint32_t i = 0; i < ndim; i++) {
        if (__builtin_mul_overflow(product, shape[i], &product))
            return false;
    }
    *out = product;
    return true;
}

uint64_t hr_tensor_elements(const hr_tensor *tensor) {
    size_t size = hr_dtype_size(tensor->dtype);
    return size ? tensor->bytes / size : 0;
}

const char *hr_shape_format(const uint64_t *shape, uint32_t ndim, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (uint32_t i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)shape[i]);
    if (used < size)
        snprintf(text + used, size - used, "]");
    return text;
}
