/* HTTP over libmicrohttpd: few I/O threads serve many connections; a handler answers at once, or
 * later from any thread, or piece by piece.
 *
 * What libmicrohttpd leaves to its user is done here: a client that hangs up while its connection
 * is suspended is noticed (a thread watches those sockets), a body over the limit is drained before
 * it is refused so that the client gets to read the refusal, and at stop every suspended connection
 * is resumed first. */
#ifndef HR_SERVER_HTTP_H
#define HR_SERVER_HTTP_H

#include "base/buf.h"
#include "base/error.h"
#include "server/body.h"
#include "server/router.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hr_http hr_http;

typedef struct hr_http_options {
    const hr_route *routes; /* must outlive the server */
    size_t n_routes;
    void *app;         /* handed to every handler */
    hr_auth_keys keys; /* strings must outlive the server */
    unsigned threads;  /* I/O threads, at least 1 */
    size_t max_body; /* longer request bodies are answered 413, where a route says no other limit */
    size_t max_drain; /* bytes read and dropped beyond it before the connection is cut */
} hr_http_options;

/* Binds host and port without accepting yet, so that a taken port is known before a model is
 * loaded. port 0 takes any free one; *bound is what it became. The caller owns *fd until
 * hr_http_start has it. ERR_IO. */
hr_status hr_http_bind(const char *host, uint16_t port, int *fd, uint16_t *bound, hr_error *err);

/* Starts listening on a socket of hr_http_bind and serving; takes the socket over on success. */
hr_status hr_http_start(const hr_http_options *options, int fd, hr_http **out, hr_error *err);

/* Accepts no further connections; the open ones are served on. */
void hr_http_quiesce(hr_http *http);

/* Quiesces, waits at most wait_ms for open exchanges, answers what is left with 503 and frees
 * everything. Whatever a handler deferred to must not wake exchanges any more, except those it
 * still holds references to. */
void hr_http_stop(hr_http *http, uint64_t wait_ms);

/* ---- inside a handler ---- */

const char *hr_exchange_path(const hr_exchange *exchange);
/* The whole body, NUL-terminated; "" when there is none. Valid as long as the exchange. */
const char *hr_exchange_body(const hr_exchange *exchange, size_t *len);
/* The same, out of the exchange, which has none afterwards: for who keeps it longer, or frees it
 * sooner. */
hr_body hr_exchange_take_body(hr_exchange *exchange);

/* Of the query string, "" for a key without a value; and a header of the request. NULL when absent.
 * Inside the handler only. */
const char *hr_exchange_query(const hr_exchange *exchange, const char *key);
/* Every key of the query string with its value, in order; fn returns false to stop. False when one
 * of them has a NUL: it would be cut there, so it is not shown to fn, nor is what follows. */
bool hr_exchange_query_each(const hr_exchange *exchange,
                            bool (*fn)(void *ctx, const char *key, const char *value), void *ctx);
const char *hr_exchange_request_header(const hr_exchange *exchange, const char *name);

/* Answers; takes body's memory over (body is zeroed) and sends it as JSON when it is not empty. A
 * buffer that failed becomes a plain 500. Once per exchange, on its I/O thread: in the handler or
 * in ready. */
void hr_exchange_reply(hr_exchange *exchange, unsigned status, hr_buf *body);
/* Type of the reply that follows; a static string. JSON unless said otherwise. */
void hr_exchange_content_type(hr_exchange *exchange, const char *type);
/* A header for the reply that follows; name must be a static string, value is copied. At most two.
 */
void hr_exchange_header(hr_exchange *exchange, const char *name, const char *value);

typedef struct hr_exchange_async {
    void *ctx;
    /* Deferred: after a wake, on the I/O thread; must call hr_exchange_reply, or hr_exchange_stream
     * with the same ctx. NULL for a stream. */
    void (*ready)(hr_exchange *exchange, void *ctx);
    /* Stream: appends what there is to send to out (nothing is fine: it is asked again after the
     * next wake); true = that was the last of it. On the I/O thread. NULL when deferred. */
    bool (*next)(void *ctx, hr_buf *out);
    /* The client went away; what it asked for can be given up. Any thread, perhaps more than once.
     */
    void (*gone)(void *ctx);
    /* With the last reference to the exchange. Any thread. */
    void (*release)(void *ctx);
} hr_exchange_async;

/* The answer comes later: the handler returns after this, ready is called after hr_exchange_wake,
 * which may come before the handler has returned. */
void hr_exchange_defer(hr_exchange *exchange, const hr_exchange_async *async);

/* Answers 200 with an event stream whose bytes come from next. */
void hr_exchange_stream(hr_exchange *exchange, const hr_exchange_async *async);

/* There is something to send. Any thread, never blocks; the caller holds a reference. */
void hr_exchange_wake(hr_exchange *exchange);

/* Keep an exchange (and the ctx of its async) alive beyond its answer. Thread-safe. */
hr_exchange *hr_exchange_ref(hr_exchange *exchange);
void hr_exchange_unref(hr_exchange *exchange);

#endif
