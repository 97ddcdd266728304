/* `headrace inspect`: what is in a file or directory of weights. */
#include "cli/commands.h"
#include "cli/options.h"
#include "format/checkpoint.h"
#include "format/file.h"
#include "format/json_writer.h"
#include "format/safetensors.h"
#include "format/torch_payload.h"
#include "tensor/digest.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_PAYLOAD_BYTES ((size_t)16 << 30)

/* Weights of any form; one of them is set. */
typedef struct weights {
    const char *form;
    hr_safetensors *file;
    hr_checkpoint *checkpoint;
    hr_torch_payload *payload;
    hr_buf bytes; /* of the payload */
} weights;

static size_t count(const weights *w) {
    if (w->file != NULL)
        return hr_safetensors_count(w->file);
    return w->checkpoint != NULL ? hr_checkpoint_count(w->checkpoint)
                                 : hr_torch_payload_count(w->payload);
}

static const hr_tensor *at(const weights *w, size_t i) {
    if (w->file != NULL)
        return hr_safetensors_at(w->file, i);
    return w->checkpoint != NULL ? hr_checkpoint_at(w->checkpoint, i)
                                 : &hr_torch_payload_tensors(w->payload)[i];
}

static void close_weights(weights *w) {
    hr_safetensors_close(w->file);
    hr_checkpoint_close(w->checkpoint);
    hr_torch_payload_close(w->payload);
    hr_buf_free(&w->bytes);
}

static hr_status open_dir(const char *path, weights *w, hr_error *err) {
    char *adapter = hr_path_join(path, "adapter_model.safetensors");
    if (adapter == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", path);
    bool is_adapter = hr_file_exists(adapter);
    w->form = is_adapter ? "PEFT adapter" : "checkpoint";
    hr_status status = is_adapter ? hr_safetensors_open(adapter, &w->file, err)
                                  : hr_checkpoint_open(path, &w->checkpoint, err);
    free(adapter);
    return status;
}

/* A payload is a pickle: named tensors or a flattened bucket. Shared memory that it names is read
 * and left as it is. */
static hr_status open_payload(const char *path, weights *w, hr_error *err) {
    hr_error other;
    hr_torch_options options = {.keep_shared = true};
    HR_TRY(hr_file_read(path, MAX_PAYLOAD_BYTES, &w->bytes, err));
    w->form = "torch payload";
    hr_status status =
        hr_torch_payload_read(w->bytes.data, w->bytes.len, &options, &w->payload, err);
    options.flattened = true;
    if (status == HR_ERR_INVALID && hr_torch_payload_read(w->bytes.data, w->bytes.len, &options,
                                                          &w->payload, &other) == HR_OK) {
        w->form = "torch payload, flattened bucket";
        status = HR_OK;
    }
    return status;
}

static hr_status open_weights(const char *path, weights *w, hr_error *err) {
    struct stat info;
    size_t len = strlen(path), suffix = strlen(".safetensors");
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return open_dir(path, w, err);
    w->form = "safetensors";
    if (len > suffix && strcmp(path + len - suffix, ".safetensors") == 0)
        return hr_safetensors_open(path, &w->file, err);
    hr_status status = open_payload(path, w, err);
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "%s", path);
}

static void print_lines(const weights *w, const char *path) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < count(w); i++) {
        const hr_tensor *t = at(w, i);
        char shape[128], hex[HR_XXH3_HEX];
        uint8_t digest[HR_XXH3_SIZE];
        hr_xxh3(t->data, t->bytes, digest);
        printf("%s  %-5s %-20s %s\n", hr_xxh3_format(digest, hex), hr_dtype_name(t->dtype),
               hr_shape_format(t->shape, t->ndim, shape, sizeof shape), t->name);
        bytes += t->bytes;
    }
    printf("%s: %s, %zu tensors, %.1f MB\n", path, w->form, count(w), (double)bytes / 1e6);
}

static hr_status print_json(const weights *from, const char *path, hr_error *err) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "path", path);
    hr_json_put_string(&w, "form", from->form);
    hr_json_key(&w, "tensors");
    hr_json_object_begin(&w);
    for (size_t i = 0; i < count(from); i++) {
        const hr_tensor *t = at(from, i);
        char hex[HR_XXH3_HEX];
        uint8_t digest[HR_XXH3_SIZE];
        hr_xxh3(t->data, t->bytes, digest);
        hr_json_key(&w, t->name);
        hr_json_object_begin(&w);
        hr_json_put_string(&w, "dtype", hr_dtype_name(t->dtype));
        hr_json_key(&w, "shape");
        hr_json_array_begin(&w);
        for (uint32_t d = 0; d < t->ndim; d++)
            hr_json_write_u64(&w, t->shape[d]);
        hr_json_array_end(&w);
        hr_json_put_u64(&w, "bytes", t->bytes);
        hr_json_put_string(&w, "xxh3", hr_xxh3_format(digest, hex));
        hr_json_object_end(&w);
    }
    hr_json_object_end(&w);
    hr_json_object_end(&w);
    bool failed = text.failed;
    if (!failed)
        printf("%s\n", text.data);
    hr_buf_free(&text);
    return failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the answer") : HR_OK;
}

static hr_status inspect(const char *path, bool json, hr_error *err) {
    weights w = {0};
    hr_status status = open_weights(path, &w, err);
    if (status == HR_OK && json)
        status = print_json(&w, path, err);
    else if (status == HR_OK)
        print_lines(&w, path);
    close_weights(&w);
    return status;
}

int hr_command_inspect(int argc, char **argv) {
    static hr_cli_list paths; /* large; a command runs once in a process */
    hr_error err;
    bool help = false, json = false;
    const hr_cli_option table[] = {{"--json", HR_CLI_FLAG, &json, NULL, "as JSON"}};
    if (hr_cli_parse(argc, argv, table, 1, &paths, &help, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_USAGE, &err);
    if (help) {
        printf("usage: headrace inspect FILE|DIR...\n\n"
               "Names, dtypes, shapes and digests (XXH3-128) of a safetensors file, a PEFT or "
               "checkpoint\ndirectory, or a pickled torch payload, which is read without running "
               "anything.\n\n");
        hr_cli_print_options(stdout, table, 1);
        printf("\nexit codes: 0 read whole; 1 malformed or missing; 2 wrong usage\n");
        return HR_EXIT_OK;
    }
    if (paths.n == 0) {
        hr_fail(&err, HR_ERR_INVALID, "inspect what? Give a file or a directory");
        return hr_exit_error(HR_EXIT_USAGE, &err);
    }
    for (size_t i = 0; i < paths.n; i++) {
        if (inspect(paths.items[i], json, &err) != HR_OK)
            return hr_exit_error(HR_EXIT_FAILURE, &err);
    }
    return HR_EXIT_OK;
}
