/* The HTTP server's start and stop. */
#include "server/http.h"

#include "base/cond.h"
#include "base/log.h"
#include "server/http_parts.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTION_MEMORY (64 * 1024) /* headers, and the piece in which a body arrives */
#define CONNECTION_LIMIT 16384
#define MAX_KEPT_BODIES ((size_t)1 << 30) /* of bytes, for the bodies to come */

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
    hr_cond_init(&http->idle);
    raise_descriptor_limit();

    hr_status status = hr_body_pool_create(MAX_KEPT_BODIES, &http->bodies, err);
    http->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    http->watch_stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = HR_HTTP_WATCH_STOP};
    if (status != HR_OK)
        goto fail;
    status = HR_ERR_IO;
    if (http->watch_fd < 0 || http->watch_stop_fd < 0 ||
        epoll_ctl(http->watch_fd, EPOLL_CTL_ADD, http->watch_stop_fd, &stop) != 0 ||
        pthread_create(&http->watcher, NULL, hr_http_watch_hangups, http) != 0) {
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
        flags, 0, NULL, NULL, hr_http_on_request, http, MHD_OPTION_EXTERNAL_LOGGER, log_library,
        NULL, MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_NOTIFY_COMPLETED,
        hr_http_on_completed, http, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY,
        MHD_OPTION_CONNECTION_LIMIT, connection_limit(), MHD_OPTION_CONNECTION_TIMEOUT,
        HR_HTTP_IDLE_SECONDS, MHD_OPTION_THREAD_POOL_SIZE,
        options->threads > 1 ? options->threads : 0, MHD_OPTION_END);
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
    struct timespec until = hr_cond_deadline(wait_ms);
    pthread_mutex_lock(&http->lock);
    while (http->n_dispatched > 0 && pthread_cond_timedwait(&http->idle, &http->lock, &until) == 0)
        ;
    pthread_mutex_unlock(&http->lock);
}

void hr_http_stop(hr_http *http, uint64_t wait_ms) {
    if (http == NULL)
        return;
    hr_http_quiesce(http);
    wait_until_idle(http, wait_ms);
    hr_http_resume_all(http);
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
