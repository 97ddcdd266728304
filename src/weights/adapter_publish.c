/* Publication: names come to stand for versions, one, or all of a session at once. */
#include "weights/adapter_store_parts.h"

#include <stdio.h>
#include <string.h>

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
    const hr_evicted_name *evicted = hr_adapter_store_find_evicted(store, version->name);
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
    hr_adapter_store_forget_evicted(store, version->name);
    return dead;
}

uint64_t hr_adapter_store_publish(hr_adapter_store *store, hr_adapter_reservation *reservation,
                                  const hr_adapter_payload *payload) {
    hr_adapter_version *version = reservation->version, *dead = version;
    uint64_t id = 0;
    version->payload = *payload;
    pthread_mutex_lock(&store->lock);
    hr_adapter_store_unlink(store, reservation);
    const hr_adapter_version *streamed = hr_adapter_store_find_published(store, version->name);
    if (streamed != NULL) { /* a stream brought the name meanwhile: newer than its path */
        id = streamed->id;
    } else if (!reservation->revoked) {
        version->awaited = reservation->recalled;
        publish_version(store, version);
        id = version->id;
        dead = hr_adapter_store_evict_over_cap(store, id, false);
    }
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    hr_adapter_version_list_free(store, dead);
    hr_alloc_free(&store->alloc, reservation);
    return id;
}

hr_status hr_adapter_store_prepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n,
                                   hr_error *err) {
    for (size_t i = 0; i < n; i++)
        items[i].version = NULL;
    for (size_t i = 0; i < n; i++) {
        hr_adapter_publication *item = &items[i];
        item->version = hr_adapter_version_create(store, item->name, item->path, item->pinned);
        if (item->version == NULL) {
            hr_adapter_store_unprepare(store, items, n);
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to publish LoRA adapter '%s'",
                           item->name);
        }
        if (item->weight_version != NULL)
            snprintf(item->version->weight_version, sizeof item->version->weight_version, "%s",
                     item->weight_version);
    }
    return HR_OK;
}

void hr_adapter_store_unprepare(hr_adapter_store *store, hr_adapter_publication *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        hr_adapter_version_free(store, items[i].version);
        items[i].version = NULL;
    }
}

void hr_adapter_store_publish_all(hr_adapter_store *store, hr_adapter_publication *items,
                                  size_t n) {
    hr_adapter_version *dead = NULL;
    pthread_mutex_lock(&store->lock);
    uint64_t first_new_id = store->next_id;
    bool displaces = false;
    for (size_t i = 0; i < n; i++) {
        hr_adapter_version *version = items[i].version;
        if (items[i].reservation != NULL) {
            hr_adapter_store_unlink(store, items[i].reservation);
            displaces |= items[i].reservation->displaces;
        }
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
    *end = hr_adapter_store_evict_over_cap(store, first_new_id, displaces);
    atomic_fetch_add(&store->changes, 1);
    pthread_mutex_unlock(&store->lock);
    for (size_t i = 0; i < n; i++)
        hr_adapter_reservation_free(store, items[i].reservation);
    hr_adapter_store_bury(store, dead);
}
