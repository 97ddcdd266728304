/* Calls of the update and session routes. */
#include "server/update_call.h"

#include "base/machine.h"
#include "format/json.h"
#include "server/reply.h"
#include "server/update_args.h"
#include "server/update_payload.h"

#include <stdlib.h>
#include <string.h>

/* ---- arguments ---- */

typedef struct query_reader {
    cJSON *query;
    hr_status status;
    hr_error err;
} query_reader;

static bool add_query(void *ctx, const char *key, const char *value) {
    query_reader *reader = ctx;
    reader->status = hr_args_add(reader->query, key, value, &reader->err);
    return reader->status == HR_OK;
}

/* The body's object, with what the query string says beside it. */
static hr_status merge_body(hr_update_call *c, hr_error *err) {
    cJSON *body = NULL;
    if (c->body.len == 0)
        return HR_OK;
    hr_status status = hr_json_parse(c->body.data, c->body.len, 0, &body, err);
    hr_body_free(&c->body);
    if (status != HR_OK)
        return hr_fail_context(err, status, "the request body is not valid JSON");
    if (cJSON_IsNull(body)) { /* what a client without arguments may send */
        cJSON_Delete(body);
        return HR_OK;
    }
    if (!cJSON_IsObject(body)) {
        status = hr_fail(err, HR_ERR_INVALID, "the request body: wanted a JSON object, came %s",
                         hr_json_kind(body));
        cJSON_Delete(body);
        return status;
    }
    for (const cJSON *item = c->args->child; item != NULL && status == HR_OK; item = item->next)
        status = hr_args_add(body, item->string, item->valuestring, err);
    cJSON_Delete(c->args);
    c->args = body;
    return status;
}

static hr_status read_args(hr_update_call *c, hr_error *err) {
    if (!c->route->image)
        HR_TRY(merge_body(c, err));
    return hr_args_check(c->args, c->route->keys, err);
}

/* ---- answers ---- */

void hr_write_loaded_adapters(hr_engine *engine, hr_json_writer *w) {
    hr_adapter_info *adapters = NULL;
    size_t n = 0;
    hr_status status = hr_engine_list_adapters(engine, &adapters, &n, NULL);
    hr_json_object_begin(w);
    for (size_t i = 0; status == HR_OK && i < n; i++)
        hr_json_put_string(w, adapters[i].name, adapters[i].path);
    hr_json_object_end(w);
    free(adapters);
}

static void write_outcome(hr_update_call *c, const hr_error *failure, hr_json_writer *w) {
    const char *message = c->message[0] != '\0' ? c->message : "Success";
    hr_json_put_bool(w, "success", failure == NULL);
    if (c->route->shape == HR_UPDATE_MESSAGE) {
        hr_json_put_string(w, "message", failure != NULL ? failure->message : message);
    } else {
        hr_json_put_string(w, "error_message", failure != NULL ? failure->message : "");
        hr_json_key(w, "loaded_adapters");
        hr_write_loaded_adapters(c->server->options.engine, w);
    }
    if (failure != NULL)
        hr_json_put_string(w, "status", hr_status_name(failure->status));
}

static void write_reply(hr_update_call *c, const hr_error *failure) {
    hr_json_writer w;
    hr_json_writer_init(&w, &c->reply);
    hr_json_object_begin(&w);
    write_outcome(c, failure, &w);
    if (c->receipt != NULL) {
        hr_json_key(&w, "receipt");
        hr_write_receipt(c->receipt, &w);
    }
    if (failure == NULL && c->members.len > 1) {
        hr_buf_putc(&c->reply, ','); /* members begins with the brace of its object */
        hr_buf_append(&c->reply, c->members.data + 1, c->members.len - 1);
    }
    hr_buf_putc(&c->reply, '}');
    c->reply.failed = c->reply.failed || c->members.failed;
}

/* A refusal because of what the engine is doing is a 400 here, as SGLang has it; 503 is kept for an
 * engine that cannot serve. */
static unsigned status_of(hr_status status) {
    return status == HR_ERR_BUSY ? 400 : hr_http_status_of(status);
}

static void compose(hr_update_call *c, const hr_error *failure) {
    c->http_status = failure != NULL ? status_of(failure->status) : 200;
    if (c->route->shape != HR_UPDATE_PLAIN) {
        write_reply(c, failure);
    } else if (failure != NULL) {
        hr_error_body(c->http_status, failure->message, &c->reply);
    } else {
        c->reply = c->members;
        c->members = (hr_buf){0};
    }
}

static void ready(hr_exchange *exchange, void *ctx) {
    hr_update_call *c = ctx;
    if (c->http_status == 503)
        hr_exchange_header(exchange, "Retry-After", "1");
    hr_exchange_reply(exchange, c->http_status, &c->reply);
}

static void free_call(void *ctx) {
    hr_update_call *c = ctx;
    hr_body_free(&c->body);
    cJSON_Delete(c->args);
    hr_receipt_free(c->receipt);
    hr_buf_free(&c->members);
    hr_buf_free(&c->reply);
    free(c);
}

/* ---- the way of a call ---- */

/* Large arguments go before the answer does, so that their memory serves the next call. */
static void finish(hr_update_call *c, const hr_error *failure) {
    hr_exchange *exchange = c->exchange; /* c may be gone once it is woken and let go */
    if (failure != NULL && !c->route->reads)
        hr_log_refusal(exchange, failure);
    compose(c, failure);
    hr_body_free(&c->body);
    cJSON_Delete(c->args);
    c->args = NULL;
    hr_exchange_wake(exchange);
    hr_exchange_unref(exchange);
}

static void work(void *arg) {
    hr_update_call *c = arg;
    hr_error err = {.status = HR_OK};
    hr_json_writer_init(&c->w, &c->members);
    hr_machine_work_behind(); /* requests that run come first */
    if (c->route->shape != HR_UPDATE_PLAIN)
        hr_json_object_begin(&c->w);
    hr_status status = read_args(c, &err);
    if (status == HR_OK)
        status = c->route->run(c, &err);
    if (status != HR_OK && c->route->pickles)
        hr_update_payload_give_back(c->args);
    finish(c, status != HR_OK ? &err : NULL);
}

void hr_update_call_start(hr_server *server, hr_exchange *exchange, const hr_update_route *route) {
    hr_update_call *c = calloc(1, sizeof *c);
    query_reader reader = {.query = cJSON_CreateObject()};
    if (c == NULL || reader.query == NULL) {
        free(c);
        cJSON_Delete(reader.query);
        hr_reply_error(exchange, 500, "out of memory for the call");
        return;
    }
    c->route = route;
    c->server = server;
    c->exchange = exchange;
    c->args = reader.query;
    c->body = hr_exchange_take_body(exchange);
    hr_exchange_async async = {.ctx = c, .ready = ready, .release = free_call};
    hr_exchange_defer(exchange, &async);
    hr_exchange_ref(exchange);

    if (!hr_exchange_query_each(exchange, add_query, &reader))
        reader.status = hr_fail(&reader.err, HR_ERR_INVALID, "the query string holds a NUL");
    const char *config =
        route->image ? hr_exchange_request_header(exchange, "X-Lora-Config") : NULL;
    if (reader.status == HR_OK && config != NULL)
        add_query(&reader, "config_dict", config);
    if (reader.status == HR_OK)
        reader.status =
            hr_worker_submit(route->reads ? server->reads : server->updates, work, c, &reader.err);
    if (reader.status != HR_OK)
        finish(c, &reader.err);
}
