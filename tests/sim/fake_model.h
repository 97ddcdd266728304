/* A model small enough to be run again alone: logits of a row are a hash of the weights now and of
 * everything the row may see, read back from the KV pages as attention would; what a page holds is
 * a hash of the weights that wrote it. A page given to two sequences, a page not cleared, a wrong
 * adapter, a wrong version of it or of the base, or a wrong position therefore changes tokens, and
 * fake_oracle, which has no pages and no batch, shows it. */
#ifndef TESTS_SIM_FAKE_MODEL_H
#define TESTS_SIM_FAKE_MODEL_H

#include "base/pool.h"
#include "engine/scheduler.h"

enum {
    FAKE_VOCAB = 40,
    FAKE_EOS = 0,
    FAKE_POISON = 7 /* a prompt that starts so gives NaN logits */
};

/* What an adapter is here. */
typedef struct fake_lora {
    uint64_t value;
} fake_lora;

hr_adapter_payload fake_lora_payload(uint64_t value);

typedef struct fake_model {
    uint32_t n_pages;
    uint64_t base;   /* version of the base weights */
    uint64_t *slots; /* [n_pages][HR_KV_PAGE_TOKENS]: see fake_model.c; 0 = cleared */
    bool *clean;     /* [n_pages]: cleared and not written since */
    hr_pool *pool;   /* NULL: one worker, the caller */
    void *scratch;   /* one per worker */
    float *logits;
} fake_model;

void fake_model_init(fake_model *model, uint32_t n_pages, hr_pool *pool);
void fake_model_free(fake_model *model);
hr_executor fake_model_executor(fake_model *model);

/* From here on a case is computed with other weights, or computed again. */
typedef struct fake_event {
    uint32_t at_token;      /* tokens generated before */
    uint32_t at_prompt;     /* prompt positions delivered before */
    uint32_t kept;          /* positions whose KV stays as it is */
    uint64_t adapter, base; /* versions from then on */
} fake_event;

enum { FAKE_MAX_EVENTS = 256, FAKE_MAX_SPANS = 64 };

/* A request of the tests, and what came of it. */
typedef struct fake_case {
    hr_request_params params;
    uint32_t prompt[256];
    uint64_t adapter; /* value of the adapter it resolved to; 0 = base */
    uint64_t base;    /* version of the base weights that it began with */
    fake_event events[FAKE_MAX_EVENTS];
    uint32_t n_events;
    uint32_t label;   /* number of the weight version of its next token */
    uint32_t stop_at; /* on_token says stop at this token; 0 = never */

    uint32_t tokens[512], labels[512], n_tokens;
    float logprobs[512], top0[512];
    float prompt_logprobs[256];
    uint32_t n_prompt_seen, next_prompt;
    bool finished;
    hr_finish_type type;
    hr_status status;
    uint32_t retractions, cached_tokens;
    struct {
        char version[24];
        uint32_t start, end;
    } spans[FAKE_MAX_SPANS];
    uint32_t n_spans;
    char weight_version[24];
} fake_case;

/* Sets the callbacks that record into the case. */
void fake_case_record(fake_case *c);

/* Runs the case alone, without pages or batch, into a second case. */
void fake_oracle(const fake_case *c, const hr_request_limits *limits, fake_case *alone);

#endif
