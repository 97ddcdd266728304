/* The local Hugging Face cache: <hub>/models--<org>--<name>/{refs/main, snapshots/<commit>/}. */
#include "cli/hub.h"

#include "base/buf.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define ID_CHARS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."

static bool is_directory(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* "name" or "org/name" of the characters that ids have; "./x", "../x" and "/x" are paths. */
static bool is_hub_id(const char *name) {
    if (name[0] == '.' || name[0] == '\0' || strlen(name) > 200)
        return false;
    size_t first = strspn(name, ID_CHARS);
    if (first == 0 || name[first] == '\0')
        return first > 0;
    const char *rest = name + first + 1;
    size_t second = strspn(rest, ID_CHARS);
    return name[first] == '/' && rest[0] != '.' && second > 0 && rest[second] == '\0';
}

static void append_hub_folder(hr_buf *path) {
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"),
               *xdg = getenv("XDG_CACHE_HOME");
    const char *user = getenv("HOME");
    if (cache != NULL && cache[0] != '\0')
        hr_buf_puts(path, cache);
    else if (home != NULL && home[0] != '\0')
        hr_buf_printf(path, "%s/hub", home);
    else if (xdg != NULL && xdg[0] != '\0')
        hr_buf_printf(path, "%s/huggingface/hub", xdg);
    else
        hr_buf_printf(path, "%s/.cache/huggingface/hub", user != NULL ? user : "");
}

static void append_repo_folder(hr_buf *path, const char *id) {
    append_hub_folder(path);
    hr_buf_puts(path, "/models--");
    for (const char *c = id; *c != '\0'; c++) {
        if (*c == '/')
            hr_buf_puts(path, "--");
        else
            hr_buf_putc(path, *c);
    }
}

/* The commit that refs/main names; empty when there is none or it is not a plain name. */
static void read_main_ref(const char *repo, char *commit, size_t size) {
    hr_buf path = {0};
    commit[0] = '\0';
    hr_buf_printf(&path, "%s/refs/main", repo);
    FILE *file = path.failed ? NULL : fopen(path.data, "re");
    if (file != NULL) {
        if (fgets(commit, (int)size, file) == NULL)
            commit[0] = '\0';
        fclose(file);
    }
    commit[strcspn(commit, " \r\n")] = '\0';
    if (commit[strspn(commit, ID_CHARS)] != '\0' || commit[0] == '.')
        commit[0] = '\0';
    hr_buf_free(&path);
}

hr_status hr_hub_resolve(const char *name, char **out, hr_error *err) {
    if (is_directory(name)) {
        char *copy = strdup(name);
        if (copy == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a path");
        *out = copy;
        return HR_OK;
    }
    struct stat st;
    if (stat(name, &st) == 0)
        return hr_fail(err, HR_ERR_INVALID, "%s is a file; wanted a model directory", name);
    if (!is_hub_id(name))
        return hr_fail(err, HR_ERR_NOT_FOUND, "model directory %s does not exist", name);

    hr_buf repo = {0}, path = {0};
    char commit[128];
    append_repo_folder(&repo, name);
    if (!repo.failed) {
        read_main_ref(repo.data, commit, sizeof commit);
        hr_buf_printf(&path, "%s/snapshots/%s", repo.data, commit);
    }
    hr_status status = HR_OK;
    if (repo.failed || path.failed)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a path");
    else if (commit[0] == '\0' || !is_directory(path.data))
        status = hr_fail(err, HR_ERR_NOT_FOUND,
                         "%s is neither a directory nor in the local cache (%s); download it with: "
                         "hf download %s",
                         name, repo.data, name);
    else
        *out = path.data;
    if (status != HR_OK)
        hr_buf_free(&path);
    hr_buf_free(&repo);
    return status;
}
