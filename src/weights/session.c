/* A session from begin to prepare: what it declares, and buckets. */
#include "weights/session.h"

#include "weights/names.h"

#include <stdlib.h>
#include <string.h>

/* Bounds of what one session may ask for, far above any use. */
enum {
    MAX_BUCKET_TENSORS = 1 << 20,
    MAX_DECLARED = 1 << 16,
    MAX_STREAMS = 1024,
    MAX_STREAM_BUCKETS = 1 << 20,
    MAX_STREAM_NAME = 256
};

/* A sequence of buckets that may be sent again. */
struct hr_session_stream {
    hr_session_stream *next;
    uint64_t n, cap;
    uint8_t (*identities)[HR_XXH3_SIZE]; /* of the buckets taken */
    char name[];
};

/* ---- life ---- */

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
    session->timeout_ms = hr_session_timeout(options->timeout_ms);
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
    session->is_named |= bucket->session_id != NULL;
    hr_doubt_settle(&session->doubt, bucket);
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

void hr_session_note_refusal(hr_session *session, const hr_bucket *bucket, const char *cause) {
    if (bucket->session_id != NULL || !session->is_named)
        hr_doubt_raise(&session->doubt, bucket, cause);
}
