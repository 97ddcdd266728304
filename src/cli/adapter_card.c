/* What an adapter_config.json says, for a person. */
#include "cli/adapter_card.h"

#include "cli/options.h"
#include "format/file.h"
#include "format/json.h"
#include "format/peft_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)

/* Settings that narrow or change what rank, alpha and target_modules say. */
static const char *const narrower[] = {"rank_pattern",    "alpha_pattern",       "exclude_modules",
                                       "modules_to_save", "layers_to_transform", "layers_pattern"};
enum { N_NARROWER = sizeof narrower / sizeof narrower[0] };

hr_status hr_adapter_card_read(const char *dir, hr_adapter_card *out, hr_error *err) {
    hr_adapter_card card = {0};
    hr_peft_config config = {0};
    char *path = hr_path_join(dir, "adapter_config.json");
    if (path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    hr_status status = hr_json_parse_file(path, MAX_CONFIG_BYTES, &card.config, err);
    free(path);
    if (status != HR_OK)
        return status;
    char *text = cJSON_PrintUnformatted(card.config);
    if (text == NULL) {
        cJSON_Delete(card.config);
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", dir);
    }
    (void)hr_peft_config_parse(text, strlen(text), &config, &card.refusal);
    hr_peft_config_free(&config);
    cJSON_free(text);
    *out = card;
    return HR_OK;
}

void hr_adapter_card_free(hr_adapter_card *card) {
    cJSON_Delete(card->config);
    *card = (hr_adapter_card){0};
}

static bool is_empty(const cJSON *item) {
    return item == NULL || cJSON_IsNull(item) ||
           ((cJSON_IsArray(item) || cJSON_IsObject(item)) && item->child == NULL);
}

/* NAN: not given as a number, or not computable. */
static double number(const hr_adapter_card *card, const char *key) {
    const cJSON *item = hr_json_get(card->config, key);
    return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

static bool is_rslora(const hr_adapter_card *card) {
    return cJSON_IsTrue(hr_json_get(card->config, "use_rslora"));
}

static double scaling(const hr_adapter_card *card) {
    double rank = number(card, "r"), alpha = number(card, "lora_alpha");
    double by = is_rslora(card) ? sqrt(rank) : rank;
    return by > 0 ? alpha / by : (double)NAN;
}

/* ---- as lines ---- */

static void print_number(const char *what, double value) {
    if (isfinite(value))
        printf("%s %g", what, value);
    else
        printf("%s not given", what);
}

/* A text, or a list of texts with commas; anything else as JSON. */
static void print_value(const char *label, const cJSON *item) {
    const cJSON *each;
    bool plain = cJSON_IsArray(item);
    cJSON_ArrayForEach(each, item) plain = plain && cJSON_IsString(each);
    printf("%-10s ", label);
    if (plain) {
        cJSON_ArrayForEach(each, item) {
            hr_cli_put_clean(stdout, each->valuestring);
            fputs(each->next != NULL ? ", " : "", stdout);
        }
    } else if (cJSON_IsString(item)) {
        hr_cli_put_clean(stdout, item->valuestring);
    } else {
        char *text = cJSON_PrintUnformatted(item);
        hr_cli_put_clean(stdout, text != NULL ? text : "");
        cJSON_free(text);
    }
    printf("\n");
}

void hr_adapter_card_print(const hr_adapter_card *card) {
    const cJSON *base = hr_json_get(card->config, "base_model_name_or_path");
    printf("adapter    ");
    print_number("rank", number(card, "r"));
    print_number(", alpha", number(card, "lora_alpha"));
    if (isfinite(scaling(card)))
        printf(", scaling %g%s", scaling(card),
               is_rslora(card) ? " (rsLoRA: alpha / sqrt(rank))" : "");
    printf("\n");
    print_value("modules", hr_json_get(card->config, "target_modules"));
    for (size_t i = 0; i < N_NARROWER; i++) {
        const cJSON *item = hr_json_get(card->config, narrower[i]);
        if (!is_empty(item))
            print_value(narrower[i], item);
    }
    if (!is_empty(base))
        print_value("base", base);
    if (card->refusal.status != HR_OK) {
        printf("refused    ");
        hr_cli_put_clean(stdout, card->refusal.message);
        printf("\n");
    }
}

/* ---- as JSON ---- */

static void put_number(hr_json_writer *w, const char *key, double value) {
    if (!isfinite(value))
        hr_json_put_null(w, key);
    else if (value >= 0 && value < 1e9 && value == floor(value))
        hr_json_put_u64(w, key, (uint64_t)value);
    else
        hr_json_put_f64(w, key, value);
}

static void put_item(hr_json_writer *w, const char *key, const cJSON *item) {
    char *text = is_empty(item) ? NULL : cJSON_PrintUnformatted(item);
    hr_json_key(w, key);
    if (text != NULL)
        hr_json_write_raw(w, text, strlen(text));
    else
        hr_json_write_null(w);
    cJSON_free(text);
}

void hr_adapter_card_write(const hr_adapter_card *card, hr_json_writer *w) {
    hr_json_key(w, "adapter");
    hr_json_object_begin(w);
    put_number(w, "rank", number(card, "r"));
    put_number(w, "alpha", number(card, "lora_alpha"));
    put_number(w, "scaling", scaling(card));
    hr_json_put_bool(w, "use_rslora", is_rslora(card));
    put_item(w, "target_modules", hr_json_get(card->config, "target_modules"));
    for (size_t i = 0; i < N_NARROWER; i++)
        put_item(w, narrower[i], hr_json_get(card->config, narrower[i]));
    put_item(w, "base_model_name_or_path", hr_json_get(card->config, "base_model_name_or_path"));
    if (card->refusal.status != HR_OK)
        hr_json_put_string(w, "refused", card->refusal.message);
    else
        hr_json_put_null(w, "refused");
    hr_json_object_end(w);
}
