/* The body of POST /v1/completions, turned into a request of /generate and the few facts that only
 * this route has: a pure function of the bytes. */
#ifndef HR_SERVER_COMPLETIONS_REQUEST_H
#define HR_SERVER_COMPLETIONS_REQUEST_H

#include "server/generate_request.h"

#define HR_COMPLETION_MAX_LOGPROBS 128

/* Strings belong to the request. */
typedef struct hr_completion {
    const char *model;   /* as sent; NULL = left out */
    const char *adapter; /* what stands behind the first ':' of model, NULL without one */
    bool echo, logprobs, include_usage;
    uint32_t n_logprobs; /* alternatives per token */
} hr_completion;

/* Refusals are ERR_INVALID, ERR_UNSUPPORTED or ERR_LIMIT and name the field. An adapter in model
 * wins over lora_path. The caller frees *request with hr_generate_request_free. Thread-safe. */
hr_status hr_completions_request_parse(const char *body, size_t len, hr_generate_request *request,
                                       hr_completion *completion, hr_error *err);

#endif
