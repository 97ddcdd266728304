/* The ledger of a push: names once, replicas compared, the manifest sorted. */
#include "publish/ledger.h"
#include "publish/round.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static hr_tensor tensor(uint64_t rows) {
    return (hr_tensor){.dtype = HR_DTYPE_U8, .ndim = 1, .shape = {rows}, .bytes = rows};
}

static void thousands_of_names_are_found_again(void **state) {
    (void)state;
    hr_ledger ledger = {0};
    hr_manifest_digest *manifest = NULL;
    char name[64];
    size_t index = 0;
    bool fresh = false;
    hr_tensor t = tensor(2);
    for (unsigned i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "layers.%u", i * 7919 % 5000);
        assert_int_equal(hr_ledger_add(&ledger, 0, name, &t, NULL, &index, &fresh, NULL), HR_OK);
        assert_true(fresh);
        assert_int_equal(index, i);
    }
    for (unsigned i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "layers.%u", i);
        assert_string_equal(ledger.entries[hr_ledger_find(&ledger, name)].name, name);
    }
    assert_int_equal(ledger.bytes, 10000);
    assert_int_equal(hr_ledger_manifest(&ledger, &manifest, NULL), HR_OK);
    for (unsigned i = 1; i < 5000; i++)
        assert_true(strcmp(manifest[i - 1].name, manifest[i].name) < 0);
    free(manifest);
    hr_ledger_free(&ledger);
}

static void replicas_are_compared(void **state) {
    (void)state;
    static const uint8_t one[HR_XXH3_SIZE] = {1}, two[HR_XXH3_SIZE] = {2};
    const struct {
        uint32_t rank;
        uint64_t rows;
        const uint8_t *digest;
        hr_status status;
        const char *text;
    } rows[] = {
        {1, 4, one, HR_OK, NULL},
        {1, 4, two, HR_ERR_DIGEST, "other bytes on rank 1 than on rank 0"},
        {2, 5, one, HR_ERR_DIGEST, "U8 [4] on rank 0 and U8 [5] on rank 2"},
        {0, 4, one, HR_ERR_INVALID, "comes twice"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        hr_ledger ledger = {0};
        hr_error err;
        size_t index = 9;
        bool fresh = true;
        hr_tensor first = tensor(4), second = tensor(rows[i].rows);
        assert_int_equal(hr_ledger_add(&ledger, 0, "w", &first, one, &index, &fresh, NULL), HR_OK);
        assert_int_equal(hr_ledger_add(&ledger, rows[i].rank, "w", &second, rows[i].digest, &index,
                                       &fresh, &err),
                         rows[i].status);
        if (rows[i].text != NULL)
            assert_non_null(strstr(err.message, rows[i].text));
        else
            assert_false(fresh);
        assert_int_equal(ledger.n, 1);
        hr_ledger_free(&ledger);
    }
}

/* What another rank says is read within its bounds. */
static void a_round_that_is_cut_is_noticed(void **state) {
    (void)state;
    hr_buf message = {0};
    hr_round_put_u64(&message, 5);
    hr_round_put_text(&message, "name");
    for (size_t n = 0; n < message.len; n++) {
        hr_round_reader reader = {message.data, message.data + n, false};
        (void)hr_round_get_u64(&reader);
        (void)hr_round_get_text(&reader);
        assert_true(reader.bad);
    }
    hr_round_reader reader = {message.data, message.data + message.len, false};
    assert_int_equal(hr_round_get_u64(&reader), 5);
    assert_string_equal(hr_round_get_text(&reader), "name");
    assert_false(reader.bad);
    hr_buf_free(&message);
}

static void a_length_out_of_all_bounds_is_noticed(void **state) {
    (void)state;
    hr_buf message = {0};
    hr_round_put_u64(&message, UINT64_MAX);
    hr_round_put_u64(&message, 0);
    hr_round_reader reader = {message.data, message.data + message.len, false};
    assert_string_equal(hr_round_get_text(&reader), "");
    assert_true(reader.bad);
    hr_buf_free(&message);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thousands_of_names_are_found_again),
        cmocka_unit_test(replicas_are_compared),
        cmocka_unit_test(a_round_that_is_cut_is_noticed),
        cmocka_unit_test(a_length_out_of_all_bounds_is_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
