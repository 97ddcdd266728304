/* `headrace status`: what every engine serves now, as a table. */
#include "cli/commands.h"
#include "cli/engine_calls.h"
#include "cli/options.h"
#include "format/json.h"
#include "format/json_writer.h"

#include <stdlib.h>
#include <string.h>

typedef struct status_flags {
    hr_cli_list engines;
    const char *api_key;
    double timeout;
    uint64_t timeout_ms;
    bool json;
} status_flags;

/* One engine's answers. Numbers that it does not say are below zero, texts NULL. */
typedef struct engine_status {
    const char *url, *state;
    char error[1100]; /* "": it answers */
    const char *version, *session, *session_id, *version_of_program;
    double running, queued, idle_ms, lease_ms;
    const cJSON *adapters; /* NULL: not known */
} engine_status;

static const char *text_of(const cJSON *object, const char *key) {
    const cJSON *item = hr_json_get(object, key);
    return cJSON_IsString(item) && item->valuestring[0] != '\0' ? item->valuestring : NULL;
}

static double number_of(const cJSON *object, const char *key) {
    const cJSON *item = hr_json_get(object, key);
    return cJSON_IsNumber(item) && item->valuedouble >= 0 ? item->valuedouble : -1;
}

static const char *or_dash(const char *text) {
    return text != NULL ? text : "-";
}

/* A key that is refused on one of the routes is said; the other one may tell something. */
static void read_failure(const hr_engine_call *call, engine_status *s) {
    bool refused = call->http_status == 401 || call->http_status == 403;
    s->state = refused ? "refused" : call->http_status > 0 ? "failing" : "unreachable";
    snprintf(s->error, sizeof s->error, "%s%s", refused ? "refused: " : "", call->err.message);
}

/* The update route is Headrace's; other engines have none, which is no failure. */
static engine_status read_status(const hr_engine_call *info, const hr_engine_call *update) {
    const cJSON *states = hr_json_get(info->reply, "internal_states");
    const cJSON *state = cJSON_GetArrayItem(states, 0);
    const cJSON *session = hr_json_get(update->reply, "session");
    engine_status s = {.url = info->url};
    s.state = cJSON_IsTrue(hr_json_get(state, "paused")) ? "paused" : "serving";
    if (info->status != HR_OK)
        read_failure(info, &s);
    else if (update->status != HR_OK && update->http_status != 404)
        snprintf(s.error, sizeof s.error, "update session not known: %s", update->err.message);
    s.version = text_of(state, "weight_version");
    s.version = s.version != NULL ? s.version : text_of(info->reply, "weight_version");
    s.version = s.version != NULL ? s.version : text_of(update->reply, "weight_version");
    s.session = text_of(session, "state");
    bool open = s.session != NULL && strcmp(s.session, "idle") != 0;
    s.session_id = open ? text_of(session, "session_id") : NULL;
    s.idle_ms = open ? number_of(session, "idle_ms") : -1;
    s.lease_ms = open ? number_of(session, "lease_ms") : -1;
    s.version_of_program = text_of(info->reply, "version");
    s.running = number_of(state, "running");
    s.queued = number_of(state, "queued");
    s.adapters = hr_json_get(info->reply, "adapters");
    return s;
}

/* ---- as text ---- */

static void print_count(double count, int width) {
    if (count < 0)
        printf("  %*s", width, "-");
    else
        printf("  %*.0f", width, count);
}

static void print_session(const engine_status *s) {
    printf("  session %s is %s", s->session_id, s->session);
    if (s->idle_ms >= 0)
        printf(", last call %.1f s ago", s->idle_ms / 1e3);
    if (s->lease_ms >= 0)
        printf(", dropped after %.1f s of silence", s->lease_ms / 1e3);
    printf("\n");
}

static void print_adapters(const cJSON *adapters) {
    const cJSON *item;
    cJSON_ArrayForEach(item, adapters) {
        const char *name = text_of(item, "lora_name"), *version = text_of(item, "lora_version");
        double rank = number_of(item, "rank"), id = number_of(item, "lora_id");
        printf("  adapter %s", or_dash(name));
        if (version != NULL)
            printf(", version %s", version);
        if (rank >= 0)
            printf(", rank %.0f", rank);
        if (id >= 0)
            printf(", id %.0f", id);
        printf("%s\n", cJSON_IsTrue(hr_json_get(item, "pinned")) ? ", pinned" : "");
    }
}

static void print_table(const engine_status *rows, size_t n) {
    int width = 6;
    for (size_t i = 0; i < n; i++)
        width = (int)strlen(rows[i].url) > width ? (int)strlen(rows[i].url) : width;
    printf("%-*s  %-11s  %-20s  %7s  %6s  %s\n", width, "engine", "state", "version", "running",
           "queued", "session");
    for (size_t i = 0; i < n; i++) {
        printf("%-*s  %-11s  %-20s", width, rows[i].url, rows[i].state, or_dash(rows[i].version));
        print_count(rows[i].running, 7);
        print_count(rows[i].queued, 6);
        printf("  %s\n", or_dash(rows[i].session));
    }
    for (size_t i = 0; i < n; i++) {
        bool more = cJSON_GetArraySize(rows[i].adapters) > 0 || rows[i].session_id != NULL;
        if (!more && rows[i].error[0] == '\0')
            continue;
        printf("\n%s\n", rows[i].url);
        if (rows[i].error[0] != '\0')
            printf("  %s\n", rows[i].error);
        if (rows[i].session_id != NULL)
            print_session(&rows[i]);
        print_adapters(rows[i].adapters);
    }
}

/* ---- as JSON ---- */

static void put_text(hr_json_writer *w, const char *key, const char *text) {
    if (text != NULL)
        hr_json_put_string(w, key, text);
    else
        hr_json_put_null(w, key);
}

static void put_count(hr_json_writer *w, const char *key, double count) {
    if (count >= 0 && count < 9007199254740992.0)
        hr_json_put_u64(w, key, (uint64_t)count);
    else
        hr_json_put_null(w, key);
}

static void put_bool(hr_json_writer *w, const char *key, const cJSON *item) {
    if (cJSON_IsBool(item))
        hr_json_put_bool(w, key, cJSON_IsTrue(item));
    else
        hr_json_put_null(w, key);
}

static void write_adapters(const cJSON *adapters, hr_json_writer *w) {
    const cJSON *item;
    hr_json_key(w, "adapters");
    if (!cJSON_IsArray(adapters)) {
        hr_json_write_null(w);
        return;
    }
    hr_json_array_begin(w);
    cJSON_ArrayForEach(item, adapters) {
        hr_json_object_begin(w);
        put_text(w, "name", text_of(item, "lora_name"));
        put_text(w, "weight_version", text_of(item, "lora_version"));
        put_count(w, "id", number_of(item, "lora_id"));
        put_count(w, "rank", number_of(item, "rank"));
        put_bool(w, "pinned", hr_json_get(item, "pinned"));
        hr_json_object_end(w);
    }
    hr_json_array_end(w);
}

static void write_row(const engine_status *s, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "url", s->url);
    hr_json_put_string(w, "state", s->state);
    put_text(w, "error", s->error[0] != '\0' ? s->error : NULL);
    put_text(w, "weight_version", s->version);
    put_count(w, "running", s->running);
    put_count(w, "queued", s->queued);
    put_text(w, "session", s->session);
    put_text(w, "session_id", s->session_id);
    put_count(w, "session_idle_ms", s->idle_ms);
    put_count(w, "session_lease_ms", s->lease_ms);
    put_text(w, "program_version", s->version_of_program);
    write_adapters(s->adapters, w);
    hr_json_object_end(w);
}

static hr_status print_json(const engine_status *rows, size_t n, hr_error *err) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_key(&w, "engines");
    hr_json_array_begin(&w);
    for (size_t i = 0; i < n; i++)
        write_row(&rows[i], &w);
    hr_json_array_end(&w);
    hr_json_object_end(&w);
    bool failed = text.failed;
    if (!failed)
        printf("%s\n", text.data);
    hr_buf_free(&text);
    return failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the answer") : HR_OK;
}

/* *reachable: every engine answered. */
static hr_status ask(const status_flags *f, bool *reachable, hr_error *err) {
    static const char *const paths[] = {"/server_info", "/weight_update_status"};
    const hr_engine_ask question = {.method = "GET",
                                    .paths = paths,
                                    .n_paths = 2,
                                    .api_key = f->api_key,
                                    .timeout_ms = f->timeout_ms};
    hr_engine_call *calls = NULL;
    size_t n = f->engines.n;
    hr_status status = HR_OK;
    engine_status *rows = calloc(n, sizeof *rows);
    if (rows == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
    status = hr_engine_calls(f->engines.items, n, &question, &calls, err);
    *reachable = true;
    for (size_t i = 0; i < n && status == HR_OK; i++) {
        rows[i] = read_status(&calls[i], &calls[n + i]);
        *reachable = *reachable && rows[i].error[0] == '\0';
    }
    if (status == HR_OK && f->json)
        status = print_json(rows, n, err);
    else if (status == HR_OK)
        print_table(rows, n);
    free(rows);
    hr_engine_calls_free(calls, calls != NULL ? 2 * n : 0);
    return status;
}

static hr_status check(status_flags *f, hr_error *err) {
    HR_TRY(hr_engine_urls_check(f->engines.items, f->engines.n, err));
    return hr_cli_timeout(f->timeout, &f->timeout_ms, err);
}

static int run(int argc, char **argv, status_flags *f) {
    hr_error err;
    bool help = false, reachable = false;
    const hr_cli_option table[] = {
        {"--engine", HR_CLI_LIST, &f->engines, "URL...", "engines to ask; required"},
        {"--timeout", HR_CLI_DECIMAL, &f->timeout, "SECONDS", "for all answers (default: 5)"},
        {"--api-key", HR_CLI_TEXT, &f->api_key, "KEY", "or HEADRACE_API_KEY in the environment"},
        {"--json", HR_CLI_FLAG, &f->json, NULL, "as JSON"},
    };
    size_t n = sizeof table / sizeof table[0];
    if (hr_cli_parse(argc, argv, table, n, NULL, &help, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (help) {
        printf("usage: headrace status --engine URL...\n\n"
               "What every engine serves now: state, weight version, requests, update session, "
               "adapters."
               "\n\n");
        hr_cli_print_options(stdout, table, n);
        printf("\nexit codes: 0 every engine answered; 1 one did not, or refused; 2 wrong usage\n");
        return HR_EXIT_OK;
    }
    if (check(f, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (ask(f, &reachable, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    return reachable ? HR_EXIT_OK : HR_EXIT_FAILURE;
}

int hr_command_status(int argc, char **argv) {
    static status_flags flags; /* large; a command runs once in a process */
    flags = (status_flags){.api_key = hr_cli_api_key(), .timeout = 5};
    return run(argc, argv, &flags);
}
