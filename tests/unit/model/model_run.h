/* Runs sequences through the model without an engine: what the tests of the model room share.
 *
 * All sequences go together, `chunk` rows of each in a step, so different lengths end at different
 * steps. Pages are handed out in a scattered order. */
#ifndef MODEL_RUN_H
#define MODEL_RUN_H

#include "model/model.h"

typedef struct run_seq {
    const hr_lora *lora;
    const uint32_t *tokens;
    uint32_t n;
    float *logits; /* out: [n][vocab_size] */
} run_seq;

/* times (may be NULL): wall nanoseconds of each step, as many as the longest sequence has chunks.
 */
hr_status run_sequences(const hr_model *model, hr_pool *pool, run_seq *seqs, uint32_t n_seqs,
                        uint32_t chunk, uint64_t *times, hr_error *err);

#endif
