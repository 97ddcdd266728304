/* Rotary position tables, made once at load: frequencies by the rules of transformers for the types
 * default, linear, llama3 and yarn, then cos and sin of every position. The only use of libm; steps
 * read the tables. */
#ifndef HR_MODEL_ROPE_H
#define HR_MODEL_ROPE_H

#include "format/hf_config.h"

/* Writes head_dim / 2 inverse frequencies and the factor that multiplies cos and sin. Thread-safe.
 */
void hr_rope_frequencies(const hr_rope_config *rope, uint32_t head_dim, float *inv_freq,
                         float *attention_factor);

/* Writes cos and sin of positions [begin, end): row p of either table is [p * n, p * n + n).
 * Thread-safe. */
void hr_rope_fill(const float *inv_freq, uint32_t n, float attention_factor, size_t begin,
                  size_t end, float *cos_table, float *sin_table);

#endif
