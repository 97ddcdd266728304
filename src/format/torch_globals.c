/* The closed list of names. */
#include "format/torch_globals.h"

#include <string.h>

typedef struct entry {
    const char *module, *name;
    hr_torch_global global;
} entry;

static const entry entries[] = {
    {"torch._utils", "_rebuild_tensor_v2", HR_TORCH_G_REBUILD_TENSOR_V2},
    {"torch._utils", "_rebuild_tensor_v3", HR_TORCH_G_REBUILD_TENSOR_V3},
    {"torch._utils", "_rebuild_parameter", HR_TORCH_G_REBUILD_PARAMETER},
    {"torch._utils", "_rebuild_parameter_with_state", HR_TORCH_G_REBUILD_PARAMETER_WITH_STATE},
    {"torch._tensor", "_rebuild_from_type_v2", HR_TORCH_G_REBUILD_FROM_TYPE},
    {"torch.storage", "_load_from_bytes", HR_TORCH_G_LOAD_FROM_BYTES},
    {"collections", "OrderedDict", HR_TORCH_G_ORDERED_DICT},
    {"torch", "Size", HR_TORCH_G_SIZE},
    {"builtins", "bytes", HR_TORCH_G_BYTES},
    {"builtins", "bytearray", HR_TORCH_G_BYTES},
    {"__builtin__", "bytes", HR_TORCH_G_BYTES},
    {"__builtin__", "bytearray", HR_TORCH_G_BYTES},
    {"_codecs", "encode", HR_TORCH_G_ENCODE},
    {"torch.multiprocessing.reductions", "rebuild_tensor", HR_TORCH_G_SHARED_TENSOR},
    {"torch.multiprocessing.reductions", "rebuild_typed_storage", HR_TORCH_G_TYPED_STORAGE},
    {"torch.multiprocessing.reductions", "rebuild_typed_storage_child",
     HR_TORCH_G_TYPED_STORAGE_CHILD},
    {"torch.multiprocessing.reductions", "rebuild_storage_filename", HR_TORCH_G_STORAGE_FILENAME},
    {"torch.multiprocessing.reductions", "rebuild_storage_empty", HR_TORCH_G_STORAGE_EMPTY},
    {"torch", "Tensor", HR_TORCH_G_TENSOR_CLASS},
    {"torch", "Parameter", HR_TORCH_G_TENSOR_CLASS},
    {"torch.nn.parameter", "Parameter", HR_TORCH_G_TENSOR_CLASS},
    {"torch.nn.parameter", "Buffer", HR_TORCH_G_TENSOR_CLASS},
    {"torch.storage", "UntypedStorage", HR_TORCH_G_STORAGE_CLASS},
    {"torch", "UntypedStorage", HR_TORCH_G_STORAGE_CLASS},
    {"torch.storage", "TypedStorage", HR_TORCH_G_STORAGE_CLASS},
    {"torch", "TypedStorage", HR_TORCH_G_STORAGE_CLASS},
};

/* Classes of torch's typed storages; the types that came later have none. */
static const struct {
    const char *name;
    hr_dtype dtype;
} storage_classes[] = {
    {"BFloat16Storage", HR_DTYPE_BF16}, {"HalfStorage", HR_DTYPE_F16},
    {"FloatStorage", HR_DTYPE_F32},     {"DoubleStorage", HR_DTYPE_F64},
    {"ByteStorage", HR_DTYPE_U8},       {"CharStorage", HR_DTYPE_I8},
    {"ShortStorage", HR_DTYPE_I16},     {"IntStorage", HR_DTYPE_I32},
    {"LongStorage", HR_DTYPE_I64},      {"BoolStorage", HR_DTYPE_BOOL},
};

/* Names that say the payload only points at memory of its producer. */
static const struct {
    const char *name, *form;
} unreachable[] = {
    {"rebuild_storage_fd",
     "torch's file_descriptor sharing, which only a child of its producer can open"},
    {"DupFd", "torch's file_descriptor sharing, which only a child of its producer can open"},
    {"rebuild_cuda_tensor", "a CUDA IPC handle, which this engine cannot open"},
    {"_rebuild_cuda_tensor_modified", "a CUDA IPC handle, which this engine cannot open"},
};

/* Other element types of torch, so that they are refused as such. */
static const char *const other_dtypes[] = {"complex", "quint", "qint", "float8", "float4",
                                           "bits",    "int1",  "int2", "int3",   "int4",
                                           "int5",    "int6",  "int7", "uint"};

static bool equals(hr_torch_name text, const char *what) {
    return text.size == strlen(what) && memcmp(text.text, what, text.size) == 0;
}

static bool begins(hr_torch_name text, const char *what) {
    return text.size >= strlen(what) && memcmp(text.text, what, strlen(what)) == 0;
}

static bool ends(hr_torch_name text, const char *what) {
    size_t n = strlen(what);
    return text.size >= n && memcmp(text.text + text.size - n, what, n) == 0;
}

/* A name for messages: cut, and printable whatever the payload holds. */
typedef struct shown {
    char text[100];
} shown;

static shown show(hr_torch_name name) {
    shown s;
    size_t n = name.size < sizeof s.text - 1 ? (size_t)name.size : sizeof s.text - 1;
    for (size_t i = 0; i < n; i++)
        s.text[i] = name.text[i] > 0x20 && name.text[i] < 0x7f ? (char)name.text[i] : '?';
    s.text[n] = '\0';
    return s;
}

static bool find_dtype(hr_torch_name name, hr_dtype *dtype) {
    char text[24];
    if (name.size >= sizeof text || memchr(name.text, '.', name.size) != NULL)
        return false;
    memcpy(text, name.text, name.size);
    text[name.size] = '\0';
    return hr_dtype_from_torch_name(text, dtype);
}

static bool find_storage_class(hr_torch_name name, hr_dtype *dtype) {
    for (size_t i = 0; i < sizeof storage_classes / sizeof *storage_classes; i++) {
        if (equals(name, storage_classes[i].name)) {
            *dtype = storage_classes[i].dtype;
            return true;
        }
    }
    return false;
}

static bool is_other_dtype(hr_torch_name name) {
    for (size_t i = 0; i < sizeof other_dtypes / sizeof *other_dtypes; i++)
        if (begins(name, other_dtypes[i]))
            return true;
    return ends(name, "Storage");
}

static hr_status refuse(hr_torch_name module, hr_torch_name name, hr_error *err) {
    for (size_t i = 0; i < sizeof unreachable / sizeof *unreachable; i++)
        if (equals(name, unreachable[i].name))
            return hr_fail(err, HR_ERR_UNSUPPORTED,
                           "the payload holds %s: %s. Send the bytes themselves: a plain pickle "
                           "(pickle.dumps) of CPU tensors, or a safetensors image",
                           show(name).text, unreachable[i].form);
    if (equals(module, "torch") && is_other_dtype(name))
        return hr_fail(err, HR_ERR_DTYPE, "tensors of torch.%s are not taken", show(name).text);
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "the payload names %s.%s, which is not among the names that a payload of "
                   "weights may hold; nothing of it was run",
                   show(module).text, show(name).text);
}

hr_status hr_torch_global_find(hr_torch_name module, hr_torch_name name, hr_torch_global *out,
                               bool *typed, hr_dtype *dtype, hr_error *err) {
    *typed = false;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (equals(module, entries[i].module) && equals(name, entries[i].name)) {
            *out = entries[i].global;
            return HR_OK;
        }
    }
    if (equals(module, "torch") && find_storage_class(name, dtype))
        *out = HR_TORCH_G_STORAGE_CLASS;
    else if (equals(module, "torch") && find_dtype(name, dtype))
        *out = HR_TORCH_G_DTYPE;
    else if (equals(name, "FlattenedTensorMetadata"))
        *out = HR_TORCH_G_FLATTENED_METADATA;
    else if (equals(name, "LocalSerializedTensor"))
        *out = HR_TORCH_G_LOCAL_SERIALIZED;
    else
        return refuse(module, name, err);
    *typed = *out == HR_TORCH_G_STORAGE_CLASS || *out == HR_TORCH_G_DTYPE;
    return HR_OK;
}
