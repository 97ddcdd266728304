/* Units from files. */
#include "publish/dir_source.h"

#include "base/buf.h"
#include "format/checkpoint.h"
#include "format/file.h"
#include "format/safetensors.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)
#define MAX_ADAPTER_BYTES ((uint64_t)64 << 30)

struct hr_dir_source {
    hr_push_adapter *adapters;
    char **names;
    hr_buf *configs;
    hr_safetensors **files; /* by adapter */
    size_t n;
    hr_checkpoint *base;
    size_t part, tensor; /* next: of adapter `part`, and the base after the last */
};

/* What a person may have given instead, or has only half of. */
static const char *hint(const char *dir, bool config, bool tensors) {
    if (!hr_file_exists(dir))
        return "there is no such directory";
    if (!hr_dir_has(dir, "."))
        return "this is a file: give the directory that it is in";
    if (config && hr_dir_has(dir, "adapter_model.bin"))
        return "adapter_model.safetensors is missing, and adapter_model.bin is not taken in its "
               "place: save the adapter with safe_serialization=True";
    if (config)
        return "adapter_model.safetensors is missing";
    if (tensors)
        return "adapter_config.json is missing";
    if (hr_dir_has(dir, "config.json"))
        return "this is a model directory: did you mean --base?";
    return "it has neither";
}

hr_status hr_adapter_dir_check(const char *dir, hr_error *err) {
    bool config = hr_dir_has(dir, "adapter_config.json");
    bool tensors = hr_dir_has(dir, "adapter_model.safetensors");
    if (config && tensors)
        return HR_OK;
    return hr_fail(err, HR_ERR_NOT_FOUND,
                   "%s: wanted a PEFT directory with adapter_config.json and "
                   "adapter_model.safetensors; %s",
                   dir, hint(dir, config, tensors));
}

static hr_status open_adapter(hr_dir_source *s, size_t i, const hr_dir_adapter *adapter,
                              hr_error *err) {
    char *config = hr_path_join(adapter->dir, "adapter_config.json");
    char *tensors = hr_path_join(adapter->dir, "adapter_model.safetensors");
    s->names[i] = strdup(adapter->name);
    hr_status status = HR_OK;
    if (config == NULL || tensors == NULL || s->names[i] == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", adapter->dir);
    if (status == HR_OK)
        status = hr_adapter_dir_check(adapter->dir, err);
    if (status == HR_OK)
        status = hr_file_read(config, MAX_CONFIG_BYTES, &s->configs[i], err);
    if (status == HR_OK)
        status = hr_safetensors_read(tensors, MAX_ADAPTER_BYTES, &s->files[i], err);
    if (status == HR_OK)
        s->adapters[i] =
            (hr_push_adapter){s->names[i], s->configs[i].data, s->configs[i].len, adapter->pinned};
    free(config);
    free(tensors);
    return status;
}

hr_status hr_dir_source_open(const hr_dir_adapter *adapters, size_t n, const char *base,
                             hr_dir_source **out, hr_error *err) {
    hr_dir_source *s = calloc(1, sizeof *s);
    if (s == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a source of tensors");
    s->adapters = calloc(n + 1, sizeof *s->adapters);
    s->names = calloc(n + 1, sizeof *s->names);
    s->configs = calloc(n + 1, sizeof *s->configs);
    s->files = calloc(n + 1, sizeof *s->files);
    hr_status status = HR_OK;
    if (s->adapters == NULL || s->names == NULL || s->configs == NULL || s->files == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu adapters", n);
    else
        s->n = n;
    for (size_t i = 0; i < s->n && status == HR_OK; i++)
        status = open_adapter(s, i, &adapters[i], err);
    if (status == HR_OK && base != NULL)
        status = hr_checkpoint_open_unread(base, &s->base, err);
    if (status != HR_OK)
        hr_dir_source_close(s);
    else
        *out = s;
    return status;
}

void hr_dir_source_close(hr_dir_source *source) {
    if (source == NULL)
        return;
    for (size_t i = 0; i < source->n; i++) {
        free(source->names[i]);
        hr_buf_free(&source->configs[i]);
        hr_safetensors_close(source->files[i]);
    }
    hr_checkpoint_close(source->base);
    free(source->adapters);
    free(source->names);
    free(source->configs);
    free(source->files);
    free(source);
}

const hr_push_adapter *hr_dir_source_adapters(const hr_dir_source *source) {
    return source->adapters;
}

uint64_t hr_dir_source_bytes(const hr_dir_source *source) {
    uint64_t bytes = source->base != NULL ? hr_checkpoint_bytes(source->base) : 0;
    for (size_t i = 0; i < source->n; i++) {
        for (size_t k = 0; k < hr_safetensors_count(source->files[i]); k++)
            bytes += hr_safetensors_at(source->files[i], k)->bytes;
    }
    return bytes;
}

/* What a base unit gives back when it is not needed any more. */
typedef struct held_tensor {
    const hr_checkpoint *base;
    const hr_tensor *tensor;
} held_tensor;

static void release_base(void *owner) {
    held_tensor *held = owner;
    hr_checkpoint_drop(held->base, held->tensor);
    free(held);
}

static hr_status next_base(hr_dir_source *s, hr_unit *unit, hr_error *err) {
    held_tensor *held = malloc(sizeof *held);
    if (held == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a tensor");
    *held = (held_tensor){s->base, hr_checkpoint_at(s->base, s->tensor++)};
    hr_status status = hr_checkpoint_fetch(held->base, held->tensor, err);
    if (status != HR_OK) {
        free(held);
        return status;
    }
    *unit = (hr_unit){.tensors = held->tensor, .n = 1, .owner = held, .release = release_base};
    return HR_OK;
}

static hr_status next_unit(void *self, hr_unit *unit, hr_error *err) {
    hr_dir_source *s = self;
    *unit = (hr_unit){0};
    while (s->part < s->n && s->tensor == hr_safetensors_count(s->files[s->part])) {
        s->part++;
        s->tensor = 0;
    }
    if (s->part < s->n) {
        *unit = (hr_unit){.tensors = hr_safetensors_at(s->files[s->part], s->tensor++),
                          .n = 1,
                          .adapter = s->names[s->part]};
        return HR_OK;
    }
    if (s->base != NULL && s->tensor < hr_checkpoint_count(s->base))
        return next_base(s, unit, err);
    return HR_OK;
}

hr_unit_source hr_dir_source_units(hr_dir_source *source) {
    source->part = source->tensor = 0;
    return (hr_unit_source){source, next_unit};
}
