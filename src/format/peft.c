/* Resolving an adapter: the config says which modules must have pairs, the tensors say which do,
 * and both must agree exactly. */
#include "format/peft.h"

#include "format/file.h"
#include "format/peft_config.h"
#include "format/peft_names.h"
#include "tensor/finite.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define MAX_NAMED 5  /* names that one message lists */
#define MAX_KINDS 16 /* kinds of modules that one message lists */
#define MAX_MEMBERS 3
#define INNER "model." /* what the path of an inner model leaves out */

/* A module as the adapter may name it: one of the caller's, or a fused one that stands for several.
 */
typedef struct hr_target {
    char *path;
    size_t members[MAX_MEMBERS]; /* indices into the caller's list, in the order of the rows of B */
    size_t n_members;
    const hr_tensor *a, *b, *full;
    bool fused, replaced; /* replaced: the adapter names it fused, so alone it does not exist */
} hr_target;

typedef struct hr_resolver {
    hr_peft_config config;
    const hr_tensor *tensors;
    size_t n_tensors;
    const hr_module_name *modules;
    size_t n_modules;
    const hr_peft_base *base;
    hr_target *targets; /* the caller's modules, then the fused ones */
    size_t n_targets;
    size_t *by_path; /* hash table of index + 1; at most half full */
    size_t mask;     /* its size - 1 */
    hr_peft *out;
    hr_error *err;
} hr_resolver;

static hr_status no_memory(hr_error *err) {
    return hr_fail(err, HR_ERR_NO_MEMORY, "adapter: out of memory");
}

/* Names for a message: "a, b, c and 4 more". */
typedef struct hr_name_list {
    hr_buf text;
    size_t n;
} hr_name_list;

static void list_name(hr_name_list *list, const char *name, const char *tail) {
    if (list->n < MAX_NAMED)
        hr_buf_printf(&list->text, "%s%.160s%s", list->n ? ", " : "", name, tail);
    list->n++;
}

static const char *list_text(hr_name_list *list) {
    if (list->n > MAX_NAMED)
        hr_buf_printf(&list->text, " and %zu more", list->n - MAX_NAMED);
    return list->text.data ? list->text.data : "";
}

static hr_status warn(hr_peft *out, const char *what, const char *name, const char *fact,
                      hr_error *err) {
    hr_buf line = {0};
    char **grown = realloc(out->warnings, (out->n_warnings + 1) * sizeof *grown);
    if (grown == NULL)
        return no_memory(err);
    out->warnings = grown;
    hr_buf_printf(&line, "%s: \"%.200s\" %s", what, name, fact);
    if (line.failed)
        return no_memory(err);
    out->warnings[out->n_warnings++] = line.data;
    return HR_OK;
}

/* ---- modules by path ---- */

/* FNV-1a, from the hash of what stands before. */
static uint64_t hash_path(uint64_t before, const char *part, size_t len) {
    for (size_t i = 0; i < len; i++)
        before = (before ^ (unsigned char)part[i]) * UINT64_C(0x100000001b3);
    return before;
}

/* Where the target of this path stands in by_path, or would stand; path is a part of a longer
 * string, after "model." when inner is set. */
static size_t *slot_of(const hr_resolver *r, const char *part, size_t len, bool inner) {
    size_t head = inner ? strlen(INNER) : 0;
    uint64_t hash = hash_path(UINT64_C(0xcbf29ce484222325), INNER, head);
    for (size_t i = hash_path(hash, part, len) & r->mask;; i = (i + 1) & r->mask) {
        size_t *slot = &r->by_path[i];
        const char *path = *slot > 0 ? r->targets[*slot - 1].path : NULL;
        if (path == NULL || (strncmp(path, INNER, head) == 0 &&
                             strncmp(path + head, part, len) == 0 && path[head + len] == '\0'))
            return slot;
    }
}

static hr_target *find_path(const hr_resolver *r, const char *part, size_t len, bool inner) {
    size_t found = *slot_of(r, part, len, inner);
    return found > 0 ? &r->targets[found - 1] : NULL;
}

/* Takes the path over. A name that a module has already is that module's. */
static void add_target(hr_resolver *r, const hr_target *target) {
    size_t *slot = slot_of(r, target->path, strlen(target->path), false);
    r->targets[r->n_targets++] = *target;
    if (*slot == 0)
        *slot = r->n_targets;
}

/* The module a tensor name means: with a known prefix, the path of the whole model or that of its
 * inner model
 * ("layers.0..." for "model.layers.0..."). */
static hr_target *find_target(const hr_resolver *r, const char *name, size_t path_len) {
    unsigned state = 0;
    size_t start = 0;
    while (hr_peft_name_start(name, &state, &start)) {
        if (start >= path_len)
            continue;
        hr_target *target = find_path(r, name + start, path_len - start, false);
        if (target == NULL)
            target = find_path(r, name + start, path_len - start, true);
        if (target != NULL)
            return target;
    }
    return NULL;
}

typedef struct hr_fusion {
    const char *name;
    const char *members[MAX_MEMBERS];
    size_t n;
} hr_fusion;

static const hr_fusion fusions[] = {{"qkv_proj", {"q_proj", "k_proj", "v_proj"}, 3},
                                    {"gate_up_proj", {"gate_proj", "up_proj"}, 2}};

/* Adds parent.qkv_proj for the module parent.q_proj when its brothers are there too. */
static hr_status add_fused(hr_resolver *r, size_t module, const hr_fusion *fusion) {
    const char *path = r->modules[module].path;
    size_t len = strlen(path), tail = strlen(fusion->members[0]);
    if (len <= tail || strcmp(path + len - tail, fusion->members[0]) != 0 ||
        path[len - tail - 1] != '.')
        return HR_OK;
    hr_target fused = {.fused = true, .n_members = fusion->n};
    for (size_t i = 0; i < fusion->n; i++) {
        hr_buf brother = {0};
        hr_buf_append(&brother, path, len - tail);
        hr_buf_puts(&brother, fusion->members[i]);
        hr_target *found = brother.failed ? NULL : find_path(r, brother.data, brother.len, false);
        hr_buf_free(&brother);
        if (found == NULL || r->modules[found->members[0]].in != r->modules[module].in)
            return HR_OK;
        fused.members[i] = found->members[0];
    }
    hr_buf name = {0};
    hr_buf_append(&name, path, len - tail);
    hr_buf_puts(&name, fusion->name);
    if (name.failed)
        return no_memory(r->err);
    fused.path = name.data;
    add_target(r, &fused);
    return HR_OK;
}

static hr_status list_targets(hr_resolver *r) {
    size_t most = r->n_modules * 2 + 1; /* a module begins at most one fused group */
    size_t size = 16;
    while (size < 2 * most)
        size *= 2;
    r->mask = size - 1;
    r->targets = calloc(most, sizeof *r->targets);
    r->by_path = calloc(size, sizeof *r->by_path);
    if (r->targets == NULL || r->by_path == NULL)
        return no_memory(r->err);
    for (size_t i = 0; i < r->n_modules; i++) {
        hr_target target = {.path = strdup(r->modules[i].path), .members = {i}, .n_members = 1};
        if (target.path == NULL)
            return no_memory(r->err);
        add_target(r, &target);
    }
    for (size_t i = 0; i < r->n_modules; i++) {
        for (size_t f = 0; f < sizeof fusions / sizeof *fusions; f++)
            HR_TRY(add_fused(r, i, &fusions[f]));
    }
    return HR_OK;
}

/* ---- tensors to modules ---- */

static const hr_module_name *first_module(const hr_resolver *r, const hr_target *target) {
    return &r->modules[target->members[0]];
}

static hr_status place_tensor(hr_resolver *r, hr_target *target, hr_peft_kind kind,
                              const hr_tensor *tensor) {
    const hr_module_name *module = first_module(r, target);
    bool embedding_pair = kind == HR_PEFT_EMBEDDING_A || kind == HR_PEFT_EMBEDDING_B;
    if (kind != HR_PEFT_FULL && embedding_pair != module->is_embedding)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "tensor %.200s: module %.160s %s an embedding", tensor->name, target->path,
                       module->is_embedding ? "is" : "is not");
    const hr_tensor **slot = kind == HR_PEFT_FULL                               ? &target->full
                             : kind == HR_PEFT_A || kind == HR_PEFT_EMBEDDING_A ? &target->a
                                                                                : &target->b;
    if (*slot != NULL)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "tensors %.200s and %.200s mean the same part of module %.160s",
                       (*slot)->name, tensor->name, target->path);
    *slot = tensor;
    return HR_OK;
}

static hr_status refuse_kind(const hr_resolver *r, hr_peft_kind kind, const char *name) {
    if (kind == HR_PEFT_DORA)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "tensor %.200s belongs to DoRA, which is not supported", name);
    return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                   "tensor %.200s is a bias, which is not applied; train with bias none and "
                   "lora_bias false",
                   name);
}

/* The kinds of modules that may have a pair, and where the first and the last of the layers stand:
 * "embed_tokens, q_proj, lm_head (model.layers.0.self_attn.q_proj to model.layers.7...)". */
static hr_buf list_modules(const hr_resolver *r) {
    const char *kinds[MAX_KINDS], *first = "", *last = "";
    hr_buf text = {0};
    size_t n = 0;
    for (size_t i = 0; i < r->n_modules; i++) {
        const hr_module_name *module = &r->modules[i];
        if (!module->is_linear && !module->is_embedding)
            continue;
        if (module->is_linear && !module->is_output_head) {
            first = first[0] == '\0' ? module->path : first;
            last = module->path;
        }
        const char *dot = strrchr(module->path, '.'), *kind = dot == NULL ? module->path : dot + 1;
        size_t k = 0;
        while (k < n && strcmp(kinds[k], kind) != 0)
            k++;
        if (k < n || n == MAX_KINDS)
            continue;
        kinds[n++] = kind;
        hr_buf_printf(&text, "%s%.64s", n > 1 ? ", " : "", kind);
    }
    hr_buf_printf(&text, " (%.120s to %.120s)", first, last);
    return text;
}

static hr_status refuse_unmatched(const hr_resolver *r, hr_name_list *names) {
    hr_buf modules = list_modules(r);
    const char *known = modules.data != NULL ? modules.data : "";
    hr_status status;
    if (names->n == r->n_tensors)
        status = hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                         "none of the %zu tensors belongs to a module of this model; tensors: %s; "
                         "modules: %s",
                         r->n_tensors, list_text(names), known);
    else
        status = hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                         "%zu of %zu tensors belong to no module of this model: %s; modules: %s",
                         names->n, r->n_tensors, list_text(names), known);
    hr_buf_free(&modules);
    return status;
}

static hr_status place_tensors(hr_resolver *r) {
    hr_name_list unmatched = {0};
    hr_status status = HR_OK;
    if (r->n_tensors == 0)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE, "the adapter has no tensors");
    for (size_t i = 0; status == HR_OK && i < r->n_tensors; i++) {
        const char *name = r->tensors[i].name;
        size_t path_len = 0;
        hr_peft_kind kind = hr_peft_name_split(name, &path_len);
        hr_target *target = kind == HR_PEFT_OTHER ? NULL : find_target(r, name, path_len);
        if (kind == HR_PEFT_DORA || kind == HR_PEFT_BIAS)
            status = refuse_kind(r, kind, name);
        else if (target == NULL)
            list_name(&unmatched, name, "");
        else
            status = place_tensor(r, target, kind, &r->tensors[i]);
    }
    if (status == HR_OK && unmatched.n > 0)
        status = refuse_unmatched(r, &unmatched);
    hr_buf_free(&unmatched.text);
    return status;
}

static bool has_tensors(const hr_target *target) {
    return target->a != NULL || target->b != NULL || target->full != NULL;
}

static void mark_replaced(hr_resolver *r) {
    for (size_t i = r->n_modules; i < r->n_targets; i++) {
        for (size_t m = 0; has_tensors(&r->targets[i]) && m < r->targets[i].n_members; m++)
            r->targets[r->targets[i].members[m]].replaced = true;
    }
}

/* ---- config against tensors ---- */

/* Whether the config names this target; only what can hold a pair. */
static hr_status names_target(hr_resolver *r, const hr_target *target, bool *out) {
    const hr_module_name *module = first_module(r, target);
    bool hidden_linear = module->is_linear && !module->is_output_head;
    HR_TRY(hr_peft_config_targets(&r->config, target->path, hidden_linear, out, r->err));
    if (*out && !module->is_linear && !module->is_embedding)
        return hr_fail(r->err, HR_ERR_ADAPTER_CONFIG,
                       "target_modules: names %.200s, which is neither a linear layer nor an "
                       "embedding",
                       target->path);
    return HR_OK;
}

/* Whether the config wants a pair here. */
static hr_status wants_pair(hr_resolver *r, const hr_target *target, bool *out) {
    *out = false;
    if (target->replaced || (target->fused && !has_tensors(target)))
        return HR_OK;
    return names_target(r, target, out);
}

/* Missing and surplus tensors of one module. */
static void compare_pair(const hr_target *target, bool wanted, hr_name_list *missing,
                         hr_name_list *surplus) {
    if (wanted && target->a == NULL)
        list_name(missing, target->path, ".lora_A");
    if (wanted && target->b == NULL)
        list_name(missing, target->path, ".lora_B");
    if (!wanted && target->a != NULL)
        list_name(surplus, target->a->name, "");
    if (!wanted && target->b != NULL)
        list_name(surplus, target->b->name, "");
}

static hr_status names_nothing(const hr_resolver *r) {
    hr_buf modules = list_modules(r);
    hr_status status = hr_fail(r->err, HR_ERR_ADAPTER_CONFIG,
                               "target_modules: names no module of this model; modules: %s",
                               modules.data != NULL ? modules.data : "");
    hr_buf_free(&modules);
    return status;
}

static hr_status compare_pairs(hr_resolver *r) {
    hr_name_list missing = {0}, surplus = {0};
    hr_status status = HR_OK;
    size_t wanted = 0;
    for (size_t i = 0; status == HR_OK && i < r->n_targets; i++) {
        bool wants = false;
        status = wants_pair(r, &r->targets[i], &wants);
        wanted += wants;
        if (status == HR_OK)
            compare_pair(&r->targets[i], wants, &missing, &surplus);
    }
    if (status == HR_OK && surplus.n > 0)
        status = hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                         "%zu tensors are for modules that the config does not name "
                         "(target_modules, exclude_modules, layers_to_transform, "
                         "modules_to_save): %s",
                         surplus.n, list_text(&surplus));
    else if (status == HR_OK && wanted == 0)
        status = names_nothing(r);
    else if (status == HR_OK && missing.n > 0)
        status =
            hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                    "the config names modules whose tensors are missing: %s", list_text(&missing));
    hr_buf_free(&missing.text);
    hr_buf_free(&surplus.text);
    return status;
}

/* ---- whole weights beside the pairs ---- */

/* Whether modules_to_save names it; refused where no weight beside the pairs can be. */
static hr_status is_saved(hr_resolver *r, const hr_target *target, bool *saved) {
    const hr_module_name *module = first_module(r, target);
    *saved = false;
    HR_TRY(hr_peft_config_saves(&r->config, target->path, saved, r->err));
    if (*saved && !module->is_embedding && !module->is_output_head)
        return hr_fail(r->err, HR_ERR_ADAPTER_CONFIG,
                       "modules_to_save: trained weights of %.200s are not applied; only LoRA "
                       "pairs are",
                       target->path);
    return HR_OK;
}

static hr_status check_saved(hr_resolver *r, const hr_target *target) {
    bool saved = false;
    HR_TRY(is_saved(r, target, &saved));
    if (saved && target->full == NULL)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "modules_to_save: names %.200s, whose weight is missing", target->path);
    return HR_OK;
}

static hr_status check_full(hr_resolver *r, const hr_target *target) {
    const hr_module_name *module = first_module(r, target);
    const hr_tensor *full = target->full;
    uint64_t rows = module->is_embedding ? module->in : module->out;
    uint64_t columns = module->is_embedding ? module->out : module->in;
    if (target->fused || (!module->is_embedding && !module->is_output_head))
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "tensor %.200s is a whole weight, which is not applied; only LoRA pairs "
                       "are",
                       full->name);
    if (full->ndim != 2 || full->shape[0] != rows || full->shape[1] != columns) {
        char came[128];
        return hr_fail(r->err, HR_ERR_SHAPE,
                       "tensor %.200s: wanted the base weight's shape [%" PRIu64 ", %" PRIu64
                       "], came %s; a resized vocabulary is not supported",
                       full->name, rows, columns,
                       hr_shape_format(full->shape, full->ndim, came, sizeof came));
    }
    bool equal = r->base != NULL && r->base->equals != NULL &&
                 r->base->equals(r->base->ctx, target->members[0], full);
    if (!equal)
        return hr_fail(r->err, HR_ERR_ADAPTER_INCOMPATIBLE,
                       "tensor %.200s is a whole weight that is not the base's bit for bit; "
                       "trained whole weights are not applied, only LoRA pairs are",
                       full->name);
    return HR_OK;
}

static hr_status check_full_weights(hr_resolver *r) {
    for (size_t i = 0; i < r->n_targets; i++) {
        if (!r->targets[i].fused)
            HR_TRY(check_saved(r, &r->targets[i]));
        if (r->targets[i].full != NULL)
            HR_TRY(check_full(r, &r->targets[i]));
    }
    return HR_OK;
}

/* ---- pairs ---- */

/* Why that rank was wanted, or where another size may come from. */
static void explain_shape(const hr_resolver *r, const hr_tensor *tensor, uint32_t rank_at,
                          uint64_t rank, char *out, size_t size) {
    const char *who = rank == r->config.rank ? "the config says r=" : "its rank_pattern says ";
    if (tensor->ndim == 2 && tensor->shape[rank_at] == rank)
        snprintf(out, size, "was it trained for another base model?");
    else
        snprintf(out, size, "%s%" PRIu64, who, rank);
}

/* A matrix of a pair, whose dimension rank_at is the rank. */
static hr_status check_matrix(const hr_resolver *r, const hr_tensor *tensor, uint32_t rank_at,
                              uint64_t rows, uint64_t columns) {
    char came[128], why[64];
    if (!hr_dtype_is_weight(tensor->dtype))
        return hr_fail(r->err, HR_ERR_DTYPE,
                       "tensor %.200s: wanted F32, F16 or BF16, came %s; cast it with .float()",
                       tensor->name, hr_dtype_name(tensor->dtype));
    if (tensor->ndim == 2 && tensor->shape[0] == rows && tensor->shape[1] == columns)
        return HR_OK;
    explain_shape(r, tensor, rank_at, rank_at == 0 ? rows : columns, why, sizeof why);
    return hr_fail(r->err, HR_ERR_SHAPE,
                   "tensor %.200s: wanted %s [%" PRIu64 ", %" PRIu64 "], came %s; %s", tensor->name,
                   rank_at == 0 ? "[rank, in]" : "[out, rank]", rows, columns,
                   hr_shape_format(tensor->shape, tensor->ndim, came, sizeof came), why);
}

static uint64_t total_out(const hr_resolver *r, const hr_target *target) {
    uint64_t rows = 0;
    for (size_t m = 0; m < target->n_members; m++)
        rows += r->modules[target->members[m]].out;
    return rows;
}

/* The rows of B of one member. */
static hr_tensor slice_rows(const hr_tensor *b, uint64_t first, uint64_t rows) {
    uint64_t row_bytes = b->shape[1] * hr_dtype_size(b->dtype);
    hr_tensor part = *b;
    part.shape[0] = rows;
    part.data = (const char *)b->data + first * row_bytes;
    part.bytes = rows * row_bytes;
    return part;
}

static hr_status add_pair(hr_resolver *r, const hr_target *target) {
    uint32_t rank = 0;
    float scale = 0;
    HR_TRY(hr_peft_config_rank(&r->config, target->path, &rank, &scale, r->err));
    HR_TRY(check_matrix(r, target->a, 0, rank, first_module(r, target)->in));
    HR_TRY(check_matrix(r, target->b, 1, total_out(r, target), rank));
    uint64_t first = 0;
    for (size_t m = 0; m < target->n_members; m++) {
        uint64_t rows = r->modules[target->members[m]].out;
        r->out->modules[r->out->n_modules++] =
            (hr_peft_module){.module = target->members[m],
                             .a = *target->a,
                             .b = slice_rows(target->b, first, rows),
                             .rank = rank,
                             .scale = scale};
        first += rows;
    }
    if (rank > r->out->max_rank)
        r->out->max_rank = rank;
    return HR_OK;
}

static int compare_modules(const void *a, const void *b) {
    const hr_peft_module *x = a, *y = b;
    return x->module < y->module ? -1 : x->module > y->module;
}

static hr_status add_pairs(hr_resolver *r) {
    r->out->modules = calloc(r->n_modules + 1, sizeof *r->out->modules);
    if (r->out->modules == NULL)
        return no_memory(r->err);
    for (size_t i = 0; i < r->n_targets; i++) {
        if (r->targets[i].a != NULL)
            HR_TRY(add_pair(r, &r->targets[i]));
    }
    qsort(r->out->modules, r->out->n_modules, sizeof *r->out->modules, compare_modules);
    return HR_OK;
}

static hr_status warn_unused(hr_resolver *r, const hr_pattern_table *table, const char *what) {
    for (size_t i = 0; i < table->n; i++) {
        if (!table->rows[i].used)
            HR_TRY(warn(r->out, what, table->rows[i].key, "applies to no module", r->err));
    }
    return HR_OK;
}

static hr_status resolve(hr_resolver *r) {
    HR_TRY(list_targets(r));
    HR_TRY(place_tensors(r));
    mark_replaced(r);
    HR_TRY(compare_pairs(r));
    HR_TRY(check_full_weights(r));
    HR_TRY(add_pairs(r));
    HR_TRY(warn_unused(r, &r->config.ranks, "rank_pattern"));
    HR_TRY(warn_unused(r, &r->config.alphas, "alpha_pattern"));
    return warn_unused(r, &r->config.saved, "modules_to_save");
}

static void resolver_free(hr_resolver *r) {
    for (size_t i = 0; i < r->n_targets; i++)
        free(r->targets[i].path);
    free(r->targets);
    free(r->by_path);
    hr_peft_config_free(&r->config);
}

hr_status hr_peft_resolve(const char *config, size_t config_len, const hr_tensor *tensors,
                          size_t n_tensors, const hr_module_name *modules, size_t n_modules,
                          const hr_peft_base *base, hr_peft *out, hr_error *err) {
    hr_peft result = {0};
    hr_resolver r = {.tensors = tensors,
                     .n_tensors = n_tensors,
                     .modules = modules,
                     .n_modules = n_modules,
                     .base = base,
                     .out = &result,
                     .err = err};
    HR_TRY(hr_peft_config_parse(config, config_len, &r.config, err));
    hr_status status = resolve(&r);
    resolver_free(&r);
    if (status != HR_OK) {
        hr_peft_close(&result);
        return status;
    }
    XXH128_canonicalFromHash((XXH128_canonical_t *)result.config_digest,
                             XXH3_128bits(config, config_len));
    *out = result;
    return HR_OK;
}

hr_status hr_peft_check_values(const hr_peft_module *pair, hr_dtype as, hr_error *err) {
    const hr_tensor *both[] = {&pair->a, &pair->b};
    for (size_t i = 0; i < 2; i++)
        if (!hr_all_finite(both[i]->data, both[i]->dtype, as, hr_tensor_elements(both[i])))
            return hr_fail_not_finite(both[i], as, err);
    return HR_OK;
}

/* ---- a config alone ---- */

static hr_status named_rank(hr_resolver *r, const hr_target *target, uint32_t *most) {
    bool named = false;
    uint32_t rank = 0;
    float scale = 0;
    HR_TRY(names_target(r, target, &named));
    if (!named)
        return HR_OK;
    HR_TRY(hr_peft_config_rank(&r->config, target->path, &rank, &scale, r->err));
    *most = rank > *most ? rank : *most;
    return HR_OK;
}

/* A pattern may hit a fused name and its parts; which of them the adapter has, only its tensors
 * say, so the larger rank counts. */
static hr_status largest_rank(hr_resolver *r, uint32_t *out) {
    uint32_t most = 0;
    HR_TRY(list_targets(r));
    for (size_t i = 0; i < r->n_targets; i++) {
        bool saved = false;
        if (!r->targets[i].fused)
            HR_TRY(is_saved(r, &r->targets[i], &saved));
        HR_TRY(named_rank(r, &r->targets[i], &most));
    }
    *out = most;
    return most > 0 ? HR_OK : names_nothing(r);
}

hr_status hr_peft_check_config(const char *config, size_t config_len, const hr_module_name *modules,
                               size_t n_modules, uint32_t *max_rank, hr_error *err) {
    uint32_t most = 0;
    hr_resolver r = {.modules = modules, .n_modules = n_modules, .err = err};
    HR_TRY(hr_peft_config_parse(config, config_len, &r.config, err));
    hr_status status = largest_rank(&r, &most);
    resolver_free(&r);
    if (status == HR_OK)
        *max_rank = most;
    return status;
}

void hr_peft_close(hr_peft *peft) {
    if (peft == NULL)
        return;
    for (size_t i = 0; i < peft->n_warnings; i++)
        free(peft->warnings[i]);
    free(peft->warnings);
    free(peft->modules);
    hr_safetensors_close(peft->file);
    *peft = (hr_peft){0};
}
