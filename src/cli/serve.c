/* `headrace serve`: from flags to a served model and back to a clean exit. */
#include "base/clock.h"
#include "base/log.h"
#include "cli/commands.h"
#include "cli/hub.h"
#include "cli/progress.h"
#include "cli/serve_options.h"
#include "server/http.h"
#include "server/server.h"
#include "text/tokenizer.h"

#include <errno.h>
#include <headrace/engine.h>
#include <headrace/version.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- signals ---- */

/* A signal handler can reach nothing but globals. Before the server is ready nothing needs
 * draining. */
static sem_t stop_asked;
static atomic_int signals_seen;
static atomic_bool ready;

static void on_signal(int number) {
    (void)number;
    int before = atomic_fetch_add(&signals_seen, 1);
    if (before > 0)
        _exit(HR_EXIT_FAILURE);
    if (!atomic_load(&ready))
        _exit(HR_EXIT_OK);
    sem_post(&stop_asked);
}

static void install_signals(void) {
    sem_init(&stop_asked, 0, 0);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* ---- starting ---- */

typedef struct running {
    char *model_dir, *tokenizer_dir;
    int fd; /* -1 once the server has it */
    hr_engine *engine;
    hr_tokenizer *tokenizer;
    hr_server *server;
} running;

static void set_log_level(const char *name) {
    static const struct {
        const char *name;
        hr_log_level level;
    } levels[] = {{"debug", HR_LOG_DEBUG},
                  {"info", HR_LOG_INFO},
                  {"warning", HR_LOG_WARN},
                  {"error", HR_LOG_ERROR}};
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        if (strcmp(levels[i].name, name) == 0)
            hr_log_set_level(levels[i].level);
    }
}

static void warn_ignored(const hr_serve_options *options) {
    hr_buf list = {0};
    for (size_t i = 0; i < options->n_ignored; i++)
        hr_buf_printf(&list, "%s%s", i > 0 ? ", " : "", options->ignored[i]);
    if (options->n_ignored > 0 && !list.failed)
        hr_log(HR_LOG_WARN, "no effect here: %s", list.data);
    hr_buf_free(&list);
}

static hr_status create_engine(const hr_serve_options *o, running *r, hr_error *err) {
    hr_progress progress;
    hr_progress_begin(&progress, "loading");
    hr_engine_options options = {
        .model_path = r->model_dir,
        .dtype = o->dtype,
        .isa = getenv("HEADRACE_ISA"),
        .threads = (unsigned)o->threads,
        .context_length = (uint32_t)o->context_length,
        .max_running_requests = (uint32_t)o->max_running_requests,
        .max_queued_requests = (uint32_t)o->max_queued_requests,
        .chunked_prefill_size = (uint32_t)o->chunked_prefill_size,
        .max_total_tokens = o->max_total_tokens,
        .mem_fraction_static = o->mem_fraction_static,
        .enable_lora = true,
        .max_loras_per_batch = (uint32_t)o->max_loras_per_batch,
        .max_loaded_loras = (uint32_t)o->max_loaded_loras,
        .max_lora_rank = (uint32_t)o->max_lora_rank,
        .weight_version = o->weight_version,
        .disable_prefix_cache = o->disable_radix_cache,
        .progress = hr_progress_show,
        .progress_ctx = &progress,
    };
    hr_status status = hr_engine_create(&options, &r->engine, err);
    hr_progress_end(&progress);
    return status;
}

/* What was left open is what the engine chose. */
static void resolve_options(hr_serve_options *o, const hr_engine *engine) {
    const hr_engine_info *info = hr_engine_info_of(engine);
    o->context_length = info->context_length;
    o->max_running_requests = info->max_running_requests;
    o->chunked_prefill_size = info->chunked_prefill_size;
    o->max_total_tokens = info->max_total_tokens;
    o->threads = info->threads;
    o->max_loras_per_batch = info->max_loras_per_batch;
    o->dtype = info->dtype;
    o->enable_lora = info->enable_lora;
    if (o->max_queued_requests == 0)
        o->max_queued_requests = 8192;
    if (o->mem_fraction_static == 0)
        o->mem_fraction_static = 0.8;
    if (o->weight_version == NULL)
        o->weight_version = "default";
    if (o->tokenizer_path == NULL)
        o->tokenizer_path = o->model_path;
    if (o->served_model_name == NULL)
        o->served_model_name = o->model_path;
}

static void write_args(void *ctx, hr_json_writer *w) {
    hr_serve_options_write(ctx, w);
}

static hr_status load_adapters(const hr_serve_options *o, hr_engine *engine, hr_error *err) {
    for (size_t i = 0; i < o->n_lora_items; i++) {
        const hr_lora_spec *spec = &o->loras[i];
        hr_status status =
            hr_engine_load_adapter(engine, spec->name, spec->path, spec->pinned, err);
        if (status != HR_OK)
            return hr_fail_context(err, status, "--lora-paths, adapter %.200s", spec->name);
    }
    return HR_OK;
}

static void print_engine(const hr_serve_options *o, const hr_engine *engine) {
    const hr_engine_info *info = hr_engine_info_of(engine);
    printf("model      %s (%s, %s)\n", o->model_path, info->architecture, info->dtype);
    printf("compute    %s, %u thread%s%s%s\n", info->isa, info->threads,
           info->threads == 1 ? "" : "s", info->isa_note[0] != '\0' ? "; " : "", info->isa_note);
    printf("weights    %.1f MB\n", (double)info->weight_bytes / 1e6);
    printf("KV cache   %llu tokens, %.1f MB, set by %s\n",
           (unsigned long long)info->max_total_tokens, (double)info->kv_bytes / 1e6,
           info->kv_source);
    printf("context    %u tokens, at most %u sequences in a batch\n", info->context_length,
           info->max_running_requests);
    if (o->n_lora_items > 0)
        printf("adapters   %zu loaded\n", o->n_lora_items);
}

static hr_status check_model_dir(const char *dir, hr_error *err) {
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/config.json", dir);
    if (n > 0 && (size_t)n < sizeof path && access(path, R_OK) == 0)
        return HR_OK;
    return hr_fail(err, HR_ERR_NOT_FOUND,
                   "%s has no config.json that can be read; wanted a Hugging Face model directory",
                   dir);
}

/* Everything up to a listening server. What stands in r when this fails is the caller's to release.
 */
static hr_status start(hr_serve_options *o, running *r, hr_error *err) {
    hr_clock clock = hr_clock_monotonic();
    uint64_t begin = hr_now_ns(&clock);
    uint16_t port = 0;
    HR_TRY(hr_hub_resolve(o->model_path, &r->model_dir, err));
    HR_TRY(check_model_dir(r->model_dir, err));
    HR_TRY(hr_http_bind(o->host, (uint16_t)o->port, &r->fd, &port, err));
    if (!o->skip_tokenizer_init) {
        HR_TRY(hr_hub_resolve(o->tokenizer_path != NULL ? o->tokenizer_path : o->model_path,
                              &r->tokenizer_dir, err));
        hr_status status = hr_tokenizer_load(r->tokenizer_dir, &r->tokenizer, err);
        if (status != HR_OK)
            return hr_fail_context(err, status,
                                   "no tokenizer (with --skip-tokenizer-init none is needed)");
    }
    HR_TRY(create_engine(o, r, err));
    resolve_options(o, r->engine);
    HR_TRY(load_adapters(o, r->engine, err));
    print_engine(o, r->engine);
    hr_server_options options = {
        .engine = r->engine,
        .tokenizer = r->tokenizer,
        .served_model_name = o->served_model_name,
        .tokenizer_path = o->tokenizer_path,
        .has_random_seed = o->has_random_seed,
        .random_seed = o->random_seed,
        .incremental_output = o->incremental_streaming_output,
        .stream_interval = (uint32_t)o->stream_interval,
        .keys = {o->api_key, o->admin_api_key},
        .write_args = write_args,
        .write_args_ctx = o,
    };
    HR_TRY(hr_server_start(&options, r->fd, &r->server, err));
    r->fd = -1;
    bool ipv6 = strchr(o->host, ':') != NULL;
    printf("listening  http://%s%s%s:%u\n", ipv6 ? "[" : "", o->host, ipv6 ? "]" : "", port);
    printf("ready in %.2f s\n", (double)(hr_now_ns(&clock) - begin) * 1e-9);
    fflush(stdout);
    return HR_OK;
}

static void release(running *r, uint64_t drain_ms) {
    hr_server_stop(r->server, drain_ms);
    hr_engine_destroy(r->engine);
    hr_tokenizer_free(r->tokenizer);
    if (r->fd >= 0)
        close(r->fd);
    free(r->model_dir);
    free(r->tokenizer_dir);
}

static void wait_for_signal(void) {
    while (sem_wait(&stop_asked) != 0 && errno == EINTR)
        ;
}

int hr_command_serve(int argc, char **argv) {
    hr_error err;
    hr_serve_options options;
    running r = {.fd = -1};
    if (hr_serve_options_parse(argc, argv, &options, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (options.help) {
        hr_serve_options_help(stdout);
        hr_serve_options_free(&options);
        return HR_EXIT_OK;
    }
    set_log_level(options.log_level);
    install_signals();
    printf("headrace %s\n", hr_version());
    fflush(stdout);
    warn_ignored(&options);

    int code = HR_EXIT_OK;
    if (start(&options, &r, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_FAILURE, &err);
    } else {
        atomic_store(&ready, true);
        wait_for_signal();
        printf("stopping: requests may finish for %llu s; a second signal ends at once\n",
               (unsigned long long)options.drain_timeout);
        fflush(stdout);
    }
    release(&r, options.drain_timeout * 1000);
    if (code == HR_EXIT_OK)
        printf("stopped\n");
    hr_serve_options_free(&options);
    return code;
}
