/* Making, sharing and freeing the text of a weight version. */
#include "engine/version_label.h"

#include "weights/names.h"

#include <string.h>

hr_status hr_version_label_create(const char *text, const hr_alloc *alloc, hr_version_label **out,
                                  hr_error *err) {
    HR_TRY(hr_weight_version_check(text, err));
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
