/* The adapters of an engine: names, versions and leases.
 *
 * A name, chosen by the trainer, leads to a version; the version has an id that is new for every
 * load, and caches, leases and batches use the id only. A request leases a version and returns the
 * lease exactly once; a version whose name is gone lives on until its last lease is back. The
 * payload is opaque here: packed weights belong to a room above.
 *
 * Every function is thread-safe. Payloads are destroyed outside the lock. */
#ifndef HR_WEIGHTS_ADAPTER_STORE_H
#define HR_WEIGHTS_ADAPTER_STORE_H

#include "base/alloc.h"
#include "base/error.h"
#include "tensor/digest.h"

#include <headrace/engine.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HR_ADAPTER_PATH_MAX = 4095 };

typedef struct hr_adapter_store hr_adapter_store;
typedef struct hr_adapter_version hr_adapter_version;

typedef struct hr_adapter_store_limits {
    uint32_t max_loaded;    /* names; 0 = unlimited */
    uint32_t max_per_batch; /* distinct adapters in a batch, base included; bounds pinning */
} hr_adapter_store_limits;

/* What a version holds: read by kernels, destroyed with the last lease once the name is gone. */
typedef struct hr_adapter_payload {
    void *data;
    void (*destroy)(void *data);
    uint64_t bytes;
    uint32_t rank;
    uint8_t contents[HR_XXH3_SIZE]; /* digest of data; only looked at for names that have a path */
} hr_adapter_payload;

hr_status hr_adapter_store_create(const hr_adapter_store_limits *limits, const hr_alloc *alloc,
                                  hr_adapter_store **out, hr_error *err);
/* Destroys the payloads of all published names. Every lease and reservation must be back. NULL is
 * allowed. */
void hr_adapter_store_destroy(hr_adapter_store *store);

/* Has gone called, outside the lock, for every version that is gone for good, from now on until the
 * next call (NULL: nobody). No load, unload or release may be under way. */
void hr_adapter_store_watch(hr_adapter_store *store, void (*gone)(void *self, uint64_t id),
                            void *self);

/* From now on a version that dies by publish_all, renew or release is not freed on the thread where
 * that happens, which may be the one that computes steps: wake is called there instead, outside the
 * lock, and hr_adapter_store_sweep frees it. NULL: freed at once. No other call may be under way.
 */
void hr_adapter_store_set_sweeper(hr_adapter_store *store, void (*wake)(void *self), void *self);
void hr_adapter_store_sweep(hr_adapter_store *store);

/* ---- loading: reserve the name, build the payload without any lock, then publish or cancel ----
 */

typedef struct hr_adapter_reservation hr_adapter_reservation;

/* Holds name and a place for one load, so that a load that cannot be published is refused before
 * any byte is read, and two loads of one name cannot race. Refusals: HR_ERR_INVALID (name empty,
 * too long, not printable or with ':'; path too long), HR_ERR_ADAPTER_EXISTS ("already loaded",
 * also while the name is being loaded), HR_ERR_LIMIT (every place held by pinned adapters; or
 * pinned while max_per_batch - 1 names are pinned, for the others would starve), HR_ERR_NO_MEMORY.
 */
hr_status hr_adapter_store_reserve(hr_adapter_store *store, const char *name, const char *path,
                                   bool pinned, hr_adapter_reservation **out, hr_error *err);

/* Makes the name servable with this payload, which the store owns from now on; returns the fresh
 * id. Cannot fail. Over max_loaded the least recently used unpinned names with a path give way
 * (those in use, or recalled and not leased yet, last of all) and their paths are remembered. The
 * reservation is gone. 0 only for a recalled name that was unloaded meanwhile: it stays unloaded,
 * the payload is destroyed. */
uint64_t hr_adapter_store_publish(hr_adapter_store *store, hr_adapter_reservation *reservation,
                                  const hr_adapter_payload *payload);

/* Gives the name and the place back. NULL is allowed. */
void hr_adapter_store_cancel(hr_adapter_store *store, hr_adapter_reservation *reservation);

/* ---- publication by sessions: names appear or change together ---- */

/* Holds a place for a new name without a path (path may be NULL: it can never be recalled), as
 * reserve does, but never by evicting what is there: HR_ERR_LIMIT ("max-loaded-loras") when the cap
 * is reached, unless path is given. displaces: the least recently used unpinned name, with a path
 * or without, gives way when this one is published; HR_ERR_LIMIT only when there is none. A
 * published name needs no reservation: *out is NULL then. Until it is published, requests for the
 * name hear that it is "awaiting publication". */
hr_status hr_adapter_store_reserve_streamed(hr_adapter_store *store, const char *name,
                                            const char *path, bool pinned, bool displaces,
                                            hr_adapter_reservation **out, hr_error *err);

/* The name is registered again: whether it will be pinned may change. HR_ERR_LIMIT as of reserve.
 */
hr_status hr_adapter_store_pin_reserved(hr_adapter_store *store,
                                        hr_adapter_reservation *reservation, bool pinned,
                                        hr_error *err);

typedef struct hr_adapter_publication {
    const char *name;
    hr_adapter_reservation *reservation; /* of a new name; NULL: the name may be published */
    hr_adapter_payload payload;
    const char *path; /* NULL: cannot be recalled, so it gives way only to what displaces */
    const char *weight_version; /* that the publication named, under 257 bytes; NULL: none */
    bool pinned;
    uint64_t id;                        /* filled: the fresh id */
    struct hr_adapter_version *version; /* private: made by prepare */
} hr_adapter_publication;

/* Allocates all that publish_all needs, so that it cannot fail. ERR_NO_MEMORY: nothing was made. */
hr_status hr_adapter_store_prepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n,
                                   hr_error *err);
/* Undoes prepare; payloads and reservations stay the caller's. */
void hr_adapter_store_unprepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n);
/* All names lead to their new versions at once: whoever acquires sees all or none of them. An older
 * version lives on until its last lease is back. Reservations and payloads are the store's. */
void hr_adapter_store_publish_all(hr_adapter_store *store, hr_adapter_publication *items, size_t n);

/* Of a name that is to be served: nothing to do when it is published (*out is NULL). When it gave
 * way it is reserved again, and path says where it is; publish or cancel then. While somebody
 * loads it, waits for him, at most two minutes (HR_ERR_TIMEOUT). HR_ERR_ADAPTER_UNKNOWN,
 * HR_ERR_LIMIT, HR_ERR_NO_MEMORY. */
hr_status hr_adapter_store_recall(hr_adapter_store *store, const char *name,
                                  char path[HR_ADAPTER_PATH_MAX + 1], hr_adapter_reservation **out,
                                  hr_error *err);

/* Whether a payload that was read for this reservation may be published: of a recalled name only
 * what the name stood for when it gave way, for its directory may have been rewritten since, or
 * never have held what a session streamed. */
bool hr_adapter_store_accepts(const hr_adapter_reservation *reservation,
                              const hr_adapter_payload *payload);

/* Takes the name away at once; the payload goes with the last lease. The path of an evicted name is
 * forgotten. HR_ERR_ADAPTER_UNKNOWN. */
hr_status hr_adapter_store_unload(hr_adapter_store *store, const char *name, hr_error *err);

/* ---- serving ---- */

/* One use of a version. Zero is "no adapter". Copying it does not make a second lease. */
typedef struct hr_adapter_lease {
    hr_adapter_version *version;
} hr_adapter_lease;

/* Leases what the name stands for now and marks it as used last. HR_ERR_ADAPTER_UNKNOWN: the text
 * has "not loaded", and "never been loaded" unless the name was evicted. */
hr_status hr_adapter_store_acquire(hr_adapter_store *store, const char *name, hr_adapter_lease *out,
                                   hr_error *err);
/* Gives the lease back and zeroes it; a zero lease is left alone, so twice is once. */
void hr_adapter_store_release(hr_adapter_store *store, hr_adapter_lease *lease);
/* The refusal that acquire would give, without leasing and without counting as a use. */
hr_status hr_adapter_store_check(hr_adapter_store *store, const char *name, hr_error *err);

typedef enum hr_lease_state {
    HR_LEASE_CURRENT, /* the name still stands for this version */
    HR_LEASE_RENEWED, /* it stood for another: the lease is now one of that */
    HR_LEASE_UNLOADED /* the name was unloaded, perhaps loaded again since as another adapter; the
                         lease is as it was */
} hr_lease_state;
/* For a request that has not begun, or is computed anew: lease what its name stands for now. An
 * evicted name counts as CURRENT. A zero lease is CURRENT. */
hr_lease_state hr_adapter_store_renew(hr_adapter_store *store, hr_adapter_lease *lease);
/* Whether renew would say CURRENT. */
bool hr_adapter_store_is_current(hr_adapter_store *store, const hr_adapter_lease *lease);
/* Grows whenever a name comes, goes or changes, so that who renews leases knows when. Takes no
 * lock.
 */
uint64_t hr_adapter_store_changes(hr_adapter_store *store);

hr_adapter_state hr_adapter_store_state(hr_adapter_store *store, const char *name);

/* Of a held lease; 0 and NULL for a zero one. */
uint64_t hr_adapter_lease_id(const hr_adapter_lease *lease);
void *hr_adapter_lease_data(const hr_adapter_lease *lease);
const char *hr_adapter_lease_name(const hr_adapter_lease *lease);
/* The weight version that the publication of this adapter version named; NULL when it named none,
 * or for a zero lease. Valid while the lease is held. */
const char *hr_adapter_lease_weight_version(const hr_adapter_lease *lease);

/* ---- looking ---- */

typedef struct hr_adapter_entry {
    char name[HR_LORA_NAME_SIZE];
    char path[HR_ADAPTER_PATH_MAX + 1]; /* "__stream__" when it has none */
    uint64_t id;
    bool pinned;
    uint32_t rank;
    uint64_t bytes;
    uint64_t leases;
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* "": its publication named none */
} hr_adapter_entry;

/* Published names in load order; *out (NULL when there are none) is freed with free(). */
hr_status hr_adapter_store_list(hr_adapter_store *store, hr_adapter_entry **out, size_t *n,
                                hr_error *err);

typedef struct hr_adapter_store_stats {
    uint64_t loaded;   /* published names */
    uint64_t versions; /* payloads alive, those without a name included */
    uint64_t evicted;  /* names that gave way, ever */
    uint64_t leases_acquired, leases_released;
} hr_adapter_store_stats;

/* One consistent snapshot: acquired - released is the number of leases held. */
void hr_adapter_store_stats_get(hr_adapter_store *store, hr_adapter_store_stats *out);

#endif
