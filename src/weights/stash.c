#include "weights/stash.h"

#include "weights/names.h"

#include <stdlib.h>
#include <string.h>

/* Copied and hashed before the next one comes, so that hashing reads what is still in cache. */
enum { SLICE = 256 * 1024, ALIGN = 64 };

void hr_stash_init(hr_stash *stash, const hr_memory *memory) {
    *stash = (hr_stash){.memory = *memory};
}

static void parcel_drop_bytes(const hr_memory *memory, hr_parcel *parcel) {
    hr_memory_free(memory, parcel->bytes);
    parcel->bytes = NULL;
    if (parcel->release != NULL)
        parcel->release(parcel->owner);
    parcel->release = NULL;
    for (size_t i = 0; i < parcel->n; i++)
        parcel->entries[i].tensor.data = NULL;
}

void hr_stash_drop_bytes(hr_stash *stash) {
    for (hr_parcel *p = stash->parcels; p != NULL; p = p->next)
        parcel_drop_bytes(&stash->memory, p);
}

void hr_stash_destroy(hr_stash *stash) {
    while (stash->parcels != NULL) {
        hr_parcel *next = stash->parcels->next;
        hr_parcel_destroy(&stash->memory, stash->parcels);
        stash->parcels = next;
    }
    hr_memory_free(&stash->memory, stash->table);
    *stash = (hr_stash){.memory = stash->memory};
}

/* ---- parcels ---- */

static hr_status check_tensor(const hr_tensor *tensor, hr_error *err) {
    size_t element = hr_dtype_size(tensor->dtype);
    if (element == 0)
        return hr_fail(err, HR_ERR_DTYPE, "tensor '%.200s' has an unknown dtype (%d)", tensor->name,
                       (int)tensor->dtype);
    uint64_t elements = 0;
    if (tensor->ndim > HR_TENSOR_MAX_DIMS ||
        !hr_shape_elements(tensor->shape, tensor->ndim, &elements) ||
        elements > UINT64_MAX / element || elements * element != tensor->bytes ||
        (tensor->data == NULL && tensor->bytes > 0))
        return hr_fail(err, HR_ERR_INVALID,
                       "tensor '%.200s': its %llu bytes are not those of its shape", tensor->name,
                       (unsigned long long)tensor->bytes);
    return HR_OK;
}

static hr_status find_adapter(const hr_registry *registry, const hr_wire_name *name,
                              hr_registered **out, hr_error *err) {
    if (name->adapter == NULL) {
        *out = NULL;
        return HR_OK;
    }
    hr_registered *found = hr_registry_find(registry, name->adapter, name->adapter_len);
    if (found == NULL)
        return hr_fail(
            err, HR_ERR_ADAPTER_UNKNOWN,
            "tensor '%.200s' is of the adapter '%.*s', which is not registered; register "
            "it before its tensors",
            name->key,
            (int)(name->adapter_len < HR_LORA_NAME_SIZE ? name->adapter_len : HR_LORA_NAME_SIZE),
            name->adapter);
    *out = found;
    return HR_OK;
}

/* Writes "adapter:key" or "key" behind the names so far; tensor.name is its key part. */
static char *put_name(hr_stash_entry *entry, const hr_wire_name *name, char *text) {
    entry->name = text;
    if (name->adapter != NULL) {
        memcpy(text, name->adapter, name->adapter_len);
        text += name->adapter_len;
        *text++ = ':';
    }
    entry->tensor.name = text;
    memcpy(text, name->key, name->key_len + 1);
    return text + name->key_len + 1;
}

static uint64_t hash_name(const char *name) {
    uint8_t digest[HR_XXH3_SIZE];
    uint64_t hash;
    hr_xxh3(name, strlen(name), digest);
    memcpy(&hash, digest, sizeof hash);
    return hash;
}

/* How large the parcel's struct becomes; refuses when it and the adapters' bytes need more room. */
static hr_status measure(const hr_tensor *tensors, size_t n, const char *adapter, uint64_t room,
                         size_t *size, hr_error *err) {
    uint64_t held = sizeof(hr_parcel) + (uint64_t)n * sizeof(hr_stash_entry);
    *size = held;
    for (size_t i = 0; i < n; i++) {
        hr_wire_name name;
        HR_TRY(hr_wire_name_split(tensors[i].name, adapter, &name, err));
        HR_TRY(check_tensor(&tensors[i], err));
        size_t text = name.adapter_len + 1 + name.key_len + 1;
        *size += text;
        held += text;
        uint64_t bytes = name.adapter != NULL ? tensors[i].bytes : 0;
        if (held > room || bytes > room - held)
            return hr_fail(
                err, HR_ERR_LIMIT,
                "tensor '%.200s' (%llu bytes) does not fit into the %llu bytes that this "
                "session may still hold for adapters; send fewer adapters in one session",
                tensors[i].name, (unsigned long long)tensors[i].bytes, (unsigned long long)room);
        held += bytes;
    }
    return HR_OK;
}

hr_status hr_parcel_create(const hr_memory *memory, const hr_registry *registry,
                           const hr_tensor *tensors, size_t n, const char *adapter, uint64_t room,
                           hr_parcel **out, hr_error *err) {
    size_t size;
    HR_TRY(measure(tensors, n, adapter, room, &size, err));
    hr_parcel *parcel = hr_memory_array(memory, size, 1);
    if (parcel == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the names of %zu tensors", n);
    *parcel = (hr_parcel){.entries = (hr_stash_entry *)(parcel + 1), .n = n, .size = size};
    char *text = (char *)(parcel->entries + n);
    hr_registered *last = NULL;
    hr_status status = HR_OK;
    for (size_t i = 0; i < n && status == HR_OK; i++) {
        hr_stash_entry *e = &parcel->entries[i];
        *e = (hr_stash_entry){.tensor = tensors[i]};
        hr_wire_name name;
        status = hr_wire_name_split(tensors[i].name, adapter, &name, err);
        /* tensors of one adapter come together */
        if (status == HR_OK && last != NULL && name.adapter != NULL &&
            hr_registered_is(last, name.adapter, name.adapter_len))
            e->adapter = last;
        else if (status == HR_OK)
            status = find_adapter(registry, &name, &e->adapter, err);
        if (status != HR_OK)
            break;
        last = e->adapter;
        text = put_name(e, &name, text);
        e->hash = hash_name(e->name);
        parcel->n_base += e->adapter == NULL;
        *(e->adapter == NULL ? &parcel->base_bytes : &parcel->adapter_bytes) += tensors[i].bytes;
    }
    if (status != HR_OK)
        hr_memory_free(memory, parcel);
    else
        *out = parcel;
    return status;
}

void hr_parcel_destroy(const hr_memory *memory, hr_parcel *parcel) {
    if (parcel == NULL)
        return;
    parcel_drop_bytes(memory, parcel);
    hr_memory_free(memory, parcel);
}

static const void *bytes_of(const hr_tensor *tensor) {
    return tensor->bytes > 0 ? tensor->data : "";
}

void hr_parcel_digest(hr_parcel *parcel) {
    for (size_t i = 0; i < parcel->n; i++) {
        hr_stash_entry *e = &parcel->entries[i];
        hr_xxh3(bytes_of(&e->tensor), e->tensor.bytes, e->xxh3);
    }
}

static void copy_and_digest(uint8_t *to, hr_stash_entry *e, hr_xxh3_stream *stream) {
    const uint8_t *from = bytes_of(&e->tensor);
    size_t size = e->tensor.bytes;
    if (size <= SLICE) {
        memcpy(to, from, size);
        hr_xxh3(to, size, e->xxh3);
        return;
    }
    hr_xxh3_stream_reset(stream);
    for (size_t at = 0; at < size; at += SLICE) {
        size_t slice = size - at < SLICE ? size - at : SLICE;
        memcpy(to + at, from + at, slice);
        hr_xxh3_stream_update(stream, to + at, slice);
    }
    hr_xxh3_stream_digest(stream, e->xxh3);
}

hr_status hr_parcel_copy(const hr_memory *memory, hr_parcel *parcel, hr_xxh3_stream *stream,
                         hr_error *err) {
    size_t room = parcel->adapter_bytes + (parcel->n - parcel->n_base) * ALIGN + ALIGN;
    uint8_t *bytes = hr_memory_array(memory, room, 1);
    if (bytes == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %llu bytes of adapters",
                       (unsigned long long)parcel->adapter_bytes);
    parcel->bytes = bytes;
    uint8_t *to = bytes + (ALIGN - (uintptr_t)bytes % ALIGN) % ALIGN;
    for (size_t i = 0; i < parcel->n; i++) {
        hr_stash_entry *e = &parcel->entries[i];
        if (e->adapter == NULL) {
            hr_xxh3(bytes_of(&e->tensor), e->tensor.bytes, e->xxh3);
            continue;
        }
        copy_and_digest(to, e, stream);
        e->tensor.data = to;
        to += (e->tensor.bytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    return HR_OK;
}

void hr_parcel_identity(const hr_parcel *parcel, hr_xxh3_stream *stream,
                        uint8_t out[HR_XXH3_SIZE]) {
    hr_xxh3_stream_reset(stream);
    for (size_t i = 0; i < parcel->n; i++) {
        const hr_stash_entry *e = &parcel->entries[i];
        uint64_t type[2] = {(uint64_t)e->tensor.dtype, e->tensor.ndim};
        hr_xxh3_stream_update(stream, e->name, strlen(e->name) + 1);
        hr_xxh3_stream_update(stream, type, sizeof type);
        hr_xxh3_stream_update(stream, e->tensor.shape, e->tensor.ndim * sizeof(uint64_t));
        hr_xxh3_stream_update(stream, e->xxh3, HR_XXH3_SIZE);
    }
    hr_xxh3_stream_digest(stream, out);
}

/* ---- the names ---- */

/* The place of this name: where it is, or the free one where it would go. */
static hr_stash_entry **slot_of(const hr_stash *stash, uint64_t hash, const char *name) {
    size_t mask = stash->table_size - 1, at = hash & mask;
    while (stash->table[at] != NULL &&
           (stash->table[at]->hash != hash || strcmp(stash->table[at]->name, name) != 0))
        at = (at + 1) & mask;
    return &stash->table[at];
}

static hr_status grow(hr_stash *stash, size_t more, hr_error *err) {
    size_t wanted = 64;
    while (wanted < 2 * (stash->n + more))
        wanted *= 2;
    if (wanted <= stash->table_size)
        return HR_OK;
    hr_stash_entry **table = hr_memory_zeroed(&stash->memory, wanted, sizeof(hr_stash_entry *));
    if (table == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu tensor names", stash->n + more);
    hr_memory_free(&stash->memory, stash->table);
    stash->table = table;
    stash->table_size = wanted;
    for (hr_parcel *p = stash->parcels; p != NULL; p = p->next)
        for (size_t i = 0; i < p->n; i++)
            *slot_of(stash, p->entries[i].hash, p->entries[i].name) = &p->entries[i];
    return HR_OK;
}

/* Takes the first n out again; the last in goes first, so no probe chain is cut. */
static void leave_first(hr_stash *stash, hr_parcel *parcel, size_t n) {
    while (n-- > 0)
        *slot_of(stash, parcel->entries[n].hash, parcel->entries[n].name) = NULL;
}

hr_status hr_stash_enter(hr_stash *stash, hr_parcel *parcel, hr_error *err) {
    HR_TRY(grow(stash, parcel->n, err));
    for (size_t i = 0; i < parcel->n; i++) {
        hr_stash_entry *e = &parcel->entries[i], **slot = slot_of(stash, e->hash, e->name);
        if (*slot != NULL) {
            hr_status status =
                hr_fail(err, HR_ERR_INVALID, "tensor '%.200s' came twice in one session", e->name);
            leave_first(stash, parcel, i);
            return status;
        }
        *slot = e;
    }
    return HR_OK;
}

void hr_stash_leave(hr_stash *stash, hr_parcel *parcel) {
    leave_first(stash, parcel, parcel->n);
}

void hr_stash_link(hr_stash *stash, hr_parcel *parcel) {
    for (size_t i = 0; i < parcel->n; i++)
        if (parcel->entries[i].adapter == NULL)
            parcel->entries[i].tensor.data = NULL;
    parcel->next = stash->parcels;
    stash->parcels = parcel;
    stash->n += parcel->n;
    stash->n_base += parcel->n_base;
    stash->adapter_bytes += parcel->adapter_bytes;
    stash->base_bytes += parcel->base_bytes;
    stash->held += parcel->size + parcel->adapter_bytes;
}

hr_stash_entry *hr_stash_find(const hr_stash *stash, const char *name) {
    return stash->table_size == 0 ? NULL : *slot_of(stash, hash_name(name), name);
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(hr_stash_entry *const *)a)->name, (*(hr_stash_entry *const *)b)->name);
}

hr_stash_entry **hr_stash_sorted(const hr_stash *stash) {
    hr_stash_entry **sorted = hr_memory_array(&stash->memory, stash->n, sizeof *sorted);
    if (sorted == NULL)
        return NULL;
    size_t n = 0;
    for (hr_parcel *p = stash->parcels; p != NULL; p = p->next)
        for (size_t i = 0; i < p->n; i++)
            sorted[n++] = &p->entries[i];
    qsort(sorted, n, sizeof *sorted, by_name);
    return sorted;
}
