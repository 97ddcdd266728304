/* HTTP to several engines at the same time: connections are kept, bodies are read from where their
 * bytes lie, every call has a deadline and its errors name the engine.
 *
 * A thin layer on libcurl. Proxies of the environment are not used: engines are near. One thread at
 * a time per client. */
#ifndef HR_TRANSPORT_HTTP_CLIENT_H
#define HR_TRANSPORT_HTTP_CLIENT_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

#define HR_HTTP_MAX_REPLY ((size_t)64 << 20)

typedef struct hr_http_client hr_http_client;

/* A request body that need not lie in one piece. read copies at most n bytes (n > 0) from offset on
 * and returns how many, at least one while offset < size; it may be asked for an offset again. */
typedef struct hr_http_body {
    uint64_t size;
    size_t (*read)(void *self, uint64_t offset, void *out, size_t n);
    void *self;
} hr_http_body;

typedef struct hr_http_call {
    const char *method; /* "GET", "POST", ... */
    const char *url;
    const char *content_type; /* NULL: application/json */
    const char *text;         /* a body in one piece; NULL: none, or */
    size_t text_len;
    hr_http_body body; /* this one, when its read is not NULL */
    bool once; /* on a new connection: a kept one that the engine has closed is otherwise replaced
                  and the call sent again, though the engine may have taken it */

    /* Filled by the run. HR_OK: an answer came, whatever it says. HR_ERR_TIMEOUT, HR_ERR_PEER,
     * HR_ERR_LIMIT (a reply over HR_HTTP_MAX_REPLY), HR_ERR_CANCELLED, HR_ERR_NO_MEMORY. */
    hr_status status;
    hr_error err;
    unsigned http_status;
    bool with_key; /* the client's went along */
    hr_buf reply;  /* the caller frees it, in every case */
} hr_http_call;

typedef struct hr_http_client_options {
    const char *api_key; /* sent as bearer token; NULL: none; copied */
    /* Called at least ten times a second while calls run; false ends them with HR_ERR_CANCELLED.
     * NULL: none. */
    bool (*tick)(void *ctx);
    void *tick_ctx;
} hr_http_client_options;

hr_status hr_http_client_create(const hr_http_client_options *options, hr_http_client **out,
                                hr_error *err);
void hr_http_client_destroy(hr_http_client *client); /* NULL is allowed */

/* What a caller does while its calls wait for answers. */
typedef struct hr_http_meanwhile {
    void (*run)(void *ctx);
    void *ctx;
} hr_http_meanwhile;

/* Makes all calls at the same time; returns when each has its answer or its error, after timeout_ms
 * at the latest. meanwhile (NULL: none) runs once, when all bodies have left and not all answers
 * are there; its time does not count, and it may call hr_http_client_ahead. */
void hr_http_client_run(hr_http_client *client, hr_http_call *calls, size_t n, uint64_t timeout_ms,
                        const hr_http_meanwhile *meanwhile);

/* Begins calls with bodies before their turn: all of each body but its last byte leaves while other
 * calls run, so that no engine acts on it. calls stay where they are until a run of the same array
 * ends them, or they are dropped: their connections are closed then. One batch at a time. */
void hr_http_client_ahead(hr_http_client *client, hr_http_call *calls, size_t n);
void hr_http_client_drop_ahead(hr_http_client *client);

/* "http://host:port" of what a person types: "host:port" gets "http://", a slash at the end goes.
 * *out is the caller's to free. ERR_INVALID for another scheme, a path, a missing host, characters
 * no URL has. Thread-safe. */
hr_status hr_http_base_url(const char *text, char **out, hr_error *err);

/* Appends the text percent-encoded for a query. */
void hr_query_append(hr_buf *out, const char *text);

#endif
