/* The control plane: adapters are registered and forgotten, the version changes alone. */
#include "weights/names.h"
#include "weights/turn.h"

#include <string.h>

enum { MAX_CONFIG = 1 << 20, MAX_PATH = 4095, MAX_REGISTERED = 1 << 16, MIN_LOOK = 256 };

static hr_status check_registration(const hr_registration *registration, hr_error *err) {
    HR_TRY(hr_adapter_name_check(registration->name, err));
    if (registration->config == NULL || registration->config_len == 0)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "the adapter '%s' has no config",
                       registration->name);
    if (registration->config_len > MAX_CONFIG)
        return hr_fail(err, HR_ERR_LIMIT, "the config of the adapter '%s' is over %d bytes",
                       registration->name, MAX_CONFIG);
    uint8_t digest[HR_XXH3_SIZE];
    if (registration->config_digest != NULL && !hr_xxh3_parse(registration->config_digest, digest))
        return hr_fail(err, HR_ERR_INVALID,
                       "config_digest of the adapter '%s': wanted an XXH3-128 of 32 hex digits, "
                       "came \"%.40s\"",
                       registration->name, registration->config_digest);
    if (registration->path != NULL && strnlen(registration->path, MAX_PATH + 1) > MAX_PATH)
        return hr_fail(err, HR_ERR_LIMIT, "the path of the adapter '%s' is over %d bytes",
                       registration->name, MAX_PATH);
    return HR_OK;
}

static bool is_published(const hr_receiver *receiver, const hr_registered *registered) {
    const hr_receiver_sink *sink = &receiver->shared.sink;
    return registered->published && (sink->has_adapter == NULL ||
                                     sink->has_adapter(sink->self, registered->registration.name));
}

/* A trainer that names each version anew leaves a registration behind with every name that gave
 * way. Looked for when there are twice as many as last time were left. */
static void forget_gone(hr_receiver *receiver) {
    hr_registry *registry = &receiver->shared.registry;
    if (receiver->session != NULL || registry->n < registry->next_look)
        return;
    hr_registered *next;
    for (hr_registered *r = registry->first; r != NULL; r = next) {
        next = r->next;
        if (r->published && !is_published(receiver, r))
            hr_receiving_forget(&receiver->shared, r);
    }
    registry->next_look = registry->n < MIN_LOOK / 2 ? MIN_LOOK : 2 * registry->n;
}

/* A session that is open holds the names whose tensors it has, and the waiting ones that may come
 * in it. A waiting name that none holds may be a dead trainer's. */
static hr_status check_not_held(const hr_receiver *receiver, const hr_registered *registered,
                                hr_error *err) {
    const hr_session *session = receiver->session;
    const char *name = registered->registration.name;
    if (session == NULL)
        return HR_OK;
    if (registered->pending && hr_session_admits(session, name))
        return hr_fail(err, HR_ERR_BUSY,
                       "the adapter '%s' waits for publication by the session '%s'; end or abort "
                       "that first",
                       name, session->id);
    if (registered->tensors > 0)
        return hr_fail(err, HR_ERR_BUSY,
                       "the session '%s' holds tensors of the adapter '%s'; end or abort it first",
                       session->id, name);
    return HR_OK;
}

static hr_status check_replaceable(const hr_receiver *receiver, const hr_registration *registration,
                                   const hr_registered *old, hr_error *err) {
    if (old == NULL && receiver->shared.registry.n >= MAX_REGISTERED)
        return hr_fail(err, HR_ERR_LIMIT, "%d adapters are registered; unload some first",
                       MAX_REGISTERED);
    if (old == NULL)
        return HR_OK;
    if (registration->defer_publish && is_published(receiver, old))
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "the adapter '%s' is already published, and defer_publish needs a new name; "
                       "choose another",
                       registration->name);
    HR_TRY(check_not_held(receiver, old, err));
    if (registration->refuse_existing && is_published(receiver, old))
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "the adapter '%s' is already loaded; unload it first, or replace it with "
                       "upsert",
                       registration->name);
    return HR_OK;
}

hr_status hr_update_register(hr_receiver *receiver, const hr_registration *registration,
                             hr_update_change *out, hr_error *err) {
    hr_receiving *shared = &receiver->shared;
    HR_TRY(check_registration(registration, err));
    hr_registered *old =
        hr_registry_find(&shared->registry, registration->name, strlen(registration->name));
    HR_TRY(check_replaceable(receiver, registration, old, err));
    hr_registered *added = hr_registered_create(&shared->memory, registration);
    if (added == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register the adapter '%s'",
                       registration->name);
    hr_status status = shared->sink.register_adapter(shared->sink.self, &added->registration, err);
    if (status != HR_OK) {
        hr_registered_destroy(&shared->memory, added);
        return status;
    }
    added->since_ns = hr_turn_now(receiver);
    added->pending = registration->defer_publish;
    added->published = old != NULL && is_published(receiver, old);
    if (old != NULL)
        hr_registry_take(&shared->registry, old);
    else
        forget_gone(receiver);
    hr_registry_put(&shared->registry, added);
    *out = (hr_update_change){added, old};
    return HR_OK;
}

void hr_update_settle(hr_receiver *receiver, const hr_update_change *made) {
    hr_registered_destroy(&receiver->shared.memory, made->replaced);
}

void hr_update_undo(hr_receiver *receiver, const hr_update_change *made) {
    if (made->added == NULL)
        return;
    if (made->replaced == NULL) {
        hr_receiving_forget(&receiver->shared, made->added);
        return;
    }
    const hr_receiver_sink *sink = &receiver->shared.sink;
    hr_error unable; /* what the sink took before it takes again, but for a pin given away since */
    if (made->replaced->published) /* if it had given way it got room anew */
        sink->forget_adapter(sink->self, made->added->registration.name);
    else
        (void)sink->register_adapter(sink->self, &made->replaced->registration, &unable);
    hr_registry_take(&receiver->shared.registry, made->added);
    hr_registered_destroy(&receiver->shared.memory, made->added);
    hr_registry_put(&receiver->shared.registry, made->replaced);
}

hr_status hr_receiver_register(hr_receiver *receiver, const hr_registration *registration,
                               bool *pending, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "register_lora_adapter", 0, err));
    hr_update_change made;
    hr_status status = hr_update_register(receiver, registration, &made, err);
    if (status == HR_OK) {
        hr_update_settle(receiver, &made);
        if (pending != NULL)
            *pending = made.added->pending;
    }
    hr_turn_leave(receiver);
    return status;
}

static hr_status unregister(hr_receiver *receiver, const char *name, hr_error *err) {
    hr_registered *found = hr_registry_find(&receiver->shared.registry, name, strlen(name));
    if (found == NULL)
        return HR_OK;
    HR_TRY(check_not_held(receiver, found, err));
    hr_receiving_forget(&receiver->shared, found);
    return HR_OK;
}

hr_status hr_receiver_unregister(hr_receiver *receiver, const char *name, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "unload_lora_adapter", 0, err));
    hr_status status = unregister(receiver, name, err);
    hr_turn_leave(receiver);
    return status;
}

static hr_status set_version(hr_receiver *receiver, const char *weight_version,
                             bool abort_all_requests, hr_error *err) {
    HR_TRY(hr_weight_version_check(weight_version, err));
    if (receiver->session != NULL)
        return hr_turn_fail_open(receiver, err);
    if (strcmp(receiver->weight_version, weight_version) == 0)
        return HR_OK;
    hr_publication publication = {.weight_version = weight_version,
                                  .abort_all_requests = abort_all_requests,
                                  .timeout_ms = HR_DEFAULT_WAIT_MS};
    const hr_receiver_sink *sink = &receiver->shared.sink;
    HR_TRY(sink->publish(sink->self, &publication, err));
    memcpy(receiver->weight_version, weight_version, strlen(weight_version) + 1);
    return HR_OK;
}

hr_status hr_receiver_set_version(hr_receiver *receiver, const char *weight_version,
                                  bool abort_all_requests, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "update_weight_version", 0, err));
    hr_status status = set_version(receiver, weight_version, abort_all_requests, err);
    hr_turn_leave(receiver);
    return status;
}
