/* Refused buckets that a session remembers. */
#include "weights/doubt.h"

#include <stdio.h>
#include <string.h>

static void name_stream(const hr_bucket *bucket, uint8_t out[HR_XXH3_SIZE]) {
    hr_xxh3(bucket->stream, strlen(bucket->stream), out);
}

void hr_doubt_raise(hr_doubt *doubt, const hr_bucket *bucket, const char *cause) {
    uint8_t stream[HR_XXH3_SIZE] = {0};
    if (bucket->stream != NULL)
        name_stream(bucket, stream);
    if (!doubt->any) {
        *doubt =
            (hr_doubt){.any = true, .for_good = bucket->stream == NULL, .index = bucket->index};
        memcpy(doubt->stream, stream, sizeof stream);
        snprintf(doubt->cause, sizeof doubt->cause, "%s", cause);
    } else if (bucket->stream == NULL || memcmp(doubt->stream, stream, sizeof stream) != 0) {
        doubt->for_good = true;
    } else if (bucket->index > doubt->index) {
        doubt->index = bucket->index;
    }
}

void hr_doubt_settle(hr_doubt *doubt, const hr_bucket *bucket) {
    if (!doubt->any || doubt->for_good || bucket->stream == NULL || bucket->index < doubt->index)
        return;
    uint8_t stream[HR_XXH3_SIZE];
    name_stream(bucket, stream);
    if (memcmp(doubt->stream, stream, sizeof stream) == 0)
        doubt->any = false;
}

hr_status hr_doubt_check(const hr_doubt *doubt, bool whole, hr_error *err) {
    if (!doubt->any || whole)
        return HR_OK;
    return hr_fail(err, HR_ERR_SESSION,
                   "a bucket of this session was refused and did not come again, so it may lack "
                   "tensors; send everything again, or end it with a manifest (covers_base or "
                   "complete_base for base weights). The bucket was refused because: %s",
                   doubt->cause);
}
