/* Reading small files whole. */
#include "format/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static hr_status read_all(int fd, size_t size, hr_buf *out) {
    char block[65536];
    while (size > 0) {
        ssize_t got = read(fd, block, size < sizeof block ? size : sizeof block);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return HR_ERR_IO;
        if (got == 0)
            return HR_OK;
        hr_buf_append(out, block, (size_t)got);
        size -= (size_t)got;
    }
    return out->failed ? HR_ERR_NO_MEMORY : HR_OK;
}

hr_status hr_file_read(const char *path, size_t max_bytes, hr_buf *out, hr_error *err) {
    /* Opening a FIFO would otherwise wait for its writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return hr_fail(err, errno == ENOENT ? HR_ERR_NOT_FOUND : HR_ERR_IO, "%s: %s", path,
                       strerror(errno));
    struct stat info;
    hr_status status = HR_OK;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        status = hr_fail(err, HR_ERR_IO, "%s: not a regular file", path);
    else if ((uint64_t)info.st_size > max_bytes)
        status = hr_fail(err, HR_ERR_LIMIT, "%s: %lld bytes are over the limit of %zu", path,
                         (long long)info.st_size, max_bytes);
    else if ((status = read_all(fd, (size_t)info.st_size, out)) != HR_OK)
        status = hr_fail(err, status, "%s: cannot be read: %s", path,
                         status == HR_ERR_IO ? strerror(errno) : "out of memory");
    close(fd);
    return status;
}

bool hr_file_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

char *hr_path_join(const char *dir, const char *name) {
    char *path = NULL;
    return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

bool hr_dir_has(const char *dir, const char *name) {
    char *path = hr_path_join(dir, name);
    bool found = path != NULL && hr_file_exists(path);
    free(path);
    return found;
}
