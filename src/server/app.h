/* What the handlers of one server share. */
#ifndef HR_SERVER_APP_H
#define HR_SERVER_APP_H

#include "server/http.h"
#include "server/server.h"
#include "server/worker.h"

#include <pthread.h>
#include <stdatomic.h>

#define HR_APP_MAX_NOTED 64

struct hr_server {
    hr_server_options options;
    hr_http *http;
    /* Calls that would hold up an I/O thread, each kind on threads of its own, so that none waits
     * behind another that waits. */
    hr_worker *texts, *loads, *recalls, *pauses, *flushes, *flush_waits, *checks, *updates, *reads;
    int64_t started; /* Unix seconds */
    atomic_bool draining;
    atomic_uint_fast64_t seeds_given, probes_made;
    pthread_mutex_t lock;          /* everything below */
    struct hr_job *jobs;           /* alive: see generate_job.h */
    char *noted[HR_APP_MAX_NOTED]; /* unknown request keys that were logged already */
    size_t n_noted;
};

/* Logs a request key nobody knows, the first time it comes. Thread-safe. */
void hr_app_note_unknown_key(hr_server *server, const char *path, const char *key);

/* Whether an adapter may have this name (NULL: none was given): the base model's would make the
 * model of a /v1 request mean two. ERR_INVALID. */
hr_status hr_app_check_adapter_name(const hr_server *server, const char *name, hr_error *err);

/* What the receiver has and does, as an object: state, session_id, counts. */
void hr_write_update_status(hr_engine *engine, hr_json_writer *w);

/* Handlers; app is the hr_server. */
void hr_route_generate(hr_exchange *exchange, void *app);
void hr_route_completions(hr_exchange *exchange, void *app);
void hr_route_pause(hr_exchange *exchange, void *app);
void hr_route_continue(hr_exchange *exchange, void *app);
void hr_route_flush_cache(hr_exchange *exchange, void *app);
void hr_route_abort(hr_exchange *exchange, void *app);
void hr_route_load_adapter(hr_exchange *exchange, void *app);
void hr_route_unload_adapter(hr_exchange *exchange, void *app);
void hr_route_load_adapter_from_tensors(hr_exchange *exchange, void *app);
void hr_route_register_adapter(hr_exchange *exchange, void *app);
void hr_route_begin_update(hr_exchange *exchange, void *app);
void hr_route_end_update(hr_exchange *exchange, void *app);
void hr_route_prepare_update(hr_exchange *exchange, void *app);
void hr_route_commit_update(hr_exchange *exchange, void *app);
void hr_route_abort_update(hr_exchange *exchange, void *app);
void hr_route_update_status(hr_exchange *exchange, void *app);
void hr_route_update_from_tensor(hr_exchange *exchange, void *app);
void hr_route_update_from_safetensors(hr_exchange *exchange, void *app);
void hr_route_update_from_disk(hr_exchange *exchange, void *app);
void hr_route_update_version(hr_exchange *exchange, void *app);
void hr_route_weights_by_name(hr_exchange *exchange, void *app);
void hr_route_weights_checker(hr_exchange *exchange, void *app);
void hr_route_weight_digests(hr_exchange *exchange, void *app);
void hr_route_release_memory(hr_exchange *exchange, void *app);
void hr_route_resume_memory(hr_exchange *exchange, void *app);
void hr_route_refused(hr_exchange *exchange, void *app);
void hr_route_health(hr_exchange *exchange, void *app);
void hr_route_health_generate(hr_exchange *exchange, void *app);
void hr_route_model(hr_exchange *exchange, void *app);
void hr_route_server_info(hr_exchange *exchange, void *app);
void hr_route_removed(hr_exchange *exchange, void *app);
void hr_route_models(hr_exchange *exchange, void *app);
void hr_route_model_info(hr_exchange *exchange, void *app);

#endif
