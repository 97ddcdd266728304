/* The fake model and its oracle. */
#include "fake_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void destroy_lora(void *data) {
    ((fake_lora *)data)->value = ~0ull; /* whoever still reads it computes other tokens */
    free(data);
}

hr_adapter_payload fake_lora_payload(uint64_t value) {
    fake_lora *lora = malloc(sizeof *lora);
    HR_ASSERT(lora != NULL);
    lora->value = value;
    return (hr_adapter_payload){lora, destroy_lora, sizeof *lora, 8};
}

void fake_model_init(fake_model *model, uint32_t n_pages, hr_pool *pool) {
    unsigned workers = pool != NULL ? hr_pool_workers(pool) : 1;
    *model = (fake_model){.n_pages = n_pages, .pool = pool};
    model->slots = malloc((size_t)n_pages * HR_KV_PAGE_TOKENS * sizeof *model->slots);
    model->clean = calloc(n_pages, sizeof *model->clean);
    model->scratch = aligned_alloc(64, (size_t)workers * HR_SCRATCH_BYTES);
    model->logits = malloc(FAKE_VOCAB * sizeof *model->logits);
    HR_ASSERT(model->slots != NULL && model->clean != NULL && model->scratch != NULL &&
              model->logits != NULL);
    memset(model->slots, 0xee, (size_t)n_pages * HR_KV_PAGE_TOKENS * sizeof *model->slots);
}

void fake_model_free(fake_model *model) {
    free(model->logits);
    free(model->scratch);
    free(model->clean);
    free(model->slots);
}

/* ---- the arithmetic ---- */

static uint64_t see(uint64_t hash, uint64_t token) {
    return hr_sampler_mix(hash ^ (token + 1));
}

static uint64_t weights_of(uint64_t adapter, uint64_t base) {
    return hr_sampler_mix(hr_sampler_mix(adapter ^ 0x5eed) ^ base);
}

/* What a position holds depends on the weights that write it and on every token up to it, as K and
 * V do. Never 0; the last bit passes on that the prompt is poisoned. */
static uint64_t hold(uint64_t weights, bool first, uint64_t before, uint32_t token) {
    uint64_t poison = first ? token == FAKE_POISON : before & 1;
    return (see(weights ^ before, token) & ~3ull) | 2 | poison;
}

static void logits_of(uint64_t hash, bool poisoned, float *logits) {
    for (uint32_t i = 0; i < FAKE_VOCAB; i++)
        logits[i] = (float)(hr_sampler_mix(hash + i) >> 40) * 0x1p-21f - 4; /* [-4, 4) */
    if (poisoned)
        logits[3] = NAN;
}

/* ---- the executor ---- */

static uint64_t *slot_of(fake_model *m, const hr_seq_view *seq, uint32_t position) {
    uint32_t page = seq->pages[position / HR_KV_PAGE_TOKENS];
    HR_ASSERT(page < m->n_pages);
    return &m->slots[(size_t)page * HR_KV_PAGE_TOKENS + position % HR_KV_PAGE_TOKENS];
}

static uint64_t weights_for(const fake_model *m, const hr_seq_view *seq) {
    const fake_lora *lora = (const fake_lora *)(const void *)seq->lora;
    return weights_of(lora != NULL ? lora->value : 0, m->base);
}

static void store(fake_model *m, const hr_view *view, const hr_seq_view *seq) {
    for (uint32_t i = 0; i < seq->n_rows; i++) {
        uint32_t position = seq->first_pos + i, page = seq->pages[position / HR_KV_PAGE_TOKENS];
        if (position % HR_KV_PAGE_TOKENS == 0) {
            HR_ASSERT(m->clean[page]);
            m->clean[page] = false;
        }
        uint64_t *slot = slot_of(m, seq, position);
        HR_ASSERT(*slot == 0);
        uint64_t before = position > 0 ? *slot_of(m, seq, position - 1) : 0;
        *slot = hold(weights_for(m, seq), position == 0, before, view->tokens[seq->first_row + i]);
    }
}

static void compute(fake_model *m, const hr_seq_view *seq, uint32_t row) {
    uint64_t hash = weights_for(m, seq);
    uint32_t last = seq->first_pos + (row - seq->first_row);
    for (uint32_t p = 0; p <= last; p++)
        hash = see(hash, *slot_of(m, seq, p));
    logits_of(hash, *slot_of(m, seq, 0) & 1, m->logits);
}

typedef struct logits_job {
    fake_model *model;
    hr_logits_fn on_logits;
    void *ctx;
    uint32_t index;
} logits_job;

static void run_logits(void *arg, unsigned worker, unsigned n_workers) {
    logits_job *job = arg;
    char *scratch = job->model->scratch;
    job->on_logits(job->ctx, job->index, 1, job->model->logits, FAKE_VOCAB,
                   scratch + (size_t)worker * HR_SCRATCH_BYTES, worker, n_workers);
}

static void fake_step(void *self, const hr_view *view, hr_logits_fn on_logits, void *ctx) {
    fake_model *m = self;
    for (uint32_t s = 0; s < view->n_seqs; s++)
        store(m, view, &view->seqs[s]);
    uint32_t s = 0;
    for (uint32_t i = 0; i < view->n_logit_rows; i++) {
        uint32_t row = view->logit_rows[i];
        while (row >= view->seqs[s].first_row + view->seqs[s].n_rows)
            s++;
        compute(m, &view->seqs[s], row);
        logits_job job = {m, on_logits, ctx, i};
        if (m->pool != NULL) {
            hr_pool_run(m->pool, run_logits, &job);
        } else {
            unsigned saved = hr_fp_enter();
            run_logits(&job, 0, 1);
            hr_fp_restore(saved);
        }
    }
}

static void fake_clear_page(void *self, uint32_t page) {
    fake_model *m = self;
    HR_ASSERT(page < m->n_pages);
    memset(m->slots + (size_t)page * HR_KV_PAGE_TOKENS, 0, HR_KV_PAGE_TOKENS * sizeof *m->slots);
    m->clean[page] = true;
}

hr_executor fake_model_executor(fake_model *model) {
    return (hr_executor){model, fake_step, fake_clear_page};
}

/* ---- recording ---- */

static void record_prompt(void *ctx, uint32_t first, uint32_t n,
                          const hr_position_logprobs *positions) {
    fake_case *c = ctx;
    HR_ASSERT(!c->finished && (c->n_prompt_seen == 0 || first == c->next_prompt));
    for (uint32_t i = 0; i < n; i++) {
        HR_ASSERT(positions[i].token == c->prompt[first + i]);
        HR_ASSERT(positions[i].has_logprob == (first + i > 0));
        c->prompt_logprobs[first + i] = positions[i].has_logprob ? positions[i].logprob : 0;
    }
    c->n_prompt_seen += n;
    c->next_prompt = first + n;
}

static hr_token_verdict record_token(void *ctx, const hr_position_logprobs *token) {
    fake_case *c = ctx;
    HR_ASSERT(!c->finished && c->n_tokens < 512);
    c->logprobs[c->n_tokens] = token->has_logprob ? token->logprob : 0;
    c->top0[c->n_tokens] = token->n_top > 0 ? token->top_logprobs[0] : 0;
    c->labels[c->n_tokens] = c->label;
    c->tokens[c->n_tokens++] = token->token;
    return c->n_tokens == c->stop_at ? HR_TOKEN_STOP : HR_TOKEN_CONTINUE;
}

static void record_finish(void *ctx, const hr_finish *finish) {
    fake_case *c = ctx;
    HR_ASSERT(!c->finished && finish->completion_tokens == c->n_tokens);
    c->finished = true;
    c->type = finish->type;
    c->status = finish->status;
    c->retractions = finish->retractions;
    c->cached_tokens = finish->cached_tokens;
    snprintf(c->weight_version, sizeof c->weight_version, "%s", finish->weight_version);
    HR_ASSERT(finish->n_spans <= FAKE_MAX_SPANS);
    c->n_spans = (uint32_t)finish->n_spans;
    for (uint32_t i = 0; i < c->n_spans; i++) {
        snprintf(c->spans[i].version, sizeof c->spans[i].version, "%s", finish->spans[i].version);
        c->spans[i].start = finish->spans[i].start;
        c->spans[i].end = finish->spans[i].end;
    }
}

void fake_case_record(fake_case *c) {
    c->params.ctx = c;
    c->params.input_ids = c->prompt;
    c->params.on_prompt_logprobs = record_prompt;
    c->params.on_token = record_token;
    c->params.on_finish = record_finish;
}

/* ---- the oracle ---- */

static bool is_stop_id(const fake_case *c, uint32_t token) {
    const hr_sampling_params *s = &c->params.sampling;
    for (size_t i = 0; i < s->n_stop_token_ids; i++)
        if (s->stop_token_ids[i] == token)
            return true;
    return !s->ignore_eos && token == FAKE_EOS;
}

static void oracle_end(fake_case *alone, hr_finish_type type) {
    alone->finished = true;
    alone->type = type;
}

/* The sequence as attention sees it: what its positions hold, and the weights now. */
typedef struct oracle_state {
    const fake_case *c;
    uint32_t next_event;
    uint64_t adapter, base, weights;
    uint64_t slots[1024];
    uint32_t n_slots;
} oracle_state;

static void oracle_set(oracle_state *at, uint64_t adapter, uint64_t base) {
    at->adapter = adapter;
    at->base = base;
    at->weights = weights_of(adapter, base);
}

static void oracle_hold(oracle_state *at, const uint32_t *ids, uint32_t n) {
    for (uint32_t p = at->n_slots; p < n; p++)
        at->slots[p] = hold(at->weights, p == 0, p > 0 ? at->slots[p - 1] : 0, ids[p]);
    at->n_slots = n > at->n_slots ? n : at->n_slots;
}

/* What happened before this many tokens and prompt positions were delivered. What was computed
 * until an event is held with the weights before it. */
static void oracle_pass(oracle_state *at, const uint32_t *ids, uint32_t n_tokens,
                        uint32_t n_prompt) {
    for (; at->next_event < at->c->n_events; at->next_event++) {
        const fake_event *e = &at->c->events[at->next_event];
        if (e->at_token > n_tokens || (e->at_token == 0 && e->at_prompt > n_prompt))
            return;
        oracle_hold(at, ids, e->kept);
        at->n_slots = e->kept < at->n_slots ? e->kept : at->n_slots;
        oracle_set(at, e->adapter, e->base);
    }
}

/* Logits of the row n - 1. */
static void oracle_logits(oracle_state *at, const uint32_t *ids, uint32_t n, float *logits) {
    oracle_hold(at, ids, n);
    uint64_t hash = at->weights;
    for (uint32_t p = 0; p < n; p++)
        hash = see(hash, at->slots[p]);
    logits_of(hash, at->slots[0] & 1, logits);
}

/* Generates from a request object made as the engine makes it: its sampler, its wishes. */
static void oracle_generate(const fake_case *c, hr_request *r, oracle_state *at,
                            const hr_request_limits *limits, fake_case *alone, void *scratch) {
    float logits[FAKE_VOCAB], values[2][FAKE_VOCAB];
    uint32_t ids[2][FAKE_VOCAB];
    hr_sampler_space space = {ids[0], values[0], ids[1], values[1]};
    while (!alone->finished) {
        hr_row_result *result = &r->results[r->result_rows];
        oracle_pass(at, r->ids, alone->n_tokens, UINT32_MAX);
        oracle_logits(at, r->ids, r->n_ids, logits);
        hr_sampler_draw(hr_kernels_tier(0), &r->sampler, logits, FAKE_VOCAB, r->n_ids,
                        alone->n_tokens < r->min_new_tokens, &r->wish, result, &space, scratch);
        if (!result->finite) {
            oracle_end(alone, HR_FINISH_ERROR);
            return;
        }
        r->ids[r->n_ids++] = result->token;
        if (r->sampler.counts != NULL)
            r->sampler.counts[result->token]++;
        alone->logprobs[alone->n_tokens] = r->wish.any ? result->logprob : 0;
        alone->top0[alone->n_tokens] = r->wish.n_top > 0 ? result->top_logprobs[0] : 0;
        alone->tokens[alone->n_tokens++] = result->token;
        if (alone->n_tokens == r->max_new_tokens || r->n_ids == hr_request_max_ids(limits))
            oracle_end(alone, HR_FINISH_LENGTH);
        else if (is_stop_id(c, result->token))
            oracle_end(alone, HR_FINISH_STOP_TOKEN);
        else if (alone->n_tokens == c->stop_at)
            oracle_end(alone, HR_FINISH_STOP_CALLER);
    }
}

static void oracle_score(hr_request *r, oracle_state *at, fake_case *alone, void *scratch) {
    for (uint32_t p = r->next_prompt_pos; p < r->n_prompt; p++) {
        float logits[FAKE_VOCAB];
        hr_row_result *result = &r->results[0];
        alone->n_prompt_seen++;
        if (p == 0)
            continue;
        oracle_pass(at, r->ids, 0, p);
        oracle_logits(at, r->ids, p, logits);
        hr_sampler_score(hr_kernels_tier(0), logits, FAKE_VOCAB, r->ids[p], &r->wish, result,
                         scratch);
        if (!result->finite) {
            alone->n_prompt_seen--;
            oracle_end(alone, HR_FINISH_ERROR);
            return;
        }
        alone->prompt_logprobs[p] = result->logprob;
    }
}

void fake_oracle(const fake_case *c, const hr_request_limits *limits, fake_case *alone) {
    memset(alone, 0, sizeof *alone);
    hr_alloc alloc = hr_alloc_system();
    hr_request *r = NULL;
    HR_ASSERT(hr_request_create(&c->params, limits, 0, &alloc, &r, NULL) == HR_OK);
    HR_ASSERT(hr_request_prepare(r, limits, &alloc));
    void *scratch = aligned_alloc(64, HR_SCRATCH_BYTES);
    HR_ASSERT(scratch != NULL);
    unsigned saved = hr_fp_enter();
    oracle_state at = {.c = c};
    oracle_set(&at, c->adapter, c->base);
    if (r->want_prompt)
        oracle_score(r, &at, alone, scratch);
    if (!alone->finished && r->max_new_tokens == 0)
        oracle_end(alone, HR_FINISH_LENGTH);
    if (!alone->finished)
        oracle_generate(c, r, &at, limits, alone, scratch);
    hr_fp_restore(saved);
    free(scratch);
    hr_request_destroy(r, &alloc);
}
