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

#endif
