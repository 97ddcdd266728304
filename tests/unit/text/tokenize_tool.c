/* A pipe between the end-to-end test and the tokenizer: requests come on standard input, replies go
 * out on standard output, both little-endian and length-prefixed, so that any bytes can pass.
 *
 * Request: u8 op ('e' encode, 'd' decode, 's' stream), u8 flag (add or skip special), u32 n, then n
 * bytes of text
 * ('e') or n u32 ids. Reply: u8 ok, u32 n, then n u32 ids ('e'), n bytes of text ('d'), n bytes of
 * text whose pieces are each checked to be whole characters ('s'), or n bytes of message when not
 * ok. */
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void reply(int ok, size_t n, const void *data, size_t size) {
    unsigned char head[5] = {(unsigned char)ok};
    uint32_t n32 = (uint32_t)n;
    memcpy(head + 1, &n32, 4);
    fwrite(head, 1, sizeof head, stdout);
    if (size > 0)
        fwrite(data, 1, size, stdout);
    fflush(stdout);
}

static void reply_error(const hr_error *err) {
    reply(0, strlen(err->message), err->message, strlen(err->message));
}

static void do_encode(const hr_tokenizer *t, const char *text, size_t len, bool special) {
    hr_error err;
    uint32_t *ids;
    size_t n;
    if (hr_tokenizer_encode(t, text, len, special, &ids, &n, &err) != HR_OK) {
        reply_error(&err);
        return;
    }
    reply(1, n, ids, n * sizeof *ids);
    free(ids);
}

static void do_decode(const hr_tokenizer *t, const uint32_t *ids, size_t n, bool skip) {
    hr_error err;
    hr_buf out = {0};
    if (hr_tokenizer_decode(t, ids, n, skip, &out, &err) != HR_OK)
        reply_error(&err);
    else
        reply(1, out.len, out.data, out.len);
    hr_buf_free(&out);
}

static hr_status stream(const hr_tokenizer *t, const uint32_t *ids, size_t n, bool skip,
                        hr_buf *all, hr_error *err) {
    hr_detokenizer *d;
    hr_status status = hr_detokenizer_create(t, skip, &d, err);
    if (status != HR_OK)
        return status;
    hr_buf piece = {0};
    for (size_t i = 0; i <= n && status == HR_OK; i++) {
        hr_buf_clear(&piece);
        status = i < n ? hr_detokenizer_push(d, ids[i], &piece, err)
                       : hr_detokenizer_flush(d, &piece, err);
        if (status == HR_OK && hr_utf8_valid_prefix(piece.data, piece.len) != piece.len)
            status = hr_fail(err, HR_ERR_INTERNAL, "a piece cuts a character");
        hr_buf_append(all, piece.data, piece.len);
    }
    hr_buf_free(&piece);
    hr_detokenizer_free(d);
    return status;
}

static void do_stream(const hr_tokenizer *t, const uint32_t *ids, size_t n, bool skip) {
    hr_error err;
    hr_buf all = {0};
    if (stream(t, ids, n, skip, &all, &err) != HR_OK)
        reply_error(&err);
    else
        reply(1, all.len, all.data, all.len);
    hr_buf_free(&all);
}

/* False at the end of input. */
static bool serve_one(const hr_tokenizer *t) {
    unsigned char head[6];
    if (fread(head, 1, sizeof head, stdin) != sizeof head)
        return false;
    uint32_t n;
    memcpy(&n, head + 2, 4);
    size_t size = head[0] == 'e' ? n : (size_t)n * 4;
    void *data = malloc(size + 1);
    if (data == NULL || fread(data, 1, size, stdin) != size) {
        free(data);
        return false;
    }
    if (head[0] == 'e')
        do_encode(t, data, n, head[1]);
    else if (head[0] == 'd')
        do_decode(t, data, n, head[1]);
    else
        do_stream(t, data, n, head[1]);
    free(data);
    return true;
}

int main(int argc, char **argv) {
    hr_error err;
    hr_tokenizer *t;
    if (argc != 2) {
        fprintf(stderr, "usage: tokenize_tool MODEL_DIR\n");
        return 2;
    }
    if (hr_tokenizer_load(argv[1], &t, &err) != HR_OK) {
        fprintf(stderr, "%s: %s\n", hr_status_name(err.status), err.message);
        return 1;
    }
    while (serve_one(t)) {
    }
    hr_tokenizer_free(t);
    return 0;
}
