/* Tensors of a request as views into the request's own memory, and who lets that memory go. */
#ifndef HR_SERVER_UPDATE_PAYLOAD_H
#define HR_SERVER_UPDATE_PAYLOAD_H

#include "base/error.h"
#include "server/body.h"

#include <cjson/cJSON.h>
#include <headrace/receiver.h>

typedef struct hr_update_payload {
    const hr_tensor *tensors; /* live until release */
    size_t n;
    uint64_t bytes; /* of all tensors */
    void *owner;
    void (*release)(void *owner); /* once */
} hr_update_payload;

/* Of a base64 string whose text is taken out of its tree and decoded in place. */
hr_status hr_update_payload_decode(cJSON *text, const char *what, bool flattened,
                                   hr_update_payload *out, hr_error *err);

/* Of the list of base64 strings, one for each of the engine's tensor-parallel ranks. */
hr_status hr_update_payload_decode_list(const cJSON *args, const char *key, bool flattened,
                                        hr_update_payload *out, hr_error *err);

/* Reads the pickles of a refused call that nobody has read, for what reading does to memory that
 * they share with their sender: it gives their counts back. One text that stands twice is read
 * once.
 */
void hr_update_payload_give_back(const cJSON *args);

/* Of a safetensors image, which is taken over when this succeeds. */
hr_status hr_update_payload_image(hr_body *body, hr_update_payload *out, hr_error *err);

/* Fills what the bucket has of its tensors. */
void hr_update_payload_fill(const hr_update_payload *payload, hr_bucket *bucket);

#endif
