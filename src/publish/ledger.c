/* Every tensor of a push by name. */
#include "publish/ledger.h"

#include <stdlib.h>
#include <string.h>

enum { NAMES_BLOCK = 64 << 10 };

struct hr_ledger_names {
    hr_ledger_names *before;
    size_t used, size;
    char text[];
};

void hr_ledger_free(hr_ledger *ledger) {
    while (ledger->names != NULL) {
        hr_ledger_names *before = ledger->names->before;
        free(ledger->names);
        ledger->names = before;
    }
    free(ledger->entries);
    free(ledger->slots);
    *ledger = (hr_ledger){0};
}

static const char *copy_name(hr_ledger *ledger, const char *name, size_t len) {
    hr_ledger_names *block = ledger->names;
    if (block == NULL || len >= block->size - block->used) {
        size_t size = len < NAMES_BLOCK ? NAMES_BLOCK : len + 1;
        block = malloc(sizeof *block + size);
        if (block == NULL)
            return NULL;
        *block = (hr_ledger_names){.before = ledger->names, .size = size};
        ledger->names = block;
    }
    char *copy = block->text + block->used;
    memcpy(copy, name, len + 1);
    block->used += len + 1;
    return copy;
}

static uint32_t hash_name(const char *name, size_t len) {
    uint8_t digest[HR_XXH3_SIZE];
    uint32_t hash;
    hr_xxh3(name, len, digest);
    memcpy(&hash, digest, sizeof hash);
    return hash;
}

/* Where the name stands or would stand; NULL: where nothing stands yet. n_slots is a power of two
 * with room left. */
static hr_ledger_slot *slot_of(const hr_ledger *ledger, uint32_t hash, const char *name) {
    for (size_t i = hash & (ledger->n_slots - 1);; i = (i + 1) & (ledger->n_slots - 1)) {
        hr_ledger_slot *slot = &ledger->slots[i];
        if (slot->entry == 0 || (name != NULL && slot->hash == hash &&
                                 strcmp(ledger->entries[slot->entry - 1].name, name) == 0))
            return slot;
    }
}

/* Room for one more: at most half of the slots are taken. */
static bool grow(hr_ledger *ledger) {
    if (ledger->n < ledger->cap)
        return true;
    size_t cap = ledger->cap > 0 ? 2 * ledger->cap : 256, n_before = ledger->n_slots;
    if (cap >= UINT32_MAX / 2)
        return false;
    hr_ledger_entry *entries = realloc(ledger->entries, cap * sizeof *entries);
    if (entries == NULL)
        return false;
    ledger->entries = entries;
    hr_ledger_slot *slots = calloc(2 * cap, sizeof *slots), *before = ledger->slots;
    if (slots == NULL)
        return false;
    ledger->slots = slots;
    ledger->n_slots = 2 * cap;
    ledger->cap = cap;
    for (size_t i = 0; i < n_before; i++) {
        if (before[i].entry != 0)
            *slot_of(ledger, before[i].hash, NULL) = before[i];
    }
    free(before);
    return true;
}

static bool same_form(const hr_ledger_entry *entry, const hr_tensor *tensor) {
    return entry->dtype == tensor->dtype && entry->ndim == tensor->ndim &&
           memcmp(entry->shape, tensor->shape, tensor->ndim * sizeof *tensor->shape) == 0;
}

static hr_status compare_replica(const hr_ledger_entry *entry, uint32_t rank,
                                 const hr_tensor *tensor, const uint8_t *xxh3, hr_error *err) {
    if (entry->rank == rank)
        return hr_fail(err, HR_ERR_INVALID, "tensor %.300s comes twice in one push", entry->name);
    if (!same_form(entry, tensor)) {
        char a[128], b[128];
        return hr_fail(err, HR_ERR_DIGEST,
                       "tensor %.300s is %s %s on rank %u and %s %s on rank %u; replicas must be "
                       "equal: was one of them not synchronised?",
                       entry->name, hr_dtype_name(entry->dtype),
                       hr_shape_format(entry->shape, entry->ndim, a, sizeof a), entry->rank,
                       hr_dtype_name(tensor->dtype),
                       hr_shape_format(tensor->shape, tensor->ndim, b, sizeof b), rank);
    }
    if (xxh3 == NULL || memcmp(entry->xxh3, xxh3, HR_XXH3_SIZE) != 0)
        return hr_fail(err, HR_ERR_DIGEST,
                       "tensor %.300s has other bytes on rank %u than on rank %u; replicas must be "
                       "equal: was one of them not synchronised?",
                       entry->name, rank, entry->rank);
    return HR_OK;
}

hr_status hr_ledger_add(hr_ledger *ledger, uint32_t rank, const char *name, const hr_tensor *tensor,
                        const uint8_t *xxh3, size_t *index, bool *fresh, hr_error *err) {
    if (!grow(ledger))
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the names of a push");
    size_t len = strlen(name);
    uint32_t hash = hash_name(name, len);
    hr_ledger_slot *slot = slot_of(ledger, hash, name);
    if (slot->entry != 0) {
        HR_TRY(compare_replica(&ledger->entries[slot->entry - 1], rank, tensor, xxh3, err));
        *index = slot->entry - 1;
        *fresh = false;
        return HR_OK;
    }
    const char *copy = copy_name(ledger, name, len);
    if (copy == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the names of a push");
    hr_ledger_entry *entry = &ledger->entries[ledger->n];
    *entry = (hr_ledger_entry){.name = copy,
                               .dtype = tensor->dtype,
                               .ndim = tensor->ndim,
                               .bytes = tensor->bytes,
                               .rank = rank};
    memcpy(entry->shape, tensor->shape, sizeof entry->shape);
    if (xxh3 != NULL)
        memcpy(entry->xxh3, xxh3, HR_XXH3_SIZE);
    *index = ledger->n++;
    *slot = (hr_ledger_slot){(uint32_t)ledger->n, hash};
    *fresh = true;
    ledger->bytes += tensor->bytes;
    return HR_OK;
}

size_t hr_ledger_find(const hr_ledger *ledger, const char *name) {
    uint32_t entry = slot_of(ledger, hash_name(name, strlen(name)), name)->entry;
    HR_ASSERT(entry != 0);
    return entry - 1;
}

static int compare_names(const void *a, const void *b) {
    const hr_manifest_digest *x = a, *y = b;
    return strcmp(x->name, y->name);
}

hr_status hr_ledger_manifest(const hr_ledger *ledger, hr_manifest_digest **out, hr_error *err) {
    hr_manifest_digest *manifest = calloc(ledger->n + 1, sizeof *manifest);
    if (manifest == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a manifest of %zu tensors", ledger->n);
    for (size_t i = 0; i < ledger->n; i++) {
        const hr_ledger_entry *entry = &ledger->entries[i];
        manifest[i].name = entry->name;
        memcpy(manifest[i].xxh3, entry->xxh3, HR_XXH3_SIZE);
        memcpy(manifest[i].sha256, entry->sha256, HR_SHA256_HEX);
    }
    qsort(manifest, ledger->n, sizeof *manifest, compare_names);
    *out = manifest;
    return HR_OK;
}

hr_status hr_manifest_overall(const hr_manifest_digest *manifest, size_t n,
                              uint8_t out[HR_XXH3_SIZE], hr_error *err) {
    hr_xxh3_stream *stream = hr_xxh3_stream_create();
    if (stream == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a digest");
    hr_xxh3_stream_reset(stream);
    for (size_t i = 0; i < n; i++) {
        hr_xxh3_stream_update(stream, manifest[i].name, strlen(manifest[i].name) + 1);
        hr_xxh3_stream_update(stream, manifest[i].xxh3, HR_XXH3_SIZE);
    }
    hr_xxh3_stream_digest(stream, out);
    hr_xxh3_stream_destroy(stream);
    return HR_OK;
}
