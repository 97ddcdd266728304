/* Reader of the safetensors container. The header comes from outside: every number in it is checked
 * against the bytes that are really there before anything points at them. */
#include "format/safetensors.h"

#include "format/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct hr_safetensors {
    const unsigned char *bytes;
    uint64_t size;
    bool owned;     /* an own mapping: of the file, or memory it was read into */
    bool from_file; /* dropped pages come back */
    int fd;         /* of a file whose tensors are fetched one by one; else -1 */
    struct stat opened;
    char *label;
    cJSON *header; /* keeps the names and the metadata */
    hr_tensor *tensors;
    size_t n;
    size_t *by_name; /* indices of tensors, sorted by name */
};

/* One entry of the header while it is checked. */
typedef struct hr_extent {
    hr_tensor tensor;
    uint64_t begin, end;
} hr_extent;

static hr_status corrupt(const hr_safetensors *file, hr_error *err, const char *name,
                         const char *what) {
    return hr_fail(err, HR_ERR_CORRUPT, "%s: tensor %.200s: %s", file->label, name, what);
}

/* A JSON number that is a whole number below 2^63; anything else is not a size. */
static bool as_size(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item))
        return false;
    double value = item->valuedouble;
    if (!(value >= 0 && value < 0x1p63) || value != (double)(uint64_t)value)
        return false;
    *out = (uint64_t)value;
    return true;
}

static hr_status read_shape(const hr_safetensors *file, const cJSON *entry, const char *name,
                            hr_tensor *tensor, hr_error *err) {
    const cJSON *shape = hr_json_get(entry, "shape");
    if (!cJSON_IsArray(shape))
        return corrupt(file, err, name, "shape is not an array");
    for (const cJSON *dim = shape->child; dim != NULL; dim = dim->next) {
        if (tensor->ndim == HR_TENSOR_MAX_DIMS)
            return corrupt(file, err, name, "shape has more than 8 dimensions");
        if (!as_size(dim, &tensor->shape[tensor->ndim++]))
            return corrupt(file, err, name, "shape holds something that is not a size");
    }
    return HR_OK;
}

static hr_status read_entry(const hr_safetensors *file, const cJSON *entry, hr_extent *out,
                            hr_error *err) {
    const char *name = entry->string;
    out->tensor.name = name;
    if (!cJSON_IsObject(entry))
        return corrupt(file, err, name, "header entry is not an object");
    const cJSON *dtype = hr_json_get(entry, "dtype");
    if (!cJSON_IsString(dtype))
        return corrupt(file, err, name, "header entry has no dtype");
    if (!hr_dtype_from_name(dtype->valuestring, &out->tensor.dtype))
        return hr_fail(err, HR_ERR_DTYPE, "%s: tensor %.200s: dtype %.32s is not known",
                       file->label, name, dtype->valuestring);
    HR_TRY(read_shape(file, entry, name, &out->tensor, err));
    const cJSON *offsets = hr_json_get(entry, "data_offsets");
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !as_size(offsets->child, &out->begin) || !as_size(offsets->child->next, &out->end))
        return corrupt(file, err, name, "data_offsets is not a pair of sizes");
    if (out->begin > out->end)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: tensor %.200s: data begins at %" PRIu64 " after its end at %" PRIu64,
                       file->label, name, out->begin, out->end);
    uint64_t elements, bytes;
    if (!hr_shape_elements(out->tensor.shape, out->tensor.ndim, &elements) ||
        __builtin_mul_overflow(elements, hr_dtype_size(out->tensor.dtype), &bytes))
        return corrupt(file, err, name, "the product of the shape overflows");
    if (bytes != out->end - out->begin) {
        char shape[128];
        return hr_fail(
            err, HR_ERR_CORRUPT,
            "%s: tensor %.200s: shape %s of %s needs %" PRIu64 " bytes, its offsets hold %" PRIu64,
            file->label, name, hr_shape_format(out->tensor.shape, out->tensor.ndim, shape, 128),
            hr_dtype_name(out->tensor.dtype), bytes, out->end - out->begin);
    }
    out->tensor.bytes = bytes;
    return HR_OK;
}

static int compare_extents(const void *a, const void *b) {
    const hr_extent *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->tensor.name, y->tensor.name);
}

/* Sorted extents must follow one another from 0 to the end of the file. */
static hr_status check_cover(const hr_safetensors *file, const hr_extent *extents, size_t n,
                             uint64_t data_start, hr_error *err) {
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (extents[i].begin != at)
            return hr_fail(err, HR_ERR_CORRUPT,
                           "%s: tensor %.200s: %s: data begins at %" PRIu64
                           ", the tensor before it ends at %" PRIu64,
                           file->label, extents[i].tensor.name,
                           extents[i].begin < at ? "overlap" : "hole", extents[i].begin, at);
        at = extents[i].end;
    }
    uint64_t found = file->size - data_start;
    if (found < at)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: cut short: needs %" PRIu64 " bytes, has %" PRIu64
                       "; fetch the file again",
                       file->label, at + data_start, file->size);
    if (found > at)
        return hr_fail(err, HR_ERR_CORRUPT, "%s: %" PRIu64 " bytes after the last tensor",
                       file->label, found - at);
    return HR_OK;
}

static hr_status check_metadata(const hr_safetensors *file, const cJSON *metadata, hr_error *err) {
    if (cJSON_IsNull(metadata))
        return HR_OK;
    if (!cJSON_IsObject(metadata))
        return hr_fail(err, HR_ERR_CORRUPT, "%s: __metadata__ is not an object", file->label);
    for (const cJSON *item = metadata->child; item != NULL; item = item->next) {
        if (!cJSON_IsString(item))
            return hr_fail(err, HR_ERR_CORRUPT, "%s: __metadata__ %.100s is not a string",
                           file->label, item->string);
    }
    return HR_OK;
}

static uint64_t header_length(const unsigned char *bytes) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | bytes[i];
    return length;
}

static hr_status parse_header(hr_safetensors *file, uint64_t *data_start, hr_error *err) {
    if (file->size < 8)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: cut short: a safetensors file has at least 8 bytes, this one %" PRIu64,
                       file->label, file->size);
    uint64_t length = header_length(file->bytes);
    if (length > HR_SAFETENSORS_MAX_HEADER)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: not a safetensors file: header of %" PRIu64
                       " bytes is over the limit of %" PRIu64,
                       file->label, length, HR_SAFETENSORS_MAX_HEADER);
    if (length > file->size - 8)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: cut short: header needs %" PRIu64 " bytes, the file has %" PRIu64
                       "; fetch the file again",
                       file->label, length + 8, file->size);
    const char *text = (const char *)file->bytes + 8;
    if (length == 0 || text[0] != '{')
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: not a safetensors file: the header does not begin with '{'",
                       file->label);
    hr_status status = hr_json_parse(text, length, HR_SAFETENSORS_MAX_HEADER, &file->header, err);
    if (status == HR_ERR_INVALID && err != NULL)
        err->status = status = HR_ERR_CORRUPT;
    if (status != HR_OK)
        return hr_fail_context(err, HR_ERR_CORRUPT, "%s: header", file->label);
    const char *twice = hr_json_duplicate_key(file->header);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_CORRUPT, "%s: header has the key %.200s twice (duplicate)",
                       file->label, twice);
    *data_start = length + 8;
    return HR_OK;
}

static int compare_names(const void *a, const void *b, void *tensors) {
    const hr_tensor *list = tensors;
    return strcmp(list[*(const size_t *)a].name, list[*(const size_t *)b].name);
}

/* Entries of the header into file->tensors, in data order. */
static hr_status read_tensors(hr_safetensors *file, uint64_t data_start, hr_error *err) {
    size_t n = (size_t)cJSON_GetArraySize(file->header), used = 0;
    hr_extent *extents = calloc(n + 1, sizeof *extents);
    file->tensors = calloc(n + 1, sizeof *file->tensors);
    file->by_name = calloc(n + 1, sizeof *file->by_name);
    hr_status status = HR_OK;
    if (extents == NULL || file->tensors == NULL || file->by_name == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "%s: no memory for %zu tensors", file->label, n);
    for (const cJSON *entry = file->header->child; status == HR_OK && entry != NULL;
         entry = entry->next) {
        if (strcmp(entry->string, "__metadata__") == 0)
            status = check_metadata(file, entry, err);
        else
            status = read_entry(file, entry, &extents[used++], err);
    }
    if (status != HR_OK)
        goto out;
    qsort(extents, used, sizeof *extents, compare_extents);
    status = check_cover(file, extents, used, data_start, err);
    if (status != HR_OK)
        goto out;
    for (size_t i = 0; i < used; i++) {
        file->tensors[i] = extents[i].tensor;
        file->tensors[i].data = file->bytes + data_start + extents[i].begin;
        file->by_name[i] = i;
    }
    file->n = used;
    qsort_r(file->by_name, used, sizeof *file->by_name, compare_names, file->tensors);
out:
    free(extents);
    return status;
}

/* Takes an owned mapping over, also when it fails. Reads the header only. */
static hr_status open_bytes(const void *bytes, uint64_t size, bool owned, const char *label,
                            hr_safetensors **out, hr_error *err) {
    uint64_t data_start = 0;
    hr_safetensors *file = calloc(1, sizeof *file);
    if (file == NULL || (file->label = strdup(label)) == NULL) {
        free(file);
        if (owned && size > 0)
            munmap((void *)(uintptr_t)bytes, size);
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", label);
    }
    file->bytes = bytes;
    file->size = size;
    file->owned = owned;
    file->fd = -1;
    hr_status status = parse_header(file, &data_start, err);
    if (status == HR_OK)
        status = read_tensors(file, data_start, err);
    if (status != HR_OK) {
        hr_safetensors_close(file);
        return status;
    }
    *out = file;
    return HR_OK;
}

/* Not blocking: opening a FIFO would otherwise wait for its writer. */
static hr_status open_regular(const char *path, int *out, struct stat *info, hr_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return hr_fail(err, errno == ENOENT ? HR_ERR_NOT_FOUND : HR_ERR_IO, "%s: %s", path,
                       strerror(errno));
    if (fstat(fd, info) != 0 || !S_ISREG(info->st_mode)) {
        close(fd);
        return hr_fail(err, HR_ERR_IO, "%s: not a regular file", path);
    }
    *out = fd;
    return HR_OK;
}

hr_status hr_safetensors_open(const char *path, hr_safetensors **out, hr_error *err) {
    int fd = -1;
    struct stat info;
    void *bytes = NULL;
    HR_TRY(open_regular(path, &fd, &info, err));
    uint64_t size = (uint64_t)info.st_size;
    if (size > 0)
        bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    int why = errno;
    close(fd);
    if (bytes == MAP_FAILED)
        return hr_fail(err, HR_ERR_IO, "%s: cannot be mapped: %s", path, strerror(why));
    HR_TRY(open_bytes(bytes, size, true, path, out, err));
    (*out)->from_file = true;
    return HR_OK;
}

static hr_status read_at(int fd, unsigned char *bytes, uint64_t from, uint64_t to, const char *path,
                         hr_error *err) {
    while (from < to) {
        ssize_t got = pread(fd, bytes + from, to - from, (off_t)from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return hr_fail(err, HR_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
        if (got == 0)
            return hr_fail(err, HR_ERR_CORRUPT, "%s: cut short while it was read; load it again",
                           path);
        from += (uint64_t)got;
    }
    return HR_OK;
}

/* Half of what is read could be of the file before, half of the one after. */
static hr_status check_unchanged(int fd, const struct stat *opened, const char *path,
                                 hr_error *err) {
    struct stat now;
    if (fstat(fd, &now) == 0 && now.st_size == opened->st_size &&
        now.st_mtim.tv_sec == opened->st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == opened->st_mtim.tv_nsec)
        return HR_OK;
    return hr_fail(err, HR_ERR_CORRUPT,
                   "%s: written to while it was read; load it again when its writer is done", path);
}

/* The header is judged before the data costs any memory. *head: how much is read so far. */
static hr_status read_header(int fd, uint64_t size, const char *path, uint64_t *head,
                             hr_safetensors **out, hr_error *err) {
    unsigned char *bytes = size == 0 ? NULL
                                     : mmap(NULL, size, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: no memory for its %" PRIu64 " bytes", path,
                       size);
    *head = size < 8 ? size : 8;
    hr_status status = read_at(fd, bytes, 0, *head, path, err);
    if (status == HR_OK && size >= 8) {
        uint64_t length = header_length(bytes);
        *head = length <= size - 8 && length <= HR_SAFETENSORS_MAX_HEADER ? length + 8 : 8;
        status = read_at(fd, bytes, 8, *head, path, err);
    }
    if (status != HR_OK) {
        if (size > 0)
            munmap(bytes, size);
        return status;
    }
    return open_bytes(bytes, size, true, path, out, err);
}

hr_status hr_safetensors_open_unread(const char *path, hr_safetensors **out, hr_error *err) {
    int fd = -1;
    uint64_t head;
    struct stat info;
    HR_TRY(open_regular(path, &fd, &info, err));
    hr_status status = read_header(fd, (uint64_t)info.st_size, path, &head, out, err);
    if (status != HR_OK) {
        close(fd);
        return status;
    }
    (*out)->fd = fd;
    (*out)->opened = info;
    return HR_OK;
}

hr_status hr_safetensors_fetch(const hr_safetensors *file, const hr_tensor *tensor, hr_error *err) {
    if (file->fd < 0 || tensor->bytes == 0)
        return HR_OK;
    uint64_t at = (uint64_t)((const unsigned char *)tensor->data - file->bytes);
    HR_TRY(read_at(file->fd, (unsigned char *)(uintptr_t)file->bytes, at, at + tensor->bytes,
                   file->label, err));
    return check_unchanged(file->fd, &file->opened, file->label, err);
}

static hr_status read_file(int fd, const struct stat *info, const char *path, hr_safetensors **out,
                           hr_error *err) {
    uint64_t head, size = (uint64_t)info->st_size;
    hr_safetensors *file = NULL;
    HR_TRY(read_header(fd, size, path, &head, &file, err));
    hr_status status = read_at(fd, (unsigned char *)(uintptr_t)file->bytes, head, size, path, err);
    if (status == HR_OK)
        status = check_unchanged(fd, info, path, err);
    if (status != HR_OK) {
        hr_safetensors_close(file);
        return status;
    }
    *out = file;
    return HR_OK;
}

hr_status hr_safetensors_read(const char *path, uint64_t max_bytes, hr_safetensors **out,
                              hr_error *err) {
    int fd = -1;
    struct stat info;
    HR_TRY(open_regular(path, &fd, &info, err));
    uint64_t size = (uint64_t)info.st_size;
    hr_status status =
        size > max_bytes
            ? hr_fail(err, HR_ERR_LIMIT, "%s: %" PRIu64 " bytes are over the limit of %" PRIu64,
                      path, size, max_bytes)
            : read_file(fd, &info, path, out, err);
    close(fd);
    return status;
}

hr_status hr_safetensors_parse(const void *bytes, size_t size, const char *label,
                               hr_safetensors **out, hr_error *err) {
    return open_bytes(bytes, size, false, label, out, err);
}

void hr_safetensors_close(hr_safetensors *file) {
    if (file == NULL)
        return;
    if (file->owned && file->size > 0)
        munmap((void *)(uintptr_t)file->bytes, file->size);
    if (file->fd >= 0)
        close(file->fd);
    cJSON_Delete(file->header);
    free(file->by_name);
    free(file->tensors);
    free(file->label);
    free(file);
}

size_t hr_safetensors_count(const hr_safetensors *file) {
    return file->n;
}

const hr_tensor *hr_safetensors_at(const hr_safetensors *file, size_t index) {
    return &file->tensors[index];
}

const hr_tensor *hr_safetensors_find(const hr_safetensors *file, const char *name) {
    size_t low = 0, high = file->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const hr_tensor *tensor = &file->tensors[file->by_name[middle]];
        int order = strcmp(name, tensor->name);
        if (order == 0)
            return tensor;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const char *hr_safetensors_metadata(const hr_safetensors *file, const char *key) {
    const cJSON *item = hr_json_get(hr_json_get(file->header, "__metadata__"), key);
    return cJSON_IsString(item) ? item->valuestring : NULL;
}

void hr_safetensors_drop(const hr_safetensors *file, const hr_tensor *tensor) {
    if (!file->from_file && file->fd < 0)
        return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)tensor->data + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)tensor->data + tensor->bytes) & ~(page - 1);
    if (end > begin)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}
