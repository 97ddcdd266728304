/* Writer of the safetensors container: the header first, padded so that the data begins at a
 * multiple of 64, then the tensors in an order that keeps each of them aligned without holes, which
 * the format forbids. */
#include "format/json_writer.h"
#include "format/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Sizes that are multiples of 64 stand first, then larger elements before smaller ones. */
static int compare_placement(const void *a, const void *b) {
    const hr_tensor *x = *(const hr_tensor *const *)a, *y = *(const hr_tensor *const *)b;
    bool odd_x = x->bytes % HR_SAFETENSORS_ALIGN != 0, odd_y = y->bytes % HR_SAFETENSORS_ALIGN != 0;
    size_t size_x = hr_dtype_size(x->dtype), size_y = hr_dtype_size(y->dtype);
    if (odd_x != odd_y)
        return odd_x ? 1 : -1;
    if (odd_x && size_x != size_y)
        return size_x > size_y ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b) {
    const hr_tensor *x = *(const hr_tensor *const *)a, *y = *(const hr_tensor *const *)b;
    return strcmp(x->name, y->name);
}

static hr_status check_names(const hr_tensor **list, size_t n, hr_error *err) {
    qsort(list, n, sizeof *list, compare_names);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i]->name, "__metadata__") == 0 ||
            (i > 0 && strcmp(list[i]->name, list[i - 1]->name) == 0))
            return hr_fail(err, HR_ERR_INVALID, "tensor name %.200s is %s", list[i]->name,
                           i > 0 ? "given twice" : "reserved by the format");
    }
    return HR_OK;
}

/* What an entry of the header says behind its name, put together before it is appended: with many
 * small tensors the header is most of the work. */
typedef struct entry_text {
    char text[384]; /* 8 dimensions and 2 offsets of 20 digits, and the words between */
    size_t n;
} entry_text;

static void put_word(entry_text *e, const char *word) {
    size_t n = strlen(word);
    memcpy(e->text + e->n, word, n);
    e->n += n;
}

static void put_number(entry_text *e, uint64_t value) {
    char digits[20];
    size_t n = 0;
    do {
        digits[n++] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    while (n > 0)
        e->text[e->n++] = digits[--n];
}

static void put_header(const hr_tensor **list, size_t n, hr_buf *header) {
    hr_json_writer w;
    uint64_t at = 0;
    hr_json_writer_init(&w, header);
    hr_json_object_begin(&w);
    for (size_t i = 0; i < n; i++) {
        entry_text e = {.n = 0};
        put_word(&e, "{\"dtype\":\"");
        put_word(&e, hr_dtype_name(list[i]->dtype));
        put_word(&e, "\",\"shape\":[");
        for (uint32_t d = 0; d < list[i]->ndim; d++) {
            put_word(&e, d > 0 ? "," : "");
            put_number(&e, list[i]->shape[d]);
        }
        put_word(&e, "],\"data_offsets\":[");
        put_number(&e, at);
        put_word(&e, ",");
        put_number(&e, at += list[i]->bytes);
        put_word(&e, "]}");
        hr_json_key(&w, list[i]->name);
        hr_json_write_raw(&w, e.text, e.n);
    }
    hr_json_object_end(&w);
    while ((header->len + 8) % HR_SAFETENSORS_ALIGN != 0 && !header->failed)
        hr_buf_putc(header, ' ');
}

/* Placement goes by name where nothing else tells tensors apart: then it is done already. */
static bool is_placed(const hr_tensor **list, size_t n) {
    for (size_t i = 1; i < n; i++) {
        if (compare_placement(&list[i - 1], &list[i]) > 0)
            return false;
    }
    return true;
}

hr_status hr_safetensors_write_head(const hr_tensor *tensors, size_t n, const hr_tensor **order,
                                    hr_buf *head, hr_error *err) {
    hr_buf header = {0};
    unsigned char length[8];
    for (size_t i = 0; i < n; i++)
        order[i] = &tensors[i];
    HR_TRY(check_names(order, n, err));
    if (!is_placed(order, n))
        qsort(order, n, sizeof *order, compare_placement);
    put_header(order, n, &header);
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)(header.len >> (8 * i));
    hr_buf_append(head, length, sizeof length);
    hr_buf_append(head, header.data, header.len);
    bool failed = header.failed || head->failed;
    hr_buf_free(&header);
    return failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a safetensors header") : HR_OK;
}

hr_status hr_safetensors_write(const hr_tensor *tensors, size_t n, hr_buf *image, hr_error *err) {
    const hr_tensor **order = calloc(n + 1, sizeof *order);
    if (order == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    hr_status status = hr_safetensors_write_head(tensors, n, order, image, err);
    for (size_t i = 0; status == HR_OK && i < n; i++)
        hr_buf_append(image, order[i]->data, order[i]->bytes);
    if (status == HR_OK && image->failed)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a safetensors image");
    free(order);
    return status;
}

static bool write_all(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        ssize_t wrote = write(fd, bytes, n);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return false;
        bytes += wrote;
        n -= (size_t)wrote;
    }
    return true;
}

hr_status hr_safetensors_save(const char *path, const hr_tensor *tensors, size_t n, hr_error *err) {
    hr_buf image = {0};
    char *temporary = NULL;
    int fd = -1;
    hr_status status = hr_safetensors_write(tensors, n, &image, err);
    if (status != HR_OK)
        goto out;
    if (asprintf(&temporary, "%s.XXXXXX", path) < 0) {
        temporary = NULL;
        status = hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", path);
        goto out;
    }
    fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0) {
        status = hr_fail(err, HR_ERR_IO, "%s: cannot be created: %s", temporary, strerror(errno));
        goto out;
    }
    if (!write_all(fd, image.data, image.len) || fchmod(fd, 0644) != 0 ||
        rename(temporary, path) != 0) {
        status = hr_fail(err, HR_ERR_IO, "%s: cannot be written: %s", path, strerror(errno));
        unlink(temporary);
    }
out:
    if (fd >= 0)
        close(fd);
    free(temporary);
    hr_buf_free(&image);
    return status;
}
