/* A tiny Llama and an adapter for it, written to disk with weights from a counter hash: the same
 * bytes on every machine, without any other software. */
#ifndef TINY_MODEL_H
#define TINY_MODEL_H

#include "base/error.h"

enum { TINY_VOCAB = 101 };

/* Writes dir/model and dir/adapter; dir must exist. Used by tests only: problems abort. */
void tiny_model_write(const char *dir);
/* Removes what tiny_model_write wrote, and dir. */
void tiny_model_remove(const char *dir);

#endif
