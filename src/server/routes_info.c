/* What the server is: /health, /v1/models, /model_info. */
#include "format/json_writer.h"
#include "server/app.h"
#include "server/reply.h"

#include <stdlib.h>

void hr_route_health(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_buf empty = {0};
    if (atomic_load(&server->draining))
        hr_reply_error(exchange, 503, "the server is stopping");
    else
        hr_exchange_reply(exchange, 200, &empty);
}

static void write_card(hr_json_writer *w, const hr_server *server, const char *id, const char *root,
                       const char *parent, uint32_t max_len) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "id", id);
    hr_json_put_string(w, "object", "model");
    hr_json_put_i64(w, "created", server->started);
    hr_json_put_string(w, "owned_by", "sglang");
    hr_json_put_string(w, "root", root);
    if (parent != NULL)
        hr_json_put_string(w, "parent", parent);
    else
        hr_json_put_null(w, "parent");
    if (max_len != 0)
        hr_json_put_u64(w, "max_model_len", max_len);
    else
        hr_json_put_null(w, "max_model_len");
    hr_json_object_end(w);
}

void hr_route_models(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_adapter_info *adapters = NULL;
    size_t n = 0;
    if (hr_engine_list_adapters(server->options.engine, &adapters, &n, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        return;
    }
    const char *served = server->options.served_model_name;
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "object", "list");
    hr_json_key(&w, "data");
    hr_json_array_begin(&w);
    write_card(&w, server, served, served, NULL,
               hr_engine_info_of(server->options.engine)->context_length);
    for (size_t i = 0; i < n; i++)
        write_card(&w, server, adapters[i].name, adapters[i].path, served, 0);
    hr_json_array_end(&w);
    hr_json_object_end(&w);
    free(adapters);
    hr_exchange_reply(exchange, 200, &body);
}

void hr_route_model_info(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    const hr_engine_info *info = hr_engine_info_of(server->options.engine);
    char version[256];
    hr_engine_weight_version(server->options.engine, version, sizeof version);
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "model_path", info->model_path);
    hr_json_put_string(&w, "tokenizer_path", server->options.tokenizer_path);
    hr_json_put_bool(&w, "is_generation", true);
    hr_json_put_null(&w, "preferred_sampling_params");
    hr_json_put_string(&w, "weight_version", version);
    hr_json_put_bool(&w, "has_image_understanding", false);
    hr_json_put_bool(&w, "has_audio_understanding", false);
    hr_json_put_string(&w, "model_type", info->model_type);
    hr_json_key(&w, "architectures");
    hr_json_array_begin(&w);
    hr_json_write_string(&w, info->architecture);
    hr_json_array_end(&w);
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}
