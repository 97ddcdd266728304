/* What the payload reader and writer do, for a test that holds them against torch.
 *
 *   torch_tool read [-r RANK] [-f] [-k] [-m BYTES] FILE...   the tensors of each payload, a line
 *                    each: name, dtype, shape, SHA-256; or one line "refused STATUS: message"
 *                    -f a flattened bucket, -k keep_shared, -m max_bytes
 *   torch_tool write pairs|dict|flattened IN OUT   IN is a safetensors file
 *   torch_tool decode|encode IN OUT                base64 */
#include "format/base64.h"
#include "format/safetensors.h"
#include "format/torch_payload.h"
#include "format/torch_write.h"

#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    unsigned char *data = NULL;
    long n = 0;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (n = ftell(file)) < 0 ||
        (data = malloc((size_t)n + 1)) == NULL) {
        fprintf(stderr, "torch_tool: %s cannot be read\n", path);
        exit(2);
    }
    rewind(file);
    *size = fread(data, 1, (size_t)n, file);
    fclose(file);
    return data;
}

static int write_file(const char *path, const void *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, n, file) != n || fclose(file) != 0) {
        fprintf(stderr, "torch_tool: %s cannot be written\n", path);
        return 1;
    }
    return 0;
}

static void print_tensor(const hr_tensor *t) {
    unsigned char digest[SHA256_DIGEST_LENGTH];
    char shape[128];
    SHA256(t->data, t->bytes, digest);
    printf("%s\t%s\t%s\t", t->name, hr_dtype_torch_name(t->dtype),
           hr_shape_format(t->shape, t->ndim, shape, sizeof shape));
    for (size_t i = 0; i < sizeof digest; i++)
        printf("%02x", digest[i]);
    printf("\n");
}

static int read_one(const char *path, const hr_torch_options *options) {
    hr_torch_payload *payload = NULL;
    hr_error err = {0};
    size_t size = 0;
    unsigned char *bytes = read_file(path, &size);
    hr_status status = hr_torch_payload_read(bytes, size, options, &payload, &err);
    if (status != HR_OK)
        printf("refused %s: %s\n", hr_status_name(status), err.message);
    else
        for (size_t i = 0; i < hr_torch_payload_count(payload); i++)
            print_tensor(&hr_torch_payload_tensors(payload)[i]);
    hr_torch_payload_close(payload);
    free(bytes);
    return status == HR_OK ? 0 : 1;
}

static int read_all(int argc, char **argv) {
    hr_torch_options options = {0};
    int option = 0, failed = 0;
    while ((option = getopt(argc, argv, "r:fkm:")) != -1) {
        if (option == 'r')
            options.rank = (uint32_t)strtoul(optarg, NULL, 10);
        else if (option == 'f')
            options.flattened = true;
        else if (option == 'k')
            options.keep_shared = true;
        else if (option == 'm')
            options.max_bytes = strtoull(optarg, NULL, 10);
        else
            return 2;
    }
    for (int i = optind; i < argc; i++)
        failed |= read_one(argv[i], &options);
    return failed;
}

static int write_payload(const char *form, const char *from, const char *to) {
    hr_safetensors *file = NULL;
    hr_error err = {0};
    hr_buf out = {0};
    hr_torch_form wanted = strcmp(form, "pairs") == 0  ? HR_TORCH_PAIRS
                           : strcmp(form, "dict") == 0 ? HR_TORCH_DICT
                                                       : HR_TORCH_FLATTENED;
    hr_status status = hr_safetensors_open(from, &file, &err);
    if (status == HR_OK)
        status = hr_torch_payload_write(hr_safetensors_at(file, 0), hr_safetensors_count(file),
                                        wanted, &out, &err);
    int result = status == HR_OK ? write_file(to, out.data, out.len) : 1;
    if (status != HR_OK)
        fprintf(stderr, "%s\n", err.message);
    hr_buf_free(&out);
    hr_safetensors_close(file);
    return result;
}

static int recode(bool decode, const char *from, const char *to) {
    size_t size = 0, n = 0;
    hr_error err = {0};
    hr_buf out = {0};
    int result = 1;
    unsigned char *bytes = read_file(from, &size);
    if (!decode) {
        hr_base64_append(&out, bytes, size);
        result = write_file(to, out.len > 0 ? out.data : "", out.len);
    } else if (hr_base64_decode((const char *)bytes, size, bytes, &n, &err) == HR_OK) {
        result = write_file(to, bytes, n);
    } else {
        printf("refused %s: %s\n", hr_status_name(err.status), err.message);
    }
    hr_buf_free(&out);
    free(bytes);
    return result;
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "read") == 0)
        return read_all(argc - 1, argv + 1);
    if (argc == 5 && strcmp(argv[1], "write") == 0)
        return write_payload(argv[2], argv[3], argv[4]);
    if (argc == 4)
        return recode(strcmp(argv[1], "decode") == 0, argv[2], argv[3]);
    fprintf(stderr, "torch_tool: see the head of torch_tool.c\n");
    return 2;
}
