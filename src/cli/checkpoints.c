/* Which directories of a training run hold weights, and whether they are whole. */
#include "cli/checkpoints.h"

#include "format/checkpoint.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "tensor/digest.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)

static bool ends_with(const char *name, const char *suffix) {
    size_t len = strlen(name), n = strlen(suffix);
    return len >= n && strcmp(name + len - n, suffix) == 0;
}

/* The files that are the weights: not what a trainer keeps for itself beside them. */
static bool is_weight_file(const char *name, bool is_adapter) {
    if (is_adapter)
        return strcmp(name, "adapter_model.safetensors") == 0 ||
               strcmp(name, "adapter_config.json") == 0;
    return strcmp(name, "config.json") == 0 || strcmp(name, "model.safetensors.index.json") == 0 ||
           (strncmp(name, "model", 5) == 0 && ends_with(name, ".safetensors"));
}

/* Files are taken together without order: their digests are added. */
static void add_file(hr_found_weights *w, const char *name, const struct stat *info) {
    uint8_t digest[HR_XXH3_SIZE];
    char text[512];
    int64_t changed = (int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec;
    int n = snprintf(text, sizeof text, "%.255s %llu %llu %lld", name,
                     (unsigned long long)info->st_size, (unsigned long long)info->st_ino,
                     (long long)changed);
    hr_xxh3(text, (size_t)n, digest);
    for (size_t i = 0; i < sizeof digest; i++)
        w->fingerprint[i] = (uint8_t)(w->fingerprint[i] + digest[i]);
    if (changed > w->newest_ns)
        w->newest_ns = changed;
}

/* Whether a directory has the files; fills what they say. */
static bool look(const char *path, const char *label, uint64_t step, bool is_adapter,
                 hr_found_weights *w) {
    *w = (hr_found_weights){.step = step};
    bool weights = false, config = false;
    snprintf(w->path, sizeof w->path, "%s", path);
    snprintf(w->label, sizeof w->label, "%.255s", label);
    DIR *dir = opendir(path);
    if (dir == NULL)
        return false;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        struct stat info;
        if (!is_weight_file(entry->d_name, is_adapter) ||
            fstatat(dirfd(dir), entry->d_name, &info, 0) != 0)
            continue;
        weights = weights || ends_with(entry->d_name, ".safetensors");
        config = config || ends_with(entry->d_name, "config.json");
        add_file(w, entry->d_name, &info);
    }
    closedir(dir);
    return weights && config;
}

/* The newer one first. */
static int compare_age(const void *a, const void *b) {
    const hr_found_weights *x = a, *y = b;
    if (x->newest_ns != y->newest_ns)
        return x->newest_ns > y->newest_ns ? -1 : 1;
    if (x->step != y->step)
        return x->step > y->step ? -1 : 1;
    return strcmp(x->path, y->path);
}

static hr_status append(hr_found_list *list, const hr_found_weights *w, hr_error *err) {
    if ((list->n & (list->n - 1)) == 0) { /* full at each power of two */
        size_t room = list->n > 0 ? 2 * list->n : 1;
        hr_found_weights *grown = realloc(list->items, room * sizeof *grown);
        if (grown == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu checkpoints", room);
        list->items = grown;
    }
    list->items[list->n++] = *w;
    return HR_OK;
}

static hr_status consider(const char *path, const char *label, uint64_t step, const char *adapter,
                          hr_found_list *list, hr_error *err) {
    hr_found_weights w;
    char inner[4096];
    bool good = look(path, label, step, adapter != NULL, &w);
    if (!good && adapter != NULL && strchr(adapter, '/') == NULL &&
        snprintf(inner, sizeof inner, "%s/%s", path, adapter) < (int)sizeof inner)
        good = look(inner, label, step, true, &w);
    return good ? append(list, &w, err) : HR_OK;
}

/* N of "checkpoint-N". */
static bool step_of(const char *name, uint64_t *step) {
    static const char prefix[] = "checkpoint-";
    char *end = NULL;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0 || name[sizeof prefix - 1] < '0' ||
        name[sizeof prefix - 1] > '9')
        return false;
    errno = 0;
    *step = strtoull(name + sizeof prefix - 1, &end, 10);
    return errno == 0 && *end == '\0';
}

static hr_status list_dir(DIR *dir, const char *root, const char *adapter, hr_found_list *list,
                          hr_error *err) {
    char path[4096];
    const char *slash = strrchr(root, '/');
    HR_TRY(consider(root, slash != NULL && slash[1] != '\0' ? slash + 1 : root, 0, adapter, list,
                    err));
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        uint64_t step = 0;
        if (step_of(entry->d_name, &step) &&
            snprintf(path, sizeof path, "%s/%s", root, entry->d_name) < (int)sizeof path)
            HR_TRY(consider(path, entry->d_name, step, adapter, list, err));
    }
    return HR_OK;
}

hr_status hr_checkpoints_list(const char *root, const char *adapter, hr_found_list *out,
                              hr_error *err) {
    hr_found_list list = {0};
    DIR *dir = opendir(root);
    if (dir == NULL)
        return hr_fail(err, HR_ERR_NOT_FOUND, "%s: cannot be read: %s", root, strerror(errno));
    hr_status status = list_dir(dir, root, adapter, &list, err);
    closedir(dir);
    if (status != HR_OK) {
        hr_found_list_free(&list);
        return status;
    }
    if (list.n > 0)
        qsort(list.items, list.n, sizeof *list.items, compare_age);
    *out = list;
    return HR_OK;
}

void hr_found_list_free(hr_found_list *list) {
    free(list->items);
    *list = (hr_found_list){0};
}

static hr_status check_json(const char *dir, const char *name, hr_error *err) {
    char path[4200];
    cJSON *tree = NULL;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    HR_TRY(hr_json_parse_file(path, MAX_CONFIG_BYTES, &tree, err));
    cJSON_Delete(tree);
    return HR_OK;
}

hr_status hr_checkpoints_check(const char *path, bool is_adapter, hr_error *err) {
    if (!is_adapter) {
        hr_checkpoint *checkpoint = NULL;
        HR_TRY(check_json(path, "config.json", err));
        HR_TRY(hr_checkpoint_open_unread(path, &checkpoint, err));
        hr_checkpoint_close(checkpoint);
        return HR_OK;
    }
    char tensors[4200];
    hr_safetensors *file = NULL;
    snprintf(tensors, sizeof tensors, "%s/adapter_model.safetensors", path);
    HR_TRY(check_json(path, "adapter_config.json", err));
    HR_TRY(hr_safetensors_open_unread(tensors, &file, err));
    hr_safetensors_close(file);
    return HR_OK;
}
