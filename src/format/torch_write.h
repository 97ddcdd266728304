/* Writer of pickled torch payloads: what feeds a real SGLang engine.
 *
 * The bytes of every tensor are inside (plain pickle, protocol 4, torch's own storage form), so the
 * payload depends on no memory of the process that wrote it and cannot expire on its way: Python's
 * pickle.loads beside torch reads it, and so does SGLang's restricted unpickler. */
#ifndef HR_FORMAT_TORCH_WRITE_H
#define HR_FORMAT_TORCH_WRITE_H

#include "base/buf.h"
#include "base/error.h"

#include <headrace/tensor.h>

typedef enum hr_torch_form {
    HR_TORCH_PAIRS,    /* list of (name, tensor) */
    HR_TORCH_DICT,     /* dict of name to tensor */
    HR_TORCH_FLATTENED /* {"flattened_tensor", "metadata"} of load_format flattened_bucket, in bytes
                        */
} hr_torch_form;

/* Appends the pickle of n tensors to the buffer. Names are UTF-8. ERR_INVALID for a name given
 * twice and for an empty flattened bucket, ERR_NO_MEMORY. Thread-safe. */
hr_status hr_torch_payload_write(const hr_tensor *tensors, size_t n, hr_torch_form form,
                                 hr_buf *out, hr_error *err);

#endif
