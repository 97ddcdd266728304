/* An adapter_config.json, understood: which modules it covers, with which rank and scale. Private
 * to the room. */
#ifndef HR_FORMAT_PEFT_CONFIG_H
#define HR_FORMAT_PEFT_CONFIG_H

#include "base/clock.h"
#include "format/json.h"
#include "format/pattern.h"

/* A list of names or one pattern over whole names. */
typedef struct hr_name_rule {
    const cJSON *list;   /* strings; each hits the name itself and what ends in ".name" */
    hr_pattern *pattern; /* instead of a list */
} hr_name_rule;

/* One row of rank_pattern or alpha_pattern. */
typedef struct hr_pattern_row {
    const char *key;
    hr_pattern *pattern;
    double value;
    bool used;
} hr_pattern_row;

typedef struct hr_pattern_table {
    hr_pattern_row *rows;
    size_t n;
} hr_pattern_table;

typedef struct hr_peft_config {
    cJSON *tree;
    uint32_t rank;
    double alpha;
    bool rslora, all_linear;
    hr_name_rule target, exclude;
    const cJSON *layers; /* numbers or one number; NULL when all layers are meant */
    hr_pattern **layer_patterns;
    size_t n_layer_patterns;
    hr_pattern_table ranks, alphas;
    hr_pattern_table saved; /* modules_to_save; values unused */
    hr_deadline deadline;   /* for all matching: many slow patterns add up */
} hr_peft_config;

/* Reads a config; everything that is not computed is refused by name. ERR_ADAPTER_CONFIG,
 * ERR_NO_MEMORY. */
hr_status hr_peft_config_parse(const char *text, size_t len, hr_peft_config *out, hr_error *err);
void hr_peft_config_free(hr_peft_config *config);

/* Whether modules_to_save names this module or one it is part of; marks the rows used. */
hr_status hr_peft_config_saves(hr_peft_config *config, const char *path, bool *hit, hr_error *err);

/* Whether the config puts a pair on this module. hidden_linear: a linear layer that is not the
 * output head, which is what all-linear means. */
hr_status hr_peft_config_targets(hr_peft_config *config, const char *path, bool hidden_linear,
                                 bool *hit, hr_error *err);

/* Rank and scale of a module; marks the rows used. */
hr_status hr_peft_config_rank(hr_peft_config *config, const char *path, uint32_t *rank,
                              float *scale, hr_error *err);

#endif
