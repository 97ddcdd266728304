/* The sampling_params object of /generate. */
#include "server/generate_sampling.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#define MAX_NEW_TOKENS INT32_MAX

static const char *const plain_keys[] = {
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "spaces_between_special_tokens",
    "logit_bias",
    "sampling_seed",
    "stream_interval",
};

static const struct {
    const char *key, *why;
} refused_keys[] = {
    {"json_schema", "constrained decoding is not supported"},
    {"regex", "constrained decoding is not supported"},
    {"ebnf", "constrained decoding is not supported"},
    {"structural_tag", "constrained decoding is not supported"},
    {"custom_params", "custom logit processors are not supported"},
};

/* Names of other APIs, or of other fields of this one, for what has another name here. */
static const struct {
    const char *key, *ours;
} other_names[] = {
    {"max_tokens", "max_new_tokens"},
    {"max_completion_tokens", "max_new_tokens"},
    {"max_length", "max_new_tokens"},
    {"min_tokens", "min_new_tokens"},
    {"seed", "sampling_seed"},
    {"num_return_sequences", "n"},
    {"do_sample", "temperature (0 is greedy)"},
    {"stop_strings", "stop"},
    {"eos_token_id", "stop_token_ids"},
    {"include_stop_str_in_output", "no_stop_trim"},
    {"logprobs", "return_logprob, beside sampling_params"},
    {"return_logprob", "return_logprob, beside sampling_params"},
    {"top_logprobs", "top_logprobs_num, beside sampling_params"},
    {"top_logprobs_num", "top_logprobs_num, beside sampling_params"},
    {"stream", "stream, beside sampling_params"},
    {"lora_path", "lora_path, beside sampling_params"},
};

static hr_status unknown_key(const char *key, const char *what, hr_error *err) {
    for (size_t i = 0; i < sizeof other_names / sizeof other_names[0]; i++) {
        if (strcmp(key, other_names[i].key) == 0)
            return hr_fail(err, HR_ERR_INVALID, "%s: unknown key \"%s\"; here it is %s", what, key,
                           other_names[i].ours);
    }
    return hr_fail(err, HR_ERR_INVALID, "%s: unknown key \"%.100s\"", what, key);
}

static hr_status check_key(const cJSON *member, const char *what, hr_error *err) {
    for (size_t i = 0; i < sizeof plain_keys / sizeof plain_keys[0]; i++) {
        if (strcmp(member->string, plain_keys[i]) == 0)
            return HR_OK;
    }
    for (size_t i = 0; i < sizeof refused_keys / sizeof refused_keys[0]; i++) {
        if (strcmp(member->string, refused_keys[i].key) != 0)
            continue;
        if (cJSON_IsNull(member))
            return HR_OK;
        return hr_fail(err, HR_ERR_UNSUPPORTED, "%s.%s: %s; leave it out", what, member->string,
                       refused_keys[i].why);
    }
    return unknown_key(member->string, what, err);
}

/* One reader per type. Each leaves *out alone when the key is absent or null, and names "what.key".
 */

static hr_status read_i64(const cJSON *params, const char *what, const char *key, int64_t min,
                          int64_t max, int64_t *out, hr_error *err) {
    const cJSON *item = hr_json_get_present(params, key);
    char name[96];
    if (item == NULL)
        return HR_OK;
    snprintf(name, sizeof name, "%s.%s", what, key);
    return hr_json_i64(item, name, min, max, HR_JSON_DIGITS, out, err);
}

static hr_status read_f32(const cJSON *params, const char *what, const char *key, double min,
                          double max, float *out, hr_error *err) {
    const cJSON *item = hr_json_get_present(params, key);
    char name[96];
    double value = 0;
    if (item == NULL)
        return HR_OK;
    snprintf(name, sizeof name, "%s.%s", what, key);
    HR_TRY(hr_json_double(item, name, min, max, &value, err));
    *out = (float)value;
    return HR_OK;
}

/* For ranges that leave out their lower end, zero. */
static hr_status read_positive_f32(const cJSON *params, const char *what, const char *key,
                                   double max, float *out, hr_error *err) {
    HR_TRY(read_f32(params, what, key, 0, max, out, err));
    if (*out > 0)
        return HR_OK;
    return hr_fail(err, HR_ERR_INVALID, "%s.%s: wanted a number above 0, at most %g", what, key,
                   max);
}

static hr_status read_bool(const cJSON *params, const char *what, const char *key, bool *out,
                           hr_error *err) {
    const cJSON *item = hr_json_get_present(params, key);
    char name[96];
    if (item == NULL)
        return HR_OK;
    snprintf(name, sizeof name, "%s.%s", what, key);
    return hr_json_bool(item, name, out, err);
}

hr_status hr_generate_ids_parse(const cJSON *list, const char *what,
                                struct hr_generate_memory *memory, const uint32_t **ids, size_t *n,
                                hr_error *err) {
    if (!cJSON_IsArray(list))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a list of token ids, came %s", what,
                       hr_json_kind(list));
    size_t count = (size_t)cJSON_GetArraySize(list), i = 0;
    uint32_t *values = NULL;
    HR_TRY(hr_generate_alloc(memory, count, sizeof *values, &values, err));
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, list) {
        double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (value >= 0 && value <= UINT32_MAX && value == (double)(uint32_t)value) {
            values[i++] = (uint32_t)value;
            continue;
        }
        char name[128];
        uint64_t slow = 0;
        snprintf(name, sizeof name, "%s[%zu]", what, i);
        HR_TRY(hr_json_u64(item, name, 0, UINT32_MAX, HR_JSON_NUMBER, &slow, err));
        values[i++] = (uint32_t)slow;
    }
    *ids = values;
    *n = count;
    return HR_OK;
}

/* stop or stop_regex: one string, or a list of at most max. */
static hr_status read_strings(const cJSON *params, const char *what, const char *key, size_t max,
                              struct hr_generate_memory *memory, const char *const **out, size_t *n,
                              hr_error *err) {
    const cJSON *value = hr_json_get_present(params, key);
    if (value == NULL)
        return HR_OK;
    bool single = cJSON_IsString(value);
    if (!single && !cJSON_IsArray(value))
        return hr_fail(err, HR_ERR_INVALID, "%s.%s: wanted a string or a list of strings, came %s",
                       what, key, hr_json_kind(value));
    size_t count = single ? 1 : (size_t)cJSON_GetArraySize(value);
    if (count > max)
        return hr_fail(err, HR_ERR_LIMIT, "%s.%s: %zu strings are over the limit of %zu", what, key,
                       count, max);
    const char **strings = NULL;
    HR_TRY(hr_generate_alloc(memory, count, sizeof *strings, &strings, err));
    const cJSON *one = single ? value : value->child;
    for (size_t i = 0; i < count; i++, one = one->next) {
        if (!cJSON_IsString(one) || one->valuestring[0] == '\0')
            return hr_fail(err, HR_ERR_INVALID, "%s.%s[%zu]: wanted a string that is not empty",
                           what, key, i);
        strings[i] = one->valuestring;
    }
    *out = strings;
    *n = count;
    return HR_OK;
}

static hr_status read_logit_bias(const cJSON *params, const char *what,
                                 struct hr_generate_memory *memory, hr_sampling_params *sampling,
                                 hr_error *err) {
    const cJSON *map = hr_json_get_present(params, "logit_bias");
    if (map == NULL)
        return HR_OK;
    if (!cJSON_IsObject(map))
        return hr_fail(err, HR_ERR_INVALID, "%s.logit_bias: wanted an object of token ids, came %s",
                       what, hr_json_kind(map));
    size_t count = (size_t)cJSON_GetArraySize(map), i = 0;
    uint32_t *ids = NULL;
    float *biases = NULL;
    HR_TRY(hr_generate_alloc(memory, count, sizeof *ids, &ids, err));
    HR_TRY(hr_generate_alloc(memory, count, sizeof *biases, &biases, err));
    const cJSON *entry = NULL;
    cJSON_ArrayForEach(entry, map) {
        char name[160];
        uint64_t id = 0;
        double bias = 0;
        cJSON key = {.type = cJSON_String, .valuestring = entry->string};
        snprintf(name, sizeof name, "%s.logit_bias key", what);
        HR_TRY(hr_json_u64(&key, name, 0, UINT32_MAX, HR_JSON_DIGITS, &id, err));
        snprintf(name, sizeof name, "%s.logit_bias[\"%.32s\"]", what, entry->string);
        HR_TRY(hr_json_double(entry, name, -FLT_MAX, FLT_MAX, &bias, err));
        ids[i] = (uint32_t)id;
        biases[i++] = (float)bias;
    }
    sampling->logit_bias_ids = ids;
    sampling->logit_bias = biases;
    sampling->n_logit_bias = count;
    return HR_OK;
}

static hr_status read_seed(const cJSON *params, const char *what, hr_sampling_params *sampling,
                           hr_error *err) {
    const cJSON *seed = hr_json_get_present(params, "sampling_seed");
    char name[96];
    if (seed == NULL)
        return HR_OK;
    snprintf(name, sizeof name, "%s.sampling_seed", what);
    sampling->has_seed = true;
    if (!cJSON_IsNumber(seed) || seed->valuedouble >= 0)
        return hr_json_u64(seed, name, 0, UINT64_MAX, HR_JSON_DIGITS, &sampling->seed, err);
    int64_t below_zero = 0;
    HR_TRY(hr_json_i64(seed, name, INT64_MIN, -1, HR_JSON_NUMBER, &below_zero, err));
    sampling->seed = (uint64_t)below_zero;
    return HR_OK;
}

static hr_status read_lengths(const cJSON *params, const char *what, hr_generate_item *item,
                              size_t *n_samples, hr_error *err) {
    hr_sampling_params *s = &item->sampling;
    int64_t max_new = s->max_new_tokens, min_new = 0, n = 1, top_k = -1, interval = 0;
    HR_TRY(read_i64(params, what, "max_new_tokens", 0, MAX_NEW_TOKENS, &max_new, err));
    HR_TRY(read_i64(params, what, "min_new_tokens", 0, MAX_NEW_TOKENS, &min_new, err));
    if (min_new > max_new)
        return hr_fail(err, HR_ERR_INVALID, "%s.min_new_tokens: %lld is over max_new_tokens, %lld",
                       what, (long long)min_new, (long long)max_new);
    HR_TRY(read_i64(params, what, "n", 1, HR_GENERATE_MAX_ITEMS, &n, err));
    HR_TRY(read_i64(params, what, "top_k", -1, INT32_MAX, &top_k, err));
    if (top_k == 0)
        return hr_fail(err, HR_ERR_INVALID, "%s.top_k: wanted -1 (off) or at least 1, came 0",
                       what);
    HR_TRY(read_i64(params, what, "stream_interval", 1, INT32_MAX, &interval, err));
    s->max_new_tokens = (uint32_t)max_new;
    s->min_new_tokens = (uint32_t)min_new;
    s->top_k = (int32_t)top_k;
    item->stream_interval = (uint32_t)interval;
    *n_samples = (size_t)n;
    return HR_OK;
}

hr_status hr_generate_sampling_parse(const cJSON *params, const char *what,
                                     struct hr_generate_memory *memory, hr_generate_item *item,
                                     size_t *n_samples, hr_error *err) {
    item->sampling = hr_sampling_params_default();
    item->skip_special_tokens = true;
    item->spaces_between_special_tokens = true;
    *n_samples = 1;
    if (params == NULL || cJSON_IsNull(params))
        return HR_OK;
    if (!cJSON_IsObject(params))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an object, came %s", what,
                       hr_json_kind(params));
    const cJSON *member = NULL;
    cJSON_ArrayForEach(member, params) {
        HR_TRY(check_key(member, what, err));
    }

    hr_sampling_params *s = &item->sampling;
    HR_TRY(read_lengths(params, what, item, n_samples, err));
    HR_TRY(read_f32(params, what, "temperature", 0, FLT_MAX, &s->temperature, err));
    HR_TRY(read_positive_f32(params, what, "top_p", 1, &s->top_p, err));
    HR_TRY(read_f32(params, what, "min_p", 0, 1, &s->min_p, err));
    HR_TRY(read_f32(params, what, "frequency_penalty", -2, 2, &s->frequency_penalty, err));
    HR_TRY(read_f32(params, what, "presence_penalty", -2, 2, &s->presence_penalty, err));
    HR_TRY(read_positive_f32(params, what, "repetition_penalty", 2, &s->repetition_penalty, err));
    HR_TRY(read_logit_bias(params, what, memory, s, err));
    HR_TRY(read_seed(params, what, s, err));
    HR_TRY(read_bool(params, what, "ignore_eos", &s->ignore_eos, err));
    HR_TRY(read_bool(params, what, "skip_special_tokens", &item->skip_special_tokens, err));
    HR_TRY(read_bool(params, what, "spaces_between_special_tokens",
                     &item->spaces_between_special_tokens, err));
    HR_TRY(read_bool(params, what, "no_stop_trim", &item->no_stop_trim, err));
    HR_TRY(read_strings(params, what, "stop", HR_GENERATE_MAX_STOPS, memory, &item->stops,
                        &item->n_stops, err));
    HR_TRY(read_strings(params, what, "stop_regex", HR_GENERATE_MAX_STOP_REGEXES, memory,
                        &item->stop_regexes, &item->n_stop_regexes, err));
    const cJSON *stop_ids = hr_json_get_present(params, "stop_token_ids");
    char name[96];
    snprintf(name, sizeof name, "%s.stop_token_ids", what);
    return stop_ids == NULL ? HR_OK
                            : hr_generate_ids_parse(stop_ids, name, memory, &s->stop_token_ids,
                                                    &s->n_stop_token_ids, err);
}
