/* HTTP to several engines at the same time. */
#include "transport/http_client.h"

#include "base/clock.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define UPLOAD_BUFFER (512L << 10)    /* stays in a cache between copying and sending */
#define LOCAL_SEND_BUFFER (128 << 10) /* under way to this machine; the kernel doubles it */
#define CONNECT_TIMEOUT_MS 10000
#define POLL_MS 50
#define MAX_URL 512

/* One call under way. */
typedef struct transfer {
    hr_http_call *call;
    CURL *easy; /* NULL: not in the multi handle */
    uint64_t offset, timeout_ms;
    bool held, waits; /* the end of its body must not leave; it is paused before it */
    bool done, too_long;
    struct curl_slist *headers;
    char error[CURL_ERROR_SIZE];
} transfer;

typedef struct batch {
    hr_http_call *calls;
    transfer *transfers;
    size_t n;
} batch;

struct hr_http_client {
    CURLM *multi;
    CURL **idle; /* handles of no transfer, kept for the next ones */
    size_t n_idle, n_easy, cap_idle;
    batch ahead; /* begun before its turn; n = 0: none */
    char *bearer;
    hr_clock clock;
    bool (*tick)(void *ctx);
    void *tick_ctx;
};

static void init_curl(void) {
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

hr_status hr_http_client_create(const hr_http_client_options *options, hr_http_client **out,
                                hr_error *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_curl);
    hr_http_client *client = calloc(1, sizeof *client);
    if (client == NULL)
        goto no_memory;
    client->clock = hr_clock_monotonic();
    client->tick = options->tick;
    client->tick_ctx = options->tick_ctx;
    client->multi = curl_multi_init();
    if (client->multi == NULL)
        goto no_memory;
    if (options->api_key != NULL &&
        asprintf(&client->bearer, "Authorization: Bearer %s", options->api_key) < 0) {
        client->bearer = NULL;
        goto no_memory;
    }
    *out = client;
    return HR_OK;
no_memory:
    hr_http_client_destroy(client);
    return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an HTTP client");
}

void hr_http_client_destroy(hr_http_client *client) {
    if (client == NULL)
        return;
    hr_http_client_drop_ahead(client);
    for (size_t i = 0; i < client->n_idle; i++)
        curl_easy_cleanup(client->idle[i]);
    free(client->idle);
    if (client->multi != NULL)
        curl_multi_cleanup(client->multi);
    free(client->bearer);
    free(client);
}

/* ---- one transfer ---- */

static bool has_body(const hr_http_call *call) {
    return call->text != NULL || call->body.read != NULL;
}

static uint64_t body_size(const hr_http_call *call) {
    return call->body.read != NULL ? call->body.size : call->text_len;
}

static size_t on_read(char *out, size_t size, size_t n, void *ctx) {
    transfer *t = ctx;
    const hr_http_call *call = t->call;
    size_t room = size * n, take;
    if (t->held) { /* without its last byte no engine acts on a body */
        uint64_t may_leave = body_size(call) - 1 - t->offset;
        t->waits = may_leave == 0;
        if (t->waits)
            return CURL_READFUNC_PAUSE;
        room = may_leave < room ? (size_t)may_leave : room;
    }
    if (call->body.read != NULL) {
        uint64_t left = call->body.size - t->offset;
        take = left < room ? (size_t)left : room;
        if (take > 0)
            take = call->body.read(call->body.self, t->offset, out, take);
    } else {
        take = call->text_len - (size_t)t->offset;
        take = take < room ? take : room;
        memcpy(out, call->text + t->offset, take);
    }
    t->offset += take;
    return take;
}

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, address, sizeof v4);
        return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 v6;
    if (address->sa_family != AF_INET6)
        return false;
    memcpy(&v6, address, sizeof v6);
    return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

/* To an engine on this machine little is under way at a time, so that it is read while it is still
 * in a cache, and the two take turns where they share cores. What a network has under way is its
 * own matter. */
static curl_socket_t open_socket(void *ctx, curlsocktype purpose, struct curl_sockaddr *address) {
    static const int under_way = LOCAL_SEND_BUFFER;
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    (void)ctx;
    (void)purpose;
    if (fd >= 0 && is_loopback(&address->addr))
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &under_way, sizeof under_way);
    return fd;
}

/* libcurl rewinds when a kept connection turns out to be closed. */
static int on_seek(void *ctx, curl_off_t offset, int origin) {
    transfer *t = ctx;
    if (origin != SEEK_SET || offset < 0)
        return CURL_SEEKFUNC_CANTSEEK;
    t->offset = (uint64_t)offset;
    return CURL_SEEKFUNC_OK;
}

static size_t on_reply(char *bytes, size_t size, size_t n, void *ctx) {
    transfer *t = ctx;
    if (size * n > HR_HTTP_MAX_REPLY - t->call->reply.len) {
        t->too_long = true;
        return 0;
    }
    hr_buf_append(&t->call->reply, bytes, size * n);
    return t->call->reply.failed ? 0 : size * n;
}

static bool add_header(transfer *t, const char *header) {
    struct curl_slist *more = curl_slist_append(t->headers, header);
    if (more != NULL)
        t->headers = more;
    return more != NULL;
}

static bool add_headers(const hr_http_client *client, transfer *t) {
    char type[256];
    snprintf(type, sizeof type, "Content-Type: %s",
             t->call->content_type != NULL ? t->call->content_type : "application/json");
    /* Without "Expect:" libcurl waits for a 100 Continue before a large body. */
    return (!has_body(t->call) || (add_header(t, type) && add_header(t, "Expect:"))) &&
           (client->bearer == NULL || add_header(t, client->bearer));
}

/* How long an answer may take is seen to in drive(): what a caller does meanwhile does not count.
 */
static void set_options(CURL *easy, transfer *t) {
    const hr_http_call *call = t->call;
    curl_easy_reset(easy); /* keeps connections, which are the multi handle's */
    curl_easy_setopt(easy, CURLOPT_URL, call->url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_PROXY, "");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, t->headers);
    curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, call->once ? 1L : 0L);
    curl_easy_setopt(
        easy, CURLOPT_CONNECTTIMEOUT_MS,
        (long)(t->timeout_ms < CONNECT_TIMEOUT_MS ? t->timeout_ms : CONNECT_TIMEOUT_MS));
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, t->error);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, t);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_reply);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t);
    if (has_body(call)) {
        uint64_t size = body_size(call);
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)size);
        curl_easy_setopt(easy, CURLOPT_READFUNCTION, on_read);
        curl_easy_setopt(easy, CURLOPT_READDATA, t);
        curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, on_seek);
        curl_easy_setopt(easy, CURLOPT_SEEKDATA, t);
        curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE,
                         size < (uint64_t)UPLOAD_BUFFER ? 65536L : UPLOAD_BUFFER);
    }
    if (!has_body(call) || strcmp(call->method, "POST") != 0)
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, call->method);
}

static void fail_transfer(transfer *t, hr_status status, const char *why) {
    t->done = true;
    t->call->status =
        hr_fail(&t->call->err, status, "%s %.300s: %s", t->call->method, t->call->url, why);
}

static void finish(transfer *t, CURLcode code) {
    long http_status = 0;
    char why[CURL_ERROR_SIZE + 64];
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &http_status);
    if (code == CURLE_OK) {
        t->done = true;
        t->call->status = HR_OK;
        t->call->http_status = (unsigned)http_status;
    } else if (t->too_long) {
        snprintf(why, sizeof why, "the reply is longer than %zu bytes", HR_HTTP_MAX_REPLY);
        fail_transfer(t, HR_ERR_LIMIT, why);
    } else if (t->call->reply.failed) {
        fail_transfer(t, HR_ERR_NO_MEMORY, "no memory for the reply");
    } else if (code == CURLE_OPERATION_TIMEDOUT) {
        fail_transfer(t, HR_ERR_TIMEOUT, t->error[0] != '\0' ? t->error : curl_easy_strerror(code));
    } else {
        fail_transfer(t, code == CURLE_OUT_OF_MEMORY ? HR_ERR_NO_MEMORY : HR_ERR_PEER,
                      t->error[0] != '\0' ? t->error : curl_easy_strerror(code));
    }
}

/* ---- handles ---- */

static CURL *take_easy(hr_http_client *client) {
    if (client->n_idle > 0)
        return client->idle[--client->n_idle];
    if (client->n_easy == client->cap_idle) { /* room for all of them to come back */
        size_t cap = 2 * client->cap_idle + 4;
        CURL **more = realloc(client->idle, cap * sizeof *more);
        if (more == NULL)
            return NULL;
        client->idle = more;
        client->cap_idle = cap;
    }
    CURL *easy = curl_easy_init();
    client->n_easy += easy != NULL;
    curl_multi_setopt(client->multi, CURLMOPT_MAXCONNECTS, (long)(2 * client->n_easy + 4));
    return easy;
}

/* Takes a transfer out of the multi handle; a connection in the middle of a call is closed. */
static void detach(hr_http_client *client, transfer *t) {
    if (t->easy == NULL)
        return;
    curl_multi_remove_handle(client->multi, t->easy);
    client->idle[client->n_idle++] = t->easy;
    t->easy = NULL;
}

/* ---- batches ---- */

static void begin_transfer(hr_http_client *client, transfer *t) {
    hr_http_call *call = t->call;
    call->status = HR_OK;
    call->http_status = 0;
    call->with_key = client->bearer != NULL;
    hr_buf_clear(&call->reply);
    t->done = t->too_long = t->waits = false;
    t->offset = 0;
    t->error[0] = '\0';
    t->easy = take_easy(client);
    if (t->easy == NULL || (t->headers == NULL && !add_headers(client, t))) {
        detach(client, t);
        fail_transfer(t, HR_ERR_NO_MEMORY, "out of memory");
        return;
    }
    set_options(t->easy, t);
    curl_multi_add_handle(client->multi, t->easy);
}

/* transfers NULL: no memory, and the calls say so. */
static batch begin_batch(hr_http_client *client, hr_http_call *calls, size_t n, bool held,
                         uint64_t timeout_ms) {
    batch b = {calls, calloc(n + 1, sizeof *b.transfers), n};
    for (size_t i = 0; i < n; i++) {
        if (b.transfers == NULL) {
            hr_buf_clear(&calls[i].reply);
            calls[i].http_status = 0;
            calls[i].status = hr_fail(&calls[i].err, HR_ERR_NO_MEMORY, "%s %.300s: out of memory",
                                      calls[i].method, calls[i].url);
            continue;
        }
        b.transfers[i] = (transfer){.call = &calls[i], .held = held, .timeout_ms = timeout_ms};
        begin_transfer(client, &b.transfers[i]);
    }
    return b;
}

static void end_batch(hr_http_client *client, batch *b) {
    for (size_t i = 0; b->transfers != NULL && i < b->n; i++) {
        detach(client, &b->transfers[i]);
        curl_slist_free_all(b->transfers[i].headers);
    }
    free(b->transfers);
    *b = (batch){0};
}

/* Lets go what was begun ahead of its turn; what failed meanwhile was not answered, and no engine
 * has it whole, so it is begun again. */
static batch release_ahead(hr_http_client *client, uint64_t timeout_ms) {
    batch b = client->ahead;
    client->ahead = (batch){0};
    for (size_t i = 0; i < b.n; i++) {
        transfer *t = &b.transfers[i];
        t->held = false;
        t->timeout_ms = timeout_ms;
        if (t->done && t->call->status != HR_OK)
            begin_transfer(client, t);
        else if (!t->done && t->waits)
            curl_easy_pause(t->easy, CURLPAUSE_CONT);
    }
    return b;
}

void hr_http_client_ahead(hr_http_client *client, hr_http_call *calls, size_t n) {
    hr_http_client_drop_ahead(client);
    batch b = begin_batch(client, calls, n, true, CONNECT_TIMEOUT_MS);
    if (b.transfers != NULL)
        client->ahead = b;
}

void hr_http_client_drop_ahead(hr_http_client *client) {
    end_batch(client, &client->ahead);
}

/* ---- all of them ---- */

static void take_finished(hr_http_client *client) {
    CURLMsg *message;
    int left;
    while ((message = curl_multi_info_read(client->multi, &left)) != NULL) {
        if (message->msg != CURLMSG_DONE)
            continue;
        char *private = NULL;
        CURLcode code = message->data.result;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &private);
        transfer *t = (transfer *)(void *)private;
        finish(t, code);
        detach(client, t);
    }
}

/* How many have no answer yet; *sent: the bodies of all have left. */
static size_t count_running(const batch *b, bool *sent) {
    size_t running = 0;
    *sent = true;
    for (size_t i = 0; i < b->n; i++) {
        const transfer *t = &b->transfers[i];
        running += !t->done;
        *sent = *sent && (t->done || t->offset == body_size(t->call));
    }
    return running;
}

static void give_up(hr_http_client *client, batch *b, hr_status status, const char *why) {
    for (size_t i = 0; i < b->n; i++) {
        if (b->transfers[i].done)
            continue;
        detach(client, &b->transfers[i]);
        fail_transfer(&b->transfers[i], status, why);
    }
}

static void drive(hr_http_client *client, batch *b, uint64_t timeout_ms,
                  const hr_http_meanwhile *meanwhile) {
    char late[64];
    hr_deadline deadline = hr_deadline_after_ms(&client->clock, timeout_ms);
    snprintf(late, sizeof late, "no answer within %llu ms", (unsigned long long)timeout_ms);
    for (;;) {
        int active = 0;
        bool sent;
        if (curl_multi_perform(client->multi, &active) != CURLM_OK)
            return give_up(client, b, HR_ERR_INTERNAL, "the HTTP client failed");
        take_finished(client);
        if (count_running(b, &sent) == 0)
            return;
        uint64_t now = hr_now_ns(&client->clock);
        if (now >= deadline)
            return give_up(client, b, HR_ERR_TIMEOUT, late);
        if (sent && meanwhile != NULL) {
            meanwhile->run(meanwhile->ctx);
            deadline += hr_now_ns(&client->clock) - now;
            meanwhile = NULL;
            continue;
        }
        uint64_t left_ms = (deadline - now) / 1000000 + 1;
        curl_multi_poll(client->multi, NULL, 0, left_ms < POLL_MS ? (int)left_ms : POLL_MS, NULL);
        if (client->tick != NULL && !client->tick(client->tick_ctx))
            return give_up(client, b, HR_ERR_CANCELLED, "cancelled");
    }
}

void hr_http_client_run(hr_http_client *client, hr_http_call *calls, size_t n, uint64_t timeout_ms,
                        const hr_http_meanwhile *meanwhile) {
    uint64_t timeout = timeout_ms > 0 ? timeout_ms : 1;
    bool begun = client->ahead.n > 0 && client->ahead.calls == calls;
    batch b =
        begun ? release_ahead(client, timeout) : begin_batch(client, calls, n, false, timeout);
    if (b.transfers != NULL)
        drive(client, &b, timeout, meanwhile);
    end_batch(client, &b);
}

/* ---- URLs ---- */

static hr_status bad_url(hr_error *err, const char *text, const char *why) {
    return hr_fail(err, HR_ERR_INVALID,
                   "engine URL \"%.200s\" %s; wanted \"http://host:port\" or \"https://host:port\"",
                   text, why);
}

hr_status hr_http_base_url(const char *text, char **out, hr_error *err) {
    size_t len = strlen(text);
    const char *host = text, *scheme = "http://";
    if (len > MAX_URL)
        return bad_url(err, text, "is too long");
    for (const char *c = text; *c != '\0'; c++) {
        if (*c <= ' ' || *c > '~' || strchr("\"<>\\^`{|}?#@", *c) != NULL)
            return bad_url(err, text, "has a character that does not belong there");
    }
    if (strncmp(text, "https://", 8) == 0) {
        scheme = "https://";
        host = text + 8;
    } else if (strncmp(text, "http://", 7) == 0) {
        host = text + 7;
    } else if (strstr(text, "://") != NULL) {
        return bad_url(err, text, "has another scheme");
    }
    while (len > 0 && text + len > host && text[len - 1] == '/')
        len--;
    size_t host_len = (size_t)(text + len - host);
    if (host_len == 0 || host[0] == ':')
        return bad_url(err, text, "has no host");
    if (memchr(host, '/', host_len) != NULL)
        return bad_url(err, text, "has a path");
    if (asprintf(out, "%s%.*s", scheme, (int)host_len, host) < 0)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an engine URL");
    return HR_OK;
}

void hr_query_append(hr_buf *out, const char *text) {
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~";
    for (const char *c = text; *c != '\0'; c++) {
        if (strchr(plain, *c) != NULL)
            hr_buf_putc(out, *c);
        else
            hr_buf_printf(out, "%%%02X", (unsigned)(unsigned char)*c);
    }
}
