/* The body of POST /generate. */
#include "server/generate_request.h"

#include "format/json.h"
#include "server/generate_memory.h"
#include "server/generate_sampling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Keys that are read below, and keys that may stand there and change no result here. */
static const char *const known_keys[] = {
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "stream", "lora_path",
    /* no effect on the result */
    "model", "lora_id", "extra_key", "cache_salt", "priority", "log_metrics", "background",
    "modalities", "http_worker_ipc", "conversation_id", "reasoning", "validation_time"};

/* Keys that would change the result and are not supported: fine when absent, null, false, zero or
 * empty. */
static const char *const refused_keys[] = {"input_embeds",
                                           "image_data",
                                           "video_data",
                                           "audio_data",
                                           "session_params",
                                           "session_id",
                                           "custom_logit_processor",
                                           "return_hidden_states",
                                           "return_routed_experts",
                                           "return_entropy",
                                           "return_prompt_token_ids",
                                           "return_sampling_mask",
                                           "return_flat_raw_top_logprobs",
                                           "bootstrap_host",
                                           "bootstrap_port",
                                           "bootstrap_room",
                                           "lora_backfill_paths",
                                           "positional_embed_overrides",
                                           "routed_dp_rank",
                                           "data_parallel_rank"};

static bool listed(const char *key, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, list[i]) == 0)
            return true;
    }
    return false;
}

static bool is_off(const cJSON *item) {
    return cJSON_IsNull(item) || cJSON_IsFalse(item) ||
           (cJSON_IsNumber(item) && item->valuedouble == 0) ||
           ((cJSON_IsArray(item) || cJSON_IsObject(item)) && item->child == NULL);
}

static hr_status check_keys(const cJSON *body, hr_generate_request *request, hr_error *err) {
    size_t n_unknown = 0;
    const char **unknown = NULL;
    HR_TRY(hr_generate_alloc(request->memory, (size_t)cJSON_GetArraySize(body), sizeof *unknown,
                             &unknown, err));
    const cJSON *member = NULL;
    cJSON_ArrayForEach(member, body) {
        if (listed(member->string, known_keys, sizeof known_keys / sizeof known_keys[0]))
            continue;
        if (!listed(member->string, refused_keys, sizeof refused_keys / sizeof refused_keys[0]))
            unknown[n_unknown++] = member->string;
        else if (!is_off(member))
            return hr_fail(err, HR_ERR_UNSUPPORTED,
                           "%s is not supported by this server; leave it out", member->string);
    }
    request->unknown_keys = unknown;
    request->n_unknown_keys = n_unknown;
    return HR_OK;
}

/* A field that is one value for all prompts or a list with one value per prompt. */
typedef struct per_prompt {
    const char *key;
    const cJSON *value; /* NULL: absent; for a list the value of the next prompt */
    bool is_list;
} per_prompt;

static hr_status open_field(const cJSON *body, const char *key, bool is_list, size_t n_prompts,
                            per_prompt *field, hr_error *err) {
    const cJSON *value = hr_json_get_present(body, key);
    *field = (per_prompt){.key = key, .value = value, .is_list = value != NULL && is_list};
    if (!field->is_list)
        return HR_OK;
    size_t n = (size_t)cJSON_GetArraySize(value);
    if (n != n_prompts)
        return hr_fail(err, HR_ERR_INVALID,
                       "%s: a list must have one value per prompt: wanted %zu, came %zu", key,
                       n_prompts, n);
    field->value = value->child;
    return HR_OK;
}

/* The value for the next prompt; NULL when absent or null. name gets "key" or "key[prompt]". */
static const cJSON *next_value(per_prompt *field, size_t prompt, char *name, size_t size) {
    const cJSON *value = field->value;
    if (field->is_list) {
        snprintf(name, size, "%s[%zu]", field->key, prompt);
        field->value = value->next;
    } else {
        snprintf(name, size, "%s", field->key);
    }
    return cJSON_IsNull(value) ? NULL : value;
}

static bool is_array(const cJSON *body, const char *key) {
    return cJSON_IsArray(hr_json_get_present(body, key));
}

typedef struct fields {
    per_prompt prompt, sampling, lora, want, start, top, ids;
} fields;

static hr_status open_fields(const cJSON *body, size_t n, bool is_list, const char *prompt_key,
                             fields *f, hr_error *err) {
    const cJSON *ids = hr_json_get_present(body, "token_ids_logprob");
    bool id_lists = cJSON_IsArray(ids) && (cJSON_IsArray(ids->child) || cJSON_IsNull(ids->child));
    HR_TRY(open_field(body, prompt_key, is_list, n, &f->prompt, err));
    HR_TRY(open_field(body, "sampling_params", is_array(body, "sampling_params"), n, &f->sampling,
                      err));
    HR_TRY(open_field(body, "lora_path", is_array(body, "lora_path"), n, &f->lora, err));
    HR_TRY(open_field(body, "return_logprob", is_array(body, "return_logprob"), n, &f->want, err));
    HR_TRY(open_field(body, "logprob_start_len", is_array(body, "logprob_start_len"), n, &f->start,
                      err));
    HR_TRY(
        open_field(body, "top_logprobs_num", is_array(body, "top_logprobs_num"), n, &f->top, err));
    return open_field(body, "token_ids_logprob", id_lists, n, &f->ids, err);
}

static hr_status read_prompt(fields *f, size_t p, struct hr_generate_memory *memory,
                             hr_generate_item *item, hr_error *err) {
    char name[64];
    const cJSON *prompt = next_value(&f->prompt, p, name, sizeof name);
    if (strcmp(f->prompt.key, "text") == 0) {
        if (prompt == NULL)
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted a string, came null", name);
        return hr_json_string(prompt, name, &item->text, err);
    }
    if (prompt == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a list of token ids, came null", name);
    HR_TRY(hr_generate_ids_parse(prompt, name, memory, &item->input_ids, &item->n_input_ids, err));
    return item->n_input_ids > 0 ? HR_OK : hr_fail(err, HR_ERR_INVALID, "%s cannot be empty", name);
}

static hr_status read_logprob_fields(fields *f, size_t p, struct hr_generate_memory *memory,
                                     hr_generate_item *item, hr_error *err) {
    char name[64];
    uint64_t top = 0;
    item->logprob_start_len = -1;
    const cJSON *value = next_value(&f->want, p, name, sizeof name);
    if (value != NULL)
        HR_TRY(hr_json_bool(value, name, &item->return_logprob, err));
    value = next_value(&f->start, p, name, sizeof name);
    if (value != NULL)
        HR_TRY(hr_json_i64(value, name, -1, INT64_C(1) << 40, HR_JSON_DIGITS,
                           &item->logprob_start_len, err));
    value = next_value(&f->top, p, name, sizeof name);
    if (value != NULL)
        HR_TRY(hr_json_u64(value, name, 0, UINT32_MAX, HR_JSON_DIGITS, &top, err));
    item->top_logprobs_num = (uint32_t)top;
    value = next_value(&f->ids, p, name, sizeof name);
    if (value != NULL)
        HR_TRY(hr_generate_ids_parse(value, name, memory, &item->token_ids_logprob,
                                     &item->n_token_ids_logprob, err));
    if (item->return_logprob)
        return HR_OK;
    item->logprob_start_len = -1;
    item->top_logprobs_num = 0;
    item->n_token_ids_logprob = 0;
    return HR_OK;
}

static hr_status read_item(fields *f, size_t p, struct hr_generate_memory *memory,
                           hr_generate_item *item, size_t *n_samples, hr_error *err) {
    char name[64];
    HR_TRY(read_prompt(f, p, memory, item, err));
    const cJSON *params = next_value(&f->sampling, p, name, sizeof name);
    HR_TRY(hr_generate_sampling_parse(params, name, memory, item, n_samples, err));
    const cJSON *lora = next_value(&f->lora, p, name, sizeof name);
    if (lora != NULL)
        HR_TRY(hr_json_string(lora, name, &item->lora_name, err));
    if (item->lora_name != NULL && item->lora_name[0] == '\0')
        item->lora_name = NULL;
    return read_logprob_fields(f, p, memory, item, err);
}

/* Decides between text and input_ids, one prompt and many. */
static hr_status find_prompts(const cJSON *body, const char **key, bool *is_list, size_t *n,
                              hr_error *err) {
    const cJSON *text = hr_json_get_present(body, "text"),
                *ids = hr_json_get_present(body, "input_ids");
    if (text == NULL && ids == NULL)
        return hr_fail(err, HR_ERR_INVALID, "one of text and input_ids is needed; neither came");
    if (text != NULL && ids != NULL)
        return hr_fail(err, HR_ERR_INVALID, "either text or input_ids is wanted; both came");
    const cJSON *prompts = text != NULL ? text : ids;
    *key = text != NULL ? "text" : "input_ids";
    if (cJSON_IsArray(prompts) && prompts->child == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s cannot be empty", *key);
    *is_list = cJSON_IsArray(prompts) && (text != NULL || !cJSON_IsNumber(prompts->child));
    *n = *is_list ? (size_t)cJSON_GetArraySize(prompts) : 1;
    if (*n > HR_GENERATE_MAX_ITEMS)
        return hr_fail(err, HR_ERR_LIMIT, "%s: %zu prompts are over the limit of %d in one request",
                       *key, *n, HR_GENERATE_MAX_ITEMS);
    return HR_OK;
}

/* prompt p of sample s is item p * n_samples + s. */
static hr_status read_items(const cJSON *body, hr_generate_request *r, hr_error *err) {
    const char *key = NULL;
    fields f;
    hr_generate_item *prompts = NULL;
    HR_TRY(find_prompts(body, &key, &r->is_list, &r->n_prompts, err));
    HR_TRY(open_fields(body, r->n_prompts, r->is_list, key, &f, err));
    HR_TRY(hr_generate_alloc(r->memory, r->n_prompts, sizeof *prompts, &prompts, err));
    for (size_t p = 0; p < r->n_prompts; p++) {
        size_t n = 1;
        HR_TRY(read_item(&f, p, r->memory, &prompts[p], &n, err));
        if (p > 0 && n != r->n_samples)
            return hr_fail(
                err, HR_ERR_INVALID,
                "sampling_params[%zu].n: all prompts must agree on n: wanted %zu, came %zu", p,
                r->n_samples, n);
        r->n_samples = n;
    }
    if (r->n_prompts * r->n_samples > HR_GENERATE_MAX_ITEMS)
        return hr_fail(err, HR_ERR_LIMIT,
                       "%zu prompts x n %zu are over the limit of %d sequences in one request",
                       r->n_prompts, r->n_samples, HR_GENERATE_MAX_ITEMS);
    r->is_list |= r->n_samples > 1;
    r->n_items = r->n_prompts * r->n_samples;
    HR_TRY(hr_generate_alloc(r->memory, r->n_items, sizeof *r->items, &r->items, err));
    for (size_t i = 0; i < r->n_items; i++) {
        r->items[i] = prompts[i / r->n_samples];
        /* Samples of one prompt with one seed would all be the same. */
        r->items[i].sampling.seed += i % r->n_samples;
    }
    return HR_OK;
}

/* ---- rids ---- */

static hr_status check_rid(const char *rid, const char *what, hr_error *err) {
    size_t len = strlen(rid);
    if (len > 0 && len <= HR_GENERATE_MAX_RID)
        return HR_OK;
    return hr_fail(err, HR_ERR_INVALID, "%s: wanted 1 to %d bytes, came %zu", what,
                   HR_GENERATE_MAX_RID, len);
}

static hr_status random_rid(struct hr_generate_memory *memory, const char **out, hr_error *err) {
    unsigned char bytes[16];
    char *rid = NULL;
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        return hr_fail(err, HR_ERR_INTERNAL, "no random bytes for a request id");
    HR_TRY(hr_generate_alloc(memory, 2 * sizeof bytes + 1, 1, &rid, err));
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(rid + 2 * i, 3, "%02x", bytes[i]);
    *out = rid;
    return HR_OK;
}

static hr_status numbered_rid(struct hr_generate_memory *memory, const char *base, size_t number,
                              const char **out, hr_error *err) {
    size_t size = strlen(base) + 24;
    char *rid = NULL;
    HR_TRY(hr_generate_alloc(memory, size, 1, &rid, err));
    snprintf(rid, size, "%s_%zu", base, number);
    *out = rid;
    return HR_OK;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static hr_status refuse_duplicates(const hr_generate_request *r, hr_error *err) {
    const char **sorted = NULL;
    HR_TRY(hr_generate_alloc(r->memory, r->n_items, sizeof *sorted, &sorted, err));
    for (size_t i = 0; i < r->n_items; i++)
        sorted[i] = r->items[i].rid;
    qsort(sorted, r->n_items, sizeof *sorted, compare_strings);
    for (size_t i = 1; i < r->n_items; i++) {
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            return hr_fail(err, HR_ERR_INVALID, "rid: duplicate \"%.100s\"", sorted[i]);
    }
    return HR_OK;
}

/* A string X stands for X_0, X_1, ... when there are several items; a list has one rid per prompt,
 * and the samples of a prompt are numbered after it. */
static hr_status name_items(const cJSON *body, hr_generate_request *r, hr_error *err) {
    const cJSON *rid = hr_json_get_present(body, "rid");
    per_prompt field;
    if (rid != NULL && !cJSON_IsString(rid) && !cJSON_IsArray(rid))
        return hr_fail(err, HR_ERR_INVALID, "rid: wanted a string or a list of strings, came %s",
                       hr_json_kind(rid));
    HR_TRY(open_field(body, "rid", cJSON_IsArray(rid), r->n_prompts, &field, err));
    for (size_t p = 0; p < r->n_prompts; p++) {
        char name[64];
        const char *base = NULL;
        const cJSON *value = next_value(&field, p, name, sizeof name);
        if (value != NULL) {
            HR_TRY(hr_json_string(value, name, &base, err));
            HR_TRY(check_rid(base, name, err));
        }
        bool numbered = field.is_list ? r->n_samples > 1 : r->n_items > 1;
        for (size_t s = 0; s < r->n_samples; s++) {
            size_t i = p * r->n_samples + s;
            if (base == NULL)
                HR_TRY(random_rid(r->memory, &r->items[i].rid, err));
            else if (numbered)
                HR_TRY(numbered_rid(r->memory, base, field.is_list ? s : i, &r->items[i].rid, err));
            if (base != NULL && numbered)
                r->items[i].batch_rid = base;
            else if (base != NULL)
                r->items[i].rid = base;
        }
    }
    return refuse_duplicates(r, err);
}

static hr_status read_body(const cJSON *body, hr_generate_request *r, hr_error *err) {
    if (!cJSON_IsObject(body))
        return hr_fail(err, HR_ERR_INVALID, "the request body: wanted a JSON object, came %s",
                       hr_json_kind(body));
    const char *twice = hr_json_duplicate_key(body);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_INVALID, "the key \"%.100s\" stands twice in one object", twice);
    HR_TRY(check_keys(body, r, err));
    HR_TRY(hr_json_opt_bool(body, "stream", &r->stream, err));
    HR_TRY(hr_json_opt_bool(body, "return_text_in_logprobs", &r->return_text_in_logprobs, err));
    HR_TRY(read_items(body, r, err));
    return name_items(body, r, err);
}

hr_status hr_generate_request_read(cJSON *tree, hr_generate_request *out, hr_error *err) {
    hr_generate_request r = {.memory = calloc(1, sizeof *r.memory)};
    if (r.memory == NULL) {
        cJSON_Delete(tree);
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the request");
    }
    r.memory->tree = tree;
    hr_status status = read_body(tree, &r, err);
    if (status != HR_OK)
        hr_generate_memory_free(r.memory);
    else
        *out = r;
    return status;
}

hr_status hr_generate_request_parse(const char *body, size_t len, hr_generate_request *out,
                                    hr_error *err) {
    cJSON *tree = NULL;
    hr_status status = hr_json_parse(body, len, 0, &tree, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "the request body is not valid JSON");
    return hr_generate_request_read(tree, out, err);
}

void hr_generate_request_free(hr_generate_request *request) {
    hr_generate_memory_free(request->memory);
    *request = (hr_generate_request){0};
}
