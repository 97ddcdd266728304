/* The units that travel together next. */
#include "publish/bucket.h"

#include "weights/names.h"

#include <stdlib.h>
#include <string.h>

static bool reserve(void **list, size_t *cap, size_t want, size_t size) {
    if (want <= *cap)
        return true;
    size_t more = *cap > 0 ? *cap : 64;
    while (more < want)
        more *= 2;
    void *grown = realloc(*list, more * size);
    if (grown == NULL)
        return false;
    *list = grown;
    *cap = more;
    return true;
}

hr_status hr_push_bucket_add(hr_push_bucket *bucket, const hr_unit *unit, hr_error *err) {
    void *units = bucket->units, *tensors = bucket->tensors;
    bool room = reserve(&units, &bucket->cap_units, bucket->n_units + 1, sizeof *bucket->units);
    bucket->units = units;
    room = room && reserve(&tensors, &bucket->cap, bucket->n + unit->n, sizeof *bucket->tensors);
    bucket->tensors = tensors;
    if (!room)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a unit of %zu tensors", unit->n);
    bucket->units[bucket->n_units++] = *unit;
    for (size_t i = 0; i < unit->n; i++)
        bucket->tensors[bucket->n++] =
            (hr_packed_tensor){.tensor = unit->tensors[i], .adapter = unit->adapter, .send = true};
    bucket->bytes += hr_unit_bytes(unit);
    return HR_OK;
}

void hr_push_bucket_clear(hr_push_bucket *bucket) {
    for (size_t i = 0; i < bucket->n_units; i++)
        hr_unit_release(&bucket->units[i]);
    bucket->n_units = bucket->n = 0;
    bucket->bytes = 0;
}

void hr_push_bucket_free(hr_push_bucket *bucket) {
    hr_push_bucket_clear(bucket);
    free(bucket->units);
    free(bucket->tensors);
    *bucket = (hr_push_bucket){0};
}

uint64_t hr_unit_bytes(const hr_unit *unit) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < unit->n; i++)
        bytes += unit->tensors[i].bytes;
    return bytes;
}

void hr_unit_release(hr_unit *unit) {
    if (unit->n > 0 && unit->release != NULL)
        unit->release(unit->owner);
    *unit = (hr_unit){0};
}

const char *hr_wire_name_format(const char *adapter, const char *name, hr_buf *text) {
    hr_buf_clear(text);
    if (adapter != NULL) {
        hr_buf_puts(text, adapter);
        hr_buf_putc(text, ':');
    }
    hr_buf_puts(text, name);
    return text->failed ? NULL : text->data;
}

static hr_status check_tensor(const hr_tensor *t, const char *adapter, hr_error *err) {
    hr_wire_name parts;
    uint64_t elements = 0;
    if (t->name == NULL)
        return hr_fail(err, HR_ERR_INVALID, "a tensor without a name");
    if (adapter == NULL && strchr(t->name, ':') != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "base tensor %.200s has a ':' in its name; an adapter's tensors come in a "
                       "unit that names the adapter, without it in their names",
                       t->name);
    if (adapter == NULL)
        HR_TRY(hr_wire_name_split(t->name, NULL, &parts, err));
    if (t->ndim > HR_TENSOR_MAX_DIMS || hr_dtype_size(t->dtype) == 0 ||
        !hr_shape_elements(t->shape, t->ndim, &elements) ||
        elements > UINT64_MAX / hr_dtype_size(t->dtype) ||
        elements * hr_dtype_size(t->dtype) != t->bytes || (t->bytes > 0 && t->data == NULL)) {
        char shape[128];
        bool shown = t->ndim <= HR_TENSOR_MAX_DIMS;
        return hr_fail(err, HR_ERR_SHAPE, "tensor %.200s: %llu bytes are not %s %s", t->name,
                       (unsigned long long)t->bytes,
                       shown ? hr_shape_format(t->shape, t->ndim, shape, sizeof shape)
                             : "of at most 8 dimensions",
                       hr_dtype_name(t->dtype));
    }
    return HR_OK;
}

hr_status hr_unit_check(const hr_unit *unit, const hr_push *push, hr_error *err) {
    bool declared = unit->adapter == NULL;
    for (size_t i = 0; i < push->n_adapters && !declared; i++)
        declared = strcmp(push->adapters[i].name, unit->adapter) == 0;
    if (!declared)
        return hr_fail(err, HR_ERR_INVALID,
                       "the source has tensors of adapter %.200s, which this push does not declare",
                       unit->adapter);
    if (unit->adapter == NULL && !push->sync_base)
        return hr_fail(err, HR_ERR_INVALID,
                       "the source has base tensor %.200s, but this push has sync_base = false",
                       unit->tensors[0].name != NULL ? unit->tensors[0].name : "(no name)");
    for (size_t i = 0; i < unit->n; i++)
        HR_TRY(check_tensor(&unit->tensors[i], unit->adapter, err));
    return HR_OK;
}
