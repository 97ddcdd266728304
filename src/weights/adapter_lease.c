/* Leases: one use of a version each, returned exactly once. */
#include "weights/adapter_store_parts.h"

/* Inside the lock: one more use of the version. */
static void lease_version(hr_adapter_store *store, hr_adapter_version *version) {
    version->leases++;
    version->awaited = false;
    version->last_use = ++store->uses;
    store->stats.leases_acquired++;
}

hr_status hr_adapter_store_acquire(hr_adapter_store *store, const char *name, hr_adapter_lease *out,
                                   hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&store->lock);
    hr_adapter_version *version = hr_adapter_store_find_published(store, name);
    if (version != NULL)
        lease_version(store, version);
    else
        status = hr_adapter_store_fail_unknown(store, name, err);
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
        hr_adapter_store_bury(store, version);
}

/* Inside the lock: what the name of a version stands for now. */
static hr_lease_state state_of(hr_adapter_store *store, const hr_adapter_version *version,
                               hr_adapter_version **now) {
    if (version->published)
        return HR_LEASE_CURRENT;
    *now = hr_adapter_store_find_published(store, version->name);
    if (*now != NULL)
        return (*now)->line == version->line ? HR_LEASE_RENEWED : HR_LEASE_UNLOADED;
    const hr_evicted_name *evicted = hr_adapter_store_find_evicted(store, version->name);
    return evicted != NULL && evicted->line == version->line ? HR_LEASE_CURRENT : HR_LEASE_UNLOADED;
}

hr_lease_state hr_adapter_store_renew(hr_adapter_store *store, hr_adapter_lease *lease) {
    hr_adapter_version *version = lease->version, *now = NULL;
    if (version == NULL)
        return HR_LEASE_CURRENT;
    pthread_mutex_lock(&store->lock);
    hr_lease_state state = state_of(store, version, &now);
    if (state == HR_LEASE_RENEWED) {
        lease_version(store, now);
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

const char *hr_adapter_lease_weight_version(const hr_adapter_lease *lease) {
    const hr_adapter_version *version = lease->version;
    return version != NULL && version->weight_version[0] != '\0' ? version->weight_version : NULL;
}
