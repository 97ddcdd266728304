/* A bucket on its way. */
#include "transport/wire_bucket.h"

#include "format/safetensors.h"

#include <stdlib.h>
#include <string.h>

hr_status hr_wire_bucket_open(const hr_tensor *tensors, size_t n, hr_wire_bucket *out,
                              hr_error *err) {
    hr_wire_bucket b = {.n = n};
    hr_status status = HR_OK;
    const hr_tensor **order = calloc(n + 1, sizeof *order);
    b.tensors = calloc(n + 1, sizeof *b.tensors);
    b.stream = hr_xxh3_stream_create();
    if (order == NULL || b.tensors == NULL || b.stream == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a bucket of %zu tensors", n);
        goto out;
    }
    status = hr_safetensors_write_head(tensors, n, order, &b.head, err);
    if (status != HR_OK)
        goto out;
    b.size = b.head.len;
    for (size_t i = 0; i < n; i++) {
        b.tensors[i].tensor = order[i];
        b.tensors[i].start = b.size;
        b.size += order[i]->bytes;
        b.bytes += order[i]->bytes;
    }
    *out = b;
out:
    if (status != HR_OK)
        hr_wire_bucket_close(&b);
    free(order);
    return status;
}

void hr_wire_bucket_close(hr_wire_bucket *bucket) {
    free(bucket->tensors);
    hr_buf_free(&bucket->head);
    hr_buf_free(&bucket->payload);
    hr_xxh3_stream_destroy(bucket->stream);
    *bucket = (hr_wire_bucket){0};
}

/* ---- digests ---- */

/* Takes the bytes before image offset `end` into the digests; what is in already stays. */
static void digest_until(hr_wire_bucket *b, uint64_t end) {
    while (b->hashed < b->n) {
        hr_wire_tensor *t = &b->tensors[b->hashed];
        uint64_t bytes = t->tensor->bytes;
        if (end < t->start || (end == t->start && bytes > 0))
            return;
        uint64_t reach = end - t->start < bytes ? end - t->start : bytes;
        if (b->hashed_bytes == 0 && reach == bytes) {
            hr_xxh3(t->tensor->data, bytes, t->xxh3);
        } else {
            if (b->hashed_bytes == 0)
                hr_xxh3_stream_reset(b->stream);
            if (reach > b->hashed_bytes)
                hr_xxh3_stream_update(b->stream, (const char *)t->tensor->data + b->hashed_bytes,
                                      reach - b->hashed_bytes);
            b->hashed_bytes = reach > b->hashed_bytes ? reach : b->hashed_bytes;
            if (b->hashed_bytes < bytes)
                return;
            hr_xxh3_stream_digest(b->stream, t->xxh3);
        }
        b->hashed++;
        b->hashed_bytes = 0;
    }
}

void hr_wire_bucket_digest(hr_wire_bucket *bucket) {
    digest_until(bucket, bucket->size);
}

void hr_wire_bucket_sha256(hr_wire_bucket *bucket) {
    for (size_t i = 0; i < bucket->n; i++) {
        hr_wire_tensor *t = &bucket->tensors[i];
        hr_sha256_hex(t->tensor->data, t->tensor->bytes, t->sha256);
    }
}

/* ---- reading the image ---- */

/* The last tensor that starts at or before the offset. */
static size_t find(const hr_wire_bucket *b, uint64_t offset) {
    size_t low = 0, high = b->n;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (b->tensors[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

size_t hr_wire_bucket_read(void *self, uint64_t offset, void *out, size_t n) {
    hr_wire_bucket *b = self;
    char *to = out;
    size_t wrote = 0;
    if (offset < b->head.len) {
        wrote = b->head.len - (size_t)offset < n ? b->head.len - (size_t)offset : n;
        memcpy(to, b->head.data + offset, wrote);
    }
    size_t i = b->n > 0 ? find(b, offset + wrote) : 0;
    for (; i < b->n && wrote < n; i++) {
        const hr_wire_tensor *t = &b->tensors[i];
        uint64_t from = offset + wrote - t->start;
        if (from >= t->tensor->bytes)
            continue;
        uint64_t left = t->tensor->bytes - from;
        size_t take = left < n - wrote ? (size_t)left : n - wrote;
        memcpy(to + wrote, (const char *)t->tensor->data + from, take);
        wrote += take;
    }
    digest_until(b, offset + wrote);
    return wrote;
}
