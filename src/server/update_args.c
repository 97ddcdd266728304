/* Arguments of the update and session routes. */
#include "server/update_args.h"

#include "format/json.h"
#include "format/json_bytes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SECONDS 86400.0
#define DECIMAL "0123456789.eE+-" /* strtod alone would take hex, words and space */

/* What SGLang's clients send and what it would do there has nothing to do here. */
static const char *const without_meaning[] = {
    "rid",
    "http_worker_ipc",     /* which of several front ends gets the reply */
    "torch_empty_cache",   /* the cache of a GPU allocator */
    "disable_draft_model", /* speculative decoding */
    "recapture_cuda_graph",
    "is_async",          /* graphs; how SGLang reads files */
    "keep_pause",        /* a pause is never ended by an update here */
    "token_step",        /* a counter of the trainer */
    "allow_quant_error", /* nothing is quantised */
    "lora_id",           /* ids are the server's */
    NULL};

static bool listed(const char *const *list, const char *key) {
    while (*list != NULL && strcmp(*list, key) != 0)
        list++;
    return *list != NULL;
}

static hr_status unknown_key(const char *const *known, const char *key, hr_error *err) {
    char list[600] = "";
    size_t used = 0;
    for (; *known != NULL && used + strlen(*known) + 3 < sizeof list; known++) {
        const char *parts[] = {used > 0 ? ", " : "", *known};
        for (int i = 0; i < 2; i++) {
            size_t n = strlen(parts[i]);
            memcpy(list + used, parts[i], n + 1);
            used += n;
        }
    }
    return hr_fail(err, HR_ERR_INVALID,
                   "the key \"%.100s\" is not known here; this route takes: %s", key, list);
}

hr_status hr_args_check(const cJSON *args, const char *const *known, hr_error *err) {
    for (const cJSON *item = args->child; item != NULL; item = item->next) {
        if (!listed(known, item->string) && !listed(without_meaning, item->string))
            return unknown_key(known, item->string, err);
    }
    const char *twice = hr_json_duplicate_key(args);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_INVALID, "the key \"%.100s\" stands twice in one object", twice);
    return HR_OK;
}

static bool is_utf8(const char *text) {
    size_t len = strlen(text), at = 0, n;
    while (at < len && (n = hr_utf8_sequence(text + at, len - at)) > 0)
        at += n;
    return at == len;
}

hr_status hr_args_add(cJSON *args, const char *key, const char *value, hr_error *err) {
    if (hr_json_get(args, key) != NULL)
        return hr_fail(err, HR_ERR_INVALID, "the key \"%.100s\" is given twice", key);
    if (!is_utf8(key) || !is_utf8(value))
        return hr_fail(err, HR_ERR_INVALID, "the key \"%.100s\": wanted UTF-8", key);
    if (cJSON_AddStringToObject(args, key, value) == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the query string");
    return HR_OK;
}

hr_status hr_args_bool(const cJSON *args, const char *key, bool *out, hr_error *err) {
    const cJSON *item = hr_json_get_present(args, key);
    if (item == NULL)
        return HR_OK;
    const char *text = cJSON_IsString(item) ? item->valuestring : "";
    bool yes = cJSON_IsTrue(item) || (cJSON_IsNumber(item) && item->valuedouble == 1) ||
               strcmp(text, "1") == 0 || strcmp(text, "true") == 0 || strcmp(text, "True") == 0;
    bool no = cJSON_IsFalse(item) || (cJSON_IsNumber(item) && item->valuedouble == 0) ||
              strcmp(text, "0") == 0 || strcmp(text, "false") == 0 || strcmp(text, "False") == 0;
    if (!yes && !no && cJSON_IsString(item))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted true or false, came \"%.100s\"", key, text);
    if (!yes && !no)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted true or false, came %s", key,
                       hr_json_kind(item));
    *out = yes;
    return HR_OK;
}

hr_status hr_args_u64(const cJSON *args, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                      hr_error *err) {
    const cJSON *item = hr_json_get_present(args, key);
    return item == NULL ? HR_OK : hr_json_u64(item, key, min, max, HR_JSON_DIGITS, out, err);
}

hr_status hr_args_string(const cJSON *args, const char *key, const char **out, hr_error *err) {
    return hr_json_opt_string(args, key, out, err);
}

hr_status hr_args_seconds(const cJSON *args, const char *key, uint64_t *ms, hr_error *err) {
    const cJSON *item = hr_json_get_present(args, key);
    double seconds = 0;
    char *end = NULL;
    if (item == NULL)
        return HR_OK;
    if (cJSON_IsString(item)) {
        seconds = strtod(item->valuestring, &end);
        if (end == item->valuestring ||
            item->valuestring[strspn(item->valuestring, DECIMAL)] != '\0' || *end != '\0')
            seconds = -1;
    } else {
        HR_TRY(hr_json_double(item, key, -HUGE_VAL, HUGE_VAL, &seconds, err));
    }
    if (!(seconds > 0 && seconds <= MAX_SECONDS))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted seconds, more than 0 and at most %.0f", key,
                       MAX_SECONDS);
    *ms = (uint64_t)ceil(seconds * 1000);
    return HR_OK;
}

hr_status hr_args_object_text(const cJSON *args, const char *key, char **text, hr_error *err) {
    const cJSON *item = hr_json_get_present(args, key);
    cJSON *parsed = NULL;
    hr_status status = HR_OK;
    *text = NULL;
    if (item == NULL)
        return HR_OK;
    if (cJSON_IsString(item)) {
        status = hr_json_parse(item->valuestring, strlen(item->valuestring), 0, &parsed, err);
        if (status != HR_OK)
            return hr_fail_context(err, status, "%s", key);
        item = parsed;
    }
    const char *twice = cJSON_IsObject(item) ? hr_json_duplicate_key(item) : NULL;
    if (!cJSON_IsObject(item))
        status =
            hr_fail(err, HR_ERR_INVALID, "%s: wanted an object, came %s", key, hr_json_kind(item));
    else if (twice != NULL)
        status = hr_fail(err, HR_ERR_INVALID, "%s: the key \"%.100s\" stands twice", key, twice);
    else if ((*text = cJSON_PrintUnformatted(item)) == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for %s", key);
    cJSON_Delete(parsed);
    return status;
}

hr_status hr_args_selector(const cJSON *args, hr_error *err) {
    const char *selector = "all";
    HR_TRY(hr_args_string(args, "selector", &selector, err));
    if (strcmp(selector, "all") == 0 || strcmp(selector, "target") == 0)
        return HR_OK;
    if (strcmp(selector, "draft") == 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "selector: this engine has no draft model; send \"all\" or \"target\"");
    return hr_fail(err, HR_ERR_INVALID,
                   "selector: wanted \"all\", \"target\" or \"draft\", came \"%.100s\"", selector);
}
