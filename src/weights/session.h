/* One update session: takes buckets, checks and builds everything, then is published or rolled
 * back.
 *
 * A session knows nothing of turns, leases and repeated calls; those are the receiver's. One thread
 * at a time uses it. */
#ifndef HR_WEIGHTS_SESSION_H
#define HR_WEIGHTS_SESSION_H

#include "base/clock.h"
#include "weights/doubt.h"
#include "weights/stash.h"

/* What all sessions of a receiver share. */
typedef struct hr_receiving {
    hr_memory memory;
    hr_clock clock;
    hr_receiver_sink sink;
    hr_registry registry;
    hr_xxh3_stream *stream;
    char instance[65], base_mode[16];
    uint32_t ranks;
    uint64_t lease_ns, max_stash_bytes;
} hr_receiving;

typedef struct hr_session_stream hr_session_stream;

/* The tensors of one adapter, and what is made of them. */
typedef struct hr_session_part {
    hr_registered *adapter;
    hr_stash_entry *const *entries; /* by name; only while it is prepared */
    size_t n;
    uint8_t names[HR_XXH3_SIZE], bytes[HR_XXH3_SIZE];
    bool is_built;
    void *built;
} hr_session_part;

typedef struct hr_session {
    hr_receiving *shared;
    char id[HR_SESSION_ID_SIZE];
    hr_session_state state; /* open or prepared */
    bool sync_base, audit;
    bool declares; /* only names in declared may come, and all of them must */
    char **declared;
    size_t n_declared;
    uint64_t lease_ns, timeout_ms, begun_ns;

    hr_stash stash;
    hr_session_stream *streams;
    uint32_t n_streams;
    uint8_t identity[HR_XXH3_SIZE]; /* of the last bucket */
    char weight_version[HR_WEIGHT_VERSION_SIZE];
    bool flush_cache, abort_all_requests;
    bool base_begun;
    hr_doubt doubt;
    bool is_named; /* its buckets name it, so one that names none is somebody else's */

    /* from prepare on */
    hr_session_part *parts; /* one for each adapter, by name */
    size_t n_parts;
    hr_published_adapter *adapters; /* of the publication */
    uint64_t publish_timeout_ms;
    hr_receipt *receipt, *reply;       /* the one kept, and the one for who commits */
    uint8_t fingerprint[HR_XXH3_SIZE]; /* of the options of prepare */
} hr_session;

/* Options' timeouts are 0 where nobody chose one. */
static inline uint64_t hr_session_timeout(uint64_t timeout_ms) {
    return timeout_ms != 0 ? timeout_ms : 60000;
}

/* id is checked already. HR_ERR_ADAPTER_UNKNOWN (a declared name that is not registered),
 * HR_ERR_INVALID, HR_ERR_NO_MEMORY. */
hr_status hr_session_open(hr_receiving *shared, const char *id, const hr_session_options *options,
                          hr_session **out, hr_error *err);

/* As hr_receiver_bucket; the session is open. *kept: the owner's memory is held until the session
 * ends or its adapters are built; otherwise the caller releases it. */
hr_status hr_session_take(hr_session *session, const hr_bucket *bucket, bool *kept, hr_error *err);

/* A bucket was refused, here or before its tensors could be read. */
void hr_session_note_refusal(hr_session *session, const hr_bucket *bucket, const char *cause);

/* Checks all, then builds all; the session is prepared then. After a failure only roll_back may
 * follow. */
hr_status hr_session_prepare(hr_session *session, const hr_end_options *options, hr_error *err);

/* Has the sink build every adapter of the session, each from its tensors. Of several that fail the
 * first by name is told. */
hr_status hr_session_build_adapters(hr_session *session, hr_error *err);

/* Of a prepared session; after a failure it is as it was and may be published again, or rolled
 * back. On success receipt and reply say so, and free is what is left to do. */
hr_status hr_session_publish(hr_session *session, hr_error *err);

/* Undoes everything: discards what was built, abandons the base, forgets the names that waited for
 * it. hr_session_free must follow. */
void hr_session_roll_back(hr_session *session);
void hr_session_free(hr_session *session); /* NULL is allowed */

/* Whether this session decides about the name: it may come here. */
bool hr_session_admits(const hr_session *session, const char *name);

/* Takes the name out of the registry, and gives its room back if it has one. */
void hr_receiving_forget(hr_receiving *shared, hr_registered *registered);

/* One digest of everything that end options ask for. */
void hr_end_fingerprint(const hr_end_options *options, hr_xxh3_stream *stream,
                        uint8_t out[HR_XXH3_SIZE]);

#endif
