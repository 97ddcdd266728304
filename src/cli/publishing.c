/* What `push` and `watch` share. */
#include "cli/publishing.h"

#include "base/log.h"
#include "cli/engine_calls.h"
#include "format/json.h"
#include "format/json_writer.h"
#include "tensor/digest.h"
#include "weights/names.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* ---- signals ---- */

/* A signal handler can reach nothing but globals. */
static volatile sig_atomic_t stopped;

static void on_signal(int number) {
    (void)number;
    stopped = 1;
}

bool hr_publishing_stopped(void) {
    return stopped != 0;
}

/* The first one cancels and cleans up; a second one ends at once. */
static void install_signals(void) {
    static bool installed;
    if (installed)
        return;
    installed = true;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* ---- flags ---- */

void hr_publishing_init(hr_publishing *publishing) {
    *publishing = (hr_publishing){.transport = "auto",
                                  .pause = "none",
                                  .bucket_size = (uint64_t)512 << 20,
                                  .api_key = hr_cli_api_key(),
                                  .timeout = 60};
}

size_t hr_publishing_flags(hr_publishing *p, hr_cli_option *table) {
    const hr_cli_option flags[HR_PUBLISHING_FLAGS] = {
        {"--engine", HR_CLI_LIST, &p->engines, "URL...", "engines, \"http://host:port\"; required"},
        {"--transport", HR_CLI_TEXT, &p->transport, "NAME",
         "auto, safetensors, sglang or sglang-load (default: auto)"},
        {"--bucket-size", HR_CLI_SIZE, &p->bucket_size, "BYTES",
         "K, M, G may follow (default: 512M)"},
        {"--pause", HR_CLI_TEXT, &p->pause, "MODE",
         "requests around a base update: none, in_place, retract, abort (default: none)"},
        {"--timeout", HR_CLI_DECIMAL, &p->timeout, "SECONDS",
         "for each stage on all engines (default: 60)"},
        {"--audit", HR_CLI_FLAG, &p->audit, NULL,
         "SHA-256 of every tensor in the receipt, which --json prints"},
        {"--pinned", HR_CLI_FLAG, &p->pinned, NULL, "adapters never give way to others"},
        {"--api-key", HR_CLI_TEXT, &p->api_key, "KEY", "or HEADRACE_API_KEY in the environment"},
        {"--json", HR_CLI_FLAG, &p->json, NULL, "the receipt as JSON on stdout"},
    };
    memcpy(table, flags, sizeof flags);
    return HR_PUBLISHING_FLAGS;
}

static hr_status pause_from_name(const char *name, hr_push_pause *out, hr_error *err) {
    static const char *const names[] = {"none", "in_place", "retract", "abort"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (hr_push_pause)i;
            return HR_OK;
        }
    }
    return hr_fail(err, HR_ERR_INVALID,
                   "--pause: \"%.100s\" is not known; there are none, in_place, retract and abort",
                   name);
}

hr_status hr_cli_adapter(const char *text, char **name, const char **dir, hr_error *err) {
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text || equals[1] == '\0')
        return hr_fail(err, HR_ERR_INVALID, "--adapter: wanted NAME=DIR, came \"%.200s\"", text);
    *name = strndup(text, (size_t)(equals - text));
    if (*name == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an adapter's name");
    hr_status status = hr_adapter_name_check(*name, err);
    if (status != HR_OK) {
        free(*name);
        *name = NULL;
        return hr_fail_context(err, status, "--adapter");
    }
    *dir = equals + 1;
    return HR_OK;
}

/* ---- the publisher ---- */

static bool on_progress(void *ctx, const hr_push_progress *progress) {
    hr_publishing *p = ctx;
    if (progress->bytes > 0)
        hr_progress_show(&p->progress, progress->bytes, progress->total_bytes);
    return stopped == 0;
}

hr_status hr_publishing_open(hr_publishing *p, hr_error *err) {
    hr_publisher_options options = {
        .engines = p->engines.items,
        .n_engines = p->engines.n,
        .api_key = p->api_key,
        .transport = p->transport,
        .bucket_bytes = p->bucket_size,
        .audit = p->audit,
        .progress = on_progress,
        .progress_ctx = p,
    };
    if (p->engines.n == 0)
        return hr_fail(err, HR_ERR_INVALID, "--engine is missing: where shall it go?");
    if (p->bucket_size == 0)
        return hr_fail(err, HR_ERR_INVALID, "--bucket-size: wanted 1 byte or more");
    HR_TRY(hr_cli_timeout(p->timeout, &p->timeout_ms, err));
    options.timeout_ms = p->timeout_ms;
    HR_TRY(pause_from_name(p->pause, &options.pause, err));
    HR_TRY(hr_publisher_create(&options, &p->publisher, err));
    install_signals();
    return HR_OK;
}

void hr_publishing_close(hr_publishing *p) {
    hr_publisher_destroy(p->publisher);
    p->publisher = NULL;
}

/* ---- receipts ---- */

static void print_receipt(const hr_push_receipt *r, const hr_push *push, bool audit) {
    char hex[HR_XXH3_HEX];
    hr_cli_amount amount;
    printf("published  ");
    if (r->tensors > 0) /* else not known: a push that was resumed */
        printf("%llu tensors, %s, ", (unsigned long long)r->tensors,
               hr_cli_format_bytes(r->bytes, &amount));
    if (r->weight_version[0] != '\0')
        printf("version %s, ", r->weight_version);
    printf("session %s\n", r->session_id);
    for (size_t i = 0; i < push->n_adapters; i++)
        printf("adapter    %s\n", push->adapters[i].name);
    if (r->tensors > 0)
        printf("digest     %s (xxh3), %llu bucket%s by %s\n", hr_xxh3_format(r->xxh3, hex),
               (unsigned long long)r->buckets, r->buckets == 1 ? "" : "s", r->transport);
    for (size_t i = 0; i < r->n_engines; i++) {
        const hr_push_engine *e = &r->engines[i];
        printf("engine     %s %s", e->url, e->state);
        if (e->has_xxh3)
            printf(", %llu tensors checked", (unsigned long long)e->tensors);
        if (e->weight_version[0] != '\0')
            printf(", version %s", e->weight_version);
        if (e->retries > 0)
            printf(", %llu calls repeated", (unsigned long long)e->retries);
        printf("\n");
    }
    if (audit)
        printf("audit      SHA-256 of every tensor stands in the receipt as JSON (--json)\n");
    printf(
        "time       %.1f ms: register %.1f, begin %.1f, stream %.1f, prepare %.1f, commit %.1f\n",
        (double)r->total_ns / 1e6, (double)r->register_ns / 1e6, (double)r->begin_ns / 1e6,
        (double)r->stream_ns / 1e6, (double)r->prepare_ns / 1e6, (double)r->commit_ns / 1e6);
    fflush(stdout);
}

/* Base weights of engines that write them as they come change under whoever is served meanwhile. */
static void warn_of_mixing(const hr_publishing *p, const hr_push_receipt *r, const hr_push *push) {
    if (push->sync_base && !r->atomic && strcmp(p->pause, "none") == 0)
        hr_log(HR_LOG_WARN,
               "transport %s writes base weights as they come and nothing was paused: what engines "
               "answered during the push may come from old and new weights mixed; --pause retract "
               "avoids it",
               r->transport);
}

static void tell(hr_publishing *p, hr_status status, hr_push_receipt *receipt,
                 const hr_push *push) {
    hr_progress_end(&p->progress);
    if (p->json && (status == HR_OK || !p->tries_again)) {
        printf("%s\n", hr_publisher_report(p->publisher));
        fflush(stdout);
    } else if (status == HR_OK && !p->json) {
        print_receipt(receipt, push, p->audit);
    }
    if (status == HR_OK)
        warn_of_mixing(p, receipt, push);
    if (status == HR_OK)
        hr_push_receipt_free(receipt);
}

/* The report of a push that ended before it spoke to any engine. */
static void tell_unread(const hr_publishing *p, const hr_error *failure) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", false);
    hr_json_put_string(&w, "error", failure->message);
    hr_json_put_string(&w, "status", hr_status_name(failure->status));
    hr_json_put_string(&w, "published", "none");
    hr_json_object_end(&w);
    if (p->json && !p->tries_again && !text.failed)
        printf("%s\n", text.data);
    hr_buf_free(&text);
}

/* Whether the last push came so far that all engines had said what they speak. */
static bool found_transport(const hr_publishing *p) {
    cJSON *report = NULL;
    const char *text = hr_publisher_report(p->publisher);
    (void)hr_json_parse(text, strlen(text), 0, &report, NULL);
    bool found = cJSON_IsString(hr_json_get(report, "transport"));
    cJSON_Delete(report);
    return found;
}

hr_status hr_publishing_push(hr_publishing *p, const hr_dir_adapter *adapters, size_t n,
                             const char *base, const char *weight_version, const char *session_id,
                             hr_error *err) {
    hr_dir_source *source = NULL;
    hr_push_receipt *receipt = NULL;
    p->unheard = false;
    hr_status status = hr_dir_source_open(adapters, n, base, &source, err);
    if (status != HR_OK) {
        tell_unread(p, err);
        return status;
    }
    hr_push push = {
        .adapters = hr_dir_source_adapters(source),
        .n_adapters = n,
        .sync_base = base != NULL,
        /* Other transports cannot ask for it. */
        .complete_base = base != NULL && strncmp(p->transport, "sglang", 6) != 0,
        .weight_version = weight_version,
        .session_id = session_id,
        .total_bytes = hr_dir_source_bytes(source),
        .source = hr_dir_source_units(source),
    };
    hr_progress_begin(&p->progress, "pushing");
    status = hr_publisher_push(p->publisher, &push, &receipt, err);
    p->unheard = status != HR_OK && !found_transport(p);
    tell(p, status, receipt, &push);
    hr_dir_source_close(source);
    return status;
}

hr_status hr_publishing_resume(hr_publishing *p, const char *session_id, const char *weight_version,
                               hr_error *err) {
    const hr_push nothing = {0};
    hr_push_receipt *receipt = NULL;
    hr_progress_begin(&p->progress, "resuming");
    hr_status status = hr_publisher_resume(p->publisher, session_id, weight_version, &receipt, err);
    tell(p, status, receipt, &nothing);
    return status;
}

/* ---- aborting ---- */

static const char *abort_result(const hr_engine_call *call) {
    if (call->status == HR_OK)
        return "aborted";
    if (call->status == HR_ERR_SESSION && strstr(call->err.message, "published") == NULL)
        return "not open";
    return "failed";
}

static void print_aborts(const hr_engine_call *calls, size_t n, const char *session_id, bool json) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "session_id", session_id);
    hr_json_key(&w, "engines");
    hr_json_array_begin(&w);
    for (size_t i = 0; i < n; i++) {
        if (!json)
            printf("engine     %s session %s %s\n", calls[i].url, session_id,
                   abort_result(&calls[i]));
        hr_json_object_begin(&w);
        hr_json_put_string(&w, "url", calls[i].url);
        hr_json_put_string(&w, "result", abort_result(&calls[i]));
        if (calls[i].status != HR_OK)
            hr_json_put_string(&w, "error", calls[i].err.message);
        hr_json_object_end(&w);
    }
    hr_json_array_end(&w);
    hr_json_object_end(&w);
    if (json && !text.failed)
        printf("%s\n", text.data);
    hr_buf_free(&text);
}

hr_status hr_publishing_abort(hr_publishing *p, const char *session_id, hr_error *err) {
    hr_engine_call *calls = NULL;
    hr_buf body = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "session_id", session_id);
    hr_json_object_end(&w);
    const char *path = "/abort_weight_update";
    signal(SIGINT, SIG_DFL); /* there is nothing to clean up */
    signal(SIGTERM, SIG_DFL);
    hr_engine_ask ask = {.method = "POST",
                         .paths = &path,
                         .n_paths = 1,
                         .body = body.data,
                         .api_key = p->api_key,
                         .timeout_ms = p->timeout_ms};
    hr_status status = body.failed
                           ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a request")
                           : hr_engine_calls(p->engines.items, p->engines.n, &ask, &calls, err);
    hr_buf_free(&body);
    if (status != HR_OK)
        return status;
    print_aborts(calls, p->engines.n, session_id, p->json);
    for (size_t i = 0; i < p->engines.n && status == HR_OK; i++) {
        if (strcmp(abort_result(&calls[i]), "failed") == 0)
            status = hr_engine_call_fail(&calls[i], err);
    }
    hr_engine_calls_free(calls, p->engines.n);
    return status;
}

bool hr_publishing_is_nothing(const hr_publishing *p) {
    cJSON *report = NULL;
    const char *text = hr_publisher_report(p->publisher), *published = "none"; /* no push began */
    if (hr_json_parse(text, strlen(text), 0, &report, NULL) != HR_OK)
        return false;
    (void)hr_json_opt_string(report, "published", &published, NULL);
    bool nothing = strcmp(published, "none") == 0;
    cJSON_Delete(report);
    return nothing;
}
