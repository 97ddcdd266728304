/* HTTP over libmicrohttpd: an exchange, and what its parts do for each other: http_request.c (a
 * request coming in), http_body.c (its body), http_exchange.c (what a handler sees and says),
 * http_reply.c (the answer going out), http_wait.c (exchanges that wait for theirs); http.c starts
 * and stops them.
 *
 * An exchange is one request and its answer. It lives on the I/O thread of its connection; only
 * wake and the watch of hang-ups reach it from other threads, and its lock covers exactly what they
 * share: suspended, woken and stopping. A suspended connection is never touched by the library, so
 * between suspend and resume the connection pointer is safe to use. Private to the parts. */
#ifndef HR_SERVER_HTTP_PARTS_H
#define HR_SERVER_HTTP_PARTS_H

#include "server/http.h"

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#define HR_HTTP_IDLE_SECONDS 120u
#define HR_HTTP_MAX_HEADERS 2
#define HR_HTTP_WATCH_STOP UINT64_MAX /* no exchange has this id */

struct hr_exchange {
    hr_http *http;
    atomic_uint refs;
    uint64_t id;
    hr_exchange *prev, *next; /* open exchanges, under http->lock */

    struct MHD_Connection *connection; /* its I/O thread only, or while suspended */
    const hr_route *route;             /* NULL: 404 or 405 */
    unsigned allowed;
    unsigned refused; /* 401 or 403: the caller may not */
    char *path;
    bool dispatched;

    hr_body body;
    size_t dropped;       /* body bytes read and not kept */
    unsigned body_status; /* not 0: the body was not taken, and body_error says why */
    hr_error body_error;

    pthread_mutex_t lock;
    bool suspended, woken;
    bool watched;
    hr_exchange_async async;

    bool replied, streamed;
    unsigned status;
    const char *content_type; /* NULL: JSON */
    hr_buf reply;
    struct {
        const char *name;
        char value[64];
    } headers[HR_HTTP_MAX_HEADERS];
    unsigned n_headers;

    hr_buf chunk; /* stream: bytes not handed to the library yet, from chunk_at */
    size_t chunk_at;
    bool chunk_last;
};

struct hr_http {
    hr_http_options options;
    hr_body_pool *bodies;
    struct MHD_Daemon *daemon;
    atomic_bool quiesced;
    int watch_fd, watch_stop_fd;
    pthread_t watcher;

    pthread_mutex_t lock;
    pthread_cond_t idle;
    hr_exchange *open;
    size_t n_dispatched; /* of them, those whose answer somebody waits for */
    uint64_t last_id;
    atomic_bool stopping;
};

/* ---- http_request.c: called by the library ---- */

enum MHD_Result hr_http_on_request(void *http, struct MHD_Connection *connection, const char *path,
                                   const char *method, const char *version, const char *data,
                                   size_t *size, void **state);
void hr_http_on_completed(void *http, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode how);

/* ---- http_body.c ---- */

/* Makes room for the whole body at once where its length is known. */
void hr_exchange_announce_body(hr_exchange *x);
/* The next bytes of the body: kept, or dropped when it is refused. */
enum MHD_Result hr_exchange_keep_body(hr_exchange *x, const char *data, size_t size);

/* ---- http_reply.c ---- */

/* Hands the answer, or the stream that it begins, to the library. */
enum MHD_Result hr_exchange_send(hr_exchange *x);

/* ---- http_wait.c ---- */

/* Suspends until the next wake. False, with the wake taken, when there is one already. */
bool hr_exchange_suspend(hr_exchange *x);
/* Whether there was a wake since the last call. */
bool hr_exchange_take_wake(hr_exchange *x);
/* Tells the watcher of this connection's socket; it stays watched until the exchange is completed.
 */
void hr_exchange_watch(hr_exchange *x);
void hr_exchange_unwatch(hr_exchange *x);
/* The watcher's thread; ends at HR_HTTP_WATCH_STOP. */
void *hr_http_watch_hangups(void *http);
/* The library aborts the process when it is stopped with a connection suspended. */
void hr_http_resume_all(hr_http *http);

#endif
