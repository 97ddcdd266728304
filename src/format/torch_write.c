/* Writer of pickled torch payloads: the opcodes that Python's own pickler would write for plain CPU
 * tensors, with the storage of each in torch's legacy form. */
#include "format/torch_write.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The names a payload is made of: written in full the first time, then taken from the memo. */
typedef enum word {
    REBUILD_V2,
    REBUILD_V3,
    LOAD_FROM_BYTES,
    ORDERED_DICT,
    SIZE,
    METADATA,
    DTYPES, /* one for each dtype follows */
    WORDS = DTYPES + HR_DTYPE_COUNT
} word;

static const struct {
    const char *module, *name;
} words[DTYPES] = {
    [REBUILD_V2] = {"torch._utils", "_rebuild_tensor_v2"},
    [REBUILD_V3] = {"torch._utils", "_rebuild_tensor_v3"},
    [LOAD_FROM_BYTES] = {"torch.storage", "_load_from_bytes"},
    [ORDERED_DICT] = {"collections", "OrderedDict"},
    [SIZE] = {"torch", "Size"},
    [METADATA] = {"sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"},
};

typedef struct writer {
    hr_buf *out;
    unsigned memo[WORDS]; /* index plus 1, 0 when not written yet */
    unsigned memo_n;
} writer;

/* Classes of typed storages; types without one go as bytes with their dtype beside them. (torch
 * itself writes UntypedStorage there, which its own legacy loader then refuses.) */
static const char *storage_class(hr_dtype dtype) {
    switch (dtype) {
    case HR_DTYPE_BOOL:
        return "BoolStorage";
    case HR_DTYPE_U8:
        return "ByteStorage";
    case HR_DTYPE_I8:
        return "CharStorage";
    case HR_DTYPE_I16:
        return "ShortStorage";
    case HR_DTYPE_F16:
        return "HalfStorage";
    case HR_DTYPE_BF16:
        return "BFloat16Storage";
    case HR_DTYPE_I32:
        return "IntStorage";
    case HR_DTYPE_F32:
        return "FloatStorage";
    case HR_DTYPE_F64:
        return "DoubleStorage";
    case HR_DTYPE_I64:
        return "LongStorage";
    default:
        return NULL;
    }
}

static void put_number(hr_buf *out, uint64_t value, unsigned n) {
    unsigned char bytes[8];
    for (unsigned i = 0; i < n; i++)
        bytes[i] = (unsigned char)(value >> (8 * i));
    hr_buf_append(out, bytes, n);
}

static void put_int(hr_buf *out, uint64_t value) {
    if (value <= 0xff) {
        hr_buf_putc(out, 'K');
        put_number(out, value, 1);
    } else if (value <= 0xffff) {
        hr_buf_putc(out, 'M');
        put_number(out, value, 2);
    } else if (value <= INT32_MAX) {
        hr_buf_putc(out, 'J');
        put_number(out, value, 4);
    } else {
        hr_buf_append(out, "\x8a\x08", 2);
        put_number(out, value, 8);
    }
}

static void put_text(hr_buf *out, const char *text) {
    size_t n = strlen(text);
    hr_buf_putc(out, 'X');
    put_number(out, n, 4);
    hr_buf_append(out, text, n);
}

static void put_word(writer *w, unsigned index) {
    if (w->memo[index] > 0) {
        hr_buf_putc(w->out, 'h');
        put_number(w->out, w->memo[index] - 1, 1);
        return;
    }
    put_text(w->out, index < DTYPES ? words[index].module : "torch");
    put_text(w->out,
             index < DTYPES ? words[index].name : hr_dtype_torch_name((hr_dtype)(index - DTYPES)));
    hr_buf_append(w->out, "\x93\x94", 2);
    w->memo[index] = ++w->memo_n;
}

static void put_shape(hr_buf *out, const uint64_t *shape, uint32_t ndim) {
    hr_buf_putc(out, '(');
    for (uint32_t d = 0; d < ndim; d++)
        put_int(out, shape[d]);
    hr_buf_putc(out, 't');
}

static void put_strides(hr_buf *out, const uint64_t *shape, uint32_t ndim) {
    uint64_t strides[HR_TENSOR_MAX_DIMS], step = 1;
    for (uint32_t d = ndim; d-- > 0;) {
        strides[d] = step;
        step *= shape[d] > 0 ? shape[d] : 1;
    }
    put_shape(out, strides, ndim);
}

/* The five pickles of the legacy form and the count before the bytes: version, byte order and sizes
 * of C's types, one storage of key "0", the list of keys. */
static void put_storage_head(hr_buf *out, const char *cls, uint64_t numel) {
    static const unsigned char magic[] = {0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46,
                                          0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};
    static const struct {
        const char *name;
        unsigned size;
    } types[] = {{"short", 2}, {"int", 4}, {"long", 4}};
    hr_buf_append(out, magic, sizeof magic);
    hr_buf_append(out, "\x80\x02M\xe9\x03.", 6);
    hr_buf_append(out, "\x80\x02}(", 4);
    put_text(out, "protocol_version");
    put_int(out, 1001);
    put_text(out, "little_endian");
    hr_buf_putc(out, (char)0x88);
    put_text(out, "type_sizes");
    hr_buf_append(out, "}(", 2);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        put_text(out, types[i].name);
        put_int(out, types[i].size);
    }
    hr_buf_append(out, "uu.", 3);
    hr_buf_append(out, "\x80\x02(", 3);
    put_text(out, "storage");
    hr_buf_printf(out, "ctorch\n%s\n", cls);
    put_text(out, "0");
    put_text(out, "cpu");
    put_int(out, numel);
    hr_buf_append(out, "NtQ.", 4);
    hr_buf_append(out, "\x80\x02](", 4);
    put_text(out, "0");
    hr_buf_append(out, "e.", 2);
    put_number(out, numel, 8);
}

/* A storage up to its bytes, which the caller appends. */
static void put_storage(writer *w, hr_dtype dtype, uint64_t bytes) {
    const char *cls = storage_class(dtype);
    hr_buf head = {0};
    if (cls != NULL)
        put_storage_head(&head, cls, bytes / hr_dtype_size(dtype));
    else
        put_storage_head(&head, "ByteStorage", bytes);
    put_word(w, LOAD_FROM_BYTES);
    hr_buf_putc(w->out, (char)0x8e);
    put_number(w->out, head.len + bytes, 8);
    hr_buf_append(w->out, head.data, head.len);
    w->out->failed = w->out->failed || head.failed;
    hr_buf_free(&head);
}

/* The arguments behind a storage, and the call that makes a tensor of them. */
static void put_tensor_tail(writer *w, hr_dtype dtype, const uint64_t *shape, uint32_t ndim) {
    hr_buf_append(w->out, "\x85R", 2);
    put_int(w->out, 0);
    put_shape(w->out, shape, ndim);
    put_strides(w->out, shape, ndim);
    hr_buf_putc(w->out, (char)0x89);
    put_word(w, ORDERED_DICT);
    hr_buf_append(w->out, ")R", 2);
    if (storage_class(dtype) == NULL)
        put_word(w, DTYPES + (unsigned)dtype);
    hr_buf_append(w->out, "tR", 2);
}

static void put_tensor(writer *w, const hr_tensor *t) {
    put_word(w, storage_class(t->dtype) != NULL ? REBUILD_V2 : REBUILD_V3);
    hr_buf_putc(w->out, '(');
    put_storage(w, t->dtype, t->bytes);
    hr_buf_append(w->out, t->data, t->bytes);
    put_tensor_tail(w, t->dtype, t->shape, t->ndim);
}

static void put_named(writer *w, const hr_tensor *tensors, size_t n, hr_torch_form form) {
    bool pairs = form == HR_TORCH_PAIRS;
    hr_buf_append(w->out, pairs ? "](" : "}(", 2);
    for (size_t i = 0; i < n; i++) {
        put_text(w->out, tensors[i].name);
        put_tensor(w, &tensors[i]);
        if (pairs)
            hr_buf_putc(w->out, (char)0x86);
    }
    hr_buf_putc(w->out, pairs ? 'e' : 'u');
}

static void put_metadata(writer *w, const hr_tensor *t, uint64_t start) {
    put_word(w, METADATA);
    hr_buf_append(w->out, ")\x81}(", 4);
    put_text(w->out, "name");
    put_text(w->out, t->name);
    put_text(w->out, "shape");
    put_word(w, SIZE);
    put_shape(w->out, t->shape, t->ndim);
    hr_buf_append(w->out, "\x85R", 2);
    put_text(w->out, "dtype");
    put_word(w, DTYPES + (unsigned)t->dtype);
    put_text(w->out, "start_idx");
    put_int(w->out, start);
    put_text(w->out, "end_idx");
    put_int(w->out, start + t->bytes);
    put_text(w->out, "numel");
    put_int(w->out, t->bytes);
    hr_buf_append(w->out, "ub", 2);
}

static void put_flattened(writer *w, const hr_tensor *tensors, size_t n) {
    uint64_t total = 0, start = 0;
    for (size_t i = 0; i < n; i++)
        total += tensors[i].bytes;
    hr_buf_append(w->out, "}(", 2);
    put_text(w->out, "flattened_tensor");
    put_word(w, REBUILD_V2);
    hr_buf_putc(w->out, '(');
    put_storage(w, HR_DTYPE_U8, total);
    for (size_t i = 0; i < n; i++)
        hr_buf_append(w->out, tensors[i].data, tensors[i].bytes);
    put_tensor_tail(w, HR_DTYPE_U8, &total, 1);
    put_text(w->out, "metadata");
    hr_buf_append(w->out, "](", 2);
    for (size_t i = 0; i < n; i++) {
        put_metadata(w, &tensors[i], start);
        start += tensors[i].bytes;
    }
    hr_buf_append(w->out, "eu", 2);
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const hr_tensor *const *)a)->name, (*(const hr_tensor *const *)b)->name);
}

static hr_status check_names(const hr_tensor *tensors, size_t n, hr_error *err) {
    const hr_tensor **list = malloc((n + 1) * sizeof *list);
    hr_status status = HR_OK;
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        list[i] = &tensors[i];
    qsort(list, n, sizeof *list, compare_names);
    for (size_t i = 1; i < n && status == HR_OK; i++)
        if (strcmp(list[i - 1]->name, list[i]->name) == 0)
            status =
                hr_fail(err, HR_ERR_INVALID, "tensor name %.200s is given twice", list[i]->name);
    free(list);
    return status;
}

hr_status hr_torch_payload_write(const hr_tensor *tensors, size_t n, hr_torch_form form,
                                 hr_buf *out, hr_error *err) {
    writer w = {.out = out};
    HR_TRY(check_names(tensors, n, err));
    if (form == HR_TORCH_FLATTENED && n == 0)
        return hr_fail(err, HR_ERR_INVALID, "a flattened bucket needs at least one tensor");
    hr_buf_append(out, "\x80\x04", 2);
    if (form == HR_TORCH_FLATTENED)
        put_flattened(&w, tensors, n);
    else
        put_named(&w, tensors, n, form);
    hr_buf_putc(out, '.');
    if (out->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a payload of %zu tensors", n);
    return HR_OK;
}
