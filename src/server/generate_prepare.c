/* What must be known of a request before the engine hears of it: ids, seeds, adapters, and that its
 * answer has bounds. */
#include "server/generate_job_parts.h"

#include <stdlib.h>
#include <string.h>

#define MAX_EXTRA_LOGPROBS                                                                         \
    (UINT64_C(1) << 26) /* top and asked-for logprobs of a request, over all positions */

static hr_status tokenize_prompts(hr_job *j, hr_error *err) {
    hr_generate_request *r = &j->request;
    const hr_tokenizer *tokenizer = j->server->options.tokenizer;
    j->prompts = calloc(r->n_prompts, sizeof *j->prompts);
    if (j->prompts == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the prompts");
    for (size_t p = 0; p < r->n_prompts; p++) {
        hr_generate_item *first = &r->items[p * r->n_samples];
        size_t n = 0;
        if (first->text == NULL)
            continue;
        if (tokenizer == NULL)
            return hr_fail(
                err, HR_ERR_INVALID,
                "text: this server runs with --skip-tokenizer-init; send input_ids instead");
        hr_status status = hr_tokenizer_encode(tokenizer, first->text, strlen(first->text), true,
                                               &j->prompts[p], &n, err);
        if (status != HR_OK)
            return hr_fail_context(err, status, "text");
        for (size_t s = 0; s < r->n_samples; s++) {
            first[s].input_ids = j->prompts[p];
            first[s].n_input_ids = n;
        }
    }
    return HR_OK;
}

static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void give_seeds(hr_job *j) {
    hr_server *server = j->server;
    for (size_t i = 0; server->options.has_random_seed && i < j->request.n_items; i++) {
        hr_sampling_params *sampling = &j->request.items[i].sampling;
        if (sampling->has_seed)
            continue;
        sampling->has_seed = true;
        sampling->seed =
            mix(server->options.random_seed + mix(atomic_fetch_add(&server->seeds_given, 1)));
    }
}

static hr_status make_sequences(hr_job *j, hr_error *err) {
    const hr_engine_info *info = hr_engine_info_of(j->server->options.engine);
    j->sequences = calloc(j->request.n_items, sizeof *j->sequences);
    if (j->sequences == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the answer");
    for (size_t i = 0; i < j->request.n_items; i++) {
        j->sequences[i].job = j;
        HR_TRY(hr_generate_output_init(&j->sequences[i].output, &j->request.items[i],
                                       j->server->options.tokenizer, info->eos_token_ids,
                                       info->n_eos_token_ids, err));
    }
    return HR_OK;
}

/* A few bytes of request must not make gigabytes of answer. */
static hr_status check_size(const hr_job *j, hr_error *err) {
    uint64_t context = hr_engine_info_of(j->server->options.engine)->context_length, total = 0;
    for (size_t i = 0; i < j->request.n_items; i++) {
        const hr_generate_item *item = &j->request.items[i];
        uint64_t prompt = item->logprob_start_len < 0 ? 0 : item->n_input_ids;
        uint64_t most = prompt + item->sampling.max_new_tokens;
        total += (most < context ? most : context) *
                 ((uint64_t)item->top_logprobs_num + (uint64_t)item->n_token_ids_logprob);
        if (total > MAX_EXTRA_LOGPROBS)
            return hr_fail(err, HR_ERR_LIMIT,
                           "top_logprobs_num and token_ids_logprob: more than %llu values asked "
                           "for in one request",
                           (unsigned long long)MAX_EXTRA_LOGPROBS);
    }
    return HR_OK;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static hr_status collect_adapters(hr_job *j, hr_error *err) {
    uint32_t most = hr_engine_info_of(j->server->options.engine)->max_loaded_loras;
    size_t n = 0;
    j->lora_names = calloc(j->request.n_items, sizeof *j->lora_names);
    if (j->lora_names == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the request");
    for (size_t i = 0; i < j->request.n_items; i++) {
        if (j->request.items[i].lora_name != NULL)
            j->lora_names[n++] = j->request.items[i].lora_name;
    }
    qsort(j->lora_names, n, sizeof *j->lora_names, compare_strings);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(j->lora_names[i], j->lora_names[j->n_lora_names - 1]) != 0)
            j->lora_names[j->n_lora_names++] = j->lora_names[i];
    }
    if (most > 0 && j->n_lora_names > most)
        return hr_fail(
            err, HR_ERR_INVALID,
            "Received request with %zu unique loras requested but max loaded loras is %u",
            j->n_lora_names, most);
    return HR_OK;
}

hr_status hr_job_prepare(hr_job *j, hr_error *err) {
    for (size_t i = 0; i < j->request.n_unknown_keys; i++)
        hr_app_note_unknown_key(j->server, hr_exchange_path(j->exchange),
                                j->request.unknown_keys[i]);
    HR_TRY(make_sequences(j, err));
    HR_TRY(collect_adapters(j, err));
    give_seeds(j);
    return HR_OK;
}

size_t hr_job_text_bytes(const hr_job *j) {
    size_t n = 0;
    for (size_t i = 0; i < j->request.n_items; i += j->request.n_samples)
        n += j->request.items[i].text != NULL ? strlen(j->request.items[i].text) : 0;
    return n;
}

hr_status hr_job_tokenize(hr_job *j, hr_error *err) {
    HR_TRY(tokenize_prompts(j, err));
    return check_size(j, err);
}
