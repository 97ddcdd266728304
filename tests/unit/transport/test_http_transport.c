/* What the transport makes of answers that are no engine's, and of keys. */
#include "fake_http.h"

#include "transport/http_transport.h"
#include "transport/transport.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { TIMEOUT_MS = 5000 };

typedef struct stand {
    fake_http fake;
    hr_http_client *client;
    hr_transport transport;
} stand;

static void open_stand(stand *s, const char *key) {
    hr_http_client_options options = {.api_key = key};
    memset(s, 0, sizeof *s);
    fake_http_start(&s->fake);
    assert_int_equal(hr_http_client_create(&options, &s->client, NULL), HR_OK);
}

static void close_stand(stand *s) {
    if (s->transport.close != NULL)
        s->transport.close(s->transport.self);
    hr_http_client_destroy(s->client);
    fake_http_stop(&s->fake);
}

static hr_status connect_to(stand *s, hr_error *err) {
    const char *url = s->fake.url;
    return hr_http_transport_open(s->client, &url, 1, "safetensors", TIMEOUT_MS, &s->transport,
                                  err);
}

static hr_stage_answer commit(stand *s, unsigned status, const char *reply) {
    uint32_t engine = 0;
    hr_stage_request request = {
        .stage = HR_STAGE_COMMIT, .session_id = "s", .timeout_ms = TIMEOUT_MS};
    hr_stage_answer answer = {0};
    s->fake.status = status;
    s->fake.reply = reply;
    s->transport.attempt(s->transport.self, &request, &engine, 1, &answer);
    return answer;
}

/* A gateway that gave up waiting does not know what the engine did; an engine that refuses does. */
static void what_a_gateway_says_is_not_the_engines_answer(void **state) {
    (void)state;
    static const struct {
        unsigned http_status;
        const char *reply;
        hr_status status;
        bool lost;
    } rows[] = {
        {504, "<html>Gateway Timeout</html>", HR_ERR_TIMEOUT, true},
        {502, "", HR_ERR_INTERNAL, true},
        {504,
         "{\"success\": false, \"message\": \"1 requests still ran\", \"status\": \"ERR_TIMEOUT\"}",
         HR_ERR_TIMEOUT, false},
        {400, "{\"success\": false, \"message\": \"no\", \"status\": \"ERR_SESSION\"}",
         HR_ERR_SESSION, false},
        {500, "broken", HR_ERR_INTERNAL, false},
    };
    stand s;
    open_stand(&s, NULL);
    assert_int_equal(connect_to(&s, NULL), HR_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        hr_stage_answer answer = commit(&s, rows[i].http_status, rows[i].reply);
        assert_int_equal(answer.status, rows[i].status);
        assert_int_equal(answer.lost, rows[i].lost);
    }
    close_stand(&s);
}

static void a_missing_key_is_told_from_a_wrong_one(void **state) {
    (void)state;
    for (int sent = 0; sent < 2; sent++) {
        stand s;
        hr_error err;
        open_stand(&s, sent ? "wrong" : NULL);
        s.fake.status = 401;
        s.fake.reply = "{\"error\": \"Unauthorized\"}";
        assert_int_equal(connect_to(&s, &err), HR_ERR_INVALID);
        assert_non_null(strstr(err.message, "Unauthorized: "));
        assert_non_null(strstr(err.message, "api_key; in a shell --api-key or HEADRACE_API_KEY"));
        assert_int_equal(strstr(err.message, "none was sent") != NULL, !sent);
        assert_int_equal(strstr(err.message, "the key that was sent is not the one") != NULL, sent);
        close_stand(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_gateway_says_is_not_the_engines_answer),
        cmocka_unit_test(a_missing_key_is_told_from_a_wrong_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
