/* An adapter directory as PEFT writes it: the config, the tensors, and the one other file that can
 * change what the tensors mean. */
#include "format/file.h"
#include "format/json.h"
#include "format/peft.h"

#include <stdlib.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)

static hr_status read_in(const char *dir, const char *name, hr_buf *out, hr_error *err) {
    char *path = hr_path_join(dir, name);
    if (path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    hr_status status = hr_file_read(path, CONFIG_MAX_BYTES, out, err);
    free(path);
    return status;
}

/* More than any adapter of this model can need: the largest rank and every whole weight, in fp32.
 */
static uint64_t most_bytes(const hr_module_name *modules, size_t n) {
    uint64_t most = HR_SAFETENSORS_MAX_HEADER;
    for (size_t i = 0; i < n; i++)
        most += 4 * (modules[i].in * modules[i].out +
                     (modules[i].in + modules[i].out) * HR_PEFT_MAX_RANK);
    return most;
}

static hr_status open_tensors(const char *dir, uint64_t max_bytes, hr_safetensors **out,
                              hr_error *err) {
    char *path = hr_path_join(dir, "adapter_model.safetensors");
    char *pickled = hr_path_join(dir, "adapter_model.bin");
    hr_status status;
    if (path == NULL || pickled == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    else if (!hr_file_exists(path) && hr_file_exists(pickled))
        status = hr_fail(err, HR_ERR_UNSUPPORTED,
                         "%s: pickled tensors are not read; wanted adapter_model.safetensors: "
                         "load the adapter with PEFT and save it again",
                         pickled);
    else
        status = hr_safetensors_read(path, max_bytes, out, err);
    free(path);
    free(pickled);
    return status;
}

static uint64_t vocabulary_of(const hr_module_name *modules, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (modules[i].is_embedding)
            return modules[i].in;
    }
    return UINT64_MAX;
}

/* Trainers copy the base's added_tokens.json here; only ids the base does not have would be new. */
static hr_status check_added_tokens(const char *dir, uint64_t vocabulary, hr_error *err) {
    cJSON *tokens = NULL;
    char *path = hr_path_join(dir, "added_tokens.json");
    if (path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    hr_status status = HR_OK;
    if (hr_file_exists(path))
        status = hr_json_parse_file(path, CONFIG_MAX_BYTES, &tokens, err);
    for (const cJSON *item = tokens ? tokens->child : NULL; status == HR_OK && item != NULL;
         item = item->next) {
        uint64_t id = 0;
        status = hr_json_u64(item, item->string, 0, UINT32_MAX, HR_JSON_NUMBER, &id, err);
        if (status != HR_OK)
            hr_fail_context(err, status, "%s", path);
        else if (id >= vocabulary)
            status =
                hr_fail(err, HR_ERR_ADAPTER_INCOMPATIBLE,
                        "%s: token %.64s has id %llu, the base model has ids below %llu; new "
                        "tokens are not supported",
                        path, item->string, (unsigned long long)id, (unsigned long long)vocabulary);
    }
    cJSON_Delete(tokens);
    free(path);
    return status;
}

hr_status hr_peft_open(const char *dir, const hr_module_name *modules, size_t n_modules,
                       const hr_peft_base *base, hr_peft *out, hr_error *err) {
    hr_buf config = {0};
    hr_safetensors *file = NULL;
    hr_status status = read_in(dir, "adapter_config.json", &config, err);
    if (status == HR_OK)
        status = open_tensors(dir, most_bytes(modules, n_modules), &file, err);
    if (status == HR_OK)
        status = check_added_tokens(dir, vocabulary_of(modules, n_modules), err);
    if (status != HR_OK)
        goto out;
    size_t n = hr_safetensors_count(file);
    status = hr_peft_resolve(config.data ? config.data : "", config.len,
                             n ? hr_safetensors_at(file, 0) : NULL, n, modules, n_modules, base,
                             out, err);
    if (status != HR_OK) {
        hr_fail_context(err, status, "%s", dir);
        goto out;
    }
    out->file = file;
    file = NULL;
out:
    hr_safetensors_close(file);
    hr_buf_free(&config);
    return status;
}
