/* Every tensor of a push by name, with what it is and whose: finds what comes twice, compares
 * replicas of several ranks, and becomes the manifest. Private to the room. */
#ifndef HR_PUBLISH_LEDGER_H
#define HR_PUBLISH_LEDGER_H

#include "base/error.h"
#include "transport/transport.h"

#include <headrace/tensor.h>

typedef struct hr_ledger_entry {
    const char *name; /* as on the wire; stays where it is */
    hr_dtype dtype;
    uint32_t ndim;
    uint64_t shape[HR_TENSOR_MAX_DIMS];
    uint64_t bytes;
    uint32_t rank; /* that sends it */
    uint8_t xxh3[HR_XXH3_SIZE];
    char sha256[HR_SHA256_HEX];
} hr_ledger_entry;

/* Of the hash table. */
typedef struct hr_ledger_slot {
    uint32_t entry; /* its index + 1; 0: free */
    uint32_t hash;  /* of its name */
} hr_ledger_slot;

typedef struct hr_ledger_names hr_ledger_names; /* a block of them */

typedef struct hr_ledger {
    hr_ledger_entry *entries; /* in the order they came; grows, so keep indices */
    size_t n, cap;
    hr_ledger_slot *slots;
    size_t n_slots;
    hr_ledger_names *names; /* the block being filled, and those before */
    uint64_t bytes;
} hr_ledger;

void hr_ledger_free(hr_ledger *ledger); /* back to zero */

/* Adds a tensor that `rank` holds under the name; digests are copied from it when has_digest.
 * *index gets its entry and *fresh false when it is a replica of what another rank holds.
 * ERR_INVALID: the same rank has had that name; ERR_DIGEST: a replica that differs (tensor and
 * ranks are named); ERR_NO_MEMORY. */
hr_status hr_ledger_add(hr_ledger *ledger, uint32_t rank, const char *name, const hr_tensor *tensor,
                        const uint8_t *xxh3, size_t *index, bool *fresh, hr_error *err);

/* The entry of a name that was added, as an index. */
size_t hr_ledger_find(const hr_ledger *ledger, const char *name);

/* Entries as a manifest, sorted by name; names are the ledger's. The caller frees it. */
hr_status hr_ledger_manifest(const hr_ledger *ledger, hr_manifest_digest **out, hr_error *err);

/* Over the sorted (name, NUL, digest) of a manifest. */
hr_status hr_manifest_overall(const hr_manifest_digest *manifest, size_t n,
                              uint8_t out[HR_XXH3_SIZE], hr_error *err);

#endif
