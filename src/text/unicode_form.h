/* NFC, NFD, NFKC and NFKD in linear time. */
#ifndef HR_TEXT_UNICODE_FORM_H
#define HR_TEXT_UNICODE_FORM_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

/* Appends the normal form of text (valid UTF-8): composed or not, compatibility or canonical.
 * ERR_NO_MEMORY. */
hr_status hr_unicode_form(const char *text, size_t len, bool compose, bool compat, hr_buf *out,
                          hr_error *err);

#endif
