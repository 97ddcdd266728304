/* Publishing weights: one verified stream from a trainer to every engine.
 *
 * A publisher pulls tensors from a source, packs them into buckets, sends each bucket to all
 * engines at the same time and publishes the whole of it everywhere or nowhere: register, begin,
 * buckets, prepare on all engines, then commit on all engines. Nothing that an engine serves
 * changes before commit, which is tried until its deadline.
 *
 * Bytes are sent from the memory they lie in. Their digests (XXH3-128 of each tensor) are computed
 * as they leave and compared by every engine. Units of at most two buckets are held at a time, and
 * the one that did not fit: a bucket is collected while engines work on the one before.
 *
 * Several trainer processes that each hold a part (pipeline stages, expert shards) publish as one
 * with a group: each calls hr_publisher_push with what it has, and all succeed or all fail with the
 * same first cause. */
#ifndef HEADRACE_PUBLISHER_H
#define HEADRACE_PUBLISHER_H

#include <headrace/status.h>
#include <headrace/tensor.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hr_publisher hr_publisher;

/* ---- what is published ---- */

/* Tensors that stay together: a bucket holds all of a unit or nothing of it. Names are those of the
 * checkpoint or of PEFT ("base_model.model....lora_A.weight"), without the adapter before them. */
typedef struct hr_unit {
    const hr_tensor *tensors;
    size_t n;
    const char *adapter; /* one of the push; NULL: base weights */
    void *owner;
    /* Called once, when nothing of the unit is needed any more (array, names and bytes must stay as
     * they are until then), whether the push succeeds or not, on the thread that pushes. May be
     * NULL. */
    void (*release)(void *owner);
} hr_unit;

/* Where units come from. next fills *unit; n = 0 is the end. It is called on the thread that
 * pushes, at most once after each unit; after a failure or the end not again. */
typedef struct hr_unit_source {
    void *self;
    hr_status (*next)(void *self, hr_unit *unit, hr_error *err);
} hr_unit_source;

typedef struct hr_push_adapter {
    const char *name;   /* 1 to 256 bytes, no ':' */
    const char *config; /* JSON of an adapter_config.json */
    size_t config_len;
    bool pinned;
} hr_push_adapter;

typedef struct hr_push {
    const hr_push_adapter *adapters; /* each must get tensors from the source (of some rank) */
    size_t n_adapters;
    bool sync_base;             /* base tensors come; false: they are refused */
    bool complete_base;         /* every base weight comes: engines refuse a missing one */
    const char *weight_version; /* what engines say from commit on; NULL: unchanged */
    const char *session_id;     /* printable, 1 to 64 bytes, new for each push; NULL: one is made */
    uint64_t total_bytes;       /* for progress; 0 = not known */
    bool unchanged; /* nothing changed here since the last push: when all ranks say so (a lone
                       publisher is all ranks) nothing is sent and the receipt says skipped */
    hr_unit_source source;
} hr_push;

/* ---- several trainer processes ---- */

/* A collective among the processes that publish as one; all have the same engines and options. */
typedef struct hr_group {
    void *self;
    uint32_t rank, size; /* rank 0 drives sessions; all ranks send what they hold */
    /* Gives every rank what every rank has: each is called once per rank, in rank order, on this
     * thread, with bytes that are valid during that call. n may differ between ranks. Must end in
     * bounded time on every rank, also when one is gone (HR_ERR_PEER or HR_ERR_TIMEOUT, naming the
     * rank). The bound must be eight times timeout_ms or more of the publisher: ranks wait here
     * while rank 0 speaks to the engines, a few calls at a time, however many adapters there are.
     * Called from the thread that pushes. */
    hr_status (*allgather)(void *self, const void *mine, size_t n,
                           void (*each)(void *ctx, uint32_t rank, const void *bytes, size_t n),
                           void *ctx, hr_error *err);
} hr_group;

/* ---- options ---- */

/* What happens to running requests around an update of base weights; adapter-only pushes never
 * pause. Engines go on afterwards, also when the push failed, except where their base weights are
 * half written; the message then says that they stay paused, and what to do. */
typedef enum hr_push_pause {
    HR_PUSH_PAUSE_NONE,     /* engines wait for running requests to end before they commit */
    HR_PUSH_PAUSE_IN_PLACE, /* frozen, then continued on the new weights with the KV they have */
    HR_PUSH_PAUSE_RETRACT,  /* back to the queue, recomputed with the new weights */
    HR_PUSH_PAUSE_ABORT     /* aborted */
} hr_push_pause;

typedef struct hr_push_progress {
    uint64_t bytes;       /* that have left this process, to each engine; tensors only */
    uint64_t total_bytes; /* 0 = not known */
    double rate;          /* bytes per second since the first byte */
    const char *stage;    /* "connect", "pause", "flush", "register", "begin", "stream", "prepare",
                             "commit", "continue": as receipts and messages call them; static */
} hr_push_progress;

typedef struct hr_publisher_options {
    const char *const *engines; /* "http://host:port"; at least 1, each once; copied */
    size_t n_engines;
    const char *api_key; /* NULL: none; copied */
    /* "safetensors": buckets as safetensors images, digests, prepare and commit (Headrace engines).
     * "sglang": SGLang with update sessions: flattened buckets inside JSON; adapters are all or
     * nothing by a SHA-256 manifest, base tensors are written as they come.
     * "sglang-load": older SGLang: each adapter whole in one load call, base bucket by bucket; not
     * atomic, not over several adapters nor engines. In groups adapters are gathered on rank 0,
     * which holds them all before they leave.
     * NULL or "auto": the first of these that every engine speaks, asked at the first push. */
    const char *transport;
    uint64_t bucket_bytes; /* 0 = 512 MiB. A bucket leaves before a unit would bring it to this many
                              bytes; a larger unit goes alone. In a group, and over "sglang-load",
                              that is all; a lone publisher's buckets leave sooner: before a unit
                              would bring them over 4 MiB, or an eighth of what has left when that
                              is more. 2,048 tensors end a bucket too. Never changes what is
                              published */
    uint64_t timeout_ms;   /* for one call to all engines, retries included; 0 = 60,000. While an
                              engine has the session of another trainer open, begin waits for its
                              end: a quarter longer than this. Engines wait for running requests an
                              eighth less, so that their refusal still arrives */
    uint64_t lease_ms;     /* after which engines drop a session that went silent; 0 = a little more
                              than timeout_ms, at least 10,000 */
    bool audit;            /* SHA-256 of every tensor in the engines' receipts */
    hr_push_pause pause;
    const hr_group *group; /* NULL: this process alone; used as long as the publisher lives */
    /* Called on the pushing thread now and then while bytes leave and at each stage. false cancels
     * the push (HR_ERR_CANCELLED) as long as nothing is committed. May be NULL. */
    bool (*progress)(void *ctx, const hr_push_progress *progress);
    void *progress_ctx;
} hr_publisher_options;

/* Checks the options; speaks to no engine. HR_ERR_INVALID (no engine, one twice, not a URL, unknown
 * transport), HR_ERR_UNSUPPORTED, HR_ERR_NO_MEMORY. *out is the caller's. */
hr_status hr_publisher_create(const hr_publisher_options *options, hr_publisher **out,
                              hr_error *err);

/* No call may be under way. NULL is allowed. */
void hr_publisher_destroy(hr_publisher *publisher);

/* ---- receipts ---- */

/* What one engine did. */
typedef struct hr_push_engine {
    const char *url;
    const char *state;          /* "idle", "open", "prepared", "published", "rolled_back", "unknown"
                                   when it did not answer; static */
    const char *instance;       /* names the engine process; "" when it does not say */
    const char *weight_version; /* in force after the push; "" when unchanged or not said */
    const char *base_mode;      /* "" when no base tensor came or not said */
    uint64_t ranks, tensors, bytes; /* as the engine counted; 0 when it does not say */
    bool has_xxh3;
    uint8_t xxh3[16];
    uint64_t receive_ns, verify_ns, build_ns, publish_ns; /* of the engine */
    uint64_t retries;                                     /* calls that had to be made again */
    const char *error;    /* what it last refused or why it cannot be reached; "" */
    const char *received; /* JSON of the receipt as it came; "" without one */
} hr_push_engine;

typedef struct hr_push_receipt {
    const char *session_id;
    const char *transport;      /* what was used */
    const char *weight_version; /* "" when unchanged */
    bool skipped;               /* all ranks were unchanged: nothing was sent */
    bool commit_begun;    /* engines may serve the new weights. A failed push gives no receipt: its
                             report (hr_publisher_report) says this of it, and on other ranks than 0
                             that rank 0 may have begun it */
    bool atomic;          /* all engines prepared before the first committed; false for transports
                             without it */
    uint32_t rank, ranks; /* of the group; 0 of 1 without one */
    uint64_t tensors, bytes; /* of all ranks, replicas counted once; 0 tensors: not known, neither
                                are bytes and xxh3: nothing was sent (resume, skipped) */
    uint64_t sent_tensors, sent_bytes, buckets; /* by this process, to each engine */
    uint8_t xxh3[16]; /* computed here: over the sorted (name, NUL, digest) of all tensors, names
                         with their adapter, as an engine's receipt has it */
    uint64_t pause_ns, register_ns, begin_ns, stream_ns, prepare_ns, commit_ns, total_ns;
    const hr_push_engine *engines; /* as in the options; in groups filled on rank 0 */
    size_t n_engines;
} hr_push_receipt;

/* All of it as one JSON object; the text lives as long as the receipt. It also says where the new
 * weights are served: "published" is "all", "some" (the others do not, or may not), "none" or
 * "unknown" (some may), null on ranks other than 0; each engine "serves" "new", "old" (what it
 * served before) or "unknown". What a call did not come to, or does not know (a resume: tensors,
 * bytes, xxh3), is null. */
const char *hr_push_receipt_json(const hr_push_receipt *receipt);
void hr_push_receipt_free(hr_push_receipt *receipt); /* NULL is allowed */

/* ---- calls ---- */

/* Publishes. Returns when every engine serves the new weights and every unit has been released; a
 * source that failed, or was not read to its end, has its units released too. *receipt is the
 * caller's; NULL: not wanted. One call at a time on a publisher: a second one is HR_ERR_BUSY at
 * once.
 *
 * A failure before commit leaves every engine as it was (session aborted on all; transports without
 * rollback say what they left). It names the engine and the stage of the first cause:
 *   HR_ERR_INVALID    a name with ':', a lora_A/lora_B name without adapter, a base name with
 *                     ".base_layer.", an undeclared adapter, a declared one without tensors, no
 *                     base tensor with sync_base, a tensor twice, ranks that push different lists
 *   HR_ERR_DIGEST     replicas differ between ranks (tensor and ranks are named), or an engine
 *                     received other bytes
 *   HR_ERR_PEER, HR_ERR_TIMEOUT   an engine cannot be reached or does not answer
 *   HR_ERR_CANCELLED  by progress
 *   others            as the engine refused it, or as the source or the group failed
 * A failure of commit (HR_ERR_PEER, HR_ERR_TIMEOUT) says which engines have committed; the others
 * stay prepared until the lease runs out: bring them there with hr_publisher_resume before that.
 * HR_ERR_TIMEOUT of an engine whose requests still ran has changed nothing on it. *receipt is set
 * only on success; what each engine said, and serves, is in hr_publisher_report. */
hr_status hr_publisher_push(hr_publisher *publisher, const hr_push *push, hr_push_receipt **receipt,
                            hr_error *err);

/* Finishes a push whose commit was interrupted: engines that are prepared commit, engines that have
 * committed say so again. HR_ERR_SESSION when an engine has rolled back or does not know the
 * session, because it has restarted or the lease ran out (the message names it: push the same
 * weights again as a new session), or when it is still open, not prepared. weight_version (NULL:
 * not checked) is compared with what engines say after it. With a pause mode engines are told to go
 * on, in case one was away when the push did. In groups rank 0 calls it alone. */
hr_status hr_publisher_resume(hr_publisher *publisher, const char *session_id,
                              const char *weight_version, hr_push_receipt **receipt, hr_error *err);

/* The receipt of the last push or resume, as JSON, whether it succeeded or failed (then with
 * "error"): what each engine said last. "{}" before the first. Valid until the next call; not
 * during one. */
const char *hr_publisher_report(const hr_publisher *publisher);

#ifdef __cplusplus
}
#endif
#endif
