/* Error answers. */
#include "server/reply.h"

#include "base/log.h"
#include "format/json_writer.h"

#include <stdio.h>

unsigned hr_http_status_of(hr_status status) {
    switch (status) {
    case HR_OK:
        return 200;
    case HR_ERR_BUSY:
    case HR_ERR_STOPPING:
    case HR_ERR_UNSERVABLE:
        return 503;
    case HR_ERR_TIMEOUT:
        return 504;
    case HR_ERR_INTERNAL:
    case HR_ERR_NO_MEMORY:
        return 500;
    default:
        return 400;
    }
}

static const char *type_of(unsigned http_status) {
    switch (http_status) {
    case 400:
        return "BadRequest";
    case 404:
        return "NotFound";
    case 405:
        return "MethodNotAllowed";
    case 413:
        return "PayloadTooLarge";
    case 503:
        return "ServiceUnavailable";
    case 504:
        return "Timeout";
    default:
        return "InternalServerError";
    }
}

void hr_error_body(unsigned http_status, const char *message, hr_buf *out) {
    hr_json_writer w;
    hr_json_writer_init(&w, out);
    hr_json_object_begin(&w);
    hr_json_key(&w, "error");
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "message", message);
    hr_json_put_string(&w, "type", type_of(http_status));
    hr_json_put_u64(&w, "code", http_status);
    hr_json_object_end(&w);
    hr_json_object_end(&w);
}

void hr_reply_error(hr_exchange *exchange, unsigned http_status, const char *message) {
    hr_buf body = {0};
    hr_error_body(http_status, message, &body);
    if (http_status == 503)
        hr_exchange_header(exchange, "Retry-After", "1");
    hr_exchange_reply(exchange, http_status, &body);
}

void hr_reply_failure(hr_exchange *exchange, const hr_error *err) {
    hr_reply_error(exchange, hr_http_status_of(err->status), err->message);
}

void hr_reply_openai_failure(hr_exchange *exchange, const hr_error *err) {
    unsigned http_status = hr_http_status_of(err->status);
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "object", "error");
    hr_json_put_string(&w, "message", err->message);
    hr_json_put_string(&w, "type", http_status == 400 ? "BadRequestError" : type_of(http_status));
    hr_json_put_null(&w, "param");
    hr_json_put_u64(&w, "code", http_status);
    hr_json_object_end(&w);
    if (http_status == 503)
        hr_exchange_header(exchange, "Retry-After", "1");
    hr_exchange_reply(exchange, http_status, &body);
}

void hr_reply_model_not_found(hr_exchange *exchange, const char *model) {
    char message[512];
    hr_buf body = {0};
    hr_json_writer w;
    snprintf(message, sizeof message,
             "The model '%.300s' is not served; GET /v1/models lists what is", model);
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_key(&w, "error");
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "message", message);
    hr_json_put_string(&w, "type", "invalid_request_error");
    hr_json_put_string(&w, "param", "model");
    hr_json_put_string(&w, "code", "model_not_found");
    hr_json_object_end(&w);
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 404, &body);
}

void hr_log_refusal(const hr_exchange *exchange, const hr_error *err) {
    hr_log(HR_LOG_WARN, "refused %s (%s): %.400s", hr_exchange_path(exchange),
           hr_status_name(err->status), err->message);
}
