/* The sink: registering, building and publishing adapters; writing and publishing base weights. */
#include "engine/update.h"

#include "base/log.h"
#include "engine/update_log.h"

#include <pthread.h>
#include <string.h>

/* A new name between its registration and its publication. */
typedef struct registered_name {
    struct registered_name *next;
    hr_adapter_reservation *reservation;
    char name[];
} registered_name;

/* What build_adapter makes. */
typedef struct built_adapter {
    hr_lora *lora;
    bool pinned;
    bool took_place;                /* of a published name that had given way */
    const char *path;               /* NULL: none */
    uint8_t contents[HR_XXH3_SIZE]; /* for a name with a path */
    char name[];
} built_adapter;

struct hr_update {
    hr_update_config c;
    pthread_mutex_t lock; /* names, base_user */
    registered_name *names;
    const char *base_user; /* NULL: nobody */

    /* Of who registers, one at a time: the config that was found good last, which most calls bring
     * again. */
    bool has_good_config;
    uint8_t good_config[HR_XXH3_SIZE];
    uint32_t good_rank;

    /* Of who has taken the base weights. */
    hr_base_update *base; /* an update between begin and publish or abandon */
    bool held;            /* no step runs, since it writes in place */
    size_t n_weights;
    bool *written; /* [n_weights]: by the update that is sealed */
    bool *missing; /* [n_weights]: lost, and not published again so far */
    bool lost;     /* some are missing */
};

/* ---- life ---- */

hr_status hr_update_create(const hr_update_config *config, hr_update **out, hr_error *err) {
    hr_update *u = hr_alloc_array(&config->alloc, 1, sizeof *u);
    if (u == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the sink of weight updates");
    u->c = *config;
    u->n_weights = hr_base_update_weights(config->model);
    u->written = hr_alloc_array(&config->alloc, u->n_weights, sizeof *u->written);
    u->missing = hr_alloc_array(&config->alloc, u->n_weights, sizeof *u->missing);
    pthread_mutex_init(&u->lock, NULL);
    if (u->written == NULL || u->missing == NULL) {
        hr_update_destroy(u);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the sink of weight updates");
    }
    *out = u;
    return HR_OK;
}

static void name_free(hr_update *u, registered_name *name) {
    hr_adapter_store_cancel(u->c.store, name->reservation);
    hr_alloc_free(&u->c.alloc, name);
}

void hr_update_destroy(hr_update *u) {
    if (u == NULL)
        return;
    HR_ASSERT(u->base == NULL && !u->held);
    while (u->names != NULL) {
        registered_name *next = u->names->next;
        name_free(u, u->names);
        u->names = next;
    }
    pthread_mutex_destroy(&u->lock);
    hr_alloc alloc = u->c.alloc;
    hr_alloc_free(&alloc, u->missing);
    hr_alloc_free(&alloc, u->written);
    hr_alloc_free(&alloc, u);
}

/* ---- who uses the base weights ---- */

hr_status hr_update_take_base(hr_update *u, const char *user, hr_error *err) {
    pthread_mutex_lock(&u->lock);
    const char *present = u->base_user;
    if (present == NULL)
        u->base_user = user;
    pthread_mutex_unlock(&u->lock);
    if (present == NULL)
        return HR_OK;
    return hr_fail(err, HR_ERR_BUSY, "the base weights cannot be used: %s; end that first",
                   present);
}

void hr_update_give_base(hr_update *u) {
    pthread_mutex_lock(&u->lock);
    u->base_user = NULL;
    pthread_mutex_unlock(&u->lock);
}

void hr_update_lose_base(hr_update *u, const char *reason) {
    u->lost = true;
    for (size_t i = 0; i < u->n_weights; i++)
        u->missing[i] = true;
    hr_loop_set_unservable(u->c.loop, reason);
    hr_log(HR_LOG_WARN, "requests are refused: %s", reason);
}

/* ---- names ---- */

/* Inside the lock. */
static registered_name **find_name(hr_update *u, const char *name) {
    registered_name **link = &u->names;
    while (*link != NULL && strcmp((*link)->name, name) != 0)
        link = &(*link)->next;
    return link;
}

bool hr_update_is_registered(hr_update *u, const char *name) {
    pthread_mutex_lock(&u->lock);
    bool found = *find_name(u, name) != NULL;
    pthread_mutex_unlock(&u->lock);
    return found;
}

static registered_name *take_name(hr_update *u, const char *name) {
    pthread_mutex_lock(&u->lock);
    registered_name **link = find_name(u, name), *found = *link;
    if (found != NULL)
        *link = found->next;
    pthread_mutex_unlock(&u->lock);
    return found;
}

static hr_adapter_reservation *reservation_of(hr_update *u, const char *name) {
    pthread_mutex_lock(&u->lock);
    const registered_name *found = *find_name(u, name);
    hr_adapter_reservation *reservation = found != NULL ? found->reservation : NULL;
    pthread_mutex_unlock(&u->lock);
    return reservation;
}

static hr_status reserve_name(hr_update *u, const hr_registration *registration, hr_error *err) {
    size_t size = strlen(registration->name) + 1;
    registered_name *name = hr_alloc_array(&u->c.alloc, sizeof *name + size, 1);
    if (name == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register LoRA adapter '%s'",
                       registration->name);
    memcpy(name->name, registration->name, size);
    hr_status status = hr_adapter_store_reserve_streamed(
        u->c.store, registration->name, registration->path, registration->pinned,
        registration->displaces, &name->reservation, err);
    if (status != HR_OK || name->reservation == NULL) { /* refused, or published already */
        hr_alloc_free(&u->c.alloc, name);
        return status;
    }
    pthread_mutex_lock(&u->lock);
    name->next = u->names;
    u->names = name;
    pthread_mutex_unlock(&u->lock);
    return HR_OK;
}

/* ---- adapters ---- */

hr_status hr_update_check_rank(const hr_update *u, uint32_t rank, hr_error *err) {
    uint32_t most = u->c.max_lora_rank;
    if (most == 0 || rank <= most)
        return HR_OK;
    return hr_fail(err, HR_ERR_ADAPTER_INCOMPATIBLE,
                   "incompatible with this engine: rank %u is above --max-lora-rank %u; start with "
                   "a higher one",
                   rank, most);
}

static hr_status check_config(hr_update *u, const hr_registration *registration, hr_error *err) {
    uint8_t digest[HR_XXH3_SIZE];
    hr_xxh3(registration->config, registration->config_len, digest);
    if (u->has_good_config && memcmp(digest, u->good_config, sizeof digest) == 0)
        return hr_update_check_rank(u, u->good_rank, err);
    uint32_t rank;
    HR_TRY(hr_lora_check_config(u->c.model, registration->config, registration->config_len, &rank,
                                err));
    u->has_good_config = true;
    u->good_rank = rank;
    memcpy(u->good_config, digest, sizeof digest);
    return hr_update_check_rank(u, rank, err);
}

static hr_status check_new(hr_update *u, const hr_registration *registration, hr_error *err) {
    hr_adapter_state state = hr_adapter_store_state(u->c.store, registration->name);
    if ((registration->refuse_existing && state == HR_ADAPTER_LOADED) ||
        (registration->defer_publish && state != HR_ADAPTER_UNKNOWN))
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS, "LoRA adapter '%s' is already loaded; %s",
                       registration->name,
                       registration->defer_publish
                           ? "an adapter whose publication is deferred needs a new name"
                           : "unload it first, or replace it by an upsert");
    return HR_OK;
}

static hr_status register_adapter(void *self, const hr_registration *registration, hr_error *err) {
    hr_update *u = self;
    if (!u->c.enable_lora)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "LoRA is not enabled; start with --enable-lora");
    HR_TRY(check_new(u, registration, err));
    hr_status status = check_config(u, registration, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "LoRA adapter '%s'", registration->name);
    hr_adapter_reservation *reservation = reservation_of(u, registration->name);
    return reservation == NULL
               ? reserve_name(u, registration, err)
               : hr_adapter_store_pin_reserved(u->c.store, reservation, registration->pinned, err);
}

static void forget_adapter(void *self, const char *name) {
    hr_update *u = self;
    registered_name *found = take_name(u, name);
    if (found != NULL)
        name_free(u, found);
}

static bool has_adapter(void *self, const char *name) {
    hr_update *u = self;
    return hr_adapter_store_state(u->c.store, name) != HR_ADAPTER_UNKNOWN;
}

static built_adapter *built_create(hr_update *u, const hr_registration *registration) {
    size_t name_size = strlen(registration->name) + 1;
    size_t path_size = registration->path != NULL ? strlen(registration->path) + 1 : 0;
    built_adapter *built = hr_alloc_array(&u->c.alloc, sizeof *built + name_size + path_size, 1);
    if (built == NULL)
        return NULL;
    built->pinned = registration->pinned;
    memcpy(built->name, registration->name, name_size);
    if (registration->path != NULL)
        built->path = memcpy(built->name + name_size, registration->path, path_size);
    return built;
}

static void discard_adapter(void *self, void *data) {
    hr_update *u = self;
    built_adapter *built = data;
    if (built->took_place)
        forget_adapter(u, built->name);
    hr_lora_destroy(built->lora);
    hr_alloc_free(&u->c.alloc, built);
}

/* A name that gave way since it was published needs a place again, and has it before anything is
 * prepared: a commit may not fail for want of one. */
static hr_status take_place(hr_update *u, const hr_registration *registration, built_adapter *built,
                            hr_error *err) {
    if (hr_update_is_registered(u, registration->name))
        return HR_OK;
    HR_TRY(reserve_name(u, registration, err));
    built->took_place = hr_update_is_registered(u, registration->name);
    return HR_OK;
}

static hr_status build_lora(hr_update *u, const hr_registration *registration,
                            const hr_tensor *tensors, size_t n, built_adapter *built,
                            hr_error *err) {
    HR_TRY(take_place(u, registration, built, err));
    HR_TRY(hr_lora_create(u->c.model, registration->config, registration->config_len, tensors, n,
                          &built->lora, err));
    return hr_update_check_rank(u, hr_lora_max_rank(built->lora), err);
}

static hr_status build_adapter(void *self, const hr_registration *registration,
                               const hr_tensor *tensors, size_t n, void **out, hr_error *err) {
    hr_update *u = self;
    built_adapter *built = built_create(u, registration);
    if (built == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for LoRA adapter '%s'",
                       registration->name);
    hr_status status = build_lora(u, registration, tensors, n, built, err);
    if (status != HR_OK) {
        discard_adapter(u, built);
        return hr_fail_context(err, status, "LoRA adapter '%s'", registration->name);
    }
    if (built->path != NULL)
        hr_lora_contents(u->c.model, built->lora, built->contents);
    *out = built;
    return HR_OK;
}

static void destroy_lora(void *data) {
    hr_lora_destroy(data);
}

hr_adapter_payload hr_update_payload(hr_lora *lora) {
    return (hr_adapter_payload){.data = lora,
                                .destroy = destroy_lora,
                                .bytes = hr_lora_bytes(lora),
                                .rank = hr_lora_max_rank(lora)};
}

/* ---- base weights ---- */

static hr_status hold_steps(hr_update *u, uint64_t timeout_ms, hr_error *err) {
    hr_loop_change hold = {.base = true, .hold = true, .timeout_ms = timeout_ms};
    HR_TRY(hr_loop_change_apply(u->c.loop, &hold, err));
    u->held = true;
    return HR_OK;
}

/* The update is published or abandoned. */
static void end_base(hr_update *u) {
    u->base = NULL;
    if (u->held)
        hr_loop_resume(u->c.loop);
    u->held = false;
    hr_update_give_base(u);
}

static hr_status base_begin(void *self, uint64_t timeout_ms, hr_error *err) {
    hr_update *u = self;
    HR_TRY(hr_update_take_base(u, "an update of them is under way", err));
    hr_status status = u->c.shadow ? HR_OK : hold_steps(u, timeout_ms, err);
    if (status == HR_OK)
        status = hr_base_update_begin(u->c.model, u->c.shadow, &u->base, err);
    if (status != HR_OK)
        end_base(u);
    return status;
}

static hr_status base_write(void *self, const hr_tensor *tensors, size_t n, hr_error *err) {
    return hr_base_update_write(((hr_update *)self)->base, tensors, n, err);
}

static hr_status base_seal(void *self, bool complete, hr_error *err) {
    hr_update *u = self;
    HR_TRY(hr_base_update_seal(u->base, complete, err));
    hr_base_update_written(u->base, u->written);
    return HR_OK;
}

static void base_abandon(void *self) {
    hr_update *u = self;
    if (!hr_base_update_abandon(u->base))
        hr_update_lose_base(u, "the base weights are incomplete after an update in place that "
                               "failed; send a full base update");
    end_base(u);
}

/* ---- publication ---- */

typedef struct publishing {
    hr_update *update;
    hr_adapter_publication *items;
    size_t n;
    bool base;
} publishing;

/* Between two steps; nothing here can fail. */
static void apply(void *self) {
    publishing *p = self;
    if (p->n > 0)
        hr_adapter_store_publish_all(p->update->c.store, p->items, p->n);
    if (p->base)
        hr_base_update_publish(p->update->base);
}

static void list_items(hr_update *u, const hr_publication *publication,
                       hr_adapter_publication *items) {
    for (size_t i = 0; i < publication->n_adapters; i++) {
        const hr_published_adapter *adapter = &publication->adapters[i];
        const built_adapter *built = adapter->built;
        items[i] = (hr_adapter_publication){.name = adapter->name,
                                            .reservation = reservation_of(u, adapter->name),
                                            .payload = hr_update_payload(built->lora),
                                            .path = built->path,
                                            .weight_version = publication->weight_version,
                                            .pinned = built->pinned};
        memcpy(items[i].payload.contents, built->contents, sizeof built->contents);
    }
}

/* The names are published: their reservations and payloads are the store's. */
static void settle_items(hr_update *u, hr_publication *publication,
                         const hr_adapter_publication *items) {
    for (size_t i = 0; i < publication->n_adapters; i++) {
        hr_published_adapter *adapter = &publication->adapters[i];
        adapter->id = items[i].id;
        hr_alloc_free(&u->c.alloc, take_name(u, adapter->name));
        hr_alloc_free(&u->c.alloc, adapter->built);
        adapter->built = NULL;
    }
}

/* The base is published: are the weights whole again? */
static void settle_base(hr_update *u) {
    bool was_lost = u->lost;
    u->lost = false;
    for (size_t i = 0; i < u->n_weights; i++) {
        u->missing[i] = u->missing[i] && !u->written[i];
        u->lost = u->lost || u->missing[i];
    }
    if (was_lost && !u->lost) {
        hr_loop_set_unservable(u->c.loop, NULL);
        hr_log(HR_LOG_INFO, "all base weights are there again; requests are served");
    }
    end_base(u);
}

static hr_status publish(void *self, hr_publication *publication, hr_error *err) {
    hr_update *u = self;
    size_t n = publication->n_adapters;
    hr_adapter_publication *items = hr_alloc_array(&u->c.alloc, n, sizeof *items);
    if (items == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to publish %zu adapters", n);
    list_items(u, publication, items);
    publishing p = {u, items, n, publication->base};
    hr_loop_change change = {.self = &p,
                             .apply = apply,
                             .base = publication->base,
                             .weight_version = publication->weight_version,
                             .flush_cache = publication->flush_cache,
                             .abort_all_requests = publication->abort_all_requests,
                             .timeout_ms = publication->timeout_ms};
    hr_status status = hr_adapter_store_prepare(u->c.store, items, n, err);
    if (status == HR_OK) {
        status = hr_loop_change_apply(u->c.loop, &change, err);
        if (status != HR_OK)
            hr_adapter_store_unprepare(u->c.store, items, n);
    }
    if (status == HR_OK) {
        settle_items(u, publication, items);
        if (publication->base)
            settle_base(u);
    }
    hr_alloc_free(&u->c.alloc, items);
    return status;
}

hr_receiver_sink hr_update_sink(hr_update *update) {
    return (hr_receiver_sink){.self = update,
                              .register_adapter = register_adapter,
                              .forget_adapter = forget_adapter,
                              .has_adapter = has_adapter,
                              .build_adapter = build_adapter,
                              .discard_adapter = discard_adapter,
                              .builds_together = true,
                              .base_begin = base_begin,
                              .base_write = base_write,
                              .base_seal = base_seal,
                              .base_abandon = base_abandon,
                              .publish = publish,
                              .published = hr_update_log_published,
                              .rolled_back = hr_update_log_rolled_back};
}
