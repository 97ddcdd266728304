/* Reading an adapter_config.json with the rules of PEFT. */
#include "format/peft_config.h"

#include "format/peft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)
#define MAX_LIST 16384
#define MATCHING_MS 3000

/* A field that is not computed may be null or its default. */
static hr_status check_refused(const hr_peft_field *field, const cJSON *item, hr_error *err) {
    bool same = cJSON_IsNull(item);
    if (!same && field->default_json != NULL) {
        cJSON *standard = cJSON_Parse(field->default_json);
        if (standard == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", field->name);
        same = cJSON_Compare(item, standard, true);
        cJSON_Delete(standard);
    }
    if (same)
        return HR_OK;
    return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "%s: only %s is supported: %s", field->name,
                   field->default_json ? field->default_json : "null", field->reason);
}

/* What no version known here writes may mean anything; only values that say "off" pass. */
static hr_status check_unknown(const cJSON *item, hr_error *err) {
    bool empty = (cJSON_IsArray(item) || cJSON_IsObject(item)) && item->child == NULL;
    if (cJSON_IsNull(item) || cJSON_IsFalse(item) || empty)
        return HR_OK;
    return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                   "%.100s: not a LoRA setting known here; remove it or set it to null",
                   item->string);
}

static hr_status check_fields(const cJSON *tree, hr_error *err) {
    for (const cJSON *item = tree->child; item != NULL; item = item->next) {
        const hr_peft_field *field = NULL;
        for (size_t i = 0; i < hr_n_peft_fields && field == NULL; i++) {
            if (strcmp(hr_peft_fields[i].name, item->string) == 0)
                field = &hr_peft_fields[i];
        }
        if (field == NULL)
            HR_TRY(check_unknown(item, err));
        else if (field->field_class == HR_PEFT_REFUSED)
            HR_TRY(check_refused(field, item, err));
    }
    return HR_OK;
}

static hr_status check_init(const cJSON *tree, hr_error *err) {
    static const char *const harmless[] = {"gaussian", "eva", "orthogonal", "mica"};
    const cJSON *item = hr_json_get_present(tree, "init_lora_weights");
    if (item == NULL || cJSON_IsBool(item))
        return HR_OK;
    const char *name = "";
    HR_TRY(hr_json_string(item, "init_lora_weights", &name, err));
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        if (strcmp(name, harmless[i]) == 0)
            return HR_OK;
    }
    return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                   "init_lora_weights: %.64s changes the base weights, so the adapter does not fit "
                   "the base served; convert it to a plain LoRA when saving "
                   "(path_initial_model_for_weight_conversion)",
                   name);
}

static hr_status check_strings(const cJSON *list, const char *key, hr_error *err) {
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > MAX_LIST)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "%s: wanted a list of at most %d names, came %s",
                       key, MAX_LIST, cJSON_IsArray(list) ? "a longer one" : hr_json_kind(list));
    for (const cJSON *item = list->child; item != NULL; item = item->next) {
        if (!cJSON_IsString(item))
            return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "%s: wanted names, came %s", key,
                           hr_json_kind(item));
    }
    return HR_OK;
}

/* A list of names, or a string that is a pattern. */
static hr_status read_rule(const cJSON *item, const char *key, hr_name_rule *out, hr_error *err) {
    if (cJSON_IsString(item))
        return hr_pattern_create(item->valuestring, HR_PATTERN_WHOLE, key, &out->pattern, err);
    HR_TRY(check_strings(item, key, err));
    out->list = item;
    return HR_OK;
}

static hr_status read_targets(hr_peft_config *config, hr_error *err) {
    const cJSON *target = hr_json_get_present(config->tree, "target_modules");
    const cJSON *exclude = hr_json_get_present(config->tree, "exclude_modules");
    if (target == NULL)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "target_modules: wanted a list, a pattern or all-linear, came null");
    if ((cJSON_IsArray(target) && target->child == NULL) ||
        (cJSON_IsString(target) && target->valuestring[0] == '\0'))
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "target_modules: wanted at least one name, came none");
    config->all_linear =
        cJSON_IsString(target) && strcasecmp(target->valuestring, "all-linear") == 0;
    if (!config->all_linear)
        HR_TRY(read_rule(target, "target_modules", &config->target, err));
    bool empty = cJSON_IsString(exclude) && exclude->valuestring[0] == '\0';
    if (exclude != NULL && !empty)
        HR_TRY(read_rule(exclude, "exclude_modules", &config->exclude, err));
    return HR_OK;
}

static hr_status add_layer_pattern(hr_peft_config *config, const char *text, hr_error *err) {
    hr_status status = hr_pattern_create(text, HR_PATTERN_LAYER, "layers_pattern",
                                         &config->layer_patterns[config->n_layer_patterns], err);
    if (status == HR_OK)
        config->n_layer_patterns++;
    return status;
}

static bool is_empty(const cJSON *item) {
    return item == NULL || (cJSON_IsArray(item) && item->child == NULL) ||
           (cJSON_IsString(item) && item->valuestring[0] == '\0');
}

static hr_status read_layer_patterns(hr_peft_config *config, const cJSON *pattern, hr_error *err) {
    bool list = cJSON_IsArray(pattern);
    if (!is_empty(pattern) && !cJSON_IsString(pattern))
        HR_TRY(check_strings(pattern, "layers_pattern", err));
    size_t n = is_empty(pattern) || !list ? 1 : (size_t)cJSON_GetArraySize(pattern);
    config->layer_patterns = calloc(n, sizeof(hr_pattern *));
    if (config->layer_patterns == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "layers_pattern: out of memory");
    if (is_empty(pattern))
        return add_layer_pattern(config, "[^.]*", err);
    if (!list)
        return add_layer_pattern(config, pattern->valuestring, err);
    for (const cJSON *item = pattern->child; item != NULL; item = item->next)
        HR_TRY(add_layer_pattern(config, item->valuestring, err));
    return HR_OK;
}

static hr_status read_layers(hr_peft_config *config, hr_error *err) {
    const cJSON *layers = hr_json_get_present(config->tree, "layers_to_transform");
    const cJSON *pattern = hr_json_get_present(config->tree, "layers_pattern");
    bool text = config->all_linear || config->target.pattern != NULL;
    if (text && (layers != NULL || pattern != NULL))
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "%s: cannot be used when target_modules is a string",
                       layers ? "layers_to_transform" : "layers_pattern");
    if (!is_empty(pattern) && layers == NULL)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "layers_pattern: wanted layers_to_transform beside it");
    if (is_empty(layers))
        return HR_OK;
    uint64_t ignored = 0;
    if (!cJSON_IsArray(layers))
        HR_TRY(hr_json_u64(layers, "layers_to_transform", 0, UINT32_MAX, HR_JSON_NUMBER, &ignored,
                           err));
    else if (cJSON_GetArraySize(layers) > MAX_LIST)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "layers_to_transform: more than %d numbers",
                       MAX_LIST);
    else
        for (const cJSON *item = layers->child; item != NULL; item = item->next)
            HR_TRY(hr_json_u64(item, "layers_to_transform", 0, UINT32_MAX, HR_JSON_NUMBER, &ignored,
                               err));
    config->layers = layers;
    return read_layer_patterns(config, pattern, err);
}

static hr_status table_value(const cJSON *item, const char *key, bool rank, double *out,
                             hr_error *err) {
    uint64_t value = 0;
    hr_status status;
    if (rank) {
        status = hr_json_u64(item, item->string, 1, HR_PEFT_MAX_RANK, HR_JSON_NUMBER, &value, err);
        *out = (double)value;
    } else {
        status = hr_json_double(item, item->string, -1e9, 1e9, out, err);
    }
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "%s", key);
}

static hr_status read_table(const cJSON *tree, const char *key, bool rank, hr_pattern_table *out,
                            hr_error *err) {
    const cJSON *object = hr_json_get_present(tree, key);
    if (object == NULL)
        return HR_OK;
    if (!cJSON_IsObject(object) || cJSON_GetArraySize(object) > MAX_LIST)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "%s: wanted an object of at most %d patterns, came %s", key, MAX_LIST,
                       cJSON_IsObject(object) ? "a larger one" : hr_json_kind(object));
    out->rows = calloc((size_t)cJSON_GetArraySize(object) + 1, sizeof *out->rows);
    if (out->rows == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", key);
    for (const cJSON *item = object->child; item != NULL; item = item->next) {
        hr_pattern_row *row = &out->rows[out->n];
        row->key = item->string;
        HR_TRY(table_value(item, key, rank, &row->value, err));
        HR_TRY(hr_pattern_create(item->string, HR_PATTERN_SUFFIX, key, &row->pattern, err));
        out->n++;
    }
    return HR_OK;
}

static hr_status read_saved(hr_peft_config *config, hr_error *err) {
    const cJSON *list = hr_json_get_present(config->tree, "modules_to_save");
    if (list == NULL)
        return HR_OK;
    HR_TRY(check_strings(list, "modules_to_save", err));
    config->saved.rows = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *config->saved.rows);
    if (config->saved.rows == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "modules_to_save: out of memory");
    for (const cJSON *item = list->child; item != NULL; item = item->next) {
        hr_pattern_row *row = &config->saved.rows[config->saved.n];
        row->key = item->valuestring;
        HR_TRY(hr_pattern_create(item->valuestring, HR_PATTERN_WITHIN, "modules_to_save",
                                 &row->pattern, err));
        config->saved.n++;
    }
    return HR_OK;
}

static hr_status read_numbers(hr_peft_config *config, hr_error *err) {
    const char *type = "LORA";
    uint64_t rank = 8; /* PEFT's defaults for absent keys */
    config->alpha = 8;
    HR_TRY(hr_json_opt_string(config->tree, "peft_type", &type, err));
    if (strcmp(type, "LORA") != 0)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "peft_type: only LORA is supported, came %.64s",
                       type);
    HR_TRY(hr_json_opt_u64(config->tree, "r", 1, HR_PEFT_MAX_RANK, &rank, err));
    config->rank = (uint32_t)rank;
    HR_TRY(hr_json_opt_double(config->tree, "lora_alpha", -1e9, 1e9, &config->alpha, err));
    return hr_json_opt_bool(config->tree, "use_rslora", &config->rslora, err);
}

static hr_status read_config(hr_peft_config *config, hr_error *err) {
    hr_clock clock = hr_clock_monotonic();
    config->deadline = hr_deadline_after_ms(&clock, MATCHING_MS);
    if (!cJSON_IsObject(config->tree))
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "wanted a JSON object, came %s",
                       hr_json_kind(config->tree));
    const char *twice = hr_json_duplicate_key(config->tree);
    if (twice != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "the key %.100s stands twice", twice);
    HR_TRY(read_numbers(config, err));
    HR_TRY(check_fields(config->tree, err));
    HR_TRY(check_init(config->tree, err));
    HR_TRY(read_targets(config, err));
    HR_TRY(read_layers(config, err));
    HR_TRY(read_table(config->tree, "rank_pattern", true, &config->ranks, err));
    HR_TRY(read_table(config->tree, "alpha_pattern", false, &config->alphas, err));
    return read_saved(config, err);
}

hr_status hr_peft_config_parse(const char *text, size_t len, hr_peft_config *out, hr_error *err) {
    hr_peft_config config = {0};
    hr_status status = hr_json_parse(text, len, CONFIG_MAX_BYTES, &config.tree, err);
    if (status == HR_OK)
        status = read_config(&config, err);
    if (status == HR_OK) {
        *out = config;
        return HR_OK;
    }
    hr_peft_config_free(&config);
    if (status != HR_ERR_NO_MEMORY) {
        status = HR_ERR_ADAPTER_CONFIG;
        if (err != NULL)
            err->status = status;
    }
    return hr_fail_context(err, status, "adapter_config.json");
}

static void free_table(hr_pattern_table *table) {
    for (size_t i = 0; i < table->n; i++)
        hr_pattern_destroy(table->rows[i].pattern);
    free(table->rows);
}

void hr_peft_config_free(hr_peft_config *config) {
    free_table(&config->ranks);
    free_table(&config->alphas);
    free_table(&config->saved);
    for (size_t i = 0; i < config->n_layer_patterns; i++)
        hr_pattern_destroy(config->layer_patterns[i]);
    free(config->layer_patterns);
    hr_pattern_destroy(config->target.pattern);
    hr_pattern_destroy(config->exclude.pattern);
    cJSON_Delete(config->tree);
    *config = (hr_peft_config){0};
}

static hr_status match(const hr_peft_config *config, hr_pattern *pattern, const char *path,
                       bool *hit, hr_error *err) {
    hr_clock clock = hr_clock_monotonic();
    if (hr_deadline_passed(&clock, config->deadline))
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "matching the patterns of the config against the model takes more than "
                       "%d ms; use fewer or simpler ones",
                       MATCHING_MS);
    return hr_pattern_match(pattern, path, hit, err);
}

typedef enum hr_rule_hit { MISSES, HITS_SUFFIX, HITS_EXACTLY } hr_rule_hit;

static hr_status rule_hits(const hr_peft_config *config, const hr_name_rule *rule, const char *path,
                           hr_rule_hit *out, hr_error *err) {
    *out = MISSES;
    if (rule->pattern != NULL) {
        bool hit = false;
        HR_TRY(match(config, rule->pattern, path, &hit, err));
        *out = hit ? HITS_EXACTLY : MISSES;
        return HR_OK;
    }
    size_t len = strlen(path);
    for (const cJSON *item = rule->list ? rule->list->child : NULL; item; item = item->next) {
        size_t n = strlen(item->valuestring);
        if (n > len || memcmp(path + len - n, item->valuestring, n) != 0)
            continue;
        if (n == len) {
            *out = HITS_EXACTLY;
            return HR_OK;
        }
        if (path[len - n - 1] == '.')
            *out = HITS_SUFFIX;
    }
    return HR_OK;
}

static bool lists_layer(const cJSON *layers, uint32_t layer) {
    if (!cJSON_IsArray(layers))
        return layers->valuedouble == layer;
    for (const cJSON *item = layers->child; item != NULL; item = item->next) {
        if (item->valuedouble == layer)
            return true;
    }
    return false;
}

static hr_status in_layers(hr_peft_config *config, const char *path, bool *hit, hr_error *err) {
    *hit = config->layers == NULL;
    for (size_t i = 0; i < config->n_layer_patterns; i++) {
        bool found = false;
        uint32_t layer = 0;
        HR_TRY(match(config, config->layer_patterns[i], path, &found, err));
        if (!found)
            continue;
        *hit = hr_pattern_layer(config->layer_patterns[i], path, &layer) &&
               lists_layer(config->layers, layer);
        return HR_OK;
    }
    return HR_OK;
}

/* PEFT saves what ends in the name, and keeps pairs off what it is a whole part of. */
static bool ends_in(const char *path, const char *name) {
    size_t len = strlen(path), n = strlen(name);
    return n > 0 && n <= len && strcmp(path + len - n, name) == 0;
}

hr_status hr_peft_config_saves(hr_peft_config *config, const char *path, bool *hit, hr_error *err) {
    *hit = false;
    for (size_t i = 0; i < config->saved.n; i++) {
        bool found = false;
        HR_TRY(match(config, config->saved.rows[i].pattern, path, &found, err));
        found |= ends_in(path, config->saved.rows[i].key);
        config->saved.rows[i].used |= found;
        *hit |= found;
    }
    return HR_OK;
}

hr_status hr_peft_config_targets(hr_peft_config *config, const char *path, bool hidden_linear,
                                 bool *hit, hr_error *err) {
    hr_rule_hit excluded = MISSES, targeted = MISSES;
    bool saved = false;
    *hit = false;
    HR_TRY(rule_hits(config, &config->exclude, path, &excluded, err));
    HR_TRY(hr_peft_config_saves(config, path, &saved, err));
    if (excluded != MISSES || saved)
        return HR_OK;
    if (config->all_linear) {
        *hit = hidden_linear;
        return HR_OK;
    }
    HR_TRY(rule_hits(config, &config->target, path, &targeted, err));
    if (targeted == HITS_SUFFIX)
        return in_layers(config, path, hit, err);
    *hit = targeted == HITS_EXACTLY;
    return HR_OK;
}

/* The value of the first row that matches; *out stays when none does. */
static hr_status look_up(const hr_peft_config *config, hr_pattern_table *table, const char *path,
                         double *out, hr_error *err) {
    for (size_t i = 0; i < table->n; i++) {
        bool hit = false;
        HR_TRY(match(config, table->rows[i].pattern, path, &hit, err));
        if (!hit)
            continue;
        table->rows[i].used = true;
        *out = table->rows[i].value;
        return HR_OK;
    }
    return HR_OK;
}

hr_status hr_peft_config_rank(hr_peft_config *config, const char *path, uint32_t *rank,
                              float *scale, hr_error *err) {
    double r = config->rank, alpha = config->alpha;
    HR_TRY(look_up(config, &config->ranks, path, &r, err));
    HR_TRY(look_up(config, &config->alphas, path, &alpha, err));
    *rank = (uint32_t)r;
    *scale = (float)(alpha / (config->rslora ? sqrt(r) : r));
    return HR_OK;
}
