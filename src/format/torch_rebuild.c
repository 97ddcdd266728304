/* What the calls on the closed list make: storages and tensors, each checked when it is made. */
#include "format/torch_pickle.h"

#include <string.h>

static hr_status wrong_arguments(const char *function, hr_error *err) {
    return hr_fail(err, HR_ERR_CORRUPT, "the arguments of %s are not what torch writes", function);
}

static hr_torch_value argument(const hr_torch_reader *r, const hr_torch_value *args, size_t i) {
    return *hr_torch_at(r, hr_torch_item(r, args, i));
}

static bool is_global(const hr_torch_value *value, hr_torch_global global) {
    return value->kind == HR_TORCH_GLOBAL && value->count == global;
}

hr_status hr_torch_read_sizes(const hr_torch_reader *r, const hr_torch_value *tuple,
                              const char *what, uint64_t out[HR_TENSOR_MAX_DIMS], uint32_t *n,
                              hr_error *err) {
    if (tuple->kind != HR_TORCH_TUPLE)
        return hr_fail(err, HR_ERR_CORRUPT, "the %s of a tensor is %s, not a tuple", what,
                       hr_torch_kind_text(tuple));
    if (tuple->count > HR_TENSOR_MAX_DIMS)
        return hr_fail(err, HR_ERR_SHAPE, "a tensor has %llu dimensions; at most %d are taken",
                       (unsigned long long)tuple->count, HR_TENSOR_MAX_DIMS);
    for (uint32_t d = 0; d < tuple->count; d++) {
        hr_torch_value item = argument(r, tuple, d);
        if (item.kind != HR_TORCH_INT || item.integer < 0)
            return hr_fail(err, HR_ERR_SHAPE, "the %s of a tensor holds other than ints from 0 up",
                           what);
        out[d] = (uint64_t)item.integer;
    }
    *n = (uint32_t)tuple->count;
    return HR_OK;
}

/* Every element lies inside the storage: the last one does, since no stride is negative. */
static hr_status check_span(const hr_torch_strided *t, uint64_t storage_bytes, hr_error *err) {
    uint64_t last = t->offset, part = 0, bytes = 0;
    size_t item = hr_dtype_size(t->dtype);
    char shape[128];
    bool outside = false;
    for (uint32_t d = 0; d < t->ndim; d++)
        outside = outside || __builtin_mul_overflow(t->shape[d] - 1, t->stride[d], &part) ||
                  __builtin_add_overflow(last, part, &last);
    outside = outside || __builtin_add_overflow(last, 1, &last) ||
              __builtin_mul_overflow(last, item, &bytes) || bytes > storage_bytes;
    if (outside)
        return hr_fail(err, HR_ERR_SHAPE,
                       "a %s tensor of shape %s at offset %llu reaches outside its storage of %llu "
                       "bytes",
                       hr_dtype_torch_name(t->dtype),
                       hr_shape_format(t->shape, t->ndim, shape, sizeof shape),
                       (unsigned long long)t->offset, (unsigned long long)storage_bytes);
    return HR_OK;
}

static hr_status make_tensor(hr_torch_reader *r, uint32_t storage, hr_dtype dtype,
                             hr_torch_value offset, hr_torch_value shape, hr_torch_value stride,
                             hr_torch_value *out, hr_error *err) {
    hr_torch_strided t = {.storage = storage, .dtype = dtype};
    uint32_t strides = 0;
    uint64_t elements = 0, bytes = 0;
    HR_TRY(hr_torch_read_sizes(r, &shape, "shape", t.shape, &t.ndim, err));
    HR_TRY(hr_torch_read_sizes(r, &stride, "stride", t.stride, &strides, err));
    if (offset.kind != HR_TORCH_INT || offset.integer < 0 || strides != t.ndim)
        return hr_fail(err, HR_ERR_SHAPE,
                       "a tensor has a bad offset, or %u strides for %u dimensions", strides,
                       t.ndim);
    t.offset = (uint64_t)offset.integer;
    if (!hr_shape_elements(t.shape, t.ndim, &elements) ||
        __builtin_mul_overflow(elements, hr_dtype_size(dtype), &bytes) || bytes > INT64_MAX)
        return hr_fail(err, HR_ERR_SHAPE, "a tensor has more than 2^63 bytes");
    if (elements == 0)
        t.offset = 0;
    else
        HR_TRY(check_span(&t, r->storages[storage].bytes, err));
    HR_TRY(hr_torch_grow(&r->tensors, r->tensors_n + 1, &r->tensors_cap, sizeof *r->tensors,
                         HR_TORCH_MAX_STRIDED, "tensors", err));
    r->tensors[r->tensors_n] = t;
    *out = (hr_torch_value){.kind = HR_TORCH_TENSOR, .first = (uint32_t)r->tensors_n++};
    return HR_OK;
}

/* torch marks lazily negated or conjugated views here; plain tensors have nothing or only False. */
static hr_status check_metadata(const hr_torch_reader *r, const hr_torch_value *metadata,
                                hr_error *err) {
    hr_torch_walk walk = {0};
    uint32_t item = 0;
    bool plain = metadata->kind == HR_TORCH_NONE ||
                 (metadata->kind == HR_TORCH_MAPPING && metadata->count <= 16);
    while (plain && metadata->kind == HR_TORCH_MAPPING &&
           hr_torch_next(r, metadata, &walk, &item)) {
        const hr_torch_value *value = hr_torch_at(r, item);
        plain =
            value->kind == HR_TORCH_STR || (value->kind == HR_TORCH_BOOL && value->integer == 0);
    }
    if (!plain)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "a tensor is a lazy view (conjugate or negative); send .contiguous() or "
                       ".resolve_neg() of it");
    return HR_OK;
}

/* (storage, offset, shape, stride, requires_grad, hooks[, metadata]) */
static hr_status rebuild_v2(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                            hr_error *err) {
    if (args->count < 6 || args->count > 7 || argument(r, args, 0).kind != HR_TORCH_STORAGE)
        return wrong_arguments("_rebuild_tensor_v2", err);
    hr_torch_value storage = argument(r, args, 0);
    if (storage.count == 0)
        return wrong_arguments("_rebuild_tensor_v2 (a storage without dtype)", err);
    if (args->count == 7) {
        hr_torch_value metadata = argument(r, args, 6);
        HR_TRY(check_metadata(r, &metadata, err));
    }
    return make_tensor(r, storage.first, (hr_dtype)(storage.count - 1), argument(r, args, 1),
                       argument(r, args, 2), argument(r, args, 3), out, err);
}

/* (storage, offset, shape, stride, requires_grad, hooks, dtype[, metadata]) */
static hr_status rebuild_v3(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                            hr_error *err) {
    if (args->count < 7 || args->count > 8 || argument(r, args, 0).kind != HR_TORCH_STORAGE)
        return wrong_arguments("_rebuild_tensor_v3", err);
    hr_torch_value dtype = argument(r, args, 6);
    if (!is_global(&dtype, HR_TORCH_G_DTYPE))
        return wrong_arguments("_rebuild_tensor_v3", err);
    if (args->count == 8) {
        hr_torch_value metadata = argument(r, args, 7);
        HR_TRY(check_metadata(r, &metadata, err));
    }
    return make_tensor(r, argument(r, args, 0).first, (hr_dtype)(dtype.first - 1),
                       argument(r, args, 1), argument(r, args, 2), argument(r, args, 3), out, err);
}

/* (tensor, requires_grad, hooks[, state]): a parameter is its tensor here. */
static hr_status rebuild_parameter(hr_torch_reader *r, const hr_torch_value *args, size_t wanted,
                                   hr_torch_value *out, hr_error *err) {
    if (args->count != wanted || argument(r, args, 0).kind != HR_TORCH_TENSOR)
        return wrong_arguments("_rebuild_parameter", err);
    *out = argument(r, args, 0);
    return HR_OK;
}

/* (function, class, its arguments, state): a tensor with attributes of its own, which are of no
 * use here. */
static hr_status rebuild_from_type(hr_torch_reader *r, const hr_torch_value *args,
                                   hr_torch_value *out, hr_error *err) {
    if (args->count != 4)
        return wrong_arguments("_rebuild_from_type_v2", err);
    hr_torch_value function = argument(r, args, 0), cls = argument(r, args, 1),
                   inner = argument(r, args, 2);
    if (!is_global(&cls, HR_TORCH_G_TENSOR_CLASS) || inner.kind != HR_TORCH_TUPLE)
        return wrong_arguments("_rebuild_from_type_v2", err);
    if (is_global(&function, HR_TORCH_G_REBUILD_TENSOR_V2))
        return rebuild_v2(r, &inner, out, err);
    if (is_global(&function, HR_TORCH_G_REBUILD_TENSOR_V3))
        return rebuild_v3(r, &inner, out, err);
    return wrong_arguments("_rebuild_from_type_v2", err);
}

/* (class, storage, (offset, shape, stride, requires_grad)), by ForkingPickler. */
static hr_status rebuild_shared_tensor(hr_torch_reader *r, const hr_torch_value *args,
                                       hr_torch_value *out, hr_error *err) {
    if (args->count != 3)
        return wrong_arguments("rebuild_tensor", err);
    hr_torch_value cls = argument(r, args, 0), storage = argument(r, args, 1),
                   layout = argument(r, args, 2);
    if (!is_global(&cls, HR_TORCH_G_TENSOR_CLASS) || storage.kind != HR_TORCH_STORAGE ||
        storage.count == 0 || layout.kind != HR_TORCH_TUPLE || layout.count != 4)
        return wrong_arguments("rebuild_tensor", err);
    return make_tensor(r, storage.first, (hr_dtype)(storage.count - 1), argument(r, &layout, 0),
                       argument(r, &layout, 1), argument(r, &layout, 2), out, err);
}

static hr_status add_storage(hr_torch_reader *r, hr_torch_storage storage, uint32_t type,
                             hr_torch_value *out, hr_error *err) {
    HR_TRY(hr_torch_grow(&r->storages, r->storages_n + 1, &r->storages_cap, sizeof *r->storages,
                         HR_TORCH_MAX_STRIDED, "storages", err));
    r->storages[r->storages_n] = storage;
    *out = (hr_torch_value){
        .kind = HR_TORCH_STORAGE, .count = type, .first = (uint32_t)r->storages_n++};
    return HR_OK;
}

/* One object of torch.save in bytes: always a storage where tensors are pickled. */
static hr_status load_from_bytes(hr_torch_reader *r, const hr_torch_value *args,
                                 hr_torch_value *out, hr_error *err) {
    size_t values = r->values_n, items = r->items_n;
    uint32_t object = 0;
    if (args->count != 1 || argument(r, args, 0).kind != HR_TORCH_BYTES)
        return wrong_arguments("_load_from_bytes", err);
    hr_torch_value bytes = argument(r, args, 0);
    HR_TRY(hr_torch_read_object(r, bytes.bytes, bytes.count, &object, err));
    *out = *hr_torch_at(r, object);
    hr_torch_forget(r, values, items);
    if (out->kind != HR_TORCH_STORAGE)
        return wrong_arguments("_load_from_bytes", err);
    return HR_OK;
}

/* (text, "latin1"): how protocol 2 writes bytes; each byte is a character below 256. */
static hr_status encode_latin1(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                               hr_error *err) {
    if (args->count != 2)
        return wrong_arguments("_codecs.encode", err);
    hr_torch_value text = argument(r, args, 0), codec = argument(r, args, 1);
    unsigned char *bytes = NULL;
    size_t n = 0;
    if (text.kind != HR_TORCH_STR || !hr_torch_is_text(&codec, "latin1"))
        return wrong_arguments("_codecs.encode", err);
    /* Each text of a payload is decoded once; more would be work out of nothing. */
    if (text.count > r->size - r->recoded)
        return hr_fail(err, HR_ERR_LIMIT, "the payload decodes more text than it holds");
    r->recoded += text.count;
    HR_TRY(hr_torch_copy_room(r, text.count, "bytes written as text", &bytes, err));
    for (uint64_t i = 0; i < text.count; n++) {
        unsigned char c = text.bytes[i];
        bool two =
            (c == 0xc2 || c == 0xc3) && i + 1 < text.count && (text.bytes[i + 1] & 0xc0) == 0x80;
        if (c >= 0x80 && !two)
            return hr_fail(err, HR_ERR_CORRUPT,
                           "bytes written as text hold no latin1 character "
                           "where one was wanted");
        bytes[n] = two ? (unsigned char)(c << 6 | (text.bytes[i + 1] & 0x3f)) : c;
        i += two ? 2 : 1;
    }
    *out = (hr_torch_value){.kind = HR_TORCH_BYTES, .count = n, .bytes = bytes};
    return HR_OK;
}

static hr_status make_bytes(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                            hr_error *err) {
    static const unsigned char none[1];
    *out = args->count == 0 ? (hr_torch_value){.kind = HR_TORCH_BYTES, .bytes = none}
                            : argument(r, args, 0);
    if (args->count > 1 || out->kind != HR_TORCH_BYTES)
        return wrong_arguments("bytes", err);
    return HR_OK;
}

static hr_status make_size(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                           hr_error *err) {
    if (args->count != 1 || argument(r, args, 0).kind != HR_TORCH_TUPLE)
        return wrong_arguments("torch.Size", err);
    *out = argument(r, args, 0);
    return HR_OK;
}

/* (storage, dtype or class of a typed storage): the same bytes, with their type. */
static hr_status type_storage(hr_torch_reader *r, const hr_torch_value *args, hr_torch_global how,
                              hr_torch_value *out, hr_error *err) {
    if (args->count != 2)
        return wrong_arguments("rebuild_typed_storage", err);
    hr_torch_value storage = argument(r, args, 0), type = argument(r, args, 1);
    if (storage.kind != HR_TORCH_STORAGE || !is_global(&type, how) || type.first == 0)
        return wrong_arguments("rebuild_typed_storage", err);
    *out = storage;
    out->count = type.first;
    return HR_OK;
}

/* The last storage that was copied from shared memory, when it is this one: views of one buffer
 * that were pickled one by one name it each. */
static bool was_last(const hr_torch_reader *r, const hr_torch_value *name, uint64_t bytes) {
    const hr_torch_storage *last = r->shared_n > 0 ? &r->storages[r->shared_n - 1] : NULL;
    return last != NULL && last->bytes == bytes && last->key_size == name->count &&
           memcmp(last->key, name->bytes, name->count) == 0;
}

/* (class, socket of torch's manager, name, size[, dtype]): size in bytes, or in elements when there
 * is a dtype. */
static hr_status open_shared_storage(hr_torch_reader *r, const hr_torch_value *args,
                                     hr_torch_value *out, hr_error *err) {
    if (args->count < 4 || args->count > 5)
        return wrong_arguments("rebuild_storage_filename", err);
    hr_torch_value name = argument(r, args, 2), size = argument(r, args, 3),
                   type = args->count == 5 ? argument(r, args, 4) : (hr_torch_value){0};
    bool typed = is_global(&type, HR_TORCH_G_DTYPE);
    unsigned char *data = NULL;
    uint64_t bytes = 0;
    if (name.kind != HR_TORCH_BYTES || size.kind != HR_TORCH_INT || size.integer < 0 ||
        (args->count == 5 && !typed) ||
        __builtin_mul_overflow((uint64_t)size.integer,
                               typed ? hr_dtype_size((hr_dtype)(type.first - 1)) : 1, &bytes))
        return wrong_arguments("rebuild_storage_filename", err);
    if (was_last(r, &name, bytes)) {
        HR_TRY(hr_torch_shm_take(name.bytes, name.count, NULL, 0, r->keep_shared, err));
        *out = (hr_torch_value){
            .kind = HR_TORCH_STORAGE, .count = type.first, .first = (uint32_t)r->shared_n - 1};
        return HR_OK;
    }
    HR_TRY(hr_torch_copy_room(r, bytes, "a storage in shared memory", &data, err));
    HR_TRY(hr_torch_shm_take(name.bytes, name.count, data, bytes, r->keep_shared, err));
    HR_TRY(add_storage(r, (hr_torch_storage){data, bytes, name.bytes, name.count}, type.first, out,
                       err));
    r->shared_n = r->storages_n;
    return HR_OK;
}

static hr_status empty_storage(hr_torch_reader *r, const hr_torch_value *args, hr_torch_value *out,
                               hr_error *err) {
    static const unsigned char none[1];
    if (args->count != 1)
        return wrong_arguments("rebuild_storage_empty", err);
    hr_torch_value cls = argument(r, args, 0);
    if (!is_global(&cls, HR_TORCH_G_STORAGE_CLASS))
        return wrong_arguments("rebuild_storage_empty", err);
    return add_storage(r, (hr_torch_storage){.data = none}, cls.first, out, err);
}

hr_status hr_torch_persistent(hr_torch_reader *r, hr_torch_value id, hr_torch_value *out,
                              hr_error *err) {
    if (!r->archive)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "the payload holds a persistent id outside torch.save's own form");
    if (id.kind != HR_TORCH_TUPLE || id.count < 5 || id.count > 6)
        return wrong_arguments("a persistent id", err);
    hr_torch_value word = argument(r, &id, 0), cls = argument(r, &id, 1), key = argument(r, &id, 2),
                   location = argument(r, &id, 3), numel = argument(r, &id, 4),
                   view = id.count == 6 ? argument(r, &id, 5) : (hr_torch_value){0};
    uint64_t bytes = 0;
    if (!hr_torch_is_text(&word, "storage") || !is_global(&cls, HR_TORCH_G_STORAGE_CLASS) ||
        key.kind != HR_TORCH_STR || location.kind != HR_TORCH_STR || numel.kind != HR_TORCH_INT ||
        numel.integer < 0 || view.kind != HR_TORCH_NONE ||
        __builtin_mul_overflow((uint64_t)numel.integer,
                               cls.first > 0 ? hr_dtype_size((hr_dtype)(cls.first - 1)) : 1,
                               &bytes))
        return wrong_arguments("a persistent id", err);
    if (hr_torch_is_text(&location, "meta"))
        return hr_fail(err, HR_ERR_UNSUPPORTED, "the payload holds a tensor without bytes (meta)");
    return add_storage(r, (hr_torch_storage){NULL, bytes, key.bytes, key.count}, cls.first, out,
                       err);
}

hr_status hr_torch_call(hr_torch_reader *r, hr_torch_value callee, hr_torch_value args,
                        hr_torch_value *out, hr_error *err) {
    if (callee.kind != HR_TORCH_GLOBAL || args.kind != HR_TORCH_TUPLE)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "the payload calls %s with %s; nothing of it was run",
                       hr_torch_kind_text(&callee), hr_torch_kind_text(&args));
    switch ((hr_torch_global)callee.count) {
    case HR_TORCH_G_REBUILD_TENSOR_V2:
        return rebuild_v2(r, &args, out, err);
    case HR_TORCH_G_REBUILD_TENSOR_V3:
        return rebuild_v3(r, &args, out, err);
    case HR_TORCH_G_REBUILD_PARAMETER:
        return rebuild_parameter(r, &args, 3, out, err);
    case HR_TORCH_G_REBUILD_PARAMETER_WITH_STATE:
        return rebuild_parameter(r, &args, 4, out, err);
    case HR_TORCH_G_REBUILD_FROM_TYPE:
        return rebuild_from_type(r, &args, out, err);
    case HR_TORCH_G_LOAD_FROM_BYTES:
        return load_from_bytes(r, &args, out, err);
    case HR_TORCH_G_ORDERED_DICT:
        *out = (hr_torch_value){.kind = HR_TORCH_MAPPING};
        return args.count == 0 ? HR_OK : wrong_arguments("OrderedDict", err);
    case HR_TORCH_G_SIZE:
        return make_size(r, &args, out, err);
    case HR_TORCH_G_BYTES:
        return make_bytes(r, &args, out, err);
    case HR_TORCH_G_ENCODE:
        return encode_latin1(r, &args, out, err);
    case HR_TORCH_G_SHARED_TENSOR:
        return rebuild_shared_tensor(r, &args, out, err);
    case HR_TORCH_G_TYPED_STORAGE:
        return type_storage(r, &args, HR_TORCH_G_DTYPE, out, err);
    case HR_TORCH_G_TYPED_STORAGE_CHILD:
        return type_storage(r, &args, HR_TORCH_G_STORAGE_CLASS, out, err);
    case HR_TORCH_G_STORAGE_FILENAME:
        return open_shared_storage(r, &args, out, err);
    case HR_TORCH_G_STORAGE_EMPTY:
        return empty_storage(r, &args, out, err);
    case HR_TORCH_G_TENSOR_CLASS:
    case HR_TORCH_G_STORAGE_CLASS:
    case HR_TORCH_G_DTYPE:
    case HR_TORCH_G_FLATTENED_METADATA:
    case HR_TORCH_G_LOCAL_SERIALIZED:
        break;
    }
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "the payload calls a class, which no payload of weights does; nothing of it was "
                   "run");
}
