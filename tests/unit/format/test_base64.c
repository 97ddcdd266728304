/* Base64: the vectors of RFC 4648, what is refused and where, and decoding in place. The same is
 * checked against Python in tests/e2e/test_torch_payload.py. */
#include "format/base64.h"

#include "testing.h"

static const struct {
    const char *bytes, *text;
} vectors[] = {
    {"", ""},
    {"f", "Zg=="},
    {"fo", "Zm8="},
    {"foo", "Zm9v"},
    {"foob", "Zm9vYg=="},
    {"fooba", "Zm9vYmE="},
    {"foobar", "Zm9vYmFy"},
};

static void vectors_of_the_rfc(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        size_t size = strlen(vectors[i].bytes), n = 99;
        char out[16];
        hr_error err = {0};
        hr_buf text = {0};
        hr_base64_append(&text, vectors[i].bytes, size);
        assert_int_equal(text.len, strlen(vectors[i].text));
        assert_memory_equal(text.len > 0 ? text.data : "", vectors[i].text, text.len);
        assert_ok(hr_base64_decode(vectors[i].text, text.len, out, &n, &err), &err);
        assert_int_equal(n, size);
        assert_memory_equal(out, vectors[i].bytes, n);
        assert_true(n <= hr_base64_decoded_max(text.len));
        hr_buf_free(&text);
    }
}

static void every_byte_at_every_place(void **state) {
    (void)state;
    unsigned char bytes[256 * 3 + 2];
    for (size_t size = 0; size <= sizeof bytes; size++) {
        hr_buf text = {0};
        hr_error err = {0};
        size_t n = 0;
        for (size_t i = 0; i < size; i++)
            bytes[i] = (unsigned char)(i * 37 + size);
        hr_base64_append(&text, bytes, size);
        assert_int_equal(text.len, (size + 2) / 3 * 4);
        assert_ok(hr_base64_decode(text.data, text.len, text.data, &n, &err), &err);
        assert_int_equal(n, size);
        if (n > 0)
            assert_memory_equal(text.data, bytes, n);
        hr_buf_free(&text);
    }
}

static void encoding_goes_on_where_the_buffer_ends(void **state) {
    (void)state;
    hr_buf text = {0};
    hr_buf_puts(&text, "\"");
    hr_base64_append(&text, "foo", 3);
    hr_buf_puts(&text, "\"");
    assert_string_equal(text.data, "\"Zm9v\"");
    hr_buf_free(&text);
}

static void what_does_not_belong_is_refused_with_its_place(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"Zg", "padding is missing"},
        {"Zg=", "padding is missing"},
        {"Zm9vYmFyZ", "9 characters"},
        {"Zm9v\nYmE", "0x0a at position 4"},
        {"Zm9 ", "0x20 at position 3"},
        {"Zm9v-m9v", "'-' at position 4"},
        {"_m9vZm9v", "'_' at position 0"},
        {"Zg==Zm9v", "0x3d at position 2"},
        {"Z===", "0x3d at position 1"},
        {"====", "0x3d at position 0"},
        {"Zm=v", "0x3d at position 2"},
        {"Zh==", "position 1 carries bits beyond"},
        {"Zm9=", "position 2 carries bits beyond"},
        {"Zm9\xe9", "0xe9 at position 3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[16];
        size_t n = 77;
        hr_error err = {0};
        hr_status status = hr_base64_decode(cases[i].text, strlen(cases[i].text), out, &n, &err);
        assert_refused(status, &err, cases[i].says);
        assert_int_equal(status, HR_ERR_INVALID);
        assert_int_equal(n, 77);
    }
}

/* Each of the 192 characters outside the alphabet, at each place of a long text. */
static void no_other_character_is_taken_anywhere(void **state) {
    (void)state;
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (unsigned c = 0; c < 256; c++) {
        for (size_t place = 0; place < 24; place++) {
            char text[24], wanted[32];
            unsigned char out[24];
            size_t n = 0;
            hr_error err = {0};
            memset(text, 'A', sizeof text);
            text[place] = (char)c;
            bool good = (c != 0 && strchr(alphabet, (int)c) != NULL) || (c == '=' && place == 23);
            hr_status status = hr_base64_decode(text, sizeof text, out, &n, &err);
            snprintf(wanted, sizeof wanted, "at position %zu", place);
            if (good)
                assert_ok(status, &err);
            else
                assert_refused(status, &err, wanted);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_of_the_rfc),
        cmocka_unit_test(every_byte_at_every_place),
        cmocka_unit_test(encoding_goes_on_where_the_buffer_ends),
        cmocka_unit_test(what_does_not_belong_is_refused_with_its_place),
        cmocka_unit_test(no_other_character_is_taken_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
