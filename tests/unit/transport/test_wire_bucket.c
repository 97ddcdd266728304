/* A bucket on its way is the image that the safetensors writer makes, however it is read, and the
 * digests of its tensors come with the first reading. */
#include "format/safetensors.h"
#include "transport/wire_bucket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 7 };
static const size_t sizes[N] = {0, 1, 64, 1000, 128, 7, 0};

static void make(hr_tensor *tensors, char names[N][32], uint8_t *bytes) {
    size_t at = 0;
    for (size_t i = 0; i < N; i++) {
        snprintf(names[i], 32, "a:tensor.%zu", N - i);
        tensors[i] = (hr_tensor){.name = names[i],
                                 .dtype = HR_DTYPE_U8,
                                 .ndim = 1,
                                 .shape = {sizes[i]},
                                 .data = bytes + at,
                                 .bytes = sizes[i]};
        for (size_t k = 0; k < sizes[i]; k++)
            bytes[at++] = (uint8_t)(k * 7 + i);
    }
}

static void expect_digests(const hr_wire_bucket *bucket) {
    for (size_t i = 0; i < bucket->n; i++) {
        uint8_t digest[HR_XXH3_SIZE];
        hr_xxh3(bucket->tensors[i].tensor->data, bucket->tensors[i].tensor->bytes, digest);
        assert_memory_equal(digest, bucket->tensors[i].xxh3, sizeof digest);
    }
    assert_int_equal(bucket->hashed, bucket->n);
}

static void any_pieces_make_the_same_image(void **state) {
    (void)state;
    static const size_t pieces[] = {1, 3, 64, 100, 997, 4096, 100000};
    hr_tensor tensors[N];
    char names[N][32];
    uint8_t bytes[2000];
    hr_buf want = {0};
    make(tensors, names, bytes);
    assert_int_equal(hr_safetensors_write(tensors, N, &want, NULL), HR_OK);
    for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; p++) {
        hr_wire_bucket bucket;
        hr_buf image = {0};
        char *piece = malloc(pieces[p]);
        assert_int_equal(hr_wire_bucket_open(tensors, N, &bucket, NULL), HR_OK);
        assert_int_equal(bucket.bytes, 1200);
        assert_int_equal(bucket.size, want.len);
        while (image.len < bucket.size) {
            size_t got = hr_wire_bucket_read(&bucket, image.len, piece, pieces[p]);
            assert_in_range(got, 1, pieces[p]);
            hr_buf_append(&image, piece, got);
        }
        assert_int_equal(image.len, want.len);
        assert_memory_equal(image.data, want.data, want.len);
        expect_digests(&bucket);
        hr_wire_bucket_close(&bucket);
        hr_buf_free(&image);
        free(piece);
    }
    hr_buf_free(&want);
}

/* Several transfers read the same bucket, one may start again, and one may end early. */
static void digests_do_not_depend_on_who_reads(void **state) {
    (void)state;
    hr_tensor tensors[N];
    char names[N][32];
    uint8_t bytes[2000];
    char piece[333];
    make(tensors, names, bytes);
    hr_wire_bucket bucket;
    assert_int_equal(hr_wire_bucket_open(tensors, N, &bucket, NULL), HR_OK);
    uint64_t at[3] = {0, 0, 0};
    for (unsigned turn = 0; turn < 40; turn++) {
        uint64_t *where = &at[turn % 3];
        if (turn == 13)
            *where = 0;
        if (*where + 100 < bucket.size)
            *where += hr_wire_bucket_read(&bucket, *where, piece, 20 + turn * 5);
    }
    hr_wire_bucket_digest(&bucket);
    expect_digests(&bucket);
    hr_wire_bucket_close(&bucket);
}

static void digests_without_reading(void **state) {
    (void)state;
    hr_tensor tensors[N];
    char names[N][32];
    uint8_t bytes[2000];
    make(tensors, names, bytes);
    hr_wire_bucket bucket;
    assert_int_equal(hr_wire_bucket_open(tensors, N, &bucket, NULL), HR_OK);
    hr_wire_bucket_digest(&bucket);
    hr_wire_bucket_sha256(&bucket);
    expect_digests(&bucket);
    char sha256[HR_SHA256_HEX];
    hr_sha256_hex(bucket.tensors[3].tensor->data, bucket.tensors[3].tensor->bytes, sha256);
    assert_string_equal(bucket.tensors[3].sha256, sha256);
    hr_wire_bucket_close(&bucket);
}

static void a_name_that_comes_twice_is_refused(void **state) {
    (void)state;
    hr_tensor tensors[N];
    char names[N][32];
    uint8_t bytes[2000];
    hr_wire_bucket bucket;
    make(tensors, names, bytes);
    tensors[1].name = tensors[0].name;
    assert_int_equal(hr_wire_bucket_open(tensors, N, &bucket, NULL), HR_ERR_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_pieces_make_the_same_image),
        cmocka_unit_test(digests_do_not_depend_on_who_reads),
        cmocka_unit_test(digests_without_reading),
        cmocka_unit_test(a_name_that_comes_twice_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
