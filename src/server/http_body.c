/* A body on its way in: kept up to the limit of its route, read and dropped beyond it so that the
 * client gets to read the refusal. */
#include "server/http_parts.h"
#include "server/reply.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

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

void hr_exchange_announce_body(hr_exchange *x) {
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

enum MHD_Result hr_exchange_keep_body(hr_exchange *x, const char *data, size_t size) {
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
