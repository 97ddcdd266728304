/* Names that give way when too many are loaded, and the catalogue of where they can be read
 * again. */
#include "weights/adapter_store_parts.h"

#include <string.h>

/* Evicted names whose path is remembered; over it the ones that gave way first are forgotten. A
 * trainer that never unloads leaves one name a step behind. */
enum { MAX_EVICTED = 1024 };

/* What is not pinned and can be read again. What came over the wire alone cannot come back, and
 * gives way only to a load call that was told to make room. */
static bool may_give_way(const hr_adapter_version *version) {
    return !version->pinned && version->path != NULL;
}

uint32_t hr_adapter_store_count_staying(const hr_adapter_store *store) {
    uint32_t n = 0;
    for (const hr_adapter_version *v = store->published; v != NULL; v = v->next)
        n += !may_give_way(v);
    return n;
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

static hr_adapter_version *least_recent(hr_adapter_store *store, uint64_t first_new_id,
                                        bool with_path, bool streamed) {
    hr_adapter_version *oldest = NULL;
    for (hr_adapter_version *v = store->published; v != NULL; v = v->next)
        if (!v->pinned && (v->path != NULL ? with_path : streamed) && v->id < first_new_id &&
            (oldest == NULL || gives_way_before(v, oldest)))
            oldest = v;
    return oldest;
}

/* Loads under way count on the places of those that give way to them, which are left to them. */
static hr_adapter_version *find_victim(hr_adapter_store *store, uint64_t first_new_id,
                                       bool displaces) {
    uint32_t kept = hr_adapter_store_count_staying(store) + hr_adapter_store_count_reserved(store);
    bool with_path = !displaces || kept <= store->limits.max_loaded;
    return least_recent(store, first_new_id, with_path, displaces);
}

hr_evicted_name *hr_adapter_store_find_evicted(const hr_adapter_store *store, const char *name) {
    for (hr_evicted_name *e = store->evicted; e != NULL; e = e->next)
        if (strcmp(e->name, name) == 0)
            return e;
    return NULL;
}

bool hr_adapter_store_forget_evicted(hr_adapter_store *store, const char *name) {
    for (hr_evicted_name **link = &store->evicted; *link != NULL; link = &(*link)->next) {
        hr_evicted_name *e = *link;
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
    hr_evicted_name *e = version->memory, **link = &store->evicted;
    e->line = version->line;
    memcpy(e->contents, version->payload.contents, sizeof e->contents);
    memcpy(e->weight_version, version->weight_version, sizeof e->weight_version);
    version->memory = NULL;
    while (*link != NULL)
        link = &(*link)->next;
    *link = e;
    store->n_evicted++;
    store->stats.evicted++;
    if (store->n_evicted > MAX_EVICTED)
        hr_adapter_store_forget_evicted(store, store->evicted->name);
}

hr_adapter_version *hr_adapter_store_evict_over_cap(hr_adapter_store *store, uint64_t first_new_id,
                                                    bool displaces) {
    hr_adapter_version *dead = NULL, *victim;
    while (store->limits.max_loaded > 0 && store->stats.loaded > store->limits.max_loaded &&
           (victim = find_victim(store, first_new_id, displaces)) != NULL) {
        remember_evicted(store, victim);
        hr_adapter_version *unused = hr_adapter_store_unpublish(store, victim);
        if (unused != NULL) {
            unused->next = dead;
            dead = unused;
        }
    }
    return dead;
}
