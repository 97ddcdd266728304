/* The weights of a Hugging Face model directory as one set of tensors, whether they lie in one
 * model.safetensors or in shards listed by model.safetensors.index.json. */
#ifndef HR_FORMAT_CHECKPOINT_H
#define HR_FORMAT_CHECKPOINT_H

#include "base/error.h"

#include <headrace/tensor.h>

typedef struct hr_checkpoint hr_checkpoint;

/* Maps and checks every file of the directory. Refused, by name: no safetensors weights (and, said
 * so, only pickled ones), a shard missing, a tensor that the index puts into a shard which lacks
 * it, one tensor in two shards. ERR_NOT_FOUND, ERR_IO, ERR_CORRUPT, ERR_UNSUPPORTED. */
hr_status hr_checkpoint_open(const char *dir, hr_checkpoint **out, hr_error *err);
/* The same for a directory that its writer may change at any time: nothing is mapped, and a
 * tensor's bytes may be looked at once it was fetched, until it is dropped. See
 * hr_safetensors_open_unread.
 */
hr_status hr_checkpoint_open_unread(const char *dir, hr_checkpoint **out, hr_error *err);
void hr_checkpoint_close(hr_checkpoint *checkpoint); /* NULL is allowed */

/* Tensors, shard after shard in data order. Pointers live until close. Reading is thread-safe. */
size_t hr_checkpoint_count(const hr_checkpoint *checkpoint);
const hr_tensor *hr_checkpoint_at(const hr_checkpoint *checkpoint, size_t index);
/* By name; NULL when absent. */
const hr_tensor *hr_checkpoint_find(const hr_checkpoint *checkpoint, const char *name);
/* Bytes of all tensors. */
uint64_t hr_checkpoint_bytes(const hr_checkpoint *checkpoint);

/* See hr_safetensors_fetch and hr_safetensors_drop; tensor must come from this checkpoint. */
hr_status hr_checkpoint_fetch(const hr_checkpoint *checkpoint, const hr_tensor *tensor,
                              hr_error *err);
void hr_checkpoint_drop(const hr_checkpoint *checkpoint, const hr_tensor *tensor);

#endif
