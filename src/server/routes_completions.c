/* /v1/completions: OpenAI's route over the same jobs. */
#include "server/completions_reply.h"
#include "server/generate_job.h"
#include "server/reply.h"

#include <string.h>
#include <strings.h>

static void error_event(const hr_error *err, hr_buf *out) {
    hr_error_body(hr_http_status_of(err->status), err->message, out);
}

static const hr_job_style style = {.deltas = true,
                                   .fail = hr_reply_openai_failure,
                                   .answer = hr_completions_reply_answer,
                                   .event = hr_completions_reply_event,
                                   .error_event = error_event,
                                   .last = hr_completions_reply_last};

static bool is_json(hr_exchange *exchange) {
    const char *type = hr_exchange_request_header(exchange, "Content-Type");
    static const char json[] = "application/json";
    return type != NULL && strncasecmp(type, json, sizeof json - 1) == 0 &&
           strchr("; \t", type[sizeof json - 1]) != NULL;
}

/* A model without ':' is the base under one of its names, or the bare name of an adapter; nothing
 * else, so that a misspelt name is never answered by the base. */
static bool find_model(const hr_server *server, hr_job *j) {
    const char *model = j->completion.model;
    if (model == NULL || j->completion.adapter != NULL || model[0] == '\0' ||
        strcmp(model, "default") == 0 || strcmp(model, server->options.served_model_name) == 0 ||
        strcmp(model, hr_engine_info_of(server->options.engine)->model_path) == 0)
        return true;
    if (hr_engine_adapter_state(server->options.engine, model) == HR_ADAPTER_UNKNOWN)
        return false;
    for (size_t i = 0; i < j->request.n_items; i++)
        j->request.items[i].lora_name = model;
    return true;
}

static hr_status read_request(hr_job *j, hr_exchange *exchange, hr_error *err) {
    size_t len = 0;
    const char *body = hr_exchange_body(exchange, &len);
    if (!is_json(exchange))
        return hr_fail(err, HR_ERR_INVALID,
                       "Unsupported media type: send Content-Type: application/json");
    if (j->server->options.tokenizer == NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "/v1/completions needs a tokenizer; this server runs with "
                       "--skip-tokenizer-init");
    return hr_completions_request_parse(body, len, &j->request, &j->completion, err);
}

void hr_route_completions(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_job *j = hr_job_new(server, exchange, &style);
    if (j == NULL) {
        hr_reply_error(exchange, 500, "out of memory for the request");
        return;
    }
    if (read_request(j, exchange, &err) != HR_OK) {
        hr_reply_openai_failure(exchange, &err);
        hr_job_free(j);
        return;
    }
    if (!find_model(server, j)) {
        hr_reply_model_not_found(exchange, j->completion.model);
        hr_job_free(j);
        return;
    }
    hr_job_start(j);
}
