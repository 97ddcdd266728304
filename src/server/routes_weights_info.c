/* What the weights are: values, digests, and the weights checker. */
#include "format/json.h"
#include "server/update_args.h"
#include "server/update_call.h"
#include "tensor/digest.h"

#include <headrace/tensor.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS 65536u
#define MAX_VALUES ((size_t)1 << 24) /* of a reply: some 200 MB as JSON */

/* ---- values ---- */

/* First one row, to learn how long rows are, so that a reply has a bound before it is made. */
static hr_status check_size(hr_engine *engine, const char *name, uint64_t rows_wanted,
                            hr_error *err) {
    float *values = NULL;
    size_t rows = 0, columns = 0;
    bool is_vector = false;
    HR_TRY(hr_engine_weight_values(engine, name, 1, &values, &rows, &columns, &is_vector, err));
    free(values);
    if (is_vector || columns == 0 || rows_wanted <= MAX_VALUES / columns)
        return HR_OK;
    return hr_fail(
        err, HR_ERR_LIMIT,
        "truncate_size: %llu rows of %zu values are over the limit of %zu values a reply",
        (unsigned long long)rows_wanted, columns, MAX_VALUES);
}

static void write_values(const float *values, size_t rows, size_t columns, bool is_vector,
                         hr_json_writer *w) {
    if (!is_vector)
        hr_json_array_begin(w);
    for (size_t r = 0; r < rows; r++) {
        hr_json_array_begin(w);
        for (size_t i = 0; i < columns; i++)
            hr_json_write_f32(w, values[r * columns + i]);
        hr_json_array_end(w);
    }
    if (!is_vector)
        hr_json_array_end(w);
}

static hr_status run_values(hr_update_call *c, hr_error *err) {
    hr_engine *engine = c->server->options.engine;
    const char *name = NULL;
    uint64_t most = 100;
    float *values = NULL;
    size_t rows = 0, columns = 0;
    bool is_vector = false;
    HR_TRY(hr_json_get_string(c->args, "name", &name, err));
    HR_TRY(hr_args_u64(c->args, "truncate_size", 1, MAX_ROWS, &most, err));
    HR_TRY(check_size(engine, name, most, err));
    HR_TRY(hr_engine_weight_values(engine, name, most, &values, &rows, &columns, &is_vector, err));
    if (is_vector && columns > most)
        columns = most;
    write_values(values, rows, columns, is_vector, &c->w);
    free(values);
    return HR_OK;
}

void hr_route_weights_by_name(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"name", "truncate_size", NULL};
    static const hr_update_route route = {
        .keys = keys, .shape = HR_UPDATE_PLAIN, .reads = true, .run = run_values};
    hr_update_call_start(app, exchange, &route);
}

/* ---- digests ---- */

typedef struct weight_digest {
    char *name;
    hr_dtype dtype;
    uint32_t ndim;
    uint64_t shape[HR_TENSOR_MAX_DIMS];
    char xxh3[HR_XXH3_HEX];
} weight_digest;

typedef struct digest_list {
    weight_digest *items;
    size_t n, cap;
    bool failed;
} digest_list;

static void collect(void *ctx, const char *name, hr_dtype dtype, const uint64_t *shape,
                    uint32_t ndim, const uint8_t xxh3[HR_XXH3_SIZE]) {
    digest_list *list = ctx;
    if (list->n == list->cap && !list->failed) {
        size_t cap = list->cap > 0 ? 2 * list->cap : 256;
        weight_digest *items = realloc(list->items, cap * sizeof *items);
        list->failed = items == NULL;
        if (items != NULL) {
            list->items = items;
            list->cap = cap;
        }
    }
    char *copy = list->failed ? NULL : strdup(name);
    if (copy == NULL) {
        list->failed = true;
        return;
    }
    weight_digest *d = &list->items[list->n++];
    *d = (weight_digest){.name = copy, .dtype = dtype, .ndim = ndim};
    memcpy(d->shape, shape, ndim * sizeof *shape);
    hr_xxh3_format(xxh3, d->xxh3);
}

static void free_digests(digest_list *list) {
    for (size_t i = 0; i < list->n; i++)
        free(list->items[i].name);
    free(list->items);
}

static int compare_digests(const void *a, const void *b) {
    return strcmp(((const weight_digest *)a)->name, ((const weight_digest *)b)->name);
}

/* By name. Freed by the caller, also after a failure. */
static hr_status read_digests(hr_engine *engine, const char *adapter, digest_list *list,
                              hr_error *err) {
    *list = (digest_list){0};
    HR_TRY(hr_engine_weight_digests(engine, adapter, collect, list, err));
    if (list->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the digests");
    if (list->n > 0)
        qsort(list->items, list->n, sizeof *list->items, compare_digests);
    return HR_OK;
}

static void write_digest(const weight_digest *d, hr_json_writer *w) {
    hr_json_key(w, d->name);
    hr_json_object_begin(w);
    hr_json_put_string(w, "xxh3", d->xxh3);
    hr_json_put_string(w, "dtype", hr_dtype_name(d->dtype));
    hr_json_key(w, "shape");
    hr_json_array_begin(w);
    for (uint32_t k = 0; k < d->ndim; k++)
        hr_json_write_u64(w, d->shape[k]);
    hr_json_array_end(w);
    hr_json_object_end(w);
}

static hr_status run_digests(hr_update_call *c, hr_error *err) {
    const char *adapter = NULL;
    digest_list list;
    HR_TRY(hr_args_string(c->args, "lora_name", &adapter, err));
    hr_engine *engine = c->server->options.engine;
    hr_status status = read_digests(engine, adapter, &list, err);
    if (status == HR_OK) {
        char version[HR_WEIGHT_VERSION_SIZE];
        hr_engine_weight_version(engine, version, sizeof version);
        hr_json_put_string(&c->w, "weight_version", version);
        hr_json_put_string(&c->w, "dtype", hr_engine_info_of(engine)->dtype);
        hr_json_key(&c->w, "tensors");
        hr_json_object_begin(&c->w);
        for (size_t i = 0; i < list.n; i++)
            write_digest(&list.items[i], &c->w);
        hr_json_object_end(&c->w);
    }
    free_digests(&list);
    return status;
}

void hr_route_weight_digests(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"lora_name", NULL};
    static const hr_update_route route = {.keys = keys, .reads = true, .run = run_digests};
    hr_update_call_start(app, exchange, &route);
}

/* ---- the weights checker ---- */

#define SHORT_HEX 16 /* digits of a checksum */

/* SHA-256 over name and checksum of all weights by name. */
static hr_status rank_checksum(const digest_list *list, char out[HR_SHA256_HEX], hr_error *err) {
    hr_buf text = {0};
    for (size_t i = 0; i < list->n; i++)
        hr_buf_printf(&text, "%s%.*s", list->items[i].name, SHORT_HEX, list->items[i].xxh3);
    bool failed = text.failed;
    if (!failed)
        hr_sha256_hex(text.len > 0 ? text.data : "", text.len, out);
    hr_buf_free(&text);
    return failed ? hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the checksum") : HR_OK;
}

static void write_rank(const digest_list *list, const char *checksum, hr_json_writer *w) {
    static const char *const place[] = {"tp_rank", "dp_rank", "pp_rank", "rank"};
    static const char *const size[] = {"tp_size", "dp_size", "pp_size", "size"};
    hr_json_object_begin(w);
    hr_json_key(w, "checksums");
    hr_json_object_begin(w);
    for (size_t i = 0; i < list->n; i++) {
        hr_json_key(w, list->items[i].name);
        hr_json_write_string_n(w, list->items[i].xxh3, SHORT_HEX);
    }
    hr_json_object_end(w);
    hr_json_put_string(w, "per_gpu_checksum", checksum);
    hr_json_key(w, "parallelism_info");
    hr_json_object_begin(w);
    for (size_t i = 0; i < sizeof place / sizeof place[0]; i++) {
        hr_json_put_u64(w, place[i], 0);
        hr_json_put_u64(w, size[i], 1);
    }
    hr_json_object_end(w);
    hr_json_object_end(w);
}

static hr_status checksum(hr_update_call *c, hr_error *err) {
    char rank[HR_SHA256_HEX], whole[HR_SHA256_HEX];
    digest_list list;
    hr_status status = read_digests(c->server->options.engine, NULL, &list, err);
    if (status == HR_OK)
        status = rank_checksum(&list, rank, err);
    if (status == HR_OK) {
        hr_sha256_hex(rank, strlen(rank), whole); /* of one rank */
        hr_json_key(&c->w, "ranks");
        hr_json_array_begin(&c->w);
        write_rank(&list, rank, &c->w);
        hr_json_array_end(&c->w);
        hr_json_put_string(&c->w, "per_engine_checksum", whole);
    }
    free_digests(&list);
    return status;
}

static hr_status run_checker(hr_update_call *c, hr_error *err) {
    hr_engine *engine = c->server->options.engine;
    const char *action = "checksum";
    HR_TRY(hr_args_selector(c->args, err));
    HR_TRY(hr_args_string(c->args, "action", &action, err));
    const cJSON *skip = hr_json_get_present(c->args, "skip_tensor_list");
    if (skip != NULL && cJSON_GetArraySize(skip) > 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "skip_tensor_list: every weight is looked at here; send null");
    if (strcmp(action, "checksum") == 0)
        return checksum(c, err);
    if (strcmp(action, "snapshot") == 0)
        return hr_engine_check_snapshot(engine, err);
    if (strcmp(action, "reset_tensors") == 0)
        return hr_engine_check_reset(engine, err);
    if (strcmp(action, "compare") == 0)
        return hr_engine_check_compare(engine, err);
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "Unsupported action \"%.100s\": wanted \"checksum\", \"snapshot\", "
                   "\"reset_tensors\" or \"compare\"",
                   action);
}

void hr_route_weights_checker(hr_exchange *exchange, void *app) {
    static const char *const keys[] = {"action", "selector", "skip_tensor_list", NULL};
    static const hr_update_route route = {.keys = keys, .reads = true, .run = run_checker};
    hr_update_call_start(app, exchange, &route);
}
