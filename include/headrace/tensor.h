/* Element types and tensor views: how bytes that belong to somebody else are described.
 *
 * The types are those of the safetensors format. Every list of them in the project (sizes, names,
 * torch names) comes from the one map below. */
#ifndef HEADRACE_TENSOR_H
#define HEADRACE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(NAME, bytes per element, torch name). NAME is the safetensors spelling. */
#define HR_DTYPE_MAP(X)                                                                            \
    X(BOOL, 1, "bool")                                                                             \
    X(U8, 1, "uint8")                                                                              \
    X(I8, 1, "int8")                                                                               \
    X(F8_E5M2, 1, "float8_e5m2")                                                                   \
    X(F8_E4M3, 1, "float8_e4m3fn")                                                                 \
    X(I16, 2, "int16")                                                                             \
    X(U16, 2, "uint16")                                                                            \
    X(F16, 2, "float16")                                                                           \
    X(BF16, 2, "bfloat16")                                                                         \
    X(I32, 4, "int32")                                                                             \
    X(U32, 4, "uint32")                                                                            \
    X(F32, 4, "float32")                                                                           \
    X(F64, 8, "float64")                                                                           \
    X(I64, 8, "int64")                                                                             \
    X(U64, 8, "uint64")

typedef enum hr_dtype {
#define HR_DTYPE_ENUM(name, size, torch) HR_DTYPE_##name,
    HR_DTYPE_MAP(HR_DTYPE_ENUM)
#undef HR_DTYPE_ENUM
        HR_DTYPE_COUNT
} hr_dtype;

#define HR_TENSOR_MAX_DIMS 8

/* A named view of row-major elements; owns nothing. data need not be aligned to the element size
 * when it comes from a file of another writer. ndim 0 is a scalar: one element. bytes == elements *
 * dtype size. */
typedef struct hr_tensor {
    const char *name; /* NUL-terminated */
    hr_dtype dtype;
    uint32_t ndim;
    uint64_t shape[HR_TENSOR_MAX_DIMS];
    const void *data;
    uint64_t bytes;
} hr_tensor;

/* Bytes of one element; 0 for a foreign value. Thread-safe, as all of this header. */
size_t hr_dtype_size(hr_dtype dtype);

/* "BF16" and "bfloat16". Static strings; "unknown" for a foreign value. */
const char *hr_dtype_name(hr_dtype dtype);
const char *hr_dtype_torch_name(hr_dtype dtype);

/* The dtype of a safetensors name; false, *out untouched, when there is none. */
bool hr_dtype_from_name(const char *name, hr_dtype *out);

/* The dtype of a torch name, with or without "torch." before it; false when there is none. */
bool hr_dtype_from_torch_name(const char *name, hr_dtype *out);

/* True for F16, BF16 and F32: the types weights and adapters may have. */
bool hr_dtype_is_weight(hr_dtype dtype);

/* Product of the shape, 1 for a scalar; false when it overflows 64 bits. */
bool hr_shape_elements(const uint64_t *shape, uint32_t ndim, uint64_t *out);

/* Elements of a tensor: bytes / dtype size. */
uint64_t hr_tensor_elements(const hr_tensor *tensor);

/* Writes "[2, 3]" into text, always NUL-terminated, cut when too long; returns text, for messages.
 */
const char *hr_shape_format(const uint64_t *shape, uint32_t ndim, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
