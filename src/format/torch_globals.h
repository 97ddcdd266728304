/* The closed list of names that a pickled payload of weights may hold, and what each stands for.
 * A name is only compared with the list: nothing is imported. */
#ifndef HR_FORMAT_TORCH_GLOBALS_H
#define HR_FORMAT_TORCH_GLOBALS_H

#include "base/error.h"

#include <headrace/tensor.h>

typedef enum hr_torch_global {
    HR_TORCH_G_REBUILD_TENSOR_V2,
    HR_TORCH_G_REBUILD_TENSOR_V3,
    HR_TORCH_G_REBUILD_PARAMETER,
    HR_TORCH_G_REBUILD_PARAMETER_WITH_STATE,
    HR_TORCH_G_REBUILD_FROM_TYPE,
    HR_TORCH_G_LOAD_FROM_BYTES,
    HR_TORCH_G_ORDERED_DICT,
    HR_TORCH_G_SIZE,
    HR_TORCH_G_BYTES,
    HR_TORCH_G_ENCODE,
    HR_TORCH_G_SHARED_TENSOR,
    HR_TORCH_G_TYPED_STORAGE,
    HR_TORCH_G_TYPED_STORAGE_CHILD,
    HR_TORCH_G_STORAGE_FILENAME,
    HR_TORCH_G_STORAGE_EMPTY,
    HR_TORCH_G_TENSOR_CLASS,
    HR_TORCH_G_STORAGE_CLASS, /* with a dtype, or none for UntypedStorage and TypedStorage */
    HR_TORCH_G_DTYPE,
    HR_TORCH_G_FLATTENED_METADATA,
    HR_TORCH_G_LOCAL_SERIALIZED
} hr_torch_global;

typedef struct hr_torch_name {
    const unsigned char *text;
    uint64_t size;
} hr_torch_name;

/* *typed and *dtype are set for a storage class or a dtype. ERR_UNSUPPORTED naming module.name when
 * it is not on the list; ERR_DTYPE for an element type there is none of here. */
hr_status hr_torch_global_find(hr_torch_name module, hr_torch_name name, hr_torch_global *out,
                               bool *typed, hr_dtype *dtype, hr_error *err);

#endif
