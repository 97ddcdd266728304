/* Flags of commands as a table, sizes, and NAME=DIR. */
#include "cli/options.h"
#include "cli/publishing.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct flags {
    hr_cli_list engines, words;
    const char *name;
    uint64_t size, count;
    double seconds;
    bool loud, help;
} flags;

static hr_status parse(flags *f, char **argv, hr_error *err) {
    const hr_cli_option table[] = {
        {"--engine", HR_CLI_LIST, &f->engines, "URL...", ""},
        {"--name", HR_CLI_TEXT, &f->name, "NAME", ""},
        {"--size", HR_CLI_SIZE, &f->size, "BYTES", ""},
        {"--count", HR_CLI_NUMBER, &f->count, "N", ""},
        {"--seconds", HR_CLI_DECIMAL, &f->seconds, "S", ""},
        {"--loud", HR_CLI_FLAG, &f->loud, NULL, ""},
    };
    int argc = 0;
    while (argv[argc] != NULL)
        argc++;
    memset(f, 0, sizeof *f);
    return hr_cli_parse(argc, argv, table, sizeof table / sizeof table[0], &f->words, &f->help,
                        err);
}

#define ARGS(...)                                                                                  \
    (char *[]) {                                                                                   \
        __VA_ARGS__, NULL                                                                          \
    }
#define WORD(text) ((char *)(uintptr_t)(text))

static void flags_in_both_forms(void **state) {
    (void)state;
    flags f;
    assert_int_equal(parse(&f,
                           ARGS(WORD("dir"), WORD("--engine"), WORD("a"), WORD("b"), WORD("--loud"),
                                WORD("--engine=c"), WORD("--name"), WORD("x"), WORD("--size=2K"),
                                WORD("--count"), WORD("7"), WORD("--seconds=0.5")),
                           NULL),
                     HR_OK);
    assert_int_equal(f.engines.n, 3);
    assert_string_equal(f.engines.items[2], "c");
    assert_int_equal(f.words.n, 1);
    assert_string_equal(f.name, "x");
    assert_int_equal(f.size, 2048);
    assert_int_equal(f.count, 7);
    assert_true(f.seconds == 0.5 && f.loud && !f.help);
    assert_int_equal(parse(&f, ARGS(WORD("--frob"), WORD("--help")), NULL), HR_ERR_INVALID);
    assert_int_equal(parse(&f, ARGS(WORD("-h"), WORD("--frob")), NULL), HR_OK);
    assert_true(f.help);
}

static void what_is_wrong_is_named(void **state) {
    (void)state;
    static const char *const rows[][3] = {
        {"--frob", NULL, "--frob"},         {"--engine", NULL, "--engine needs a value: URL..."},
        {"--engine", "--loud", "--engine"}, {"--name", NULL, "--name needs a value"},
        {"--loud=1", NULL, "--loud takes"}, {"--count", "x", "--count: wanted a number"},
        {"--count", "-1", "--count"},       {"--size", "3Q", "--size: \"3Q\" is no size"},
        {"--seconds", "nan", "--seconds"},  {"--seconds", "0x10", "--seconds"},
        {"--seconds", "1s", "--seconds"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        flags f;
        hr_error err;
        assert_int_equal(parse(&f, ARGS(WORD(rows[i][0]), WORD(rows[i][1])), &err), HR_ERR_INVALID);
        if (strstr(err.message, rows[i][2]) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", err.message, rows[i][2]);
    }
}

static void sizes(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t size;
    } good[] = {{"0", 0}, {"1536", 1536}, {"1k", 1024}, {"512M", 512u << 20}, {"2GB", 2ull << 30}};
    static const char *const bad[] = {"",         "M", "-1", "1.5M", "1MM", "99999999999999999999",
                                      "17000000T"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t size = 1;
        assert_int_equal(hr_cli_size(good[i].text, &size, NULL), HR_OK);
        assert_true(size == good[i].size);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t size = 1;
        assert_int_equal(hr_cli_size(bad[i], &size, NULL), HR_ERR_INVALID);
        assert_int_equal(size, 1);
    }
}

static void a_timeout_is_at_least_a_millisecond_and_at_most_a_day(void **state) {
    (void)state;
    static const struct {
        double seconds;
        uint64_t ms;
    } good[] = {{1e-6, 1}, {0.001, 1}, {0.25, 250}, {86400, 86400000}};
    static const double bad[] = {0, -1, 86400.5};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t ms = 0;
        assert_int_equal(hr_cli_timeout(good[i].seconds, &ms, NULL), HR_OK);
        assert_int_equal(ms, good[i].ms);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t ms = 7;
        assert_int_equal(hr_cli_timeout(bad[i], &ms, NULL), HR_ERR_INVALID);
        assert_int_equal(ms, 7);
    }
}

static void bytes_have_a_unit_that_shows_them(void **state) {
    (void)state;
    hr_cli_amount amount;
    assert_string_equal(hr_cli_format_bytes(0, &amount), "0 B");
    assert_string_equal(hr_cli_format_bytes(999, &amount), "999 B");
    assert_string_equal(hr_cli_format_bytes(1792, &amount), "1.8 KB");
    assert_string_equal(hr_cli_format_bytes(269030016, &amount), "269.0 MB");
}

static void adapters(void **state) {
    (void)state;
    char *name = NULL;
    const char *dir = NULL;
    assert_int_equal(hr_cli_adapter("a=b=c", &name, &dir, NULL), HR_OK);
    assert_string_equal(name, "a");
    assert_string_equal(dir, "b=c");
    free(name);
    assert_int_equal(hr_cli_adapter("a", &name, &dir, NULL), HR_ERR_INVALID);
    assert_int_equal(hr_cli_adapter("=d", &name, &dir, NULL), HR_ERR_INVALID);
    assert_int_equal(hr_cli_adapter("a=", &name, &dir, NULL), HR_ERR_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_in_both_forms),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(sizes),
        cmocka_unit_test(a_timeout_is_at_least_a_millisecond_and_at_most_a_day),
        cmocka_unit_test(bytes_have_a_unit_that_shows_them),
        cmocka_unit_test(adapters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
