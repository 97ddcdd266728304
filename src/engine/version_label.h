/* The text of a weight version, shared by everything that was made under it.
 *
 * Made before a change, so that the change itself needs no memory for it; held by the scheduler and
 * by every request with tokens of that version. Used by the scheduler thread alone once it is
 * handed over. */
#ifndef HR_ENGINE_VERSION_LABEL_H
#define HR_ENGINE_VERSION_LABEL_H

#include "base/alloc.h"
#include "base/error.h"

#include <headrace/receiver.h>

typedef struct hr_version_label {
    uint32_t holders;
    char text[HR_WEIGHT_VERSION_SIZE];
} hr_version_label;

/* One holder: the caller. ERR_INVALID: empty, over 256 bytes, or with a control character. */
hr_status hr_version_label_create(const char *text, const hr_alloc *alloc, hr_version_label **out,
                                  hr_error *err);
hr_version_label *hr_version_label_hold(hr_version_label *label);
/* The last holder frees it. NULL is allowed. */
void hr_version_label_release(hr_version_label *label, const hr_alloc *alloc);

#endif
