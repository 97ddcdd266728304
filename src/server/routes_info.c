/* What the server is: /v1/models, /model_info, /server_info. */
#include "format/json_writer.h"
#include "server/app.h"
#include "server/reply.h"

#include <headrace/version.h>
#include <stdlib.h>
#include <string.h>

static void put_lora_version(hr_json_writer *w, const hr_adapter_info *adapter) {
    if (adapter->weight_version[0] != '\0')
        hr_json_put_string(w, "lora_version", adapter->weight_version);
    else
        hr_json_put_null(w, "lora_version");
}

/* adapter NULL: the base. */
static void write_card(hr_json_writer *w, const hr_server *server, const hr_adapter_info *adapter) {
    const char *served = server->options.served_model_name;
    const char *id = adapter != NULL ? adapter->name : served;
    const char *root = adapter != NULL ? adapter->path : served;
    hr_json_object_begin(w);
    hr_json_put_string(w, "id", id);
    hr_json_put_string(w, "object", "model");
    hr_json_put_i64(w, "created", server->started);
    hr_json_put_string(w, "owned_by", "sglang");
    hr_json_put_string(w, "root", root);
    if (adapter != NULL) {
        hr_json_put_string(w, "parent", served);
        hr_json_put_null(w, "max_model_len");
        hr_json_put_u64(w, "lora_id", adapter->id);
        put_lora_version(w, adapter);
    } else {
        hr_json_put_null(w, "parent");
        hr_json_put_u64(w, "max_model_len",
                        hr_engine_info_of(server->options.engine)->context_length);
        char version[HR_WEIGHT_VERSION_SIZE];
        hr_engine_weight_version(server->options.engine, version, sizeof version);
        hr_json_put_string(w, "weight_version", version);
    }
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
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "object", "list");
    hr_json_key(&w, "data");
    hr_json_array_begin(&w);
    write_card(&w, server, NULL);
    for (size_t i = 0; i < n; i++)
        write_card(&w, server, &adapters[i]);
    hr_json_array_end(&w);
    hr_json_object_end(&w);
    free(adapters);
    hr_exchange_reply(exchange, 200, &body);
}

/* One card, or 404. */
void hr_route_model(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_adapter_info *adapters = NULL;
    size_t n = 0, found = 0;
    const char *id = hr_exchange_path(exchange) + strlen("/v1/models/");
    const char *served = server->options.served_model_name;
    if (hr_engine_list_adapters(server->options.engine, &adapters, &n, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        return;
    }
    while (found < n && strcmp(adapters[found].name, id) != 0)
        found++;
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    if (strcmp(id, served) == 0) {
        write_card(&w, server, NULL);
        hr_exchange_reply(exchange, 200, &body);
    } else if (found < n) {
        write_card(&w, server, &adapters[found]);
        hr_exchange_reply(exchange, 200, &body);
    } else {
        hr_reply_model_not_found(exchange, id);
    }
    free(adapters);
}

void hr_route_model_info(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    const hr_engine_info *info = hr_engine_info_of(server->options.engine);
    char version[HR_WEIGHT_VERSION_SIZE];
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
    hr_json_key(&w, "weight_update");
    hr_write_update_status(server->options.engine, &w);
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}

static void write_state(const hr_server *server, hr_json_writer *w) {
    hr_engine_stats s;
    char version[HR_WEIGHT_VERSION_SIZE];
    hr_engine_stats_get(server->options.engine, &s);
    hr_engine_weight_version(server->options.engine, version, sizeof version);
    hr_json_object_begin(w);
    hr_json_put_u64(w, "running", s.running);
    hr_json_put_u64(w, "queued", s.queued);
    hr_json_put_bool(w, "paused", s.paused);
    hr_json_put_string(w, "weight_version", version);
    hr_json_put_u64(w, "leases", s.leases);
    hr_json_put_u64(w, "leases_acquired", s.leases_acquired);
    hr_json_put_u64(w, "leases_released", s.leases_released);
    hr_json_put_u64(w, "kv_pages", s.kv_pages);
    hr_json_put_u64(w, "kv_pages_free", s.kv_pages_free);
    hr_json_put_u64(w, "kv_pages_cached", s.kv_pages_cached);
    hr_json_put_u64(w, "requests_started", s.requests_started);
    hr_json_put_u64(w, "requests_finished", s.requests_finished);
    hr_json_put_u64(w, "requests_aborted", s.requests_aborted);
    hr_json_put_u64(w, "prompt_tokens", s.prompt_tokens);
    hr_json_put_u64(w, "cached_prompt_tokens", s.cached_prompt_tokens);
    hr_json_put_u64(w, "generated_tokens", s.generated_tokens);
    hr_json_put_u64(w, "steps", s.steps);
    hr_json_key(w, "weight_update");
    hr_write_update_status(server->options.engine, w);
    hr_json_object_end(w);
}

static void write_adapters(hr_engine *engine, hr_json_writer *w) {
    hr_adapter_info *adapters = NULL;
    size_t n = 0;
    hr_status status = hr_engine_list_adapters(engine, &adapters, &n, NULL);
    hr_json_array_begin(w);
    for (size_t i = 0; status == HR_OK && i < n; i++) {
        hr_json_object_begin(w);
        hr_json_put_string(w, "lora_name", adapters[i].name);
        hr_json_put_u64(w, "lora_id", adapters[i].id);
        put_lora_version(w, &adapters[i]);
        hr_json_put_string(w, "lora_path", adapters[i].path);
        hr_json_put_bool(w, "pinned", adapters[i].pinned);
        hr_json_put_u64(w, "rank", adapters[i].rank);
        hr_json_put_u64(w, "bytes", adapters[i].bytes);
        hr_json_object_end(w);
    }
    hr_json_array_end(w);
    free(adapters);
}

static void write_routes(hr_json_writer *w) {
    size_t n = 0;
    const hr_route *routes = hr_server_routes(&n);
    hr_json_array_begin(w);
    for (size_t i = 0; i < n; i++) {
        char methods[64];
        hr_methods_format(routes[i].methods, methods, sizeof methods);
        hr_json_object_begin(w);
        hr_json_put_string(w, "path", routes[i].path);
        hr_json_put_string(w, "methods", methods);
        hr_json_put_string(w, "level", hr_auth_level_name(routes[i].level));
        hr_json_object_end(w);
    }
    hr_json_array_end(w);
}

/* The longest prompt that leaves room for one token. */
static uint64_t max_input(const hr_engine_info *info) {
    uint64_t room = info->context_length < info->max_total_tokens ? info->context_length
                                                                  : info->max_total_tokens;
    return room > 0 ? room - 1 : 0;
}

/* The flags of the server, flat, as SGLang has them; then what the engine made of them. */
void hr_route_server_info(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    const hr_engine_info *info = hr_engine_info_of(server->options.engine);
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    if (server->options.write_args != NULL)
        server->options.write_args(server->options.write_args_ctx, &w);
    hr_json_put_u64(&w, "max_total_num_tokens", info->max_total_tokens);
    hr_json_put_u64(&w, "max_req_input_len", max_input(info));
    hr_json_put_string(&w, "isa", info->isa);
    hr_json_key(&w, "internal_states");
    hr_json_array_begin(&w);
    write_state(server, &w);
    hr_json_array_end(&w);
    hr_json_put_string(&w, "base_mode", hr_engine_base_mode(server->options.engine));
    hr_json_key(&w, "adapters");
    write_adapters(server->options.engine, &w);
    hr_json_put_string(&w, "version", hr_version());
    hr_json_put_null(&w, "kv_events");
    hr_json_key(&w, "routes");
    write_routes(&w);
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 200, &body);
}

void hr_route_removed(hr_exchange *exchange, void *app) {
    (void)app;
    hr_reply_error(exchange, 404, "this route was removed: GET /model_info has weight_version");
}
