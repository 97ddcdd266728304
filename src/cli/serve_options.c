/* The flags of `headrace serve`. */
#include "cli/serve_options.h"

#include "format/json.h"

#include <errno.h>
#include <headrace/engine.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One pointer to a string, several of them, a whole number, a real number, or nothing after the
 * flag. */
typedef enum flag_kind { KIND_STRING, KIND_LIST, KIND_UINT, KIND_REAL, KIND_SWITCH } flag_kind;

typedef struct flag {
    const char *group; /* starts a new group of the help when not NULL */
    const char *name, *alias, *arg;
    flag_kind kind;
    size_t at;       /* offset in hr_serve_options */
    size_t count_at; /* KIND_LIST: where the number of items is */
    uint64_t min, max;
    const char *choices; /* KIND_STRING: "a|b|c", NULL = any */
    const char *help;
} flag;

#define AT(member) offsetof(hr_serve_options, member)

static const flag flags[] = {
    {"model", "--model-path", "--model", "PATH|ORG/NAME", KIND_STRING, AT(model_path), 0, 0, 0,
     NULL, "Hugging Face model directory, or a hub id that is in the local cache (required)"},
    {NULL, "--tokenizer-path", NULL, "PATH", KIND_STRING, AT(tokenizer_path), 0, 0, 0, NULL,
     "directory of tokenizer.json (the model's)"},
    {NULL, "--skip-tokenizer-init", NULL, NULL, KIND_SWITCH, AT(skip_tokenizer_init), 0, 0, 0, NULL,
     "token ids in, token ids out; no tokenizer is read"},
    {NULL, "--served-model-name", NULL, "NAME", KIND_STRING, AT(served_model_name), 0, 0, 0, NULL,
     "name in /v1/models (the model path)"},
    {NULL, "--dtype", NULL, "TYPE", KIND_STRING, AT(dtype), 0, 0, 0, "auto|bfloat16|float32",
     "compute type: auto, bfloat16 or float32 (auto = bfloat16)"},
    {NULL, "--context-length", NULL, "N", KIND_UINT, AT(context_length), 0, 1, UINT32_MAX, NULL,
     "most positions of a sequence (the model's)"},
    {NULL, "--weight-version", NULL, "TEXT", KIND_STRING, AT(weight_version), 0, 0, 0, NULL,
     "version reported until weights are updated (default)"},
    {"server", "--host", NULL, "HOST", KIND_STRING, AT(host), 0, 0, 0, NULL,
     "address to listen on (127.0.0.1)"},
    {NULL, "--port", NULL, "N", KIND_UINT, AT(port), 0, 0, 65535, NULL,
     "port to listen on (30000); 0 takes a free one and prints it"},
    {NULL, "--api-key", NULL, "KEY", KIND_STRING, AT(api_key), 0, 0, 0, NULL,
     "clients must send Authorization: Bearer KEY (nobody needs one)"},
    {NULL, "--admin-api-key", NULL, "KEY", KIND_STRING, AT(admin_api_key), 0, 0, 0, NULL,
     "the same for calls that change what is served (the api key, if set); opens all others too"},
    {NULL, "--incremental-streaming-output", "--stream-output", NULL, KIND_SWITCH,
     AT(incremental_streaming_output), 0, 0, 0, NULL,
     "events of a stream carry what is new (all there is)"},
    {NULL, "--stream-interval", NULL, "N", KIND_UINT, AT(stream_interval), 0, 1, 1 << 20, NULL,
     "tokens from one event of a stream to the next (1)"},
    {NULL, "--log-level", NULL, "LEVEL", KIND_STRING, AT(log_level), 0, 0, 0,
     "debug|info|warning|error", "debug, info, warning or error (info)"},
    {NULL, "--drain-timeout", NULL, "SECONDS", KIND_UINT, AT(drain_timeout), 0, 0, 86400, NULL,
     "how long requests may finish after SIGTERM (30)"},
    {"batching and memory", "--max-running-requests", NULL, "N", KIND_UINT,
     AT(max_running_requests), 0, 1, 65536, NULL, "most sequences in one batch (64)"},
    {NULL, "--max-queued-requests", NULL, "N", KIND_UINT, AT(max_queued_requests), 0, 1, 1 << 24,
     NULL, "most sequences waiting; more are answered 503 (8192)"},
    {NULL, "--chunked-prefill-size", NULL, "N", KIND_UINT, AT(chunked_prefill_size), 0, 1, 1 << 20,
     NULL, "most prompt tokens of one step (512); -1: prompts are not split"},
    {NULL, "--max-total-tokens", NULL, "N", KIND_UINT, AT(max_total_tokens), 0, 1,
     UINT64_C(1) << 40, NULL, "size of the KV cache in tokens (from the memory limit)"},
    {NULL, "--disable-radix-cache", NULL, NULL, KIND_SWITCH, AT(disable_radix_cache), 0, 0, 0, NULL,
     "compute every prompt afresh (what prompts share is kept)"},
    {NULL, "--mem-fraction-static", NULL, "X", KIND_REAL, AT(mem_fraction_static), 0, 0, 1, NULL,
     "share of available memory for weights and KV cache (0.8)"},
    {NULL, "--threads", NULL, "N", KIND_UINT, AT(threads), 0, 1, 4096, NULL,
     "compute threads (all that affinity and cgroup grant)"},
    {NULL, "--random-seed", NULL, "N", KIND_UINT, AT(random_seed), 0, 0, UINT64_MAX, NULL,
     "makes the seeds of requests without sampling_seed repeatable (random)"},
    {"LoRA (always on; adapters can be loaded at any time)", "--lora-paths", NULL, "ITEM...",
     KIND_LIST, AT(lora_items), AT(n_lora_items), 0, 0, NULL,
     "adapters loaded at start: PATH, NAME=PATH, or "
     "{\"lora_name\":..,\"lora_path\":..,\"pinned\":..}"},
    {NULL, "--max-loras-per-batch", NULL, "N", KIND_UINT, AT(max_loras_per_batch), 0, 1, 65536,
     NULL, "most distinct adapters in one batch, the base model being one (8)"},
    {NULL, "--max-loaded-loras", NULL, "N", KIND_UINT, AT(max_loaded_loras), 0, 1, 1 << 24, NULL,
     "most adapters in memory (no limit)"},
    {NULL, "--max-lora-rank", NULL, "N", KIND_UINT, AT(max_lora_rank), 0, 1, 65536, NULL,
     "refuse adapters of a higher rank (any rank)"},
    {NULL, "--lora-target-modules", NULL, "NAME...", KIND_LIST, AT(lora_target_modules),
     AT(n_lora_target_modules), 0, 0, NULL, "checked and accepted; adapters may use any module"},
    {NULL, "--enable-lora", NULL, NULL, KIND_SWITCH, AT(enable_lora), 0, 0, 0, NULL,
     "accepted; LoRA is always on"},
    {"help", "--help", "-h", NULL, KIND_SWITCH, AT(help), 0, 0, 0, NULL, "this text"},
};

/* Flags of SGLang that cannot change a result here: accepted with a warning. allowed says which
 * values keep that true ("" = takes no value, NULL = any value, "*" = any number of values). */
static const struct {
    const char *name, *allowed;
} foreign[] = {
    {"--tp-size", "1"},
    {"--tp", "1"},
    {"--tensor-parallel-size", "1"},
    {"--dp-size", "1"},
    {"--dp", "1"},
    {"--data-parallel-size", "1"},
    {"--ep-size", "1"},
    {"--ep", "1"},
    {"--expert-parallel-size", "1"},
    {"--pp-size", "1"},
    {"--pipeline-parallel-size", "1"},
    {"--nnodes", "1"},
    {"--node-rank", "0"},
    {"--device", "cpu"},
    {"--load-format", "auto|safetensors"},
    {"--tokenizer-mode", "auto|fast"},
    {"--kv-cache-dtype", "auto"},
    {"--quantization", ""}, /* never allowed: see read_foreign */
    {"--enable-dp-attention", ""},
    {"--trust-remote-code", ""},
    {"--attention-backend", NULL},
    {"--prefill-attention-backend", NULL},
    {"--decode-attention-backend", NULL},
    {"--sampling-backend", NULL},
    {"--grammar-backend", NULL},
    {"--lora-backend", NULL},
    {"--max-lora-chunk-size", NULL},
    {"--lora-eviction-policy", "lru"},
    {"--enable-lora-overlap-loading", ""},
    {"--cuda-graph-max-bs", NULL},
    {"--cuda-graph-bs", "*"},
    {"--disable-cuda-graph", ""},
    {"--disable-cuda-graph-padding", ""},
    {"--disable-piecewise-cuda-graph", ""},
    {"--disable-overlap-schedule", ""},
    {"--disable-custom-all-reduce", ""},
    {"--enable-mixed-chunk", ""},
    {"--enable-torch-compile", ""},
    {"--torch-compile-max-bs", NULL},
    {"--enable-deterministic-inference", ""},
    {"--enable-memory-saver", ""},
    {"--enable-metrics", ""},
    {"--enable-request-time-stats-logging", ""},
    {"--log-requests", ""},
    {"--log-requests-level", NULL},
    {"--log-level-http", NULL},
    {"--decode-log-interval", NULL},
    {"--show-time-cost", ""},
    {"--skip-server-warmup", ""},
    {"--watchdog-timeout", NULL},
    {"--dist-timeout", NULL},
    {"--dist-init-addr", NULL},
    {"--nccl-port", NULL},
    {"--base-gpu-id", NULL},
    {"--gpu-id-step", NULL},
    {"--schedule-policy", NULL},
    {"--schedule-conservativeness", NULL},
    {"--max-prefill-tokens", NULL},
    {"--page-size", NULL},
    {"--tokenizer-worker-num", NULL},
    {"--num-continuous-decode-steps", NULL},
};

static const char *const lora_modules[] = {
    "q_proj",   "k_proj",       "v_proj",       "o_proj",  "gate_proj", "up_proj",   "down_proj",
    "qkv_proj", "gate_up_proj", "embed_tokens", "lm_head", "all",       "all-linear"};

/* ---- values ---- */

static bool is_choice(const char *value, const char *choices) {
    size_t len = strcspn(value, "|");
    if (value[len] != '\0')
        return false;
    for (const char *c = choices; c != NULL;
         c = strchr(c, '|') != NULL ? strchr(c, '|') + 1 : NULL) {
        if (strncmp(c, value, len) == 0 && (c[len] == '|' || c[len] == '\0'))
            return true;
    }
    return false;
}

static hr_status read_uint(const flag *f, const char *value, uint64_t *out, hr_error *err) {
    if (f->at == AT(chunked_prefill_size) && strcmp(value, "-1") == 0) { /* as SGLang has it */
        *out = HR_WHOLE_PROMPTS;
        return HR_OK;
    }
    errno = 0;
    uint64_t number = strtoull(value, NULL, 10);
    if (value[0] == '\0' || value[strspn(value, "0123456789")] != '\0' || errno != 0)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted a whole number, came \"%s\"", f->name,
                       value);
    if (number < f->min || number > f->max)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted %llu to %llu, came %s", f->name,
                       (unsigned long long)f->min, (unsigned long long)f->max, value);
    *out = number;
    return HR_OK;
}

static hr_status read_real(const flag *f, const char *value, double *out, hr_error *err) {
    char *end = NULL;
    double number = strtod(value, &end);
    if (end == value || value[strspn(value, "0123456789.eE+-")] != '\0' || *end != '\0' ||
        !isfinite(number) || number <= (double)f->min || number > (double)f->max)
        return hr_fail(err, HR_ERR_INVALID,
                       "%s: wanted a number above %llu, at most %llu, came \"%s\"", f->name,
                       (unsigned long long)f->min, (unsigned long long)f->max, value);
    *out = number;
    return HR_OK;
}

static hr_status append(const char ***list, size_t *n, const char *item, hr_error *err) {
    const char **grown = realloc(*list, (*n + 1) * sizeof **list);
    if (grown == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the arguments");
    grown[(*n)++] = item;
    *list = grown;
    return HR_OK;
}

/* ---- the command line ---- */

typedef struct args {
    int argc;
    char **argv;
    int next;
    const char *name;         /* of the flag at hand, without "=value" */
    const char *inline_value; /* what stands after '=', NULL when nothing does */
    char buffer[128];
} args;

static bool next_is_value(const args *a) {
    return a->next < a->argc && (strncmp(a->argv[a->next], "--", 2) != 0);
}

static hr_status take_value(args *a, const char **out, hr_error *err) {
    if (a->inline_value != NULL)
        *out = a->inline_value;
    else if (next_is_value(a))
        *out = a->argv[a->next++];
    else
        return hr_fail(err, HR_ERR_INVALID, "%s needs a value", a->name);
    return HR_OK;
}

static hr_status take_list(args *a, const char ***list, size_t *n, hr_error *err) {
    size_t before = *n;
    if (a->inline_value != NULL)
        return append(list, n, a->inline_value, err);
    while (next_is_value(a))
        HR_TRY(append(list, n, a->argv[a->next++], err));
    return *n > before ? HR_OK
                       : hr_fail(err, HR_ERR_INVALID, "%s needs at least one value", a->name);
}

static hr_status read_flag(args *a, const flag *f, hr_serve_options *options, hr_error *err) {
    char *base = (char *)options;
    const char *value = NULL;
    if (f->kind == KIND_SWITCH) {
        if (a->inline_value != NULL)
            return hr_fail(err, HR_ERR_INVALID, "%s takes no value", a->name);
        *(bool *)(void *)(base + f->at) = true;
        return HR_OK;
    }
    if (f->kind == KIND_LIST)
        return take_list(a, (const char ***)(void *)(base + f->at),
                         (size_t *)(void *)(base + f->count_at), err);
    HR_TRY(take_value(a, &value, err));
    if (f->kind == KIND_UINT)
        return read_uint(f, value, (uint64_t *)(void *)(base + f->at), err);
    if (f->kind == KIND_REAL)
        return read_real(f, value, (double *)(void *)(base + f->at), err);
    if (value[0] == '\0' || (f->choices != NULL && !is_choice(value, f->choices)))
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted %s, came \"%s\"", f->name,
                       f->choices != NULL ? f->choices : "a value", value);
    *(const char **)(void *)(base + f->at) = value;
    return HR_OK;
}

static hr_status read_foreign(args *a, const char *name, const char *allowed,
                              hr_serve_options *options, hr_error *err) {
    const char *value = NULL;
    if (strcmp(name, "--quantization") == 0)
        return hr_fail(err, HR_ERR_INVALID,
                       "--quantization: quantised weights are not supported; leave it out");
    if (allowed != NULL && strcmp(allowed, "*") == 0) {
        while (next_is_value(a))
            a->next++;
    } else if (allowed == NULL || allowed[0] != '\0') {
        HR_TRY(take_value(a, &value, err));
        if (allowed != NULL && !is_choice(value, allowed))
            return hr_fail(err, HR_ERR_INVALID, "%s %s is not supported: only %s is", name, value,
                           allowed);
    }
    for (size_t i = 0; i < options->n_ignored; i++) {
        if (strcmp(options->ignored[i], name) == 0)
            return HR_OK;
    }
    return append(&options->ignored, &options->n_ignored, name, err);
}

static hr_status read_next(args *a, hr_serve_options *options, hr_error *err) {
    const char *arg = a->argv[a->next++];
    const char *equals = strncmp(arg, "--", 2) == 0 ? strchr(arg, '=') : NULL;
    a->name = arg;
    a->inline_value = NULL;
    if (equals != NULL && (size_t)(equals - arg) < sizeof a->buffer) {
        snprintf(a->buffer, sizeof a->buffer, "%.*s", (int)(equals - arg), arg);
        a->name = a->buffer;
        a->inline_value = equals + 1;
    }
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        const flag *f = &flags[i];
        if (strcmp(a->name, f->name) == 0 || (f->alias != NULL && strcmp(a->name, f->alias) == 0)) {
            options->has_random_seed |= f->at == AT(random_seed);
            return read_flag(a, f, options, err);
        }
    }
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        if (strcmp(a->name, foreign[i].name) == 0)
            return read_foreign(a, foreign[i].name, foreign[i].allowed, options, err);
    }
    if (arg[0] != '-')
        return hr_fail(err, HR_ERR_INVALID, "unexpected argument \"%s\"", arg);
    return hr_fail(err, HR_ERR_INVALID, "unknown flag %s", a->name);
}

/* ---- what the flags mean together ---- */

static hr_status spec_from_json(const char *item, hr_lora_spec *out, hr_error *err) {
    cJSON *tree = NULL;
    const char *name = NULL, *path = NULL;
    bool pinned = false;
    HR_TRY(hr_json_parse(item, strlen(item), 65536, &tree, err));
    hr_status status = hr_json_get_string(tree, "lora_name", &name, err);
    if (status == HR_OK)
        status = hr_json_get_string(tree, "lora_path", &path, err);
    if (status == HR_OK)
        status = hr_json_opt_bool(tree, "pinned", &pinned, err);
    if (status == HR_OK)
        *out = (hr_lora_spec){strdup(name), strdup(path), pinned};
    cJSON_Delete(tree);
    return status;
}

hr_status hr_lora_spec_parse(const char *item, hr_lora_spec *out, hr_error *err) {
    hr_lora_spec spec = {0};
    const char *equals = strchr(item, '=');
    if (item[0] == '{') {
        hr_status status = spec_from_json(item, &spec, err);
        if (status != HR_OK)
            return hr_fail_context(err, status, "--lora-paths item %.200s", item);
    } else if (equals != NULL) {
        spec = (hr_lora_spec){strndup(item, (size_t)(equals - item)), strdup(equals + 1), false};
    } else {
        spec = (hr_lora_spec){strdup(item), strdup(item), false};
    }
    hr_status status = HR_OK;
    if (spec.name == NULL || spec.path == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for --lora-paths");
    else if (spec.name[0] == '\0' || spec.path[0] == '\0')
        status = hr_fail(err, HR_ERR_INVALID, "--lora-paths: \"%.200s\" has an empty name or path",
                         item);
    if (status != HR_OK) {
        free(spec.name);
        free(spec.path);
        return status;
    }
    *out = spec;
    return HR_OK;
}

static hr_status read_loras(hr_serve_options *options, hr_error *err) {
    const char *served =
        options->served_model_name != NULL ? options->served_model_name : options->model_path;
    options->loras = calloc(options->n_lora_items + 1, sizeof *options->loras);
    if (options->loras == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for --lora-paths");
    for (size_t i = 0; i < options->n_lora_items; i++) {
        HR_TRY(hr_lora_spec_parse(options->lora_items[i], &options->loras[i], err));
        for (size_t j = 0; j < i; j++) {
            if (strcmp(options->loras[i].name, options->loras[j].name) == 0)
                return hr_fail(err, HR_ERR_INVALID, "--lora-paths: the name \"%s\" stands twice",
                               options->loras[i].name);
        }
        if (strcmp(options->loras[i].name, served) == 0)
            return hr_fail(err, HR_ERR_INVALID,
                           "--lora-paths: \"%s\" is the name of the base model; give the adapter "
                           "another, or the model, by --served-model-name",
                           served);
    }
    return HR_OK;
}

static hr_status check_together(hr_serve_options *options, hr_error *err) {
    if (options->model_path == NULL)
        return hr_fail(err, HR_ERR_INVALID, "--model-path is needed");
    if (options->served_model_name != NULL && strchr(options->served_model_name, ':') != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "--served-model-name: \"%s\" has a ':', which separates model and adapter",
                       options->served_model_name);
    if (options->max_loaded_loras != 0 && options->max_loaded_loras < options->max_loras_per_batch)
        return hr_fail(err, HR_ERR_INVALID,
                       "--max-loaded-loras %llu is below --max-loras-per-batch %llu",
                       (unsigned long long)options->max_loaded_loras,
                       (unsigned long long)options->max_loras_per_batch);
    for (size_t i = 0; i < options->n_lora_target_modules; i++) {
        bool known = false;
        for (size_t m = 0; m < sizeof lora_modules / sizeof lora_modules[0]; m++)
            known |= strcmp(options->lora_target_modules[i], lora_modules[m]) == 0;
        if (!known)
            return hr_fail(err, HR_ERR_INVALID, "--lora-target-modules: unknown module \"%s\"",
                           options->lora_target_modules[i]);
    }
    return read_loras(options, err);
}

hr_status hr_serve_options_parse(int argc, char **argv, hr_serve_options *out, hr_error *err) {
    hr_serve_options options = {
        .host = "127.0.0.1",
        .port = 30000,
        .drain_timeout = 30,
        .stream_interval = 1,
        .log_level = "info",
    };
    args a = {.argc = argc, .argv = argv};
    hr_status status = HR_OK;
    while (status == HR_OK && a.next < argc && !options.help)
        status = read_next(&a, &options, err);
    if (status == HR_OK && !options.help)
        status = check_together(&options, err);
    if (status != HR_OK)
        hr_serve_options_free(&options);
    else
        *out = options;
    return status;
}

void hr_serve_options_free(hr_serve_options *options) {
    for (size_t i = 0; options->loras != NULL && i < options->n_lora_items; i++) {
        free(options->loras[i].name);
        free(options->loras[i].path);
    }
    free(options->loras);
    free(options->lora_items);
    free(options->lora_target_modules);
    free(options->ignored);
    *options = (hr_serve_options){0};
}

void hr_serve_options_help(FILE *out) {
    fprintf(out, "usage: headrace serve --model-path PATH [FLAGS]\n\n"
                 "Loads a Hugging Face model and serves it over SGLang's HTTP API. Defaults stand "
                 "in brackets.\n");
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        const flag *f = &flags[i];
        char left[64];
        snprintf(left, sizeof left, "%s%s%s%s%s", f->name, f->alias != NULL ? ", " : "",
                 f->alias != NULL ? f->alias : "", f->arg != NULL ? " " : "",
                 f->arg != NULL ? f->arg : "");
        if (f->group != NULL)
            fprintf(out, "\n%s:\n", f->group);
        fprintf(out, strlen(left) > 30 ? "  %s\n%34s%s\n" : "  %-30s%s  %s\n", left, "", f->help);
    }
    fprintf(out,
            "\nOther flags of SGLang that cannot change a result here (--tp-size 1, "
            "--attention-backend, ...) are\n"
            "accepted with a warning. HEADRACE_ISA=ref|avx2|avx512|avx512bf16|amx chooses the\n"
            "kernels; without it the fastest are taken.\n"
            "SIGTERM and SIGINT: no new connections, requests finish (--drain-timeout), exit "
            "0; a second one\n"
            "ends at once. Exit codes: 0 stopped as asked, 1 failure, 2 wrong usage.\n");
}

/* ---- for others to read ---- */

/* Flags that have one value here, whose keys clients read. */
static const struct {
    const char *key;
    uint64_t value;
} fixed[] = {{"tp_size", 1}, {"dp_size", 1}, {"pp_size", 1}, {"ep_size", 1}, {"nnodes", 1}};

static void write_value(const hr_serve_options *options, const flag *f, hr_json_writer *w) {
    const char *base = (const char *)options;
    const char *text = NULL;
    uint64_t number = 0;
    switch (f->kind) {
    case KIND_STRING:
        memcpy(&text, base + f->at, sizeof text);
        if (text != NULL)
            hr_json_write_string(w, text);
        else
            hr_json_write_null(w);
        break;
    case KIND_UINT:
        memcpy(&number, base + f->at, sizeof number);
        if (number >= f->min && (f->at != AT(random_seed) || options->has_random_seed))
            hr_json_write_u64(w, number);
        else
            hr_json_write_null(w); /* left out: there is no limit, or none was set */
        break;
    case KIND_REAL:
        hr_json_write_f64(w, *(const double *)(const void *)(base + f->at));
        break;
    case KIND_SWITCH:
        hr_json_write_bool(w, *(const bool *)(const void *)(base + f->at));
        break;
    case KIND_LIST: {
        const char *const *items = NULL;
        size_t n = 0;
        memcpy(&items, base + f->at, sizeof items);
        memcpy(&n, base + f->count_at, sizeof n);
        hr_json_array_begin(w);
        for (size_t i = 0; i < n; i++)
            hr_json_write_string(w, items[i]);
        hr_json_array_end(w);
        break;
    }
    }
}

void hr_serve_options_write(const hr_serve_options *options, hr_json_writer *w) {
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        char key[64];
        if (flags[i].at == AT(api_key) || flags[i].at == AT(admin_api_key))
            continue;
        snprintf(key, sizeof key, "%s", flags[i].name + 2);
        for (char *c = key; *c != '\0'; c++)
            *c = *c == '-' ? '_' : *c;
        hr_json_key(w, key);
        write_value(options, &flags[i], w);
    }
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
        hr_json_put_u64(w, fixed[i].key, fixed[i].value);
    hr_json_put_bool(w, "enable_dp_attention", false);
    hr_json_put_string(w, "device", "cpu");
}
