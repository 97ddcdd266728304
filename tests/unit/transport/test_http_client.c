/* The HTTP client against a server that behaves in every bad way. */
#include "fake_http.h"

#include "base/clock.h"
#include "transport/http_client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct stand {
    fake_http fake;
    hr_http_client *client;
    unsigned ticks, stop_at; /* 0: never */
} stand;

static bool tick(void *ctx) {
    stand *s = ctx;
    return ++s->ticks != s->stop_at;
}

static int open_stand(void **state) {
    stand *s = calloc(1, sizeof *s);
    hr_http_client_options options = {.api_key = "secret", .tick = tick, .tick_ctx = s};
    fake_http_start(&s->fake);
    s->fake.keep_body = true;
    assert_int_equal(hr_http_client_create(&options, &s->client, NULL), HR_OK);
    *state = s;
    return 0;
}

static int close_stand(void **state) {
    stand *s = *state;
    hr_http_client_destroy(s->client);
    fake_http_stop(&s->fake);
    free(s);
    return 0;
}

static uint64_t now_ms(void) {
    hr_clock clock = hr_clock_monotonic();
    return hr_now_ns(&clock) / 1000000;
}

/* A body that is a pattern, given in odd pieces. */
static size_t read_pattern(void *self, uint64_t offset, void *out, size_t n) {
    (void)self;
    size_t most = 1 + (size_t)(offset % 70001);
    n = n < most ? n : most;
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)out)[i] = (uint8_t)((offset + i) * 31 >> 3);
    return n;
}

static hr_http_call post(const stand *s, uint64_t size) {
    return (hr_http_call){.method = "POST",
                          .url = s->fake.url,
                          .content_type = "application/octet-stream",
                          .body = {size, read_pattern, NULL}};
}

static void expect_body(const stand *s, uint64_t size) {
    assert_int_equal(s->fake.body.len, size);
    uint8_t want = 0;
    for (uint64_t i = 0; i < size; i++) {
        read_pattern(NULL, i, &want, 1);
        if ((uint8_t)s->fake.body.data[i] != want)
            fail_msg("byte %llu differs", (unsigned long long)i);
    }
}

static void a_body_in_pieces_arrives_whole(void **state) {
    stand *s = *state;
    hr_http_call call = post(s, 3000001);
    hr_http_client_run(s->client, &call, 1, 5000, NULL);
    assert_int_equal(call.status, HR_OK);
    assert_int_equal(call.http_status, 200);
    assert_string_equal(call.reply.data, "{\"success\": true}");
    expect_body(s, 3000001);
    assert_non_null(strstr(s->fake.head.data, "Authorization: Bearer secret\r\n"));
    assert_non_null(strstr(s->fake.head.data, "Content-Type: application/octet-stream\r\n"));
    assert_null(strcasestr(s->fake.head.data, "Expect:"));
    hr_buf_free(&call.reply);
}

static void connections_are_kept(void **state) {
    stand *s = *state;
    for (int i = 0; i < 10; i++) {
        hr_http_call call = {.method = "POST", .url = s->fake.url, .text = "{}", .text_len = 2};
        hr_http_client_run(s->client, &call, 1, 5000, NULL);
        assert_int_equal(call.status, HR_OK);
        hr_buf_free(&call.reply);
    }
    assert_int_equal(atomic_load(&s->fake.requests), 10);
    assert_int_equal(atomic_load(&s->fake.n_connections), 1);
}

static void a_kept_connection_that_was_closed_is_replaced(void **state) {
    stand *s = *state;
    atomic_store(&s->fake.way, FAKE_CLOSE_AFTER);
    for (int i = 0; i < 5; i++) {
        hr_http_call call = post(s, 2000000);
        hr_http_client_run(s->client, &call, 1, 5000, NULL);
        assert_int_equal(call.status, HR_OK);
        expect_body(s, 2000000);
        hr_buf_free(&call.reply);
        usleep(20000); /* the end of the connection has come */
    }
}

static void calls_run_at_the_same_time(void **state) {
    stand *s = *state;
    hr_http_call calls[8];
    for (int i = 0; i < 8; i++)
        calls[i] = post(s, 100000);
    atomic_store(&s->fake.way, FAKE_SILENT);
    uint64_t start = now_ms();
    hr_http_client_run(s->client, calls, 8, 300, NULL);
    assert_in_range(now_ms() - start, 250, 1500);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(calls[i].status, HR_ERR_TIMEOUT);
        assert_non_null(strstr(calls[i].err.message, s->fake.url));
        assert_non_null(strstr(calls[i].err.message, "within 300 ms"));
        hr_buf_free(&calls[i].reply);
    }
}

static void nobody_listening_is_a_lost_peer(void **state) {
    (void)state;
    hr_http_client *client = NULL;
    hr_http_client_options options = {0};
    assert_int_equal(hr_http_client_create(&options, &client, NULL), HR_OK);
    hr_http_call call = {.method = "GET", .url = "http://127.0.0.1:1"};
    hr_http_client_run(client, &call, 1, 5000, NULL);
    assert_int_equal(call.status, HR_ERR_PEER);
    assert_non_null(strstr(call.err.message, "http://127.0.0.1:1"));
    hr_buf_free(&call.reply);
    hr_http_client_destroy(client);
}

static void expect_lost(void **state, fake_way way, hr_status status) {
    stand *s = *state;
    atomic_store(&s->fake.way, (int)way);
    hr_http_call call = post(s, 10000);
    hr_http_client_run(s->client, &call, 1, 10000, NULL);
    assert_int_equal(call.status, status);
    assert_non_null(strstr(call.err.message, s->fake.url));
    hr_buf_free(&call.reply);
}

static void a_dropped_answer_is_a_lost_peer(void **state) {
    expect_lost(state, FAKE_DROP, HR_ERR_PEER);
}

static void a_cut_reply_is_a_lost_peer(void **state) {
    expect_lost(state, FAKE_CUT_REPLY, HR_ERR_PEER);
}

static void a_reply_without_end_is_bounded(void **state) {
    expect_lost(state, FAKE_ENDLESS, HR_ERR_LIMIT);
}

static void a_refusal_before_the_body_is_read(void **state) {
    stand *s = *state;
    atomic_store(&s->fake.way, FAKE_REFUSE_EARLY);
    hr_http_call call = post(s, 50000000);
    hr_http_client_run(s->client, &call, 1, 5000, NULL);
    if (call.status == HR_OK) { /* a reset may overtake the answer */
        assert_int_equal(call.http_status, 400);
        assert_non_null(strstr(call.reply.data, "too early"));
    } else {
        assert_int_equal(call.status, HR_ERR_PEER);
    }
    hr_buf_free(&call.reply);
}

static void a_tick_cancels(void **state) {
    stand *s = *state;
    atomic_store(&s->fake.way, FAKE_SILENT);
    s->ticks = 0;
    s->stop_at = 4;
    hr_http_call call = post(s, 1000);
    uint64_t start = now_ms();
    hr_http_client_run(s->client, &call, 1, 60000, NULL);
    assert_in_range(now_ms() - start, 0, 5000);
    assert_int_equal(call.status, HR_ERR_CANCELLED);
    hr_buf_free(&call.reply);
    s->stop_at = 0;
}

typedef struct ahead {
    stand *s;
    hr_http_call *call;
    unsigned asked;
} ahead;

static void begin_ahead(void *ctx) {
    ahead *a = ctx;
    a->asked++;
    while (atomic_load(&a->s->fake.requests) == 0) /* until it is known that nobody will answer */
        usleep(1000);
    atomic_store(&a->s->fake.way, FAKE_ANSWER);
    hr_http_client_ahead(a->s->client, a->call, 1);
}

static void a_call_begun_ahead_ends_in_its_turn_only(void **state) {
    stand *s = *state;
    hr_http_call first = post(s, 10), next = post(s, 3000001);
    ahead a = {s, &next, 0};
    hr_http_meanwhile meanwhile = {begin_ahead, &a};
    atomic_store(&s->fake.way, FAKE_SILENT);
    hr_http_client_run(s->client, &first, 1, 300, &meanwhile);
    assert_int_equal(first.status, HR_ERR_TIMEOUT);
    assert_int_equal(a.asked, 1);
    assert_int_equal(atomic_load(&s->fake.requests), 1); /* whole ones */
    hr_http_client_run(s->client, &next, 1, 5000, NULL);
    assert_int_equal(next.status, HR_OK);
    assert_int_equal(atomic_load(&s->fake.requests), 2);
    expect_body(s, 3000001);
    hr_buf_free(&first.reply);
    hr_buf_free(&next.reply);
}

static void a_call_begun_ahead_and_dropped_never_ends(void **state) {
    stand *s = *state;
    hr_http_call next = post(s, 3000001);
    hr_http_client_ahead(s->client, &next, 1);
    for (int i = 0; i < 20; i++) {
        hr_http_call other = post(s, 100000);
        hr_http_client_run(s->client, &other, 1, 5000, NULL);
        assert_int_equal(other.status, HR_OK);
        hr_buf_free(&other.reply);
    }
    hr_http_client_drop_ahead(s->client);
    hr_http_client_run(s->client, &next, 1, 5000, NULL); /* as if it had never begun */
    assert_int_equal(next.status, HR_OK);
    assert_int_equal(atomic_load(&s->fake.requests), 21);
    expect_body(s, 3000001);
    hr_buf_free(&next.reply);
}

static void urls_have_one_form(void **state) {
    (void)state;
    static const struct {
        const char *text, *url;
    } rows[] = {
        {"http://host:30000", "http://host:30000"},
        {"http://host:30000/", "http://host:30000"},
        {"host:30000", "http://host:30000"},
        {"https://[::1]:443", "https://[::1]:443"},
        {"ftp://host", NULL},
        {"http://", NULL},
        {"http://host/path", NULL},
        {"http://user@host", NULL},
        {"http://ho st", NULL},
        {"http://host?x=1", NULL},
        {":3000", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char *url = NULL;
        hr_error err;
        hr_status status = hr_http_base_url(rows[i].text, &url, &err);
        assert_int_equal(status, rows[i].url != NULL ? HR_OK : HR_ERR_INVALID);
        if (rows[i].url != NULL)
            assert_string_equal(url, rows[i].url);
        free(url);
    }
}

static void queries_are_encoded(void **state) {
    (void)state;
    hr_buf text = {0};
    hr_query_append(&text, "a b&c=d/\xc3\xa9-._~");
    assert_string_equal(text.data, "a%20b%26c%3Dd%2F%C3%A9-._~");
    hr_buf_free(&text);
}

#define WITH_STAND(test) cmocka_unit_test_setup_teardown(test, open_stand, close_stand)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_STAND(a_body_in_pieces_arrives_whole),
        WITH_STAND(connections_are_kept),
        WITH_STAND(a_kept_connection_that_was_closed_is_replaced),
        WITH_STAND(calls_run_at_the_same_time),
        cmocka_unit_test(nobody_listening_is_a_lost_peer),
        WITH_STAND(a_dropped_answer_is_a_lost_peer),
        WITH_STAND(a_cut_reply_is_a_lost_peer),
        WITH_STAND(a_reply_without_end_is_bounded),
        WITH_STAND(a_refusal_before_the_body_is_read),
        WITH_STAND(a_tick_cancels),
        WITH_STAND(a_call_begun_ahead_ends_in_its_turn_only),
        WITH_STAND(a_call_begun_ahead_and_dropped_never_ends),
        cmocka_unit_test(urls_have_one_form),
        cmocka_unit_test(queries_are_encoded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
