/* Which directory of a training run holds the newest whole set of weights. */
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

static bool is_newer(const hr_found_weights *a, const hr_found_weights *b) {
    return a->newest_ns != b->newest_ns ? a->newest_ns > b->newest_ns : a->step > b->step;
}

static void consider(const char *path, const char *label, uint64_t step, const char *adapter,
                     hr_found_weights *newest, bool *found) {
    hr_found_weights w;
    char inner[4096];
    bool good = look(path, label, step, adapter != NULL, &w);
    if (!good && adapter != NULL && strchr(adapter, '/') == NULL &&
        snprintf(inner, sizeof inner, "%s/%s", path, adapter) < (int)sizeof inner)
        good = look(inner, label, step, true, &w);
    if (good && (!*found || is_newer(&w, newest))) {
        *newest = w;
        *found = true;
    }
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

hr_status hr_checkpoints_newest(const char *root, const char *adapter, hr_found_weights *newest,
                                bool *found, hr_error *err) {
    char path[4096];
    *found = false;
    DIR *dir = opendir(root);
    if (dir == NULL)
        return hr_fail(err, HR_ERR_NOT_FOUND, "%s: cannot be read: %s", root, strerror(errno));
    const char *slash = strrchr(root, '/');
    consider(root, slash != NULL && slash[1] != '\0' ? slash + 1 : root, 0, adapter, newest, found);
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        uint64_t step = 0;
        if (step_of(entry->d_name, &step) &&
            snprintf(path, sizeof path, "%s/%s", root, entry->d_name) < (int)sizeof path)
            consider(path, entry->d_name, step, adapter, newest, found);
    }
    closedir(dir);
    return HR_OK;
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
