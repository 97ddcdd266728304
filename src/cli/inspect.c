/* `headrace inspect`: what is in a file or directory of weights. */
#include "cli/adapter_card.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "format/checkpoint.h"
#include "format/file.h"
#include "format/json_writer.h"
#include "format/safetensors.h"
#include "format/torch_payload.h"
#include "publish/dir_source.h"
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
    bool is_adapter;
    hr_adapter_card card; /* then */
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
    hr_adapter_card_free(&w->card);
}

static hr_status open_adapter(const char *dir, weights *w, hr_error *err) {
    w->form = "PEFT adapter";
    w->is_adapter = true;
    HR_TRY(hr_adapter_dir_check(dir, err));
    HR_TRY(hr_adapter_card_read(dir, &w->card, err));
    char *path = hr_path_join(dir, "adapter_model.safetensors");
    if (path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    hr_status status = hr_safetensors_open(path, &w->file, err);
    free(path);
    return status;
}

static hr_status open_dir(const char *path, weights *w, hr_error *err) {
    if (hr_dir_has(path, "adapter_config.json") || hr_dir_has(path, "adapter_model.safetensors"))
        return open_adapter(path, w, err);
    w->form = "checkpoint";
    hr_status status = hr_checkpoint_open(path, &w->checkpoint, err);
    if (status == HR_ERR_NOT_FOUND && !hr_dir_has(path, "config.json"))
        hr_fail(err, status,
                "%s: no weights here; wanted the directory of a PEFT adapter "
                "(adapter_config.json, adapter_model.safetensors) or of a Hugging Face model "
                "(config.json, model.safetensors or its index)",
                path);
    return status;
}

/* A payload is a pickle: named tensors or a flattened bucket. Shared memory that it names is read
 * and left as it is. */
static hr_status read_payload(const char *path, weights *w, hr_error *err) {
    hr_error other;
    hr_torch_options options = {.keep_shared = true};
    w->form = "torch payload";
    hr_status status =
        hr_torch_payload_read(w->bytes.data, w->bytes.len, &options, &w->payload, err);
    options.flattened = true;
    if (status == HR_ERR_INVALID && hr_torch_payload_read(w->bytes.data, w->bytes.len, &options,
                                                          &w->payload, &other) == HR_OK) {
        w->form = "torch payload, flattened bucket";
        status = HR_OK;
    }
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "%s", path);
}

/* A pickle says its protocol first; torch.save makes a zip archive. */
static bool looks_like_payload(const hr_buf *bytes) {
    return (bytes->len >= 2 && (unsigned char)bytes->data[0] == 0x80) ||
           (bytes->len >= 4 && memcmp(bytes->data, "PK\3\4", 4) == 0);
}

static bool ends_with(const char *text, const char *suffix) {
    size_t len = strlen(text), n = strlen(suffix);
    return len > n && strcmp(text + len - n, suffix) == 0;
}

/* The length of a header stands first, in eight bytes, and then the header, an object. */
static bool looks_like_safetensors(const char *path) {
    unsigned char head[9] = {0};
    FILE *file = fopen(path, "rb");
    bool whole = file != NULL && fread(head, 1, sizeof head, file) == sizeof head;
    if (file != NULL)
        fclose(file);
    return whole && head[7] == 0 && head[8] == '{';
}

static hr_status open_weights(const char *path, weights *w, hr_error *err) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return open_dir(path, w, err);
    w->form = "safetensors";
    if (ends_with(path, ".safetensors") ||
        (stat(path, &info) == 0 && S_ISREG(info.st_mode) && looks_like_safetensors(path)))
        return hr_safetensors_open(path, &w->file, err);
    HR_TRY(hr_file_read(path, MAX_PAYLOAD_BYTES, &w->bytes, err));
    if (looks_like_payload(&w->bytes))
        return read_payload(path, w, err);
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "%s: these are no weights of a known form; wanted a safetensors file, a file of "
                   "torch.save or a pickle of tensors, or the directory of a PEFT adapter or of a "
                   "Hugging Face model",
                   path);
}

/* Every dtype once, "F32, BF16". */
static void list_dtypes(const weights *w, hr_buf *out) {
    for (size_t i = 0; i < count(w); i++) {
        bool seen = false;
        for (size_t k = 0; k < i && !seen; k++)
            seen = at(w, k)->dtype == at(w, i)->dtype;
        if (!seen)
            hr_buf_printf(out, "%s%s", out->len > 0 ? ", " : "", hr_dtype_name(at(w, i)->dtype));
    }
}

static void print_lines(const weights *w, const char *path) {
    uint64_t bytes = 0;
    hr_cli_amount amount;
    hr_buf dtypes = {0};
    for (size_t i = 0; i < count(w); i++)
        bytes += at(w, i)->bytes;
    list_dtypes(w, &dtypes);
    printf("%s: %s, %zu tensor%s, %s%s%s\n", path, w->form, count(w), count(w) == 1 ? "" : "s",
           hr_cli_format_bytes(bytes, &amount), dtypes.len > 0 ? ", " : "",
           dtypes.len > 0 ? dtypes.data : "");
    hr_buf_free(&dtypes);
    if (w->is_adapter)
        hr_adapter_card_print(&w->card);
    for (size_t i = 0; i < count(w); i++) {
        const hr_tensor *t = at(w, i);
        char shape[128], hex[HR_XXH3_HEX];
        uint8_t digest[HR_XXH3_SIZE];
        hr_xxh3(t->data, t->bytes, digest);
        printf("%s  %-5s %-20s ", hr_xxh3_format(digest, hex), hr_dtype_name(t->dtype),
               hr_shape_format(t->shape, t->ndim, shape, sizeof shape));
        hr_cli_put_clean(stdout, t->name);
        printf("\n");
    }
}

static hr_status print_json(const weights *from, const char *path, hr_error *err) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &text);
    hr_json_object_begin(&w);
    hr_json_put_string(&w, "path", path);
    hr_json_put_string(&w, "form", from->form);
    if (from->is_adapter)
        hr_adapter_card_write(&from->card, &w);
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
               "model\ndirectory, or a file of torch.save or another pickle of tensors, which is "
               "read without running\nanything. Of a PEFT directory first its rank, alpha, "
               "scaling and modules, and why engines would\nrefuse it.\n\n");
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
