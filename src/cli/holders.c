/* Which engines still hold what was published on them. */
#include "cli/holders.h"

#include "cli/engine_calls.h"
#include "format/json.h"

#include <stdlib.h>
#include <string.h>

static hr_holder *find(const hr_holders *holders, const char *url) {
    for (size_t i = 0; i < holders->n; i++) {
        if (strcmp(holders->items[i].url, url) == 0)
            return &holders->items[i];
    }
    return NULL;
}

static hr_status add(hr_holders *holders, const char *url, hr_error *err) {
    hr_holder *grown = realloc(holders->items, (holders->n + 1) * sizeof *grown);
    char *copy = strdup(url);
    if (grown != NULL)
        holders->items = grown;
    if (grown == NULL || copy == NULL) {
        free(copy);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the list of engines");
    }
    holders->items[holders->n++] = (hr_holder){.url = copy};
    return HR_OK;
}

static hr_status note_engine(hr_holders *holders, const cJSON *engine, hr_error *err) {
    const char *url = NULL, *instance = "";
    HR_TRY(hr_json_get_string(engine, "url", &url, err));
    (void)hr_json_opt_string(hr_json_get(engine, "receipt"), "instance", &instance, NULL);
    if (find(holders, url) == NULL)
        HR_TRY(add(holders, url, err));
    hr_holder *holder = find(holders, url);
    snprintf(holder->instance, sizeof holder->instance, "%s", instance);
    return HR_OK;
}

hr_status hr_holders_note(hr_holders *holders, const char *report, hr_error *err) {
    cJSON *tree = NULL;
    const cJSON *engine;
    HR_TRY(hr_json_parse(report, strlen(report), 0, &tree, err));
    hr_status status = HR_OK;
    cJSON_ArrayForEach(engine, hr_json_get(tree, "engines")) {
        if (status == HR_OK)
            status = note_engine(holders, engine, err);
    }
    cJSON_Delete(tree);
    return status;
}

static bool all_have_instances(const hr_holders *holders) {
    for (size_t i = 0; i < holders->n; i++) {
        if (holders->items[i].instance[0] == '\0')
            return false;
    }
    return true;
}

static bool is_another_process(const cJSON *reply, const hr_holder *holder, const hr_held *held) {
    (void)held;
    const cJSON *now = hr_json_get(hr_json_get(reply, "session"), "instance");
    return cJSON_IsString(now) && strcmp(now->valuestring, holder->instance) != 0;
}

/* Of /v1/models, which lists adapters beside the base. */
static bool lists_without(const cJSON *reply, const hr_holder *holder, const hr_held *held) {
    (void)holder;
    const cJSON *cards = hr_json_get(reply, "data"), *card;
    if (!cJSON_IsArray(cards))
        return false;
    cJSON_ArrayForEach(card, cards) {
        const cJSON *id = hr_json_get(card, "id");
        if (cJSON_IsString(id) && strcmp(id->valuestring, held->adapter) == 0)
            return false;
    }
    return true;
}

/* Other trainers may name their version on the same engine; none is called as at the start. */
static bool has_first_version(const cJSON *reply, const hr_holder *holder, const hr_held *held) {
    (void)holder;
    static const char first[] = "default";
    const cJSON *version = hr_json_get(reply, "weight_version");
    return cJSON_IsString(version) && strcmp(version->valuestring, first) == 0 &&
           strcmp(held->label, first) != 0;
}

/* How an engine is found to have lost what it held. */
typedef struct sign {
    const char *path;
    bool (*is_there)(const cJSON *reply, const hr_holder *holder, const hr_held *held);
} sign;

static const sign by_instance = {"/weight_update_status", is_another_process};
static const sign by_adapter = {"/v1/models", lists_without};
static const sign by_version = {"/model_info", has_first_version};

/* Only Headrace engines say which process they are. */
static const sign *choose_sign(const hr_holders *holders, const hr_held *held) {
    if (all_have_instances(holders))
        return &by_instance;
    return held->adapter != NULL ? &by_adapter : &by_version;
}

static hr_status ask(const hr_holders *holders, const hr_held *held, const char *path,
                     hr_engine_call **calls, hr_error *err) {
    const char **urls = calloc(holders->n + 1, sizeof *urls);
    hr_engine_ask question = {.method = "GET",
                              .paths = &path,
                              .n_paths = 1,
                              .api_key = held->api_key,
                              .timeout_ms = held->timeout_ms};
    if (urls == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the list of engines");
    for (size_t i = 0; i < holders->n; i++)
        urls[i] = holders->items[i].url;
    hr_status status = hr_engine_calls(urls, holders->n, &question, calls, err);
    free(urls);
    return status;
}

hr_status hr_holders_lost(const hr_holders *holders, const hr_held *held, hr_cli_list *lost,
                          hr_error *err) {
    const sign *sign_of_loss = choose_sign(holders, held);
    hr_engine_call *calls = NULL;
    lost->n = 0;
    if (holders->n == 0)
        return HR_OK;
    HR_TRY(ask(holders, held, sign_of_loss->path, &calls, err));
    for (size_t i = 0; i < holders->n && lost->n < HR_CLI_MAX_ITEMS; i++) {
        const hr_holder *holder = &holders->items[i];
        if (calls[i].status == HR_OK && sign_of_loss->is_there(calls[i].reply, holder, held))
            lost->items[lost->n++] = holder->url;
    }
    hr_engine_calls_free(calls, holders->n);
    return HR_OK;
}

void hr_holders_drop(hr_holders *holders, const char *url) {
    hr_holder *holder = find(holders, url);
    if (holder == NULL)
        return;
    free(holder->url);
    *holder = holders->items[--holders->n];
}

void hr_holders_free(hr_holders *holders) {
    for (size_t i = 0; i < holders->n; i++)
        free(holders->items[i].url);
    free(holders->items);
    *holders = (hr_holders){0};
}
