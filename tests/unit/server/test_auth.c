/* Who may call what: SGLang's levels over two keys, and the level of every route. */
#include "server/auth.h"
#include "server/server.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const hr_auth_keys none = {NULL, NULL}, api = {"user", NULL}, admin = {NULL, "root"},
                          both = {"user", "root"};

static void assert_level(hr_auth_level level, const hr_auth_keys *keys, unsigned without,
                         unsigned user, unsigned root) {
    assert_int_equal(hr_auth_check(keys, level, NULL), without);
    assert_int_equal(hr_auth_check(keys, level, "Bearer user"), user);
    assert_int_equal(hr_auth_check(keys, level, "Bearer root"), root);
}

static void open_routes_are_open(void **state) {
    (void)state;
    assert_level(HR_AUTH_OPEN, &none, 0, 0, 0);
    assert_level(HR_AUTH_OPEN, &both, 0, 0, 0);
}

static void normal_routes_want_either_key_if_there_is_an_api_key(void **state) {
    (void)state;
    assert_level(HR_AUTH_NORMAL, &none, 0, 0, 0);
    assert_level(HR_AUTH_NORMAL, &api, 401, 0, 401);
    assert_level(HR_AUTH_NORMAL, &admin, 0, 0, 0);
    assert_level(HR_AUTH_NORMAL, &both, 401, 0, 0);
}

static void admin_routes_want_the_admin_key_else_the_api_key(void **state) {
    (void)state;
    assert_level(HR_AUTH_ADMIN_OPTIONAL, &none, 0, 0, 0);
    assert_level(HR_AUTH_ADMIN_OPTIONAL, &api, 401, 0, 401);
    assert_level(HR_AUTH_ADMIN_OPTIONAL, &admin, 401, 401, 0);
    assert_level(HR_AUTH_ADMIN_OPTIONAL, &both, 401, 401, 0);
}

static void forced_routes_are_closed_without_an_admin_key(void **state) {
    (void)state;
    assert_level(HR_AUTH_ADMIN_FORCE, &none, 403, 403, 403);
    assert_level(HR_AUTH_ADMIN_FORCE, &api, 403, 403, 403);
    assert_level(HR_AUTH_ADMIN_FORCE, &both, 401, 401, 0);
    assert_level(HR_AUTH_UNSET, &none, 403, 403, 403);
}

static void the_header_is_read_strictly(void **state) {
    (void)state;
    static const struct {
        const char *header;
        unsigned wanted;
    } table[] = {
        {"Bearer user", 0},
        {"bearer user", 0},
        {"BEARER  user", 0},
        {"Bearer\tuser", 0},
        {"Beareruser", 401},
        {"Basic user", 401},
        {"user", 401},
        {"", 401},
        {"Bearer", 401},
        {"Bearer ", 401},
        {"Bearer use", 401},
        {"Bearer userx", 401},
        {"Bearer USER", 401},
        {"Bearer user ", 401},
        {"Bearer useruser", 401},
        {"Bearer xuser", 401},
        {"Bearer user,root", 401},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_int_equal(hr_auth_check(&api, HR_AUTH_NORMAL, table[i].header), table[i].wanted);
}

/* What changes nothing, so that the api key is enough. Every other route needs the admin level. */
static bool only_reads(const hr_route *route) {
    static const char *const posts[] = {"/generate", "/v1/completions"};
    if ((route->methods & ~(unsigned)HR_METHOD_GET) == 0)
        return true;
    for (size_t i = 0; i < sizeof posts / sizeof posts[0]; i++) {
        if (strcmp(route->path, posts[i]) == 0)
            return true;
    }
    return false;
}

static void every_route_has_a_level_and_those_that_change_something_a_high_one(void **state) {
    (void)state;
    size_t n = 0;
    const hr_route *routes = hr_server_routes(&n);
    assert_true(n > 10);
    for (size_t i = 0; i < n; i++) {
        const hr_route *r = &routes[i];
        if (r->level == HR_AUTH_UNSET)
            fail_msg("%s has no level", r->path);
        if (r->level == HR_AUTH_OPEN && strncmp(r->path, "/health", 7) != 0)
            fail_msg("%s is open", r->path);
        if (!only_reads(r) && r->level < HR_AUTH_ADMIN_OPTIONAL)
            fail_msg("%s changes something at level %s", r->path, hr_auth_level_name(r->level));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_routes_are_open),
        cmocka_unit_test(normal_routes_want_either_key_if_there_is_an_api_key),
        cmocka_unit_test(admin_routes_want_the_admin_key_else_the_api_key),
        cmocka_unit_test(forced_routes_are_closed_without_an_admin_key),
        cmocka_unit_test(the_header_is_read_strictly),
        cmocka_unit_test(every_route_has_a_level_and_those_that_change_something_a_high_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
