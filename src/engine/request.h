/* One request: what was asked (copied), what it holds, and how far it is.
 *
 * Made and checked on the submitting thread; from the moment it is handed to the scheduler only the
 * scheduler thread touches it, except for ending, which any thread may set.
 *
 * ids is the whole sequence: the prompt, then what was generated. A retracted request keeps it and
 * is computed again from where the prefix cache ends; next_prompt_pos and n_ids remember what was
 * delivered, so nothing is delivered twice. */
#ifndef HR_ENGINE_REQUEST_H
#define HR_ENGINE_REQUEST_H

#include "base/alloc.h"
#include "base/error.h"
#include "engine/sampler.h"
#include "engine/version_label.h"
#include "model/view.h"
#include "weights/adapter_store.h"

#include <headrace/engine.h>
#include <stdatomic.h>

/* What every request of an engine is checked against. */
typedef struct hr_request_limits {
    uint32_t vocab_size;
    uint32_t context_length;
    uint32_t kv_tokens;            /* positions the whole cache holds */
    uint32_t chunked_prefill_size; /* most prompt rows of a step */
    const uint32_t *eos_ids;       /* lives as long as the engine */
    size_t n_eos_ids;
    bool enable_lora;
} hr_request_limits;

/* Most ids of a sequence: what the model's context and the cache allow. */
static inline uint32_t hr_request_max_ids(const hr_request_limits *limits) {
    return limits->context_length < limits->kv_tokens ? limits->context_length : limits->kv_tokens;
}

/* Logprob entries (top and asked ids) that prompt scoring of one request may hold at a time; a
 * chunk is cut short so that it needs no more. One row is always allowed. */
enum { HR_REQUEST_LOGPROB_ENTRIES = 1 << 16 };

/* Bounds on lists in a request, so that a queue of them stays small. */
enum { HR_REQUEST_MAX_BIAS = 65536, HR_REQUEST_MAX_STOP_IDS = 65536, HR_REQUEST_MAX_RID = 1024 };

enum {
    HR_ENDING_NOT,
    HR_ENDING_ABORT,
    HR_ENDING_STOP
}; /* asked from outside: by a caller, by drain */

/* No epoch of the prefix cache: KV that must not be shared. */
#define HR_REQUEST_OWN_KV UINT64_MAX

typedef struct hr_request hr_request;
struct hr_request {
    /* lists of the holder: inbox, then queue of the scheduler */
    hr_request *prev, *next;
    hr_request *rid_next; /* table of live rids */

    /* what was asked */
    char *rid;
    void *ctx;
    void (*on_prompt_logprobs)(void *, uint32_t, uint32_t, const hr_position_logprobs *);
    hr_token_verdict (*on_token)(void *, const hr_position_logprobs *);
    void (*on_finish)(void *, const hr_finish *);
    uint32_t n_prompt, max_new_tokens, min_new_tokens;
    bool ignore_eos;
    uint32_t *stop_ids; /* eos ids, then stop_token_ids */
    uint32_t n_eos_ids, n_stop_ids;
    uint32_t *bias_ids;
    float *bias;
    hr_sampler sampler;
    bool want_prompt; /* prompt logprobs are to be delivered, from next_prompt_pos on */
    hr_logprob_wish wish;
    uint32_t *wish_ids;

    /* the adapter; id 0 is the base model */
    hr_adapter_lease lease;
    uint64_t adapter_id;
    const hr_lora *lora;

    _Atomic int ending;

    /* where it is */
    uint64_t serial; /* order of arrival */
    uint64_t submit_ns, admit_ns, first_token_ns;
    uint32_t *ids;
    uint32_t n_ids, ids_cap;
    uint32_t n_computed;      /* positions whose K and V are in the cache */
    uint32_t next_prompt_pos; /* next prompt position to deliver */
    uint32_t overtaken;       /* by later requests while its adapter had no place in the batch */
    uint32_t retractions;
    uint32_t cached_tokens; /* of the prompt: not computed when it first ran */
    bool keeps_version;     /* it waits, but has begun and was not paused: the version stays */
    uint32_t step_rows;     /* rows in the step being planned */
    bool planned;           /* in that step: step_rows is settled */

    /* while it runs (hr_request_prepare) */
    bool prepared;
    uint32_t *pages;
    uint32_t n_pages;       /* held */
    uint32_t n_shared;      /* the first of them are held through the prefix cache */
    uint32_t n_clear_pages; /* the first of them may be written: shared, or cleared for this one */
    uint64_t cache_epoch;   /* of the prefix cache when it began to run, or HR_REQUEST_OWN_KV */

    /* weight versions of its tokens since it first ran; labels stand beside spans and hold the
     * texts */
    hr_version_span *spans;
    hr_version_label **labels;
    uint32_t n_spans, spans_cap;

    uint32_t result_rows; /* prompt rows of a chunk that may be scored; one more is for the draw */
    hr_row_result *results;          /* [result_rows + 1] */
    hr_position_logprobs *positions; /* [result_rows + 1] */
    uint32_t *top_ids;
    float *top_logprobs, *ids_logprobs;
};

/* Everything hr_engine_submit refuses except adapters and the state of the engine. Messages name
 * the field. */
hr_status hr_request_check(const hr_request_params *params, const hr_request_limits *limits,
                           hr_error *err);

/* Checks and copies; the request owns nothing else yet. seed is used when params bring none. */
hr_status hr_request_create(const hr_request_params *params, const hr_request_limits *limits,
                            uint64_t seed, const hr_alloc *alloc, hr_request **out, hr_error *err);
/* Pages and lease must be back. NULL is allowed. */
void hr_request_destroy(hr_request *request, const hr_alloc *alloc);

/* Takes over a lease: the request runs on that version from now on. */
void hr_request_set_adapter(hr_request *request, hr_adapter_lease lease);

/* From its next token on the request is computed under this version. false: no memory, nothing has
 * changed. */
bool hr_request_note_version(hr_request *request, hr_version_label *label, const hr_alloc *alloc);

/* Everything the steps of this request need, so that no step allocates: called before it first
 * runs; does nothing the second time. false: no memory, the request holds nothing new. */
bool hr_request_prepare(hr_request *request, const hr_request_limits *limits,
                        const hr_alloc *alloc);

/* Position p of the prompt is still to be scored: row p - 1 gives its logprob. */
static inline bool hr_request_scores(const hr_request *r, uint32_t p) {
    return r->want_prompt && p < r->n_prompt && p >= r->next_prompt_pos && p > 0;
}

/* Where generation stops for length. */
static inline uint32_t hr_request_max_len(const hr_request *r, const hr_request_limits *limits) {
    uint32_t most = hr_request_max_ids(limits);
    if (r->n_prompt >= most)
        return r->n_prompt;
    return r->max_new_tokens < most - r->n_prompt ? r->n_prompt + r->max_new_tokens : most;
}

#endif
