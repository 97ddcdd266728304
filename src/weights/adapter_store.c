/* The store's life, and what can be read of it. */
#include "weights/adapter_store.h"

#include "base/cond.h"
#include "weights/adapter_store_parts.h"

#include <stdlib.h>
#include <string.h>

hr_status hr_adapter_store_create(const hr_adapter_store_limits *limits, const hr_alloc *alloc,
                                  hr_adapter_store **out, hr_error *err) {
    hr_adapter_store *store = hr_alloc_array(alloc, 1, sizeof *store);
    if (store == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the adapter store");
    store->alloc = *alloc;
    store->limits = *limits;
    store->next_id = 1;
    pthread_mutex_init(&store->lock, NULL);
    hr_cond_init(&store->load_ended);
    *out = store;
    return HR_OK;
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

void hr_adapter_store_destroy(hr_adapter_store *store) {
    if (store == NULL)
        return;
    hr_adapter_store_sweep(store);
    HR_ASSERT(store->stats.leases_acquired == store->stats.leases_released);
    HR_ASSERT(store->reserved == NULL);
    hr_adapter_version_list_free(store, store->published);
    while (store->evicted != NULL) {
        hr_evicted_name *next = store->evicted->next;
        hr_alloc_free(&store->alloc, store->evicted);
        store->evicted = next;
    }
    pthread_cond_destroy(&store->load_ended);
    pthread_mutex_destroy(&store->lock);
    hr_alloc_free(&store->alloc, store);
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
            memcpy(e->weight_version, v->weight_version, sizeof e->weight_version);
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

uint64_t hr_adapter_store_changes(hr_adapter_store *store) {
    return atomic_load(&store->changes);
}
