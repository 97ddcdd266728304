#include "fake_http.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct connection {
    fake_http *fake;
    int fd;
} connection;

/* Up to the blank line; false when the peer has gone. */
static bool read_head(int fd, hr_buf *head, hr_buf *rest) {
    char chunk[65536];
    for (;;) {
        char *end = head->len > 0 ? strstr(head->data, "\r\n\r\n") : NULL;
        if (end != NULL) {
            size_t len = (size_t)(end + 4 - head->data);
            hr_buf_append(rest, head->data + len, head->len - len);
            head->data[len] = '\0';
            head->len = len;
            return true;
        }
        ssize_t n = recv(fd, chunk, sizeof chunk, 0);
        if (n <= 0)
            return false;
        hr_buf_append(head, chunk, (size_t)n);
    }
}

static unsigned long long body_size(const hr_buf *head) {
    const char *at = strcasestr(head->data, "\r\ncontent-length:");
    return at != NULL ? strtoull(at + 17, NULL, 10) : 0;
}

static bool read_body(fake_http *fake, int fd, unsigned long long size, hr_buf *body) {
    static _Thread_local char chunk[1 << 20];
    unsigned long long got = body->len;
    while (got < size) {
        ssize_t n = recv(fd, chunk, sizeof chunk, 0);
        if (n <= 0)
            return false;
        got += (unsigned long long)n;
        if (fake->keep_body)
            hr_buf_append(body, chunk, (size_t)n);
    }
    atomic_store(&fake->body_bytes, got);
    return true;
}

static bool send_all(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        bytes += sent;
        n -= (size_t)sent;
    }
    return true;
}

static void answer(int fd, unsigned status, const char *body, size_t promised) {
    hr_buf reply = {0};
    hr_buf_printf(&reply, "HTTP/1.1 %u X\r\nContent-Length: %zu\r\n\r\n%s", status, promised, body);
    send_all(fd, reply.data, reply.len);
    hr_buf_free(&reply);
}

static void send_endless(fake_http *fake, int fd) {
    static const char chunk[65536];
    const char head[] = "HTTP/1.1 200 X\r\n\r\n";
    send_all(fd, head, sizeof head - 1);
    while (!atomic_load(&fake->stopping) && send_all(fd, chunk, sizeof chunk))
        ;
}

/* False: close. */
static bool serve(fake_http *fake, int fd) {
    hr_buf head = {0}, body = {0};
    bool keep = read_head(fd, &head, &body);
    int way = atomic_load(&fake->way);
    const char *text = fake->reply != NULL ? fake->reply : "{\"success\": true}";
    if (keep && way == FAKE_REFUSE_EARLY) {
        answer(fd, 400, "{\"success\": false, \"message\": \"too early\"}", 42);
        keep = false;
    }
    keep = keep && read_body(fake, fd, body_size(&head), &body);
    if (keep) {
        atomic_fetch_add(&fake->requests, 1);
        pthread_mutex_lock(&fake->lock);
        hr_buf_free(&fake->head);
        hr_buf_free(&fake->body);
        fake->head = head;
        fake->body = body;
        head = body = (hr_buf){0};
        pthread_mutex_unlock(&fake->lock);
        unsigned status = fake->status != 0 ? fake->status : 200;
        if (way == FAKE_ANSWER || way == FAKE_CLOSE_AFTER)
            answer(fd, status, text, strlen(text));
        else if (way == FAKE_CUT_REPLY)
            answer(fd, status, text, strlen(text) + 100);
        else if (way == FAKE_ENDLESS)
            send_endless(fake, fd);
        while (way == FAKE_SILENT && !atomic_load(&fake->stopping))
            usleep(1000);
        keep = way == FAKE_ANSWER;
    }
    hr_buf_free(&head);
    hr_buf_free(&body);
    return keep;
}

static void *run_connection(void *arg) {
    connection c = *(connection *)arg;
    free(arg);
    struct timeval patience = {.tv_usec = 100000};
    setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    while (serve(c.fake, c.fd))
        ;
    shutdown(c.fd, SHUT_RDWR);
    close(c.fd);
    return NULL;
}

static void *run_server(void *arg) {
    fake_http *fake = arg;
    for (;;) {
        int fd = accept(fake->listener, NULL, NULL);
        if (fd < 0)
            return NULL;
        connection *c = malloc(sizeof *c);
        *c = (connection){fake, fd};
        pthread_create(&fake->connections[atomic_fetch_add(&fake->n_connections, 1) % 64], NULL,
                       run_connection, c);
    }
}

void fake_http_start(fake_http *fake) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    *fake = (fake_http){.listener = socket(AF_INET, SOCK_STREAM, 0)};
    pthread_mutex_init(&fake->lock, NULL);
    if (bind(fake->listener, (struct sockaddr *)&address, size) != 0 ||
        listen(fake->listener, 64) != 0 ||
        getsockname(fake->listener, (struct sockaddr *)&address, &size) != 0)
        abort();
    fake->port = ntohs(address.sin_port);
    snprintf(fake->url, sizeof fake->url, "http://127.0.0.1:%u", fake->port);
    pthread_create(&fake->thread, NULL, run_server, fake);
}

/* Clients have closed their connections, or do so now. */
void fake_http_stop(fake_http *fake) {
    atomic_store(&fake->stopping, true);
    shutdown(fake->listener, SHUT_RDWR);
    close(fake->listener);
    pthread_join(fake->thread, NULL);
    for (unsigned i = 0; i < atomic_load(&fake->n_connections) && i < 64; i++)
        pthread_join(fake->connections[i], NULL);
    hr_buf_free(&fake->head);
    hr_buf_free(&fake->body);
    pthread_mutex_destroy(&fake->lock);
}
