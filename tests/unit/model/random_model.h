/* Models of every shape that weights come in, written to disk with values from a counter hash: two
 * seeds give two checkpoints of one model. */
#ifndef RANDOM_MODEL_H
#define RANDOM_MODEL_H

#include "base/error.h"

#include <headrace/tensor.h>

/* What differs between models as far as weights are concerned. */
typedef struct random_kind {
    const char *architecture; /* class name */
    bool tied, bias;
    hr_dtype dtype; /* of the checkpoint */
} random_kind;

/* Writes a model directory; the directory too. For tests only: problems abort. */
void random_model_write(const char *dir, const random_kind *kind, uint64_t seed);
/* Removes what random_model_write wrote, and dir. */
void random_model_remove(const char *dir);

#endif
