/* /load_lora_adapter and /unload_lora_adapter: read on an I/O thread, done on the worker thread. */
#include "format/json.h"
#include "format/json_writer.h"
#include "server/app.h"
#include "server/reply.h"

#include <stdlib.h>
#include <string.h>

typedef struct call {
    hr_server *server;
    hr_exchange *exchange;
    cJSON *body; /* owns name and path */
    const char *name, *path;
    bool pinned;
    hr_status status;
    hr_error err;
} call;

static void release(void *ctx) {
    call *c = ctx;
    cJSON_Delete(c->body);
    free(c);
}

/* {"success", "error_message", "loaded_adapters": {name: path}} */
static void answer(hr_exchange *exchange, void *ctx) {
    call *c = ctx;
    hr_adapter_info *adapters = NULL;
    size_t n = 0;
    hr_status status = hr_engine_list_adapters(c->server->options.engine, &adapters, &n, NULL);
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", c->status == HR_OK);
    hr_json_put_string(&w, "error_message", c->status == HR_OK ? "" : c->err.message);
    hr_json_key(&w, "loaded_adapters");
    hr_json_object_begin(&w);
    for (size_t i = 0; status == HR_OK && i < n; i++)
        hr_json_put_string(&w, adapters[i].name, adapters[i].path);
    hr_json_object_end(&w);
    hr_json_object_end(&w);
    free(adapters);
    unsigned http_status = hr_http_status_of(c->status);
    if (http_status == 503)
        hr_exchange_header(exchange, "Retry-After", "1");
    hr_exchange_reply(exchange, http_status, &body);
}

static void finish(call *c) {
    hr_exchange *exchange = c->exchange; /* c may be gone once it is woken and let go */
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange);
}

static void run_load(void *arg) {
    call *c = arg;
    c->status =
        hr_engine_load_adapter(c->server->options.engine, c->name, c->path, c->pinned, &c->err);
    finish(c);
}

static void run_unload(void *arg) {
    call *c = arg;
    c->status = hr_engine_unload_adapter(c->server->options.engine, c->name, &c->err);
    finish(c);
}

static hr_status read_call(hr_exchange *exchange, bool load, call *c, hr_error *err) {
    size_t len = 0;
    const char *text = hr_exchange_body(exchange, &len);
    hr_status status = hr_json_parse(text, len, 0, &c->body, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "the request body is not valid JSON");
    if (!cJSON_IsObject(c->body))
        return hr_fail(err, HR_ERR_INVALID, "the request body: wanted a JSON object, came a %s",
                       hr_json_kind(c->body));
    HR_TRY(hr_json_get_string(c->body, "lora_name", &c->name, err));
    if (!load)
        return HR_OK;
    HR_TRY(hr_json_get_string(c->body, "lora_path", &c->path, err));
    return hr_json_opt_bool(c->body, "pinned", &c->pinned, err);
}

static void handle(hr_exchange *exchange, hr_server *server, bool load) {
    hr_error err;
    call *c = calloc(1, sizeof *c);
    if (c == NULL) {
        hr_reply_error(exchange, 500, "out of memory for the call");
        return;
    }
    c->server = server;
    c->exchange = exchange;
    if (read_call(exchange, load, c, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        release(c);
        return;
    }
    hr_exchange_async async = {.ctx = c, .ready = answer, .release = release};
    hr_exchange_defer(exchange, &async);
    hr_exchange_ref(exchange);
    c->status = hr_worker_submit(server->worker, load ? run_load : run_unload, c, &c->err);
    if (c->status != HR_OK)
        finish(c);
}

void hr_route_load_adapter(hr_exchange *exchange, void *app) {
    handle(exchange, app, true);
}

void hr_route_unload_adapter(hr_exchange *exchange, void *app) {
    handle(exchange, app, false);
}
