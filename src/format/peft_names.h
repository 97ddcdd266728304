/* Names of tensors in an adapter, taken apart. Private to the room. */
#ifndef HR_FORMAT_PEFT_NAMES_H
#define HR_FORMAT_PEFT_NAMES_H

#include <stdbool.h>
#include <stddef.h>

typedef enum hr_peft_kind {
    HR_PEFT_A,
    HR_PEFT_B,
    HR_PEFT_EMBEDDING_A,
    HR_PEFT_EMBEDDING_B,
    HR_PEFT_FULL, /* a whole weight beside the pairs */
    HR_PEFT_BIAS,
    HR_PEFT_DORA,
    HR_PEFT_OTHER
} hr_peft_kind;

/* Splits "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" into the kind and the
 * part before
 * ".lora_A", whose length is set (it still has its prefix). */
hr_peft_kind hr_peft_name_split(const char *name, size_t *path_len);

/* The next place where a module path may begin in name: skips the known prefixes
 * "base_model.model." and "base_model.", one after the other. state starts at 0; false when there
 * is none left. */
bool hr_peft_name_start(const char *name, unsigned *state, size_t *start);

#endif
