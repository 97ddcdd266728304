/* Registered adapters: names whose tensors may come, with the config they will be built under.
 *
 * A registration is the control plane of an adapter; its bytes come in sessions. It outlives them,
 * and remembers which tensors the last published stream had, because a stream without a manifest is
 * only known to be whole by comparison with the one before.
 *
 * One thread at a time changes a registry (the receiver's turn); that thread reads it freely.
 * hr_registry_is_pending and hr_registry_count may be called by any thread at any time. */
#ifndef HR_WEIGHTS_REGISTRY_H
#define HR_WEIGHTS_REGISTRY_H

#include "base/error.h"
#include "tensor/digest.h"
#include "weights/memory.h"

#include <headrace/receiver.h>
#include <pthread.h>

typedef struct hr_registered hr_registered;
struct hr_registered {
    hr_registered *next;
    hr_registration registration; /* its texts lie behind this struct; no config_digest */
    uint8_t config_digest[HR_XXH3_SIZE];
    uint64_t since_ns; /* when it was registered */
    bool pending;      /* waits for the commit of a session */
    bool published;    /* by a session, at least once */

    /* of the last published stream; forgotten with a new config */
    bool has_previous;
    uint64_t previous_tensors;
    uint8_t previous_names[HR_XXH3_SIZE]; /* over the sorted names */
    uint8_t previous_bytes[HR_XXH3_SIZE]; /* as in hr_receipt_adapter */

    /* of the session under way */
    uint64_t tensors, bytes;
};

typedef struct hr_registry {
    hr_memory memory;
    pthread_mutex_t lock; /* the list's links and pending, against readers of other threads */
    hr_registered *first;
    uint32_t n, n_pending;
    uint32_t next_look; /* at so many, those whose names are gone are looked for */
} hr_registry;

void hr_registry_init(hr_registry *registry, const hr_memory *memory);
void hr_registry_destroy(hr_registry *registry); /* frees all */

bool hr_registered_is(const hr_registered *registered, const char *name, size_t name_len);
/* NULL when there is none. */
hr_registered *hr_registry_find(const hr_registry *registry, const char *name, size_t name_len);

/* A copy of the registration, whose config_digest is well-formed, not in the registry yet; NULL
 * when memory is short. */
hr_registered *hr_registered_create(const hr_memory *memory, const hr_registration *registration);
void hr_registered_destroy(const hr_memory *memory, hr_registered *registered); /* NULL allowed */

/* Cannot fail. put takes the registration in; take gives it out again, not freed. */
void hr_registry_put(hr_registry *registry, hr_registered *registered);
void hr_registry_take(hr_registry *registry, hr_registered *registered);
/* It waits no more. */
void hr_registry_end_pending(hr_registry *registry, hr_registered *registered);

bool hr_registry_is_pending(hr_registry *registry, const char *name);
void hr_registry_count(hr_registry *registry, uint32_t *registered, uint32_t *pending);

#endif
