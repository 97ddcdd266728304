/* HTTP to several engines at the same time. */
#include "transport/http_client.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UPLOAD_BUFFER (512L << 10) /* stays in a cache between copying and sending */
#define CONNECT_TIMEOUT_MS 10000
#define POLL_MS 50
#define MAX_URL 512

struct hr_http_client {
    CURLM *multi;
    CURL **easy; /* kept from run to run */
    size_t n_easy;
    char *bearer;
    bool (*tick)(void *ctx);
    void *tick_ctx;
};

/* One call under way. */
typedef struct transfer {
    hr_http_call *call;
    uint64_t offset;
    bool done, too_long;
    struct curl_slist *headers;
    char error[CURL_ERROR_SIZE];
} transfer;

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
    for (size_t i = 0; i < client->n_easy; i++)
        curl_easy_cleanup(client->easy[i]);
    free(client->easy);
    if (client->multi != NULL)
        curl_multi_cleanup(client->multi);
    free(client->bearer);
    free(client);
}

/* ---- one transfer ---- */

static size_t on_read(char *out, size_t size, size_t n, void *ctx) {
    transfer *t = ctx;
    const hr_http_call *call = t->call;
    size_t room = size * n, take;
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

static bool add_headers(const hr_http_client *client, transfer *t, bool has_body) {
    char type[256];
    snprintf(type, sizeof type, "Content-Type: %s",
             t->call->content_type != NULL ? t->call->content_type : "application/json");
    /* Without "Expect:" libcurl waits for a 100 Continue before a large body. */
    return (!has_body || (add_header(t, type) && add_header(t, "Expect:"))) &&
           (client->bearer == NULL || add_header(t, client->bearer));
}

static void set_options(CURL *easy, transfer *t, uint64_t timeout_ms) {
    const hr_http_call *call = t->call;
    bool has_body = call->text != NULL || call->body.read != NULL;
    long timeout = timeout_ms < (uint64_t)LONG_MAX ? (long)timeout_ms : LONG_MAX;
    curl_easy_reset(easy); /* keeps connections, which are the multi handle's */
    curl_easy_setopt(easy, CURLOPT_URL, call->url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_PROXY, "");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, t->headers);
    curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, call->once ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, timeout);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS,
                     timeout < CONNECT_TIMEOUT_MS ? timeout : (long)CONNECT_TIMEOUT_MS);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, t->error);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, t);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_reply);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t);
    if (has_body) {
        uint64_t size = call->body.read != NULL ? call->body.size : call->text_len;
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)size);
        curl_easy_setopt(easy, CURLOPT_READFUNCTION, on_read);
        curl_easy_setopt(easy, CURLOPT_READDATA, t);
        curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, on_seek);
        curl_easy_setopt(easy, CURLOPT_SEEKDATA, t);
        curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE,
                         size < (uint64_t)UPLOAD_BUFFER ? 65536L : UPLOAD_BUFFER);
    }
    if (!has_body || strcmp(call->method, "POST") != 0)
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, call->method);
}

static void fail_transfer(transfer *t, hr_status status, const char *why) {
    t->done = true;
    t->call->status =
        hr_fail(&t->call->err, status, "%s %.300s: %s", t->call->method, t->call->url, why);
}

static void finish(CURL *easy, transfer *t, CURLcode code, uint64_t timeout_ms) {
    long http_status = 0;
    char why[CURL_ERROR_SIZE + 64];
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &http_status);
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
        snprintf(why, sizeof why, "no answer within %llu ms (%s)", (unsigned long long)timeout_ms,
                 t->error[0] != '\0' ? t->error : curl_easy_strerror(code));
        fail_transfer(t, HR_ERR_TIMEOUT, why);
    } else {
        fail_transfer(t, code == CURLE_OUT_OF_MEMORY ? HR_ERR_NO_MEMORY : HR_ERR_PEER,
                      t->error[0] != '\0' ? t->error : curl_easy_strerror(code));
    }
}

/* ---- all of them ---- */

static bool have_handles(hr_http_client *client, size_t n) {
    if (n <= client->n_easy)
        return true;
    CURL **more = realloc(client->easy, n * sizeof *more);
    if (more == NULL)
        return false;
    client->easy = more;
    while (client->n_easy < n) {
        CURL *easy = curl_easy_init();
        if (easy == NULL)
            return false;
        client->easy[client->n_easy++] = easy;
    }
    curl_multi_setopt(client->multi, CURLMOPT_MAXCONNECTS, (long)(2 * n + 4));
    return true;
}

static void take_finished(hr_http_client *client, size_t *running, uint64_t timeout_ms) {
    CURLMsg *message;
    int left;
    while ((message = curl_multi_info_read(client->multi, &left)) != NULL) {
        if (message->msg != CURLMSG_DONE)
            continue;
        char *private = NULL;
        CURL *easy = message->easy_handle;
        CURLcode code = message->data.result;
        curl_easy_getinfo(easy, CURLINFO_PRIVATE, &private);
        finish(easy, (transfer *)(void *)private, code, timeout_ms);
        curl_multi_remove_handle(client->multi, easy);
        (*running)--;
    }
}

static void drive(hr_http_client *client, transfer *transfers, size_t n, uint64_t timeout_ms) {
    size_t running = 0;
    for (size_t i = 0; i < n; i++)
        running += !transfers[i].done;
    bool go_on = true;
    while (running > 0 && go_on) {
        int active = 0;
        if (curl_multi_perform(client->multi, &active) != CURLM_OK)
            break;
        take_finished(client, &running, timeout_ms);
        if (running > 0)
            curl_multi_poll(client->multi, NULL, 0, POLL_MS, NULL);
        go_on = client->tick == NULL || client->tick(client->tick_ctx);
    }
    for (size_t i = 0; i < n; i++) {
        if (transfers[i].done)
            continue;
        curl_multi_remove_handle(client->multi, client->easy[i]);
        fail_transfer(&transfers[i], go_on ? HR_ERR_INTERNAL : HR_ERR_CANCELLED,
                      go_on ? "the HTTP client failed" : "cancelled");
    }
}

void hr_http_client_run(hr_http_client *client, hr_http_call *calls, size_t n,
                        uint64_t timeout_ms) {
    transfer *transfers = calloc(n + 1, sizeof *transfers);
    bool ready = transfers != NULL && have_handles(client, n);
    for (size_t i = 0; i < n; i++) {
        calls[i].status = HR_OK;
        calls[i].http_status = 0;
        hr_buf_clear(&calls[i].reply);
        if (!ready) {
            calls[i].status = hr_fail(&calls[i].err, HR_ERR_NO_MEMORY, "%s %.300s: out of memory",
                                      calls[i].method, calls[i].url);
            continue;
        }
        transfer *t = &transfers[i];
        t->call = &calls[i];
        bool has_body = calls[i].text != NULL || calls[i].body.read != NULL;
        if (!add_headers(client, t, has_body)) {
            fail_transfer(t, HR_ERR_NO_MEMORY, "out of memory");
            continue;
        }
        set_options(client->easy[i], t, timeout_ms > 0 ? timeout_ms : 1);
        curl_multi_add_handle(client->multi, client->easy[i]);
    }
    if (ready)
        drive(client, transfers, n, timeout_ms);
    for (size_t i = 0; transfers != NULL && i < n; i++)
        curl_slist_free_all(transfers[i].headers);
    free(transfers);
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
