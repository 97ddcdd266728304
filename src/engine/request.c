/* Checking, copying and freeing a request. */
#include "engine/request.h"

#include <math.h>
#include <string.h>

/* ---- checking ---- */

static hr_status check_ids(const char *field, const uint32_t *ids, size_t n, size_t most,
                           uint32_t vocab_size, hr_error *err) {
    if (n > most)
        return hr_fail(err, HR_ERR_INVALID, "%s has %zu entries; at most %zu are allowed", field, n,
                       most);
    if (n > 0 && ids == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s is missing", field);
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= vocab_size)
            return hr_fail(err, HR_ERR_INVALID, "%s[%zu] is %u; ids of this model are 0 to %u",
                           field, i, ids[i], vocab_size - 1);
    return HR_OK;
}

static hr_status check_range(const char *field, double value, double low, bool low_open,
                             double high, hr_error *err) {
    bool ok = value <= high && (low_open ? value > low : value >= low); /* false for NaN */
    return ok ? HR_OK
              : hr_fail(err, HR_ERR_INVALID, "%s must be in %c%g, %g], got %g", field,
                        low_open ? '(' : '[', low, high, value);
}

static hr_status check_sampling(const hr_sampling_params *s, uint32_t vocab_size, hr_error *err) {
    if (!isfinite(s->temperature) || s->temperature < 0)
        return hr_fail(err, HR_ERR_INVALID, "temperature must be finite and >= 0, got %g",
                       (double)s->temperature);
    HR_TRY(check_range("top_p", s->top_p, 0, true, 1, err));
    HR_TRY(check_range("min_p", s->min_p, 0, false, 1, err));
    HR_TRY(check_range("frequency_penalty", s->frequency_penalty, -2, false, 2, err));
    HR_TRY(check_range("presence_penalty", s->presence_penalty, -2, false, 2, err));
    HR_TRY(check_range("repetition_penalty", s->repetition_penalty, 0, true, 2, err));
    if (s->top_k != -1 && s->top_k < 1)
        return hr_fail(err, HR_ERR_INVALID,
                       "top_k must be -1 (whole vocabulary) or at least 1, got %d", s->top_k);
    if (s->min_new_tokens > s->max_new_tokens)
        return hr_fail(err, HR_ERR_INVALID,
                       "min_new_tokens must be in [0, max_new_tokens %u], got %u",
                       s->max_new_tokens, s->min_new_tokens);
    HR_TRY(check_ids("stop_token_ids", s->stop_token_ids, s->n_stop_token_ids,
                     HR_REQUEST_MAX_STOP_IDS, vocab_size, err));
    HR_TRY(check_ids("logit_bias", s->logit_bias_ids, s->n_logit_bias, HR_REQUEST_MAX_BIAS,
                     vocab_size, err));
    for (size_t i = 0; i < s->n_logit_bias; i++)
        if (!isfinite(s->logit_bias[i]))
            return hr_fail(err, HR_ERR_INVALID, "logit_bias of id %u is not finite",
                           s->logit_bias_ids[i]);
    return HR_OK;
}

static hr_status check_length(const hr_request_params *p, const hr_request_limits *limits,
                              hr_error *err) {
    uint32_t room = p->sampling.max_new_tokens > 0 ? 1 : 0; /* for at least one generated token */
    if (p->n_input_ids + room > limits->context_length)
        return hr_fail(
            err, HR_ERR_INVALID,
            "The input (%zu tokens) is longer than the model's context length (%u tokens%s)",
            p->n_input_ids, limits->context_length, room > 0 ? ", one of them for the output" : "");
    if (p->n_input_ids + room > limits->kv_tokens)
        return hr_fail(
            err, HR_ERR_INVALID,
            "The input (%zu tokens) does not fit the KV cache (%u tokens); start with more "
            "--max-total-tokens or memory",
            p->n_input_ids, limits->kv_tokens);
    return HR_OK;
}

hr_status hr_request_check(const hr_request_params *p, const hr_request_limits *limits,
                           hr_error *err) {
    if (p->rid == NULL || p->rid[0] == '\0' ||
        strnlen(p->rid, HR_REQUEST_MAX_RID + 1) > HR_REQUEST_MAX_RID)
        return hr_fail(err, HR_ERR_INVALID, "rid must have 1 to %d bytes", HR_REQUEST_MAX_RID);
    if (p->n_input_ids == 0)
        return hr_fail(err, HR_ERR_INVALID, "input_ids cannot be empty");
    HR_TRY(check_length(p, limits, err));
    HR_TRY(check_ids("input_ids", p->input_ids, p->n_input_ids, p->n_input_ids, limits->vocab_size,
                     err));
    HR_TRY(check_sampling(&p->sampling, limits->vocab_size, err));
    if (p->logprob_start_len < -1 || p->logprob_start_len > (int64_t)p->n_input_ids)
        return hr_fail(err, HR_ERR_INVALID,
                       "logprob_start_len must be -1 or 0 to the prompt length %zu, got %lld",
                       p->n_input_ids, (long long)p->logprob_start_len);
    if (p->top_logprobs_num > limits->vocab_size)
        return hr_fail(err, HR_ERR_INVALID, "top_logprobs_num is %u; the vocabulary has %u ids",
                       p->top_logprobs_num, limits->vocab_size);
    HR_TRY(check_ids("token_ids_logprob", p->token_ids_logprob, p->n_token_ids_logprob,
                     limits->vocab_size, limits->vocab_size, err));
    if (p->lora_name != NULL && p->lora_name[0] != '\0' && !limits->enable_lora)
        return hr_fail(err, HR_ERR_INVALID,
                       "LoRA adapter '%.256s' was requested, but LoRA is not enabled; start with "
                       "--enable-lora",
                       p->lora_name);
    HR_ASSERT(p->on_token != NULL && p->on_finish != NULL);
    return HR_OK;
}

/* ---- copying ---- */

/* NULL also when n is 0; *ok turns false when memory is short. */
static void *copy_array(const hr_alloc *alloc, const void *from, size_t n, size_t size, bool *ok) {
    if (n == 0)
        return NULL;
    void *copy = hr_alloc_array(alloc, n, size);
    if (copy == NULL)
        *ok = false;
    else
        memcpy(copy, from, n * size);
    return copy;
}

static void copy_stop_ids(hr_request *r, const hr_request_params *p,
                          const hr_request_limits *limits, const hr_alloc *alloc, bool *ok) {
    size_t n_eos = limits->n_eos_ids, n = n_eos + p->sampling.n_stop_token_ids;
    r->stop_ids = hr_alloc_array(alloc, n, sizeof *r->stop_ids);
    if (r->stop_ids == NULL) {
        *ok = false;
        return;
    }
    if (n_eos > 0)
        memcpy(r->stop_ids, limits->eos_ids, n_eos * sizeof *r->stop_ids);
    if (n > n_eos)
        memcpy(r->stop_ids + n_eos, p->sampling.stop_token_ids, (n - n_eos) * sizeof *r->stop_ids);
    r->n_eos_ids = (uint32_t)n_eos;
    r->n_stop_ids = (uint32_t)n;
}

static void set_sampler(hr_request *r, const hr_sampling_params *s, uint64_t seed) {
    r->sampler = (hr_sampler){
        .greedy = s->temperature<1e-6f, .temperature = s->temperature, .top_k = s->top_k> 0
                      ? (uint32_t)s->top_k
                      : 0,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .frequency_penalty = s->frequency_penalty,
        .presence_penalty = s->presence_penalty,
        .repetition_penalty = s->repetition_penalty,
        .bias_ids = r->bias_ids,
        .bias = r->bias,
        .n_bias = s->n_logit_bias,
        .stop_ids = r->stop_ids,
        .n_stop_ids = r->n_stop_ids,
        .seed = s->has_seed ? s->seed : seed,
    };
}

static void set_logprobs(hr_request *r, const hr_request_params *p) {
    if (!p->return_logprob)
        return;
    r->wish =
        (hr_logprob_wish){true, p->top_logprobs_num, r->wish_ids, (uint32_t)p->n_token_ids_logprob};
    if (p->on_prompt_logprobs != NULL && p->logprob_start_len >= 0 &&
        p->logprob_start_len < (int64_t)p->n_input_ids) {
        r->want_prompt = true;
        r->next_prompt_pos = (uint32_t)p->logprob_start_len;
    }
}

hr_status hr_request_create(const hr_request_params *p, const hr_request_limits *limits,
                            uint64_t seed, const hr_alloc *alloc, hr_request **out, hr_error *err) {
    HR_TRY(hr_request_check(p, limits, err));
    const hr_sampling_params *s = &p->sampling;
    hr_request *r = hr_alloc_array(alloc, 1, sizeof *r);
    if (r == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a request");
    bool ok = true;
    r->rid = copy_array(alloc, p->rid, strlen(p->rid) + 1, 1, &ok);
    r->ids = copy_array(alloc, p->input_ids, p->n_input_ids, sizeof *r->ids, &ok);
    r->bias_ids = copy_array(alloc, s->logit_bias_ids, s->n_logit_bias, sizeof *r->bias_ids, &ok);
    r->bias = copy_array(alloc, s->logit_bias, s->n_logit_bias, sizeof *r->bias, &ok);
    if (p->return_logprob)
        r->wish_ids = copy_array(alloc, p->token_ids_logprob, p->n_token_ids_logprob,
                                 sizeof *r->wish_ids, &ok);
    copy_stop_ids(r, p, limits, alloc, &ok);
    if (!ok) {
        hr_request_destroy(r, alloc);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a request of %zu tokens",
                       p->n_input_ids);
    }
    r->ctx = p->ctx;
    r->on_prompt_logprobs = p->on_prompt_logprobs;
    r->on_token = p->on_token;
    r->on_finish = p->on_finish;
    r->n_prompt = r->n_ids = r->ids_cap = (uint32_t)p->n_input_ids;
    r->max_new_tokens = s->max_new_tokens;
    r->min_new_tokens = s->min_new_tokens;
    r->ignore_eos = s->ignore_eos;
    set_sampler(r, s, seed);
    set_logprobs(r, p);
    *out = r;
    return HR_OK;
}

void hr_request_set_adapter(hr_request *r, hr_adapter_lease lease) {
    r->lease = lease;
    r->adapter_id = hr_adapter_lease_id(&lease);
    r->lora = hr_adapter_lease_data(&lease);
}

/* ---- weight versions ---- */

static bool grow_spans(hr_request *r, const hr_alloc *alloc) {
    if (r->n_spans < r->spans_cap)
        return true;
    uint32_t cap = r->spans_cap > 0 ? 2 * r->spans_cap : 1;
    hr_version_span *spans = hr_alloc_array(alloc, cap, sizeof *spans);
    hr_version_label **labels = hr_alloc_array(alloc, cap, sizeof(hr_version_label *));
    if (spans == NULL || labels == NULL) {
        hr_alloc_free(alloc, labels);
        hr_alloc_free(alloc, spans);
        return false;
    }
    if (r->n_spans > 0) {
        memcpy(spans, r->spans, r->n_spans * sizeof *spans);
        memcpy(labels, r->labels, r->n_spans * sizeof(hr_version_label *));
    }
    hr_alloc_free(alloc, r->spans);
    hr_alloc_free(alloc, r->labels);
    r->spans = spans;
    r->labels = labels;
    r->spans_cap = cap;
    return true;
}

static void drop_last_span(hr_request *r, const hr_alloc *alloc) {
    r->n_spans--;
    hr_version_label_release(r->labels[r->n_spans], alloc);
}

bool hr_request_note_version(hr_request *r, hr_version_label *label, const hr_alloc *alloc) {
    uint32_t at = r->n_ids - r->n_prompt;
    if (r->n_spans > 0 && r->labels[r->n_spans - 1] == label)
        return true;
    bool replaces = r->n_spans > 0 && r->spans[r->n_spans - 1].start == at; /* it made no token */
    if (!replaces && !grow_spans(r, alloc))
        return false;
    if (replaces)
        drop_last_span(r, alloc);
    if (r->n_spans > 0 && r->labels[r->n_spans - 1] == label)
        return true;
    if (r->n_spans > 0)
        r->spans[r->n_spans - 1].end = at;
    r->labels[r->n_spans] = hr_version_label_hold(label);
    r->spans[r->n_spans] = (hr_version_span){label->text, at, at};
    r->n_spans++;
    return true;
}

/* ---- running ---- */

static void free_prepared(hr_request *r, const hr_alloc *alloc) {
    hr_alloc_free(alloc, r->pages);
    hr_alloc_free(alloc, r->results);
    hr_alloc_free(alloc, r->positions);
    hr_alloc_free(alloc, r->top_ids);
    hr_alloc_free(alloc, r->top_logprobs);
    hr_alloc_free(alloc, r->ids_logprobs);
    hr_alloc_free(alloc, r->sampler.counts);
    r->pages = NULL;
    r->results = NULL;
    r->positions = NULL;
    r->top_ids = NULL;
    r->top_logprobs = r->ids_logprobs = NULL;
    r->sampler.counts = NULL;
}

void hr_request_destroy(hr_request *r, const hr_alloc *alloc) {
    if (r == NULL)
        return;
    HR_ASSERT(r->n_pages == 0 && r->lease.version == NULL);
    free_prepared(r, alloc);
    while (r->n_spans > 0)
        drop_last_span(r, alloc);
    hr_alloc_free(alloc, r->spans);
    hr_alloc_free(alloc, r->labels);
    hr_alloc_free(alloc, r->rid);
    hr_alloc_free(alloc, r->ids);
    hr_alloc_free(alloc, r->bias_ids);
    hr_alloc_free(alloc, r->bias);
    hr_alloc_free(alloc, r->wish_ids);
    hr_alloc_free(alloc, r->stop_ids);
    hr_alloc_free(alloc, r);
}

/* Prompt rows that one chunk may score. */
static uint32_t choose_result_rows(const hr_request *r, const hr_request_limits *limits) {
    if (!r->want_prompt)
        return 0;
    uint64_t entries = (uint64_t)r->wish.n_top + r->wish.n_ids;
    uint64_t rows =
        entries > 0 ? HR_REQUEST_LOGPROB_ENTRIES / entries : limits->chunked_prefill_size;
    if (rows > limits->chunked_prefill_size)
        rows = limits->chunked_prefill_size;
    if (rows > r->n_prompt)
        rows = r->n_prompt;
    return rows > 0 ? (uint32_t)rows : 1;
}

static bool grow_ids(hr_request *r, uint32_t cap, const hr_alloc *alloc) {
    if (cap <= r->ids_cap)
        return true;
    uint32_t *ids = hr_alloc_array(alloc, cap, sizeof *ids);
    if (ids == NULL)
        return false;
    memcpy(ids, r->ids, r->n_ids * sizeof *ids);
    hr_alloc_free(alloc, r->ids);
    r->ids = ids;
    r->ids_cap = cap;
    return true;
}

static void point_results(hr_request *r) {
    for (uint32_t i = 0; i <= r->result_rows; i++) {
        r->results[i].top_ids = r->top_ids + (size_t)i * r->wish.n_top;
        r->results[i].top_logprobs = r->top_logprobs + (size_t)i * r->wish.n_top;
        r->results[i].ids_logprobs = r->ids_logprobs + (size_t)i * r->wish.n_ids;
    }
}

bool hr_request_prepare(hr_request *r, const hr_request_limits *limits, const hr_alloc *alloc) {
    if (r->prepared)
        return true;
    uint32_t max_len = hr_request_max_len(r, limits);
    r->result_rows = choose_result_rows(r, limits);
    size_t rows = (size_t)r->result_rows + 1;
    r->pages = hr_alloc_array(alloc, (max_len + HR_KV_PAGE_TOKENS - 1) / HR_KV_PAGE_TOKENS,
                              sizeof *r->pages);
    r->results = hr_alloc_array(alloc, rows, sizeof *r->results);
    r->positions = hr_alloc_array(alloc, rows, sizeof *r->positions);
    r->top_ids = hr_alloc_array(alloc, rows * r->wish.n_top, sizeof *r->top_ids);
    r->top_logprobs = hr_alloc_array(alloc, rows * r->wish.n_top, sizeof *r->top_logprobs);
    r->ids_logprobs = hr_alloc_array(alloc, rows * r->wish.n_ids, sizeof *r->ids_logprobs);
    bool penalties = r->max_new_tokens > 0 && hr_sampler_has_penalties(&r->sampler);
    if (penalties)
        r->sampler.counts = hr_alloc_array(alloc, limits->vocab_size, sizeof *r->sampler.counts);
    if (r->pages == NULL || r->results == NULL || r->positions == NULL || r->top_ids == NULL ||
        r->top_logprobs == NULL || r->ids_logprobs == NULL ||
        (penalties && r->sampler.counts == NULL) || !grow_ids(r, max_len, alloc)) {
        free_prepared(r, alloc);
        return false;
    }
    point_results(r);
    for (uint32_t i = 0; penalties && i < r->n_prompt; i++)
        r->sampler.counts[r->ids[i]] |= HR_SAMPLER_IN_PROMPT;
    r->prepared = true;
    return true;
}

hr_sampling_params hr_sampling_params_default(void) {
    return (hr_sampling_params){
        .max_new_tokens = 128, .temperature = 1, .top_p = 1, .top_k = -1, .repetition_penalty = 1};
}
