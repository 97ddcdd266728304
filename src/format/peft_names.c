/* Which tensor of an adapter a name means. */
#include "format/peft_names.h"

#include <string.h>

typedef struct hr_name_form {
    const char *text;
    hr_peft_kind kind;
} hr_name_form;

static bool ends_with(const char *name, size_t len, const char *end, size_t *rest) {
    size_t n = strlen(end);
    if (n > len || memcmp(name + len - n, end, n) != 0)
        return false;
    *rest = len - n;
    return true;
}

/* A pair's tensor may carry ".weight" and the adapter name "default" behind its own. */
static size_t without_tail(const char *name, size_t len) {
    ends_with(name, len, ".weight", &len);
    ends_with(name, len, ".default", &len);
    return len;
}

hr_peft_kind hr_peft_name_split(const char *name, size_t *path_len) {
    static const hr_name_form pairs[] = {{".lora_A", HR_PEFT_A},
                                         {".lora_B", HR_PEFT_B},
                                         {".lora_embedding_A", HR_PEFT_EMBEDDING_A},
                                         {".lora_embedding_B", HR_PEFT_EMBEDDING_B},
                                         {".lora_magnitude_vector", HR_PEFT_DORA},
                                         {".modules_to_save", HR_PEFT_FULL},
                                         {".original_module", HR_PEFT_OTHER}};
    size_t len = strlen(name), bare = without_tail(name, len);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (ends_with(name, bare, pairs[i].text, path_len))
            return pairs[i].kind;
    }
    if (ends_with(name, len, ".base_layer.weight", path_len) ||
        ends_with(name, len, ".weight", path_len))
        return HR_PEFT_FULL;
    if (ends_with(name, len, ".bias", path_len))
        return HR_PEFT_BIAS;
    *path_len = len;
    return HR_PEFT_OTHER;
}

bool hr_peft_name_start(const char *name, unsigned *state, size_t *start) {
    static const char *const prefixes[] = {"base_model.model.", "base_model.", ""};
    while (*state < sizeof prefixes / sizeof *prefixes) {
        const char *prefix = prefixes[(*state)++];
        size_t n = strlen(prefix);
        if (strncmp(name, prefix, n) == 0) {
            *start = n;
            return true;
        }
    }
    return false;
}
