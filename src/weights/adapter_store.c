/* The adapter store: two short lists under one mutex. Adapters are counted in tens, requests in
 * hundreds a second, so a walk over names costs nothing beside a step; what matters is that every
 * state is plain to see. */
#include "weights/adapter_store.h"

#include "base/buf.h"

#include <pthread.h>
#include <string.h>

/* Names that were evicted and not loaded again since: only for the wording of a refusal. */
enum { REMEMBERED_EVICTIONS = 64 };

struct hr_adapter_version {
    hr_adapter_version *next; /* published, in load order */
    char *name, *path;
    uint64_t id, leases;
    uint64_t last_use; /* store clock: raised by every acquire and publish */
    bool pinned, published;
    hr_adapter_payload payload;
};

struct hr_adapter_reservation {
    hr_adapter_reservation *next;
    hr_adapter_version *version; /* complete but for id and payload, so that publish cannot fail */
};

struct hr_adapter_store {
    hr_alloc alloc;
    hr_adapter_store_limits limits;
    pthread_mutex_t lock; /* all below */
    hr_adapter_version *published;
    hr_adapter_reservation *reserved;
    uint64_t next_id, uses;
    char evicted[REMEMBERED_EVICTIONS][HR_ADAPTER_NAME_MAX + 1];
    uint32_t next_evicted;
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
    *out = store;
    return HR_OK;
}

static void version_free(hr_adapter_store *store, hr_adapter_version *version) {
    if (version == NULL)
        return;
    if (version->payload.destroy != NULL)
        version->payload.destroy(version->payload.data);
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

void hr_adapter_store_destroy(hr_adapter_store *store) {
    if (store == NULL)
        return;
    HR_ASSERT(store->stats.leases_acquired == store->stats.leases_released);
    HR_ASSERT(store->reserved == NULL);
    version_list_free(store, store->published);
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

static bool is_reserved(const hr_adapter_store *store, const char *name) {
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        if (strcmp(r->version->name, name) == 0)
            return true;
    return false;
}

static uint32_t count_pinned(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next)
        n += v->pinned;
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

static hr_adapter_version *least_recent_unpinned(hr_adapter_store *store,
                                                 const hr_adapter_version *but) {
    hr_adapter_version *oldest = NULL;
    for (hr_adapter_version *v = store->published; v != NULL; v = v->next)
        if (!v->pinned && v != but && (oldest == NULL || v->last_use < oldest->last_use))
            oldest = v;
    return oldest;
}

static bool was_evicted(const hr_adapter_store *store, const char *name) {
    for (uint32_t i = 0; i < REMEMBERED_EVICTIONS; i++)
        if (strcmp(store->evicted[i], name) == 0)
            return true;
    return false;
}

static void forget_eviction(hr_adapter_store *store, const char *name) {
    for (uint32_t i = 0; i < REMEMBERED_EVICTIONS; i++)
        if (strcmp(store->evicted[i], name) == 0)
            store->evicted[i][0] = '\0';
}

static void remember_eviction(hr_adapter_store *store, const char *name) {
    strcpy(store->evicted[store->next_evicted], name); /* names are bounded when reserved */
    store->next_evicted = (store->next_evicted + 1) % REMEMBERED_EVICTIONS;
    store->stats.evicted++;
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
    if (name[0] != '\0' && was_evicted(store, name))
        return hr_fail(
            err, HR_ERR_ADAPTER_UNKNOWN,
            "LoRA adapter '%.256s' is not loaded: it gave way to others at max_loaded_loras %u; "
            "load it again, or pin it",
            name, store->limits.max_loaded);
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

static hr_status check_place(const hr_adapter_store *store, const char *name, bool pinned,
                             hr_error *err) {
    uint32_t n_pinned = count_pinned(store);
    if (pinned && n_pinned + count_reserved(store, true) + 1 >= store->limits.max_per_batch)
        return hr_fail(
            err, HR_ERR_LIMIT,
            "LoRA adapter '%s': it is not allowed to pin all slots (%u pinned, max_loras_per_batch "
            "%u), "
            "to prevent starvation of unpinned adapters and the base model; load it unpinned",
            name, n_pinned, store->limits.max_per_batch);
    uint32_t max = store->limits.max_loaded;
    if (max > 0 && n_pinned + count_reserved(store, false) >= max)
        return hr_fail(err, HR_ERR_LIMIT,
                       "LoRA adapter '%s': Maximum number of loaded LoRA adapters reached "
                       "(max_loaded_loras %u) and "
                       "none of them can be evicted (%u pinned, %u being loaded); unload one first",
                       name, max, n_pinned, count_reserved(store, false));
    return HR_OK;
}

hr_status hr_adapter_store_reserve(hr_adapter_store *store, const char *name, const char *path,
                                   bool pinned, hr_adapter_reservation **out, hr_error *err) {
    HR_TRY(check_name(name, err));
    if (path == NULL || strnlen(path, HR_ADAPTER_PATH_MAX + 1) > HR_ADAPTER_PATH_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_path is missing or longer than %d bytes",
                       HR_ADAPTER_PATH_MAX);
    const hr_alloc *alloc = &store->alloc;
    hr_adapter_reservation *reservation = hr_alloc_array(alloc, 1, sizeof *reservation);
    hr_adapter_version *version = hr_alloc_array(alloc, 1, sizeof *version);
    char *name_copy = copy_text(alloc, name), *path_copy = copy_text(alloc, path);
    hr_status status = HR_OK;
    if (reservation == NULL || version == NULL || name_copy == NULL || path_copy == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
        goto fail;
    }
    *version = (hr_adapter_version){.name = name_copy, .path = path_copy, .pinned = pinned};
    reservation->version = version;

    pthread_mutex_lock(&store->lock);
    if (find_published(store, name) != NULL)
        status = hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                         "LoRA adapter '%s' is already loaded; unload it first", name);
    else if (is_reserved(store, name))
        status = hr_fail(
            err, HR_ERR_ADAPTER_EXISTS,
            "LoRA adapter '%s' is already loaded or about to be: another load of it is under way",
            name);
    else
        status = check_place(store, name, pinned, err);
    if (status == HR_OK) {
        reservation->next = store->reserved;
        store->reserved = reservation;
    }
    pthread_mutex_unlock(&store->lock);
    if (status != HR_OK)
        goto fail;
    *out = reservation;
    return HR_OK;

fail:
    hr_alloc_free(alloc, path_copy);
    hr_alloc_free(alloc, name_copy);
    hr_alloc_free(alloc, version);
    hr_alloc_free(alloc, reservation);
    return status;
}

static void unlink_reservation(hr_adapter_store *store, const hr_adapter_reservation *reservation) {
    hr_adapter_reservation **link = &store->reserved;
    while (*link != reservation)
        link = &(*link)->next;
    *link = reservation->next;
}

/* Names over the cap give way; those without leases are returned as a list to free after the lock.
 */
static hr_adapter_version *evict_over_cap(hr_adapter_store *store,
                                          const hr_adapter_version *newest) {
    hr_adapter_version *dead = NULL, *victim;
    while (store->limits.max_loaded > 0 && store->stats.loaded > store->limits.max_loaded &&
           (victim = least_recent_unpinned(store, newest)) != NULL) {
        remember_eviction(store, victim->name);
        hr_adapter_version *unused = unpublish(store, victim);
        if (unused != NULL) {
            unused->next = dead;
            dead = unused;
        }
    }
    return dead;
}

uint64_t hr_adapter_store_publish(hr_adapter_store *store, hr_adapter_reservation *reservation,
                                  const hr_adapter_payload *payload) {
    hr_adapter_version *version = reservation->version;
    version->payload = *payload;
    pthread_mutex_lock(&store->lock);
    unlink_reservation(store, reservation);
    uint64_t id = version->id = store->next_id++;
    version->last_use = ++store->uses;
    version->published = true;
    hr_adapter_version **link = &store->published;
    while (*link != NULL)
        link = &(*link)->next;
    *link = version;
    store->stats.loaded++;
    store->stats.versions++;
    forget_eviction(store, version->name);
    hr_adapter_version *dead = evict_over_cap(store, version);
    pthread_mutex_unlock(&store->lock);
    version_list_free(store, dead);
    hr_alloc_free(&store->alloc, reservation);
    return id;
}

void hr_adapter_store_cancel(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    if (reservation == NULL)
        return;
    pthread_mutex_lock(&store->lock);
    unlink_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    version_free(store, reservation->version);
    hr_alloc_free(&store->alloc, reservation);
}

hr_status hr_adapter_store_unload(hr_adapter_store *store, const char *name, hr_error *err) {
    if (name == NULL)
        name = "";
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *version = find_published(store, name);
    hr_adapter_version *unused = version != NULL ? unpublish(store, version) : NULL;
    pthread_mutex_unlock(&store->lock);
    if (version == NULL)
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
        version_free(store, version);
}

hr_status hr_adapter_store_check(hr_adapter_store *store, const char *name, hr_error *err) {
    pthread_mutex_lock(&store->lock);
    hr_status status = find_published(store, name) != NULL ? HR_OK : fail_unknown(store, name, err);
    pthread_mutex_unlock(&store->lock);
    return status;
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
            strcpy(e->name, v->name);
            strcpy(e->path, v->path);
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
