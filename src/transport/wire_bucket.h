/* A bucket on its way: tensors under their wire names and the safetensors image they make, which is
 * never put together in memory. Bytes are read from where the tensors lie, and the first transfer
 * to reach a byte also takes it into the digest of its tensor. */
#ifndef HR_TRANSPORT_WIRE_BUCKET_H
#define HR_TRANSPORT_WIRE_BUCKET_H

#include "base/buf.h"
#include "base/error.h"
#include "tensor/digest.h"

#include <headrace/tensor.h>

typedef struct hr_wire_tensor {
    const hr_tensor *tensor; /* name: as on the wire, "{adapter}:{name}" or "{name}" */
    uint64_t start;          /* of its bytes in the image */
    uint8_t xxh3[HR_XXH3_SIZE];
    char sha256[HR_SHA256_HEX]; /* "" until hr_wire_bucket_sha256 */
} hr_wire_tensor;

typedef struct hr_wire_bucket {
    hr_wire_tensor *tensors; /* in the order of the image */
    size_t n;
    uint64_t bytes; /* of the tensors */
    hr_buf head;    /* the image up to the first tensor */
    uint64_t size;  /* of the image */
    hr_buf payload; /* another form of the same tensors, made and kept by a transport */
    /* How far digests are: tensors before hashed are done, and some bytes of that one. */
    size_t hashed;
    uint64_t hashed_bytes;
    hr_xxh3_stream *stream;
} hr_wire_bucket;

/* The tensors (their array, names, bytes) stay the caller's until hr_wire_bucket_close. ERR_INVALID
 * for a name given twice, ERR_NO_MEMORY. Not for two threads at once. */
hr_status hr_wire_bucket_open(const hr_tensor *tensors, size_t n, hr_wire_bucket *out,
                              hr_error *err);
void hr_wire_bucket_close(hr_wire_bucket *bucket); /* back to zero */

/* hr_http_body's read of the image; self is the bucket. */
size_t hr_wire_bucket_read(void *self, uint64_t offset, void *out, size_t n);

/* Digests of what has not been read yet. */
void hr_wire_bucket_digest(hr_wire_bucket *bucket);
/* SHA-256 of every tensor. */
void hr_wire_bucket_sha256(hr_wire_bucket *bucket);

#endif
