/* The rollout server: the table of routes, start and stop. */
#include "server/server.h"

#include "base/log.h"
#include "server/app.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define IO_THREADS 4
#define MAX_BODY ((size_t)32 << 20)
#define MAX_JSON_TENSORS ((size_t)1 << 30) /* 768 MiB of tensors as base64 */
#define MAX_IMAGE ((size_t)8 << 30)        /* no tensor is split, and some are gigabytes */
#define MAX_MANIFEST ((size_t)128 << 20)   /* names and digests of half a million tensors */
#define MAX_DRAIN ((size_t)64 << 20)
#define LAST_BYTES_MS 5000 /* for clients that read their answers slowly when the server stops */

#define GET HR_METHOD_GET
#define POST HR_METHOD_POST
#define PUT HR_METHOD_PUT
#define ADMIN HR_AUTH_ADMIN_OPTIONAL

static const hr_route routes[] = {
    {POST | PUT, "/generate", hr_route_generate, HR_AUTH_NORMAL},
    {POST, "/v1/completions", hr_route_completions, HR_AUTH_NORMAL},
    {GET, "/v1/models", hr_route_models, HR_AUTH_NORMAL},
    {GET, "/v1/models/", hr_route_model, HR_AUTH_NORMAL},
    {POST, "/load_lora_adapter", hr_route_load_adapter, ADMIN},
    {POST, "/unload_lora_adapter", hr_route_unload_adapter, ADMIN},
    {POST, "/load_lora_adapter_from_tensors", hr_route_load_adapter_from_tensors, ADMIN,
     MAX_JSON_TENSORS},
    {POST, "/register_lora_adapter", hr_route_register_adapter, ADMIN},
    {POST, "/begin_weight_update", hr_route_begin_update, ADMIN},
    {POST, "/update_weights_from_tensor", hr_route_update_from_tensor, ADMIN, MAX_JSON_TENSORS},
    {POST, "/update_weights_from_safetensors", hr_route_update_from_safetensors, ADMIN, MAX_IMAGE},
    {POST, "/end_weight_update", hr_route_end_update, ADMIN, MAX_MANIFEST},
    {POST, "/prepare_weight_update", hr_route_prepare_update, ADMIN, MAX_MANIFEST},
    {POST, "/commit_weight_update", hr_route_commit_update, ADMIN},
    {POST, "/abort_weight_update", hr_route_abort_update, ADMIN},
    {GET, "/weight_update_status", hr_route_update_status, ADMIN},
    {POST, "/update_weights_from_disk", hr_route_update_from_disk, ADMIN},
    {POST, "/update_weight_version", hr_route_update_version, ADMIN},
    {GET | POST, "/get_weights_by_name", hr_route_weights_by_name, ADMIN},
    {GET | POST, "/weights_checker", hr_route_weights_checker, ADMIN},
    {GET, "/weight_digests", hr_route_weight_digests, ADMIN},
    {GET | POST, "/release_memory_occupation", hr_route_release_memory, ADMIN},
    {GET | POST, "/resume_memory_occupation", hr_route_resume_memory, ADMIN},
    {POST, "/init_weights_update_group", hr_route_refused, ADMIN},
    {POST, "/destroy_weights_update_group", hr_route_refused, ADMIN},
    {POST, "/update_weights_from_distributed", hr_route_refused, ADMIN},
    {POST, "/load_lora_adapter_from_distributed", hr_route_refused, ADMIN},
    {POST, "/update_weights_from_ipc", hr_route_refused, ADMIN},
    {POST, "/pull_weights", hr_route_refused, ADMIN},
    {POST, "/pause_generation", hr_route_pause, ADMIN},
    {POST, "/continue_generation", hr_route_continue, ADMIN},
    {GET | POST, "/flush_cache", hr_route_flush_cache, ADMIN},
    {POST, "/abort_request", hr_route_abort, ADMIN},
    {GET, "/model_info", hr_route_model_info, HR_AUTH_NORMAL},
    {GET, "/get_model_info", hr_route_model_info, HR_AUTH_NORMAL},
    {GET, "/server_info", hr_route_server_info, HR_AUTH_NORMAL},
    {GET, "/get_server_info", hr_route_server_info, HR_AUTH_NORMAL},
    {GET, "/get_weight_version", hr_route_removed, HR_AUTH_NORMAL},
    {GET, "/weight_version", hr_route_removed, HR_AUTH_NORMAL},
    {GET, "/health", hr_route_health, HR_AUTH_OPEN},
    {GET, "/health_generate", hr_route_health_generate, HR_AUTH_OPEN},
};

const hr_route *hr_server_routes(size_t *n) {
    *n = sizeof routes / sizeof routes[0];
    return routes;
}

void hr_app_note_unknown_key(hr_server *server, const char *path, const char *key) {
    bool noted = false;
    pthread_mutex_lock(&server->lock);
    for (size_t i = 0; i < server->n_noted && !noted; i++)
        noted = strcmp(server->noted[i], key) == 0;
    if (!noted && server->n_noted < HR_APP_MAX_NOTED) {
        char *copy = strdup(key);
        if (copy != NULL)
            server->noted[server->n_noted++] = copy;
        hr_log(HR_LOG_WARN, "%s: the key \"%.100s\" is not known and was ignored", path, key);
    }
    pthread_mutex_unlock(&server->lock);
}

static hr_status create_workers(hr_server *server, hr_error *err) {
    HR_TRY(hr_worker_create(4, &server->texts, err));
    HR_TRY(hr_worker_create(4, &server->loads, err));
    HR_TRY(hr_worker_create(1, &server->recalls, err));
    HR_TRY(hr_worker_create(1, &server->pauses, err));
    HR_TRY(hr_worker_create(1, &server->flushes, err));
    HR_TRY(hr_worker_create(8, &server->flush_waits, err));
    HR_TRY(hr_worker_create(2, &server->checks, err));
    HR_TRY(hr_worker_create(2, &server->reads, err));
    return hr_worker_create(4, &server->updates, err); /* ranks of a trainer that post at once */
}

static void free_server(hr_server *server) {
    hr_worker_destroy(server->texts);
    hr_worker_destroy(server->loads);
    hr_worker_destroy(server->recalls);
    hr_worker_destroy(server->pauses);
    hr_worker_destroy(server->flushes);
    hr_worker_destroy(server->flush_waits);
    hr_worker_destroy(server->checks);
    hr_worker_destroy(server->updates);
    hr_worker_destroy(server->reads);
    for (size_t i = 0; i < server->n_noted; i++)
        free(server->noted[i]);
    pthread_mutex_destroy(&server->lock);
    free(server);
}

hr_status hr_server_start(const hr_server_options *options, int fd, hr_server **out,
                          hr_error *err) {
    hr_server *server = calloc(1, sizeof *server);
    if (server == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the server");
    server->options = *options;
    server->started = (int64_t)time(NULL);
    atomic_init(&server->draining, false);
    atomic_init(&server->seeds_given, 0);
    atomic_init(&server->probes_made, 0);
    if (server->options.stream_interval == 0)
        server->options.stream_interval = 1;
    pthread_mutex_init(&server->lock, NULL);
    hr_http_options http = {
        .routes = routes,
        .n_routes = sizeof routes / sizeof routes[0],
        .app = server,
        .keys = options->keys,
        .threads = IO_THREADS,
        .max_body = MAX_BODY,
        .max_drain = MAX_DRAIN,
    };
    hr_status status = create_workers(server, err);
    if (status == HR_OK)
        status = hr_http_start(&http, fd, &server->http, err);
    if (status != HR_OK)
        free_server(server);
    else
        *out = server;
    return status;
}

void hr_server_stop(hr_server *server, uint64_t drain_ms) {
    if (server == NULL)
        return;
    atomic_store(&server->draining, true);
    hr_http_quiesce(server->http);
    hr_engine_drain(server->options.engine, drain_ms);
    hr_worker_finish(server->texts);
    hr_worker_finish(server->loads);
    hr_worker_finish(server->recalls);
    hr_worker_finish(server->pauses);
    hr_worker_finish(server->flushes);
    hr_worker_finish(server->flush_waits);
    hr_worker_finish(server->checks);
    hr_worker_finish(server->updates);
    hr_worker_finish(server->reads);
    hr_http_stop(server->http, LAST_BYTES_MS);
    free_server(server);
}
