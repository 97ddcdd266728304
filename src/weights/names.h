/* Names on the wire: whose tensor a name is, and which texts may be names at all. */
#ifndef HR_WEIGHTS_NAMES_H
#define HR_WEIGHTS_NAMES_H

#include "base/error.h"

#include <stddef.h>

enum { HR_TENSOR_NAME_MAX = 1024, HR_TENSOR_NAME_SHOWN = 200 };

/* A tensor name taken apart. adapter is not NUL-terminated; NULL: a base weight. */
typedef struct hr_wire_name {
    const char *adapter;
    size_t adapter_len;
    const char *key;
    size_t key_len;
} hr_wire_name;

/* Splits at the first colon. A name without a colon belongs to adapter, or to the base when that is
 * NULL. HR_ERR_INVALID: empty, too long or with control characters; an adapter's tensor without an
 * adapter; a base weight under the name it has inside a PEFT model. */
hr_status hr_wire_name_split(const char *name, const char *adapter, hr_wire_name *out,
                             hr_error *err);

/* Refuse with HR_ERR_INVALID what is empty, too long, or not printable; adapter names also ':'. */
hr_status hr_adapter_name_check(const char *name, hr_error *err);
hr_status hr_session_id_check(const char *session_id, hr_error *err);
hr_status hr_weight_version_check(const char *weight_version, hr_error *err);

#endif
