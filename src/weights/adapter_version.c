/* A version from its first byte to its grave: whoever drops the last hold of one may be computing
 * steps, so the dead can be left to a sweeper. */
#include "weights/adapter_store_parts.h"

#include <string.h>

static char *copy_text(const hr_alloc *alloc, const char *text) {
    size_t len = strlen(text);
    char *copy = hr_alloc_array(alloc, len + 1, 1);
    if (copy != NULL)
        memcpy(copy, text, len + 1);
    return copy;
}

static hr_evicted_name *make_memory(const hr_alloc *alloc, const char *name, const char *path) {
    size_t name_size = strlen(name) + 1, path_size = path != NULL ? strlen(path) + 1 : 0;
    hr_evicted_name *e = hr_alloc_array(alloc, sizeof *e + name_size + path_size, 1);
    if (e == NULL)
        return NULL;
    memcpy(e->name, name, name_size);
    e->path = path != NULL ? memcpy(e->name + name_size, path, path_size) : NULL;
    return e;
}

hr_adapter_version *hr_adapter_version_create(hr_adapter_store *store, const char *name,
                                              const char *path, bool pinned) {
    const hr_alloc *alloc = &store->alloc;
    hr_adapter_version *version = hr_alloc_array(alloc, 1, sizeof *version);
    if (version == NULL)
        return NULL;
    version->pinned = pinned;
    version->name = copy_text(alloc, name);
    version->path = path != NULL ? copy_text(alloc, path) : NULL;
    version->memory = make_memory(alloc, name, path);
    if (version->name == NULL || version->memory == NULL ||
        (path != NULL && version->path == NULL)) {
        hr_adapter_version_free(store, version);
        return NULL;
    }
    return version;
}

void hr_adapter_version_free(hr_adapter_store *store, hr_adapter_version *version) {
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

void hr_adapter_version_list_free(hr_adapter_store *store, hr_adapter_version *list) {
    while (list != NULL) {
        hr_adapter_version *next = list->next;
        hr_adapter_version_free(store, list);
        list = next;
    }
}

void hr_adapter_store_bury(hr_adapter_store *store, hr_adapter_version *list) {
    if (list == NULL)
        return;
    if (store->wake == NULL) {
        hr_adapter_version_list_free(store, list);
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
    hr_adapter_version_list_free(store, list);
}
