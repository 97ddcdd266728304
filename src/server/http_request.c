/* A request on its way in: its route, who may call it, and the call. */
#include "server/http_parts.h"
#include "server/reply.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define RECEIVE_SECONDS 30u /* without a byte while a body is coming */

/* The request is complete, or refused before it is. */
static void mark_dispatched(hr_exchange *x) {
    x->dispatched = true;
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, HR_HTTP_IDLE_SECONDS);
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

/* What says where the body ends. */
typedef struct framing {
    unsigned lengths, encodings;
    bool unknown;  /* an encoding that is not chunked */
    bool odd_name; /* of a header, which could be one of these to others */
} framing;

static bool begins_with(const char *name, const char *beginning) {
    return strncasecmp(name, beginning, strlen(beginning)) == 0;
}

/* The library takes a space before the colon for a part of the name, and the rest of a folded line
 * too: such a Content-Length is none to it. */
static bool is_odd_name(const char *name) {
    static const char token[] = "!#$%&'*+-.^_`|~0123456789"
                                "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    return name[strspn(name, token)] != '\0' || begins_with(name, MHD_HTTP_HEADER_CONTENT_LENGTH) ||
           begins_with(name, MHD_HTTP_HEADER_TRANSFER_ENCODING);
}

static enum MHD_Result count_framing(void *cls, enum MHD_ValueKind kind, const char *key,
                                     const char *value) {
    (void)kind;
    framing *f = cls;
    if (strcasecmp(key, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0) {
        f->lengths++;
    } else if (strcasecmp(key, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0) {
        f->encodings++;
        f->unknown |= value == NULL || strcasecmp(value, "chunked") != 0;
    } else {
        f->odd_name |= is_odd_name(key);
    }
    return MHD_YES;
}

/* The library believes the first of several headers, a proxy before it perhaps another: one
 * client's body would be read as another's request. NULL: its end is clear. */
static const char *unclear_framing(struct MHD_Connection *connection) {
    framing f = {0};
    MHD_get_connection_values(connection, MHD_HEADER_KIND, count_framing, &f);
    if (f.lengths + f.encodings > 1)
        return "the request has more than one Content-Length or Transfer-Encoding: wanted one, so "
               "that it is clear where the body ends";
    if (f.odd_name)
        return "a header's name has a space or a folded line in it, or begins as Content-Length or "
               "Transfer-Encoding do: wanted neither, so that it is clear where the body ends";
    if (f.unknown)
        return "Transfer-Encoding: wanted chunked, and nothing else";
    return NULL;
}

/* Before anything of its body has come. */
static enum MHD_Result refuse_early(hr_exchange *x, unsigned status, const char *message) {
    mark_dispatched(x);
    hr_reply_error(x, status, message);
    return hr_exchange_send(x);
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

    const char *unclear = unclear_framing(connection);
    if (unclear != NULL) {
        hr_exchange_header(x, "Connection", "close");
        return refuse_early(x, 400, unclear);
    }
    hr_exchange_announce_body(x);
    /* A client that asks first is told before it sends anything. */
    if (x->body_status == 0 ||
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Expect") == NULL)
        return MHD_YES;
    return refuse_early(x, x->body_status, x->body_error.message);
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
        if (hr_exchange_suspend(x))
            return MHD_YES;
        if (hr_exchange_take_wake(x))
            x->async.ready(x, x->async.ctx);
        else
            hr_reply_error(x, 503, "the server is stopping");
    }
    return hr_exchange_send(x);
}

enum MHD_Result hr_http_on_request(void *cls, struct MHD_Connection *connection, const char *path,
                                   const char *method, const char *version, const char *data,
                                   size_t *size, void **state) {
    (void)version;
    hr_exchange *x = *state;
    if (x == NULL)
        return begin(cls, connection, path, method, state);
    if (*size > 0) {
        size_t n = *size;
        *size = 0;
        return hr_exchange_keep_body(x, data, n);
    }
    if (!x->dispatched)
        dispatch(x);
    return settle(x);
}

void hr_http_on_completed(void *cls, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode how) {
    (void)connection;
    hr_http *http = cls;
    hr_exchange *x = *state;
    if (x == NULL)
        return;
    *state = NULL;
    hr_exchange_unwatch(x);
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
