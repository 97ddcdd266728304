/* The store's state, and what its parts do for each other: adapter_version.c (a version from its
 * first byte to its grave), adapter_names.c (what names stand for), adapter_evict.c (who gives way,
 * and where it can be read again), adapter_load.c (places), adapter_publish.c and adapter_lease.c;
 * adapter_store.c begins and ends it. Two short lists under one mutex: adapters are counted in
 * tens, requests in hundreds a second, so a walk over names costs nothing beside a step; what
 * matters is that every state is plain to see. Private to the parts. */
#ifndef HR_WEIGHTS_ADAPTER_STORE_PARTS_H
#define HR_WEIGHTS_ADAPTER_STORE_PARTS_H

#include "weights/adapter_store.h"

#include <pthread.h>
#include <stdatomic.h>

/* A name that gave way, and where it can be read again if it can. Made with the version, so that
 * eviction needs no memory. */
typedef struct hr_evicted_name {
    struct hr_evicted_name *next;
    const char *path;                            /* into text; NULL: nowhere */
    uint64_t line;                               /* of the version that gave way */
    uint8_t contents[HR_XXH3_SIZE];              /* the same */
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* the same: what is recalled is the same */
    char name[];                                 /* the name, then the path */
} hr_evicted_name;

struct hr_adapter_version {
    hr_adapter_version *next; /* published, in load order */
    char *name, *path;        /* path NULL: it came over the wire and cannot be read again */
    uint64_t id, leases;
    uint64_t line;     /* id of the first version since the name was last unloaded: a name that is
                          unloaded and loaded again stands for another adapter */
    uint64_t last_use; /* store clock: raised by every acquire and publish */
    bool pinned, published;
    bool awaited;            /* recalled, and the request it was recalled for has no lease yet */
    hr_evicted_name *memory; /* NULL once it is in the catalogue */
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* that its publication named, or "" */
    hr_adapter_payload payload;
};

struct hr_adapter_reservation {
    hr_adapter_reservation *next;
    hr_adapter_version *version; /* complete but for id and payload, so that publish cannot fail */
    bool recalled;               /* of an evicted name: an unload while it loads revokes it */
    bool revoked;
    uint8_t contents[HR_XXH3_SIZE]; /* of the recalled name */
    bool streamed;                  /* held by a registration: nobody may wait for it */
    bool displaces;                 /* what cannot be read again gives way to it too */
};

struct hr_adapter_store {
    hr_alloc alloc;
    hr_adapter_store_limits limits;
    void (*gone)(void *self, uint64_t id);
    void *gone_self;
    void (*wake)(void *self); /* NULL: what is dead is freed where it dies */
    void *wake_self;
    _Atomic uint64_t changes;
    pthread_mutex_t lock;     /* all below */
    hr_adapter_version *dead; /* to be swept */
    hr_adapter_version *published;
    hr_adapter_reservation *reserved;
    pthread_cond_t load_ended; /* a reservation is gone */
    uint64_t next_id, uses;
    hr_evicted_name *evicted; /* the catalogue, in the order in which they gave way */
    uint32_t n_evicted;
    hr_adapter_store_stats stats;
};

/* ---- adapter_version.c ---- */

/* Complete but for id and payload; path may be NULL. NULL: no memory. */
hr_adapter_version *hr_adapter_version_create(hr_adapter_store *store, const char *name,
                                              const char *path, bool pinned);
/* Outside the lock, with the payload. NULL is allowed. */
void hr_adapter_version_free(hr_adapter_store *store, hr_adapter_version *version);
void hr_adapter_version_list_free(hr_adapter_store *store, hr_adapter_version *list);
/* Outside the lock: frees a list of dead versions, or leaves them to the sweeper. */
void hr_adapter_store_bury(hr_adapter_store *store, hr_adapter_version *list);

/* ---- adapter_names.c; all inside the lock ---- */

/* NULL: nothing is published, or reserved, under that name. */
hr_adapter_version *hr_adapter_store_find_published(hr_adapter_store *store, const char *name);
const hr_adapter_reservation *hr_adapter_store_find_reserved(const hr_adapter_store *store,
                                                             const char *name);
/* Takes the version out of the names. Returns it when nobody holds a lease, to be freed after the
 * lock. */
hr_adapter_version *hr_adapter_store_unpublish(hr_adapter_store *store,
                                               hr_adapter_version *version);
/* HR_ERR_ADAPTER_UNKNOWN, with what is known of the name. */
hr_status hr_adapter_store_fail_unknown(const hr_adapter_store *store, const char *name,
                                        hr_error *err);

/* ---- adapter_evict.c; all inside the lock ---- */

hr_evicted_name *hr_adapter_store_find_evicted(const hr_adapter_store *store, const char *name);
/* False: it was not in the catalogue. */
bool hr_adapter_store_forget_evicted(hr_adapter_store *store, const char *name);
/* Names over the cap give way, none that is as new as first_new_id, and none without a path unless
 * what is published displaces it; those without leases are returned as a list to free after the
 * lock. */
hr_adapter_version *hr_adapter_store_evict_over_cap(hr_adapter_store *store, uint64_t first_new_id,
                                                    bool displaces);
/* How many names do not give way to what displaces nobody. */
uint32_t hr_adapter_store_count_staying(const hr_adapter_store *store);

/* ---- adapter_load.c ---- */

/* Inside the lock: places that are held for names to come. */
uint32_t hr_adapter_store_count_reserved(const hr_adapter_store *store);
/* Inside the lock: the load is over; who waits for it hears of it. */
void hr_adapter_store_unlink(hr_adapter_store *store, const hr_adapter_reservation *reservation);
/* Outside the lock; with the version, unless it was taken out. NULL is allowed. */
void hr_adapter_reservation_free(hr_adapter_store *store, hr_adapter_reservation *reservation);

#endif
