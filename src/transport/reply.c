/* An engine's answer to a call of the update routes. */
#include "transport/reply.h"

#include "format/json.h"

#include <string.h>

enum { SHOWN_BYTES = 400 };

hr_status hr_status_from_name(const char *name, hr_status fallback) {
    static const struct {
        const char *name;
        hr_status status;
    } names[] = {
#define ROW(name, value, text) {#name, HR_##name},
        HR_STATUS_MAP(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i].name, name) == 0)
            return names[i].status;
    }
    return fallback;
}

static hr_status status_of(unsigned http_status) {
    switch (http_status) {
    case 401:
    case 403:
        return HR_ERR_INVALID;
    case 404:
    case 405:
        return HR_ERR_UNSUPPORTED;
    case 413:
        return HR_ERR_LIMIT;
    case 503:
        return HR_ERR_BUSY;
    case 504:
        return HR_ERR_TIMEOUT;
    default:
        return http_status >= 500 ? HR_ERR_INTERNAL : HR_ERR_INVALID;
    }
}

static const char *string_at(const cJSON *object, const char *key) {
    const cJSON *item = hr_json_get(object, key);
    return cJSON_IsString(item) && item->valuestring[0] != '\0' ? item->valuestring : NULL;
}

/* What the reply says in words, wherever it says it; NULL when it says nothing. */
static const char *words_of(const cJSON *tree) {
    const cJSON *error = hr_json_get(tree, "error");
    const char *const found[] = {string_at(error, "message"), string_at(tree, "error"),
                                 string_at(tree, "error_message"), string_at(tree, "message"),
                                 string_at(tree, "detail")};
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) {
        if (found[i] != NULL)
            return found[i];
    }
    return NULL;
}

static bool begins_object(const char *text, size_t len) {
    size_t at = 0;
    while (at < len &&
           (text[at] == ' ' || text[at] == '\t' || text[at] == '\r' || text[at] == '\n'))
        at++;
    return at < len && text[at] == '{';
}

hr_status hr_reply_read(unsigned http_status, const char *text, size_t len, cJSON **tree,
                        hr_error *err) {
    *tree = NULL;
    if (len > 0)
        (void)hr_json_parse(text, len, 0, tree, NULL); /* plain text is an answer too */
    bool accepted = http_status >= 200 && http_status <= 299;
    if (accepted && *tree == NULL && begins_object(text, len))
        return hr_fail(err, HR_ERR_PEER, "HTTP %u with JSON that cannot be read (cut short?): %.*s",
                       http_status, (int)(len < SHOWN_BYTES ? len : SHOWN_BYTES), text);
    if (accepted && !cJSON_IsFalse(hr_json_get(*tree, "success")))
        return HR_OK;
    const char *name = string_at(*tree, "status"), *words = words_of(*tree);
    hr_status status = status_of(accepted ? 400 : http_status);
    if (name != NULL)
        status = hr_status_from_name(name, status);
    if (status == HR_OK)
        status = HR_ERR_INTERNAL; /* refused, whatever it says */
    if (words != NULL)
        return hr_fail(err, status, "%s", words);
    if (len > 0)
        return hr_fail(err, status, "HTTP %u: %.*s", http_status,
                       (int)(len < SHOWN_BYTES ? len : SHOWN_BYTES), text);
    return hr_fail(err, status, "HTTP %u without a word", http_status);
}

hr_status hr_reply_of_call(const hr_http_call *call, cJSON **tree, hr_error *err) {
    hr_error local = {0};
    hr_status status =
        hr_reply_read(call->http_status, call->reply.data, call->reply.len, tree, &local);
    if (status == HR_OK)
        return HR_OK;
    if (call->http_status == 401 || call->http_status == 403)
        return hr_fail(err, status,
                       "%.400s: %s; give the engine's key (api_key; in a shell --api-key or "
                       "HEADRACE_API_KEY); where it has an admin key, that one for weights",
                       local.message,
                       call->with_key ? "the key that was sent is not the one that it wants"
                                      : "it wants a key, and none was sent");
    return hr_fail(err, status, "%s", local.message);
}
