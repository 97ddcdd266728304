/* `headrace generate`: one prompt to one engine, to see what it serves. */
#include "cli/commands.h"
#include "cli/engine_calls.h"
#include "cli/options.h"
#include "format/json.h"
#include "format/json_writer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct generate_flags {
    hr_cli_list ids;
    const char *engine, *text, *adapter, *api_key;
    uint64_t max_new_tokens, timeout_ms;
    double temperature, timeout;
    bool logprobs, json;
} generate_flags;

static hr_status write_ids(const hr_cli_list *ids, hr_json_writer *w, hr_error *err) {
    hr_json_key(w, "input_ids");
    hr_json_array_begin(w);
    for (size_t i = 0; i < ids->n; i++) {
        for (const char *at = ids->items[i]; at != NULL;) {
            char *end = NULL;
            errno = 0;
            unsigned long long id = *at >= '0' && *at <= '9' ? strtoull(at, &end, 10) : 0;
            if (end == NULL || (*end != '\0' && *end != ',') || errno != 0 || id > UINT32_MAX)
                return hr_fail(err, HR_ERR_INVALID, "--ids: \"%.100s\" is no list of token ids",
                               ids->items[i]);
            hr_json_write_u64(w, id);
            at = *end == ',' ? end + 1 : NULL;
        }
    }
    hr_json_array_end(w);
    return HR_OK;
}

static hr_status write_body(const generate_flags *f, hr_buf *body, hr_error *err) {
    hr_json_writer w;
    hr_json_writer_init(&w, body);
    hr_json_object_begin(&w);
    if (f->text != NULL)
        hr_json_put_string(&w, "text", f->text);
    else
        HR_TRY(write_ids(&f->ids, &w, err));
    hr_json_key(&w, "sampling_params");
    hr_json_object_begin(&w);
    hr_json_put_u64(&w, "max_new_tokens", f->max_new_tokens);
    hr_json_put_f64(&w, "temperature", f->temperature);
    hr_json_object_end(&w);
    if (f->adapter != NULL)
        hr_json_put_string(&w, "lora_path", f->adapter);
    if (f->logprobs)
        hr_json_put_bool(&w, "return_logprob", true);
    hr_json_object_end(&w);
    return body->failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the request") : HR_OK;
}

/* A number of one line per token: "-0.123 42". */
static void print_logprobs(const cJSON *meta) {
    const cJSON *item;
    cJSON_ArrayForEach(item, hr_json_get(meta, "output_token_logprobs")) {
        const cJSON *logprob = cJSON_GetArrayItem(item, 0), *id = cJSON_GetArrayItem(item, 1);
        if (cJSON_IsNumber(logprob) && cJSON_IsNumber(id))
            printf("%12.6f  %.0f\n", logprob->valuedouble, id->valuedouble);
    }
}

/* The engine's version, which the last push of anything named, and that of the adapter which
 * answered. An engine that does not tell the latter has no such key. */
static void print_versions(const generate_flags *f, const cJSON *meta) {
    const cJSON *version = hr_json_get(meta, "weight_version");
    const cJSON *adapter = hr_json_get(meta, "lora_version");
    if (cJSON_IsString(version))
        fprintf(stderr, "weight version %s\n", version->valuestring);
    if (f->adapter != NULL && cJSON_IsString(adapter))
        fprintf(stderr, "adapter %s, version %s\n", f->adapter, adapter->valuestring);
    else if (f->adapter != NULL && cJSON_IsNull(adapter))
        fprintf(stderr, "adapter %s, without a version\n", f->adapter);
}

static void print_reply(const generate_flags *f, const cJSON *reply) {
    const cJSON *text = hr_json_get(reply, "text"), *id;
    const cJSON *meta = hr_json_get(reply, "meta_info");
    if (cJSON_IsString(text) && text->valuestring[0] != '\0') {
        printf("%s\n", text->valuestring);
    } else {
        cJSON_ArrayForEach(id, hr_json_get(reply, "output_ids"))
            printf("%.0f%s", id->valuedouble, id->next != NULL ? " " : "\n");
    }
    if (f->logprobs)
        print_logprobs(meta);
    fflush(stdout);
    print_versions(f, meta);
}

static hr_status post(const generate_flags *f, const char *body, hr_engine_call **call,
                      hr_error *err) {
    const char *path = "/generate";
    hr_engine_ask ask = {.method = "POST",
                         .paths = &path,
                         .n_paths = 1,
                         .body = body,
                         .api_key = f->api_key,
                         .timeout_ms = f->timeout_ms};
    return hr_engine_calls(&f->engine, 1, &ask, call, err);
}

static hr_status ask(const generate_flags *f, const char *body, hr_error *err) {
    hr_engine_call *call = NULL;
    hr_status status = post(f, body, &call, err);
    if (status == HR_OK && call->status != HR_OK)
        status = hr_engine_call_fail(call, err);
    if (status == HR_OK && f->json) {
        char *text = cJSON_PrintUnformatted(call->reply);
        printf("%s\n", text != NULL ? text : "null");
        cJSON_free(text);
    } else if (status == HR_OK) {
        print_reply(f, call->reply);
    }
    hr_engine_calls_free(call, call != NULL ? 1 : 0);
    return status;
}

static hr_status check(generate_flags *f, hr_error *err) {
    HR_TRY(hr_engine_urls_check(&f->engine, f->engine != NULL ? 1 : 0, err));
    if ((f->text != NULL) == (f->ids.n > 0))
        return hr_fail(err, HR_ERR_INVALID, "give the prompt as --text or as --ids");
    return hr_cli_timeout(f->timeout, &f->timeout_ms, err);
}

static int run(int argc, char **argv, generate_flags *f) {
    hr_error err;
    bool help = false;
    const hr_cli_option table[] = {
        {"--engine", HR_CLI_TEXT, &f->engine, "URL", "the engine to ask; required"},
        {"--text", HR_CLI_TEXT, &f->text, "TEXT", "the prompt"},
        {"--ids", HR_CLI_LIST, &f->ids, "ID...", "the prompt as token ids"},
        {"--adapter", HR_CLI_TEXT, &f->adapter, "NAME", "adapter to answer with (default: none)"},
        {"--max-new-tokens", HR_CLI_NUMBER, &f->max_new_tokens, "N", "(default: 64)"},
        {"--temperature", HR_CLI_DECIMAL, &f->temperature, "T", "0 = greedy (default: 0)"},
        {"--logprobs", HR_CLI_FLAG, &f->logprobs, NULL, "logprob and id of every new token"},
        {"--timeout", HR_CLI_DECIMAL, &f->timeout, "SECONDS", "for the answer (default: 600)"},
        {"--api-key", HR_CLI_TEXT, &f->api_key, "KEY", "or HEADRACE_API_KEY in the environment"},
        {"--json", HR_CLI_FLAG, &f->json, NULL, "the reply as it came"},
    };
    size_t n = sizeof table / sizeof table[0];
    if (hr_cli_parse(argc, argv, table, n, NULL, &help, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (help) {
        printf("usage: headrace generate --engine URL --text TEXT [--adapter NAME]\n\n"
               "Sends one prompt and prints what comes back; on stderr the engine's weight version "
               "and, with\n--adapter, the adapter's.\n\n");
        hr_cli_print_options(stdout, table, n);
        printf("\nexit codes: 0 answered; 1 refused or unreachable; 2 wrong usage\n");
        return HR_EXIT_OK;
    }
    if (check(f, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    hr_buf body = {0};
    if (write_body(f, &body, &err) != HR_OK) {
        hr_buf_free(&body);
        return hr_exit_error(HR_EXIT_USAGE, &err);
    }
    hr_status status = ask(f, body.data, &err);
    hr_buf_free(&body);
    if (status != HR_OK)
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    return HR_EXIT_OK;
}

int hr_command_generate(int argc, char **argv) {
    static generate_flags flags; /* large; a command runs once in a process */
    flags = (generate_flags){.api_key = hr_cli_api_key(), .max_new_tokens = 64, .timeout = 600};
    return run(argc, argv, &flags);
}
