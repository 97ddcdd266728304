/* Any config.json, then, after a NUL byte, any generation_config.json: what is taken keeps its
 * bounds. */
#include "format/hf_config.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *text = (const char *)data;
    const char *nul = size ? memchr(text, 0, size) : NULL;
    size_t config_len = nul ? (size_t)(nul - text) : size;
    hr_hf_config c;
    hr_error err;
    if (hr_hf_config_parse(text, config_len, nul ? nul + 1 : NULL, nul ? size - config_len - 1 : 0,
                           &c, &err) != HR_OK)
        return 0;
    HR_ASSERT(c.head_dim > 0 && c.head_dim % 2 == 0 && c.head_dim <= 1024);
    HR_ASSERT(c.num_attention_heads % c.num_key_value_heads == 0);
    HR_ASSERT(c.vocab_size > 0 && c.hidden_size > 0 && c.intermediate_size > 0);
    HR_ASSERT(c.rope.theta > 1 && c.n_eos <= HR_HF_MAX_EOS);
    HR_ASSERT(c.rope.type == HR_ROPE_DEFAULT || c.rope.factor > 0);
    return 0;
}
