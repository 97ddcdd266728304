/* The body of POST /v1/completions: its fields are moved into a body of /generate, which is then
 * read as such, so that both routes check values by the same code. */
#include "server/completions_request.h"

#include "format/json.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_MAX_TOKENS 16

/* Fields that go to sampling_params, under another name where there are two. */
static const struct {
    const char *key, *sampling_key;
} sampling_fields[] = {
    {"max_tokens", "max_new_tokens"},
    {"min_tokens", "min_new_tokens"},
    {"n", "n"},
    {"temperature", "temperature"},
    {"top_p", "top_p"},
    {"top_k", "top_k"},
    {"min_p", "min_p"},
    {"frequency_penalty", "frequency_penalty"},
    {"presence_penalty", "presence_penalty"},
    {"repetition_penalty", "repetition_penalty"},
    {"stop", "stop"},
    {"stop_regex", "stop_regex"},
    {"stop_token_ids", "stop_token_ids"},
    {"ignore_eos", "ignore_eos"},
    {"skip_special_tokens", "skip_special_tokens"},
    {"spaces_between_special_tokens", "spaces_between_special_tokens"},
    {"no_stop_trim", "no_stop_trim"},
    {"logit_bias", "logit_bias"},
    {"seed", "sampling_seed"},
    {"regex", "regex"},
    {"ebnf", "ebnf"},
    {"json_schema", "json_schema"},
    {"structural_tag", "structural_tag"},
    {"custom_params", "custom_params"},
    {"stream_interval", "stream_interval"},
};

/* Fields that /generate reads, or refuses, under the same name. */
static const char *const plain_fields[] = {
    "lora_path",
    "rid",
    "stream",
    "extra_key",
    "cache_salt",
    "priority",
    "session_id",
    "session_params",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "return_hidden_states",
    "custom_logit_processor",
};

/* Fields that are read below, or change nothing. */
static const char *const own_fields[] = {
    "prompt",  "model",  "echo",           "logprobs",         "user",
    "best_of", "suffix", "stream_options", "return_token_ids", "response_format"};

static bool is_own(const char *key) {
    for (size_t i = 0; i < sizeof own_fields / sizeof own_fields[0]; i++) {
        if (strcmp(key, own_fields[i]) == 0)
            return true;
    }
    return false;
}

static hr_status no_memory(hr_error *err) {
    return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the request");
}

/* Moves body[key] to target[name]; nothing when it is absent. */
static hr_status move(cJSON *body, const char *key, cJSON *target, const char *name,
                      hr_error *err) {
    cJSON *value = cJSON_DetachItemFromObjectCaseSensitive(body, key);
    if (value == NULL)
        return HR_OK;
    if (cJSON_AddItemToObject(target, name, value))
        return HR_OK;
    cJSON_Delete(value);
    return no_memory(err);
}

/* Texts go to text, ids to input_ids. */
static hr_status move_prompt(cJSON *body, cJSON *target, hr_error *err) {
    const cJSON *prompt = hr_json_get_present(body, "prompt");
    if (prompt == NULL)
        return hr_fail(err, HR_ERR_INVALID, "prompt is needed; none came");
    bool texts = cJSON_IsString(prompt) || (cJSON_IsArray(prompt) && cJSON_IsString(prompt->child));
    bool ids =
        cJSON_IsArray(prompt) && (cJSON_IsNumber(prompt->child) || cJSON_IsArray(prompt->child));
    if (!texts && !ids)
        return hr_fail(err, HR_ERR_INVALID,
                       "prompt: wanted a string, a list of strings, a list of token ids or a list "
                       "of such lists; none may be empty");
    return move(body, "prompt", target, texts ? "text" : "input_ids", err);
}

static hr_status refuse_unsupported(const cJSON *body, hr_error *err) {
    const cJSON *suffix = hr_json_get_present(body, "suffix");
    if (suffix != NULL && !(cJSON_IsString(suffix) && suffix->valuestring[0] == '\0'))
        return hr_fail(err, HR_ERR_UNSUPPORTED, "suffix is not supported; leave it out");
    uint64_t n = 1, best_of = 1;
    HR_TRY(hr_json_opt_u64(body, "n", 1, HR_GENERATE_MAX_ITEMS, &n, err));
    best_of = n;
    HR_TRY(hr_json_opt_u64(body, "best_of", 1, UINT32_MAX, &best_of, err));
    if (best_of != n && best_of != 1)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "best_of other than n is not supported");
    const cJSON *format = hr_json_get_present(body, "response_format");
    const char *type = "text";
    HR_TRY(hr_json_opt_string(format, "type", &type, err));
    if (format != NULL && strcmp(type, "text") != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "response_format: constrained decoding is not supported; leave it out");
    return HR_OK;
}

static hr_status read_own(cJSON *body, hr_completion *c, hr_error *err) {
    uint64_t n = 0, tokens = 0;
    HR_TRY(hr_json_opt_u64(body, "max_tokens", 0, INT32_MAX, &tokens, err));
    HR_TRY(hr_json_opt_u64(body, "min_tokens", 0, INT32_MAX, &tokens, err));
    HR_TRY(refuse_unsupported(body, err));
    HR_TRY(hr_json_opt_bool(body, "echo", &c->echo, err));
    const cJSON *logprobs = hr_json_get_present(body, "logprobs");
    if (logprobs != NULL && !cJSON_IsFalse(logprobs))
        HR_TRY(cJSON_IsTrue(logprobs)
                   ? HR_OK
                   : hr_json_u64(logprobs, "logprobs", 0, HR_COMPLETION_MAX_LOGPROBS,
                                 HR_JSON_DIGITS, &n, err));
    c->logprobs = logprobs != NULL && !cJSON_IsFalse(logprobs);
    c->n_logprobs = (uint32_t)n;
    const cJSON *stream = hr_json_get_present(body, "stream_options");
    if (stream != NULL && !cJSON_IsObject(stream))
        return hr_fail(err, HR_ERR_INVALID, "stream_options: wanted an object, came %s",
                       hr_json_kind(stream));
    return hr_json_opt_bool(stream, "include_usage", &c->include_usage, err);
}

/* The string stays with the body of /generate, where nothing looks at it. */
static hr_status read_model(cJSON *body, cJSON *target, hr_completion *c, hr_error *err) {
    HR_TRY(hr_json_opt_string(body, "model", &c->model, err));
    if (c->model == NULL)
        return HR_OK;
    const char *colon = strchr(c->model, ':');
    HR_TRY(move(body, "model", target, "model", err));
    if (colon == NULL)
        return HR_OK;
    const char *begin = colon + 1 + strspn(colon + 1, " \t\r\n");
    size_t n = strlen(begin);
    while (n > 0 && strchr(" \t\r\n", begin[n - 1]) != NULL)
        n--;
    char *name = strndup(begin, n);
    cJSON *value = name != NULL ? cJSON_CreateString(name) : NULL;
    free(name);
    if (value == NULL)
        return no_memory(err);
    cJSON_DeleteItemFromObjectCaseSensitive(body, "lora_path");
    if (!cJSON_AddItemToObject(target, "lora_path", value)) {
        cJSON_Delete(value);
        return no_memory(err);
    }
    c->adapter = value->valuestring;
    return HR_OK;
}

static hr_status add_logprob_fields(cJSON *target, const hr_completion *c, hr_error *err) {
    if (!c->logprobs)
        return HR_OK;
    bool added = cJSON_AddTrueToObject(target, "return_logprob") != NULL &&
                 cJSON_AddNumberToObject(target, "logprob_start_len", c->echo ? 0 : -1) != NULL &&
                 cJSON_AddNumberToObject(target, "top_logprobs_num", c->n_logprobs) != NULL;
    return added ? HR_OK : no_memory(err);
}

static hr_status move_fields(cJSON *body, cJSON *target, hr_error *err) {
    cJSON *sampling = cJSON_AddObjectToObject(target, "sampling_params");
    if (sampling == NULL)
        return no_memory(err);
    if (hr_json_get_present(body, "max_tokens") == NULL) {
        cJSON_DeleteItemFromObjectCaseSensitive(body, "max_tokens");
        if (cJSON_AddNumberToObject(body, "max_tokens", DEFAULT_MAX_TOKENS) == NULL)
            return no_memory(err);
    }
    for (size_t i = 0; i < sizeof sampling_fields / sizeof sampling_fields[0]; i++)
        HR_TRY(move(body, sampling_fields[i].key, sampling, sampling_fields[i].sampling_key, err));
    for (size_t i = 0; i < sizeof plain_fields / sizeof plain_fields[0]; i++)
        HR_TRY(move(body, plain_fields[i], target, plain_fields[i], err));
    return HR_OK;
}

/* What nobody knows goes along under its own name, to be noted there. */
static hr_status move_unknown(cJSON *body, cJSON *target, hr_error *err) {
    cJSON *next = NULL;
    for (cJSON *member = body->child; member != NULL; member = next) {
        next = member->next;
        if (is_own(member->string) || hr_json_get(target, member->string) != NULL)
            continue;
        cJSON_DetachItemViaPointer(body, member);
        if (!cJSON_AddItemToObject(target, member->string, member)) {
            cJSON_Delete(member);
            return no_memory(err);
        }
    }
    return HR_OK;
}

static hr_status convert(cJSON *body, cJSON *target, hr_completion *c, hr_error *err) {
    if (!cJSON_IsObject(body))
        return hr_fail(err, HR_ERR_INVALID, "the request body: wanted a JSON object, came %s",
                       hr_json_kind(body));
    const char *twice = hr_json_duplicate_key(body);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_INVALID, "the key \"%.100s\" stands twice in one object", twice);
    HR_TRY(read_own(body, c, err));
    HR_TRY(read_model(body, target, c, err));
    HR_TRY(move_prompt(body, target, err));
    HR_TRY(move_fields(body, target, err));
    HR_TRY(add_logprob_fields(target, c, err));
    return move_unknown(body, target, err);
}

hr_status hr_completions_request_parse(const char *body, size_t len, hr_generate_request *request,
                                       hr_completion *completion, hr_error *err) {
    cJSON *tree = NULL, *target = cJSON_CreateObject();
    hr_completion c = {0};
    hr_status status = HR_OK;
    if (target == NULL)
        return no_memory(err);
    status = hr_json_parse(body, len, 0, &tree, err);
    if (status != HR_OK)
        hr_fail_context(err, status, "the request body is not valid JSON");
    else
        status = convert(tree, target, &c, err);
    cJSON_Delete(tree);
    if (status != HR_OK) {
        cJSON_Delete(target);
        return status;
    }
    HR_TRY(hr_generate_request_read(target, request, err));
    *completion = c;
    return HR_OK;
}
