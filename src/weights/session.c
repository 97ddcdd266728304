#include "weights/session.h"

#include "weights/manifest.h"
#include "weights/names.h"
#include "weights/receipt.h"

#include <stdlib.h>
#include <string.h>

/* Bounds of what one session may ask for, far above any use. */
enum {
    MAX_BUCKET_TENSORS = 1 << 20,
    MAX_DECLARED = 1 << 16,
    MAX_STREAMS = 1024,
    MAX_STREAM_BUCKETS = 1 << 20,
    MAX_STREAM_NAME = 256,
    DEFAULT_TIMEOUT_MS = 60000
};

/* A sequence of buckets that may be sent again. */
struct hr_session_stream {
    hr_session_stream *next;
    uint64_t n, cap;
    uint8_t (*identities)[HR_XXH3_SIZE]; /* of the buckets taken */
    char name[];
};

/* The tensors of one adapter, and what is made of them. */
struct hr_session_part {
    hr_registered *adapter;
    hr_stash_entry *const *entries; /* by name; only while it is prepared */
    size_t n;
    uint8_t names[HR_XXH3_SIZE], bytes[HR_XXH3_SIZE];
    bool is_built;
    void *built;
};

/* ---- life ---- */

static uint64_t default_timeout(uint64_t timeout_ms) {
    return timeout_ms != 0 ? timeout_ms : DEFAULT_TIMEOUT_MS;
}

static hr_status copy_declared(hr_session *session, const hr_session_options *options,
                               hr_error *err) {
    session->declares = options->adapters != NULL;
    if (!session->declares)
        return HR_OK;
    if (options->n_adapters > MAX_DECLARED)
        return hr_fail(err, HR_ERR_LIMIT, "a session may declare %d adapters, not %zu",
                       MAX_DECLARED, options->n_adapters);
    const hr_memory *memory = &session->shared->memory;
    session->declared = hr_memory_zeroed(memory, options->n_adapters, sizeof(char *));
    if (session->declared == NULL)
        goto no_memory;
    for (size_t i = 0; i < options->n_adapters; i++) {
        const char *name = options->adapters[i];
        HR_TRY(hr_adapter_name_check(name, err));
        size_t size = strlen(name) + 1;
        if (hr_registry_find(&session->shared->registry, name, size - 1) == NULL)
            return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN,
                           "the session declares the adapter '%s', which is not registered; "
                           "register it first",
                           name);
        session->declared[i] = hr_memory_array(memory, size, 1);
        if (session->declared[i] == NULL)
            goto no_memory;
        memcpy(session->declared[i], name, size);
        session->n_declared = i + 1;
    }
    return HR_OK;
no_memory:
    return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an update session");
}

hr_status hr_session_open(hr_receiving *shared, const char *id, const hr_session_options *options,
                          hr_session **out, hr_error *err) {
    hr_session *session = hr_memory_zeroed(&shared->memory, 1, sizeof *session);
    if (session == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an update session");
    session->shared = shared;
    session->state = HR_SESSION_OPEN;
    memcpy(session->id, id, strlen(id) + 1);
    session->sync_base = options->sync_base;
    session->audit = options->audit;
    session->lease_ns = options->lease_ms != 0 ? options->lease_ms * 1000000u : shared->lease_ns;
    session->timeout_ms = default_timeout(options->timeout_ms);
    session->begun_ns = hr_now_ns(&shared->clock);
    hr_stash_init(&session->stash, &shared->memory);
    hr_status status = copy_declared(session, options, err);
    if (status != HR_OK)
        hr_session_free(session);
    else
        *out = session;
    return status;
}

void hr_session_free(hr_session *session) {
    if (session == NULL)
        return;
    hr_memory memory = session->shared->memory;
    for (hr_registered *r = session->shared->registry.first; r != NULL; r = r->next)
        r->tensors = r->bytes = 0;
    hr_stash_destroy(&session->stash);
    while (session->streams != NULL) {
        hr_session_stream *next = session->streams->next;
        hr_memory_free(&memory, session->streams->identities);
        hr_memory_free(&memory, session->streams);
        session->streams = next;
    }
    for (size_t i = 0; i < session->n_declared; i++)
        hr_memory_free(&memory, session->declared[i]);
    hr_memory_free(&memory, session->declared);
    hr_memory_free(&memory, session->parts);
    hr_memory_free(&memory, session->adapters);
    hr_receipt_free(session->receipt);
    hr_receipt_free(session->reply);
    hr_memory_free(&memory, session);
}

bool hr_session_admits(const hr_session *session, const char *name) {
    for (size_t i = 0; i < session->n_declared; i++)
        if (strcmp(session->declared[i], name) == 0)
            return true;
    return !session->declares;
}

void hr_receiving_forget(hr_receiving *shared, hr_registered *registered) {
    hr_registry_take(&shared->registry, registered);
    if (!registered->published)
        shared->sink.forget_adapter(shared->sink.self, registered->registration.name);
    hr_registered_destroy(&shared->memory, registered);
}

void hr_session_roll_back(hr_session *session) {
    const hr_receiver_sink *sink = &session->shared->sink;
    for (size_t i = 0; i < session->n_parts; i++)
        if (session->parts[i].is_built)
            sink->discard_adapter(sink->self, session->parts[i].built);
    session->n_parts = 0;
    if (session->base_begun)
        sink->base_abandon(sink->self);
    session->base_begun = false;
    hr_stash_destroy(&session->stash);
    hr_registered *next;
    for (hr_registered *r = session->shared->registry.first; r != NULL; r = next) {
        next = r->next;
        if (r->pending && hr_session_admits(session, r->registration.name))
            hr_receiving_forget(session->shared, r);
    }
}

/* ---- buckets ---- */

/* A name that waits for this session: requests go on meanwhile, so nothing may stop them. */
static const hr_registered *waiting_name(const hr_session *session) {
    for (const hr_registered *r = session->shared->registry.first; r != NULL; r = r->next)
        if (r->pending && hr_session_admits(session, r->registration.name))
            return r;
    return NULL;
}

static hr_status check_bucket(const hr_session *session, const hr_bucket *bucket, hr_error *err) {
    if (bucket->n == 0 || bucket->tensors == NULL)
        return hr_fail(err, HR_ERR_INVALID, "a bucket without tensors; send at least one");
    if (bucket->n > MAX_BUCKET_TENSORS)
        return hr_fail(err, HR_ERR_LIMIT, "a bucket may have %d tensors, not %zu",
                       MAX_BUCKET_TENSORS, bucket->n);
    if (bucket->adapter != NULL)
        HR_TRY(hr_adapter_name_check(bucket->adapter, err));
    if (bucket->weight_version != NULL)
        HR_TRY(hr_weight_version_check(bucket->weight_version, err));
    const hr_registered *waiting = session->sync_base ? NULL : waiting_name(session);
    if (waiting != NULL &&
        (bucket->flush_cache || bucket->abort_all_requests || bucket->weight_version != NULL))
        return hr_fail(
            err, HR_ERR_INVALID,
            "this session publishes the new adapter '%s' while requests run: its buckets "
            "may not ask for flush_cache, abort_all_requests or weight_version; send "
            "flush_cache false, and the version when it ends",
            waiting->registration.name);
    return HR_OK;
}

static hr_status check_may_come(const hr_session *session, const hr_parcel *parcel, hr_error *err) {
    const hr_registered *last = NULL;
    for (size_t i = 0; i < parcel->n; i++) {
        const hr_stash_entry *e = &parcel->entries[i];
        if (e->adapter == NULL && !session->sync_base)
            return hr_fail(err, HR_ERR_INVALID,
                           "base tensors arrived in a sync_base=False weight-update session "
                           "('%.200s'); begin with sync_base true, or send adapters only",
                           e->name);
        if (e->adapter != last && e->adapter != NULL &&
            !hr_session_admits(session, e->adapter->registration.name))
            return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN,
                           "tensor '%.200s' is of an adapter that this session did not declare",
                           e->name);
        last = e->adapter;
    }
    return HR_OK;
}

static hr_session_stream *find_stream(const hr_session *session, const char *name) {
    for (hr_session_stream *s = session->streams; s != NULL; s = s->next)
        if (strcmp(s->name, name) == 0)
            return s;
    return NULL;
}

/* The bucket's stream, with room for one more identity. */
static hr_status open_stream(hr_session *session, const char *name, hr_session_stream **out,
                             hr_error *err) {
    const hr_memory *memory = &session->shared->memory;
    hr_session_stream *stream = find_stream(session, name);
    if (stream == NULL) {
        size_t size = strnlen(name, MAX_STREAM_NAME + 1) + 1;
        if (size > MAX_STREAM_NAME + 1 || session->n_streams == MAX_STREAMS)
            return hr_fail(err, HR_ERR_LIMIT,
                           "a session may have %d streams with names of at most %d bytes",
                           MAX_STREAMS, MAX_STREAM_NAME);
        stream = hr_memory_array(memory, sizeof *stream + size, 1);
        if (stream == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a stream of buckets");
        *stream = (hr_session_stream){.next = session->streams};
        memcpy(stream->name, name, size);
        session->streams = stream;
        session->n_streams++;
    }
    if (stream->n == stream->cap) {
        uint64_t cap = stream->cap > 0 ? 2 * stream->cap : 16;
        uint8_t(*identities)[HR_XXH3_SIZE] = NULL;
        if (cap <= MAX_STREAM_BUCKETS)
            identities = hr_memory_array(memory, cap, sizeof *identities);
        if (identities == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for bucket %llu of stream '%s'",
                           (unsigned long long)stream->n, name);
        if (stream->n > 0)
            memcpy(identities, stream->identities, stream->n * sizeof *identities);
        hr_memory_free(memory, stream->identities);
        stream->identities = identities;
        stream->cap = cap;
    }
    *out = stream;
    return HR_OK;
}

/* Of a stream: *again when this bucket was taken already, and is the same. */
static hr_status check_index(hr_session *session, const hr_bucket *bucket, hr_parcel *parcel,
                             bool *again, hr_error *err) {
    *again = false;
    const hr_session_stream *stream =
        bucket->stream != NULL ? find_stream(session, bucket->stream) : NULL;
    uint64_t n = stream != NULL ? stream->n : 0;
    if (bucket->stream == NULL || bucket->index == n)
        return HR_OK;
    if (bucket->index > n)
        return hr_fail(err, HR_ERR_INVALID,
                       "bucket %llu of stream '%.64s' came, bucket %llu is next; send that first",
                       (unsigned long long)bucket->index, bucket->stream, (unsigned long long)n);
    uint8_t identity[HR_XXH3_SIZE];
    hr_parcel_digest(parcel);
    hr_parcel_identity(parcel, session->shared->stream, identity);
    if (memcmp(identity, stream->identities[bucket->index], sizeof identity) != 0)
        return hr_fail(err, HR_ERR_DIGEST,
                       "bucket %llu of stream '%.64s' came again with other contents (first tensor "
                       "'%.200s')",
                       (unsigned long long)bucket->index, bucket->stream, parcel->entries[0].name);
    *again = true;
    return HR_OK;
}

/* Base tensors go to the sink, in one call. */
static hr_status write_base(hr_session *session, const hr_bucket *bucket, const hr_parcel *parcel,
                            hr_error *err) {
    hr_receiving *shared = session->shared;
    const hr_receiver_sink *sink = &shared->sink;
    const hr_tensor *tensors = bucket->tensors;
    hr_tensor *some = NULL;
    if (parcel->n_base < parcel->n) {
        some = hr_memory_array(&shared->memory, parcel->n_base, sizeof *some);
        if (some == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu base tensors",
                           parcel->n_base);
        size_t n = 0;
        for (size_t i = 0; i < parcel->n; i++)
            if (parcel->entries[i].adapter == NULL)
                some[n++] = parcel->entries[i].tensor;
        tensors = some;
    }
    hr_status status = HR_OK;
    if (!session->base_begun)
        status = sink->base_begin(sink->self, session->timeout_ms, err);
    if (status == HR_OK) {
        session->base_begun = true;
        status = sink->base_write(sink->self, tensors, parcel->n_base, err);
    }
    hr_memory_free(&shared->memory, some);
    return status;
}

/* Everything that can fail, of a parcel whose names are entered: bytes, digests, base. */
static hr_status take_bytes(hr_session *session, const hr_bucket *bucket, hr_parcel *parcel,
                            hr_session_stream **stream, hr_error *err) {
    hr_receiving *shared = session->shared;
    if (bucket->stream != NULL)
        HR_TRY(open_stream(session, bucket->stream, stream, err));
    bool owned = bucket->release != NULL && parcel->n_base == 0;
    if (owned || parcel->n_base == parcel->n)
        hr_parcel_digest(parcel);
    else
        HR_TRY(hr_parcel_copy(&shared->memory, parcel, shared->stream, err));
    if (parcel->n_base == 0)
        return HR_OK;
    if (session->audit)
        for (size_t i = 0; i < parcel->n; i++) {
            hr_stash_entry *e = &parcel->entries[i];
            if (e->adapter == NULL)
                hr_sha256_hex(e->tensor.bytes > 0 ? e->tensor.data : "", e->tensor.bytes,
                              e->sha256);
        }
    return write_base(session, bucket, parcel, err);
}

static void keep(hr_session *session, const hr_bucket *bucket, hr_parcel *parcel,
                 hr_session_stream *stream, bool *kept) {
    for (size_t i = 0; i < parcel->n; i++)
        if (parcel->entries[i].adapter != NULL) {
            parcel->entries[i].adapter->tensors++;
            parcel->entries[i].adapter->bytes += parcel->entries[i].tensor.bytes;
        }
    hr_parcel_identity(parcel, session->shared->stream, session->identity);
    if (stream != NULL)
        memcpy(stream->identities[stream->n++], session->identity, HR_XXH3_SIZE);
    if (bucket->weight_version != NULL)
        memcpy(session->weight_version, bucket->weight_version, strlen(bucket->weight_version) + 1);
    session->flush_cache |= bucket->flush_cache;
    session->abort_all_requests |= bucket->abort_all_requests;
    *kept = bucket->release != NULL && parcel->n_base == 0;
    if (*kept) {
        parcel->owner = bucket->owner;
        parcel->release = bucket->release;
    }
    hr_stash_link(&session->stash, parcel);
}

hr_status hr_session_take(hr_session *session, const hr_bucket *bucket, bool *kept, hr_error *err) {
    hr_receiving *shared = session->shared;
    hr_stash *stash = &session->stash;
    hr_session_stream *stream = NULL;
    hr_parcel *parcel = NULL;
    *kept = false;
    HR_TRY(check_bucket(session, bucket, err));
    uint64_t room =
        stash->held < shared->max_stash_bytes ? shared->max_stash_bytes - stash->held : 0;
    HR_TRY(hr_parcel_create(&shared->memory, &shared->registry, bucket->tensors, bucket->n,
                            bucket->adapter, room, &parcel, err));
    bool again = false;
    hr_status status = check_may_come(session, parcel, err);
    if (status == HR_OK)
        status = check_index(session, bucket, parcel, &again, err);
    if (status == HR_OK && !again)
        status = hr_stash_enter(stash, parcel, err);
    if (status != HR_OK || again) {
        hr_parcel_destroy(&shared->memory, parcel);
        return status;
    }
    status = take_bytes(session, bucket, parcel, &stream, err);
    if (status != HR_OK) {
        hr_stash_leave(stash, parcel);
        hr_parcel_destroy(&shared->memory, parcel);
        return status;
    }
    keep(session, bucket, parcel, stream, kept);
    return HR_OK;
}

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
            "no tensor came in this session, so there is nothing to publish; abort it if "
            "that was meant");
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
    if (options->manifest == NULL)
        HR_TRY(check_without_manifest(session, err));
    else
        HR_TRY(hr_manifest_check(options->manifest, stash, sorted, err));
    if (options->audit)
        hr_stash_sha256(sorted, stash->n);
    return HR_OK;
}

/* ---- prepare: builds ---- */

static hr_status build_part(hr_session *session, hr_session_part *part, hr_error *err) {
    const hr_receiver_sink *sink = &session->shared->sink;
    const hr_memory *memory = &session->shared->memory;
    hr_tensor *tensors = hr_memory_array(memory, part->n, sizeof *tensors);
    if (tensors == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", part->n);
    for (size_t i = 0; i < part->n; i++)
        tensors[i] = part->entries[i]->tensor;
    hr_status status = sink->build_adapter(sink->self, &part->adapter->registration, tensors,
                                           part->n, &part->built, err);
    part->is_built = status == HR_OK;
    hr_memory_free(memory, tensors);
    return status;
}

static hr_status build_everything(hr_session *session, const hr_end_options *options,
                                  hr_error *err) {
    const hr_receiver_sink *sink = &session->shared->sink;
    if (session->base_begun && session->stash.n_base == 0) {
        sink->base_abandon(sink->self); /* all of its tensors were refused */
        session->base_begun = false;
    }
    if (session->base_begun)
        HR_TRY(sink->base_seal(sink->self, options->complete_base, err));
    for (size_t i = 0; i < session->n_parts; i++)
        HR_TRY(build_part(session, &session->parts[i], err));
    return HR_OK;
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
    session->publish_timeout_ms = default_timeout(options->timeout_ms);
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
    hr_registry_set_pending(&session->shared->registry, r, false);
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
