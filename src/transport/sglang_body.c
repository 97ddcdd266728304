/* The JSON body that carries a pickled payload as base64. */
#include "transport/sglang_body.h"

#include "format/base64.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of the payload that are encoded at a time: whole groups of three. */
enum { BLOCK_BYTES = 3 * 16384, BLOCK_TEXT = 4 * 16384 };

static const char list_key[] = ", \"serialized_named_tensors\": [";

struct hr_sglang_body {
    const hr_buf *payload;
    uint64_t copies, text_size; /* of one copy, with its quotes and comma */
    size_t head_size;
    char head[]; /* up to the first quote */
};

hr_sglang_body *hr_sglang_body_make(const hr_buf *members, const hr_buf *payload, uint64_t copies) {
    size_t head_size = 1 + members->len + sizeof list_key - 1;
    hr_sglang_body *body = malloc(sizeof *body + head_size + 1);
    if (body == NULL)
        return NULL;
    body->payload = payload;
    body->copies = copies;
    body->text_size = (payload->len + 2) / 3 * 4 + 3;
    body->head_size = head_size;
    body->head[0] = '{';
    memcpy(body->head + 1, members->data, members->len);
    memcpy(body->head + 1 + members->len, list_key, sizeof list_key);
    return body;
}

/* Copies are "...", with a comma after each but the last, whose place the end takes: ]}. */
uint64_t hr_sglang_body_size(const hr_sglang_body *body) {
    return body->head_size + body->copies * body->text_size + 1;
}

static size_t read_base64(const hr_buf *payload, uint64_t at, char *out, size_t n) {
    size_t block = (size_t)(at / BLOCK_TEXT), skip = (size_t)(at % BLOCK_TEXT);
    size_t from = block * BLOCK_BYTES, left = payload->len - from;
    hr_buf text = {0};
    hr_base64_append(&text, payload->data + from, left < BLOCK_BYTES ? left : BLOCK_BYTES);
    size_t take = text.failed || text.len <= skip ? 0 : text.len - skip;
    take = take < n ? take : n;
    if (take > 0)
        memcpy(out, text.data + skip, take);
    hr_buf_free(&text);
    return take;
}

/* From one copy with its quotes and comma; at < text_size. */
static size_t read_copy(const hr_sglang_body *b, uint64_t copy, uint64_t at, char *out, size_t n) {
    uint64_t encoded = b->text_size - 3;
    if (at == 0 || at == encoded + 1) {
        out[0] = '"';
        return 1;
    }
    if (at == encoded + 2) {
        out[0] = copy + 1 < b->copies ? ',' : ']';
        return 1;
    }
    uint64_t left = encoded - (at - 1);
    return read_base64(b->payload, at - 1, out, left < n ? (size_t)left : n);
}

size_t hr_sglang_body_read(void *self, uint64_t offset, void *out, size_t n) {
    const hr_sglang_body *b = self;
    char *to = out;
    size_t wrote = 0;
    while (wrote < n && offset + wrote < hr_sglang_body_size(b)) {
        uint64_t at = offset + wrote;
        size_t took = 0;
        if (at < b->head_size) {
            took = b->head_size - (size_t)at < n - wrote ? b->head_size - (size_t)at : n - wrote;
            memcpy(to + wrote, b->head + at, took);
        } else if (at == hr_sglang_body_size(b) - 1) {
            to[wrote] = '}';
            took = 1;
        } else {
            uint64_t in = at - b->head_size;
            took = read_copy(b, in / b->text_size, in % b->text_size, to + wrote, n - wrote);
        }
        if (took == 0)
            break; /* no memory: the client ends the call as cut short */
        wrote += took;
    }
    return wrote;
}
