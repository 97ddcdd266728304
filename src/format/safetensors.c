/* Reader of the safetensors container. The header comes from outside: every number in it is checked
 * against the bytes that are really there before anything points at them. */
#include "format/safetensors.h"

#include "format/json.h"
#include "format/json_scan.h"

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
    cJSON *metadata; /* NULL: none */
    char *names;
    hr_tensor *tensors;
    size_t n;
    size_t *by_name; /* indices of tensors, sorted by name */
};

/* One entry of the header while it is checked. */
typedef struct hr_extent {
    hr_tensor tensor;
    uint64_t begin, end;
} hr_extent;

/* The header while it is read. */
typedef struct hr_header {
    hr_safetensors *file;
    hr_extent *extents;
    size_t n, cap;
    /* Of file->names. A name and its NUL take less than they do in the header, with its quotes. */
    size_t names_used;
    bool judged; /* what failed is not the JSON, but what it says */
    hr_error *err;
    /* The entry being read. */
    hr_json_scan entry; /* where it begins */
    size_t n_offsets;
    bool has_dtype, has_shape, has_offsets, has_more;
} hr_header;

static hr_status corrupt(hr_header *h, const char *what) {
    h->judged = true;
    return hr_fail(h->err, HR_ERR_CORRUPT, "%s: tensor %.200s: %s", h->file->label,
                   h->extents[h->n].tensor.name, what);
}

static hr_status skip_value(hr_json_scan *scan) {
    cJSON *tree = NULL;
    hr_status status = hr_json_next_tree(scan, &tree);
    if (status == HR_OK)
        cJSON_Delete(tree);
    return status;
}

/* The next value is of another kind than what must stand there; malformed JSON is told first. */
static hr_status other_kind(hr_header *h, hr_json_scan *scan, const char *what) {
    HR_TRY(skip_value(scan));
    return corrupt(h, what);
}

/* Exact: a double would make another size of one above 2^53. */
static hr_status read_size(hr_header *h, hr_json_scan *scan, const char *otherwise, uint64_t *out) {
    bool is_size = false;
    int first = hr_json_peek(scan);
    if (first != '-' && (first < '0' || first > '9'))
        return other_kind(h, scan, otherwise);
    HR_TRY(hr_json_next_size(scan, &is_size, out));
    return is_size ? HR_OK : corrupt(h, otherwise);
}

static hr_status read_dim(void *ctx, hr_json_scan *scan, const hr_json_text *key) {
    (void)key;
    hr_header *h = ctx;
    hr_tensor *tensor = &h->extents[h->n].tensor;
    if (tensor->ndim == HR_TENSOR_MAX_DIMS)
        return corrupt(h, "shape has more than 8 dimensions");
    return read_size(h, scan, "shape holds something that is not a size",
                     &tensor->shape[tensor->ndim++]);
}

static const char no_pair[] = "data_offsets is not a pair of sizes";

static hr_status read_offset(void *ctx, hr_json_scan *scan, const hr_json_text *key) {
    (void)key;
    hr_header *h = ctx;
    hr_extent *extent = &h->extents[h->n];
    if (h->n_offsets == 2)
        return corrupt(h, no_pair);
    return read_size(h, scan, no_pair, h->n_offsets++ == 0 ? &extent->begin : &extent->end);
}

static hr_status read_dtype(hr_header *h, hr_json_scan *scan) {
    hr_tensor *tensor = &h->extents[h->n].tensor;
    hr_json_text text;
    char name[80] = ""; /* none that is known is longer, even written in escapes */
    if (hr_json_peek(scan) != '"')
        return other_kind(h, scan, "header entry has no dtype");
    HR_TRY(hr_json_next_string(scan, &text));
    if (text.len < sizeof name)
        hr_json_text_copy(&text, name);
    else
        memcpy(name, text.bytes, sizeof name - 1);
    if (hr_dtype_from_name(name, &tensor->dtype))
        return HR_OK;
    h->judged = true;
    return hr_fail(h->err, HR_ERR_DTYPE, "%s: tensor %.200s: dtype %.32s is not known",
                   h->file->label, tensor->name, name);
}

static bool is_key(const hr_json_text *key, const char *name) {
    char text[80]; /* "data_offsets" with each character as an escape has 72 */
    if (!key->escapes)
        return key->len == strlen(name) && memcmp(key->bytes, name, key->len) == 0;
    if (key->len >= sizeof text)
        return false;
    hr_json_text_copy(key, text);
    return strcmp(text, name) == 0;
}

/* A key of an entry; whatever is none of the three known ones once is looked at again as a whole.
 */
static hr_status read_field(void *ctx, hr_json_scan *scan, const hr_json_text *key) {
    hr_header *h = ctx;
    if (is_key(key, "dtype") && !h->has_dtype) {
        h->has_dtype = true;
        return read_dtype(h, scan);
    }
    if (is_key(key, "shape") && !h->has_shape) {
        h->has_shape = true;
        return hr_json_peek(scan) == '[' ? hr_json_next_array(scan, read_dim, h)
                                         : other_kind(h, scan, "shape is not an array");
    }
    if (is_key(key, "data_offsets") && !h->has_offsets) {
        h->has_offsets = true;
        return hr_json_peek(scan) == '[' ? hr_json_next_array(scan, read_offset, h)
                                         : other_kind(h, scan, no_pair);
    }
    h->has_more = true;
    return skip_value(scan);
}

static hr_status refuse_twice(hr_header *h, const char *key) {
    h->judged = true;
    return hr_fail(h->err, HR_ERR_CORRUPT, "%s: header has the key %.200s twice (duplicate)",
                   h->file->label, key);
}

static hr_status check_unique_keys(hr_header *h, const cJSON *tree) {
    const char *twice = hr_json_duplicate_key(tree);
    return twice != NULL ? refuse_twice(h, twice) : HR_OK;
}

/* Of an entry with other keys than the three, or one of them twice. */
static hr_status check_more(hr_header *h) {
    cJSON *tree = NULL;
    HR_TRY(hr_json_next_tree(&h->entry, &tree));
    hr_status status = check_unique_keys(h, tree);
    cJSON_Delete(tree);
    return status;
}

static hr_status check_entry(hr_header *h) {
    hr_extent *extent = &h->extents[h->n];
    hr_tensor *tensor = &extent->tensor;
    uint64_t elements, bytes;
    if (h->has_more)
        HR_TRY(check_more(h));
    if (!h->has_dtype)
        return corrupt(h, "header entry has no dtype");
    if (!h->has_shape)
        return corrupt(h, "shape is not an array");
    if (h->n_offsets != 2)
        return corrupt(h, no_pair);
    h->judged = true;
    if (extent->begin > extent->end)
        return hr_fail(h->err, HR_ERR_CORRUPT,
                       "%s: tensor %.200s: data begins at %" PRIu64 " after its end at %" PRIu64,
                       h->file->label, tensor->name, extent->begin, extent->end);
    if (!hr_shape_elements(tensor->shape, tensor->ndim, &elements) ||
        __builtin_mul_overflow(elements, hr_dtype_size(tensor->dtype), &bytes))
        return corrupt(h, "the product of the shape overflows");
    if (bytes != extent->end - extent->begin) {
        char shape[128];
        return hr_fail(
            h->err, HR_ERR_CORRUPT,
            "%s: tensor %.200s: shape %s of %s needs %" PRIu64 " bytes, its offsets hold %" PRIu64,
            h->file->label, tensor->name, hr_shape_format(tensor->shape, tensor->ndim, shape, 128),
            hr_dtype_name(tensor->dtype), bytes, extent->end - extent->begin);
    }
    h->judged = false;
    tensor->bytes = bytes;
    return HR_OK;
}

static hr_status check_metadata(hr_header *h) {
    const hr_safetensors *file = h->file;
    HR_TRY(check_unique_keys(h, file->metadata));
    h->judged = true;
    if (!cJSON_IsObject(file->metadata) && !cJSON_IsNull(file->metadata))
        return hr_fail(h->err, HR_ERR_CORRUPT, "%s: __metadata__ is not an object", file->label);
    for (const cJSON *item = file->metadata->child; item != NULL; item = item->next) {
        if (!cJSON_IsString(item))
            return hr_fail(h->err, HR_ERR_CORRUPT, "%s: __metadata__ %.100s is not a string",
                           file->label, item->string);
    }
    h->judged = false;
    return HR_OK;
}

static bool make_room(hr_header *h) {
    if (h->n < h->cap)
        return true;
    size_t cap = h->cap > 0 ? 2 * h->cap : 64;
    hr_extent *more = realloc(h->extents, cap * sizeof *more);
    if (more == NULL)
        return false;
    h->extents = more;
    h->cap = cap;
    return true;
}

static hr_status read_entry(void *ctx, hr_json_scan *scan, const hr_json_text *key) {
    hr_header *h = ctx;
    char *name = h->file->names + h->names_used;
    size_t len = hr_json_text_copy(key, name);
    if (strcmp(name, "__metadata__") == 0) {
        if (h->file->metadata != NULL)
            return refuse_twice(h, "__metadata__");
        HR_TRY(hr_json_next_tree(scan, &h->file->metadata));
        return check_metadata(h);
    }
    if (!make_room(h)) {
        h->judged = true;
        return hr_fail(h->err, HR_ERR_NO_MEMORY, "%s: no memory for %zu tensors", h->file->label,
                       h->n + 1);
    }
    h->extents[h->n] = (hr_extent){.tensor = {.name = name}};
    h->names_used += len + 1;
    h->has_dtype = h->has_shape = h->has_offsets = h->has_more = false;
    h->n_offsets = 0;
    h->entry = *scan;
    if (hr_json_peek(scan) != '{')
        return other_kind(h, scan, "header entry is not an object");
    HR_TRY(hr_json_next_object(scan, read_field, h));
    HR_TRY(check_entry(h));
    h->n++;
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

static uint64_t header_length(const unsigned char *bytes) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | bytes[i];
    return length;
}

/* Where the JSON of the header is; *data_start: where it ends. */
static hr_status find_header(const hr_safetensors *file, uint64_t *data_start, hr_error *err) {
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
    if (length == 0 || file->bytes[8] != '{')
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s: not a safetensors file: the header does not begin with '{'",
                       file->label);
    *data_start = length + 8;
    return HR_OK;
}

static int compare_names(const void *a, const void *b, void *tensors) {
    const hr_tensor *list = tensors;
    return strcmp(list[*(const size_t *)a].name, list[*(const size_t *)b].name);
}

static int compare_entries(const void *a, const void *b) {
    return strcmp(((const hr_extent *)a)->tensor.name, ((const hr_extent *)b)->tensor.name);
}

static bool in_order(const hr_extent *extents, size_t n,
                     int (*compare)(const void *a, const void *b)) {
    for (size_t i = 1; i < n; i++) {
        if (compare(&extents[i - 1], &extents[i]) >= 0)
            return false;
    }
    return true;
}

/* Headers mostly are in order of names, of data, or both. */
static hr_status check_unique_names(hr_header *h) {
    if (in_order(h->extents, h->n, compare_entries))
        return HR_OK;
    qsort(h->extents, h->n, sizeof *h->extents, compare_entries);
    for (size_t i = 1; i < h->n; i++) {
        if (compare_entries(&h->extents[i - 1], &h->extents[i]) == 0)
            return refuse_twice(h, h->extents[i].tensor.name);
    }
    return HR_OK;
}

/* Extents into file->tensors, in data order. */
static hr_status keep_tensors(hr_header *h, uint64_t data_start) {
    hr_safetensors *file = h->file;
    HR_TRY(check_unique_names(h));
    if (!in_order(h->extents, h->n, compare_extents))
        qsort(h->extents, h->n, sizeof *h->extents, compare_extents);
    HR_TRY(check_cover(file, h->extents, h->n, data_start, h->err));
    file->tensors = calloc(h->n + 1, sizeof *file->tensors);
    file->by_name = calloc(h->n + 1, sizeof *file->by_name);
    if (file->tensors == NULL || file->by_name == NULL)
        return hr_fail(h->err, HR_ERR_NO_MEMORY, "%s: no memory for %zu tensors", file->label,
                       h->n);
    for (size_t i = 0; i < h->n; i++) {
        file->tensors[i] = h->extents[i].tensor;
        file->tensors[i].data = file->bytes + data_start + h->extents[i].begin;
        file->by_name[i] = i;
    }
    file->n = h->n;
    if (!in_order(h->extents, h->n, compare_entries))
        qsort_r(file->by_name, h->n, sizeof *file->by_name, compare_names, file->tensors);
    return HR_OK;
}

static hr_status read_header_text(hr_header *h, size_t length) {
    hr_json_scan scan = {.text = h->file->bytes + 8, .len = length, .err = h->err};
    hr_status status = hr_json_next_object(&scan, read_entry, h);
    if (status == HR_OK)
        status = hr_json_end(&scan);
    return status == HR_OK || h->judged
               ? status
               : hr_fail_context(h->err, HR_ERR_CORRUPT, "%s: header", h->file->label);
}

static hr_status parse_header(hr_safetensors *file, hr_error *err) {
    uint64_t data_start = 0;
    hr_error local;
    hr_header h = {.file = file, .err = err != NULL ? err : &local};
    HR_TRY(find_header(file, &data_start, h.err));
    file->names = malloc(data_start);
    if (file->names == NULL)
        return hr_fail(h.err, HR_ERR_NO_MEMORY, "%s: no memory for its names", file->label);
    hr_status status = read_header_text(&h, data_start - 8);
    if (status == HR_OK)
        status = keep_tensors(&h, data_start);
    free(h.extents);
    return status;
}

/* Takes an owned mapping over, also when it fails. Reads the header only. */
static hr_status open_bytes(const void *bytes, uint64_t size, bool owned, const char *label,
                            hr_safetensors **out, hr_error *err) {
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
    hr_status status = parse_header(file, err);
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
    cJSON_Delete(file->metadata);
    free(file->names);
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
    const cJSON *item = hr_json_get(file->metadata, key);
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
