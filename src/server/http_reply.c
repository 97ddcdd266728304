/* The answer on its way out, whole or piece by piece. */
#include "server/http_parts.h"

#include <string.h>

static ssize_t read_stream(void *cls, uint64_t pos, char *out, size_t max) {
    (void)pos;
    hr_exchange *x = cls;
    for (;;) {
        if (x->chunk_at < x->chunk.len) {
            size_t n = x->chunk.len - x->chunk_at < max ? x->chunk.len - x->chunk_at : max;
            memcpy(out, x->chunk.data + x->chunk_at, n);
            x->chunk_at += n;
            return (ssize_t)n;
        }
        if (x->chunk_last)
            return MHD_CONTENT_READER_END_OF_STREAM;
        hr_buf_clear(&x->chunk);
        x->chunk_at = 0;
        hr_exchange_take_wake(x);
        x->chunk_last = x->async.next(x->async.ctx, &x->chunk);
        if (x->chunk.failed)
            return MHD_CONTENT_READER_END_WITH_ERROR;
        if (x->chunk.len > 0 || x->chunk_last)
            continue;
        if (hr_exchange_suspend(x))
            return 0;
        if (atomic_load(&x->http->stopping))
            return MHD_CONTENT_READER_END_WITH_ERROR;
    }
}

static void unref_stream(void *cls) {
    hr_exchange_unref(cls);
}

enum MHD_Result hr_exchange_send(hr_exchange *x) {
    struct MHD_Response *response;
    const char *type = x->content_type != NULL ? x->content_type : "application/json";
    if (x->streamed) {
        type = "text/event-stream; charset=utf-8";
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32 * 1024, read_stream,
                                                     hr_exchange_ref(x), unref_stream);
        if (response == NULL)
            hr_exchange_unref(x);
        else
            hr_exchange_watch(x);
    } else {
        response =
            MHD_create_response_from_buffer(x->reply.len, x->reply.data, MHD_RESPMEM_MUST_FREE);
        if (response != NULL)
            x->reply = (hr_buf){0};
    }
    if (response == NULL)
        return MHD_NO;
    if (x->streamed)
        MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "Content-Type", type);
    for (unsigned i = 0; i < x->n_headers; i++)
        MHD_add_response_header(response, x->headers[i].name, x->headers[i].value);
    if (atomic_load(&x->http->quiesced))
        MHD_add_response_header(response, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(x->connection, x->status, response);
    MHD_destroy_response(response);
    return result;
}
