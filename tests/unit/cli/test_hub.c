/* A model's directory: as given, or from the local Hugging Face cache by its hub id. */
#include "cli/hub.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define REPO "/hub/models--org--tiny-model"

static char root[64];

static void make_dir(const char *path) {
    char full[256];
    snprintf(full, sizeof full, "%s%s", root, path);
    assert_int_equal(mkdir(full, 0700), 0);
}

static void write_ref(const char *text) {
    char full[256];
    snprintf(full, sizeof full, "%s" REPO "/refs/main", root);
    FILE *file = fopen(full, "we");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int make_cache(void **state) {
    (void)state;
    char hub[80];
    strcpy(root, "/tmp/headrace-hub-XXXXXX");
    if (mkdtemp(root) == NULL)
        return 1;
    make_dir("/hub");
    make_dir(REPO);
    make_dir(REPO "/refs");
    make_dir(REPO "/snapshots");
    make_dir(REPO "/snapshots/abc123");
    write_ref("abc123\n");
    snprintf(hub, sizeof hub, "%s/hub", root);
    unsetenv("HF_HOME");
    return setenv("HF_HUB_CACHE", hub, 1);
}

static int remove_cache(void **state) {
    (void)state;
    static const char *const paths[] = {REPO "/refs/main",
                                        REPO "/refs",
                                        REPO "/snapshots/abc123",
                                        REPO "/snapshots",
                                        REPO,
                                        "/hub",
                                        ""};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", root, paths[i]);
        if (remove(full) != 0)
            return 1;
    }
    return 0;
}

static void assert_resolves(const char *name, const char *below_root) {
    char *path = NULL, wanted[256];
    hr_error err;
    if (hr_hub_resolve(name, &path, &err) != HR_OK)
        fail_msg("%s: %s", name, err.message);
    snprintf(wanted, sizeof wanted, "%s%s", root, below_root);
    assert_string_equal(path, wanted);
    free(path);
}

static void assert_missing(const char *name, const char *in_message) {
    char *path = NULL;
    hr_error err;
    assert_int_not_equal(hr_hub_resolve(name, &path, &err), HR_OK);
    assert_null(path);
    if (strstr(err.message, in_message) == NULL)
        fail_msg("%s: \"%s\" lacks \"%s\"", name, err.message, in_message);
}

static void a_directory_is_itself(void **state) {
    (void)state;
    assert_resolves(root, "");
}

static void an_id_is_the_snapshot_of_main(void **state) {
    (void)state;
    assert_resolves("org/tiny-model", REPO "/snapshots/abc123");
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HOME", root, 1);
    assert_resolves("org/tiny-model", REPO "/snapshots/abc123");
    setenv("HF_HUB_CACHE", "", 1);
    assert_resolves("org/tiny-model", REPO "/snapshots/abc123");
}

static void an_absent_id_says_how_to_download(void **state) {
    (void)state;
    assert_missing("org/other", "hf download org/other");
    write_ref("gone");
    assert_missing("org/tiny-model", "hf download org/tiny-model");
    write_ref("../../..");
    assert_missing("org/tiny-model", "hf download");
}

static void a_path_that_is_absent_is_no_id(void **state) {
    (void)state;
    assert_missing("/no/such/dir", "/no/such/dir does not exist");
    assert_missing("./dir", "does not exist");
    assert_missing("../org/name", "does not exist");
    assert_missing("a/b/c", "does not exist");
    assert_missing("org/..", "does not exist");
    assert_missing("", "does not exist");
}

static void a_file_is_refused(void **state) {
    (void)state;
    char full[256];
    snprintf(full, sizeof full, "%s" REPO "/refs/main", root);
    assert_missing(full, "is a file");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_directory_is_itself, make_cache, remove_cache),
        cmocka_unit_test_setup_teardown(an_id_is_the_snapshot_of_main, make_cache, remove_cache),
        cmocka_unit_test_setup_teardown(an_absent_id_says_how_to_download, make_cache,
                                        remove_cache),
        cmocka_unit_test_setup_teardown(a_path_that_is_absent_is_no_id, make_cache, remove_cache),
        cmocka_unit_test_setup_teardown(a_file_is_refused, make_cache, remove_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
