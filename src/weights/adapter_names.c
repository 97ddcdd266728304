/* Names: what they stand for, and what is said when they stand for nothing. */
#include "weights/adapter_store_parts.h"

#include "base/buf.h"

#include <string.h>

hr_adapter_version *hr_adapter_store_find_published(hr_adapter_store *store, const char *name) {
    for (hr_adapter_version *v = store->published; v != NULL; v = v->next)
        if (strcmp(v->name, name) == 0)
            return v;
    return NULL;
}

const hr_adapter_reservation *hr_adapter_store_find_reserved(const hr_adapter_store *store,
                                                             const char *name) {
    for (const hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        if (strcmp(r->version->name, name) == 0)
            return r;
    return NULL;
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

hr_status hr_adapter_store_fail_unknown(const hr_adapter_store *store, const char *name,
                                        hr_error *err) {
    const hr_evicted_name *evicted = hr_adapter_store_find_evicted(store, name);
    if (evicted != NULL)
        return hr_fail(
            err, HR_ERR_ADAPTER_UNKNOWN,
            "LoRA adapter '%.256s' is not loaded: it gave way to others at max_loaded_loras %u%s",
            name, store->limits.max_loaded,
            evicted->path != NULL ? "; load it again, or pin it"
                                  : ", and came over the wire; push it again, or pin it");
    const hr_adapter_reservation *reservation = hr_adapter_store_find_reserved(store, name);
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

hr_adapter_version *hr_adapter_store_unpublish(hr_adapter_store *store,
                                               hr_adapter_version *version) {
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

hr_status hr_adapter_store_unload(hr_adapter_store *store, const char *name, hr_error *err) {
    if (name == NULL)
        name = "";
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *version = hr_adapter_store_find_published(store, name);
    hr_adapter_version *unused =
        version != NULL ? hr_adapter_store_unpublish(store, version) : NULL;
    bool known = version != NULL || hr_adapter_store_forget_evicted(store, name);
    for (hr_adapter_reservation *r = store->reserved; r != NULL; r = r->next)
        r->revoked |= r->recalled && strcmp(r->version->name, name) == 0;
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    if (!known)
        return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN, "LoRA with name %.256s does not exist", name);
    hr_adapter_version_free(store, unused);
    return HR_OK;
}

hr_status hr_adapter_store_check(hr_adapter_store *store, const char *name, hr_error *err) {
    pthread_mutex_lock(&store->lock);
    hr_status status = hr_adapter_store_find_published(store, name) != NULL
                           ? HR_OK
                           : hr_adapter_store_fail_unknown(store, name, err);
    pthread_mutex_unlock(&store->lock);
    return status;
}

hr_adapter_state hr_adapter_store_state(hr_adapter_store *store, const char *name) {
    if (name == NULL)
        return HR_ADAPTER_UNKNOWN;
    pthread_mutex_lock(&store->lock);
    const hr_evicted_name *evicted = hr_adapter_store_find_evicted(store, name);
    hr_adapter_state state = hr_adapter_store_find_published(store, name) != NULL
                                 ? HR_ADAPTER_LOADED
                             : evicted != NULL && evicted->path != NULL ? HR_ADAPTER_EVICTED
                                                                        : HR_ADAPTER_UNKNOWN;
    pthread_mutex_unlock(&store->lock);
    return state;
}
