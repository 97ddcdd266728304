/* /load_lora_adapter and /unload_lora_adapter. */
#include "format/json.h"
#include "server/call.h"
#include "server/reply.h"
#include "server/update_call.h"

#include <string.h>

hr_status hr_app_check_adapter_name(const hr_server *server, const char *name, hr_error *err) {
    if (name == NULL || strcmp(name, server->options.served_model_name) != 0)
        return HR_OK;
    return hr_fail(err, HR_ERR_INVALID,
                   "lora_name: '%.256s' is the name of the base model, and requests choose between "
                   "the two by name; give the adapter another, or start with --served-model-name",
                   name);
}

/* {"success", "error_message", "loaded_adapters": {name: path}} */
static void answer(hr_exchange *exchange, hr_call *c) {
    if (c->status != HR_OK)
        hr_log_refusal(exchange, &c->err);
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", c->status == HR_OK);
    hr_json_put_string(&w, "error_message", c->status == HR_OK ? "" : c->err.message);
    hr_json_key(&w, "loaded_adapters");
    hr_write_loaded_adapters(c->server->options.engine, &w);
    hr_json_object_end(&w);
    unsigned http_status = hr_http_status_of(c->status);
    if (http_status == 503)
        hr_exchange_header(exchange, "Retry-After", "1");
    hr_exchange_reply(exchange, http_status, &body);
}

static void run_load(hr_call *c) {
    hr_error err;
    c->status =
        hr_engine_load_adapter(c->server->options.engine, c->name, c->path, c->pinned, &err);
    if (c->status == HR_ERR_NOT_FOUND)
        hr_fail(&c->err, c->status,
                "%.600s; lora_path is looked up on this engine's machine: to send the tensors "
                "instead, POST them to /update_weights_from_safetensors or "
                "/load_lora_adapter_from_tensors, or use headrace push",
                err.message);
    else if (c->status != HR_OK)
        c->err = err;
}

static void run_unload(hr_call *c) {
    c->status = hr_engine_unload_adapter(c->server->options.engine, c->name, &c->err);
    if (c->status == HR_ERR_BUSY) /* an update holds the name: no queue is full */
        c->status = HR_ERR_SESSION;
}

static hr_status read_call(hr_call *c, bool load, hr_error *err) {
    HR_TRY(hr_json_get_string(c->body, "lora_name", &c->name, err));
    if (!load)
        return HR_OK;
    HR_TRY(hr_app_check_adapter_name(c->server, c->name, err));
    HR_TRY(hr_json_get_string(c->body, "lora_path", &c->path, err));
    return hr_json_opt_bool(c->body, "pinned", &c->pinned, err);
}

static void handle(hr_exchange *exchange, hr_server *server, bool load) {
    hr_error err;
    hr_call *c = hr_call_new(server, exchange);
    if (c == NULL)
        return;
    if (read_call(c, load, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        hr_call_free(c);
        return;
    }
    c->run = load ? run_load : run_unload;
    c->answer = answer;
    hr_call_start(c, server->loads);
}

void hr_route_load_adapter(hr_exchange *exchange, void *app) {
    handle(exchange, app, true);
}

void hr_route_unload_adapter(hr_exchange *exchange, void *app) {
    handle(exchange, app, false);
}
