/* A session from prepare on: everything is checked, then everything is built, then it is published
 * in one step. */
#include "weights/manifest.h"
#include "weights/names.h"
#include "weights/receipt.h"
#include "weights/session.h"

#include <stdlib.h>
#include <string.h>

/* ---- prepare: checks ---- */

static hr_status check_all_came(const hr_session *session, hr_error *err) {
    const hr_registry *registry = &session->shared->registry;
    for (size_t i = 0; i < session->n_declared; i++) {
        const char *name = session->declared[i];
        const hr_registered *r = hr_registry_find(registry, name, strlen(name));
        if (r == NULL || r->tensors == 0)
            return hr_fail(err, HR_ERR_SESSION,
                           "the session declared the adapter '%s' but none of its tensors came",
                           name);
    }
    for (const hr_registered *r = registry->first; r != NULL; r = r->next)
        if (r->pending && r->tensors == 0 && hr_session_admits(session, r->registration.name))
            return hr_fail(err, HR_ERR_SESSION,
                           "the adapter '%s' waits for this session but none of its tensors came",
                           r->registration.name);
    if (session->stash.n == 0)
        return hr_fail(
            err, HR_ERR_SESSION,
            "no tensor came in this session, so there was nothing to publish; it is closed now: "
            "begin another to send weights");
    return HR_OK;
}

static void digest_part(hr_session_part *part, hr_xxh3_stream *stream) {
    hr_xxh3_stream_reset(stream);
    for (size_t i = 0; i < part->n; i++)
        hr_xxh3_stream_update(stream, part->entries[i]->tensor.name,
                              strlen(part->entries[i]->tensor.name) + 1);
    hr_xxh3_stream_digest(stream, part->names);
    hr_xxh3_stream_reset(stream);
    for (size_t i = 0; i < part->n; i++) {
        hr_xxh3_stream_update(stream, part->entries[i]->tensor.name,
                              strlen(part->entries[i]->tensor.name) + 1);
        hr_xxh3_stream_update(stream, part->entries[i]->xxh3, HR_XXH3_SIZE);
    }
    hr_xxh3_stream_digest(stream, part->bytes);
}

static int by_adapter(const void *a, const void *b) {
    return strcmp(((const hr_session_part *)a)->adapter->registration.name,
                  ((const hr_session_part *)b)->adapter->registration.name);
}

/* One part for each run of entries of one adapter, in the order of adapter names. */
static hr_status find_parts(hr_session *session, hr_stash_entry *const *sorted, hr_error *err) {
    size_t n = session->stash.n, n_parts = 0;
    for (size_t i = 0; i < n; i++)
        n_parts +=
            sorted[i]->adapter != NULL && (i == 0 || sorted[i]->adapter != sorted[i - 1]->adapter);
    const hr_memory *memory = &session->shared->memory;
    session->parts = hr_memory_zeroed(memory, n_parts, sizeof *session->parts);
    session->adapters = hr_memory_zeroed(memory, n_parts, sizeof *session->adapters);
    if (session->parts == NULL || session->adapters == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to prepare %zu adapters", n_parts);
    for (size_t i = 0; i < n; i++) {
        if (sorted[i]->adapter == NULL)
            continue;
        if (i == 0 || sorted[i]->adapter != sorted[i - 1]->adapter) {
            hr_session_part *part = &session->parts[session->n_parts++];
            part->adapter = sorted[i]->adapter;
            part->entries = &sorted[i];
        }
        session->parts[session->n_parts - 1].n++;
    }
    qsort(session->parts, n_parts, sizeof *session->parts, by_adapter);
    for (size_t i = 0; i < n_parts; i++)
        digest_part(&session->parts[i], session->shared->stream);
    return HR_OK;
}

/* Without a manifest an adapter is known to be whole only by what its last stream had. */
static hr_status check_without_manifest(const hr_session *session, hr_error *err) {
    for (size_t i = 0; i < session->n_parts; i++) {
        const hr_session_part *part = &session->parts[i];
        const hr_registered *r = part->adapter;
        if (r->pending)
            return hr_fail(err, HR_ERR_SESSION,
                           "[LORA-CHECK] the adapter '%s' was registered with defer_publish and "
                           "needs a manifest to be published; end the session with one",
                           r->registration.name);
        if (r->has_previous && (r->previous_tensors != part->n ||
                                memcmp(r->previous_names, part->names, sizeof part->names) != 0))
            return hr_fail(
                err, HR_ERR_SESSION,
                "the adapter '%s' came with a different tensor set than its previous "
                "sync (partial stream?): %zu tensors now, %llu before; send all of them, "
                "register it again, or send a manifest",
                r->registration.name, part->n, (unsigned long long)r->previous_tensors);
    }
    return HR_OK;
}

/* The caller says what there must be, so that a tensor which is missing is found. */
static bool is_proven_whole(const hr_session *session, const hr_end_options *options) {
    const hr_manifest *manifest = options->manifest;
    bool base = !session->sync_base || options->complete_base ||
                (manifest != NULL && manifest->covers_base);
    bool adapters =
        manifest != NULL || (options->complete_base && session->n_parts == 0 && !session->declares);
    return base && adapters;
}

static hr_status check_everything(hr_session *session, const hr_end_options *options,
                                  hr_stash_entry *const *sorted, hr_error *err) {
    hr_stash *stash = &session->stash;
    if (options->weight_version != NULL)
        HR_TRY(hr_weight_version_check(options->weight_version, err));
    HR_TRY(check_all_came(session, err));
    if (options->complete_base && stash->n_base == 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "every base weight was asked for, but no base tensor came");
    if (options->audit && stash->n_base > 0 && !session->audit)
        return hr_fail(err, HR_ERR_INVALID,
                       "an audit of base tensors needs their SHA-256 as they come; begin the "
                       "session with audit");
    HR_TRY(find_parts(session, sorted, err));
    HR_TRY(hr_doubt_check(&session->doubt, is_proven_whole(session, options), err));
    if (options->manifest == NULL)
        HR_TRY(check_without_manifest(session, err));
    else
        HR_TRY(hr_manifest_check(options->manifest, stash, sorted, err));
    if (options->audit)
        hr_stash_sha256(sorted, stash->n);
    return HR_OK;
}

/* ---- prepare: builds ---- */

static hr_status build_everything(hr_session *session, const hr_end_options *options,
                                  hr_error *err) {
    const hr_receiver_sink *sink = &session->shared->sink;
    if (session->base_begun && session->stash.n_base == 0) {
        sink->base_abandon(sink->self); /* all of its tensors were refused */
        session->base_begun = false;
    }
    if (session->base_begun)
        HR_TRY(sink->base_seal(sink->self, options->complete_base, err));
    return hr_session_build_adapters(session, err);
}

/* ---- prepare: the receipt ---- */

static void digest_all(hr_receipt *receipt, hr_stash_entry *const *sorted, hr_xxh3_stream *stream) {
    hr_xxh3_stream_reset(stream);
    for (size_t i = 0; i < receipt->tensors; i++) {
        hr_xxh3_stream_update(stream, sorted[i]->name, strlen(sorted[i]->name) + 1);
        hr_xxh3_stream_update(stream, sorted[i]->xxh3, HR_XXH3_SIZE);
    }
    hr_xxh3_stream_digest(stream, receipt->xxh3);
}

static void describe_part(const hr_session_part *part, hr_receipt_adapter *to) {
    const hr_registered *r = part->adapter;
    memcpy(to->name, r->registration.name, strlen(r->registration.name) + 1);
    to->tensors = part->n;
    to->bytes = r->bytes;
    memcpy(to->xxh3, part->bytes, sizeof to->xxh3);
    memcpy(to->config_digest, r->config_digest, sizeof to->config_digest);
    to->unchanged = r->has_previous && memcmp(r->previous_bytes, part->bytes, HR_XXH3_SIZE) == 0;
}

static hr_status make_receipt(hr_session *session, const hr_end_options *options,
                              hr_stash_entry *const *sorted, hr_error *err) {
    const hr_receiving *shared = session->shared;
    const hr_stash *stash = &session->stash;
    hr_receipt *receipt = hr_receipt_create(&shared->memory, session->n_parts);
    session->receipt = receipt;
    if (receipt == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receipt");
    receipt->state = HR_SESSION_PREPARED;
    memcpy(receipt->session_id, session->id, sizeof session->id);
    memcpy(receipt->instance, shared->instance, sizeof shared->instance);
    memcpy(receipt->weight_version, session->weight_version, sizeof session->weight_version);
    receipt->ranks = shared->ranks;
    receipt->tensors = stash->n;
    receipt->bytes = stash->adapter_bytes + stash->base_bytes;
    receipt->base_tensors = stash->n_base;
    receipt->base_bytes = stash->base_bytes;
    if (stash->n_base > 0)
        memcpy(receipt->base_mode, shared->base_mode, sizeof shared->base_mode);
    digest_all(receipt, sorted, shared->stream);
    for (size_t i = 0; i < session->n_parts; i++)
        describe_part(&session->parts[i], &receipt->adapters[i]);
    if (options->audit && !hr_receipt_put_audit(receipt, sorted, stash->n))
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an audit of %zu tensors", stash->n);
    return HR_OK;
}

static void take_options(hr_session *session, const hr_end_options *options) {
    if (options->weight_version != NULL)
        memcpy(session->weight_version, options->weight_version,
               strlen(options->weight_version) + 1);
    session->flush_cache |= options->flush_cache;
    session->abort_all_requests |= options->abort_all_requests;
    session->publish_timeout_ms = hr_session_timeout(options->timeout_ms);
    hr_end_fingerprint(options, session->shared->stream, session->fingerprint);
}

static hr_status prepare_sorted(hr_session *session, const hr_end_options *options,
                                hr_stash_entry *const *sorted, hr_error *err) {
    const hr_clock *clock = &session->shared->clock;
    uint64_t start_ns = hr_now_ns(clock);
    HR_TRY(check_everything(session, options, sorted, err));
    uint64_t checked_ns = hr_now_ns(clock);
    HR_TRY(build_everything(session, options, err));
    uint64_t built_ns = hr_now_ns(clock);
    take_options(session, options);
    HR_TRY(make_receipt(session, options, sorted, err));
    session->receipt->receive_ns = start_ns - session->begun_ns;
    session->receipt->verify_ns = checked_ns - start_ns;
    session->receipt->build_ns = built_ns - checked_ns;
    /* so that nothing but the sink can fail once it is published */
    session->reply = hr_receipt_copy(session->receipt);
    if (session->reply == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receipt");
    return HR_OK;
}

hr_status hr_session_prepare(hr_session *session, const hr_end_options *options, hr_error *err) {
    hr_stash_entry **sorted = hr_stash_sorted(&session->stash);
    if (sorted == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors",
                       session->stash.n);
    hr_status status = prepare_sorted(session, options, sorted, err);
    hr_memory_free(&session->shared->memory, sorted);
    if (status != HR_OK)
        return status;
    hr_stash_drop_bytes(&session->stash);
    for (size_t i = 0; i < session->n_parts; i++)
        session->parts[i].entries = NULL;
    session->state = HR_SESSION_PREPARED;
    return HR_OK;
}

/* ---- publish ---- */

static void remember_part(hr_session *session, hr_session_part *part) {
    hr_registered *r = part->adapter;
    r->has_previous = true;
    r->previous_tensors = part->n;
    memcpy(r->previous_names, part->names, sizeof part->names);
    memcpy(r->previous_bytes, part->bytes, sizeof part->bytes);
    r->published = true;
    hr_registry_end_pending(&session->shared->registry, r);
}

hr_status hr_session_publish(hr_session *session, hr_error *err) {
    hr_receiving *shared = session->shared;
    for (size_t i = 0; i < session->n_parts; i++)
        session->adapters[i] = (hr_published_adapter){
            .name = session->parts[i].adapter->registration.name, .built = session->parts[i].built};
    hr_publication publication = {
        .adapters = session->adapters,
        .n_adapters = session->n_parts,
        .base = session->base_begun,
        .weight_version = session->weight_version[0] != '\0' ? session->weight_version : NULL,
        .flush_cache = session->flush_cache,
        .abort_all_requests = session->abort_all_requests,
        .timeout_ms = session->publish_timeout_ms,
    };
    uint64_t start_ns = hr_now_ns(&shared->clock);
    HR_TRY(shared->sink.publish(shared->sink.self, &publication, err));
    session->base_begun = false;
    session->state = HR_SESSION_PUBLISHED;
    hr_receipt *receipts[2] = {session->receipt, session->reply};
    for (size_t k = 0; k < 2; k++) {
        receipts[k]->state = HR_SESSION_PUBLISHED;
        receipts[k]->publish_ns = hr_now_ns(&shared->clock) - start_ns;
        for (size_t i = 0; i < session->n_parts; i++)
            receipts[k]->adapters[i].id = session->adapters[i].id;
    }
    for (size_t i = 0; i < session->n_parts; i++)
        remember_part(session, &session->parts[i]);
    session->n_parts = 0; /* what was built is the sink's */
    return HR_OK;
}

void hr_end_fingerprint(const hr_end_options *options, hr_xxh3_stream *stream,
                        uint8_t out[HR_XXH3_SIZE]) {
    const char *version = options->weight_version != NULL ? options->weight_version : "";
    uint8_t flags[4] = {options->complete_base, options->flush_cache, options->abort_all_requests,
                        options->audit};
    hr_xxh3_stream_reset(stream);
    hr_xxh3_stream_update(stream, version, strlen(version) + 1);
    hr_xxh3_stream_update(stream, flags, sizeof flags);
    hr_manifest_fingerprint(options->manifest, stream);
    hr_xxh3_stream_digest(stream, out);
}
