/* The payload reader and writer: payloads that torch wrote (the fuzz corpus, whose folder is the
 * argument), what is refused and why, where tensors point, shared memory and its count, and the way
 * back. Every form is held against torch itself in tests/e2e/test_torch_payload.py. */
#include "format/torch_payload.h"
#include "format/torch_write.h"

#include "testing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

static const char *corpus;

typedef struct payload_file {
    unsigned char *bytes;
    size_t size;
} payload_file;

static payload_file load(const char *name) {
    payload_file file = {0};
    FILE *stream = fopen(path_in(corpus, name), "rb");
    assert_non_null(stream);
    file.bytes = malloc(1 << 20);
    assert_non_null(file.bytes);
    file.size = fread(file.bytes, 1, 1 << 20, stream);
    /* No larger than the file, so that a sanitizer sees a read behind it. */
    file.bytes = realloc(file.bytes, file.size);
    fclose(stream);
    return file;
}

static const hr_tensor *find(const hr_torch_payload *payload, const char *name) {
    for (size_t i = 0; i < hr_torch_payload_count(payload); i++)
        if (strcmp(hr_torch_payload_tensors(payload)[i].name, name) == 0)
            return &hr_torch_payload_tensors(payload)[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void assert_floats(const hr_tensor *t, const float *wanted, size_t n) {
    assert_int_equal(t->dtype, HR_DTYPE_F32);
    assert_int_equal(t->bytes, n * sizeof *wanted);
    assert_memory_equal(t->data, wanted, t->bytes);
}

static bool points_into(const hr_tensor *t, const payload_file *file) {
    const unsigned char *at = t->data;
    return at >= file->bytes && at + t->bytes <= file->bytes + file->size;
}

static void refused(const char *name, hr_torch_options options, hr_status wanted,
                    const char *says) {
    payload_file file = load(name);
    hr_torch_payload *payload = NULL;
    hr_error err = {0};
    hr_status status = hr_torch_payload_read(file.bytes, file.size, &options, &payload, &err);
    assert_refused(status, &err, says);
    if (status != wanted)
        print_error("%s: %s\n", name, err.message);
    assert_int_equal(status, wanted);
    assert_null(payload);
    free(file.bytes);
}

/* --- what torch writes --- */

static void check_weights(const char *name) {
    static const float row[] = {4, 5, 6, 7}, steps[] = {1, 3, 9, 11}, scalar[] = {2.5f},
                       expanded[] = {0, 1, 2, 3, 0, 1, 2, 3}, last[] = {8, 9, 10, 11},
                       transposed[] = {0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11};
    payload_file file = load(name);
    hr_torch_options options = {0};
    hr_torch_payload *p = NULL;
    hr_error err = {0};
    assert_ok(hr_torch_payload_read(file.bytes, file.size, &options, &p, &err), &err);
    assert_int_equal(hr_torch_payload_count(p), 9);
    assert_string_equal(hr_torch_payload_tensors(p)[0].name, "whole");
    assert_int_equal(find(p, "whole")->dtype, HR_DTYPE_BF16);
    assert_int_equal(find(p, "whole")->bytes, 24);
    assert_floats(find(p, "row"), row, 4);
    assert_floats(find(p, "transposed"), transposed, 12);
    assert_int_equal(find(p, "transposed")->shape[0], 4);
    assert_int_equal(find(p, "transposed")->shape[1], 3);
    assert_floats(find(p, "steps"), steps, 4);
    assert_floats(find(p, "scalar"), scalar, 1);
    assert_int_equal(find(p, "scalar")->ndim, 0);
    assert_int_equal(find(p, "empty")->bytes, 0);
    assert_int_equal(find(p, "empty")->shape[1], 3);
    assert_floats(find(p, "expanded"), expanded, 8);
    assert_floats(find(p, "parameter"), last, 4);
    assert_int_equal(find(p, "f8")->dtype, HR_DTYPE_F8_E4M3);
    /* Protocol 2 writes bytes as text, which has to be decoded. */
    bool text = strcmp(name, "pairs-2") == 0;
    assert_int_equal(points_into(find(p, "whole"), &file), !text);
    assert_int_equal(points_into(find(p, "row"), &file), !text);
    assert_false(points_into(find(p, "transposed"), &file));
    assert_false(points_into(find(p, "expanded"), &file));
    hr_torch_payload_close(p);
    free(file.bytes);
}

static void every_protocol_and_container(void **state) {
    (void)state;
    static const char *const names[] = {"pairs-2", "pairs-3", "pairs-4",
                                        "pairs-5", "dict",    "ordered"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        check_weights(names[i]);
}

static void files_of_torch_save(void **state) {
    (void)state;
    static const char *const names[] = {"saved-legacy", "saved-zip"};
    static const float w[] = {0, 1, 2};
    static const int64_t v[] = {0, 1, 2, 3};
    for (size_t i = 0; i < 2; i++) {
        payload_file file = load(names[i]);
        hr_torch_options options = {0};
        hr_torch_payload *p = NULL;
        hr_error err = {0};
        assert_ok(hr_torch_payload_read(file.bytes, file.size, &options, &p, &err), &err);
        assert_floats(find(p, "w"), w, 3);
        assert_int_equal(find(p, "v")->dtype, HR_DTYPE_I64);
        assert_memory_equal(find(p, "v")->data, v, sizeof v);
        hr_torch_payload_close(p);
        free(file.bytes);
    }
}

static void buckets_of_both_layouts(void **state) {
    (void)state;
    static const float old[] = {0, 1, 2, 3};
    hr_torch_options options = {.flattened = true};
    hr_torch_payload *p = NULL;
    hr_error err = {0};
    static const char *const bytewise[] = {"bucket-new", "bucket-dicts"};
    for (size_t i = 0; i < 2; i++) {
        payload_file file = load(bytewise[i]);
        assert_ok(hr_torch_payload_read(file.bytes, file.size, &options, &p, &err), &err);
        assert_int_equal(find(p, "a")->dtype, HR_DTYPE_BF16);
        assert_int_equal(find(p, "a")->bytes, 6);
        assert_int_equal(find(p, "b")->dtype, HR_DTYPE_F32);
        assert_ptr_equal(find(p, "b")->data, (const char *)find(p, "a")->data + 6); /* unaligned */
        assert_int_equal(*(const unsigned char *)find(p, "b")->data, 6);
        hr_torch_payload_close(p);
        free(file.bytes);
    }
    payload_file file = load("bucket-old");
    assert_ok(hr_torch_payload_read(file.bytes, file.size, &options, &p, &err), &err);
    assert_floats(find(p, "a"), old, 3);
    assert_floats(find(p, "b"), old + 3, 1);
    hr_torch_payload_close(p);
    free(file.bytes);
    refused("bucket-overlap", options, HR_ERR_SHAPE, "overlap");
    refused("dict", options, HR_ERR_INVALID, "flattened bucket");
    options.flattened = false;
    refused("bucket-new", options, HR_ERR_INVALID, "load_format");
}

static void a_value_for_each_rank(void **state) {
    (void)state;
    payload_file file = load("local");
    for (uint32_t rank = 0; rank < 2; rank++) {
        float wanted[] = {(float)rank, (float)rank};
        hr_torch_options options = {.rank = rank};
        hr_torch_payload *p = NULL;
        hr_error err = {0};
        assert_ok(hr_torch_payload_read(file.bytes, file.size, &options, &p, &err), &err);
        assert_floats(find(p, "w"), wanted, 2);
        hr_torch_payload_close(p);
    }
    free(file.bytes);
    refused("local", (hr_torch_options){.rank = 2}, HR_ERR_INVALID, "none for rank 2");
}

/* --- what is refused --- */

static void references_are_refused_with_the_remedy(void **state) {
    (void)state;
    hr_torch_options none = {0};
    refused("file-descriptor", none, HR_ERR_UNSUPPORTED, "file_descriptor");
    refused("file-descriptor", none, HR_ERR_UNSUPPORTED, "plain pickle");
    refused("cuda-torch", none, HR_ERR_UNSUPPORTED, "CUDA");
    refused("cuda-sglang", none, HR_ERR_UNSUPPORTED, "CPU tensors");
    refused("file-system", none, HR_ERR_NOT_FOUND, "gone");
    refused("file-system", none, HR_ERR_NOT_FOUND, "inline");
}

static void nothing_is_run_and_names_are_said(void **state) {
    (void)state;
    hr_torch_options none = {0};
    refused("os-system", none, HR_ERR_UNSUPPORTED, "os.system");
    refused("os-system", none, HR_ERR_UNSUPPORTED, "nothing of it was run");
    refused("eval", none, HR_ERR_UNSUPPORTED, "builtins.eval");
    refused("complex64", none, HR_ERR_DTYPE, "Complex");
    refused("twice", none, HR_ERR_INVALID, "w is given twice");
    refused("buffer", none, HR_ERR_UNSUPPORTED, "NEXT_BUFFER");
}

static void sizes_are_bounded_before_memory_is_taken(void **state) {
    (void)state;
    hr_torch_options none = {0};
    refused("marks", none, HR_ERR_LIMIT, "deeper than 256");
    refused("frame", none, HR_ERR_CORRUPT, "frame");
    refused("memo", none, HR_ERR_CORRUPT, "memo");
    refused("bytes", none, HR_ERR_CORRUPT, "ends inside");
    refused("huge", none, HR_ERR_LIMIT, "4398046511104");
    refused("itself", none, HR_ERR_CORRUPT, "other than one value");
    refused("dict", (hr_torch_options){.max_bytes = 100}, HR_ERR_LIMIT, "over the limit of 100");
}

static void bytes_cut_short_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {"pairs-4", "saved-legacy", "saved-zip", "bucket-new"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        payload_file file = load(names[i]);
        for (size_t n = 0; n < file.size; n++) {
            hr_torch_options options = {.flattened = i == 3};
            hr_torch_payload *p = NULL;
            hr_error err = {0};
            unsigned char *cut = malloc(n + 1);
            memcpy(cut, file.bytes, n);
            assert_int_not_equal(hr_torch_payload_read(cut, n, &options, &p, &err), HR_OK);
            free(cut);
        }
        free(file.bytes);
    }
}

/* --- shared memory --- */

/* An object as torch makes it: a count in a header of 64 bytes, then floats 1, 2, 3. */
static const char *make_object(int32_t count) {
    static char name[64];
    static int serial;
    unsigned char bytes[64 + 12] = {0};
    float values[] = {1, 2, 3};
    snprintf(name, sizeof name, "/torch_%d_77_%d", (int)getpid(), serial++);
    memcpy(bytes, &count, sizeof count);
    memcpy(bytes + 64, values, sizeof values);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, sizeof bytes), sizeof bytes);
    close(fd);
    return name;
}

/* The count of an object, -1 when it is gone. */
static int32_t count_of(const char *name) {
    int32_t count = -1;
    int fd = shm_open(name, O_RDONLY, 0);
    if (fd < 0)
        return -1;
    assert_int_equal(pread(fd, &count, sizeof count, 0), sizeof count);
    close(fd);
    return count;
}

/* {"w": the tensor of `size` bytes in that object}, as ForkingPickler writes it. */
static void put_shared_payload(hr_buf *out, const char *name, unsigned size) {
    unsigned char length = (unsigned char)strlen(name);
    hr_buf_append(out, "\x80\x02}X\x01\x00\x00\x00w", 9);
    hr_buf_puts(out, "ctorch.multiprocessing.reductions\nrebuild_tensor\n(ctorch\nTensor\n"
                     "ctorch.multiprocessing.reductions\nrebuild_typed_storage\n"
                     "ctorch.multiprocessing.reductions\nrebuild_storage_filename\n"
                     "(ctorch.storage\nUntypedStorage\n");
    hr_buf_append(out, "C\x01sC", 4);
    hr_buf_append(out, &length, 1);
    hr_buf_puts(out, name);
    hr_buf_putc(out, 'K');
    hr_buf_putc(out, (char)size);
    hr_buf_puts(out, "tRctorch\nfloat32\n");
    hr_buf_append(out, "\x86R(K\x00K\x03\x85K\x01\x85\x89ttRs.", 17);
}

static hr_status read_shared(const char *name, unsigned size, bool keep, hr_torch_payload **out,
                             hr_error *err) {
    hr_torch_options options = {.keep_shared = keep};
    hr_buf payload = {0};
    put_shared_payload(&payload, name, size);
    /* The tensors are copies: they outlive the payload's bytes. */
    hr_status status = hr_torch_payload_read(payload.data, payload.len, &options, out, err);
    hr_buf_free(&payload);
    return status;
}

static void one_count_is_given_back_for_each_payload(void **state) {
    (void)state;
    static const float wanted[] = {1, 2, 3};
    const char *name = make_object(2); /* the producer's and the payload's */
    hr_torch_payload *p = NULL;
    hr_error err = {0};
    assert_ok(read_shared(name, 12, false, &p, &err), &err);
    assert_int_equal(count_of(name), 1);
    shm_unlink(name);
    assert_floats(find(p, "w"), wanted, 3);
    hr_torch_payload_close(p);
}

static void the_last_count_removes_the_object(void **state) {
    (void)state;
    const char *name = make_object(1);
    hr_torch_payload *p = NULL;
    hr_error err = {0};
    assert_ok(read_shared(name, 12, false, &p, &err), &err);
    assert_int_equal(count_of(name), -1);
    hr_torch_payload_close(p);
    assert_refused(read_shared(name, 12, false, &p, &err), &err, "gone");
    assert_int_equal(err.status, HR_ERR_NOT_FOUND);
}

static void all_ranks_but_the_last_keep_the_count(void **state) {
    (void)state;
    const char *name = make_object(2);
    hr_error err = {0};
    for (int rank = 0; rank < 4; rank++) {
        hr_torch_payload *p = NULL;
        assert_ok(read_shared(name, 12, rank < 3, &p, &err), &err);
        assert_int_equal(count_of(name), rank < 3 ? 2 : 1);
        hr_torch_payload_close(p);
    }
    shm_unlink(name);
}

static void an_object_that_is_not_torchs_is_left_alone(void **state) {
    (void)state;
    hr_torch_payload *p = NULL;
    hr_error err = {0};
    const char *name = make_object(2);
    assert_refused(read_shared(name, 13, false, &p, &err), &err, "76 bytes");
    assert_int_equal(count_of(name), 2);
    shm_unlink(name);
    name = make_object(0); /* somebody counted wrong: not made worse */
    assert_ok(read_shared(name, 12, false, &p, &err), &err);
    assert_int_equal(count_of(name), 0);
    hr_torch_payload_close(p);
    shm_unlink(name);
    assert_refused(read_shared("/torch_1/../x", 12, false, &p, &err), &err, "not torch's");
    assert_refused(read_shared("/sem.torch_1", 12, false, &p, &err), &err, "not torch's");
}

/* --- the writer --- */

static void what_is_written_is_read_back(void **state) {
    (void)state;
    unsigned char data[64];
    hr_tensor tensors[HR_DTYPE_COUNT + 2];
    char names[HR_DTYPE_COUNT + 2][16];
    size_t n = 0;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 11);
    for (; n < HR_DTYPE_COUNT; n++) {
        size_t item = hr_dtype_size((hr_dtype)n);
        snprintf(names[n], sizeof names[n], "dtype %zu", n);
        tensors[n] =
            (hr_tensor){names[n], (hr_dtype)n, 3, {1, 3, 2}, data + n % 3, 6 * (uint64_t)item};
    }
    tensors[n++] = (hr_tensor){"scalar", HR_DTYPE_F32, 0, {0}, data, 4};
    tensors[n++] = (hr_tensor){"empty", HR_DTYPE_BF16, 2, {0, 300}, data, 0};
    for (int form = HR_TORCH_PAIRS; form <= HR_TORCH_FLATTENED; form++) {
        hr_torch_options options = {.flattened = form == HR_TORCH_FLATTENED};
        hr_torch_payload *p = NULL;
        hr_error err = {0};
        hr_buf out = {0};
        assert_ok(hr_torch_payload_write(tensors, n, (hr_torch_form)form, &out, &err), &err);
        assert_ok(hr_torch_payload_read(out.data, out.len, &options, &p, &err), &err);
        assert_int_equal(hr_torch_payload_count(p), n);
        for (size_t i = 0; i < n; i++) {
            const hr_tensor *t = &hr_torch_payload_tensors(p)[i];
            assert_string_equal(t->name, tensors[i].name);
            assert_int_equal(t->dtype, tensors[i].dtype);
            assert_int_equal(t->ndim, tensors[i].ndim);
            assert_memory_equal(t->shape, tensors[i].shape, sizeof t->shape);
            assert_int_equal(t->bytes, tensors[i].bytes);
            assert_memory_equal(t->data, tensors[i].data, t->bytes);
        }
        hr_torch_payload_close(p);
        hr_buf_free(&out);
    }
}

static void what_no_reader_could_tell_apart_is_not_written(void **state) {
    (void)state;
    float one = 1;
    hr_tensor twins[] = {{"w", HR_DTYPE_F32, 0, {0}, &one, 4},
                         {"w", HR_DTYPE_F32, 0, {0}, &one, 4}};
    hr_error err = {0};
    hr_buf out = {0};
    assert_refused(hr_torch_payload_write(twins, 2, HR_TORCH_DICT, &out, &err), &err, "twice");
    assert_refused(hr_torch_payload_write(twins, 0, HR_TORCH_FLATTENED, &out, &err), &err,
                   "at least one");
    assert_int_equal(out.len, 0);
    hr_buf_free(&out);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_protocol_and_container),
        cmocka_unit_test(files_of_torch_save),
        cmocka_unit_test(buckets_of_both_layouts),
        cmocka_unit_test(a_value_for_each_rank),
        cmocka_unit_test(references_are_refused_with_the_remedy),
        cmocka_unit_test(nothing_is_run_and_names_are_said),
        cmocka_unit_test(sizes_are_bounded_before_memory_is_taken),
        cmocka_unit_test(bytes_cut_short_are_refused),
        cmocka_unit_test(one_count_is_given_back_for_each_payload),
        cmocka_unit_test(the_last_count_removes_the_object),
        cmocka_unit_test(all_ranks_but_the_last_keep_the_count),
        cmocka_unit_test(an_object_that_is_not_torchs_is_left_alone),
        cmocka_unit_test(what_is_written_is_read_back),
        cmocka_unit_test(what_no_reader_could_tell_apart_is_not_written),
    };
    if (argc != 2) {
        fprintf(stderr, "test_torch_payload: wanted the folder of payloads\n");
        return 2;
    }
    corpus = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
