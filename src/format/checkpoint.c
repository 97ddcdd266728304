/* One set of tensors over one or many safetensors files. */
#include "format/checkpoint.h"

#include "format/file.h"
#include "format/json.h"
#include "format/safetensors.h"

#include <stdlib.h>
#include <string.h>

#define SINGLE_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"
#define INDEX_MAX_BYTES ((size_t)256 << 20)

struct hr_checkpoint {
    bool unread; /* its tensors are fetched one by one */
    hr_safetensors **shards;
    size_t n_shards;
    const hr_tensor **tensors; /* shard after shard */
    const hr_tensor **by_name; /* the same, sorted */
    size_t n;
    uint64_t bytes;
};

static hr_status no_memory(hr_error *err, const char *dir) {
    return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
}

static hr_status open_shard(hr_checkpoint *checkpoint, const char *dir, const char *name,
                            hr_error *err) {
    char *path = hr_path_join(dir, name);
    if (path == NULL)
        return no_memory(err, dir);
    hr_safetensors **shard = &checkpoint->shards[checkpoint->n_shards];
    hr_status status = checkpoint->unread ? hr_safetensors_open_unread(path, shard, err)
                                          : hr_safetensors_open(path, shard, err);
    free(path);
    if (status == HR_OK)
        checkpoint->n_shards++;
    return status;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int compare_tensors(const void *a, const void *b) {
    return strcmp((*(const hr_tensor *const *)a)->name, (*(const hr_tensor *const *)b)->name);
}

/* The distinct file names of a weight map, sorted; each must be a plain name of a safetensors file.
 */
static hr_status shard_names(const cJSON *map, const char *path, const char **names, size_t *n,
                             hr_error *err) {
    size_t all = 0, distinct = 0;
    for (const cJSON *item = map->child; item != NULL; item = item->next) {
        const char *file = cJSON_IsString(item) ? item->valuestring : "";
        size_t len = strlen(file);
        bool plain = file[0] != '.' && strchr(file, '/') == NULL;
        if (!plain || len < 13 || strcmp(file + len - 12, ".safetensors") != 0)
            return hr_fail(err, HR_ERR_INVALID,
                           "%s: tensor %.200s: wanted the name of a .safetensors file beside the "
                           "index, came \"%.200s\"",
                           path, item->string, file);
        names[all++] = file;
    }
    qsort(names, all, sizeof *names, compare_strings);
    for (size_t i = 0; i < all; i++) {
        if (i == 0 || strcmp(names[i], names[distinct - 1]) != 0)
            names[distinct++] = names[i];
    }
    *n = distinct;
    return HR_OK;
}

/* names are sorted, as the shards are: shard i is names[i]. */
static hr_status check_index(const hr_checkpoint *checkpoint, const cJSON *map, const char *path,
                             const char **names, hr_error *err) {
    for (const cJSON *item = map->child; item != NULL; item = item->next) {
        const char *file = item->valuestring;
        const char **at =
            bsearch(&file, names, checkpoint->n_shards, sizeof *names, compare_strings);
        if (hr_safetensors_find(checkpoint->shards[at - names], item->string) == NULL)
            return hr_fail(err, HR_ERR_CORRUPT,
                           "%s: tensor %.200s should be in %.200s, which does not have it", path,
                           item->string, file);
    }
    return HR_OK;
}

static hr_status open_indexed(hr_checkpoint *checkpoint, const char *dir, const char *path,
                              const cJSON *index, hr_error *err) {
    const cJSON *map = hr_json_get(index, "weight_map");
    if (!cJSON_IsObject(map) || map->child == NULL)
        return hr_fail(err, HR_ERR_INVALID, "%s: wanted an object weight_map that names tensors",
                       path);
    const char *twice = hr_json_duplicate_key(map);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_CORRUPT, "%s: tensor %.200s is listed twice", path, twice);
    size_t n = (size_t)cJSON_GetArraySize(map);
    const char **names = calloc(n, sizeof *names);
    hr_status status = HR_OK;
    if (names == NULL)
        return no_memory(err, dir);
    status = shard_names(map, path, names, &n, err);
    if (status != HR_OK)
        goto out;
    checkpoint->shards = calloc(n, sizeof(hr_safetensors *));
    if (checkpoint->shards == NULL) {
        status = no_memory(err, dir);
        goto out;
    }
    for (size_t i = 0; status == HR_OK && i < n; i++) {
        status = open_shard(checkpoint, dir, names[i], err);
        if (status == HR_ERR_NOT_FOUND)
            status = hr_fail_context(err, status, "shard %zu of %zu is missing", i + 1, n);
    }
    if (status == HR_OK)
        status = check_index(checkpoint, map, path, names, err);
out:
    free(names);
    return status;
}

static hr_status open_sharded(hr_checkpoint *checkpoint, const char *dir, hr_error *err) {
    cJSON *index = NULL;
    char *path = hr_path_join(dir, INDEX_NAME);
    if (path == NULL)
        return no_memory(err, dir);
    hr_status status = hr_json_parse_file(path, INDEX_MAX_BYTES, &index, err);
    if (status == HR_OK)
        status = open_indexed(checkpoint, dir, path, index, err);
    cJSON_Delete(index);
    free(path);
    return status;
}

static hr_status refuse_no_weights(const char *dir, hr_error *err) {
    if (hr_dir_has(dir, "pytorch_model.bin") || hr_dir_has(dir, "pytorch_model.bin.index.json"))
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "%s has its weights only as pytorch_model.bin; wanted " SINGLE_NAME
                       ": load and save it once with transformers to get one",
                       dir);
    return hr_fail(err, HR_ERR_NOT_FOUND, "%s has neither " SINGLE_NAME " nor " INDEX_NAME, dir);
}

static hr_status open_files(hr_checkpoint *checkpoint, const char *dir, hr_error *err) {
    if (hr_dir_has(dir, SINGLE_NAME)) {
        checkpoint->shards = calloc(1, sizeof(hr_safetensors *));
        if (checkpoint->shards == NULL)
            return no_memory(err, dir);
        return open_shard(checkpoint, dir, SINGLE_NAME, err);
    }
    if (hr_dir_has(dir, INDEX_NAME))
        return open_sharded(checkpoint, dir, err);
    return refuse_no_weights(dir, err);
}

static hr_status list_tensors(hr_checkpoint *checkpoint, const char *dir, hr_error *err) {
    size_t n = 0;
    for (size_t s = 0; s < checkpoint->n_shards; s++)
        n += hr_safetensors_count(checkpoint->shards[s]);
    checkpoint->tensors = calloc(n + 1, sizeof(hr_tensor *));
    checkpoint->by_name = calloc(n + 1, sizeof(hr_tensor *));
    if (checkpoint->tensors == NULL || checkpoint->by_name == NULL)
        return no_memory(err, dir);
    for (size_t s = 0; s < checkpoint->n_shards; s++) {
        for (size_t i = 0; i < hr_safetensors_count(checkpoint->shards[s]); i++) {
            const hr_tensor *tensor = hr_safetensors_at(checkpoint->shards[s], i);
            checkpoint->tensors[checkpoint->n++] = tensor;
            checkpoint->bytes += tensor->bytes;
        }
    }
    memcpy(checkpoint->by_name, checkpoint->tensors, n * sizeof(hr_tensor *));
    qsort(checkpoint->by_name, n, sizeof(hr_tensor *), compare_tensors);
    for (size_t i = 1; i < n; i++) {
        if (strcmp(checkpoint->by_name[i - 1]->name, checkpoint->by_name[i]->name) == 0)
            return hr_fail(err, HR_ERR_CORRUPT, "%s: tensor %.200s is in two shards", dir,
                           checkpoint->by_name[i]->name);
    }
    return HR_OK;
}

static hr_status open_checkpoint(const char *dir, bool unread, hr_checkpoint **out, hr_error *err) {
    hr_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
    if (checkpoint == NULL)
        return no_memory(err, dir);
    checkpoint->unread = unread;
    hr_status status = open_files(checkpoint, dir, err);
    if (status == HR_OK)
        status = list_tensors(checkpoint, dir, err);
    if (status != HR_OK) {
        hr_checkpoint_close(checkpoint);
        return status;
    }
    *out = checkpoint;
    return HR_OK;
}

hr_status hr_checkpoint_open(const char *dir, hr_checkpoint **out, hr_error *err) {
    return open_checkpoint(dir, false, out, err);
}

hr_status hr_checkpoint_open_unread(const char *dir, hr_checkpoint **out, hr_error *err) {
    return open_checkpoint(dir, true, out, err);
}

void hr_checkpoint_close(hr_checkpoint *checkpoint) {
    if (checkpoint == NULL)
        return;
    for (size_t s = 0; s < checkpoint->n_shards; s++)
        hr_safetensors_close(checkpoint->shards[s]);
    free(checkpoint->shards);
    free(checkpoint->tensors);
    free(checkpoint->by_name);
    free(checkpoint);
}

size_t hr_checkpoint_count(const hr_checkpoint *checkpoint) {
    return checkpoint->n;
}

const hr_tensor *hr_checkpoint_at(const hr_checkpoint *checkpoint, size_t index) {
    return checkpoint->tensors[index];
}

const hr_tensor *hr_checkpoint_find(const hr_checkpoint *checkpoint, const char *name) {
    hr_tensor wanted = {.name = name};
    const hr_tensor *key = &wanted;
    const hr_tensor **at =
        bsearch(&key, checkpoint->by_name, checkpoint->n, sizeof(hr_tensor *), compare_tensors);
    return at ? *at : NULL;
}

uint64_t hr_checkpoint_bytes(const hr_checkpoint *checkpoint) {
    return checkpoint->bytes;
}

hr_status hr_checkpoint_fetch(const hr_checkpoint *checkpoint, const hr_tensor *tensor,
                              hr_error *err) {
    size_t i = 0;
    while (hr_safetensors_find(checkpoint->shards[i], tensor->name) != tensor)
        i++;
    return hr_safetensors_fetch(checkpoint->shards[i], tensor, err);
}

void hr_checkpoint_drop(const hr_checkpoint *checkpoint, const hr_tensor *tensor) {
    /* Whose mapping it lies in does not matter: dropping only needs the addresses. */
    hr_safetensors_drop(checkpoint->shards[0], tensor);
}
