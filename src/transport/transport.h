/* How weights reach engines: one table of what a transport carries and one call that performs a
 * stage of a push on several engines at the same time. Publishing drives this table and knows no
 * wire form; a transport knows no sequence. */
#ifndef HR_TRANSPORT_TRANSPORT_H
#define HR_TRANSPORT_TRANSPORT_H

#include "transport/engine_receipt.h"
#include "transport/wire_bucket.h"

#include <headrace/publisher.h>

typedef enum hr_stage {
    HR_STAGE_PAUSE,
    HR_STAGE_FLUSH,
    HR_STAGE_REGISTER,
    HR_STAGE_BEGIN,
    HR_STAGE_BUCKET,
    HR_STAGE_PREPARE,
    HR_STAGE_COMMIT,
    HR_STAGE_ABORT,
    HR_STAGE_CONTINUE,
    HR_STAGE_COUNT
} hr_stage;

/* "pause", "flush", ... Static. */
const char *hr_stage_name(hr_stage stage);

typedef struct hr_manifest_digest {
    const char *name; /* as on the wire */
    uint8_t xxh3[HR_XXH3_SIZE];
    char sha256[HR_SHA256_HEX]; /* "" unless the transport wants it */
} hr_manifest_digest;

/* A stage, the same for all engines. Every stage may be repeated after its answer was lost. */
typedef struct hr_stage_request {
    hr_stage stage;
    const char *session_id;
    hr_push_pause pause; /* PAUSE */
    /* REGISTER: at the same time; the first that fails in this order is the answer, the others may
     * be registered. */
    const hr_push_adapter *registrations;
    size_t n_registrations;
    const hr_push_adapter *adapters; /* BEGIN, COMMIT, and BUCKET where adapters go whole */
    size_t n_adapters;
    bool sync_base, complete_base;
    uint64_t lease_ms;
    hr_wire_bucket *bucket; /* BUCKET */
    const char *stream;
    uint64_t index;
    /* BUCKET: the one that will follow, NULL when there is none; NULL: not known. A transport may
     * ask once the bytes of this one have left, and let those of that one follow, short of their
     * end: an engine has all of a bucket only after it answered the one before. What is asked for
     * must stay until its attempt, or another stage's. */
    hr_wire_bucket *(*ahead)(void *ctx);
    void *ahead_ctx;
    const hr_manifest_digest *manifest; /* PREPARE, COMMIT; sorted by name */
    size_t n_manifest;
    const char *weight_version; /* PREPARE, COMMIT; NULL: unchanged */
    bool flush_cache, audit;
    uint64_t requests_ms; /* BEGIN, PREPARE: how long the engine may wait for running requests, then
                             and later in the session */
    uint64_t timeout_ms;  /* for this attempt */
} hr_stage_request;

typedef struct hr_stage_answer {
    hr_status status;
    bool lost; /* no answer came: the engine may have done it or not */
    hr_error err;
    bool unservable; /* the engine said that its base weights are incomplete */
    bool untouched;  /* BUCKET, where engines publish what comes: refused before anything changed */
    hr_engine_receipt receipt; /* of stages that answer with one; the reader's to clear */
    bool has_receipt;
} hr_stage_answer;

typedef struct hr_transport_traits {
    const char *name;
    bool carries_base, carries_adapters;
    bool sessions;       /* begin, buckets, end: adapters of a push are published together */
    bool atomic;         /* prepare on all engines before commit on any */
    bool base_rollback;  /* a session that fails leaves base weights as they were */
    bool whole_adapters; /* a bucket must be one whole adapter, or base tensors alone */
    bool needs_sha256;
    bool register_once; /* registering a name again empties what is served under it */
    bool flushes;       /* commit flushes the cache where asked; else FLUSH does */
} hr_transport_traits;

typedef struct hr_transport {
    const hr_transport_traits *traits;
    void *self;
    /* One attempt on the engines listed (indices into the publisher's list), all at the same time;
     * answers[i] is that of engines[i]. */
    void (*attempt)(void *self, const hr_stage_request *request, const uint32_t *engines, size_t n,
                    hr_stage_answer *answers);
    void (*close)(void *self); /* frees self */
} hr_transport;

#endif
