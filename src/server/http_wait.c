/* Exchanges that wait for their answers: suspended until a wake, and watched meanwhile, for the
 * library does not report a client that goes away then. */
#include "base/log.h"
#include "server/http_parts.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

void hr_exchange_wake(hr_exchange *x) {
    pthread_mutex_lock(&x->lock);
    x->woken = true;
    if (x->suspended) {
        x->suspended = false;
        MHD_resume_connection(x->connection);
    }
    pthread_mutex_unlock(&x->lock);
}

bool hr_exchange_suspend(hr_exchange *x) {
    hr_exchange_watch(x);
    pthread_mutex_lock(&x->lock);
    bool wait = !x->woken && !atomic_load(&x->http->stopping);
    if (wait) {
        x->suspended = true;
        MHD_suspend_connection(x->connection);
    }
    pthread_mutex_unlock(&x->lock);
    return wait;
}

bool hr_exchange_take_wake(hr_exchange *x) {
    pthread_mutex_lock(&x->lock);
    bool woken = x->woken;
    x->woken = false;
    pthread_mutex_unlock(&x->lock);
    return woken;
}

void hr_http_resume_all(hr_http *http) {
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

/* ---- clients that go away ---- */

void hr_exchange_watch(hr_exchange *x) {
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

void hr_exchange_unwatch(hr_exchange *x) {
    if (!x->watched)
        return;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != NULL)
        epoll_ctl(x->http->watch_fd, EPOLL_CTL_DEL, info->connect_fd, NULL);
    x->watched = false;
}

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

void *hr_http_watch_hangups(void *arg) {
    hr_http *http = arg;
    struct epoll_event events[64];
    for (;;) {
        int n = epoll_wait(http->watch_fd, events, 64, -1);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == HR_HTTP_WATCH_STOP)
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
