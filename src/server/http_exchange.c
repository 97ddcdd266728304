/* What handlers see of an exchange, and say to it. */
#include "server/http_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

hr_exchange *hr_exchange_ref(hr_exchange *x) {
    atomic_fetch_add(&x->refs, 1);
    return x;
}

void hr_exchange_unref(hr_exchange *x) {
    if (atomic_fetch_sub(&x->refs, 1) != 1)
        return;
    if (x->async.release != NULL)
        x->async.release(x->async.ctx);
    pthread_mutex_destroy(&x->lock);
    hr_body_free(&x->body);
    hr_buf_free(&x->reply);
    hr_buf_free(&x->chunk);
    free(x->path);
    free(x);
}

const char *hr_exchange_path(const hr_exchange *x) {
    return x->path;
}

const char *hr_exchange_body(const hr_exchange *x, size_t *len) {
    *len = x->body.len;
    return x->body.data != NULL ? x->body.data : "";
}

hr_body hr_exchange_take_body(hr_exchange *x) {
    return hr_body_move(&x->body);
}

typedef struct query_visit {
    bool (*fn)(void *ctx, const char *key, const char *value);
    void *ctx;
    bool cut; /* one has a NUL */
} query_visit;

static enum MHD_Result visit_query(void *cls, enum MHD_ValueKind kind, const char *key,
                                   size_t key_size, const char *value, size_t value_size) {
    (void)kind;
    query_visit *visit = cls;
    visit->cut = memchr(key, '\0', key_size) != NULL ||
                 (value != NULL && memchr(value, '\0', value_size) != NULL);
    return !visit->cut && visit->fn(visit->ctx, key, value != NULL ? value : "") ? MHD_YES : MHD_NO;
}

bool hr_exchange_query_each(const hr_exchange *x,
                            bool (*fn)(void *ctx, const char *key, const char *value), void *ctx) {
    query_visit visit = {.fn = fn, .ctx = ctx};
    MHD_get_connection_values_n(x->connection, MHD_GET_ARGUMENT_KIND, visit_query, &visit);
    return !visit.cut;
}

const char *hr_exchange_query(const hr_exchange *x, const char *key) {
    const char *value = NULL;
    size_t len = 0;
    if (MHD_lookup_connection_value_n(x->connection, MHD_GET_ARGUMENT_KIND, key, strlen(key),
                                      &value, &len) != MHD_YES)
        return NULL;
    return value != NULL ? value : "";
}

const char *hr_exchange_request_header(const hr_exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

void hr_exchange_content_type(hr_exchange *x, const char *type) {
    x->content_type = type;
}

void hr_exchange_header(hr_exchange *x, const char *name, const char *value) {
    HR_ASSERT(x->n_headers < HR_HTTP_MAX_HEADERS);
    x->headers[x->n_headers].name = name;
    snprintf(x->headers[x->n_headers].value, sizeof x->headers[0].value, "%s", value);
    x->n_headers++;
}

void hr_exchange_reply(hr_exchange *x, unsigned status, hr_buf *body) {
    HR_ASSERT(!x->replied);
    x->replied = true;
    x->status = body->failed ? 500 : status;
    if (body->failed)
        hr_buf_free(body);
    x->reply = *body;
    *body = (hr_buf){0};
}

void hr_exchange_defer(hr_exchange *x, const hr_exchange_async *async) {
    x->async = *async;
}

void hr_exchange_stream(hr_exchange *x, const hr_exchange_async *async) {
    HR_ASSERT(!x->replied);
    x->async = *async;
    x->replied = true;
    x->streamed = true;
    x->status = 200;
}
