/* /release_memory_occupation and /resume_memory_occupation: memory for whoever else needs it while
 * the engine stands still. */
#include "base/log.h"
#include "format/json.h"
#include "server/update_call.h"

#include <string.h>

/* Of tags; null is everything. Captured graphs do not exist here, so that tag frees nothing. */
static hr_status read_tags(const cJSON *args, unsigned *kinds, hr_error *err) {
    const cJSON *tags = hr_json_get_present(args, "tags");
    *kinds = HR_MEMORY_WEIGHTS | HR_MEMORY_KV_CACHE;
    if (tags == NULL)
        return HR_OK;
    if (!cJSON_IsArray(tags))
        return hr_fail(err, HR_ERR_INVALID, "tags: wanted a list or null, came %s",
                       hr_json_kind(tags));
    *kinds = 0;
    for (const cJSON *item = tags->child; item != NULL; item = item->next) {
        const char *tag = NULL;
        HR_TRY(hr_json_string(item, "tags", &tag, err));
        if (strcmp(tag, "weights") == 0)
            *kinds |= HR_MEMORY_WEIGHTS;
        else if (strcmp(tag, "kv_cache") == 0)
            *kinds |= HR_MEMORY_KV_CACHE;
        else if (strcmp(tag, "cuda_graph") != 0)
            return hr_fail(err, HR_ERR_INVALID,
                           "tags: wanted \"weights\", \"kv_cache\" or \"cuda_graph\", came "
                           "\"%.100s\"",
                           tag);
    }
    return HR_OK;
}

static const char *kinds_text(unsigned kinds) {
    return kinds == HR_MEMORY_WEIGHTS    ? "weights"
           : kinds == HR_MEMORY_KV_CACHE ? "KV cache"
                                         : "weights and KV cache";
}

static hr_status run_release(hr_update_call *c, hr_error *err) {
    unsigned kinds = 0;
    HR_TRY(read_tags(c->args, &kinds, err));
    if (kinds != 0) {
        HR_TRY(hr_engine_release_memory(c->server->options.engine, kinds, err));
        hr_log(HR_LOG_INFO, "memory is given back: %s", kinds_text(kinds));
    }
    hr_json_write_null(&c->w);
    return HR_OK;
}

static hr_status run_resume(hr_update_call *c, hr_error *err) {
    unsigned kinds = 0;
    HR_TRY(read_tags(c->args, &kinds, err));
    if (kinds != 0) {
        hr_engine_resume_memory(c->server->options.engine, kinds);
        hr_log(HR_LOG_INFO, "memory is taken again: %s", kinds_text(kinds));
    }
    hr_json_write_null(&c->w);
    return HR_OK;
}

static const char *const keys[] = {"tags", NULL};

void hr_route_release_memory(hr_exchange *exchange, void *app) {
    static const hr_update_route route = {
        .keys = keys, .shape = HR_UPDATE_PLAIN, .run = run_release};
    hr_update_call_start(app, exchange, &route);
}

void hr_route_resume_memory(hr_exchange *exchange, void *app) {
    static const hr_update_route route = {
        .keys = keys, .shape = HR_UPDATE_PLAIN, .run = run_resume};
    hr_update_call_start(app, exchange, &route);
}
