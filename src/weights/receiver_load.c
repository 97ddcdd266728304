/* One bucket as a session of its own: SGLang's load calls, and updates outside a session. */
#include "weights/names.h"
#include "weights/turn.h"

#include <string.h>

/* The adapters of a bucket are what its session declares, so that names which wait for another one
 * are left alone. */
static hr_status declare_names(hr_receiver *receiver, const hr_bucket *bucket, const char ***names,
                               size_t *n, hr_error *err) {
    const hr_registry *registry = &receiver->shared.registry;
    const char **list = hr_memory_array(&receiver->shared.memory, registry->n, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of adapters");
    size_t count = 0;
    const hr_registered *last = NULL;
    for (size_t i = 0; i < bucket->n; i++) {
        hr_wire_name name;
        if (hr_wire_name_split(bucket->tensors[i].name, bucket->adapter, &name, NULL) != HR_OK ||
            name.adapter == NULL)
            continue; /* what is wrong with it is said when it is taken */
        if (last != NULL && hr_registered_is(last, name.adapter, name.adapter_len))
            continue; /* tensors of one adapter come together */
        const hr_registered *r = hr_registry_find(registry, name.adapter, name.adapter_len);
        last = r;
        size_t k = 0;
        while (r != NULL && k < count && list[k] != r->registration.name)
            k++;
        if (r != NULL && k == count)
            list[count++] = r->registration.name;
    }
    *names = list;
    *n = count;
    return HR_OK;
}

static bool wants_base_sha256(const hr_end_options *options) {
    const hr_manifest *manifest = options->manifest;
    for (size_t i = 0; manifest != NULL && i < manifest->n; i++)
        if (manifest->entries[i].sha256 != NULL && manifest->entries[i].name != NULL &&
            strchr(manifest->entries[i].name, ':') == NULL)
            return true;
    return options->audit;
}

static hr_status stream_bucket(hr_receiver *receiver, const hr_registration *registration,
                               const hr_bucket *bucket, const hr_end_options *options,
                               const char *const *names, size_t n_names, bool *kept,
                               hr_receipt **receipt, hr_error *err) {
    hr_session_options session = {.session_id = bucket->session_id,
                                  .sync_base = registration == NULL,
                                  .adapters = names,
                                  .n_adapters = n_names,
                                  .timeout_ms = options->timeout_ms,
                                  .audit = wants_base_sha256(options)};
    HR_TRY(hr_update_begin(receiver, &session, err));
    hr_error cause;
    hr_status status = hr_session_take(receiver->session, bucket, kept, &cause);
    if (status != HR_OK) {
        hr_turn_roll_back(receiver, &cause);
        if (err != NULL)
            *err = cause;
        return status;
    }
    HR_TRY(hr_update_prepare(receiver, options, err));
    return hr_update_publish(receiver, false, receipt, err);
}

/* The bucket was applied under this id: the receipt again, when it is the same bucket. */
static hr_status apply_again(hr_receiver *receiver, const hr_bucket *bucket,
                             const hr_past_session *past, hr_receipt **receipt, hr_error *err) {
    hr_receiving *shared = &receiver->shared;
    hr_parcel *parcel = NULL;
    uint8_t identity[HR_XXH3_SIZE];
    HR_TRY(hr_parcel_create(&shared->memory, &shared->registry, bucket->tensors, bucket->n,
                            bucket->adapter, shared->max_stash_bytes, &parcel, err));
    hr_parcel_digest(parcel);
    hr_parcel_identity(parcel, shared->stream, identity);
    hr_parcel_destroy(&shared->memory, parcel);
    if (memcmp(identity, past->identity, sizeof identity) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' was published with other tensors; use a new session_id",
                       past->id);
    return hr_update_copy_receipt(past->receipt, receipt, err);
}

static hr_status apply(hr_receiver *receiver, const hr_registration *registration,
                       const hr_bucket *bucket, const hr_end_options *options, bool *kept,
                       hr_receipt **receipt, hr_error *err) {
    hr_past_session *past;
    hr_end_options as_bucket = *options;
    as_bucket.session_id = bucket->session_id;
    HR_TRY(hr_update_find_published(receiver, &as_bucket, &past, err));
    if (past != NULL && bucket->tensors != NULL)
        return apply_again(receiver, bucket, past, receipt, err);
    if (receiver->session != NULL)
        return hr_turn_fail_open(receiver, err);
    if (bucket->n == 0 || bucket->tensors == NULL)
        return hr_fail(err, HR_ERR_INVALID, "a load without tensors; send at least one");
    if (registration != NULL && registration->defer_publish)
        return hr_fail(
            err, HR_ERR_INVALID,
            "a load publishes the adapter '%.256s' at once; defer_publish is for sessions",
            registration->name);
    hr_update_change made = {0};
    if (registration != NULL) {
        hr_registration displacing = *registration;
        displacing.displaces = true;
        HR_TRY(hr_update_register(receiver, &displacing, &made, err));
    }
    const char **names = NULL;
    size_t n_names = 0;
    hr_status status;
    if (registration != NULL) {
        status = stream_bucket(receiver, registration, bucket, options, &registration->name, 1,
                               kept, receipt, err);
    } else {
        status = declare_names(receiver, bucket, &names, &n_names, err);
        if (status == HR_OK)
            status =
                stream_bucket(receiver, NULL, bucket, options, names, n_names, kept, receipt, err);
        hr_memory_free(&receiver->shared.memory, names);
    }
    if (status == HR_OK)
        hr_update_settle(receiver, &made);
    else
        hr_update_undo(receiver, &made);
    return status;
}

hr_status hr_receiver_apply(hr_receiver *receiver, const hr_registration *registration,
                            const hr_bucket *bucket, const hr_end_options *options,
                            hr_receipt **receipt, hr_error *err) {
    bool kept = false;
    hr_status status = hr_turn_enter(receiver, "a load call", options->timeout_ms, err);
    if (status == HR_OK) {
        status = apply(receiver, registration, bucket, options, &kept, receipt, err);
        hr_turn_leave(receiver);
    }
    if (!kept && bucket->release != NULL)
        bucket->release(bucket->owner);
    return status;
}
