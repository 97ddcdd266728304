/* From the object that a payload is to named tensors: pairs, a dict, or a flattened bucket. */
#include "format/torch_payload.h"

#include "format/json_bytes.h"
#include "format/torch_pickle.h"

#include <stdlib.h>
#include <string.h>

struct hr_torch_payload {
    hr_tensor *tensors;
    size_t n, cap;
    void **copies;
    size_t copies_n;
};

/* What one reading needs; the payload takes the copies when it succeeds. */
typedef struct reading {
    hr_torch_reader r;
    const hr_torch_options *options;
    hr_torch_payload *payload;
    uint64_t named; /* bytes of names so far */
} reading;

static void free_copies(void **copies, size_t n) {
    for (size_t i = 0; i < n; i++)
        free(copies[i]);
    free(copies);
}

static void free_reader(hr_torch_reader *r) {
    free(r->values);
    free(r->items);
    free(r->stack);
    free(r->memo);
    free(r->storages);
    free(r->tensors);
    free_copies(r->copies, r->copies_n);
}

/* Value 0 and item 0 exist so that 0 can stand for none. */
static hr_status begin(hr_torch_reader *r, hr_error *err) {
    HR_TRY(hr_torch_grow(&r->values, 1, &r->values_cap, sizeof *r->values, HR_TORCH_MAX_VALUES,
                         "values", err));
    HR_TRY(hr_torch_grow(&r->items, 1, &r->items_cap, sizeof *r->items, HR_TORCH_MAX_ITEMS, "items",
                         err));
    r->values[0] = (hr_torch_value){.kind = HR_TORCH_NONE};
    r->items[0] = 0;
    r->values_n = r->items_n = 1;
    return HR_OK;
}

/* Row-major without holes, for a tensor that has elements; the stride of a dimension of one element
 * does not matter. */
static bool is_packed(const hr_torch_strided *t) {
    uint64_t wanted = 1;
    for (uint32_t d = t->ndim; d-- > 0;) {
        if (t->shape[d] != 1 && t->stride[d] != wanted)
            return false;
        wanted *= t->shape[d];
    }
    return true;
}

/* Copies rows (the last dimension) one after another; `at` counts through the others. */
static void pack(const hr_torch_strided *t, const unsigned char *from, unsigned char *to) {
    size_t item = hr_dtype_size(t->dtype);
    uint32_t last = t->ndim - 1;
    uint64_t at[HR_TENSOR_MAX_DIMS] = {0}, place = 0, row = t->shape[last];
    for (;;) {
        const unsigned char *source = from + place * item;
        if (t->stride[last] == 1 || row == 1)
            memcpy(to, source, row * item);
        else
            for (uint64_t i = 0; i < row; i++)
                memcpy(to + i * item, source + i * t->stride[last] * item, item);
        to += row * item;
        uint32_t d = last;
        while (d > 0 && at[d - 1] + 1 == t->shape[d - 1]) {
            d--;
            place -= at[d] * t->stride[d];
            at[d] = 0;
        }
        if (d == 0)
            return;
        at[d - 1]++;
        place += t->stride[d - 1];
    }
}

/* The elements of tensor `index` in row-major order: where they lie, or a copy that is made once.
 */
static hr_status packed_bytes(hr_torch_reader *r, uint32_t index, const unsigned char **data,
                              uint64_t *bytes, hr_error *err) {
    hr_torch_strided *t = &r->tensors[index];
    const unsigned char *from = r->storages[t->storage].data + t->offset * hr_dtype_size(t->dtype);
    uint64_t elements = 0;
    unsigned char *copy = NULL;
    hr_shape_elements(t->shape, t->ndim, &elements);
    *bytes = elements * hr_dtype_size(t->dtype);
    if (t->packed == NULL && (elements == 0 || is_packed(t)))
        t->packed = from;
    if (t->packed == NULL) {
        HR_TRY(hr_torch_copy_room(r, *bytes, "a tensor that is a strided view", &copy, err));
        pack(t, from, copy);
        t->packed = copy;
    }
    *data = t->packed;
    return HR_OK;
}

/* A name for messages: cut when long. */
typedef struct name_shown {
    char text[200];
} name_shown;

static name_shown name_text(const hr_torch_value *name) {
    name_shown shown;
    size_t n = name->count < sizeof shown.text - 1 ? (size_t)name->count : sizeof shown.text - 1;
    memcpy(shown.text, name->bytes, n);
    shown.text[n] = '\0';
    return shown;
}

static hr_status check_name(const hr_torch_value *name, hr_error *err) {
    if (name->kind != HR_TORCH_STR)
        return hr_fail(err, HR_ERR_INVALID, "the name of a tensor is %s, not a str",
                       hr_torch_kind_text(name));
    if (name->count == 0 || name->count > HR_TORCH_MAX_NAME)
        return hr_fail(err, HR_ERR_INVALID, "the name of a tensor has %llu bytes; wanted 1 to %d",
                       (unsigned long long)name->count, HR_TORCH_MAX_NAME);
    for (uint64_t at = 0, n = 0; at < name->count; at += n) {
        n = name->bytes[at] == 0
                ? 0
                : hr_utf8_sequence((const char *)name->bytes + at, name->count - at);
        if (n == 0)
            return hr_fail(err, HR_ERR_INVALID,
                           "the name of a tensor is not UTF-8 without NUL at byte %llu",
                           (unsigned long long)at);
    }
    return HR_OK;
}

/* Adds a tensor; its name becomes a string of the payload's. */
static hr_status add_tensor(reading *g, const hr_torch_value *name, hr_tensor tensor,
                            hr_error *err) {
    hr_torch_payload *p = g->payload;
    unsigned char *text = NULL;
    HR_TRY(check_name(name, err));
    /* Each name of its own stands somewhere in the payload; a repeated one must not cost memory. */
    if (name->count > g->r.size - g->named)
        return hr_fail(err, HR_ERR_INVALID,
                       "the names of tensors take more bytes than the payload has; one of them, "
                       "such as %s, is given twice",
                       name_text(name).text);
    g->named += name->count;
    HR_TRY(hr_torch_grow(&p->tensors, p->n + 1, &p->cap, sizeof *p->tensors, HR_TORCH_MAX_TENSORS,
                         "tensors", err));
    HR_TRY(hr_torch_copy_room(&g->r, name->count + 1, "a name", &text, err));
    memcpy(text, name->bytes, name->count);
    text[name->count] = '\0';
    tensor.name = (const char *)text;
    p->tensors[p->n++] = tensor;
    return HR_OK;
}

/* The object of the value of a LocalSerializedTensor for our rank. Its own shared memory is given
 * back whoever else reads the payload: no other rank reads this value. */
static hr_status read_local(reading *g, const hr_torch_value *object, uint32_t *out,
                            hr_error *err) {
    hr_torch_reader *r = &g->r;
    hr_torch_walk walk = {0};
    uint32_t item = 0;
    const hr_torch_value *values =
        object->first > 0 ? hr_torch_get(r, hr_torch_at(r, object->first), "values") : NULL;
    if (values == NULL || (values->kind != HR_TORCH_LIST && values->kind != HR_TORCH_TUPLE))
        return hr_fail(err, HR_ERR_INVALID, "a LocalSerializedTensor has no list of values");
    if (g->options->rank >= values->count)
        return hr_fail(err, HR_ERR_INVALID,
                       "a LocalSerializedTensor has %llu values, none for rank %u",
                       (unsigned long long)values->count, g->options->rank);
    for (uint32_t i = 0; i <= g->options->rank; i++)
        hr_torch_next(r, values, &walk, &item);
    r->opcodes += g->options->rank;
    hr_torch_value bytes = *hr_torch_at(r, item);
    if (bytes.kind != HR_TORCH_BYTES)
        return hr_fail(err, HR_ERR_INVALID, "value %u of a LocalSerializedTensor is %s, not bytes",
                       g->options->rank, hr_torch_kind_text(&bytes));
    bool keep = r->keep_shared;
    r->keep_shared = false;
    hr_status status = hr_torch_read_object(r, bytes.bytes, bytes.count, out, err);
    r->keep_shared = keep;
    return status;
}

/* The tensor that a value is, or holds for our rank. */
static hr_status find_tensor(reading *g, uint32_t index, uint32_t *out, hr_error *err) {
    hr_torch_value value = *hr_torch_at(&g->r, index);
    size_t values = g->r.values_n, items = g->r.items_n;
    if (value.kind == HR_TORCH_OBJECT && value.count == HR_TORCH_G_LOCAL_SERIALIZED) {
        HR_TRY(read_local(g, &value, &index, err));
        value = *hr_torch_at(&g->r, index);
        hr_torch_forget(&g->r, values, items);
    }
    if (value.kind != HR_TORCH_TENSOR)
        return hr_fail(err, HR_ERR_INVALID, "%s stands where a tensor was wanted",
                       hr_torch_kind_text(&value));
    *out = value.first;
    return HR_OK;
}

static hr_status add_named(reading *g, uint32_t name, uint32_t value, hr_error *err) {
    hr_tensor tensor = {0};
    uint32_t index = 0;
    const unsigned char *data = NULL;
    hr_torch_value text = *hr_torch_at(&g->r, name);
    HR_TRY(check_name(&text, err));
    hr_status status = find_tensor(g, value, &index, err);
    if (status == HR_OK)
        status = packed_bytes(&g->r, index, &data, &tensor.bytes, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "tensor %s", name_text(&text).text);
    const hr_torch_strided *t = &g->r.tensors[index];
    tensor.dtype = t->dtype;
    tensor.ndim = t->ndim;
    memcpy(tensor.shape, t->shape, sizeof tensor.shape);
    tensor.data = data;
    return add_tensor(g, &text, tensor, err);
}

static hr_status read_pairs(reading *g, uint32_t object, hr_error *err) {
    hr_torch_value list = *hr_torch_at(&g->r, object);
    hr_torch_walk walk = {0};
    uint32_t item = 0;
    while (hr_torch_next(&g->r, &list, &walk, &item)) {
        hr_torch_value pair = *hr_torch_at(&g->r, item);
        hr_torch_walk inside = {0};
        uint32_t name = 0, value = 0;
        if ((pair.kind != HR_TORCH_TUPLE && pair.kind != HR_TORCH_LIST) || pair.count != 2)
            return hr_fail(err, HR_ERR_INVALID,
                           "entry %zu of the payload is %s, not a (name, tensor) pair",
                           walk.seen - 1, hr_torch_kind_text(&pair));
        hr_torch_next(&g->r, &pair, &inside, &name);
        hr_torch_next(&g->r, &pair, &inside, &value);
        HR_TRY(add_named(g, name, value, err));
    }
    return HR_OK;
}

static hr_status read_mapping(reading *g, uint32_t object, hr_error *err) {
    hr_torch_value mapping = *hr_torch_at(&g->r, object);
    hr_torch_walk walk = {0};
    uint32_t name = 0, value = 0;
    while (hr_torch_next(&g->r, &mapping, &walk, &name) &&
           hr_torch_next(&g->r, &mapping, &walk, &value))
        HR_TRY(add_named(g, name, value, err));
    return HR_OK;
}

/* A flat tensor that the tensors of a bucket are parts of. */
typedef struct bucket {
    const unsigned char *data;
    uint64_t bytes;
    hr_dtype dtype;
} bucket;

static bool get_index(const hr_torch_reader *r, const hr_torch_value *attributes, const char *key,
                      uint64_t *out) {
    const hr_torch_value *value = hr_torch_get(r, attributes, key);
    if (value == NULL || value->kind != HR_TORCH_INT || value->integer < 0)
        return false;
    *out = (uint64_t)value->integer;
    return true;
}

/* name, shape and dtype of one FlattenedTensorMetadata, or of a dict of its fields, and its range
 * as it stands there. */
static hr_status read_part(const hr_torch_reader *r, const hr_torch_value *object,
                           hr_torch_value *name, hr_tensor *tensor, uint64_t *start, uint64_t *end,
                           hr_error *err) {
    uint64_t numel = 0;
    bool is_class = object->kind == HR_TORCH_OBJECT &&
                    object->count == HR_TORCH_G_FLATTENED_METADATA && object->first != 0;
    if (!is_class && object->kind != HR_TORCH_MAPPING)
        return hr_fail(err, HR_ERR_INVALID,
                       "%s stands where FlattenedTensorMetadata, or a dict of its fields, was "
                       "wanted",
                       hr_torch_kind_text(object));
    const hr_torch_value *attributes = is_class ? hr_torch_at(r, object->first) : object;
    const hr_torch_value *text = hr_torch_get(r, attributes, "name"),
                         *shape = hr_torch_get(r, attributes, "shape"),
                         *dtype = hr_torch_get(r, attributes, "dtype");
    if (text == NULL || shape == NULL || dtype == NULL || dtype->kind != HR_TORCH_GLOBAL ||
        dtype->count != HR_TORCH_G_DTYPE || !get_index(r, attributes, "start_idx", start) ||
        !get_index(r, attributes, "end_idx", end) || !get_index(r, attributes, "numel", &numel))
        return hr_fail(err, HR_ERR_INVALID,
                       "FlattenedTensorMetadata without name (str), shape (tuple), dtype "
                       "(torch.dtype), start_idx, end_idx and numel (ints)");
    HR_TRY(check_name(text, err));
    *name = *text;
    if (*start > *end || numel != *end - *start)
        return hr_fail(err, HR_ERR_SHAPE, "tensor %s: the range %llu to %llu does not hold %llu",
                       name_text(name).text, (unsigned long long)*start, (unsigned long long)*end,
                       (unsigned long long)numel);
    tensor->dtype = (hr_dtype)(dtype->first - 1);
    return hr_torch_read_sizes(r, shape, "shape", tensor->shape, &tensor->ndim, err);
}

/* One tensor of a bucket. In the old layout ranges count elements of the one dtype, in the new one
 * bytes. */
static hr_status add_part(reading *g, const bucket *b, bool old, uint32_t item, hr_error *err) {
    hr_tensor tensor = {0};
    hr_torch_value name = {0};
    uint64_t start = 0, end = 0, elements = 0, unit = old ? hr_dtype_size(b->dtype) : 1;
    char shape[128];
    HR_TRY(read_part(&g->r, hr_torch_at(&g->r, item), &name, &tensor, &start, &end, err));
    if (old && tensor.dtype != b->dtype)
        return hr_fail(err, HR_ERR_DTYPE, "tensor %s is %s in a flattened bucket of %s",
                       name_text(&name).text, hr_dtype_torch_name(tensor.dtype),
                       hr_dtype_torch_name(b->dtype));
    if (end > b->bytes / unit)
        return hr_fail(err, HR_ERR_SHAPE, "tensor %s ends at %llu in a flattened bucket of %llu %s",
                       name_text(&name).text, (unsigned long long)end,
                       (unsigned long long)(b->bytes / unit), old ? "elements" : "bytes");
    tensor.bytes = (end - start) * unit;
    if (!hr_shape_elements(tensor.shape, tensor.ndim, &elements) ||
        tensor.bytes % hr_dtype_size(tensor.dtype) != 0 ||
        tensor.bytes / hr_dtype_size(tensor.dtype) != elements)
        return hr_fail(err, HR_ERR_SHAPE, "tensor %s: %s of shape %s does not fill %llu bytes",
                       name_text(&name).text, hr_dtype_torch_name(tensor.dtype),
                       hr_shape_format(tensor.shape, tensor.ndim, shape, sizeof shape),
                       (unsigned long long)tensor.bytes);
    tensor.data = b->data + start * unit;
    return add_tensor(g, &name, tensor, err);
}

static int compare_ranges(const void *a, const void *b) {
    const hr_tensor *x = *(const hr_tensor *const *)a, *y = *(const hr_tensor *const *)b;
    const unsigned char *p = x->data, *q = y->data;
    return p != q ? (p < q ? -1 : 1) : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const hr_tensor *const *)a)->name, (*(const hr_tensor *const *)b)->name);
}

typedef int comparison(const void *, const void *);

/* Pointers to all tensors in some order; to be freed. NULL when there is no memory. */
static const hr_tensor **sorted(const hr_torch_payload *p, comparison *order) {
    const hr_tensor **list = malloc((p->n + 1) * sizeof *list);
    if (list == NULL)
        return NULL;
    for (size_t i = 0; i < p->n; i++)
        list[i] = &p->tensors[i];
    qsort(list, p->n, sizeof *list, order);
    return list;
}

static hr_status check_no_overlap(const hr_torch_payload *p, hr_error *err) {
    const hr_tensor **list = sorted(p, compare_ranges);
    hr_status status = HR_OK;
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to compare %zu tensors", p->n);
    for (size_t i = 1; i < p->n && status == HR_OK; i++) {
        const unsigned char *end = (const unsigned char *)list[i - 1]->data + list[i - 1]->bytes;
        if (list[i - 1]->bytes > 0 && list[i]->bytes > 0 &&
            (const unsigned char *)list[i]->data < end)
            status = hr_fail(err, HR_ERR_SHAPE, "tensors %.200s and %.200s overlap in their bucket",
                             list[i - 1]->name, list[i]->name);
    }
    free(list);
    return status;
}

static hr_status check_no_twins(const hr_torch_payload *p, hr_error *err) {
    const hr_tensor **list = sorted(p, compare_names);
    hr_status status = HR_OK;
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to compare %zu names", p->n);
    for (size_t i = 1; i < p->n && status == HR_OK; i++)
        if (strcmp(list[i - 1]->name, list[i]->name) == 0)
            status =
                hr_fail(err, HR_ERR_INVALID, "tensor name %.200s is given twice", list[i]->name);
    free(list);
    return status;
}

/* New: some tensor is other than uint8 in a bucket of uint8. (All uint8: both layouts agree.) */
static hr_status read_bucket(reading *g, uint32_t object, hr_error *err) {
    hr_torch_reader *r = &g->r;
    const hr_torch_value *mapping = hr_torch_at(r, object);
    const hr_torch_value *flat = hr_torch_get(r, mapping, "flattened_tensor"),
                         *metadata = hr_torch_get(r, mapping, "metadata");
    bucket b = {0};
    hr_torch_walk walk = {0};
    uint32_t index = 0, item = 0;
    if (flat == NULL || metadata == NULL ||
        (metadata->kind != HR_TORCH_LIST && metadata->kind != HR_TORCH_TUPLE))
        return hr_fail(err, HR_ERR_INVALID,
                       "the payload is %s; a flattened bucket is a dict of flattened_tensor and "
                       "metadata",
                       hr_torch_kind_text(mapping));
    hr_torch_value parts = *metadata;
    HR_TRY(find_tensor(g, (uint32_t)(flat - r->values), &index, err));
    HR_TRY(packed_bytes(r, index, &b.data, &b.bytes, err));
    b.dtype = r->tensors[index].dtype;
    if (r->tensors[index].ndim != 1)
        return hr_fail(err, HR_ERR_SHAPE, "flattened_tensor has %u dimensions; wanted 1",
                       r->tensors[index].ndim);
    while (hr_torch_next(r, &parts, &walk, &item))
        HR_TRY(add_part(g, &b, b.dtype != HR_DTYPE_U8, item, err));
    return check_no_overlap(g->payload, err);
}

static hr_status read_named(reading *g, uint32_t object, hr_error *err) {
    const hr_torch_value *value = hr_torch_at(&g->r, object);
    if (value->kind == HR_TORCH_LIST || value->kind == HR_TORCH_TUPLE)
        return read_pairs(g, object, err);
    if (value->kind != HR_TORCH_MAPPING)
        return hr_fail(err, HR_ERR_INVALID,
                       "the payload is %s; wanted is a list of (name, tensor) pairs or a dict",
                       hr_torch_kind_text(value));
    const hr_torch_value *flat = hr_torch_get(&g->r, value, "flattened_tensor");
    if (flat != NULL && hr_torch_get(&g->r, value, "metadata") != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "the payload is a flattened bucket; say so with load_format "
                       "flattened_bucket");
    return read_mapping(g, object, err);
}

static hr_status read_payload(reading *g, const void *bytes, size_t size, hr_error *err) {
    uint32_t object = 0;
    HR_TRY(begin(&g->r, err));
    HR_TRY(hr_torch_read_object(&g->r, bytes, size, &object, err));
    HR_TRY(g->options->flattened ? read_bucket(g, object, err) : read_named(g, object, err));
    return check_no_twins(g->payload, err);
}

hr_status hr_torch_payload_read(const void *bytes, size_t size, const hr_torch_options *options,
                                hr_torch_payload **out, hr_error *err) {
    uint64_t max_bytes = options->max_bytes > 0 ? options->max_bytes : HR_TORCH_DEFAULT_MAX_BYTES;
    reading g = {.options = options, .payload = calloc(1, sizeof *g.payload)};
    g.r.max_bytes = max_bytes;
    g.r.size = size;
    g.r.keep_shared = options->keep_shared;
    hr_status status = g.payload == NULL ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a payload")
                                         : read_payload(&g, bytes, size, err);
    if (status == HR_OK) {
        g.payload->copies = g.r.copies;
        g.payload->copies_n = g.r.copies_n;
        g.r.copies = NULL;
        g.r.copies_n = 0;
        *out = g.payload;
    } else {
        hr_torch_payload_close(g.payload);
    }
    free_reader(&g.r);
    return status;
}

size_t hr_torch_payload_count(const hr_torch_payload *payload) {
    return payload->n;
}

const hr_tensor *hr_torch_payload_tensors(const hr_torch_payload *payload) {
    return payload->tensors;
}

void hr_torch_payload_close(hr_torch_payload *payload) {
    if (payload == NULL)
        return;
    free_copies(payload->copies, payload->copies_n);
    free(payload->tensors);
    free(payload);
}
