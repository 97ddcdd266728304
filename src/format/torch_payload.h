/* Reader of pickled torch payloads: what SGLang's weight routes carry, read without running
 * anything.
 *
 * A pickle is a program. This reader knows a closed list of opcodes and a closed list of the names
 * a payload of weights consists of (tensors, storages, containers, bucket metadata) and makes data
 * of them; any other opcode or name ends the reading with an error that says which. Nothing is
 * imported, called or looked up.
 *
 * What is read: pickle protocols 2 to 5 of a dict, or of a list of (name, tensor) pairs, of CPU
 * tensors and parameters, made by pickle.dumps, by torch's ForkingPickler with the file_system
 * strategy, or by torch.save (legacy and zip); LocalSerializedTensor; flattened buckets of both
 * layouts, with entries of the class or dicts. What names memory of another process that cannot be
 * reached (file_descriptor strategy, CUDA handles) is refused at once with the remedy.
 *
 * Shared memory (file_system strategy). torch keeps a count in each object: one for the producer's
 * storage and one more for each payload that names it, given back by the reader, and whoever takes
 * it to zero removes the object. Reading a payload here copies the bytes out and gives back exactly
 * one count for each storage the payload names, as one torch process would; when the pickle is
 * refused, for those that it named before that place. A payload that several ranks read must
 * therefore be read with keep_shared by all but the last of them, else the second reader takes the
 * producer's own count. */
#ifndef HR_FORMAT_TORCH_PAYLOAD_H
#define HR_FORMAT_TORCH_PAYLOAD_H

#include "base/error.h"

#include <headrace/tensor.h>

#define HR_TORCH_MAX_TENSORS ((size_t)1 << 20)
#define HR_TORCH_MAX_NAME 4096
#define HR_TORCH_DEFAULT_MAX_BYTES ((uint64_t)8 << 30)

typedef struct hr_torch_payload hr_torch_payload;

typedef struct hr_torch_options {
    uint32_t rank;    /* which value of a LocalSerializedTensor */
    bool flattened;   /* wanted: {"flattened_tensor", "metadata"}; else named tensors */
    bool keep_shared; /* the same payload will be read again: leave the counts of its shared memory
                         as they are, except of what a LocalSerializedTensor holds for this rank */
    uint64_t max_bytes; /* most bytes that copies of tensors may take together; 0 = the default */
} hr_torch_options;

/* Reads a whole payload: every tensor is named, checked and has its bytes when this returns.
 * `bytes` (the pickle itself, not its base64) must stay unchanged until the payload is closed:
 * tensors whose elements lie there in row-major order are views into it, others are copies.
 * Names are unique, of 1 to HR_TORCH_MAX_NAME bytes of UTF-8 without NUL.
 *
 * ERR_UNSUPPORTED: an opcode, name, dtype or form that is not read here, by name. ERR_CORRUPT: not
 * a whole pickle, or its parts contradict each other. ERR_INVALID: well-formed but not the object
 * that was wanted, a rank without a value, a name given twice. ERR_SHAPE: a tensor outside its
 * storage or bucket. ERR_DTYPE. ERR_LIMIT: too many opcodes, values, tensors or bytes.
 * ERR_NOT_FOUND: shared memory that is gone. ERR_IO, ERR_NO_MEMORY. Thread-safe. */
hr_status hr_torch_payload_read(const void *bytes, size_t size, const hr_torch_options *options,
                                hr_torch_payload **out, hr_error *err);

/* Tensors in the payload's order, row-major, possibly unaligned; they live until close. Reading is
 * thread-safe. */
size_t hr_torch_payload_count(const hr_torch_payload *payload);
const hr_tensor *hr_torch_payload_tensors(const hr_torch_payload *payload);

/* NULL is allowed. */
void hr_torch_payload_close(hr_torch_payload *payload);

#endif
