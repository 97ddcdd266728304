/* Rotary position tables. The rules work in float where transformers does, since a difference in
 * the last bit of a frequency grows with the position. */
#include "model/rope.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

/* theta ^ (2i / head_dim): what one turn of pair i is divided by. */
static float wave(const hr_rope_config *rope, uint32_t head_dim, uint32_t i) {
    float exponent = (float)(2 * i) / (float)head_dim;
    return (float)pow((float)rope->theta, exponent);
}

static float llama3_frequency(const hr_rope_config *rope, float inv_freq) {
    float factor = (float)rope->factor;
    double old_length = rope->original_max_position_embeddings;
    float wavelength = (float)(2 * PI) / inv_freq;
    if (wavelength < (float)(old_length / rope->high_freq_factor))
        return inv_freq;
    if (wavelength > (float)(old_length / rope->low_freq_factor))
        return inv_freq / factor;
    float smooth = ((float)old_length / wavelength - (float)rope->low_freq_factor) /
                   (float)(rope->high_freq_factor - rope->low_freq_factor);
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq;
}

/* The (fractional) pair that makes so many turns over the original length. */
static double yarn_pair_of_turns(const hr_rope_config *rope, uint32_t head_dim, double turns) {
    double length = rope->original_max_position_embeddings;
    return head_dim * log(length / (turns * 2 * PI)) / (2 * log(rope->theta));
}

static void yarn_frequencies(const hr_rope_config *rope, uint32_t head_dim, float *inv_freq) {
    double low = yarn_pair_of_turns(rope, head_dim, rope->beta_fast);
    double high = yarn_pair_of_turns(rope, head_dim, rope->beta_slow);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, head_dim - 1.0);
    if (low == high)
        high += 0.001; /* as transformers: the ramp needs a width */
    for (uint32_t i = 0; i < head_dim / 2; i++) {
        float ramp = ((float)i - (float)low) / (float)(high - low);
        float extrapolated = 1 - fminf(fmaxf(ramp, 0), 1);
        float w = wave(rope, head_dim, i);
        inv_freq[i] = 1 / ((float)rope->factor * w) * (1 - extrapolated) + 1 / w * extrapolated;
    }
}

static double yarn_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

static double yarn_attention_factor(const hr_rope_config *rope) {
    if (rope->has_attention_factor)
        return rope->attention_factor;
    if (rope->mscale != 0 && rope->mscale_all_dim != 0)
        return yarn_mscale(rope->factor, rope->mscale) /
               yarn_mscale(rope->factor, rope->mscale_all_dim);
    return yarn_mscale(rope->factor, 1);
}

void hr_rope_frequencies(const hr_rope_config *rope, uint32_t head_dim, float *inv_freq,
                         float *attention_factor) {
    *attention_factor = 1;
    if (rope->type == HR_ROPE_YARN) {
        *attention_factor = (float)yarn_attention_factor(rope);
        yarn_frequencies(rope, head_dim, inv_freq);
        return;
    }
    for (uint32_t i = 0; i < head_dim / 2; i++) {
        inv_freq[i] = 1 / wave(rope, head_dim, i);
        if (rope->type == HR_ROPE_LINEAR)
            inv_freq[i] /= (float)rope->factor;
        else if (rope->type == HR_ROPE_LLAMA3)
            inv_freq[i] = llama3_frequency(rope, inv_freq[i]);
    }
}

void hr_rope_fill(const float *inv_freq, uint32_t n, float attention_factor, size_t begin,
                  size_t end, float *cos_table, float *sin_table) {
    for (size_t pos = begin; pos < end; pos++) {
        for (uint32_t i = 0; i < n; i++) {
            double angle = (float)pos * inv_freq[i];
            cos_table[pos * n + i] = (float)cos(angle) * attention_factor;
            sin_table[pos * n + i] = (float)sin(angle) * attention_factor;
        }
    }
}
