/* The HTTP layer alone, with small handlers and plain sockets for clients: late answers, streams,
 * clients that vanish, bodies over the limit, and stopping while somebody waits. */
#include "server/http.h"
#include "server/reply.h"
#include "server/router.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_BODY 100000
#define MAX_DRAIN 400000
#define LARGE_BODY ((size_t)5 << 20)

/* ---- a server whose handlers tell the test what happens ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    hr_exchange *held; /* a reference to the last exchange of /later or /stream */
    int gone, released, arrived;
    int pieces; /* /stream: how many there are to send */
    bool ended; /* /stream: and no more will come */
    int sent;
} seen = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void reply_text(hr_exchange *x, const char *text) {
    hr_buf body = {0};
    hr_buf_puts(&body, text);
    hr_exchange_reply(x, 200, &body);
}

static void echo(hr_exchange *x, void *app) {
    (void)app;
    size_t len;
    const char *body = hr_exchange_body(x, &len);
    reply_text(x, len > 0 ? body : "nothing");
}

static bool list_pair(void *ctx, const char *key, const char *value) {
    hr_buf_printf(ctx, " %s=%s", key, value);
    return true;
}

/* Takes the body out of the exchange; answers with its length, last byte and the query. */
static void take(hr_exchange *x, void *app) {
    (void)app;
    size_t left;
    hr_buf text = {0};
    hr_body body = hr_exchange_take_body(x);
    (void)hr_exchange_body(x, &left);
    hr_buf_printf(&text, "%zu %zu %c", body.len, left,
                  body.len > 0 ? body.data[body.len - 1] : '-');
    if (!hr_exchange_query_each(x, list_pair, &text))
        hr_buf_printf(&text, " and a NUL");
    hr_body_free(&body);
    hr_exchange_reply(x, 200, &text);
}

static void late_answer(hr_exchange *x, void *ctx) {
    (void)ctx;
    reply_text(x, "late");
}

static void count(int *counter) {
    pthread_mutex_lock(&seen.lock);
    (*counter)++;
    pthread_cond_broadcast(&seen.changed);
    pthread_mutex_unlock(&seen.lock);
}

static void on_gone(void *ctx) {
    (void)ctx;
    count(&seen.gone);
}

static void on_release(void *ctx) {
    (void)ctx;
    count(&seen.released);
}

static const hr_exchange_async late = {
    .ready = late_answer, .gone = on_gone, .release = on_release};

static void hold(hr_exchange *x) {
    pthread_mutex_lock(&seen.lock);
    seen.held = hr_exchange_ref(x);
    seen.arrived++;
    pthread_cond_broadcast(&seen.changed);
    pthread_mutex_unlock(&seen.lock);
}

static void later(hr_exchange *x, void *app) {
    (void)app;
    hr_exchange_defer(x, &late);
    hold(x);
}

static void at_once(hr_exchange *x, void *app) {
    (void)app;
    hr_exchange_defer(x, &late);
    hr_exchange_wake(x); /* before the handler has returned */
}

static void *wake_soon(void *arg) {
    usleep(1000);
    hr_exchange_wake(arg);
    hr_exchange_unref(arg);
    return NULL;
}

static void soon(hr_exchange *x, void *app) {
    (void)app;
    pthread_t thread;
    hr_exchange_defer(x, &late);
    if (pthread_create(&thread, NULL, wake_soon, hr_exchange_ref(x)) == 0)
        pthread_detach(thread);
}

static bool next_piece(void *ctx, hr_buf *out) {
    (void)ctx;
    pthread_mutex_lock(&seen.lock);
    for (; seen.sent < seen.pieces; seen.sent++)
        hr_buf_printf(out, "data: %d\n\n", seen.sent);
    bool end = seen.ended;
    pthread_mutex_unlock(&seen.lock);
    return end;
}

static void stream(hr_exchange *x, void *app) {
    (void)app;
    static const hr_exchange_async async = {
        .next = next_piece, .gone = on_gone, .release = on_release};
    hr_exchange_stream(x, &async);
    hold(x);
}

static const hr_route routes[] = {
    {HR_METHOD_GET | HR_METHOD_POST, "/echo", echo, HR_AUTH_OPEN},
    {HR_METHOD_POST, "/take", take, HR_AUTH_OPEN, LARGE_BODY},
    {HR_METHOD_POST, "/later", later, HR_AUTH_OPEN},
    {HR_METHOD_POST, "/at_once", at_once, HR_AUTH_OPEN},
    {HR_METHOD_POST, "/soon", soon, HR_AUTH_OPEN},
    {HR_METHOD_POST, "/stream", stream, HR_AUTH_OPEN},
};

static hr_http *http;
static uint16_t port;

static int start(void **state) {
    (void)state;
    hr_http_options options = {.routes = routes,
                               .n_routes = sizeof routes / sizeof routes[0],
                               .threads = 2,
                               .max_body = MAX_BODY,
                               .max_drain = MAX_DRAIN};
    hr_error err;
    int fd = -1;
    seen.held = NULL;
    seen.gone = seen.released = seen.arrived = seen.pieces = seen.sent = 0;
    seen.ended = false;
    if (hr_http_bind("127.0.0.1", 0, &fd, &port, &err) == HR_OK &&
        hr_http_start(&options, fd, &http, &err) == HR_OK)
        return 0;
    print_error("%s\n", err.message);
    return 1;
}

static int stop(void **state) {
    (void)state;
    hr_http_stop(http, 2000);
    http = NULL;
    return 0;
}

/* True when *counter reached n within some seconds. */
static bool wait_for(const int *counter, int n) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    pthread_mutex_lock(&seen.lock);
    while (*counter < n && pthread_cond_timedwait(&seen.changed, &seen.lock, &until) == 0)
        ;
    bool reached = *counter >= n;
    pthread_mutex_unlock(&seen.lock);
    return reached;
}

static void wake_held(void) {
    hr_exchange_wake(seen.held);
    hr_exchange_unref(seen.held);
    seen.held = NULL;
}

/* ---- clients ---- */

static int connect_client(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct timeval limit = {.tv_sec = 20};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

/* False when the server cut the connection. */
static bool send_all(int fd, const char *bytes, size_t len) {
    while (len > 0) {
        ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        bytes += n;
        len -= (size_t)n;
    }
    return true;
}

static int send_request(const char *method, const char *path, const char *body, size_t len) {
    char head[256];
    int fd = connect_client();
    int n =
        snprintf(head, sizeof head,
                 "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
                 method, path, len);
    assert_true(send_all(fd, head, (size_t)n));
    (void)send_all(fd, body, len);
    return fd;
}

/* Everything until the server closes. */
static void read_reply(int fd, char *out, size_t size) {
    size_t used = 0;
    ssize_t n;
    while (used + 1 < size && (n = recv(fd, out + used, size - 1 - used, 0)) > 0)
        used += (size_t)n;
    out[used] = '\0';
    close(fd);
}

static void assert_reply(const char *method, const char *path, const char *body, const char *status,
                         const char *contains) {
    char reply[4096];
    read_reply(send_request(method, path, body, strlen(body)), reply, sizeof reply);
    if (strncmp(reply, "HTTP/1.1 ", 9) != 0 || strncmp(reply + 9, status, 3) != 0 ||
        strstr(reply, contains) == NULL)
        fail_msg("%s %s: wanted %s with \"%s\", came:\n%s", method, path, status, contains, reply);
}

/* ---- tests ---- */

static void answers_at_once_and_late(void **state) {
    (void)state;
    assert_reply("GET", "/echo", "", "200", "nothing");
    assert_reply("POST", "/echo", "hello", "200", "hello");
    assert_reply("POST", "/at_once", "x", "200", "late");
    assert_reply("POST", "/soon", "x", "200", "late");
    int fd = send_request("POST", "/later", "x", 1);
    char reply[1024];
    assert_true(wait_for(&seen.arrived, 1));
    wake_held();
    read_reply(fd, reply, sizeof reply);
    assert_non_null(strstr(reply, "late"));
    assert_true(wait_for(&seen.released, 3));
    assert_int_equal(seen.gone, 0);
}

static void unknown_paths_and_methods_are_told(void **state) {
    (void)state;
    assert_reply("GET", "/nope", "", "404", "/nope");
    assert_reply("POST", "/nope", "some body", "404", "/nope");
    assert_reply("DELETE", "/echo", "", "405", "Allow: GET, HEAD, POST");
    assert_reply("GET", "/later", "", "405", "Allow: POST");
    assert_reply("HEAD", "/echo", "", "200", "Content-Length: 7");
}

static void a_client_that_leaves_is_noticed_while_its_answer_is_awaited(void **state) {
    (void)state;
    int fd = send_request("POST", "/later", "x", 1);
    assert_true(wait_for(&seen.arrived, 1));
    close(fd);
    assert_true(wait_for(&seen.gone, 1));
    wake_held();
    assert_true(wait_for(&seen.released, 1));
    assert_reply("POST", "/echo", "good", "200", "good");
}

static void a_stream_sends_what_there_is_and_ends(void **state) {
    (void)state;
    char reply[4096];
    int fd = send_request("POST", "/stream", "x", 1);
    assert_true(wait_for(&seen.arrived, 1));
    for (int i = 1; i <= 3; i++) {
        pthread_mutex_lock(&seen.lock);
        seen.pieces = i;
        seen.ended = i == 3;
        pthread_mutex_unlock(&seen.lock);
        hr_exchange_wake(seen.held);
        usleep(2000);
    }
    wake_held();
    read_reply(fd, reply, sizeof reply);
    assert_non_null(strstr(reply, "text/event-stream"));
    const char *first = strstr(reply, "data: 0\n\n"), *last = strstr(reply, "data: 2\n\n");
    assert_true(first != NULL && last > first);
    assert_non_null(strstr(last, "\r\n0\r\n"));
    assert_true(wait_for(&seen.released, 1));
}

static void a_client_that_leaves_a_stream_is_noticed(void **state) {
    (void)state;
    int fd = send_request("POST", "/stream", "x", 1);
    assert_true(wait_for(&seen.arrived, 1));
    close(fd);
    assert_true(wait_for(&seen.gone, 1));
    pthread_mutex_lock(&seen.lock);
    seen.ended = true;
    pthread_mutex_unlock(&seen.lock);
    wake_held();
    assert_true(wait_for(&seen.released, 1));
}

static void a_body_over_the_limit_is_drained_and_refused(void **state) {
    (void)state;
    static char body[MAX_BODY + MAX_DRAIN];
    char reply[2048];
    memset(body, 'x', sizeof body);
    read_reply(send_request("POST", "/echo", body, MAX_BODY), reply, sizeof reply);
    assert_non_null(strstr(reply, "200 OK"));
    read_reply(send_request("POST", "/echo", body, MAX_BODY + 1), reply, sizeof reply);
    assert_non_null(strstr(reply, "413"));
    assert_non_null(strstr(reply, "100000 bytes"));
    read_reply(send_request("POST", "/echo", body, MAX_BODY + MAX_DRAIN / 2), reply, sizeof reply);
    assert_non_null(strstr(reply, "413"));
    assert_reply("POST", "/echo", "good", "200", "good");
}

static void a_route_may_take_larger_bodies_and_keep_them(void **state) {
    (void)state;
    char reply[2048], path[] = "/take?b=2&a=x%20y&c";
    char *body = malloc(LARGE_BODY);
    assert_non_null(body);
    memset(body, 'x', LARGE_BODY);
    body[LARGE_BODY - 1] = 'z';
    for (int i = 0; i < 3; i++) { /* the second and third in the pages of the first */
        read_reply(send_request("POST", path, body, LARGE_BODY), reply, sizeof reply);
        assert_non_null(strstr(reply, "5242880 0 z b=2 a=x y c="));
    }
    read_reply(send_request("POST", "/take", body, 0), reply, sizeof reply);
    assert_non_null(strstr(reply, "0 0 -"));
    read_reply(send_request("POST", "/take?b=2&a=x%00y&c", body, 0), reply, sizeof reply);
    assert_non_null(strstr(reply, "0 0 - b=2 and a NUL"));
    free(body);
}

static void a_body_without_end_is_cut_off(void **state) {
    (void)state;
    static char piece[65536];
    int fd = send_request("POST", "/echo", "", 0);
    close(fd);
    fd = connect_client();
    static const char head[] =
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n";
    assert_true(send_all(fd, head, sizeof head - 1));
    size_t sent = 0;
    while (sent < ((size_t)64 << 20) && send_all(fd, piece, sizeof piece))
        sent += sizeof piece;
    assert_true(sent < ((size_t)64 << 20));
    close(fd);
    assert_reply("POST", "/echo", "good", "200", "good");
}

static void a_client_that_asks_first_is_told_at_once(void **state) {
    (void)state;
    char reply[2048];
    static const char head[] =
        "POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100001\r\n\r\n";
    int fd = connect_client();
    assert_true(send_all(fd, head, sizeof head - 1));
    read_reply(fd, reply, sizeof reply);
    assert_non_null(strstr(reply, "413"));
}

static void stopping_answers_whoever_still_waits(void **state) {
    (void)state;
    char reply[2048];
    int fd = send_request("POST", "/later", "x", 1);
    assert_true(wait_for(&seen.arrived, 1));
    hr_exchange *first = seen.held;
    int fd2 = send_request("POST", "/later", "x", 1);
    assert_true(wait_for(&seen.arrived, 2));
    hr_http_stop(http, 10);
    http = NULL;
    read_reply(fd, reply, sizeof reply);
    assert_non_null(strstr(reply, "503"));
    read_reply(fd2, reply, sizeof reply);
    assert_non_null(strstr(reply, "503"));
    hr_exchange_wake(first); /* a late wake does no harm */
    hr_exchange_unref(first);
    wake_held();
    assert_int_equal(seen.released, 2);
}

static void a_half_sent_body_does_not_hold_up_the_stop(void **state) {
    (void)state;
    static const char head[] = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf";
    struct timespec before, after;
    int gone = connect_client(), stuck = connect_client();
    assert_true(send_all(gone, head, sizeof head - 1) && send_all(stuck, head, sizeof head - 1));
    close(gone);
    assert_reply("POST", "/echo", "good", "200", "good");
    clock_gettime(CLOCK_MONOTONIC, &before);
    hr_http_stop(http, 20000);
    http = NULL;
    clock_gettime(CLOCK_MONOTONIC, &after);
    assert_true(after.tv_sec - before.tv_sec < 10);
    close(stuck);
}

static void many_clients_wait_at_once(void **state) {
    (void)state;
    enum { N = 200 };
    int fds[N];
    char reply[1024];
    for (int i = 0; i < N; i++)
        fds[i] = send_request("POST", "/soon", "x", 1);
    for (int i = 0; i < N; i++) {
        read_reply(fds[i], reply, sizeof reply);
        assert_non_null(strstr(reply, "late"));
    }
    assert_true(wait_for(&seen.released, N));
}

static void a_taken_port_is_refused_by_name(void **state) {
    (void)state;
    hr_error err;
    int fd = -1;
    uint16_t bound = 0;
    char text[16];
    assert_int_equal(hr_http_bind("127.0.0.1", port, &fd, &bound, &err), HR_ERR_IO);
    snprintf(text, sizeof text, "port %u", port);
    assert_non_null(strstr(err.message, text));
    assert_int_equal(hr_http_bind("no.such.host.invalid", 0, &fd, &bound, &err), HR_ERR_IO);
    assert_non_null(strstr(err.message, "no.such.host.invalid"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(answers_at_once_and_late, start, stop),
        cmocka_unit_test_setup_teardown(unknown_paths_and_methods_are_told, start, stop),
        cmocka_unit_test_setup_teardown(a_client_that_leaves_is_noticed_while_its_answer_is_awaited,
                                        start, stop),
        cmocka_unit_test_setup_teardown(a_stream_sends_what_there_is_and_ends, start, stop),
        cmocka_unit_test_setup_teardown(a_client_that_leaves_a_stream_is_noticed, start, stop),
        cmocka_unit_test_setup_teardown(a_body_over_the_limit_is_drained_and_refused, start, stop),
        cmocka_unit_test_setup_teardown(a_route_may_take_larger_bodies_and_keep_them, start, stop),
        cmocka_unit_test_setup_teardown(a_body_without_end_is_cut_off, start, stop),
        cmocka_unit_test_setup_teardown(a_client_that_asks_first_is_told_at_once, start, stop),
        cmocka_unit_test_setup_teardown(stopping_answers_whoever_still_waits, start, stop),
        cmocka_unit_test_setup_teardown(a_half_sent_body_does_not_hold_up_the_stop, start, stop),
        cmocka_unit_test_setup_teardown(many_clients_wait_at_once, start, stop),
        cmocka_unit_test_setup_teardown(a_taken_port_is_refused_by_name, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
