/* HTTP over libmicrohttpd.
 *
 * An exchange is one request and its answer. It lives on the I/O thread of its connection; only
 * wake and the watch of hang-ups reach it from other threads, and its lock covers exactly what they
 * share: suspended, woken and stopping. A suspended connection is never touched by the library, so
 * between suspend and resume the connection pointer is safe to use. */
#include "server/http.h"

#include "base/log.h"
#include "server/reply.h"

#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTION_MEMORY (64 * 1024) /* headers, and the piece in which a body arrives */
#define CONNECTION_LIMIT 16384
#define IDLE_SECONDS 120u
#define RECEIVE_SECONDS 30u /* without a byte while a body is coming */
#define MAX_HEADERS 2
#define MAX_KEPT_BODIES ((size_t)1 << 30) /* of bytes, for the bodies to come */
#define WATCH_STOP UINT64_MAX

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
    } headers[MAX_HEADERS];
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

/* ---- exchanges ---- */

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
    HR_ASSERT(x->n_headers < MAX_HEADERS);
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

void hr_exchange_wake(hr_exchange *x) {
    pthread_mutex_lock(&x->lock);
    x->woken = true;
    if (x->suspended) {
        x->suspended = false;
        MHD_resume_connection(x->connection);
    }
    pthread_mutex_unlock(&x->lock);
}

/* Tells the watcher of this connection's socket; it stays watched until the exchange is completed.
 */
static void watch(hr_exchange *x) {
    if (x->watched)
        return;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = x->id};
    x->watched =
        info != NULL && epoll_ctl(x->http->watch_fd, EPOLL_CTL_ADD, info->connect_fd, &event) == 0;
    if (!x->watched)
        hr_log(HR_LOG_WARN, "cannot watch a connection for hang-up: %s", strerror(errno));
}

static void unwatch(hr_exchange *x) {
    if (!x->watched)
        return;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != NULL)
        epoll_ctl(x->http->watch_fd, EPOLL_CTL_DEL, info->connect_fd, NULL);
    x->watched = false;
}

/* Suspends until the next wake. False, with the wake taken, when there is one already. */
static bool suspend(hr_exchange *x) {
    watch(x);
    pthread_mutex_lock(&x->lock);
    bool wait = !x->woken && !atomic_load(&x->http->stopping);
    if (wait) {
        x->suspended = true;
        MHD_suspend_connection(x->connection);
    }
    pthread_mutex_unlock(&x->lock);
    return wait;
}

static bool take_wake(hr_exchange *x) {
    pthread_mutex_lock(&x->lock);
    bool woken = x->woken;
    x->woken = false;
    pthread_mutex_unlock(&x->lock);
    return woken;
}

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
        take_wake(x);
        x->chunk_last = x->async.next(x->async.ctx, &x->chunk);
        if (x->chunk.failed)
            return MHD_CONTENT_READER_END_WITH_ERROR;
        if (x->chunk.len > 0 || x->chunk_last)
            continue;
        if (suspend(x))
            return 0;
        if (atomic_load(&x->http->stopping))
            return MHD_CONTENT_READER_END_WITH_ERROR;
    }
}

static void unref_stream(void *cls) {
    hr_exchange_unref(cls);
}

static enum MHD_Result send_reply(hr_exchange *x) {
    struct MHD_Response *response;
    const char *type = x->content_type != NULL ? x->content_type : "application/json";
    if (x->streamed) {
        type = "text/event-stream; charset=utf-8";
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32 * 1024, read_stream,
                                                     hr_exchange_ref(x), unref_stream);
        if (response == NULL)
            hr_exchange_unref(x);
        else
            watch(x);
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

/* ---- requests coming in ---- */

/* The request is complete, or refused before it is. */
static void mark_dispatched(hr_exchange *x) {
    x->dispatched = true;
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, IDLE_SECONDS);
    pthread_mutex_lock(&x->http->lock);
    x->http->n_dispatched++;
    pthread_mutex_unlock(&x->http->lock);
}

/* Paths that watchdogs and scrapers call are open whatever they lead to; a path that leads nowhere
 * is as closed as most, so that nobody learns the routes without a key. */
static unsigned authorize(const hr_http *http, hr_method method, const hr_exchange *x,
                          const char *authorization) {
    hr_auth_level level = x->route != NULL ? x->route->level : HR_AUTH_NORMAL;
    if (method == HR_METHOD_OPTIONS || strncmp(x->path, "/health", 7) == 0 ||
        strncmp(x->path, "/metrics", 8) == 0)
        level = HR_AUTH_OPEN;
    return hr_auth_check(&http->options.keys, level, authorization);
}

static size_t max_body(const hr_exchange *x) {
    return x->route->max_body > 0 ? x->route->max_body : x->http->options.max_body;
}

/* The body will not be taken; what comes of it is read and dropped. */
static void refuse_body(hr_exchange *x) {
    bool short_of_memory = x->body_error.status == HR_ERR_NO_MEMORY;
    x->body_status = short_of_memory ? 500 : 413;
    hr_body_free(&x->body);
}

static void over_limit(hr_exchange *x) {
    hr_fail(&x->body_error, HR_ERR_LIMIT,
            "the request body is over the limit of %zu bytes of this route", max_body(x));
    refuse_body(x);
}

/* Makes room for the whole body at once where its length is known. */
static void announce_body(hr_exchange *x) {
    const char *length =
        MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
    if (x->route == NULL || x->refused != 0 || length == NULL)
        return;
    errno = 0;
    unsigned long long bytes = strtoull(length, NULL, 10);
    if (errno != 0 || bytes > max_body(x))
        over_limit(x);
    else if (bytes > 0 &&
             hr_body_announce(&x->body, x->http->bodies, (size_t)bytes, &x->body_error) != HR_OK)
        refuse_body(x);
}

static enum MHD_Result begin(hr_http *http, struct MHD_Connection *connection, const char *path,
                             const char *method, void **state) {
    hr_exchange *x = calloc(1, sizeof *x);
    char *copy = strdup(path);
    if (x == NULL || copy == NULL) {
        free(x);
        free(copy);
        return MHD_NO;
    }
    x->http = http;
    x->connection = connection;
    x->path = copy;
    atomic_init(&x->refs, 1);
    pthread_mutex_init(&x->lock, NULL);
    x->route = hr_router_find(http->options.routes, http->options.n_routes,
                              hr_method_from_name(method), path, &x->allowed);
    x->refused = authorize(http, hr_method_from_name(method), x,
                           hr_exchange_request_header(x, MHD_HTTP_HEADER_AUTHORIZATION));

    pthread_mutex_lock(&http->lock);
    x->id = ++http->last_id;
    x->next = http->open;
    if (x->next != NULL)
        x->next->prev = x;
    http->open = x;
    pthread_mutex_unlock(&http->lock);
    *state = x;

    /* The library may miss the hang-up of a client in the middle of its body; the timeout finds it.
     */
    MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, RECEIVE_SECONDS);

    announce_body(x);
    /* A client that asks first is told before it sends anything. */
    if (x->body_status == 0 ||
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Expect") == NULL)
        return MHD_YES;
    mark_dispatched(x);
    hr_reply_error(x, x->body_status, x->body_error.message);
    return send_reply(x);
}

/* Cuts off a client that goes on sending far beyond the limit. The library cannot answer in the
 * middle of a body, and nothing was sent on this connection yet, so the refusal is written to the
 * socket as it is. */
static enum MHD_Result cut_off(hr_exchange *x) {
    hr_buf body = {0}, refusal = {0};
    hr_error_body(413, "the request body is far over the limit of this server", &body);
    hr_buf_printf(
        &refusal,
        "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Type: application/json\r\n"
        "Content-Length: %zu\r\n\r\n%s",
        body.len, body.failed ? "" : body.data);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != NULL && !body.failed && !refusal.failed &&
        send(info->connect_fd, refusal.data, refusal.len, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
        shutdown(info->connect_fd, SHUT_WR);
    hr_buf_free(&body);
    hr_buf_free(&refusal);
    return MHD_NO;
}

static enum MHD_Result take_body(hr_exchange *x, const char *data, size_t size) {
    if (x->route != NULL && x->refused == 0 && x->body_status == 0) {
        if (size > max_body(x) - x->body.len)
            over_limit(x);
        else if (hr_body_append(&x->body, x->http->bodies, data, size, &x->body_error) != HR_OK)
            refuse_body(x);
        else
            return MHD_YES;
    }
    x->dropped += size;
    return x->dropped > x->http->options.max_drain ? cut_off(x) : MHD_YES;
}

/* What clients of SGLang look for. */
static void reply_refused(hr_exchange *x) {
    hr_buf body = {0};
    hr_buf_puts(&body,
                x->refused == 401 ? "{\"error\":\"Unauthorized\"}" : "{\"error\":\"Forbidden\"}");
    if (x->refused == 401)
        hr_exchange_header(x, "WWW-Authenticate", "Bearer");
    hr_exchange_reply(x, x->refused, &body);
}

static void dispatch(hr_exchange *x) {
    char text[64], message[256];
    mark_dispatched(x);
    if (x->refused != 0) {
        reply_refused(x);
    } else if (x->route == NULL && x->allowed == 0) {
        snprintf(message, sizeof message, "no such route: %.200s", x->path);
        hr_reply_error(x, 404, message);
    } else if (x->route == NULL) {
        hr_methods_format(x->allowed, text, sizeof text);
        snprintf(message, sizeof message, "%.100s takes %s", x->path, text);
        hr_exchange_header(x, "Allow", text);
        hr_reply_error(x, 405, message);
    } else if (x->body_status != 0) {
        hr_reply_error(x, x->body_status, x->body_error.message);
    } else {
        hr_body_complete(&x->body);
        x->route->handler(x, x->http->options.app);
    }
}

/* Sends the answer if there is one, else suspends until there is. */
static enum MHD_Result settle(hr_exchange *x) {
    if (!x->replied) {
        if (suspend(x))
            return MHD_YES;
        if (take_wake(x))
            x->async.ready(x, x->async.ctx);
        else
            hr_reply_error(x, 503, "the server is stopping");
    }
    return send_reply(x);
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *data,
                                  size_t *size, void **state) {
    (void)version;
    hr_exchange *x = *state;
    if (x == NULL)
        return begin(cls, connection, path, method, state);
    if (*size > 0) {
        size_t n = *size;
        *size = 0;
        return take_body(x, data, n);
    }
    if (!x->dispatched)
        dispatch(x);
    return settle(x);
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode how) {
    (void)connection;
    hr_http *http = cls;
    hr_exchange *x = *state;
    if (x == NULL)
        return;
    *state = NULL;
    unwatch(x);
    if (how != MHD_REQUEST_TERMINATED_COMPLETED_OK && x->async.gone != NULL)
        x->async.gone(x->async.ctx);
    pthread_mutex_lock(&http->lock);
    if (x->prev != NULL)
        x->prev->next = x->next;
    else
        http->open = x->next;
    if (x->next != NULL)
        x->next->prev = x->prev;
    if (x->dispatched && --http->n_dispatched == 0)
        pthread_cond_broadcast(&http->idle);
    pthread_mutex_unlock(&http->lock);
    hr_exchange_unref(x);
}

/* ---- clients that go away ---- */

static hr_exchange *find_open(hr_http *http, uint64_t id) {
    pthread_mutex_lock(&http->lock);
    hr_exchange *x = http->open;
    while (x != NULL && x->id != id)
        x = x->next;
    if (x != NULL)
        hr_exchange_ref(x);
    pthread_mutex_unlock(&http->lock);
    return x;
}

static void *watch_hangups(void *arg) {
    hr_http *http = arg;
    struct epoll_event events[64];
    for (;;) {
        int n = epoll_wait(http->watch_fd, events, 64, -1);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == WATCH_STOP)
                return NULL;
            hr_exchange *x = find_open(http, events[i].data.u64);
            if (x == NULL)
                continue;
            if (x->async.gone != NULL)
                x->async.gone(x->async.ctx);
            hr_exchange_unref(x);
        }
    }
}

/* ---- start and stop ---- */

__attribute__((format(printf, 2, 0))) static void log_library(void *cls, const char *fmt,
                                                              va_list args) {
    (void)cls;
    char line[512];
    vsnprintf(line, sizeof line, fmt, args);
    line[strcspn(line, "\n")] = '\0';
    hr_log(HR_LOG_DEBUG, "http: %s", line);
}

hr_status hr_http_bind(const char *host, uint16_t port, int *fd, uint16_t *bound, hr_error *err) {
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *list = NULL;
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0)
        return hr_fail(err, HR_ERR_IO, "cannot listen on host %s: %s", host, gai_strerror(rc));

    int sock = -1, why = 0;
    for (struct addrinfo *a = list; a != NULL && sock < 0; a = a->ai_next) {
        sock = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        int on = 1;
        if (sock >= 0 && setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(sock, a->ai_addr, a->ai_addrlen) == 0)
            break;
        why = errno;
        if (sock >= 0)
            close(sock);
        sock = -1;
    }
    freeaddrinfo(list);
    if (sock < 0 && why == EADDRINUSE)
        return hr_fail(err, HR_ERR_IO,
                       "port %u on %s is taken by another process; choose another with --port",
                       port, host);
    if (sock < 0)
        return hr_fail(err, HR_ERR_IO, "cannot bind %s port %u: %s", host, port, strerror(why));

    struct sockaddr_storage address;
    socklen_t len = sizeof address;
    char name[8] = "";
    if (getsockname(sock, (struct sockaddr *)&address, &len) != 0 ||
        getnameinfo((struct sockaddr *)&address, len, NULL, 0, name, sizeof name, NI_NUMERICSERV) !=
            0) {
        close(sock);
        return hr_fail(err, HR_ERR_IO, "cannot read the bound port: %s", strerror(errno));
    }
    *fd = sock;
    *bound = (uint16_t)strtoul(name, NULL, 10);
    return HR_OK;
}

/* Thousands of connections need as many descriptors; the soft limit is often 1024. */
static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static unsigned connection_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > CONNECTION_LIMIT + 256)
        return CONNECTION_LIMIT;
    return limit.rlim_cur > 512 ? (unsigned)limit.rlim_cur - 256 : 256;
}

hr_status hr_http_start(const hr_http_options *options, int fd, hr_http **out, hr_error *err) {
    hr_http *http = calloc(1, sizeof *http);
    if (http == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for the HTTP server");
    for (size_t i = 0; i < options->n_routes; i++)
        HR_ASSERT(options->routes[i].level != HR_AUTH_UNSET);
    http->options = *options;
    atomic_init(&http->quiesced, false);
    atomic_init(&http->stopping, false);
    pthread_mutex_init(&http->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&http->idle, &attr);
    pthread_condattr_destroy(&attr);
    raise_descriptor_limit();

    hr_status status = hr_body_pool_create(MAX_KEPT_BODIES, &http->bodies, err);
    http->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    http->watch_stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = WATCH_STOP};
    if (status != HR_OK)
        goto fail;
    status = HR_ERR_IO;
    if (http->watch_fd < 0 || http->watch_stop_fd < 0 ||
        epoll_ctl(http->watch_fd, EPOLL_CTL_ADD, http->watch_stop_fd, &stop) != 0 ||
        pthread_create(&http->watcher, NULL, watch_hangups, http) != 0) {
        hr_fail(err, status, "cannot start the HTTP server: %s", strerror(errno));
        goto fail;
    }
    if (listen(fd, 4096) != 0) {
        hr_fail(err, status, "cannot listen: %s (did another process take the port meanwhile?)",
                strerror(errno));
        goto fail_watcher;
    }
    /* poll, not epoll: in 0.9.75 the epoll loop now and then forgets a connection that has a
     * request waiting (seen with 2,000 open ones that ask at once), which then gets no answer. */
    unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    http->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, log_library, NULL,
        MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed, http,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY, MHD_OPTION_CONNECTION_LIMIT,
        connection_limit(), MHD_OPTION_CONNECTION_TIMEOUT, IDLE_SECONDS,
        MHD_OPTION_THREAD_POOL_SIZE, options->threads > 1 ? options->threads : 0, MHD_OPTION_END);
    if (http->daemon == NULL) {
        hr_fail(err, status, "cannot start the HTTP server: libmicrohttpd refused (%s)",
                strerror(errno));
        goto fail_watcher;
    }
    *out = http;
    return HR_OK;

fail_watcher:
    if (write(http->watch_stop_fd, &(uint64_t){1}, 8) == 8)
        pthread_join(http->watcher, NULL);
fail:
    if (http->watch_fd >= 0)
        close(http->watch_fd);
    if (http->watch_stop_fd >= 0)
        close(http->watch_stop_fd);
    hr_body_pool_unref(http->bodies);
    pthread_cond_destroy(&http->idle);
    pthread_mutex_destroy(&http->lock);
    free(http);
    return status;
}

void hr_http_quiesce(hr_http *http) {
    if (atomic_exchange(&http->quiesced, true))
        return;
    int fd = MHD_quiesce_daemon(http->daemon);
    if (fd >= 0)
        close(fd);
}

static void wait_until_idle(hr_http *http, uint64_t wait_ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(wait_ms / 1000);
    until.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_mutex_lock(&http->lock);
    while (http->n_dispatched > 0 && pthread_cond_timedwait(&http->idle, &http->lock, &until) == 0)
        ;
    pthread_mutex_unlock(&http->lock);
}

/* The library aborts the process when it is stopped with a connection suspended. */
static void resume_all(hr_http *http) {
    atomic_store(&http->stopping, true);
    pthread_mutex_lock(&http->lock);
    for (hr_exchange *x = http->open; x != NULL; x = x->next) {
        pthread_mutex_lock(&x->lock);
        if (x->suspended) {
            x->suspended = false;
            MHD_resume_connection(x->connection);
        }
        pthread_mutex_unlock(&x->lock);
    }
    pthread_mutex_unlock(&http->lock);
}

void hr_http_stop(hr_http *http, uint64_t wait_ms) {
    if (http == NULL)
        return;
    hr_http_quiesce(http);
    wait_until_idle(http, wait_ms);
    resume_all(http);
    wait_until_idle(http, 500);
    MHD_stop_daemon(http->daemon);
    if (write(http->watch_stop_fd, &(uint64_t){1}, 8) == 8)
        pthread_join(http->watcher, NULL);
    close(http->watch_fd);
    close(http->watch_stop_fd);
    hr_body_pool_unref(http->bodies);
    pthread_cond_destroy(&http->idle);
    pthread_mutex_destroy(&http->lock);
    free(http);
}
