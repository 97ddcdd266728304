/* Any bytes as a pickled payload: what is accepted lies in memory that can be read, has a name of
 * its own, and is read back equal when it is written in every form. The same bytes are also read as
 * a flattened bucket and as base64. */
#include "format/base64.h"
#include "format/torch_payload.h"
#include "format/torch_write.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_BYTES ((uint64_t)1 << 22)

static uint64_t sum_bytes(const hr_tensor *t) {
    const unsigned char *bytes = t->data;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < t->bytes; i++)
        sum += bytes[i];
    return sum;
}

static void check_equal(const hr_torch_payload *a, const hr_torch_payload *b) {
    const hr_tensor *x = hr_torch_payload_tensors(a), *y = hr_torch_payload_tensors(b);
    HR_ASSERT(hr_torch_payload_count(a) == hr_torch_payload_count(b));
    for (size_t i = 0; i < hr_torch_payload_count(a); i++) {
        HR_ASSERT(strcmp(x[i].name, y[i].name) == 0 && x[i].dtype == y[i].dtype);
        HR_ASSERT(x[i].ndim == y[i].ndim && x[i].bytes == y[i].bytes);
        HR_ASSERT(memcmp(x[i].shape, y[i].shape, x[i].ndim * sizeof *x[i].shape) == 0);
        HR_ASSERT(memcmp(x[i].data, y[i].data, x[i].bytes) == 0);
    }
}

static void check_round_trip(const hr_torch_payload *payload, hr_torch_form form) {
    hr_torch_options options = {.flattened = form == HR_TORCH_FLATTENED};
    hr_torch_payload *again = NULL;
    hr_buf out = {0};
    hr_error err;
    size_t n = hr_torch_payload_count(payload);
    if (n == 0 && form == HR_TORCH_FLATTENED)
        return;
    HR_ASSERT(hr_torch_payload_write(hr_torch_payload_tensors(payload), n, form, &out, &err) ==
              HR_OK);
    HR_ASSERT(hr_torch_payload_read(out.data, out.len, &options, &again, &err) == HR_OK);
    check_equal(payload, again);
    hr_torch_payload_close(again);
    hr_buf_free(&out);
}

static void read_payload(const uint8_t *data, size_t size, bool flattened) {
    hr_torch_options options = {.flattened = flattened, .rank = 1, .max_bytes = MAX_BYTES};
    hr_torch_payload *payload = NULL;
    hr_error err;
    uint64_t bytes = 0;
    if (hr_torch_payload_read(data, size, &options, &payload, &err) != HR_OK)
        return;
    for (size_t i = 0; i < hr_torch_payload_count(payload); i++) {
        const hr_tensor *t = &hr_torch_payload_tensors(payload)[i];
        uint64_t elements = 0;
        HR_ASSERT(t->ndim <= HR_TENSOR_MAX_DIMS && t->name[0] != '\0');
        HR_ASSERT(hr_shape_elements(t->shape, t->ndim, &elements));
        HR_ASSERT(elements * hr_dtype_size(t->dtype) == t->bytes);
        HR_ASSERT(sum_bytes(t) <= 255 * t->bytes);
        bytes += t->bytes;
    }
    if (bytes < MAX_BYTES)
        for (int form = HR_TORCH_PAIRS; form <= HR_TORCH_FLATTENED; form++)
            check_round_trip(payload, (hr_torch_form)form);
    hr_torch_payload_close(payload);
}

/* Whatever is decoded is encoded to the same text: no two texts mean the same bytes. */
static void check_base64(const uint8_t *data, size_t size) {
    hr_buf text = {0};
    hr_error err;
    size_t n = 0;
    unsigned char *bytes = malloc(hr_base64_decoded_max(size) + 1);
    HR_ASSERT(bytes != NULL);
    if (hr_base64_decode((const char *)data, size, bytes, &n, &err) == HR_OK) {
        hr_base64_append(&text, bytes, n);
        HR_ASSERT(text.len == size && (size == 0 || memcmp(text.data, data, size) == 0));
    }
    hr_buf_free(&text);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_payload(data, size, false);
    read_payload(data, size, true);
    check_base64(data, size);
    return 0;
}
