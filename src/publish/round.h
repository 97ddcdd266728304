/* Rounds: how the ranks of a group stay in step. Every rank makes the same rounds in the same
 * order, whether it has something to say or not; a round carries what failed on a rank since the
 * last one, so that all of them fail in the same round with the same first cause. Private to the
 * room. */
#ifndef HR_PUBLISH_ROUND_H
#define HR_PUBLISH_ROUND_H

#include "base/buf.h"
#include "base/error.h"

#include <headrace/publisher.h>

/* Values as bytes; machines of one group have one byte order. */
void hr_round_put_u64(hr_buf *out, uint64_t value);
void hr_round_put_text(hr_buf *out, const char *text);
void hr_round_put_bytes(hr_buf *out, const void *bytes, size_t n);

typedef struct hr_round_reader {
    const char *at, *end;
    bool bad; /* it ended too soon */
} hr_round_reader;
uint64_t hr_round_get_u64(hr_round_reader *reader);
/* NUL-terminated, inside the message; "" when bad. */
const char *hr_round_get_text(hr_round_reader *reader);
/* n bytes inside the message; NULL when bad. */
const void *hr_round_get_bytes(hr_round_reader *reader, size_t n);

/* One round. mine holds this rank's message, which failure (HR_OK: none) goes with. When no rank
 * failed, read is called once for each rank in order; it returns a failure that every rank finds in
 * the same way. Else the failure of the lowest rank is the result, on all ranks, with its rank
 * named; a collective that fails is the failure of this rank alone, and *lost (NULL: not asked) is
 * true: what the other ranks know then is not known. group NULL: this rank is all. */
hr_status hr_round(const hr_group *group, const hr_error *failure, const hr_buf *mine,
                   hr_status (*read)(void *ctx, uint32_t rank, hr_round_reader *reader,
                                     hr_error *err),
                   void *ctx, bool *lost, hr_error *err);

#endif
