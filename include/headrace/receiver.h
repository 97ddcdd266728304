/* Receiving weights: update sessions that are applied whole or leave no trace.
 *
 * A receiver holds the state machine of one engine's update sessions: idle, open, prepared; then
 * published or rolled back. Adapter tensors are stashed, base tensors are handed to the sink as
 * they come (to a shadow; nothing live is touched), and nothing changes before everything of the
 * session has been checked and built. What an adapter or a base weight is, and how requests see the
 * change, is the sink's: an engine of another make receives by filling in hr_receiver_sink.
 *
 * Names in a bucket: "{hf_key}" for base, "{adapter}:{hf_key}" for adapters, split at the first
 * colon. Digests: XXH3-128 over the raw bytes of every tensor (canonical, big-endian byte order),
 * always; SHA-256 where a manifest or an audit asks for it.
 *
 * Every function is thread-safe. Calls that change the session run one after the other; a caller
 * waits for the one before at most its timeout (a minute where it has none), and is told whom it
 * waited for (HR_ERR_TIMEOUT). The sink is called by one thread at a time, but for
 * builds_together. */
#ifndef HEADRACE_RECEIVER_H
#define HEADRACE_RECEIVER_H

#include <headrace/status.h>
#include <headrace/tensor.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HR_SESSION_ID_SIZE 65      /* with the NUL */
#define HR_WEIGHT_VERSION_SIZE 257 /* with the NUL */
#define HR_LORA_NAME_SIZE 257      /* with the NUL */

typedef struct hr_receiver hr_receiver;

/* ---- the sink: whose weights these become ---- */

/* An adapter's identity, known before any of its bytes. Strings are the caller's. */
typedef struct hr_registration {
    const char *name;   /* no ':', at most 256 bytes */
    const char *config; /* JSON of an adapter_config.json */
    size_t config_len;
    const char *config_digest; /* 32 hex digits by which the client knows this config, for receipts;
                                  NULL: the XXH3-128 of the config's text */
    bool pinned;
    const char *path; /* of a PEFT directory that holds the same adapter, so that it may be evicted
                         and read again; NULL: the stream is the only copy */
    bool defer_publish;   /* the name must never have been published, and stays unknown to requests
                             until commit */
    bool refuse_existing; /* a name that is published already is HR_ERR_ADAPTER_EXISTS */
    bool displaces; /* set by hr_receiver_apply: over the cap of names the least recently used one
                       gives way when this one is published, whether it can be read again or not */
} hr_registration;

typedef struct hr_published_adapter {
    const char *name;
    void *built; /* of build_adapter; the sink's again when publish succeeds */
    uint64_t id; /* filled by publish: new for every version */
} hr_published_adapter;

/* What goes live in one step: all of it or, when publish fails, nothing. */
typedef struct hr_publication {
    hr_published_adapter *adapters;
    size_t n_adapters;
    bool base;                  /* the sealed base */
    const char *weight_version; /* NULL: unchanged */
    bool flush_cache;
    bool abort_all_requests;
    uint64_t timeout_ms; /* for running requests to end, where the sink must wait for them */
} hr_publication;

struct hr_receipt;

typedef struct hr_receiver_sink {
    void *self;

    /* Checks a registration (config, rank, modules, room for one more name) and keeps room for a
     * new name until it is published or forgotten. Called again for a name that is registered or
     * published: the new config is checked; of what is kept only pinned may change. */
    hr_status (*register_adapter)(void *self, const hr_registration *registration, hr_error *err);
    /* Gives back the room that register_adapter keeps for a name. Harmless for a name without such
     * room: what is served under it stays. */
    void (*forget_adapter)(void *self, const char *name);
    /* Whether a name that a session has published is still served, or can be brought back; one that
     * gave way is as new again. NULL: it is until it is unregistered. */
    bool (*has_adapter)(void *self, const char *name);

    /* Builds what kernels read from the whole adapter, aside from everything live. tensors have
     * names without the adapter's prefix; their bytes are read only here. */
    hr_status (*build_adapter)(void *self, const hr_registration *registration,
                               const hr_tensor *tensors, size_t n, void **built, hr_error *err);
    void (*discard_adapter)(void *self, void *built);
    /* build_adapter may be called by two threads at once, for different adapters. */
    bool builds_together;

    /* A base update: begin, any number of writes (each tensor once), seal when all are in, then
     * publish or abandon. begin may wait for running requests where it must write in place. write
     * refuses unknown names, shapes and dtypes before it touches anything: when it fails nothing of
     * that call was written. base_begin comes with the session's first base tensor. complete: every
     * base weight must have been written. abandon is allowed in every state after begin. */
    hr_status (*base_begin)(void *self, uint64_t timeout_ms, hr_error *err);
    hr_status (*base_write)(void *self, const hr_tensor *tensors, size_t n, hr_error *err);
    hr_status (*base_seal)(void *self, bool complete, hr_error *err);
    void (*base_abandon)(void *self);

    hr_status (*publish)(void *self, hr_publication *publication, hr_error *err);

    /* What became of a session, once it is over; for a log. NULL: nobody is told. */
    void (*published)(void *self, const struct hr_receipt *receipt);
    void (*rolled_back)(void *self, const char *session_id, const hr_error *cause);
} hr_receiver_sink;

/* ---- life ---- */

typedef struct hr_receiver_options {
    const char *instance;     /* names this engine process in receipts; copied */
    const char *base_mode;    /* how base updates are applied, for receipts: "shadow", "in_place" */
    uint64_t lease_ms;        /* a session without a call for so long is rolled back; 0 = 300,000 */
    uint64_t max_stash_bytes; /* adapter bytes held by a session; 0 = 64 GiB */
    uint32_t ranks;           /* of this engine, for receipts; 0 = 1 */
    /* For tests; NULL functions: the monotonic clock, and malloc. Receipts are freed by any thread,
       perhaps after the receiver, with the same functions. */
    uint64_t (*now_ns)(void *clock_self);
    void *clock_self;
    void *(*alloc)(void *alloc_self, size_t bytes);
    void (*free)(void *alloc_self, void *memory);
    void *alloc_self;
} hr_receiver_options;

hr_status hr_receiver_create(const hr_receiver_options *options, const hr_receiver_sink *sink,
                             hr_receiver **out, hr_error *err);
/* Rolls an open session back. No call may be under way. NULL is allowed. */
void hr_receiver_destroy(hr_receiver *receiver);

/* Rolls back a session whose lease has run out; true when it did. Every other call does the same
 * first, so calling this now and then only frees memory sooner. */
bool hr_receiver_expire(hr_receiver *receiver);

/* ---- control plane ---- */

/* Registers an adapter, or gives a registered one a new config: its next stream must bring the
 * whole adapter under that config, and which tensors earlier streams had is forgotten. A published
 * one serves its old version until commit. *pending: the name waits for commit (defer_publish); it
 * may be registered again until a session that may bring it is open, for its trainer may be dead.
 * HR_ERR_BUSY (the open session holds tensors of that very name, or may bring it and it waits),
 * HR_ERR_INVALID, HR_ERR_ADAPTER_CONFIG, HR_ERR_LIMIT ("max-loaded-loras"), HR_ERR_ADAPTER_EXISTS
 * (defer_publish on a name that is published). */
hr_status hr_receiver_register(hr_receiver *receiver, const hr_registration *registration,
                               bool *pending, hr_error *err);

/* The adapter was unloaded: forgets its registration. HR_ERR_BUSY as of register. Unknown names are
 * fine. */
hr_status hr_receiver_unregister(hr_receiver *receiver, const char *name, hr_error *err);

/* Changes the weight version alone. HR_ERR_SESSION while a session is open. The present version
 * again is fine and changes nothing. */
hr_status hr_receiver_set_version(hr_receiver *receiver, const char *weight_version,
                                  bool abort_all_requests, hr_error *err);

/* ---- sessions ---- */

typedef struct hr_session_options {
    const char *session_id;      /* printable, at most 64 bytes; NULL: one is made */
    bool sync_base;              /* false: base tensors are refused, base bytes stay untouched */
    const char *const *adapters; /* declared: each must receive its tensors; others are refused.
                                    NULL: every registered adapter may come */
    size_t n_adapters;
    uint64_t lease_ms;   /* 0: the receiver's */
    uint64_t timeout_ms; /* for a sink that must stop requests first; 0 = 60,000 */
    bool audit; /* also SHA-256 of base tensors as they come, whose bytes are gone at the end:
                   needed for an audit of base tensors, or a manifest with their SHA-256 */
} hr_session_options;

/* Opens a session; *session_id gets its id. The same id again while it is open and empty is the
 * same session (a lost reply). HR_ERR_SESSION ("already open", naming it; or the id was used by one
 * that has ended), HR_ERR_ADAPTER_UNKNOWN (a declared name that is not registered),
 * HR_ERR_INVALID. */
hr_status hr_receiver_begin(hr_receiver *receiver, const hr_session_options *options,
                            char session_id[HR_SESSION_ID_SIZE], hr_error *err);

typedef struct hr_bucket {
    const hr_tensor *tensors;
    size_t n;
    const char *adapter;    /* names without a colon belong to it; NULL: to base */
    const char *session_id; /* NULL: whichever session is open */
    const char *stream;     /* with index: names a sequence of buckets that may be sent again; NULL:
                               a tensor that comes twice is refused */
    uint64_t index; /* from 0 in each stream; a bucket that was taken is acknowledged again */
    const char *weight_version;           /* becomes the session's when it commits; NULL: none */
    bool flush_cache, abort_all_requests; /* when it commits */
    /* Who holds the tensors' bytes: release is called once when they are not needed any more, also
     * when the call fails. NULL: they are copied before the call returns. */
    void *owner;
    void (*release)(void *owner);
} hr_bucket;

/* Takes a bucket whole or not at all. After the reply the receiver does not read memory of a bucket
 * without an owner again. Refusals name the tensor; the session stays open after them, but does not
 * end as if it were whole: the same bucket (stream, index) must come again, or the end brings a
 * manifest, which for base weights covers_base or complete_base must complete.
 * HR_ERR_SESSION (none open, another id, prepared already), HR_ERR_ADAPTER_UNKNOWN (not registered
 * or not declared), HR_ERR_INVALID (a lora_A/lora_B name without adapter, a tensor twice, an empty
 * bucket, an index that is not next; flush_cache, abort_all_requests or weight_version in a session
 * without sync_base for which a deferred name waits), HR_ERR_DIGEST (a bucket came again with other
 * contents), HR_ERR_LIMIT, and what the sink says about base tensors. */
hr_status hr_receiver_bucket(hr_receiver *receiver, const hr_bucket *bucket, hr_error *err);

/* A bucket was refused because of cause before its tensors could be read; of bucket only
 * session_id, stream and index are looked at. The session remembers it as it does its own refusals.
 * Nothing happens when no such session is open. */
void hr_receiver_bucket_unread(hr_receiver *receiver, const hr_bucket *bucket,
                               const hr_error *cause);

/* What must have come. Names as in buckets, with the adapter's prefix. */
typedef struct hr_manifest_entry {
    const char *name;
    const char *sha256; /* 64 hex digits; NULL: not checked */
    const char *xxh3;   /* 32 hex digits; NULL: not checked */
} hr_manifest_entry;

typedef struct hr_manifest {
    const hr_manifest_entry *entries;
    size_t n;
    /* The base tensors listed are all there may be; false: others may have come. */
    bool covers_base;
} hr_manifest;

typedef struct hr_end_options {
    const char *session_id;      /* NULL: whichever session is open */
    const hr_manifest *manifest; /* NULL: none; needed for adapters with defer_publish. Adapters are
                                    always covered by a manifest that there is */
    const char *weight_version;  /* NULL: that of the buckets, if any */
    bool complete_base;          /* every base weight must have come */
    bool flush_cache, abort_all_requests;
    bool audit; /* SHA-256 of every tensor in the receipt; with base tensors the session must
                   have begun with audit */
    uint64_t timeout_ms; /* for running requests, where a base update waits for them; 0 = 60,000 */
} hr_end_options;

typedef enum hr_session_state {
    HR_SESSION_IDLE,
    HR_SESSION_OPEN,
    HR_SESSION_PREPARED,
    HR_SESSION_PUBLISHED,
    HR_SESSION_ROLLED_BACK
} hr_session_state;

/* "idle", "open", ... Static. */
const char *hr_session_state_name(hr_session_state state);

typedef struct hr_receipt_tensor {
    char *name; /* as in the bucket */
    uint64_t bytes;
    uint8_t xxh3[16];
    char sha256[65]; /* "" without audit */
} hr_receipt_tensor;

typedef struct hr_receipt_adapter {
    char name[HR_LORA_NAME_SIZE];
    uint64_t id; /* 0 before it is published */
    uint64_t tensors, bytes;
    uint8_t xxh3[16]; /* over the sorted (name, NUL, digest) of its tensors, names without prefix */
    uint8_t config_digest[16]; /* of the registration that it was built under */
    bool unchanged; /* the same digest as its version before: nothing was learned, or nothing was
                       exported */
} hr_receipt_adapter;

/* What one engine says about one session. */
typedef struct hr_receipt {
    hr_session_state state;
    char session_id[HR_SESSION_ID_SIZE];
    char instance[65];
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* in force after it; "" when unchanged */
    char base_mode[16];                          /* "" when no base tensor came */
    uint32_t ranks;                              /* of the engine, that applied it */
    uint64_t tensors, bytes;
    uint8_t xxh3[16]; /* over the sorted (name, NUL, digest) of all tensors, names as in buckets:
                         does not depend on how they were put into buckets */
    uint64_t base_tensors, base_bytes;
    hr_receipt_adapter *adapters; /* by name */
    size_t n_adapters;
    hr_receipt_tensor *audit; /* by name; NULL without audit */
    size_t n_audit;
    uint64_t receive_ns; /* from begin to prepare */
    uint64_t verify_ns, build_ns, publish_ns;
} hr_receipt;

void hr_receipt_free(hr_receipt *receipt); /* NULL is allowed */

/* Checks and builds everything of the session; nothing live has changed afterwards. A failure rolls
 * the session back, whatever it was ("[LORA-CHECK]" begins what a manifest finds). The same call on
 * a prepared or published session says the same again; with other options it is HR_ERR_SESSION.
 * receipt may be NULL here and below. */
hr_status hr_receiver_prepare(hr_receiver *receiver, const hr_end_options *options,
                              hr_receipt **receipt, hr_error *err);

/* Publishes a prepared session. Of one that is published already it gives the receipt again, so it
 * can be repeated until an answer arrives (the last 64 sessions are remembered). A publish that
 * failed, or timed out, leaves the session prepared: commit again, or abort. HR_ERR_SESSION when it
 * was rolled back or is unknown. */
hr_status hr_receiver_commit(hr_receiver *receiver, const char *session_id, hr_receipt **receipt,
                             hr_error *err);

/* Rolls back; NULL: whichever session is open. Fine when it is rolled back already; HR_ERR_SESSION
 * when it is published or unknown. Names registered with defer_publish are forgotten with it (those
 * it declared, or all). Such names are also forgotten by NULL when no session is open, and when
 * none opens before their lease has run out. */
hr_status hr_receiver_abort(hr_receiver *receiver, const char *session_id, hr_error *err);

/* prepare and commit in one; a failure of either rolls the session back. */
hr_status hr_receiver_end(hr_receiver *receiver, const hr_end_options *options,
                          hr_receipt **receipt, hr_error *err);

/* One bucket as a session of its own: register (when there is a registration), begin, bucket, end.
 * bucket->session_id is the id of this session; the same bucket under it again gives the receipt
 * again. A failure leaves the registration as it was before. With a registration only tensors of
 * that adapter may come (over the cap of names another gives way to it: displaces); without one
 * base tensors and any registered adapters may. HR_ERR_SESSION while another one is open;
 * HR_ERR_INVALID with defer_publish. */
hr_status hr_receiver_apply(hr_receiver *receiver, const hr_registration *registration,
                            const hr_bucket *bucket, const hr_end_options *options,
                            hr_receipt **receipt, hr_error *err);

typedef struct hr_receiver_status {
    hr_session_state state; /* idle, open or prepared */
    char session_id[HR_SESSION_ID_SIZE];
    bool sync_base;
    uint64_t tensors, bytes; /* taken so far */
    uint64_t idle_ms;        /* since the session's last call */
    uint64_t lease_ms;       /* after so long without a call it is rolled back; 0 when idle */
    uint64_t sessions_published, sessions_rolled_back;
    uint32_t registered, pending; /* adapter names */
    char instance[65];            /* of the engine process, as in receipts */
} hr_receiver_status;
/* Never waits. */
void hr_receiver_status_get(hr_receiver *receiver, hr_receiver_status *out);

/* Whether this name waits for its publication, for the message that a request gets. Never waits. */
bool hr_receiver_is_pending(hr_receiver *receiver, const char *name);

#ifdef __cplusplus
}
#endif
#endif
