/* The engine: a model, its adapters and a scheduler that serves many requests in one batch.
 *
 * One scheduler thread owns all request state and is worker 0 of the compute pool. Every function
 * here may be called from any thread unless it says otherwise. Callbacks run on the scheduler
 * thread: they must be short, must not block and must not call back into the engine, except
 * hr_engine_abort. */
#ifndef HEADRACE_ENGINE_H
#define HEADRACE_ENGINE_H

#include <headrace/receiver.h>
#include <headrace/status.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hr_engine hr_engine;

/* As chunked_prefill_size: as many rows as a prompt may have. */
#define HR_WHOLE_PROMPTS UINT32_MAX

typedef struct hr_engine_options {
    const char *model_path;  /* Hugging Face model directory */
    const char *dtype;       /* NULL or "auto" (bfloat16), "bfloat16", "float32" */
    const char *isa;         /* NULL = fastest; "ref", "avx2", "avx512", "avx512bf16", "amx" */
    unsigned threads;        /* compute workers; 0 = min(affinity, cgroup quota) */
    uint32_t context_length; /* 0 = the model's */
    uint32_t max_running_requests; /* 0 = 64; at most 4096 */
    uint32_t max_queued_requests;  /* 0 = 8192; over it hr_engine_submit says HR_ERR_BUSY */
    uint32_t chunked_prefill_size; /* most prompt rows of a step, at most 65536; 0 = 512 */
    uint64_t max_total_tokens;     /* KV positions; 0 = from the memory limit */
    double mem_fraction_static;    /* share of available memory for weights + KV; 0 = 0.8 */
    bool enable_lora;              /* false: every lora name and load is refused */
    uint32_t max_loras_per_batch;  /* distinct adapters (base counts as one) in a batch; 0 = 8 */
    uint32_t max_loaded_loras;     /* 0 = unlimited */
    uint32_t max_lora_rank;        /* 0 = any rank */
    const char *weight_version;    /* NULL = "default" */
    bool disable_prefix_cache;     /* every prompt is computed afresh */
    void (*progress)(void *ctx, uint64_t done_bytes,
                     uint64_t total_bytes); /* while loading; may be NULL */
    void *progress_ctx;
} hr_engine_options;

/* Loads the model and starts the scheduler thread; returns when requests can be served. Refusals
 * leave nothing behind. The caller owns *out. */
hr_status hr_engine_create(const hr_engine_options *options, hr_engine **out, hr_error *err);

/* Stops: refuses new requests (HR_ERR_STOPPING), lets running and queued ones finish for at most
 * drain_ms (not at all while paused, when they cannot), aborts the rest; every request has had its
 * on_finish when this returns. */
void hr_engine_drain(hr_engine *engine, uint64_t drain_ms);

/* Drains with 0 ms if not drained yet, joins the scheduler and frees everything. NULL is allowed.
 */
void hr_engine_destroy(hr_engine *engine);

/* Facts that never change after creation; strings live as long as the engine. */
typedef struct hr_engine_info {
    const char *model_path, *architecture, *model_type;
    const char *dtype;     /* "bfloat16" or "float32" */
    const char *isa;       /* tier in use */
    const char *isa_note;  /* "" or why a faster tier was refused */
    const char *kv_source; /* what set the KV size: "available memory", "cgroup memory limit",
                              "--max-total-tokens" or "--max-running-requests x --context-length"
                              (more is never needed) */
    unsigned threads;
    uint32_t vocab_size, context_length, max_running_requests, chunked_prefill_size;
    uint64_t max_total_tokens, kv_bytes, weight_bytes;
    uint32_t bos_token_id; /* UINT32_MAX = none */
    uint32_t max_loras_per_batch, max_loaded_loras, max_lora_rank;
    bool enable_lora;
    const uint32_t *eos_token_ids;
    size_t n_eos_token_ids;
} hr_engine_info;
const hr_engine_info *hr_engine_info_of(const hr_engine *engine);

/* Counters now. leases is the number of adapter leases that requests hold; at rest it is 0 and
 * kv_pages_free + kv_pages_cached = kv_pages. */
typedef struct hr_engine_stats {
    uint32_t running, queued;
    bool paused;
    uint64_t kv_pages_cached;      /* held by the prefix cache alone: free when needed */
    uint64_t cached_prompt_tokens; /* prompt tokens that were not computed again, ever */
    uint64_t leases, leases_acquired, leases_released;
    uint64_t kv_pages, kv_pages_free;
    uint64_t requests_started, requests_finished, requests_aborted;
    uint64_t prompt_tokens, generated_tokens, steps;
} hr_engine_stats;
void hr_engine_stats_get(hr_engine *engine, hr_engine_stats *out);

/* Current weight version, copied (NUL-terminated, cut at size). */
void hr_engine_weight_version(hr_engine *engine, char *out, size_t size);

/* ---- requests ---- */

typedef struct hr_sampling_params {
    uint32_t max_new_tokens;                   /* 0 = score the prompt only */
    uint32_t min_new_tokens;                   /* eos and stop ids cannot be drawn before */
    float temperature;                         /* 0 (or < 1e-6) = greedy */
    float top_p;                               /* (0, 1] */
    int32_t top_k;                             /* -1 = whole vocabulary, >= 1 */
    float min_p;                               /* [0, 1] */
    float frequency_penalty, presence_penalty; /* [-2, 2], over generated tokens */
    float repetition_penalty;                  /* (0, 2], over prompt and generated tokens */
    const uint32_t *logit_bias_ids;
    const float *logit_bias;
    size_t n_logit_bias;
    const uint32_t *stop_token_ids;
    size_t n_stop_token_ids;
    bool ignore_eos;
    bool has_seed;
    uint64_t seed; /* without a seed one is drawn per request */
} hr_sampling_params;

/* SGLang's defaults: 128 new tokens, temperature 1, top_p 1, top_k -1, the rest off. */
hr_sampling_params hr_sampling_params_default(void);

/* Logprobs of one position. The arrays are valid during the callback only. */
typedef struct hr_position_logprobs {
    uint32_t token;
    bool has_logprob; /* false for the very first prompt position */
    float logprob;    /* log-softmax, natural log */
    uint32_t n_top;   /* descending, ties to the lowest id; 0 when !has_logprob */
    const uint32_t *top_ids;
    const float *top_logprobs;
    uint32_t n_ids; /* token_ids_logprob, in the order asked for */
    const float *ids_logprobs;
} hr_position_logprobs;

typedef enum hr_finish_type {
    HR_FINISH_LENGTH,
    HR_FINISH_STOP_TOKEN, /* matched_token: eos or one of stop_token_ids; it is in the output ids */
    HR_FINISH_STOP_CALLER, /* on_token returned HR_TOKEN_STOP */
    HR_FINISH_ABORT,       /* hr_engine_abort, or drain */
    HR_FINISH_ERROR        /* status and message say why (for instance logits were not finite) */
} hr_finish_type;

/* Output tokens [start, end) were made under this weight version. */
typedef struct hr_version_span {
    const char *version; /* valid as long as the struct that holds the span */
    uint32_t start, end;
} hr_version_span;

typedef struct hr_finish {
    hr_finish_type type;
    uint32_t matched_token;
    hr_status status;    /* HR_FINISH_ERROR and HR_FINISH_ABORT */
    const char *message; /* valid during the callback; "" when there is nothing to say */
    uint32_t prompt_tokens, completion_tokens, cached_tokens, retractions;
    uint64_t adapter_id;          /* of the version that served it; 0 = base */
    const char *adapter_version;  /* the weight version that its publication named; NULL: none, or
                                     base; valid during the callback */
    const hr_version_span *spans; /* weight versions over the output tokens, contiguous, from 0 */
    size_t n_spans;
    const char *weight_version;                /* valid during the callback */
    uint64_t queue_ns, first_token_ns, e2e_ns; /* since submit; first_token_ns 0 when none */
} hr_finish;

typedef enum hr_token_verdict { HR_TOKEN_CONTINUE, HR_TOKEN_STOP } hr_token_verdict;

typedef struct hr_request_params {
    const char *rid;           /* copied; must not be live already */
    const uint32_t *input_ids; /* copied; at least 1, each < vocab_size */
    size_t n_input_ids;
    hr_sampling_params sampling; /* arrays are copied */
    const char *lora_name;       /* NULL or "" = base; resolved and leased inside submit */
    bool return_logprob;
    int64_t logprob_start_len;         /* -1 = output tokens only; 0..n_input_ids */
    uint32_t top_logprobs_num;         /* <= vocab_size */
    const uint32_t *token_ids_logprob; /* copied */
    size_t n_token_ids_logprob;

    void *ctx;
    /* Prompt positions logprob_start_len .. n_input_ids-1 in order, some per call. NULL when not
     * wanted. */
    void (*on_prompt_logprobs)(void *ctx, uint32_t first, uint32_t n,
                               const hr_position_logprobs *positions);
    /* One generated token. The logprob part is filled when return_logprob. */
    hr_token_verdict (*on_token)(void *ctx, const hr_position_logprobs *token);
    /* Exactly once per accepted request, last; ctx is not touched afterwards. */
    void (*on_finish)(void *ctx, const hr_finish *finish);
} hr_request_params;

/* Validates, takes the adapter's lease and queues. On failure no callback is ever called. Refusals:
 * HR_ERR_INVALID (the message names the field), HR_ERR_ADAPTER_UNKNOWN ("not loaded" and "never
 * been loaded" stand in the text), HR_ERR_BUSY (queue full), HR_ERR_STOPPING. n_input_ids +
 * max_new_tokens may pass the context length, or what the KV cache holds: generation then ends with
 * HR_FINISH_LENGTH there; a prompt that leaves no room is refused. */
hr_status hr_engine_submit(hr_engine *engine, const hr_request_params *params, hr_error *err);

/* Validates only (also the adapter's presence), so that a batch is refused as a whole before any
 * item runs. */
hr_status hr_engine_check(hr_engine *engine, const hr_request_params *params, hr_error *err);

/* Aborts the request with exactly this rid, in whatever state; false when there is none. Its
 * on_finish comes later, on the scheduler thread. */
bool hr_engine_abort(hr_engine *engine, const char *rid);
void hr_engine_abort_all(hr_engine *engine);

/* ---- control ---- */

typedef enum hr_pause_mode {
    HR_PAUSE_ABORT,   /* every request is aborted */
    HR_PAUSE_RETRACT, /* running requests go back to the queue; their KV is recomputed later */
    HR_PAUSE_IN_PLACE /* frozen with their KV */
} hr_pause_mode;

/* Stops stepping at the next step boundary and returns when it stands (ABORT: when no request is
 * left). Requests submitted while paused queue up. Idempotent, also on an idle engine; a second
 * pause of another mode does what that mode does to what is still running. HR_ERR_TIMEOUT when the
 * boundary was not reached in timeout_ms (the pause stays asked for), HR_ERR_STOPPING. */
hr_status hr_engine_pause(hr_engine *engine, hr_pause_mode mode, uint64_t timeout_ms,
                          hr_error *err);

/* Goes on; nothing happens when not paused. */
void hr_engine_continue(hr_engine *engine);

/* Empties the prefix cache. HR_ERR_BUSY when requests are running or waiting and still are after
 * timeout_ms; while paused in RETRACT mode waiting requests hold no KV and do not hinder it. */
hr_status hr_engine_flush_cache(hr_engine *engine, uint64_t timeout_ms, hr_error *err);

/* ---- adapters ---- */

/* Reads, checks and packs the PEFT directory on the calling thread, then publishes it under name.
 * The new adapter has a fresh id: no cache entry of an older one with that name is ever used for
 * it. Refusals: HR_ERR_ADAPTER_EXISTS ("already loaded"), HR_ERR_ADAPTER_CONFIG / _INCOMPATIBLE
 * ("incompatible"), HR_ERR_INVALID (name empty, over 256 bytes, or with ':'), HR_ERR_UNSUPPORTED
 * ("LoRA is not enabled"), HR_ERR_LIMIT. At max_loaded_loras the least recently used unpinned
 * adapter that was read from a path gives way; one that requests use counts as used now. */
hr_status hr_engine_load_adapter(hr_engine *engine, const char *name, const char *path, bool pinned,
                                 hr_error *err);

/* The name is gone at once for new requests; running ones keep their version to the end; its memory
 * goes with the last lease. Requests that wait for it end: refused when they never ran, aborted
 * when they were paused by retraction. Never waits for requests. The path of an evicted adapter is
 * forgotten, and so is a registration that no session has published. HR_ERR_ADAPTER_UNKNOWN: "LoRA
 * with name X does not exist"; HR_ERR_BUSY: an open session streams it, or may bring it and its
 * publication is deferred. */
hr_status hr_engine_unload_adapter(hr_engine *engine, const char *name, hr_error *err);

/* ---- updates from a trainer ---- */

/* The engine's receiver: register, begin, bucket, end, as headrace/receiver.h says. Lives as long
 * as the engine. How requests see a commit:
 *   - adapter: a running request keeps its version to the end; paused in place it goes on with the
 * new version and its kept KV (which never enters the prefix cache); paused by retraction, or
 *     waiting, it is computed with the new version.
 *   - base: the commit waits for running requests (timeout_ms), unless paused. */
hr_receiver *hr_engine_receiver(hr_engine *engine);

/* Replaces base weights by those of a Hugging Face directory: one session. */
typedef struct hr_disk_update {
    const char *model_path;
    const char *weight_version; /* NULL: unchanged */
    bool flush_cache, abort_all_requests;
    uint64_t timeout_ms;
} hr_disk_update;
hr_status hr_engine_update_from_disk(hr_engine *engine, const hr_disk_update *update,
                                     hr_receipt **receipt, hr_error *err);

/* Gives memory back while the engine is idle or paused, and takes it again. Requests wait
 * meanwhile. Weights: their contents are gone; after resume new requests are refused
 * (HR_ERR_UNSERVABLE) until every base weight has come again, in one update or in several, and
 * those that wait end so when steps would run, so not while paused. KV cache: emptied. HR_ERR_BUSY
 * while requests run, frozen ones too. Both are idempotent. */
typedef enum hr_memory_kind { HR_MEMORY_WEIGHTS = 1, HR_MEMORY_KV_CACHE = 2 } hr_memory_kind;
hr_status hr_engine_release_memory(hr_engine *engine, unsigned kinds, hr_error *err);
void hr_engine_resume_memory(hr_engine *engine, unsigned kinds);

/* "shadow" or "in_place": how base updates are applied here. Static. */
const char *hr_engine_base_mode(const hr_engine *engine);

/* As model/base_update.h: values of a weight, digests, and the weights checker. */
hr_status hr_engine_weight_values(hr_engine *engine, const char *name, size_t max_rows, float **out,
                                  size_t *rows, size_t *columns, bool *is_vector, hr_error *err);
typedef void (*hr_digest_fn)(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                             uint32_t ndim, const uint8_t xxh3[16]);
/* adapter NULL: the base weights; otherwise the adapter's pairs. HR_ERR_ADAPTER_UNKNOWN. */
hr_status hr_engine_weight_digests(hr_engine *engine, const char *adapter, hr_digest_fn fn,
                                   void *ctx, hr_error *err);
hr_status hr_engine_check_snapshot(hr_engine *engine, hr_error *err);
hr_status hr_engine_check_reset(hr_engine *engine, hr_error *err);
/* HR_ERR_DIGEST, naming the weight and its max_abs_err, when the weights differ from the snapshot.
 */
hr_status hr_engine_check_compare(hr_engine *engine, hr_error *err);

typedef enum hr_adapter_state {
    HR_ADAPTER_LOADED,
    HR_ADAPTER_EVICTED, /* gave way at max_loaded_loras; its path is known: hr_engine_ensure_adapter
                           brings it back */
    HR_ADAPTER_UNKNOWN  /* never loaded, unloaded by name, or gave way and had no path */
} hr_adapter_state;
hr_adapter_state hr_engine_adapter_state(hr_engine *engine, const char *name);

/* Loads an evicted adapter again from its path, under a fresh id; nothing to do when it is loaded.
 * Concurrent calls for one name load once; the others wait, at most two minutes (HR_ERR_TIMEOUT).
 * Reads files on the calling thread. Between this and hr_engine_submit the adapter may have given
 * way again. HR_ERR_ADAPTER_UNKNOWN; a failed load says "Failed to implicitly load LoRA adapter
 * NAME: why". */
hr_status hr_engine_ensure_adapter(hr_engine *engine, const char *name, hr_error *err);

typedef struct hr_adapter_info {
    char name[257];
    char path[4096]; /* "__stream__": the weights came over the wire alone */
    uint64_t id;     /* new for every load */
    bool pinned;
    uint32_t rank; /* largest over its modules */
    uint64_t bytes;
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* that its publication named; "": none */
} hr_adapter_info;
/* Snapshot in load order; *out is freed with free(). */
hr_status hr_engine_list_adapters(hr_engine *engine, hr_adapter_info **out, size_t *n,
                                  hr_error *err);

#ifdef __cplusplus
}
#endif
#endif
