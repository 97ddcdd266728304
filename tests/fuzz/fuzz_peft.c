/* Any adapter_config.json, then, after a NUL byte, lines "rows columns dtype name" that stand for
 * tensors. What is resolved has the shapes of its module and lies inside the tensor it comes from.
 */
#include "format/peft.h"

#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_TENSORS = 32, MAX_NAME = 160 };

static const hr_module_name modules[] = {
    {"model.embed_tokens", 16, 4, .is_embedding = true},
    {"model.layers.0.self_attn.q_proj", 4, 4, .is_linear = true},
    {"model.layers.0.self_attn.k_proj", 4, 2, .is_linear = true},
    {"model.layers.0.self_attn.v_proj", 4, 2, .is_linear = true},
    {"model.layers.0.mlp.gate_proj", 4, 6, .is_linear = true},
    {"model.layers.0.mlp.up_proj", 4, 6, .is_linear = true},
    {"model.layers.1.self_attn.q_proj", 4, 4, .is_linear = true},
    {"model.norm", 4, 4},
    {"lm_head", 4, 16, .is_linear = true, .is_output_head = true},
};
enum { N_MODULES = sizeof modules / sizeof *modules };

static const uint8_t zeros[1 << 16];

typedef struct tensor_set {
    char names[MAX_TENSORS][MAX_NAME];
    hr_tensor tensors[MAX_TENSORS];
    size_t n;
} tensor_set;

/* A line that is no tensor is passed over, so that a change of one byte does not lose the others.
 */
static void add_line(tensor_set *set, const char *line) {
    unsigned rows = 0, columns = 0;
    char dtype[16] = "";
    hr_tensor *tensor = &set->tensors[set->n];
    if (set->n == MAX_TENSORS ||
        sscanf(line, "%4u %4u %15s %159s", &rows, &columns, dtype, set->names[set->n]) != 4 ||
        !hr_dtype_from_name(dtype, &tensor->dtype))
        return;
    tensor->name = set->names[set->n];
    tensor->ndim = 2;
    tensor->shape[0] = rows;
    tensor->shape[1] = columns;
    tensor->bytes = (uint64_t)rows * columns * hr_dtype_size(tensor->dtype);
    tensor->data = zeros;
    if (tensor->bytes <= sizeof zeros)
        set->n++;
}

static void add_lines(tensor_set *set, const char *text, size_t len) {
    char line[256];
    while (len > 0) {
        const char *end = memchr(text, '\n', len);
        size_t n = end ? (size_t)(end - text) : len;
        size_t kept = n < sizeof line - 1 ? n : sizeof line - 1;
        memcpy(line, text, kept);
        line[kept] = '\0';
        add_line(set, line);
        n += end != NULL;
        text += n;
        len -= n;
    }
}

static bool base_equals(void *ctx, size_t module, const hr_tensor *weight) {
    (void)ctx;
    return module % 2 == 0 || weight->bytes % 2 == 0;
}

static void check(const hr_peft *peft) {
    HR_ASSERT(peft->n_modules > 0);
    for (size_t i = 0; i < peft->n_modules; i++) {
        const hr_peft_module *m = &peft->modules[i];
        const uint8_t *b = m->b.data;
        HR_ASSERT(m->module < N_MODULES && (i == 0 || m->module > m[-1].module));
        HR_ASSERT(m->rank > 0 && m->rank <= HR_PEFT_MAX_RANK && m->rank <= peft->max_rank);
        HR_ASSERT(m->a.shape[0] == m->rank && m->a.shape[1] == modules[m->module].in);
        HR_ASSERT(m->b.shape[0] == modules[m->module].out && m->b.shape[1] == m->rank);
        HR_ASSERT(b >= zeros && b + m->b.bytes <= zeros + sizeof zeros);
        HR_ASSERT(m->b.bytes == m->b.shape[0] * m->rank * hr_dtype_size(m->b.dtype));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tensor_set set;
    const char *text = (const char *)data;
    const char *nul = size ? memchr(text, 0, size) : NULL;
    size_t config_len = nul ? (size_t)(nul - text) : size;
    const hr_peft_base base = {base_equals, NULL};
    hr_peft peft = {0};
    hr_error err;
    set.n = 0;
    if (nul != NULL)
        add_lines(&set, nul + 1, size - config_len - 1);
    if (hr_peft_resolve(text, config_len, set.tensors, set.n, modules, N_MODULES, &base, &peft,
                        &err) == HR_OK)
        check(&peft);
    for (size_t i = 0; i < peft.n_modules; i++)
        (void)hr_peft_check_values(&peft.modules[i], HR_DTYPE_BF16, &err);
    hr_peft_close(&peft);
    return 0;
}
