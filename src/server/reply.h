/* Error answers, in the one form all routes share, and how an hr_status becomes an HTTP status. */
#ifndef HR_SERVER_REPLY_H
#define HR_SERVER_REPLY_H

#include "base/error.h"
#include "server/http.h"

/* INVALID and the like 400, BUSY and STOPPING 503, INTERNAL 500. */
unsigned hr_http_status_of(hr_status status);

/* {"error":{"message":...,"type":...,"code":...}} appended to out. */
void hr_error_body(unsigned http_status, const char *message, hr_buf *out);

/* Answers with an error body; 503 carries Retry-After. */
void hr_reply_error(hr_exchange *exchange, unsigned http_status, const char *message);
void hr_reply_failure(hr_exchange *exchange, const hr_error *err);

/* The same for /v1 routes, in the flat form that OpenAI clients of SGLang read: {"object":"error",
 * "message", "type", "param", "code"}. */
void hr_reply_openai_failure(hr_exchange *exchange, const hr_error *err);
/* 404 for a model that is not served. */
void hr_reply_model_not_found(hr_exchange *exchange, const char *model);

/* A line in the log, of a call that was to change something: which route, and why not. */
void hr_log_refusal(const hr_exchange *exchange, const hr_error *err);

#endif
