/* An adapter in the form that kernels read: packed A and B of every targeted module.
 *
 * Immutable after creation; any number of steps on any threads may read it. Scale is kept apart and
 * never folded into A or B. */
#ifndef HR_MODEL_LORA_H
#define HR_MODEL_LORA_H

#include "base/error.h"
#include "format/peft.h"
#include "model/view.h"
#include "tensor/digest.h"

#include <stddef.h>
#include <stdint.h>

typedef struct hr_model hr_model; /* model/model.h */

/* Reads and packs a PEFT directory for this model. Refusals as format/peft.h says. The caller owns
 * *out and frees it with hr_lora_destroy, after which no step may read it. Thread-safe; does not
 * touch running steps. */
hr_status hr_lora_load(const hr_model *model, const char *dir, hr_lora **out, hr_error *err);
/* The same from a config and tensors in memory (names as PEFT saves them), which are read only
 * here. Thread-safe. */
hr_status hr_lora_create(const hr_model *model, const char *config, size_t config_len,
                         const hr_tensor *tensors, size_t n_tensors, hr_lora **out, hr_error *err);
/* Checks a config alone: the largest rank it gives to a module of this model. ERR_ADAPTER_CONFIG,
 * also when it names no module of the model. Thread-safe. */
hr_status hr_lora_check_config(const hr_model *model, const char *config, size_t config_len,
                               uint32_t *max_rank, hr_error *err);
void hr_lora_destroy(hr_lora *lora);

/* Digest of all that the adapter does: equal for equal values, ranks and scales of the same
 * modules, whichever way they came. Reads the whole adapter. */
void hr_lora_contents(const hr_model *model, const hr_lora *lora, uint8_t out[HR_XXH3_SIZE]);

size_t hr_lora_bytes(const hr_lora *lora);      /* packed bytes held */
uint32_t hr_lora_max_rank(const hr_lora *lora); /* largest rank over its modules */

#endif
