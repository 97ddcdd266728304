/* Calls of commands to several engines at once, answered in JSON. */
#ifndef HR_CLI_ENGINE_CALLS_H
#define HR_CLI_ENGINE_CALLS_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hr_engine_call {
    char *url; /* of the engine */
    hr_status status;
    hr_error err;
    unsigned http_status; /* 0: no answer came */
    cJSON *reply;         /* NULL when it is not JSON, or failed */
} hr_engine_call;

/* What every engine is asked. */
typedef struct hr_engine_ask {
    const char *method;
    const char *const *paths; /* with their queries; asked at the same time */
    size_t n_paths;
    const char *body, *api_key; /* JSON; NULL: none */
    uint64_t timeout_ms;        /* for all of it */
} hr_engine_ask;

/* Every path on every engine at the same time. *calls gets n of them for each path, in the order of
 * urls, one path after the other; n * n_paths are freed with hr_engine_calls_free. Fails only for
 * what concerns all (a URL, memory); what one engine does stands in its call. */
hr_status hr_engine_calls(const char *const *urls, size_t n, const hr_engine_ask *ask,
                          hr_engine_call **calls, hr_error *err);
void hr_engine_calls_free(hr_engine_call *calls, size_t n);

/* Whether there is one engine or more, and each is a URL, before anything is done. ERR_INVALID. */
hr_status hr_engine_urls_check(const char *const *urls, size_t n, hr_error *err);

/* Fails with the status of a call that failed: "engine URL: why", or that it is not reachable. */
hr_status hr_engine_call_fail(const hr_engine_call *call, hr_error *err);

#endif
