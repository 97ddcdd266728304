/* The adapter store: two short lists under one mutex. Adapters are counted in tens, requests in
 * hundreds a second, so a walk over names costs nothing beside a step; what matters is that every
 * state is plain to see. */
#include "weights/adapter_store.h"

#include "base/buf.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* Evicted names whose path is remembered; over it the ones that gave way first are forgotten. A
 * trainer that never unloads leaves one name a step behind. */
enum { MAX_EVICTED = 1024 };

/* How long one load of a name may keep others that want the same name waiting. */
enum { LOAD_WAIT_S = 120 };

/* A name that gave way and where it can be read again. Made with the version, so that eviction
 * needs no memory. */
typedef struct evicted_name {
    struct evicted_name *next;
    const char *path;               /* into text */
    uint64_t line;                  /* of the version that gave way */
    uint8_t contents[HR_XXH3_SIZE]; /* the same */
    char name[];                    /* the name, then the path */
} evicted_name;

struct hr_adapter_version {
    hr_adapter_version *next; /* published, in load order */
    char *name, *path;        /* path NULL: it came over the wire and cannot be read again */
    uint64_t id, leases;
    uint64_t line;     /* id of the first version since the name was last unloaded: a name that is
                          unloaded and loaded again stands for another adapter */
    uint64_t last_use; /* store clock: raised by every acquire and publish */
    bool pinned, published;
    bool awaited;         /* recalled, and the request it was recalled for has no lease yet */
    evicted_name *memory; /* NULL once it is in the catalogue, and without a path */
    hr_adapter_payload payload;
};

struct hr_adapter_reservation {
    hr_adapter_reservation *next;
    hr_adapter_version *version; /* complete but for id and payload, so that publish cannot fail */
    bool recalled;               /* of an evicted name: an unload while it loads revokes it */
    bool revoked;
    uint8_t contents[HR_XXH3_SIZE]; /* of the recalled name */
    bool streamed;                  /* held by a registration: nobody may wait for it */
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
    evicted_name *evicted; /* the catalogue, in the order in which they gave way */
    uint32_t n_evicted;
    hr_adapter_store_stats stats;
};

hr_status hr_adapter_store_create(const hr_adapter_store_limits *limits, const hr_alloc *alloc,
                                  hr_adapter_store **out, hr_error *err) {
    hr_adapter_store *store = hr_alloc_array(alloc, 1, sizeof *store);
    if (store == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the adapter store");
    store->alloc = *alloc;
    store->limits = *limits;
    store->next_id = 1;
    pthread_mutex_init(&store->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&store->load_ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = store;
    return HR_OK;
}

static void version_free(hr_adapter_store *store, hr_adapter_version *version) {
    if (version == NULL)
        return;
    if (store->gone != NULL && version->id != 0)
        store->gone(store->gone_self, version->id);
    if (version->payload.destroy != NULL)
        version->payload.destroy(version->payload.data);
    hr_alloc_free(&store->alloc, version->memory);
    hr_alloc_free(&store->alloc, version->name);
    hr_alloc_free(&store->alloc, version->path);
    hr_alloc_free(&store->alloc, version);
}

static void version_list_free(hr_adapter_store *store, hr_adapter_version *list) {
    while (list != NULL) {
        hr_adapter_version *next = list->next;
        version_free(store, list);
        list = next;
    }
}

void hr_adapter_store_watch(hr_adapter_store *store, void (*gone)(void *self, uint64_t id),
                            void *self) {
    store->gone = gone;
    store->gone_self = self;
}

void hr_adapter_store_set_sweeper(hr_adapter_store *store, void (*wake)(void *self), void *self) {
    store->wake = wake;
    store->wake_self = self;
}

/* Outside the lock: frees a list of dead versions, or leaves them to the sweeper. */
static void bury(hr_adapter_store *store, hr_adapter_version *list) {
    if (list == NULL)
        return;
    if (store->wake == NULL) {
        version_list_free(store, list);
        return;
    }
    pthread_mutex_lock(&store->lock);
    hr_adapter_version **end = &store->dead;
    while (*end != NULL)
        end = &(*end)->next;
    *end = list;
    pthread_mutex_unlock(&store->lock);
    store->wake(store->wake_self);
}

void hr_adapter_store_sweep(hr_adapter_store *store) {
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *list = store->dead;
    store->dead = NULL;
    pthread_mutex_unlock(&store->lock);
    version_list_free(store, list);
}

void hr_adapter_store_destroy(hr_adapter_store *store) {
    if (store == NULL)
        return;
    hr_adapter_store_sweep(store);
    HR_ASSERT(store->stats.leases_acquired == store->stats.leases_released);
    HR_ASSERT(store->reserved == NULL);
    version_list_free(store, store->published);
    while (store->evicted != NULL) {
        evicted_name *next = store->evicted->next;
        hr_alloc_free(&store->alloc, store->evicted);
        store->evicted = next;
    }
    pthread_cond_destroy(&store->load_ended);
    pthread_mutex_destroy(&store->lock);
    hr_alloc_free(&store->alloc, store);
}

/* ---- inside the lock ---- */

static hr_adapter_version *find_published(hr_adapter_store *store, const char *name) {
    for (hr_adapter_version *v = store->published; v != NULL; v = v->next)
        if (strcmp(v->name, name) == 0)
            return v;
    return NULL;
}

static const hr_adapter_reservation *find_reserved(const hr_adapter_store *store,
                                                   const char *name) {
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        if (strcmp(r->version->name, name) == 0)
            return r;
    return NULL;
}

/* A registered name may have both: the reservation of its registration, and that of a recall. */
static bool is_being_loaded(const hr_adapter_store *store, const char *name) {
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        if (!r->streamed && strcmp(r->version->name, name) == 0)
            return true;
    return false;
}

static uint32_t count_pinned(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next)
        n += v->pinned;
    return n;
}

/* What was neither pinned nor read from a path cannot come back, so it does not give way. */
static bool may_give_way(const hr_adapter_version *version) {
    return !version->pinned && version->path != NULL;
}

static uint32_t count_staying(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next)
        n += !may_give_way(v);
    return n;
}

static uint32_t count_reserved(const hr_adapter_store *store, bool pinned_only) {
    uint32_t n = 0;
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        n += !pinned_only || r->version->pinned;
    return n;
}

/* Takes the version out of the names. Returns it when nobody holds a lease, to be freed after the
 * lock. */
static hr_adapter_version *unpublish(hr_adapter_store *store, hr_adapter_version *version) {
    hr_adapter_version **link = &store->published;
    while (*link != version)
        link = &(*link)->next;
    *link = version->next;
    version->next = NULL;
    version->published = false;
    store->stats.loaded--;
    if (version->leases > 0)
        return NULL;
    store->stats.versions--;
    return version;
}

/* What is in use is used most recently, whenever that use began. */
static bool is_used(const hr_adapter_version *version) {
    return version->leases > 0 || version->awaited;
}

static bool gives_way_before(const hr_adapter_version *a, const hr_adapter_version *b) {
    if (is_used(a) != is_used(b))
        return is_used(b);
    return a->last_use < b->last_use;
}

static hr_adapter_version *least_recent(hr_adapter_store *store, uint64_t first_new_id) {
    hr_adapter_version *oldest = NULL;
    for (hr_adapter_version *v = store->published; v != NULL; v = v->next)
        if (may_give_way(v) && v->id < first_new_id &&
            (oldest == NULL || gives_way_before(v, oldest)))
            oldest = v;
    return oldest;
}

static evicted_name *find_evicted(const hr_adapter_store *store, const char *name) {
    for (evicted_name *e = store->evicted; e != NULL; e = e->next)
        if (strcmp(e->name, name) == 0)
            return e;
    return NULL;
}

static bool forget_evicted(hr_adapter_store *store, const char *name) {
    for (evicted_name **link = &store->evicted; *link != NULL; link = &(*link)->next) {
        evicted_name *e = *link;
        if (strcmp(e->name, name) != 0)
            continue;
        *link = e->next;
        store->n_evicted--;
        hr_alloc_free(&store->alloc, e);
        return true;
    }
    return false;
}

static void remember_evicted(hr_adapter_store *store, hr_adapter_version *version) {
    evicted_name *e = version->memory, **link = &store->evicted;
    e->line = version->line;
    memcpy(e->contents, version->payload.contents, sizeof e->contents);
    version->memory = NULL;
    while (*link != NULL)
        link = &(*link)->next;
    *link = e;
    store->n_evicted++;
    store->stats.evicted++;
    if (store->n_evicted > MAX_EVICTED)
        forget_evicted(store, store->evicted->name);
}

/* "a, b, c" of the published names, cut after some, for refusals. */
static void append_names(hr_buf *text, const hr_adapter_store *store) {
    const uint32_t most = 16;
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next, n++)
        if (n < most)
            hr_buf_printf(text, "%s%s", n > 0 ? ", " : "", v->name);
    if (n == 0)
        hr_buf_puts(text, "none");
    else if (n > most)
        hr_buf_printf(text, " and %u more", n - most);
}

static hr_status fail_unknown(const hr_adapter_store *store, const char *name, hr_error *err) {
    if (find_evicted(store, name) != NULL)
        return hr_fail(
            err, HR_ERR_ADAPTER_UNKNOWN,
            "LoRA adapter '%.256s' is not loaded: it gave way to others at max_loaded_loras %u; "
            "load it again, or pin it",
            name, store->limits.max_loaded);
    const hr_adapter_reservation *reservation = find_reserved(store, name);
    if (reservation != NULL && reservation->streamed)
        return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN,
                       "LoRA adapter '%.256s' is not loaded: it is registered and awaiting "
                       "publication; finish the weight update that brings it",
                       name);
    hr_buf names = {0};
    append_names(&names, store);
    hr_status status = hr_fail(
        err, HR_ERR_ADAPTER_UNKNOWN,
        "Got LoRA adapter that has never been loaded: '%.256s' (not loaded; loaded: %.400s)", name,
        names.data != NULL && !names.failed ? names.data : "?");
    hr_buf_free(&names);
    return status;
}

/* ---- loading ---- */

static hr_status check_name(const char *name, hr_error *err) {
    if (name == NULL || name[0] == '\0')
        return hr_fail(err, HR_ERR_INVALID, "lora_name is empty; give the adapter a name");
    size_t len = strnlen(name, HR_ADAPTER_NAME_MAX + 1);
    if (len > HR_ADAPTER_NAME_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_name is longer than %d bytes",
                       HR_ADAPTER_NAME_MAX);
    if (strchr(name, ':') != NULL)
        return hr_fail(err, HR_ERR_INVALID, "lora_name '%s' must not contain ':'", name);
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return hr_fail(err, HR_ERR_INVALID, "lora_name has a control character at byte %zu", i);
    return HR_OK;
}

static char *copy_text(const hr_alloc *alloc, const char *text) {
    size_t len = strlen(text);
    char *copy = hr_alloc_array(alloc, len + 1, 1);
    if (copy != NULL)
        memcpy(copy, text, len + 1);
    return copy;
}

static evicted_name *make_memory(const hr_alloc *alloc, const char *name, const char *path) {
    size_t name_size = strlen(name) + 1, path_size = strlen(path) + 1;
    evicted_name *e = hr_alloc_array(alloc, sizeof *e + name_size + path_size, 1);
    if (e == NULL)
        return NULL;
    memcpy(e->name, name, name_size);
    memcpy(e->name + name_size, path, path_size);
    e->path = e->name + name_size;
    return e;
}

static hr_status check_pin(const hr_adapter_store *store, const char *name, bool pinned,
                           hr_error *err) {
    uint32_t n_pinned = count_pinned(store);
    if (pinned && n_pinned + count_reserved(store, true) + 1 >= store->limits.max_per_batch)
        return hr_fail(
            err, HR_ERR_LIMIT,
            "LoRA adapter '%s': it is not allowed to pin all slots (%u pinned, max_loras_per_batch "
            "%u), "
            "to prevent starvation of unpinned adapters and the base model; load it unpinned",
            name, n_pinned, store->limits.max_per_batch);
    return HR_OK;
}

static hr_status check_place(const hr_adapter_store *store, const char *name, bool pinned,
                             hr_error *err) {
    HR_TRY(check_pin(store, name, pinned, err));
    uint32_t max = store->limits.max_loaded, staying = count_staying(store);
    if (max > 0 && staying + count_reserved(store, false) >= max)
        return hr_fail(err, HR_ERR_LIMIT,
                       "LoRA adapter '%s': Maximum number of loaded LoRA adapters reached "
                       "(max_loaded_loras %u) and "
                       "none of them can be evicted (%u pinned or streamed, %u being loaded); "
                       "unload one first",
                       name, max, staying, count_reserved(store, false));
    return HR_OK;
}

static void reservation_free(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    if (reservation == NULL)
        return;
    version_free(store, reservation->version);
    hr_alloc_free(&store->alloc, reservation);
}

/* Complete but for id and payload; path may be NULL. */
static hr_adapter_version *version_create(hr_adapter_store *store, const char *name,
                                          const char *path, bool pinned) {
    const hr_alloc *alloc = &store->alloc;
    hr_adapter_version *version = hr_alloc_array(alloc, 1, sizeof *version);
    if (version == NULL)
        return NULL;
    version->pinned = pinned;
    version->name = copy_text(alloc, name);
    version->path = path != NULL ? copy_text(alloc, path) : NULL;
    version->memory = path != NULL ? make_memory(alloc, name, path) : NULL;
    if (version->name == NULL ||
        (path != NULL && (version->path == NULL || version->memory == NULL))) {
        version_free(store, version);
        return NULL;
    }
    return version;
}

static hr_adapter_reservation *reservation_create(hr_adapter_store *store, const char *name,
                                                  const char *path, bool pinned) {
    hr_adapter_reservation *reservation = hr_alloc_array(&store->alloc, 1, sizeof *reservation);
    if (reservation == NULL)
        return NULL;
    reservation->version = version_create(store, name, path, pinned);
    if (reservation->version == NULL) {
        reservation_free(store, reservation);
        return NULL;
    }
    return reservation;
}

/* Inside the lock: may this name be loaded now? */
static hr_status check_reservation(hr_adapter_store *store, const char *name, bool pinned,
                                   hr_error *err) {
    if (find_published(store, name) != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "LoRA adapter '%s' is already loaded; unload it first", name);
    const hr_adapter_reservation *other = find_reserved(store, name);
    if (other != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "LoRA adapter '%s' is already loaded or about to be: %s", name,
                       other->streamed
                           ? "it is registered and waits for its weights; stream them, or unload it"
                           : "another load of it is under way");
    return check_place(store, name, pinned, err);
}

static void link_reservation(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    reservation->next = store->reserved;
    store->reserved = reservation;
}

hr_status hr_adapter_store_reserve(hr_adapter_store *store, const char *name, const char *path,
                                   bool pinned, hr_adapter_reservation **out, hr_error *err) {
    HR_TRY(check_name(name, err));
    if (path == NULL || path[0] == '\0' ||
        strnlen(path, HR_ADAPTER_PATH_MAX + 1) > HR_ADAPTER_PATH_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_path is missing or longer than %d bytes",
                       HR_ADAPTER_PATH_MAX);
    hr_adapter_reservation *reservation = reservation_create(store, name, path, pinned);
    if (reservation == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
    pthread_mutex_lock(&store->lock);
    hr_status status = check_reservation(store, name, pinned, err);
    if (status == HR_OK)
        link_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    if (status != HR_OK) {
        reservation_free(store, reservation);
        return status;
    }
    *out = reservation;
    return HR_OK;
}

/* Inside the lock: a name that only a stream can bring takes a free place, or none. */
static hr_status check_free_place(const hr_adapter_store *store, const char *name, hr_error *err) {
    uint64_t taken = store->stats.loaded + count_reserved(store, false);
    uint32_t max = store->limits.max_loaded;
    if (max == 0 || taken < max)
        return HR_OK;
    return hr_fail(err, HR_ERR_LIMIT,
                   "LoRA adapter '%s': all places are taken (max-loaded-loras %u: %llu loaded or "
                   "registered), and none gives way to a streamed adapter; unload one first",
                   name, max, (unsigned long long)taken);
}

hr_status hr_adapter_store_reserve_streamed(hr_adapter_store *store, const char *name,
                                            const char *path, bool pinned,
                                            hr_adapter_reservation **out, hr_error *err) {
    HR_TRY(check_name(name, err));
    if (path != NULL && strnlen(path, HR_ADAPTER_PATH_MAX + 1) > HR_ADAPTER_PATH_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_path is longer than %d bytes",
                       HR_ADAPTER_PATH_MAX);
    hr_adapter_reservation *reservation = reservation_create(store, name, path, pinned);
    if (reservation == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
    reservation->streamed = true;
    pthread_mutex_lock(&store->lock);
    const hr_adapter_version *published = find_published(store, name);
    hr_status status = HR_OK;
    if (published != NULL)
        status = check_pin(store, name, pinned && !published->pinned, err);
    else if (path == NULL)
        status = check_free_place(store, name, err);
    if (published == NULL && status == HR_OK)
        status = check_reservation(store, name, pinned, err);
    if (published == NULL && status == HR_OK)
        link_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    if (published != NULL || status != HR_OK) {
        reservation_free(store, reservation);
        reservation = NULL;
    }
    if (status == HR_OK)
        *out = reservation;
    return status;
}

/* Inside the lock: waits until nobody loads the name. */
static hr_status wait_for_load(hr_adapter_store *store, const char *name, hr_error *err) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += LOAD_WAIT_S;
    while (is_being_loaded(store, name))
        if (pthread_cond_timedwait(&store->load_ended, &store->lock, &until) == ETIMEDOUT)
            return hr_fail(err, HR_ERR_TIMEOUT,
                           "another load of LoRA adapter '%s' is still under way after %d s", name,
                           LOAD_WAIT_S);
    return HR_OK;
}

hr_status hr_adapter_store_recall(hr_adapter_store *store, const char *name,
                                  char path[HR_ADAPTER_PATH_MAX + 1], hr_adapter_reservation **out,
                                  hr_error *err) {
    hr_adapter_reservation *reservation = NULL;
    pthread_mutex_lock(&store->lock);
    hr_status status = wait_for_load(store, name, err);
    const evicted_name *evicted = NULL;
    if (status == HR_OK && find_published(store, name) == NULL) {
        evicted = find_evicted(store, name);
        if (evicted == NULL)
            status = fail_unknown(store, name, err);
        else
            status = check_place(store, name, false, err);
    }
    if (status == HR_OK && evicted != NULL) {
        reservation = reservation_create(store, name, evicted->path, false);
        if (reservation == NULL) {
            status =
                hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
        } else {
            reservation->recalled = true;
            memcpy(reservation->contents, evicted->contents, sizeof reservation->contents);
            link_reservation(store, reservation);
            memcpy(path, evicted->path, strlen(evicted->path) + 1);
        }
    }
    pthread_mutex_unlock(&store->lock);
    if (status == HR_OK)
        *out = reservation;
    return status;
}

bool hr_adapter_store_accepts(const hr_adapter_reservation *reservation,
                              const hr_adapter_payload *payload) {
    return !reservation->recalled ||
           memcmp(reservation->contents, payload->contents, sizeof payload->contents) == 0;
}

static void unlink_reservation(hr_adapter_store *store, const hr_adapter_reservation *reservation) {
    hr_adapter_reservation **link = &store->reserved;
    while (*link != reservation)
        link = &(*link)->next;
    *link = reservation->next;
    pthread_cond_broadcast(&store->load_ended);
}

/* Names over the cap give way; those without leases are returned as a list to free after the lock.
 */
static hr_adapter_version *evict_over_cap(hr_adapter_store *store, uint64_t first_new_id) {
    hr_adapter_version *dead = NULL, *victim;
    while (store->limits.max_loaded > 0 && store->stats.loaded > store->limits.max_loaded &&
           (victim = least_recent(store, first_new_id)) != NULL) {
        remember_evicted(store, victim);
        hr_adapter_version *unused = unpublish(store, victim);
        if (unused != NULL) {
            unused->next = dead;
            dead = unused;
        }
    }
    return dead;
}

/* Inside the lock; the version takes the place of the one that has its name, or goes to the end of
 * the names. Returns the former one when nobody holds a lease of it. */
static hr_adapter_version *publish_version(hr_adapter_store *store, hr_adapter_version *version) {
    version->id = store->next_id++;
    version->last_use = ++store->uses;
    version->published = true;
    hr_adapter_version **link = &store->published;
    while (*link != NULL && strcmp((*link)->name, version->name) != 0)
        link = &(*link)->next;
    hr_adapter_version *former = *link, *dead = NULL;
    const evicted_name *evicted = find_evicted(store, version->name);
    version->line = former != NULL ? former->line : evicted != NULL ? evicted->line : version->id;
    if (former != NULL) {
        version->next = former->next;
        former->next = NULL;
        former->published = false;
        dead = former->leases == 0 ? former : NULL;
        store->stats.versions -= dead != NULL;
    } else {
        store->stats.loaded++;
    }
    *link = version;
    store->stats.versions++;
    forget_evicted(store, version->name);
    return dead;
}

uint64_t hr_adapter_store_publish(hr_adapter_store *store, hr_adapter_reservation *reservation,
                                  const hr_adapter_payload *payload) {
    hr_adapter_version *version = reservation->version, *dead = version;
    uint64_t id = 0;
    version->payload = *payload;
    pthread_mutex_lock(&store->lock);
    unlink_reservation(store, reservation);
    const hr_adapter_version *streamed = find_published(store, version->name);
    if (streamed != NULL) { /* a stream brought the name meanwhile: newer than its path */
        id = streamed->id;
    } else if (!reservation->revoked) {
        version->awaited = reservation->recalled;
        publish_version(store, version);
        id = version->id;
        dead = evict_over_cap(store, id);
    }
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    version_list_free(store, dead);
    hr_alloc_free(&store->alloc, reservation);
    return id;
}

/* A name that gave way, or was unloaded, since it was registered needs a place again. */
static hr_status check_places(hr_adapter_store *store, const hr_adapter_publication *items,
                              size_t n, hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < n && status == HR_OK; i++)
        if (items[i].reservation == NULL && find_published(store, items[i].name) == NULL)
            status = check_place(store, items[i].name, items[i].pinned, err);
    pthread_mutex_unlock(&store->lock);
    return status;
}

hr_status hr_adapter_store_prepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n,
                                   hr_error *err) {
    HR_TRY(check_places(store, items, n, err));
    for (size_t i = 0; i < n; i++)
        items[i].version = NULL;
    for (size_t i = 0; i < n; i++) {
        hr_adapter_publication *item = &items[i];
        item->version = version_create(store, item->name, item->path, item->pinned);
        if (item->version == NULL) {
            hr_adapter_store_unprepare(store, items, n);
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to publish LoRA adapter '%s'",
                           item->name);
        }
    }
    return HR_OK;
}

void hr_adapter_store_unprepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        version_free(store, items[i].version);
        items[i].version = NULL;
    }
}

void hr_adapter_store_publish_all(hr_adapter_store *store, hr_adapter_publication *items,
                                  size_t n) {
    hr_adapter_version *dead = NULL;
    pthread_mutex_lock(&store->lock);
    uint64_t first_new_id = store->next_id;
    for (size_t i = 0; i < n; i++) {
        hr_adapter_version *version = items[i].version;
        if (items[i].reservation != NULL)
            unlink_reservation(store, items[i].reservation);
        version->payload = items[i].payload;
        hr_adapter_version *former = publish_version(store, version);
        if (former != NULL) {
            former->next = dead;
            dead = former;
        }
        items[i].id = version->id;
        items[i].version = NULL;
    }
    hr_adapter_version **end = &dead;
    while (*end != NULL)
        end = &(*end)->next;
    *end = evict_over_cap(store, first_new_id);
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    for (size_t i = 0; i < n; i++)
        reservation_free(store, items[i].reservation);
    bury(store, dead);
}

void hr_adapter_store_cancel(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    if (reservation == NULL)
        return;
    pthread_mutex_lock(&store->lock);
    unlink_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    reservation_free(store, reservation);
}

hr_status hr_adapter_store_unload(hr_adapter_store *store, const char *name, hr_error *err) {
    if (name == NULL)
        name = "";
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *version = find_published(store, name);
    hr_adapter_version *unused = version != NULL ? unpublish(store, version) : NULL;
    bool known = version != NULL || forget_evicted(store, name);
    for (hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        r->revoked |= r->recalled && strcmp(r->version->name, name) == 0;
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    if (!known)
        return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN, "LoRA with name %.256s does not exist", name);
    version_free(store, unused);
    return HR_OK;
}

/* ---- serving ---- */

hr_status hr_adapter_store_acquire(hr_adapter_store *store, const char *name, hr_adapter_lease *out,
                                   hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *version = find_published(store, name);
    if (version != NULL) {
        version->leases++;
        version->awaited = false;
        version->last_use = ++store->uses;
        store->stats.leases_acquired++;
    } else {
        status = fail_unknown(store, name, err);
    }
    pthread_mutex_unlock(&store->lock);
    if (status == HR_OK)
        *out = (hr_adapter_lease){version};
    return status;
}

void hr_adapter_store_release(hr_adapter_store *store, hr_adapter_lease *lease) {
    hr_adapter_version *version = lease->version;
    if (version == NULL)
        return;
    lease->version = NULL;
    pthread_mutex_lock(&store->lock);
    HR_ASSERT(version->leases > 0);
    version->leases--;
    store->stats.leases_released++;
    bool last = version->leases == 0 && !version->published;
    if (last)
        store->stats.versions--;
    pthread_mutex_unlock(&store->lock);
    if (last)
        bury(store, version);
}

/* Inside the lock: what the name of a version stands for now. */
static hr_lease_state state_of(hr_adapter_store *store, const hr_adapter_version *version,
                               hr_adapter_version **now) {
    if (version->published)
        return HR_LEASE_CURRENT;
    *now = find_published(store, version->name);
    if (*now != NULL)
        return (*now)->line == version->line ? HR_LEASE_RENEWED : HR_LEASE_UNLOADED;
    const evicted_name *evicted = find_evicted(store, version->name);
    return evicted != NULL && evicted->line == version->line ? HR_LEASE_CURRENT : HR_LEASE_UNLOADED;
}

hr_lease_state hr_adapter_store_renew(hr_adapter_store *store, hr_adapter_lease *lease) {
    hr_adapter_version *version = lease->version, *now = NULL;
    if (version == NULL)
        return HR_LEASE_CURRENT;
    pthread_mutex_lock(&store->lock);
    hr_lease_state state = state_of(store, version, &now);
    if (state == HR_LEASE_RENEWED) {
        now->leases++;
        now->awaited = false;
        now->last_use = ++store->uses;
        store->stats.leases_acquired++;
        lease->version = now;
    }
    pthread_mutex_unlock(&store->lock);
    if (state == HR_LEASE_RENEWED)
        hr_adapter_store_release(store, &(hr_adapter_lease){version});
    return state;
}

bool hr_adapter_store_is_current(hr_adapter_store *store, const hr_adapter_lease *lease) {
    hr_adapter_version *now = NULL;
    if (lease->version == NULL)
        return true;
    pthread_mutex_lock(&store->lock);
    hr_lease_state state = state_of(store, lease->version, &now);
    pthread_mutex_unlock(&store->lock);
    return state == HR_LEASE_CURRENT;
}

uint64_t hr_adapter_store_changes(hr_adapter_store *store) {
    return atomic_load(&store->changes);
}

hr_status hr_adapter_store_check(hr_adapter_store *store, const char *name, hr_error *err) {
    pthread_mutex_lock(&store->lock);
    hr_status status = find_published(store, name) != NULL ? HR_OK : fail_unknown(store, name, err);
    pthread_mutex_unlock(&store->lock);
    return status;
}

hr_adapter_state hr_adapter_store_state(hr_adapter_store *store, const char *name) {
    if (name == NULL)
        return HR_ADAPTER_UNKNOWN;
    pthread_mutex_lock(&store->lock);
    hr_adapter_state state = find_published(store, name) != NULL ? HR_ADAPTER_LOADED
                             : find_evicted(store, name) != NULL ? HR_ADAPTER_EVICTED
                                                                 : HR_ADAPTER_UNKNOWN;
    pthread_mutex_unlock(&store->lock);
    return state;
}

/* What these read never changes while a lease is held. */
uint64_t hr_adapter_lease_id(const hr_adapter_lease *lease) {
    return lease->version != NULL ? lease->version->id : 0;
}

void *hr_adapter_lease_data(const hr_adapter_lease *lease) {
    return lease->version != NULL ? lease->version->payload.data : NULL;
}

const char *hr_adapter_lease_name(const hr_adapter_lease *lease) {
    return lease->version != NULL ? lease->version->name : NULL;
}

/* ---- looking ---- */

hr_status hr_adapter_store_list(hr_adapter_store *store, hr_adapter_entry **out, size_t *n,
                                hr_error *err) {
    pthread_mutex_lock(&store->lock);
    size_t count = store->stats.loaded;
    hr_adapter_entry *entries = count > 0 ? calloc(count, sizeof *entries) : NULL;
    if (entries != NULL) {
        size_t i = 0;
        for (const hr_adapter_version *v = store->published; v != NULL; v = v->next, i++) {
            hr_adapter_entry *e = &entries[i];
            memcpy(e->name, v->name, strlen(v->name) + 1);
            const char *path = v->path != NULL ? v->path : "__stream__";
            memcpy(e->path, path, strlen(path) + 1);
            e->id = v->id;
            e->pinned = v->pinned;
            e->rank = v->payload.rank;
            e->bytes = v->payload.bytes;
            e->leases = v->leases;
        }
    }
    pthread_mutex_unlock(&store->lock);
    if (count > 0 && entries == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu adapters", count);
    *out = entries;
    *n = count;
    return HR_OK;
}

void hr_adapter_store_stats_get(hr_adapter_store *store, hr_adapter_store_stats *out) {
    pthread_mutex_lock(&store->lock);
    *out = store->stats;
    pthread_mutex_unlock(&store->lock);
}
