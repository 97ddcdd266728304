/* Making, sharing and freeing the text of a weight version. */
#include "engine/version_label.h"

#include <string.h>

static hr_status check_text(const char *text, hr_error *err) {
    size_t len = strnlen(text, HR_WEIGHT_VERSION_SIZE);
    if (len == 0 || len == HR_WEIGHT_VERSION_SIZE)
        return hr_fail(err, HR_ERR_INVALID, "weight_version must have 1 to %d bytes",
                       HR_WEIGHT_VERSION_SIZE - 1);
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            return hr_fail(err, HR_ERR_INVALID,
                           "weight_version has a control character at byte %zu", i);
    return HR_OK;
}

hr_status hr_version_label_create(const char *text, const hr_alloc *alloc, hr_version_label **out,
                                  hr_error *err) {
    HR_TRY(check_text(text, err));
    hr_version_label *label = hr_alloc_array(alloc, 1, sizeof *label);
    if (label == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a weight version");
    label->holders = 1;
    memcpy(label->text, text, strlen(text) + 1);
    *out = label;
    return HR_OK;
}

hr_version_label *hr_version_label_hold(hr_version_label *label) {
    label->holders++;
    return label;
}

void hr_version_label_release(hr_version_label *label, const hr_alloc *alloc) {
    if (label != NULL && --label->holders == 0)
        hr_alloc_free(alloc, label);
}
