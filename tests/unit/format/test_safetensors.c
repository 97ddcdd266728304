/* The safetensors container, and the checkpoint directories made of it. */
#include "format/checkpoint.h"
#include "format/file.h"
#include "format/safetensors.h"

#include "testing.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* An image of a header text and a number of data bytes. */
static hr_buf image_of(const char *header, size_t data_bytes) {
    hr_buf image = {0};
    size_t n = strlen(header);
    for (int i = 0; i < 8; i++)
        hr_buf_putc(&image, (char)(n >> (8 * i)));
    hr_buf_puts(&image, header);
    for (size_t i = 0; i < data_bytes; i++)
        hr_buf_putc(&image, (char)i);
    return image;
}

static hr_status parse(const char *header, size_t data_bytes, hr_error *err) {
    hr_buf image = image_of(header, data_bytes);
    char *copy = malloc(image.len); /* nothing behind it */
    memcpy(copy, image.data, image.len);
    hr_safetensors *file = NULL;
    hr_status status = hr_safetensors_parse(copy, image.len, "f.safetensors", &file, err);
    hr_safetensors_close(file);
    free(copy);
    hr_buf_free(&image);
    return status;
}

typedef struct container_case {
    const char *header;
    size_t bytes;
    const char *names; /* in the message; NULL when legal */
} container_case;

#define T(name, dtype, shape, begin, end)                                                          \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end \
    "]}"

static const container_case container_cases[] = {
    /* legal */
    {"{}", 0, NULL},
    {"{\"__metadata__\":{\"format\":\"pt\"}}   ", 0, NULL},
    {"{" T("a", "F32", "[2]", 0, 8) "}", 8, NULL},
    {"{" T("b", "U8", "[1]", 8, 9) "," T("a", "F32", "[2]", 0, 8) "}", 9, NULL}, /* out of order */
    {"{" T("a", "U8", "[3]", 0, 3) "," T("b", "F32", "[1]", 3, 7) "}", 7, NULL}, /* unaligned */
    {"{" T("a", "F32", "[0]", 0, 0) "," T("b", "F32", "[0,16]", 0, 0) "," T("c", "F32", "[]", 0,
                                                                            4) "}",
     4, NULL},
    {"{" T("a", "F32", "[1]", 0, 4) "," T("z", "BF16", "[3,0]", 4, 4) "," T("c", "U8", "[1]", 4,
                                                                            5) "}",
     5, NULL},
    /* refused, naming the tensor */
    {"{" T("a", "F32", "[1]", 0, 4) "," T("shared", "F32", "[1]", 0, 4) "}", 4, "shared"},
    {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[4]", 5, 9) "}", 9, "tensor b: hole"},
    {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[4]", 3, 7) "}", 7, "tensor b: overlap"},
    {"{" T("first", "U8", "[4]", 1, 5) "}", 5, "first: hole"},
    {"{" T("a", "U8", "[4]", 0, 4) "}", 5, "1 bytes after the last tensor"},
    {"{}", 1, "1 bytes after"},
    {"{" T("a", "U8", "[4]", 4, 0) "}", 4, "tensor a: data begins at 4 after its end at 0"},
    {"{" T("a", "F32", "[1]", 0, 0) "}", 0, "tensor a: shape [1] of F32 needs 4 bytes"},
    {"{" T("a", "F32", "[2]", 0, 4) "}", 4, "needs 8 bytes, its offsets hold 4"},
    {"{" T("a", "U8", "[4294967296,4294967296]", 0, 0) "}", 0,
     "tensor a: the product of the shape overflows"},
    {"{" T("a", "U8", "[4294967296,4294967296,0]", 0, 0) "}", 0, "overflows"},
    {"{" T("a", "F64", "[2305843009213693952]", 0, 0) "}", 0, "overflows"},
    {"{" T("a", "U8", "[-1]", 0, 0) "}", 0, "not a size"},
    {"{" T("a", "U8", "[1.5]", 0, 1) "}", 1, "not a size"},
    {"{" T("a", "U8", "[1.0]", 0, 1) "}", 1, "not a size"},
    {"{" T("a", "U8", "[1e0]", 0, 1) "}", 1, "not a size"},
    {"{" T("a", "U8", "[-0]", 0, 0) "}", 0, "not a size"},
    {"{" T("a", "U8", "[0,9223372036854775807]", 0, 0) "}", 0, NULL},
    {"{" T("a", "U8", "[0,9223372036854775808]", 0, 0) "}", 0, "not a size"},
    {"{" T("a", "U8", "[0,18446744073709551617]", 0, 0) "}", 0, "not a size"},
    {"{" T("a", "U8", "[\\\"1\\\"]", 0, 1) "}", 1, "header"},
    {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, "8 dimensions"},
    {"{" T("a", "U8", "3", 0, 3) "}", 3, "shape is not an array"},
    {"{" T("a", "F4", "[1]", 0, 1) "}", 1, "dtype F4"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor a: data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "tensor a: data_offsets"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor a: header entry has no dtype"},
    {"{\"a\":3}", 0, "tensor a: header entry is not an object"},
    {"{" T("twin", "U8", "[1]", 0, 1) "," T("twin", "U8", "[1]", 1, 2) "}", 2,
     "twin twice (duplicate)"},
    {"{" T("twin", "U8", "[1]", 0, 1) "," T("twin", "U8", "[1]", 0, 1) "}", 1, "duplicate"},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "duplicate"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__ k is not a string"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ twice (duplicate)"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "dtype twice (duplicate)"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":{\"y\":1,\"y\":1}}}", 1,
     "y twice (duplicate)"},
    {"{\"a\":{\"x\":0,\"dtype\":\"U8\",\"shape\":[1],\"x\":0,\"data_offsets\":[0,1]}}", 1,
     "x twice (duplicate)"},
    {"{\"a\":{\"x\":[{}],\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, NULL},
    {"{\"\\u0061\":{\"d\\u0074ype\":\"U\\u0038\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, NULL},
    {"{ \"a\" : { \"shape\" : [ 1 , 1 ] , \"data_offsets\" :[ 0 ,1 ] , \"dtype\":\"U8\" } } ", 1,
     NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{}}}", 1, "data_offsets"},
    {"{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no dtype"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}", 1, "header: malformed JSON"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,],\"data_offsets\":[0,1]}}", 1,
     "header: malformed JSON"},
    {"{\"a\":nul}", 0, "header: malformed JSON"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
    {" {}", 0, "does not begin with '{'"},
    {"[]", 0, "does not begin with '{'"},
    {"", 0, "does not begin with '{'"},
    {"{} x", 0, "header: malformed JSON"},
    {"{\"a\\u0000b\":{}}", 0, "\\u0000"},
};

static void the_header_must_cover_the_data_exactly(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof container_cases / sizeof *container_cases; i++) {
        const container_case *c = &container_cases[i];
        hr_error err = {0};
        hr_status status = parse(c->header, c->bytes, &err);
        if (c->names == NULL)
            assert_ok(status, &err);
        else
            assert_refused(status, &err, c->names);
        if (c->names != NULL)
            assert_non_null(strstr(err.message, "f.safetensors"));
    }
}

static void sizes_are_exact_above_2_to_the_53(void **state) {
    (void)state;
    static const char header[] = "{" T("a", "U8", "[9007199254740993,0]", 0, 0) "}";
    unsigned char bytes[8 + sizeof header - 1] = {sizeof header - 1};
    memcpy(bytes + 8, header, sizeof header - 1);
    hr_safetensors *file = NULL;
    hr_error err = {0};
    assert_ok(hr_safetensors_parse(bytes, sizeof bytes, "f.safetensors", &file, &err), &err);
    assert_int_equal(hr_safetensors_at(file, 0)->shape[0], 9007199254740993);
    hr_safetensors_close(file);
}

static void every_cut_of_a_file_is_refused_with_both_sizes(void **state) {
    (void)state;
    hr_buf image = image_of("{" T("a", "F32", "[4]", 0, 16) "}", 16);
    char whole[64];
    snprintf(whole, sizeof whole, "%zu bytes", image.len);
    for (size_t n = 0; n < image.len; n++) {
        char *copy = malloc(n ? n : 1), has[64];
        hr_safetensors *file = NULL;
        hr_error err = {0};
        memcpy(copy, image.data, n);
        assert_refused(hr_safetensors_parse(copy, n, "f", &file, &err), &err, "cut short");
        snprintf(has, sizeof has, "%zu", n);
        assert_non_null(strstr(err.message, has));
        if (n >= image.len - 16)
            assert_non_null(strstr(err.message, whole));
        free(copy);
    }
    hr_buf_free(&image);
}

static void absurd_header_lengths_take_no_memory(void **state) {
    (void)state;
    static const unsigned char lengths[][8] = {{0, 0, 0, 0, 0, 0, 0, 0x80},
                                               {1, 0xe1, 0xf5, 5, 0, 0, 0, 0},
                                               {255, 255, 255, 255, 255, 255, 255, 255}};
    for (size_t i = 0; i < 3; i++) {
        hr_safetensors *file = NULL;
        hr_error err = {0};
        assert_refused(hr_safetensors_parse(lengths[i], 8, "f", &file, &err), &err,
                       "over the limit");
    }
}

static void tensors_are_found_and_listed_in_data_order(void **state) {
    (void)state;
    hr_buf image = image_of("{\"__metadata__\":{\"k\":\"v\"}," T("z", "U8", "[2]", 0, 2) "," T(
                                "m", "U8", "[1]", 3, 4) "," T("a", "U8", "[1,1]", 2, 3) "}",
                            4);
    hr_safetensors *file = NULL;
    hr_error err = {0};
    assert_ok(hr_safetensors_parse(image.data, image.len, "f", &file, &err), &err);
    assert_int_equal(hr_safetensors_count(file), 3);
    assert_string_equal(hr_safetensors_at(file, 0)->name, "z");
    assert_string_equal(hr_safetensors_at(file, 1)->name, "a");
    const hr_tensor *m = hr_safetensors_find(file, "m");
    assert_non_null(m);
    assert_int_equal(*(const unsigned char *)m->data, 3);
    assert_null(hr_safetensors_find(file, "mm"));
    assert_null(hr_safetensors_find(file, "__metadata__"));
    assert_string_equal(hr_safetensors_metadata(file, "k"), "v");
    assert_null(hr_safetensors_metadata(file, "x"));
    hr_safetensors_drop(file, m); /* nothing to do for memory */
    assert_int_equal(*(const unsigned char *)m->data, 3);
    hr_safetensors_close(file);
    hr_buf_free(&image);
}

static hr_tensor tensor_of(const char *name, hr_dtype dtype, uint64_t rows, uint64_t columns,
                           const void *data) {
    return (hr_tensor){.name = name,
                       .dtype = dtype,
                       .ndim = 2,
                       .shape = {rows, columns},
                       .data = data,
                       .bytes = rows * columns * hr_dtype_size(dtype)};
}

static void what_is_written_reads_back_aligned(void **state) {
    (void)state;
    static unsigned char bytes[4096];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 31);
    const hr_tensor tensors[] = {tensor_of("odd", HR_DTYPE_U8, 1, 3, bytes),
                                 tensor_of("w", HR_DTYPE_BF16, 8, 16, bytes + 100),
                                 tensor_of("bias", HR_DTYPE_F32, 1, 5, bytes + 7),
                                 tensor_of("n\"\xc3\xa9", HR_DTYPE_F32, 4, 16, bytes + 900),
                                 tensor_of("empty", HR_DTYPE_F32, 0, 5, NULL)};
    hr_buf image = {0};
    hr_error err = {0};
    hr_safetensors *file = NULL;
    assert_ok(hr_safetensors_write(tensors, 5, &image, &err), &err);
    assert_ok(hr_safetensors_parse(image.data, image.len, "image", &file, &err), &err);
    assert_int_equal(hr_safetensors_count(file), 5);
    for (size_t i = 0; i < 5; i++) {
        const hr_tensor *back = hr_safetensors_find(file, tensors[i].name);
        assert_non_null(back);
        assert_int_equal(back->dtype, tensors[i].dtype);
        assert_int_equal(back->bytes, tensors[i].bytes);
        if (back->bytes > 0)
            assert_memory_equal(back->data, tensors[i].data, back->bytes);
        size_t offset = (size_t)((const char *)back->data - image.data);
        size_t align = back->bytes % 64 == 0 ? 64 : hr_dtype_size(back->dtype);
        assert_int_equal(offset % align, 0);
    }
    hr_safetensors_close(file);
    hr_buf_free(&image);
}

static void equal_and_reserved_names_are_not_written(void **state) {
    (void)state;
    hr_buf image = {0};
    hr_error err = {0};
    const hr_tensor twins[] = {tensor_of("twin", HR_DTYPE_U8, 1, 1, "a"),
                               tensor_of("twin", HR_DTYPE_U8, 1, 1, "b")};
    assert_refused(hr_safetensors_write(twins, 2, &image, &err), &err, "twin is given twice");
    const hr_tensor reserved = tensor_of("__metadata__", HR_DTYPE_U8, 1, 1, "a");
    assert_refused(hr_safetensors_write(&reserved, 1, &image, &err), &err, "reserved");
    hr_buf_free(&image);
}

static void a_dropped_tensor_reads_the_same_again(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_error err = {0};
    size_t n = 1 << 20;
    unsigned char *bytes = malloc(n);
    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)(i >> 4);
    const hr_tensor tensor = tensor_of("w", HR_DTYPE_U8, n / 64, 64, bytes);
    hr_safetensors *file = NULL;
    assert_ok(hr_safetensors_save(path_in(dir, "w.safetensors"), &tensor, 1, &err), &err);
    assert_ok(hr_safetensors_open(path_in(dir, "w.safetensors"), &file, &err), &err);
    const hr_tensor *w = hr_safetensors_find(file, "w");
    assert_memory_equal(w->data, bytes, n);
    hr_safetensors_drop(file, w);
    assert_memory_equal(w->data, bytes, n);
    hr_safetensors_close(file);
    free(bytes);
    remove_dir(dir, (const char *const[]){"w.safetensors", NULL});
}

static void a_file_read_into_memory_outlives_its_change(void **state) {
    (void)state;
    const char *dir = new_dir(), *path;
    hr_error err = {0};
    unsigned char bytes[64];
    memset(bytes, 7, sizeof bytes);
    const hr_tensor tensor = tensor_of("w", HR_DTYPE_U8, 1, sizeof bytes, bytes);
    hr_safetensors *file = NULL;
    path = path_in(dir, "w.safetensors");
    assert_ok(hr_safetensors_save(path, &tensor, 1, &err), &err);
    assert_refused(hr_safetensors_read(path, 20, &file, &err), &err, "over the limit of 20");
    assert_ok(hr_safetensors_read(path, 1 << 20, &file, &err), &err);
    assert_int_equal(truncate(path, 0), 0);
    hr_safetensors_drop(file, hr_safetensors_at(file, 0));
    assert_memory_equal(hr_safetensors_find(file, "w")->data, bytes, sizeof bytes);
    hr_safetensors_close(file);
    assert_refused(hr_safetensors_read(path, 1 << 20, &file, &err), &err, "cut short");
    remove_dir(dir, (const char *const[]){"w.safetensors", NULL});
}

/* A trainer may save over a checkpoint that an engine reads: an error, not a signal and not half of
 * each. */
static void a_file_that_is_written_to_while_it_is_fetched_is_refused(void **state) {
    (void)state;
    const char *dir = new_dir(), *path;
    hr_error err = {0};
    size_t n = 1 << 20;
    unsigned char *bytes = malloc(n);
    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)(i >> 4);
    const hr_tensor two[2] = {tensor_of("a", HR_DTYPE_U8, n / 128, 64, bytes),
                              tensor_of("b", HR_DTYPE_U8, n / 128, 64, bytes + n / 2)};
    hr_safetensors *file = NULL;
    path = path_in(dir, "w.safetensors");
    assert_ok(hr_safetensors_save(path, two, 2, &err), &err);
    assert_ok(hr_safetensors_open_unread(path, &file, &err), &err);
    const hr_tensor *a = hr_safetensors_find(file, "a"), *b = hr_safetensors_find(file, "b");
    for (int again = 0; again < 2; again++) {
        assert_ok(hr_safetensors_fetch(file, a, &err), &err);
        assert_memory_equal(a->data, bytes, n / 2);
        hr_safetensors_drop(file, a);
    }
    const struct timespec past[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, path, past, 0), 0);
    assert_refused(hr_safetensors_fetch(file, b, &err), &err, "written to while it was read");
    assert_int_equal(truncate(path, 500), 0);
    assert_refused(hr_safetensors_fetch(file, b, &err), &err, "cut short");
    assert_int_equal(err.status, HR_ERR_CORRUPT);
    hr_safetensors_close(file);
    assert_refused(hr_safetensors_open_unread(path, &file, &err), &err, "cut short");
    free(bytes);
    remove_dir(dir, (const char *const[]){"w.safetensors", NULL});
}

/* Opening one would wait for a writer that never comes. */
static void a_fifo_is_not_waited_for(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_safetensors *file = NULL;
    hr_error err = {0};
    hr_buf text = {0};
    const char *path = path_in(dir, "f");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_refused(hr_safetensors_open(path, &file, &err), &err, "not a regular file");
    assert_refused(hr_safetensors_read(path, 100, &file, &err), &err, "not a regular file");
    assert_refused(hr_safetensors_open_unread(path, &file, &err), &err, "not a regular file");
    assert_refused(hr_file_read(path, 100, &text, &err), &err, "not a regular file");
    remove_dir(dir, (const char *const[]){"f", NULL});
}

static void a_file_that_cannot_be_opened_is_named(void **state) {
    (void)state;
    hr_safetensors *file = NULL;
    hr_error err = {0};
    assert_refused(hr_safetensors_open("/nonexistent/m.safetensors", &file, &err), &err,
                   "/nonexistent/m.safetensors");
    assert_int_equal(err.status, HR_ERR_NOT_FOUND);
    assert_refused(hr_safetensors_open("/", &file, &err), &err, "not a regular file");
}

/* ---- checkpoint directories ---- */

static void save(const char *dir, const char *file, const char *const *names, size_t n) {
    hr_tensor tensors[4];
    hr_error err = {0};
    for (size_t i = 0; i < n; i++)
        tensors[i] = tensor_of(names[i], HR_DTYPE_F32, 1, 2, "12345678");
    assert_ok(hr_safetensors_save(path_in(dir, file), tensors, n, &err), &err);
}

static hr_status open_and_close(const char *dir, size_t *count, hr_error *err) {
    hr_checkpoint *checkpoint = NULL;
    hr_status status = hr_checkpoint_open(dir, &checkpoint, err);
    if (status == HR_OK) {
        *count = hr_checkpoint_count(checkpoint);
        assert_int_equal(hr_checkpoint_bytes(checkpoint), *count * 8);
        for (size_t i = 0; i < *count; i++) {
            const hr_tensor *tensor = hr_checkpoint_at(checkpoint, i);
            assert_ptr_equal(hr_checkpoint_find(checkpoint, tensor->name), tensor);
            hr_checkpoint_drop(checkpoint, tensor);
        }
        assert_null(hr_checkpoint_find(checkpoint, "nobody"));
    }
    hr_checkpoint_close(checkpoint);
    return status;
}

/* Shard one has a, b; two has c: each tensor is fetched from its own. */
static void tensors_of_shards_are_fetched(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_error err = {0};
    hr_checkpoint *checkpoint = NULL;
    save(dir, "one.safetensors", (const char *const[]){"a", "b"}, 2);
    save(dir, "two.safetensors", (const char *const[]){"c"}, 1);
    static const char index[] = "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":"
                                "\"one.safetensors\",\"c\":\"two.safetensors\"}}";
    write_file(dir, "model.safetensors.index.json", index, strlen(index));
    assert_ok(hr_checkpoint_open_unread(dir, &checkpoint, &err), &err);
    for (size_t i = 0; i < 3; i++) {
        const hr_tensor *tensor = hr_checkpoint_at(checkpoint, i);
        assert_ok(hr_checkpoint_fetch(checkpoint, tensor, &err), &err);
        assert_memory_equal(tensor->data, "12345678", 8);
        hr_checkpoint_drop(checkpoint, tensor);
    }
    hr_checkpoint_close(checkpoint);
    remove_dir(dir, (const char *const[]){"one.safetensors", "two.safetensors",
                                          "model.safetensors.index.json", NULL});
}

static void a_single_file_is_a_checkpoint(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_error err = {0};
    size_t count = 0;
    save(dir, "model.safetensors", (const char *const[]){"a", "b"}, 2);
    assert_ok(open_and_close(dir, &count, &err), &err);
    assert_int_equal(count, 2);
    remove_dir(dir, (const char *const[]){"model.safetensors", NULL});
}

typedef struct index_case {
    const char *index, *names;
} index_case;

/* Shard one.safetensors holds a and b, two.safetensors c, three.safetensors a. */
static const index_case index_cases[] = {
    {"{\"metadata\":{},\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"c\":"
     "\"two.safetensors\"}}",
     NULL},
    {"{\"weight_map\":{\"a\":\"one.safetensors\",\"z\":\"gone.safetensors\"}}", "gone.safetensors"},
    {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}",
     "tensor b should be in two.safetensors"},
    {"{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\",\"a\":\"three."
     "safetensors\"}}",
     "tensor a is listed twice"},
    {"{\"weight_map\":{\"b\":\"one.safetensors\",\"a\":\"three.safetensors\"}}",
     "tensor a is in two shards"},
    {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}",
     "tensor a: wanted the name of a .safetensors file"},
    {"{\"weight_map\":{\"a\":\"one.bin\"}}", "one.bin"},
    {"{\"weight_map\":{\"a\":1}}", "tensor a"},
    {"{\"weight_map\":{}}", "weight_map"},
    {"{}", "weight_map"},
    {"[]", "object"},
    {"{", "malformed JSON"},
};

static void an_index_and_its_shards_must_agree(void **state) {
    (void)state;
    const char *dir = new_dir();
    save(dir, "one.safetensors", (const char *const[]){"a", "b"}, 2);
    save(dir, "two.safetensors", (const char *const[]){"c"}, 1);
    save(dir, "three.safetensors", (const char *const[]){"a"}, 1);
    for (size_t i = 0; i < sizeof index_cases / sizeof *index_cases; i++) {
        hr_error err = {0};
        size_t count = 0;
        write_file(dir, "model.safetensors.index.json", index_cases[i].index,
                   strlen(index_cases[i].index));
        hr_status status = open_and_close(dir, &count, &err);
        if (index_cases[i].names != NULL) {
            assert_refused(status, &err, index_cases[i].names);
            continue;
        }
        assert_ok(status, &err);
        assert_int_equal(count, 3);
    }
    remove_dir(dir, (const char *const[]){"one.safetensors", "two.safetensors", "three.safetensors",
                                          "model.safetensors.index.json", NULL});
}

static void pickled_weights_alone_are_refused(void **state) {
    (void)state;
    const char *dir = new_dir();
    hr_error err = {0};
    size_t count = 0;
    assert_refused(open_and_close(dir, &count, &err), &err, "neither model.safetensors nor");
    write_file(dir, "pytorch_model.bin", "x", 1);
    assert_refused(open_and_close(dir, &count, &err), &err, "pytorch_model.bin");
    assert_int_equal(err.status, HR_ERR_UNSUPPORTED);
    remove_dir(dir, (const char *const[]){"pytorch_model.bin", NULL});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_header_must_cover_the_data_exactly),
        cmocka_unit_test(sizes_are_exact_above_2_to_the_53),
        cmocka_unit_test(every_cut_of_a_file_is_refused_with_both_sizes),
        cmocka_unit_test(absurd_header_lengths_take_no_memory),
        cmocka_unit_test(tensors_are_found_and_listed_in_data_order),
        cmocka_unit_test(what_is_written_reads_back_aligned),
        cmocka_unit_test(equal_and_reserved_names_are_not_written),
        cmocka_unit_test(a_dropped_tensor_reads_the_same_again),
        cmocka_unit_test(a_file_read_into_memory_outlives_its_change),
        cmocka_unit_test(a_file_that_is_written_to_while_it_is_fetched_is_refused),
        cmocka_unit_test(a_fifo_is_not_waited_for),
        cmocka_unit_test(a_file_that_cannot_be_opened_is_named),
        cmocka_unit_test(tensors_of_shards_are_fetched),
        cmocka_unit_test(a_single_file_is_a_checkpoint),
        cmocka_unit_test(an_index_and_its_shards_must_agree),
        cmocka_unit_test(pickled_weights_alone_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
