/* What a push is, before anything moves: checked on each rank, then compared among them. */
#include "publish/push_run.h"

#include "format/json.h"
#include "weights/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- checks before anything moves ---- */

static hr_status check_adapter(const hr_push_adapter *adapter, hr_error *err) {
    cJSON *config = NULL;
    if (adapter->name == NULL)
        return hr_fail(err, HR_ERR_INVALID, "an adapter of the push has no name");
    hr_status named = hr_adapter_name_check(adapter->name, err);
    if (named != HR_OK)
        return hr_fail_context(err, named, "an adapter of the push");
    if (adapter->config == NULL)
        return hr_fail(err, HR_ERR_INVALID, "adapter %.200s has no config", adapter->name);
    hr_status status = hr_json_parse(adapter->config, adapter->config_len, 0, &config, err);
    if (status == HR_OK && !cJSON_IsObject(config))
        status =
            hr_fail(err, HR_ERR_ADAPTER_CONFIG, "wanted an object, came %s", hr_json_kind(config));
    cJSON_Delete(config);
    if (status != HR_OK)
        return hr_fail_context(err, status, "the config of adapter %.200s", adapter->name);
    return HR_OK;
}

static hr_status check_push(const hr_push *push, hr_error *err) {
    if (push->n_adapters == 0 && !push->sync_base)
        return hr_fail(err, HR_ERR_INVALID, "nothing to push: no adapter and no base weights");
    if (push->complete_base && !push->sync_base)
        return hr_fail(err, HR_ERR_INVALID, "complete_base needs sync_base");
    if (push->source.next == NULL)
        return hr_fail(err, HR_ERR_INVALID, "the push has no source");
    for (size_t i = 0; i < push->n_adapters; i++) {
        HR_TRY(check_adapter(&push->adapters[i], err));
        for (size_t j = 0; j < i; j++) {
            if (strcmp(push->adapters[i].name, push->adapters[j].name) == 0)
                return hr_fail(err, HR_ERR_INVALID, "adapter %.200s is listed twice",
                               push->adapters[i].name);
        }
    }
    if (push->weight_version != NULL)
        HR_TRY(hr_weight_version_check(push->weight_version, err));
    return push->session_id != NULL ? hr_session_id_check(push->session_id, err) : HR_OK;
}

static hr_status check_transport(hr_push_run *run, hr_error *err) {
    const hr_transport_traits *t = run->traits;
    if (run->push->sync_base && !t->carries_base)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "transport %s does not carry base weights",
                       t->name);
    if (run->push->n_adapters > 0 && !t->carries_adapters)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "transport %s does not carry adapters", t->name);
    if (run->push->complete_base && !t->atomic)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "transport %s cannot check that base weights are complete: push without "
                       "complete_base (headrace push: say --transport %s)",
                       t->name, t->name);
    if (run->p->options.audit && !t->atomic)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "transport %s answers with no receipt to audit",
                       t->name);
    return HR_OK;
}

static hr_status make_session_id(hr_push_run *run, hr_error *err) {
    uint8_t random[12];
    if (run->push->session_id != NULL) {
        snprintf(run->session_id, sizeof run->session_id, "%s", run->push->session_id);
        return HR_OK;
    }
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return hr_fail(err, HR_ERR_IO, "no random bytes for a session id");
    int at = snprintf(run->session_id, sizeof run->session_id, "push-");
    for (size_t i = 0; i < sizeof random; i++)
        at +=
            snprintf(run->session_id + at, sizeof run->session_id - (size_t)at, "%02x", random[i]);
    return HR_OK;
}

hr_status hr_push_set_up(hr_push_run *run, hr_error *err) {
    HR_TRY(check_push(run->push, err));
    HR_TRY(hr_publisher_connect(run->p, err));
    run->traits = run->p->fleet.transport.traits;
    run->facts.transport = run->traits->name;
    run->facts.atomic = run->traits->atomic;
    HR_TRY(check_transport(run, err));
    run->seen = calloc(run->push->n_adapters + 1, sizeof *run->seen);
    run->sent_whole = calloc(run->push->n_adapters + 1, sizeof *run->sent_whole);
    if (run->seen == NULL || run->sent_whole == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a push");
    return hr_push_leads(run) ? make_session_id(run, err) : HR_OK;
}

/* ---- the first round: all ranks push the same ---- */

typedef struct declaration {
    hr_push_run *run;
    char *adapters, *configs, *flags, *version, *transport; /* of rank 0 */
    size_t unchanged;
} declaration;

static void put_declaration(const hr_push_run *run, hr_buf *out) {
    const hr_push *push = run->push;
    hr_buf names = {0}, configs = {0};
    char hex[HR_XXH3_HEX], flags[96];
    uint8_t digest[HR_XXH3_SIZE];
    for (size_t i = 0; run->failure.status == HR_OK && i < push->n_adapters; i++) {
        hr_buf_printf(&names, "%s%s", i > 0 ? ", " : "", push->adapters[i].name);
        hr_xxh3(push->adapters[i].config, push->adapters[i].config_len, digest);
        hr_buf_printf(&configs, "%s%s%s", i > 0 ? ", " : "", hr_xxh3_format(digest, hex),
                      push->adapters[i].pinned ? " pinned" : "");
    }
    snprintf(flags, sizeof flags, "sync_base=%s complete_base=%s",
             push->sync_base ? "true" : "false", push->complete_base ? "true" : "false");
    hr_round_put_text(out, names.len > 0 ? names.data : "");
    hr_round_put_text(out, configs.len > 0 ? configs.data : "");
    hr_round_put_text(out, flags);
    hr_round_put_text(out, push->weight_version != NULL ? push->weight_version : "");
    hr_round_put_text(out, run->traits != NULL ? run->traits->name : "");
    hr_round_put_text(out, run->session_id);
    hr_round_put_u64(out, push->unchanged);
    out->failed = out->failed || names.failed || configs.failed;
    hr_buf_free(&names);
    hr_buf_free(&configs);
}

/* Keeps rank 0's value; that of the others must be equal. */
static hr_status compare_declared(char **kept, const char *what, uint32_t rank, const char *value,
                                  hr_error *err) {
    if (rank == 0) {
        free(*kept);
        *kept = strdup(value);
        return *kept != NULL ? HR_OK : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a push");
    }
    if (*kept != NULL && strcmp(*kept, value) == 0)
        return HR_OK;
    return hr_fail(err, HR_ERR_INVALID,
                   "ranks push different lists: %s is \"%.200s\" on rank %u and \"%.200s\" on rank "
                   "0",
                   what, value, rank, *kept != NULL ? *kept : "");
}

static hr_status read_declaration(void *ctx, uint32_t rank, hr_round_reader *reader,
                                  hr_error *err) {
    declaration *d = ctx;
    HR_TRY(compare_declared(&d->adapters, "adapters", rank, hr_round_get_text(reader), err));
    HR_TRY(compare_declared(&d->configs, "configs (as digests)", rank, hr_round_get_text(reader),
                            err));
    HR_TRY(compare_declared(&d->flags, "what of the base", rank, hr_round_get_text(reader), err));
    HR_TRY(compare_declared(&d->version, "weight_version", rank, hr_round_get_text(reader), err));
    HR_TRY(compare_declared(&d->transport, "transport", rank, hr_round_get_text(reader), err));
    const char *session_id = hr_round_get_text(reader);
    if (rank == 0)
        snprintf(d->run->session_id, sizeof d->run->session_id, "%s", session_id);
    d->unchanged += hr_round_get_u64(reader) != 0;
    return HR_OK;
}

hr_status hr_push_declare(hr_push_run *run, bool *skip, hr_error *err) {
    declaration d = {.run = run};
    hr_buf mine = {0};
    put_declaration(run, &mine);
    hr_status status = hr_round(run->group, &run->failure, &mine, read_declaration, &d, NULL, err);
    *skip = d.unchanged == run->facts.ranks;
    hr_buf_free(&mine);
    free(d.adapters);
    free(d.configs);
    free(d.flags);
    free(d.version);
    free(d.transport);
    return status;
}
