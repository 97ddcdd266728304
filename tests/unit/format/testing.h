/* What the tests of this room share: cmocka with what it needs before it, and how a refusal is
 * checked. */
#ifndef TESTS_FORMAT_TESTING_H
#define TESTS_FORMAT_TESTING_H

#include "base/error.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A refusal has a status that says what is lost and a message that names the thing. */
static inline void assert_refused(hr_status status, const hr_error *err, const char *names) {
    if (status == HR_OK || strstr(err->message, names) == NULL)
        print_error("wanted a refusal naming \"%s\", came %s: %s\n", names, hr_status_name(status),
                    status == HR_OK ? "" : err->message);
    assert_int_not_equal(status, HR_OK);
    assert_int_equal(err->status, status);
    assert_non_null(strstr(err->message, names));
}

static inline void assert_ok(hr_status status, const hr_error *err) {
    if (status != HR_OK)
        print_error("%s: %s\n", hr_status_name(status), err->message);
    assert_int_equal(status, HR_OK);
}

/* A new empty directory; static storage, so one at a time. */
static inline const char *new_dir(void) {
    static char path[64];
    const char *root = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.40s/hr-XXXXXX", root ? root : "/tmp");
    assert_non_null(mkdtemp(path));
    return path;
}

static inline const char *path_in(const char *dir, const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static inline void write_file(const char *dir, const char *name, const void *bytes, size_t n) {
    FILE *file = fopen(path_in(dir, name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

/* Removes the named files (NULL ends the list) and the directory. */
static inline void remove_dir(const char *dir, const char *const *names) {
    for (; *names != NULL; names++)
        unlink(path_in(dir, *names));
    assert_int_equal(rmdir(dir), 0);
}

#endif
