/* `headrace verify`: whether every engine holds exactly the bytes of local files, in its compute
 * dtype. */
#include "cli/commands.h"
#include "cli/engine_calls.h"
#include "cli/publishing.h"
#include "format/checkpoint.h"
#include "format/file.h"
#include "format/json.h"
#include "format/json_writer.h"
#include "format/peft_config.h"
#include "format/safetensors.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "transport/http_client.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)

enum { SHOWN = 10 }; /* names of differences that are printed for an engine */

typedef struct verify_flags {
    hr_cli_list engines, adapters;
    const char *base, *api_key;
    double timeout;
    uint64_t timeout_ms;
    bool json;
} verify_flags;

/* A local tensor under the name that engines list. */
typedef struct local_tensor {
    const char *name;
    const hr_tensor *tensor;
} local_tensor;

/* What a pair's product is multiplied by: part of what is served, though no tensor of the file. */
typedef struct scaling {
    char *name; /* "<module>.scaling" */
    float value;
    hr_tensor tensor;
} scaling;

typedef struct local_set {
    const char *adapter; /* NULL: base */
    hr_safetensors *file;
    hr_checkpoint *checkpoint;
    local_tensor *tensors; /* by name */
    size_t n;
    scaling *scalings; /* of an adapter: one for each pair, tensors of their own */
    size_t n_scalings;
} local_set;

typedef struct verdict {
    size_t equal, scalings, different; /* scalings: equal ones, which are not in equal */
    bool no_scalings; /* of an adapter: the engine lists none, so they were not compared */
    hr_buf names;     /* of differences, one a line, with what differs */
} verdict;

/* Of all engines and sets. */
typedef struct tally {
    bool differs;
    size_t not_compared;
} tally;

/* ---- comparing ---- */

static void differ(verdict *v, const char *name, const char *why) {
    v->different++;
    hr_buf_printf(&v->names, "%s: %s\n", name, why);
}

static bool same_shape(const cJSON *shape, const hr_tensor *t) {
    if (cJSON_GetArraySize(shape) != (int)t->ndim)
        return false;
    for (uint32_t d = 0; d < t->ndim; d++) {
        const cJSON *item = cJSON_GetArrayItem(shape, (int)d);
        if (!cJSON_IsNumber(item) || item->valuedouble != (double)t->shape[d])
            return false;
    }
    return true;
}

/* The digest of a tensor in the dtype that an engine has it in. */
static hr_status digest_as(const hr_tensor *t, hr_dtype dtype, uint8_t out[HR_XXH3_SIZE],
                           hr_error *err) {
    size_t n = (size_t)hr_tensor_elements(t), size = hr_dtype_size(dtype);
    if (dtype == t->dtype) {
        hr_xxh3(t->data, t->bytes, out);
        return HR_OK;
    }
    void *converted = malloc(n * size + 1);
    if (converted == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to convert %s", t->name);
    hr_status status = hr_convert(converted, dtype, t->data, t->dtype, n, err);
    if (status == HR_OK)
        hr_xxh3(converted, n * size, out);
    free(converted);
    return status;
}

static bool is_scaling(const char *name) {
    size_t len = strlen(name), suffix = strlen(".scaling");
    return len > suffix && strcmp(name + len - suffix, ".scaling") == 0;
}

static hr_status compare_tensor(const hr_tensor *t, const char *name, const cJSON *theirs,
                                verdict *v, hr_error *err) {
    uint8_t mine[HR_XXH3_SIZE], other[HR_XXH3_SIZE];
    const char *dtype_name = "", *hex = "";
    hr_dtype dtype = t->dtype;
    (void)hr_json_opt_string(theirs, "dtype", &dtype_name, NULL);
    (void)hr_json_opt_string(theirs, "xxh3", &hex, NULL);
    if (!hr_dtype_from_name(dtype_name, &dtype) || !hr_xxh3_parse(hex, other))
        return hr_fail(err, HR_ERR_INVALID, "the engine's digest of %.200s cannot be read", name);
    if (!same_shape(hr_json_get(theirs, "shape"), t)) {
        differ(v, name, "other shape");
        return HR_OK;
    }
    if (digest_as(t, dtype, mine, err) != HR_OK)
        differ(v, name, "cannot be converted to the engine's dtype");
    else if (memcmp(mine, other, sizeof mine) != 0)
        differ(v, name, "other bytes");
    else if (is_scaling(name))
        v->scalings++;
    else
        v->equal++;
    return HR_OK;
}

/* Buffers that are computed, not loaded. */
static bool is_buffer(const char *name) {
    return strstr(name, ".rotary_emb.inv_freq") != NULL;
}

static int compare_local(const void *a, const void *b) {
    return strcmp(((const local_tensor *)a)->name, ((const local_tensor *)b)->name);
}

static int compare_listed(const void *a, const void *b) {
    return strcmp((*(const cJSON *const *)a)->string, (*(const cJSON *const *)b)->string);
}

/* A tied head is not listed: the engine uses the embedding in its place. */
static hr_status compare_unlisted(const local_tensor *local, const cJSON *listed, verdict *v,
                                  hr_error *err) {
    const cJSON *tied = strcmp(local->name, "lm_head.weight") == 0
                            ? hr_json_get(listed, "model.embed_tokens.weight")
                            : NULL;
    if (tied != NULL)
        return compare_tensor(local->tensor, local->name, tied, v, err);
    if (!is_buffer(local->name))
        differ(v, local->name, "the engine has no such tensor");
    return HR_OK;
}

static bool lists_scalings(const cJSON *listed) {
    const cJSON *item;
    cJSON_ArrayForEach(item, listed) {
        if (is_scaling(item->string))
            return true;
    }
    return false;
}

/* Both lists by name, side by side. */
static hr_status compare(const local_set *local, const cJSON *listed, verdict *v, hr_error *err) {
    v->no_scalings = local->n_scalings > 0 && !lists_scalings(listed);
    size_t n = 0, i = 0, k = 0, n_listed = (size_t)cJSON_GetArraySize(listed);
    const cJSON **theirs = calloc(n_listed + 1, sizeof *theirs), *item;
    hr_status status = HR_OK;
    if (theirs == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu tensors", n_listed);
    cJSON_ArrayForEach(item, listed) theirs[n++] = item;
    qsort(theirs, n, sizeof *theirs, compare_listed);
    while ((i < local->n || k < n) && status == HR_OK) {
        int order = i == local->n ? 1
                    : k == n      ? -1
                                  : strcmp(local->tensors[i].name, theirs[k]->string);
        if (order < 0 && v->no_scalings && is_scaling(local->tensors[i].name)) {
            i++;
        } else if (order < 0) {
            status = compare_unlisted(&local->tensors[i++], listed, v, err);
        } else if (order > 0) {
            differ(v, theirs[k++]->string, "not in the local files");
        } else {
            status = compare_tensor(local->tensors[i].tensor, theirs[k]->string, theirs[k], v, err);
            i++;
            k++;
        }
    }
    free(theirs);
    return status;
}

/* ---- local files ---- */

static const char *listed_name(const char *name) {
    static const char prefix[] = "base_model.model.";
    return strncmp(name, prefix, sizeof prefix - 1) == 0 ? name + sizeof prefix - 1 : name;
}

/* "model.layers.0.self_attn.q_proj" of "model.layers.0.self_attn.q_proj.lora_A.weight"; 0: no pair
 * begins here. */
static size_t module_length(const char *name) {
    static const char *const suffixes[] = {".lora_A.weight", ".lora_embedding_A"};
    size_t len = strlen(name);
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        size_t suffix = strlen(suffixes[i]);
        if (len > suffix && strcmp(name + len - suffix, suffixes[i]) == 0)
            return len - suffix;
    }
    return 0;
}

static hr_status add_scaling(local_set *set, hr_peft_config *config, const char *name, size_t len,
                             hr_error *err) {
    scaling *s = &set->scalings[set->n_scalings];
    char *module = strndup(name, len);
    uint32_t rank = 0;
    if (module == NULL || asprintf(&s->name, "%s.scaling", module) < 0) {
        s->name = NULL;
        free(module);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the scale of %.200s", name);
    }
    hr_status status = hr_peft_config_rank(config, module, &rank, &s->value, err);
    free(module);
    set->n_scalings++;
    s->tensor = (hr_tensor){
        .name = s->name, .dtype = HR_DTYPE_F32, .data = &s->value, .bytes = sizeof s->value};
    set->tensors[set->n++] = (local_tensor){s->name, &s->tensor};
    return status;
}

/* The scales that the config of an adapter gives to its pairs, beside its tensors. */
static hr_status add_scalings(local_set *set, const char *dir, hr_error *err) {
    hr_buf text = {0};
    hr_peft_config config = {0};
    char *path = hr_path_join(dir, "adapter_config.json");
    size_t n = set->n;
    hr_status status = path != NULL ? hr_file_read(path, MAX_CONFIG_BYTES, &text, err)
                                    : hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    if (status == HR_OK) {
        status = hr_peft_config_parse(text.data, text.len, &config, err);
        if (status != HR_OK)
            status = hr_fail_context(err, status, "%s", dir);
    }
    for (size_t i = 0; i < n && status == HR_OK; i++) {
        size_t len = module_length(set->tensors[i].name);
        if (len > 0)
            status = add_scaling(set, &config, set->tensors[i].name, len, err);
    }
    hr_peft_config_free(&config);
    hr_buf_free(&text);
    free(path);
    return status;
}

static hr_status open_local(const char *adapter, const char *dir, local_set *set, hr_error *err) {
    hr_status status = HR_OK;
    set->adapter = adapter;
    if (adapter == NULL) {
        status = hr_checkpoint_open(dir, &set->checkpoint, err);
    } else {
        HR_TRY(hr_adapter_dir_check(dir, err));
        char *path = hr_path_join(dir, "adapter_model.safetensors");
        status = path != NULL ? hr_safetensors_open(path, &set->file, err)
                              : hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
        free(path);
    }
    if (status != HR_OK)
        return status;
    set->n =
        adapter == NULL ? hr_checkpoint_count(set->checkpoint) : hr_safetensors_count(set->file);
    set->tensors = calloc(2 * set->n + 1, sizeof *set->tensors);
    set->scalings = calloc(set->n + 1, sizeof *set->scalings);
    if (set->tensors == NULL || set->scalings == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: no memory for %zu tensors", dir, set->n);
    for (size_t i = 0; i < set->n; i++) {
        const hr_tensor *t = adapter == NULL ? hr_checkpoint_at(set->checkpoint, i)
                                             : hr_safetensors_at(set->file, i);
        set->tensors[i] = (local_tensor){listed_name(t->name), t};
    }
    if (adapter != NULL)
        HR_TRY(add_scalings(set, dir, err));
    qsort(set->tensors, set->n, sizeof *set->tensors, compare_local);
    return HR_OK;
}

static void close_local(local_set *set) {
    for (size_t i = 0; i < set->n_scalings; i++)
        free(set->scalings[i].name);
    free(set->scalings);
    free(set->tensors);
    hr_safetensors_close(set->file);
    hr_checkpoint_close(set->checkpoint);
}

/* ---- verdicts ---- */

static void print_verdict(const char *url, const char *what, const char *version,
                          const verdict *v) {
    size_t shown = 0;
    printf("%s  %s: ", url, what);
    if (v->different == 0)
        printf("equal, %zu tensors", v->equal);
    else
        printf("DIFFERS, %zu tensors equal", v->equal);
    if (v->scalings > 0)
        printf(" and %zu scalings", v->scalings);
    if (v->different > 0)
        printf(", %zu not", v->different);
    if (version[0] != '\0')
        printf(" (version %s)", version);
    printf("\n");
    if (v->no_scalings)
        printf("  scaling was not compared: the engine does not list it\n");
    for (const char *line = v->names.data; line != NULL && *line != '\0' && shown < SHOWN;
         shown++) {
        const char *end = strchr(line, '\n');
        printf("  %.*s\n", (int)(end - line), line);
        line = end + 1;
    }
    if (v->different > shown)
        printf("  and %zu more\n", v->different - shown);
}

static void write_verdict(const char *url, const char *what, const char *version, const verdict *v,
                          bool scalings, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "url", url);
    hr_json_put_string(w, "weights", what);
    hr_json_put_string(w, "weight_version", version);
    hr_json_put_bool(w, "equal", v->different == 0);
    hr_json_put_u64(w, "tensors_equal", v->equal);
    if (scalings) {
        hr_json_put_u64(w, "scalings_equal", v->scalings);
        hr_json_put_bool(w, "scaling_compared", !v->no_scalings);
    }
    hr_json_key(w, "differences");
    hr_json_array_begin(w);
    for (const char *line = v->names.data; line != NULL && *line != '\0';) {
        const char *end = strchr(line, '\n');
        hr_json_write_string_n(w, line, (size_t)(end - line));
        line = end + 1;
    }
    hr_json_array_end(w);
    hr_json_object_end(w);
}

/* An engine that was not compared is told of, and the others are compared. */
static void tell_failure(const verify_flags *f, const char *url, const char *what,
                         const hr_error *why, tally *all, hr_json_writer *w) {
    all->not_compared++;
    if (!f->json)
        printf("%s  %s: not compared\n", url, what);
    hr_exit_error(HR_EXIT_FAILURE, why);
    if (!f->json)
        return;
    hr_json_object_begin(w);
    hr_json_put_string(w, "url", url);
    hr_json_put_string(w, "weights", what);
    hr_json_put_null(w, "equal");
    hr_json_put_string(w, "error", why->message);
    hr_json_object_end(w);
}

static hr_status get(const verify_flags *f, const char *path, hr_engine_call **calls,
                     hr_error *err) {
    hr_engine_ask ask = {.method = "GET",
                         .paths = &path,
                         .n_paths = 1,
                         .api_key = f->api_key,
                         .timeout_ms = f->timeout_ms};
    return hr_engine_calls(f->engines.items, f->engines.n, &ask, calls, err);
}

static hr_status verify_engine(const verify_flags *f, const local_set *local,
                               const hr_engine_call *call, tally *all, hr_json_writer *w,
                               hr_error *err) {
    verdict v = {0};
    const char *version = "", *what = local->adapter != NULL ? local->adapter : "base";
    if (call->status != HR_OK)
        return hr_engine_call_fail(call, err);
    (void)hr_json_opt_string(call->reply, "weight_version", &version, NULL);
    hr_status status = compare(local, hr_json_get(call->reply, "tensors"), &v, err);
    if (status == HR_OK && v.names.failed)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the differences");
    if (status == HR_OK && f->json)
        write_verdict(call->url, what, version, &v, local->n_scalings > 0, w);
    else if (status == HR_OK)
        print_verdict(call->url, what, version, &v);
    all->differs = all->differs || v.different > 0;
    hr_buf_free(&v.names);
    return status;
}

/* All engines against one local set. */
static hr_status verify_set(const verify_flags *f, const local_set *local, tally *all,
                            hr_json_writer *w, hr_error *err) {
    hr_buf path = {0};
    hr_engine_call *calls = NULL;
    hr_buf_puts(&path, "/weight_digests");
    if (local->adapter != NULL) {
        hr_buf_puts(&path, "?lora_name=");
        hr_query_append(&path, local->adapter);
    }
    hr_status status = path.failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a URL")
                                   : get(f, path.data, &calls, err);
    for (size_t i = 0; i < f->engines.n && status == HR_OK; i++) {
        hr_error why;
        if (verify_engine(f, local, &calls[i], all, w, &why) != HR_OK)
            tell_failure(f, calls[i].url, local->adapter != NULL ? local->adapter : "base", &why,
                         all, w);
    }
    hr_engine_calls_free(calls, calls != NULL ? f->engines.n : 0);
    hr_buf_free(&path);
    return status;
}

static hr_status verify_one(const verify_flags *f, const char *adapter, const char *dir, tally *all,
                            hr_json_writer *w, hr_error *err) {
    local_set local = {0};
    hr_status status = open_local(adapter, dir, &local, err);
    if (status == HR_OK)
        status = verify_set(f, &local, all, w, err);
    close_local(&local);
    return status;
}

static hr_status verify_all(const verify_flags *f, tally *all, hr_json_writer *w, hr_error *err) {
    if (f->base != NULL)
        HR_TRY(verify_one(f, NULL, f->base, all, w, err));
    for (size_t i = 0; i < f->adapters.n; i++) {
        char *name = NULL;
        const char *dir = NULL;
        HR_TRY(hr_cli_adapter(f->adapters.items[i], &name, &dir, err));
        hr_status status = verify_one(f, name, dir, all, w, err);
        free(name);
        HR_TRY(status);
    }
    return HR_OK;
}

static hr_status verify(const verify_flags *f, tally *all, hr_error *err) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_key(&w, "engines");
    hr_json_array_begin(&w);
    hr_status status = verify_all(f, all, &w, err);
    hr_json_array_end(&w);
    if (!all->differs && all->not_compared > 0)
        hr_json_put_null(&w, "equal");
    else
        hr_json_put_bool(&w, "equal", !all->differs);
    hr_json_object_end(&w);
    if (status == HR_OK && text.failed)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the answer");
    if (status == HR_OK && f->json)
        printf("%s\n", text.data);
    hr_buf_free(&text);
    return status;
}

static int answer(const tally *all) {
    if (all->differs)
        return HR_EXIT_DIFFERS;
    return all->not_compared > 0 ? HR_EXIT_FAILURE : HR_EXIT_OK;
}

static hr_status check(verify_flags *f, hr_error *err) {
    HR_TRY(hr_engine_urls_check(f->engines.items, f->engines.n, err));
    if (f->adapters.n == 0 && f->base == NULL)
        return hr_fail(err, HR_ERR_INVALID, "verify what? Give --adapter NAME=DIR or --base DIR");
    for (size_t i = 0; i < f->adapters.n; i++) {
        char *name = NULL;
        const char *dir = NULL;
        HR_TRY(hr_cli_adapter(f->adapters.items[i], &name, &dir, err));
        free(name);
    }
    return hr_cli_timeout(f->timeout, &f->timeout_ms, err);
}

static int run(int argc, char **argv, verify_flags *f) {
    hr_error err;
    bool help = false;
    tally all = {0};
    const hr_cli_option table[] = {
        {"--engine", HR_CLI_LIST, &f->engines, "URL...", "engines to ask; required"},
        {"--adapter", HR_CLI_LIST, &f->adapters, "NAME=DIR...", "PEFT directories by name"},
        {"--base", HR_CLI_TEXT, &f->base, "DIR", "a Hugging Face model directory"},
        {"--timeout", HR_CLI_DECIMAL, &f->timeout, "SECONDS", "for an answer (default: 300)"},
        {"--api-key", HR_CLI_TEXT, &f->api_key, "KEY", "or HEADRACE_API_KEY in the environment"},
        {"--json", HR_CLI_FLAG, &f->json, NULL, "as JSON, with all differences"},
    };
    size_t n = sizeof table / sizeof table[0];
    if (hr_cli_parse(argc, argv, table, n, NULL, &help, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (help) {
        printf("usage: headrace verify --engine URL... [--adapter NAME=DIR]... [--base DIR]\n\n"
               "Do all engines hold exactly these bytes? Local tensors are converted to the dtype "
               "an engine\ncomputes in; digests are compared and what differs is named.\n\n");
        hr_cli_print_options(stdout, table, n);
        printf(
            "\nexit codes: 0 equal on all engines; 1 not all were compared, the others are equal; "
            "2 wrong usage;\n4 something differs\n");
        return HR_EXIT_OK;
    }
    if (check(f, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (verify(f, &all, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    return answer(&all);
}

int hr_command_verify(int argc, char **argv) {
    static verify_flags flags; /* large; a command runs once in a process */
    flags = (verify_flags){.api_key = hr_cli_api_key(), .timeout = 300};
    return run(argc, argv, &flags);
}
