/* The JSON body that carries a pickled payload as base64, one copy for each TP rank, encoded while
 * it leaves so that it never lies in memory. Private to the room. */
#ifndef HR_TRANSPORT_SGLANG_BODY_H
#define HR_TRANSPORT_SGLANG_BODY_H

#include "transport/dialect.h"

typedef struct hr_sglang_body hr_sglang_body;

/* {<members>, "serialized_named_tensors": ["...", ...]}: members is JSON without braces, not empty.
 * payload stays the caller's until the body is freed with free(). NULL without memory. */
hr_sglang_body *hr_sglang_body_make(const hr_buf *members, const hr_buf *payload, uint64_t copies);

uint64_t hr_sglang_body_size(const hr_sglang_body *body);

/* hr_http_body's read. */
size_t hr_sglang_body_read(void *self, uint64_t offset, void *out, size_t n);

#endif
