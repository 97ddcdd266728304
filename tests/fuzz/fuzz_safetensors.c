/* Any bytes as a safetensors image: every tensor that is listed lies inside them, and what is
 * written from them reads back equal. */
#include "format/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_inside(const hr_tensor *tensor, const uint8_t *data, size_t size) {
    const uint8_t *begin = tensor->data;
    uint64_t elements = 0;
    HR_ASSERT(begin >= data && begin <= data + size);
    HR_ASSERT(tensor->bytes <= (uint64_t)(data + size - begin));
    HR_ASSERT(tensor->ndim <= HR_TENSOR_MAX_DIMS);
    HR_ASSERT(hr_shape_elements(tensor->shape, tensor->ndim, &elements));
    HR_ASSERT(elements == hr_tensor_elements(tensor));
}

static void check_round_trip(const hr_safetensors *file) {
    size_t n = hr_safetensors_count(file);
    hr_buf image = {0};
    hr_safetensors *again = NULL;
    hr_error err;
    HR_ASSERT(hr_safetensors_write(hr_safetensors_at(file, 0), n, &image, &err) == HR_OK);
    HR_ASSERT(hr_safetensors_parse(image.data, image.len, "again", &again, &err) == HR_OK);
    HR_ASSERT(hr_safetensors_count(again) == n);
    for (size_t i = 0; i < n; i++) {
        const hr_tensor *was = hr_safetensors_at(file, i);
        const hr_tensor *is = hr_safetensors_find(again, was->name);
        HR_ASSERT(is != NULL && is->dtype == was->dtype && is->ndim == was->ndim);
        HR_ASSERT(memcmp(is->shape, was->shape, was->ndim * sizeof *was->shape) == 0);
        HR_ASSERT(memcmp(is->data, was->data, was->bytes) == 0);
    }
    hr_safetensors_close(again);
    hr_buf_free(&image);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hr_safetensors *file = NULL;
    hr_error err;
    if (hr_safetensors_parse(data, size, "fuzz", &file, &err) != HR_OK)
        return 0;
    for (size_t i = 0; i < hr_safetensors_count(file); i++) {
        const hr_tensor *tensor = hr_safetensors_at(file, i);
        check_inside(tensor, data, size);
        HR_ASSERT(hr_safetensors_find(file, tensor->name) == tensor);
    }
    check_round_trip(file);
    hr_safetensors_close(file);
    return 0;
}
