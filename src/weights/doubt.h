/* What a session does not know: a bucket was refused, and its sender may not have looked at the
 * reply. Ending such a session as if it were whole would publish an update by half, so it needs the
 * same bucket again, or proof (a manifest) that nothing is missing. */
#ifndef HR_WEIGHTS_DOUBT_H
#define HR_WEIGHTS_DOUBT_H

#include "base/error.h"
#include "tensor/digest.h"

#include <headrace/receiver.h>

/* Zero is "no doubt". */
typedef struct hr_doubt {
    bool any;
    bool for_good;                /* nothing that comes can take it away */
    uint8_t stream[HR_XXH3_SIZE]; /* otherwise: this bucket of this stream */
    uint64_t index;
    char cause[512]; /* the first */
} hr_doubt;

/* A bucket was refused. Those of a stream may come again. */
void hr_doubt_raise(hr_doubt *doubt, const hr_bucket *bucket, const char *cause);

/* A bucket was taken: a stream that is past the doubtful index is whole up to there. */
void hr_doubt_settle(hr_doubt *doubt, const hr_bucket *bucket);

/* whole: something else shows that all tensors are there. HR_ERR_SESSION with the first cause. */
hr_status hr_doubt_check(const hr_doubt *doubt, bool whole, hr_error *err);

#endif
