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
    cJSON *reply; /* NULL when it is not JSON, or failed */
    uint64_t ns;  /* from call to answer */
} hr_engine_call;

/* The same call on every engine: method, path with its query, body (NULL: none) as JSON. *calls
 * gets n of them, in the order of urls, freed with hr_engine_calls_free. Fails only for what
 * concerns all (a URL, memory); what one engine does stands in its call. */
hr_status hr_engine_calls(const char *const *urls, size_t n, const char *api_key,
                          const char *method, const char *path, const char *body,
                          uint64_t timeout_ms, hr_engine_call **calls, hr_error *err);
void hr_engine_calls_free(hr_engine_call *calls, size_t n);

#endif
