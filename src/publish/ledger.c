/* Every tensor of a push by name. */
#include "publish/ledger.h"

#include <stdlib.h>
#include <string.h>

void hr_ledger_free(hr_ledger *ledger) {
    for (size_t i = 0; i < ledger->n; i++)
        free(ledger->entries[i].name);
    free(ledger->entries);
    free(ledger->slots);
    *ledger = (hr_ledger){0};
}

/* Where the name stands or would stand. n_slots is a power of two with room left. */
static uint32_t *slot_of(const hr_ledger *ledger, const char *name) {
    uint8_t digest[HR_XXH3_SIZE];
    uint64_t hash;
    hr_xxh3(name, strlen(name), digest);
    memcpy(&hash, digest, sizeof hash);
    for (size_t i = (size_t)hash & (ledger->n_slots - 1);; i = (i + 1) & (ledger->n_slots - 1)) {
        uint32_t *slot = &ledger->slots[i];
        if (*slot == 0 || strcmp(ledger->entries[*slot - 1].name, name) == 0)
            return slot;
    }
}

/* Room for one more: at most half of the slots are taken. */
static bool grow(hr_ledger *ledger) {
    if (ledger->n < ledger->cap)
        return true;
    size_t cap = ledger->cap > 0 ? 2 * ledger->cap : 256;
    if (cap >= UINT32_MAX / 2)
        return false;
    hr_ledger_entry *entries = realloc(ledger->entries, cap * sizeof *entries);
    if (entries == NULL)
        return false;
    ledger->entries = entries;
    uint32_t *slots = calloc(2 * cap, sizeof *slots);
    if (slots == NULL)
        return false;
    free(ledger->slots);
    ledger->slots = slots;
    ledger->n_slots = 2 * cap;
    ledger->cap = cap;
    for (size_t i = 0; i < ledger->n; i++)
        *slot_of(ledger, entries[i].name) = (uint32_t)i + 1;
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
    char *copy = NULL;
    if (!grow(ledger))
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the names of a push");
    uint32_t *slot = slot_of(ledger, name);
    if (*slot != 0) {
        HR_TRY(compare_replica(&ledger->entries[*slot - 1], rank, tensor, xxh3, err));
        *index = *slot - 1;
        *fresh = false;
        return HR_OK;
    }
    copy = strdup(name);
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
    *slot = (uint32_t)ledger->n;
    *fresh = true;
    ledger->bytes += tensor->bytes;
    return HR_OK;
}

hr_ledger_entry *hr_ledger_find(const hr_ledger *ledger, const char *name) {
    uint32_t slot = *slot_of(ledger, name);
    HR_ASSERT(slot != 0);
    return &ledger->entries[slot - 1];
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
