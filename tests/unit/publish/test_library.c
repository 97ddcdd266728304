/* libheadrace as a C program gets it: nothing but the public headers and the shared library. */
#include <headrace/engine.h>
#include <headrace/publisher.h>
#include <headrace/receiver.h>
#include <headrace/version.h>

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const char config[] = "{\"r\": 8}";
static unsigned pulled;

static hr_status next(void *self, hr_unit *unit, hr_error *err) {
    (void)self;
    (void)err;
    pulled++;
    *unit = (hr_unit){0};
    return HR_OK;
}

static void a_push_to_nobody_fails_in_words(void **state) {
    (void)state;
    const char *engines[] = {"127.0.0.1:1"};
    hr_publisher_options options = {.engines = engines, .n_engines = 1, .timeout_ms = 2000};
    hr_push_adapter adapter = {"a", config, sizeof config - 1, false};
    hr_push push = {.adapters = &adapter, .n_adapters = 1, .source = {NULL, next}};
    hr_publisher *publisher = NULL;
    hr_push_receipt *receipt = NULL;
    hr_error err;
    assert_int_equal(hr_publisher_create(&options, &publisher, &err), HR_OK);
    assert_string_equal(hr_publisher_report(publisher), "{}");
    assert_int_equal(hr_publisher_push(publisher, &push, &receipt, &err), HR_ERR_PEER);
    assert_non_null(strstr(err.message, "http://127.0.0.1:1"));
    assert_non_null(strstr(hr_publisher_report(publisher), "\"success\":false"));
    assert_int_equal(pulled, 0);
    hr_publisher_destroy(publisher);
    hr_publisher_destroy(NULL);
    hr_push_receipt_free(NULL);
}

static void options_are_checked(void **state) {
    (void)state;
    const char *twice[] = {"http://a:1", "a:1/"};
    const hr_group no_collective = {.rank = 0, .size = 2};
    const hr_publisher_options rows[] = {
        {.engines = twice, .n_engines = 0},
        {.engines = twice, .n_engines = 2},
        {.engines = twice, .n_engines = 1, .transport = "pigeon"},
        {.engines = twice, .n_engines = 1, .pause = (hr_push_pause)9},
        {.engines = twice, .n_engines = 1, .group = &no_collective},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        hr_publisher *publisher = NULL;
        hr_error err;
        assert_int_equal(hr_publisher_create(&rows[i], &publisher, &err), HR_ERR_INVALID);
        assert_null(publisher);
    }
}

static void what_is_not_public_is_not_exported(void **state) {
    (void)state;
    void *library = dlopen(NULL, RTLD_NOW);
    assert_non_null(library);
    assert_non_null(dlsym(library, "hr_publisher_push"));
    assert_non_null(dlsym(library, "hr_receiver_prepare"));
    assert_non_null(dlsym(library, "hr_engine_create"));
    assert_null(dlsym(library, "hr_buf_append"));
    assert_null(dlsym(library, "hr_fleet_run"));
    assert_null(dlsym(library, "hr_json_parse"));
    dlclose(library);
}

static void the_version_is_that_of_the_headers(void **state) {
    (void)state;
    assert_string_equal(hr_version(), HR_VERSION_STRING);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_push_to_nobody_fails_in_words),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(what_is_not_public_is_not_exported),
        cmocka_unit_test(the_version_is_that_of_the_headers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
