/* The tensors of one session: whose they are, their digests, and the bytes of those that are
 * adapters'.
 *
 * Bytes come once and are never written afterwards, so building from a stash twice gives the same.
 * A bucket is one parcel: made and checked first, then taken in whole or freed. */
#ifndef HR_WEIGHTS_STASH_H
#define HR_WEIGHTS_STASH_H

#include "base/error.h"
#include "tensor/digest.h"
#include "weights/memory.h"
#include "weights/registry.h"

typedef struct hr_stash_entry {
    hr_tensor tensor;       /* name: the key, without the adapter's prefix; data is the sender's
                               until the parcel is stored, NULL for stored base tensors */
    const char *name;       /* as on the wire: "key" or "adapter:key" */
    hr_registered *adapter; /* NULL: base */
    uint64_t hash;          /* of name */
    uint8_t xxh3[HR_XXH3_SIZE];
    char sha256[HR_SHA256_HEX]; /* "" when not computed */
    bool listed;                /* the manifest has it */
} hr_stash_entry;

typedef struct hr_parcel {
    struct hr_parcel *next;
    hr_stash_entry *entries;
    size_t n, n_base, size; /* size: of this struct with entries and names */
    uint64_t adapter_bytes, base_bytes;
    void *bytes; /* the copied ones of adapters; NULL: none */
    void *owner; /* who holds them instead */
    void (*release)(void *owner);
} hr_parcel;

typedef struct hr_stash {
    hr_memory memory;
    hr_parcel *parcels;
    hr_stash_entry **table; /* open addressing by name; a power of two, at most half full */
    size_t table_size, n, n_base;
    uint64_t adapter_bytes, base_bytes;
    uint64_t held; /* bytes of memory that it keeps in use, owners' included */
} hr_stash;

void hr_stash_init(hr_stash *stash, const hr_memory *memory);
/* Frees bytes and releases owners; what is known about the tensors stays. */
void hr_stash_drop_bytes(hr_stash *stash);
void hr_stash_destroy(hr_stash *stash);

/* Entries with texts for the tensors of a bucket. *out is freed by hr_parcel_destroy, or belongs to
 * the stash after hr_stash_link. adapter: as in hr_bucket. room: bytes that the parcel may hold,
 * those of adapters included. HR_ERR_INVALID (a name, a size that is not that of the shape),
 * HR_ERR_ADAPTER_UNKNOWN, HR_ERR_DTYPE, HR_ERR_LIMIT (before anything is allocated),
 * HR_ERR_NO_MEMORY. */
hr_status hr_parcel_create(const hr_memory *memory, const hr_registry *registry,
                           const hr_tensor *tensors, size_t n, const char *adapter, uint64_t room,
                           hr_parcel **out, hr_error *err);
void hr_parcel_destroy(const hr_memory *memory, hr_parcel *parcel);

/* Digests of all tensors where they lie. */
void hr_parcel_digest(hr_parcel *parcel);
/* Copies the adapters' bytes and digests everything in the same pass. HR_ERR_NO_MEMORY. */
hr_status hr_parcel_copy(const hr_memory *memory, hr_parcel *parcel, hr_xxh3_stream *stream,
                         hr_error *err);
/* One digest of names, types, shapes and digests, in the parcel's order. */
void hr_parcel_identity(const hr_parcel *parcel, hr_xxh3_stream *stream, uint8_t out[HR_XXH3_SIZE]);

/* Enters the names; HR_ERR_INVALID when one is there already, or twice in the parcel, and then none
 * is entered. Undone by leave, which must come before the next enter. */
hr_status hr_stash_enter(hr_stash *stash, hr_parcel *parcel, hr_error *err);
void hr_stash_leave(hr_stash *stash, hr_parcel *parcel);
/* Keeps a parcel that was entered. Cannot fail. */
void hr_stash_link(hr_stash *stash, hr_parcel *parcel);

/* By its wire name; NULL when it did not come. */
hr_stash_entry *hr_stash_find(const hr_stash *stash, const char *name);

/* All entries in the order of their wire names; those of one adapter lie together. Freed with
 * hr_memory_free. NULL when memory is short. */
hr_stash_entry **hr_stash_sorted(const hr_stash *stash);

#endif
