/* Loads: a name and a place are held while its bytes are read, so that a load which cannot be
 * published is refused before. */
#include "base/cond.h"
#include "weights/adapter_store_parts.h"
#include "weights/names.h"

#include <errno.h>
#include <string.h>

/* How long one load of a name may keep others that want the same name waiting. */
enum { LOAD_WAIT_S = 120 };

/* ---- places ---- */

static uint32_t count_pinned(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next)
        n += v->pinned;
    return n;
}

static uint32_t count_pinned_reserved(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        n += r->version->pinned;
    return n;
}

uint32_t hr_adapter_store_count_reserved(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        n++;
    return n;
}

static hr_status check_pin(const hr_adapter_store *store, const char *name, bool pinned,
                           hr_error *err) {
    uint32_t n_pinned = count_pinned(store);
    if (pinned && n_pinned + count_pinned_reserved(store) + 1 >= store->limits.max_per_batch)
        return hr_fail(
            err, HR_ERR_LIMIT,
            "LoRA adapter '%s': it is not allowed to pin all slots (%u pinned, max_loras_per_batch "
            "%u), "
            "to prevent starvation of unpinned adapters and the base model; load it unpinned",
            name, n_pinned, store->limits.max_per_batch);
    return HR_OK;
}

/* Inside the lock: is there a place for one more name? */
static hr_status check_place(const hr_adapter_store *store, const char *name, bool pinned,
                             bool displaces, hr_error *err) {
    HR_TRY(check_pin(store, name, pinned, err));
    uint32_t max = store->limits.max_loaded, reserved = hr_adapter_store_count_reserved(store);
    uint32_t staying = displaces ? count_pinned(store) : hr_adapter_store_count_staying(store);
    if (max > 0 && staying + reserved >= max)
        return hr_fail(err, HR_ERR_LIMIT,
                       "LoRA adapter '%s': Maximum number of loaded LoRA adapters reached "
                       "(max-loaded-loras %u) and none of them can be evicted (%u %s, %u "
                       "registered or being loaded); unload one first",
                       name, max, staying, displaces ? "pinned" : "pinned or streamed", reserved);
    return HR_OK;
}

/* Inside the lock: a name that only a stream can bring takes a free place, or none. */
static hr_status check_free_place(const hr_adapter_store *store, const char *name, hr_error *err) {
    uint64_t taken = store->stats.loaded + hr_adapter_store_count_reserved(store);
    uint32_t max = store->limits.max_loaded;
    if (max == 0 || taken < max)
        return HR_OK;
    return hr_fail(err, HR_ERR_LIMIT,
                   "LoRA adapter '%s': all places are taken (max-loaded-loras %u: %llu loaded or "
                   "registered), and none gives way to one that is registered; unload one first",
                   name, max, (unsigned long long)taken);
}

/* ---- reservations ---- */

void hr_adapter_reservation_free(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    if (reservation == NULL)
        return;
    hr_adapter_version_free(store, reservation->version);
    hr_alloc_free(&store->alloc, reservation);
}

static hr_adapter_reservation *reservation_create(hr_adapter_store *store, const char *name,
                                                  const char *path, bool pinned) {
    hr_adapter_reservation *reservation = hr_alloc_array(&store->alloc, 1, sizeof *reservation);
    if (reservation == NULL)
        return NULL;
    reservation->version = hr_adapter_version_create(store, name, path, pinned);
    if (reservation->version == NULL) {
        hr_adapter_reservation_free(store, reservation);
        return NULL;
    }
    return reservation;
}

/* Inside the lock: may this name be loaded now? */
static hr_status check_reservation(hr_adapter_store *store, const char *name, bool pinned,
                                   bool displaces, hr_error *err) {
    if (hr_adapter_store_find_published(store, name) != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "LoRA adapter '%s' is already loaded; unload it first", name);
    const hr_adapter_reservation *other = hr_adapter_store_find_reserved(store, name);
    if (other != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "LoRA adapter '%s' is already loaded or about to be: %s", name,
                       other->streamed
                           ? "it is registered and waits for its weights; stream them, or unload it"
                           : "another load of it is under way");
    return check_place(store, name, pinned, displaces, err);
}

static void link_reservation(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    reservation->next = store->reserved;
    store->reserved = reservation;
}

void hr_adapter_store_unlink(hr_adapter_store *store, const hr_adapter_reservation *reservation) {
    hr_adapter_reservation **link = &store->reserved;
    while (*link != reservation)
        link = &(*link)->next;
    *link = reservation->next;
    pthread_cond_broadcast(&store->load_ended);
}

hr_status hr_adapter_store_reserve(hr_adapter_store *store, const char *name, const char *path,
                                   bool pinned, hr_adapter_reservation **out, hr_error *err) {
    HR_TRY(hr_adapter_name_check(name, err));
    if (path == NULL || path[0] == '\0' ||
        strnlen(path, HR_ADAPTER_PATH_MAX + 1) > HR_ADAPTER_PATH_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_path is missing or longer than %d bytes",
                       HR_ADAPTER_PATH_MAX);
    hr_adapter_reservation *reservation = reservation_create(store, name, path, pinned);
    if (reservation == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
    pthread_mutex_lock(&store->lock);
    hr_status status = check_reservation(store, name, pinned, false, err);
    if (status == HR_OK)
        link_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    if (status != HR_OK) {
        hr_adapter_reservation_free(store, reservation);
        return status;
    }
    *out = reservation;
    return HR_OK;
}

hr_status hr_adapter_store_reserve_streamed(hr_adapter_store *store, const char *name,
                                            const char *path, bool pinned, bool displaces,
                                            hr_adapter_reservation **out, hr_error *err) {
    HR_TRY(hr_adapter_name_check(name, err));
    if (path != NULL && strnlen(path, HR_ADAPTER_PATH_MAX + 1) > HR_ADAPTER_PATH_MAX)
        return hr_fail(err, HR_ERR_INVALID, "lora_path is longer than %d bytes",
                       HR_ADAPTER_PATH_MAX);
    hr_adapter_reservation *reservation = reservation_create(store, name, path, pinned);
    if (reservation == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
    reservation->streamed = true;
    reservation->displaces = displaces;
    pthread_mutex_lock(&store->lock);
    const hr_adapter_version *published = hr_adapter_store_find_published(store, name);
    hr_status status = HR_OK;
    if (published != NULL)
        status = check_pin(store, name, pinned && !published->pinned, err);
    else if (path == NULL && !displaces)
        status = check_free_place(store, name, err);
    if (published == NULL && status == HR_OK)
        status = check_reservation(store, name, pinned, displaces, err);
    if (published == NULL && status == HR_OK)
        link_reservation(store, reservation);
    pthread_mutex_unlock(&store->lock);
    if (published != NULL || status != HR_OK) {
        hr_adapter_reservation_free(store, reservation);
        reservation = NULL;
    }
    if (status == HR_OK)
        *out = reservation;
    return status;
}

hr_status hr_adapter_store_pin_reserved(hr_adapter_store *store,
                                        hr_adapter_reservation *reservation, bool pinned,
                                        hr_error *err) {
    hr_adapter_version *version = reservation->version;
    pthread_mutex_lock(&store->lock);
    hr_status status = check_pin(store, version->name, pinned && !version->pinned, err);
    if (status == HR_OK)
        version->pinned = pinned;
    pthread_mutex_unlock(&store->lock);
    return status;
}

void hr_adapter_store_cancel(hr_adapter_store *store, hr_adapter_reservation *reservation) {
    if (reservation == NULL)
        return;
    pthread_mutex_lock(&store->lock);
    hr_adapter_store_unlink(store, reservation);
    pthread_mutex_unlock(&store->lock);
    hr_adapter_reservation_free(store, reservation);
}

/* ---- names that gave way ---- */

/* A registered name may have both: the reservation of its registration, and that of a recall. */
static bool is_being_loaded(const hr_adapter_store *store, const char *name) {
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        if (!r->streamed && strcmp(r->version->name, name) == 0)
            return true;
    return false;
}

/* Inside the lock: waits until nobody loads the name. */
static hr_status wait_for_load(hr_adapter_store *store, const char *name, hr_error *err) {
    struct timespec until = hr_cond_deadline(LOAD_WAIT_S * 1000);
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
    const hr_evicted_name *evicted = NULL;
    if (status == HR_OK && hr_adapter_store_find_published(store, name) == NULL) {
        evicted = hr_adapter_store_find_evicted(store, name);
        if (evicted == NULL || evicted->path == NULL)
            status = hr_adapter_store_fail_unknown(store, name, err);
        else if (hr_adapter_store_find_reserved(store, name) == NULL) /* else that is its place */
            status = check_place(store, name, false, false, err);
    }
    if (status == HR_OK && evicted != NULL) {
        reservation = reservation_create(store, name, evicted->path, false);
        if (reservation == NULL) {
            status =
                hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'", name);
        } else {
            reservation->recalled = true;
            memcpy(reservation->contents, evicted->contents, sizeof reservation->contents);
            memcpy(reservation->version->weight_version, evicted->weight_version,
                   sizeof evicted->weight_version);
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
