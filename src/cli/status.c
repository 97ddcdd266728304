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
    bool json;
} status_flags;

/* One engine's answers. */
typedef struct engine_status {
    const char *url, *error; /* error "": it answers */
    const cJSON *info, *update;
    const char *state, *version, *session, *version_of_program;
    double running, queued;
} engine_status;

static const char *text_of(const cJSON *object, const char *key, const char *fallback) {
    const cJSON *item = hr_json_get(object, key);
    return cJSON_IsString(item) && item->valuestring[0] != '\0' ? item->valuestring : fallback;
}

static double number_of(const cJSON *object, const char *key) {
    const cJSON *item = hr_json_get(object, key);
    return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

/* The update route is Headrace's; other engines have none, which is no failure. */
static engine_status read_status(const hr_engine_call *info, const hr_engine_call *update) {
    const cJSON *states = hr_json_get(info->reply, "internal_states");
    const cJSON *state = cJSON_GetArrayItem(states, 0);
    const cJSON *session = hr_json_get(update->reply, "session");
    engine_status s = {.url = info->url, .info = info->reply, .update = update->reply};
    s.error = info->status != HR_OK ? info->err.message : "";
    s.state = info->status != HR_OK                        ? "unreachable"
              : cJSON_IsTrue(hr_json_get(state, "paused")) ? "paused"
                                                           : "serving";
    s.version = text_of(state, "weight_version", text_of(info->reply, "weight_version", "-"));
    s.session = text_of(session, "state", "-");
    s.version_of_program = text_of(info->reply, "version", "-");
    s.running = number_of(state, "running");
    s.queued = number_of(state, "queued");
    return s;
}

static void print_table(const engine_status *rows, size_t n) {
    int width = 6;
    for (size_t i = 0; i < n; i++)
        width = (int)strlen(rows[i].url) > width ? (int)strlen(rows[i].url) : width;
    printf("%-*s  %-11s  %-20s  %7s  %6s  %-11s\n", width, "engine", "state", "version", "running",
           "queued", "session");
    for (size_t i = 0; i < n; i++) {
        printf("%-*s  %-11s  %-20s  %7.0f  %6.0f  %-11s\n", width, rows[i].url, rows[i].state,
               rows[i].version, rows[i].running, rows[i].queued, rows[i].session);
        if (rows[i].error[0] != '\0')
            printf("%*s  %s\n", width, "", rows[i].error);
    }
}

static hr_status print_json(const engine_status *rows, size_t n, hr_error *err) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_key(&w, "engines");
    hr_json_array_begin(&w);
    for (size_t i = 0; i < n; i++) {
        hr_json_object_begin(&w);
        hr_json_put_string(&w, "url", rows[i].url);
        hr_json_put_string(&w, "state", rows[i].state);
        if (rows[i].error[0] != '\0')
            hr_json_put_string(&w, "error", rows[i].error);
        hr_json_put_string(&w, "weight_version", rows[i].version);
        hr_json_put_f64(&w, "running", rows[i].running);
        hr_json_put_f64(&w, "queued", rows[i].queued);
        hr_json_put_string(&w, "session", rows[i].session);
        hr_json_put_string(&w, "program_version", rows[i].version_of_program);
        hr_json_object_end(&w);
    }
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
    hr_engine_call *infos = NULL, *updates = NULL;
    engine_status *rows = NULL;
    uint64_t timeout_ms = (uint64_t)(f->timeout * 1000);
    size_t n = f->engines.n;
    hr_status status = hr_engine_calls(f->engines.items, n, f->api_key, "GET", "/server_info", NULL,
                                       timeout_ms, &infos, err);
    if (status == HR_OK)
        status = hr_engine_calls(f->engines.items, n, f->api_key, "GET", "/weight_update_status",
                                 NULL, timeout_ms, &updates, err);
    if (status != HR_OK)
        goto out;
    rows = calloc(n, sizeof *rows);
    if (rows == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
        goto out;
    }
    *reachable = true;
    for (size_t i = 0; i < n; i++) {
        rows[i] = read_status(&infos[i], &updates[i]);
        *reachable = *reachable && rows[i].error[0] == '\0';
    }
    if (f->json)
        status = print_json(rows, n, err);
    else
        print_table(rows, n);
out:
    free(rows);
    hr_engine_calls_free(infos, n);
    hr_engine_calls_free(updates, n);
    return status;
}

static int run(int argc, char **argv, status_flags *f) {
    hr_error err;
    bool help = false, reachable = false;
    const hr_cli_option table[] = {
        {"--engine", HR_CLI_LIST, &f->engines, "URL...", "engines to ask; required"},
        {"--timeout", HR_CLI_DECIMAL, &f->timeout, "SECONDS", "for an answer (default: 5)"},
        {"--api-key", HR_CLI_TEXT, &f->api_key, "KEY", "or HEADRACE_API_KEY in the environment"},
        {"--json", HR_CLI_FLAG, &f->json, NULL, "as JSON"},
    };
    size_t n = sizeof table / sizeof table[0];
    if (hr_cli_parse(argc, argv, table, n, NULL, &help, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (help) {
        printf(
            "usage: headrace status --engine URL...\n\n"
            "What every engine serves now: state, weight version, requests, update session.\n\n");
        hr_cli_print_options(stdout, table, n);
        printf("\nexit codes: 0 every engine answered; 1 one did not; 2 wrong usage\n");
        return HR_EXIT_OK;
    }
    if (f->engines.n == 0 || !(f->timeout > 0 && f->timeout <= 86400)) {
        hr_fail(&err, HR_ERR_INVALID,
                f->engines.n == 0 ? "--engine is missing: which engines?"
                                  : "--timeout: wanted more than 0 and at most 86400");
        return hr_exit_error(HR_EXIT_USAGE, &err);
    }
    if (ask(f, &reachable, &err) != HR_OK)
        return hr_exit_error(err.status == HR_ERR_INVALID ? HR_EXIT_USAGE : HR_EXIT_FAILURE, &err);
    return reachable ? HR_EXIT_OK : HR_EXIT_FAILURE;
}

int hr_command_status(int argc, char **argv) {
    static status_flags flags; /* large; a command runs once in a process */
    flags = (status_flags){.api_key = getenv("HEADRACE_API_KEY"), .timeout = 5};
    return run(argc, argv, &flags);
}
