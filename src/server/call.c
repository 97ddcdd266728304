/* Management calls. */
#include "server/call.h"

#include "format/json.h"
#include "server/reply.h"

#include <stdlib.h>

static hr_status read_body(hr_call *c, hr_error *err) {
    size_t len = 0;
    const char *text = hr_exchange_body(c->exchange, &len);
    hr_status status = len > 0 ? hr_json_parse(text, len, 0, &c->body, err)
                               : hr_json_parse("{}", 2, 0, &c->body, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "the request body is not valid JSON");
    if (!cJSON_IsObject(c->body))
        return hr_fail(err, HR_ERR_INVALID, "the request body: wanted a JSON object, came %s",
                       hr_json_kind(c->body));
    return HR_OK;
}

hr_call *hr_call_new(hr_server *server, hr_exchange *exchange) {
    hr_error err;
    hr_call *c = calloc(1, sizeof *c);
    if (c == NULL) {
        hr_reply_error(exchange, 500, "out of memory for the call");
        return NULL;
    }
    c->server = server;
    c->exchange = exchange;
    if (read_body(c, &err) == HR_OK)
        return c;
    hr_reply_failure(exchange, &err);
    hr_call_free(c);
    return NULL;
}

void hr_call_free(hr_call *c) {
    cJSON_Delete(c->body);
    free(c);
}

static void release(void *ctx) {
    hr_call_free(ctx);
}

static void ready(hr_exchange *exchange, void *ctx) {
    hr_call *c = ctx;
    c->answer(exchange, c);
}

static void finish(hr_call *c) {
    hr_exchange *exchange = c->exchange; /* c may be gone once it is woken and let go */
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange);
}

static void work(void *arg) {
    hr_call *c = arg;
    c->run(c);
    finish(c);
}

void hr_call_start(hr_call *c, hr_worker *worker) {
    hr_exchange_async async = {.ctx = c, .ready = ready, .release = release};
    hr_exchange_defer(c->exchange, &async);
    hr_exchange_ref(c->exchange);
    hr_error err;
    hr_status status = hr_worker_submit(worker, work, c, &err);
    if (status == HR_OK)
        return; /* c is the worker's now */
    c->status = status;
    c->err = err;
    finish(c);
}
