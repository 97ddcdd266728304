/* A push from the first check to the receipt.
 *
 * All ranks make the same rounds (round.h): what is pushed; one round for each bucket, whose first
 * also says whether the session was opened, before anybody sends; then prepared; committed. Rank 0
 * alone drives the session between them, every rank sends its own buckets. A lone publisher makes
 * the same rounds with itself. */
#include "format/json.h"
#include "publish/bucket.h"
#include "publish/gather.h"
#include "publish/ledger.h"
#include "publish/publisher.h"
#include "publish/receipt.h"
#include "publish/round.h"
#include "weights/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

typedef struct push_run {
    hr_publisher *p;
    const hr_push *push;
    const hr_group *group; /* NULL: alone */
    uint32_t rank;
    const hr_transport_traits *traits;
    char session_id[HR_SESSION_ID_SIZE];
    hr_push_receipt facts;

    hr_unit pending; /* pulled, and did not fit */
    bool ended;      /* the source has no more */
    hr_push_bucket bucket;
    uint64_t index; /* of the next bucket of this rank */
    char stream[16];
    hr_ledger ledger;
    hr_gather gathered; /* on rank 0 of a group, where adapters go whole */
    hr_manifest_digest *manifest;
    bool *seen; /* by adapter of the push: got a tensor, from any rank */
    bool base_seen;
    bool *sent_whole;           /* by adapter: its one bucket has left (whole_adapters) */
    size_t all_done, all_empty; /* ranks of the last round that have no more, and sent nothing */
    hr_error failure;           /* of this rank since the last round */

    bool begun, moved, committed; /* sessions may be open; base bytes may be written; no way back */
} push_run;

/* ---- small things ---- */

static bool leads(const push_run *run) {
    return run->rank == 0;
}

static bool alone(const push_run *run) {
    return run->group == NULL || run->group->size == 1;
}

/* Whether a bucket must be one whole adapter; a group gathers adapters before they leave. */
static bool one_part(const push_run *run) {
    return run->traits->whole_adapters && alone(run);
}

static bool gathers(const push_run *run) {
    return run->traits->whole_adapters && !alone(run);
}

static uint64_t now(const push_run *run) {
    return hr_now_ns(&run->p->fleet.clock);
}

/* Keeps the first failure of this rank for the next round. */
static void note(push_run *run, hr_status status, const hr_error *err) {
    if (status != HR_OK && run->failure.status == HR_OK)
        run->failure = *err;
}

static hr_status cancelled(hr_error *err) {
    return hr_fail(err, HR_ERR_CANCELLED, "the push was cancelled by its caller");
}

static hr_status run_stage(push_run *run, const hr_stage_request *request, hr_fleet_retry retry,
                           hr_error *err) {
    if (!hr_publisher_tell(run->p, hr_stage_name(request->stage)))
        return cancelled(err);
    return hr_fleet_run(&run->p->fleet, request, retry, NULL, err);
}

/* The request of a stage with what all stages of this push share. */
static hr_stage_request request_of(const push_run *run, hr_stage stage) {
    const hr_push *push = run->push;
    bool flush = push->sync_base && run->p->options.pause != HR_PUSH_PAUSE_IN_PLACE;
    return (hr_stage_request){
        .stage = stage,
        .session_id = run->session_id,
        .pause = run->p->options.pause,
        .adapters = push->adapters,
        .n_adapters = push->n_adapters,
        .sync_base = push->sync_base,
        .complete_base = push->complete_base,
        .lease_ms = run->p->options.lease_ms,
        .weight_version = push->weight_version,
        .flush_cache = flush,
        .audit = run->p->options.audit,
    };
}

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
        status = hr_fail(err, HR_ERR_ADAPTER_CONFIG, "wanted an object, came a %s",
                         hr_json_kind(config));
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

static hr_status check_transport(push_run *run, hr_error *err) {
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

static hr_status make_session_id(push_run *run, hr_error *err) {
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

static hr_status set_up(push_run *run, hr_error *err) {
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
    return leads(run) ? make_session_id(run, err) : HR_OK;
}

/* ---- the first round: all ranks push the same ---- */

typedef struct declaration {
    push_run *run;
    char *adapters, *configs, *flags, *version, *transport; /* of rank 0 */
    size_t unchanged;
} declaration;

static void put_declaration(const push_run *run, hr_buf *out) {
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

static hr_status declare(push_run *run, bool *skip, hr_error *err) {
    declaration d = {.run = run};
    hr_buf mine = {0};
    put_declaration(run, &mine);
    hr_status status = hr_round(run->group, &run->failure, &mine, read_declaration, &d, err);
    *skip = d.unchanged == run->facts.ranks;
    hr_buf_free(&mine);
    free(d.adapters);
    free(d.configs);
    free(d.flags);
    free(d.version);
    free(d.transport);
    return status;
}

/* A round that carries failures alone. */
static hr_status agree(push_run *run, hr_error *err) {
    hr_buf nothing = {0};
    return hr_round(run->group, &run->failure, &nothing, NULL, NULL, err);
}

/* ---- opening the session ---- */

static bool pauses(const push_run *run) {
    return run->push->sync_base && run->p->options.pause != HR_PUSH_PAUSE_NONE;
}

/* Engines that do not flush when they commit are flushed while paused, or after it. */
static bool flushes(const push_run *run) {
    return run->push->sync_base && !run->traits->flushes &&
           run->p->options.pause != HR_PUSH_PAUSE_IN_PLACE;
}

static hr_status pause_engines(push_run *run, hr_error *err) {
    hr_stage_request request = request_of(run, HR_STAGE_PAUSE);
    HR_TRY(run_stage(run, &request, HR_RETRY_LOST, err));
    request.stage = HR_STAGE_FLUSH;
    return flushes(run) ? run_stage(run, &request, HR_RETRY_ALL, err) : HR_OK;
}

static hr_status register_adapters(push_run *run, hr_error *err) {
    hr_stage_request request = request_of(run, HR_STAGE_REGISTER);
    for (size_t i = 0; i < run->push->n_adapters; i++) {
        request.registration = &run->push->adapters[i];
        if (run->traits->register_once && hr_publisher_is_registered(run->p, request.registration))
            continue;
        HR_TRY(run_stage(run, &request, HR_RETRY_LOST, err));
        if (run->traits->register_once)
            HR_TRY(hr_publisher_set_registered(run->p, request.registration, err));
    }
    return HR_OK;
}

static hr_status open_session(push_run *run, hr_error *err) {
    uint64_t start = now(run);
    hr_stage_request request = request_of(run, HR_STAGE_BEGIN);
    if (pauses(run))
        HR_TRY(pause_engines(run, err));
    run->facts.pause_ns = now(run) - start;
    start = now(run);
    HR_TRY(register_adapters(run, err));
    run->facts.register_ns = now(run) - start;
    start = now(run);
    run->begun = true;
    HR_TRY(run_stage(run, &request, run->traits->atomic ? HR_RETRY_LOST : HR_RETRY_NOTHING, err));
    run->facts.begin_ns = now(run) - start;
    return HR_OK;
}

/* ---- filling a bucket ---- */

static size_t adapter_index(const push_run *run, const char *name) {
    size_t i = 0;
    while (i < run->push->n_adapters && strcmp(run->push->adapters[i].name, name) != 0)
        i++;
    return i;
}

/* Whether the unit belongs to what the bucket holds, where adapters go whole. */
static bool same_part(const push_run *run, const hr_unit *unit) {
    const char *part = run->bucket.tensors[0].adapter;
    if (part == NULL || unit->adapter == NULL)
        return part == unit->adapter;
    return strcmp(part, unit->adapter) == 0;
}

static bool must_leave_first(const push_run *run, const hr_unit *unit) {
    if (run->bucket.n_units == 0)
        return false;
    if (one_part(run) && !same_part(run, unit))
        return true;
    if (one_part(run) && unit->adapter != NULL)
        return false;
    uint64_t room = run->p->options.bucket_bytes - 1; /* a bucket stays below the limit */
    uint64_t bytes = hr_unit_bytes(unit);
    return bytes > room || run->bucket.bytes > room - bytes;
}

static hr_status check_whole(push_run *run, const hr_unit *unit, hr_error *err) {
    if (!one_part(run) || unit->adapter == NULL)
        return HR_OK;
    if (run->sent_whole[adapter_index(run, unit->adapter)])
        return hr_fail(err, HR_ERR_INVALID,
                       "transport %s needs each adapter in one piece, but units of %.200s do not "
                       "come together",
                       run->traits->name, unit->adapter);
    return HR_OK;
}

/* The next unit, checked; n = 0 at the end. One that is refused stays, for whoever cleans up. */
static hr_status pull(push_run *run, hr_unit *unit, hr_error *err) {
    hr_error local = {.status = HR_ERR_INTERNAL, .message = "the source failed without a word"};
    *unit = (hr_unit){0};
    hr_status status = run->push->source.next(run->push->source.self, unit, &local);
    if (status != HR_OK) {
        run->ended = true;
        return hr_fail(err, status, "the source of tensors: %.900s", local.message);
    }
    if (unit->n == 0) {
        run->ended = true;
        return HR_OK;
    }
    status = hr_unit_check(unit, run->push, err);
    return status == HR_OK ? check_whole(run, unit, err) : status;
}

static hr_status fill(push_run *run, hr_error *err) {
    while (run->pending.n > 0 || !run->ended) {
        if (run->pending.n == 0)
            HR_TRY(pull(run, &run->pending, err));
        if (run->pending.n == 0)
            break;
        if (must_leave_first(run, &run->pending))
            break;
        HR_TRY(hr_push_bucket_add(&run->bucket, &run->pending, err));
        run->pending = (hr_unit){0};
    }
    if (one_part(run) && run->bucket.n > 0 && run->bucket.tensors[0].adapter != NULL)
        run->sent_whole[adapter_index(run, run->bucket.tensors[0].adapter)] = true;
    return HR_OK;
}

/* ---- a round for a bucket ---- */

/* Enters a tensor of a rank into the ledger; every rank does so with all tensors of all ranks. */
static hr_status enter(push_run *run, uint32_t rank, const char *wire_name, const hr_tensor *tensor,
                       const uint8_t *xxh3, size_t *entry, bool *fresh, hr_error *err) {
    const char *colon = strchr(wire_name, ':');
    HR_TRY(hr_ledger_add(&run->ledger, rank, wire_name, tensor, xxh3, entry, fresh, err));
    run->base_seen = run->base_seen || colon == NULL;
    for (size_t i = 0; colon != NULL && i < run->push->n_adapters; i++) {
        const char *name = run->push->adapters[i].name;
        if (strlen(name) == (size_t)(colon - wire_name) &&
            memcmp(name, wire_name, (size_t)(colon - wire_name)) == 0)
            run->seen[i] = true;
    }
    return HR_OK;
}

/* Alone: digests follow when the bytes leave. */
static hr_status enter_own(push_run *run, hr_error *err) {
    hr_buf text = {0};
    hr_status status = HR_OK;
    for (size_t i = 0; i < run->bucket.n && status == HR_OK; i++) {
        hr_packed_tensor *t = &run->bucket.tensors[i];
        bool fresh = false;
        const char *name = hr_wire_name_format(t->adapter, t->tensor.name, &text);
        status = name == NULL ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a tensor's name")
                              : enter(run, 0, name, &t->tensor, NULL, &t->entry, &fresh, err);
    }
    hr_buf_free(&text);
    return status;
}

static void put_bucket(const push_run *run, hr_buf *out) {
    hr_buf text = {0};
    hr_round_put_u64(out, run->ended && run->pending.n == 0);
    hr_round_put_u64(out, run->bucket.n);
    for (size_t i = 0; i < run->bucket.n; i++) {
        const hr_packed_tensor *t = &run->bucket.tensors[i];
        uint8_t digest[HR_XXH3_SIZE];
        const char *name = hr_wire_name_format(t->adapter, t->tensor.name, &text);
        char sha256[HR_SHA256_HEX] = "";
        hr_xxh3(t->tensor.data, t->tensor.bytes, digest);
        if (run->traits->needs_sha256)
            hr_sha256_hex(t->tensor.data, t->tensor.bytes, sha256);
        hr_round_put_text(out, name != NULL ? name : "");
        hr_round_put_bytes(out, digest, sizeof digest);
        hr_round_put_text(out, sha256);
        hr_round_put_u64(out, (uint64_t)t->tensor.dtype);
        hr_round_put_u64(out, t->tensor.bytes);
        hr_round_put_u64(out, t->tensor.ndim);
        for (uint32_t d = 0; d < t->tensor.ndim; d++)
            hr_round_put_u64(out, t->tensor.shape[d]);
        if (gathers(run) && t->adapter != NULL)
            hr_round_put_bytes(out, t->tensor.data, t->tensor.bytes);
    }
    out->failed = out->failed || text.failed;
    hr_buf_free(&text);
}

static const char *get_tensor(hr_round_reader *reader, hr_tensor *tensor, const uint8_t **xxh3,
                              const char **sha256) {
    const char *name = hr_round_get_text(reader);
    *xxh3 = hr_round_get_bytes(reader, HR_XXH3_SIZE);
    *sha256 = hr_round_get_text(reader);
    *tensor = (hr_tensor){.name = name};
    tensor->dtype = (hr_dtype)hr_round_get_u64(reader);
    tensor->bytes = hr_round_get_u64(reader);
    uint64_t ndim = hr_round_get_u64(reader);
    reader->bad = reader->bad || ndim > HR_TENSOR_MAX_DIMS;
    tensor->ndim = reader->bad ? 0 : (uint32_t)ndim;
    for (uint32_t d = 0; d < tensor->ndim; d++)
        tensor->shape[d] = hr_round_get_u64(reader);
    return name;
}

/* The bytes that follow an adapter's tensor, which rank 0 keeps. */
static hr_status gather(push_run *run, const char *wire_name, const hr_tensor *tensor, bool fresh,
                        hr_round_reader *reader, hr_error *err) {
    const void *bytes = hr_round_get_bytes(reader, tensor->bytes);
    if (bytes == NULL || !fresh || !leads(run))
        return HR_OK;
    for (size_t i = 0; i < run->push->n_adapters; i++) {
        const char *adapter = run->push->adapters[i].name;
        if (strncmp(wire_name, adapter, strlen(adapter)) == 0 && wire_name[strlen(adapter)] == ':')
            return hr_gather_add(&run->gathered, adapter, wire_name, tensor, bytes, err);
    }
    return HR_OK; /* not declared: its own rank has refused it */
}

static hr_status read_bucket(void *ctx, uint32_t rank, hr_round_reader *reader, hr_error *err) {
    push_run *run = ctx;
    bool done = hr_round_get_u64(reader) != 0;
    uint64_t n = hr_round_get_u64(reader);
    run->all_done += done;
    run->all_empty += n == 0;
    for (uint64_t i = 0; i < n; i++) {
        hr_tensor tensor;
        const uint8_t *xxh3 = NULL;
        const char *sha256 = NULL;
        size_t entry = 0;
        bool fresh = false;
        const char *name = get_tensor(reader, &tensor, &xxh3, &sha256);
        if (reader->bad)
            return HR_OK; /* hr_round says so */
        HR_TRY(enter(run, rank, name, &tensor, xxh3, &entry, &fresh, err));
        hr_ledger_entry *e = &run->ledger.entries[entry];
        snprintf(e->sha256, sizeof e->sha256, "%s", sha256);
        bool gathered = gathers(run) && strchr(name, ':') != NULL;
        if (gathered)
            HR_TRY(gather(run, e->name, &tensor, fresh, reader, err));
        if (rank == run->rank && i < run->bucket.n) {
            run->bucket.tensors[i].entry = entry;
            run->bucket.tensors[i].send = fresh && !gathered;
        }
    }
    return HR_OK;
}

/* What all ranks have next; *last when none has anything. */
static hr_status exchange_buckets(push_run *run, bool *last, hr_error *err) {
    hr_buf mine = {0};
    run->all_done = run->all_empty = 0;
    if (alone(run)) {
        if (run->failure.status == HR_OK) {
            hr_status status = enter_own(run, err);
            note(run, status, err);
        }
        *last = run->ended && run->pending.n == 0 && run->bucket.n == 0;
        return agree(run, err);
    }
    if (run->failure.status == HR_OK)
        put_bucket(run, &mine);
    hr_status status = hr_round(run->group, &run->failure, &mine, read_bucket, run, err);
    hr_buf_free(&mine);
    *last = run->all_done == run->facts.ranks && run->all_empty == run->facts.ranks;
    return status;
}

/* ---- sending ---- */

/* The tensors this rank sends, under their wire names. */
static size_t list_wire(const push_run *run, hr_tensor *list) {
    size_t n = 0;
    for (size_t i = 0; i < run->bucket.n; i++) {
        const hr_packed_tensor *t = &run->bucket.tensors[i];
        if (!t->send)
            continue;
        list[n] = t->tensor;
        list[n++].name = run->ledger.entries[t->entry].name;
    }
    return n;
}

/* Digests of what left; a rank of a group knew them before, and they must be the same. */
static hr_status keep_digests(push_run *run, const hr_wire_bucket *wire, hr_error *err) {
    for (size_t i = 0; i < wire->n; i++) {
        const hr_wire_tensor *t = &wire->tensors[i];
        hr_ledger_entry *e = hr_ledger_find(&run->ledger, t->tensor->name);
        if (!alone(run) && memcmp(e->xxh3, t->xxh3, HR_XXH3_SIZE) != 0)
            return hr_fail(err, HR_ERR_DIGEST,
                           "tensor %.300s changed while it was pushed: keep it unchanged until its "
                           "unit is released",
                           e->name);
        memcpy(e->xxh3, t->xxh3, HR_XXH3_SIZE);
        if (alone(run))
            memcpy(e->sha256, t->sha256, HR_SHA256_HEX);
    }
    return HR_OK;
}

static hr_status send_wire(push_run *run, hr_wire_bucket *wire, hr_error *err) {
    hr_stage_request request = request_of(run, HR_STAGE_BUCKET);
    request.bucket = wire;
    request.stream = run->stream;
    request.index = run->index;
    run->moved = true;
    run->p->leaving = wire;
    if (run->traits->needs_sha256 && (alone(run) || gathers(run)))
        hr_wire_bucket_sha256(wire);
    if (run->p->first_byte_ns == 0)
        run->p->first_byte_ns = now(run);
    hr_status status = run_stage(run, &request, HR_RETRY_LOST, err);
    run->p->leaving = NULL;
    HR_TRY(status);
    hr_wire_bucket_digest(wire);
    run->p->sent_bytes += wire->bytes;
    run->facts.sent_bytes += wire->bytes;
    run->facts.sent_tensors += wire->n;
    run->facts.buckets++;
    run->index++;
    return keep_digests(run, wire, err);
}

static hr_status send_list(push_run *run, const hr_tensor *list, size_t n, hr_error *err) {
    hr_wire_bucket wire = {0};
    if (n == 0)
        return HR_OK;
    HR_TRY(hr_wire_bucket_open(list, n, &wire, err));
    hr_status status = send_wire(run, &wire, err);
    hr_wire_bucket_close(&wire);
    return status;
}

static hr_status send_bucket(push_run *run, hr_error *err) {
    hr_tensor *list = calloc(run->bucket.n + 1, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a bucket of %zu tensors",
                       run->bucket.n);
    hr_status status = send_list(run, list, list_wire(run, list), err);
    free(list);
    return status;
}

/* Adapters that were gathered, each in a bucket of its own. */
static hr_status send_gathered(push_run *run, hr_error *err) {
    hr_status status = HR_OK;
    hr_tensor *list = calloc(run->gathered.n + 1, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu tensors", run->gathered.n);
    for (size_t i = 0; i < run->push->n_adapters && status == HR_OK; i++) {
        size_t n = hr_gather_list(&run->gathered, run->push->adapters[i].name, list);
        status = send_list(run, list, n, err);
    }
    free(list);
    return status;
}

static hr_status stream(push_run *run, hr_error *err) {
    for (;;) {
        hr_error local;
        bool last = false;
        if (run->failure.status == HR_OK)
            note(run, fill(run, &local), &local);
        HR_TRY(exchange_buckets(run, &last, err));
        if (last)
            return HR_OK;
        note(run, send_bucket(run, &local), &local);
        hr_push_bucket_clear(&run->bucket);
    }
}

/* Found in the same way on every rank. */
static hr_status check_stream(const push_run *run, hr_error *err) {
    for (size_t i = 0; i < run->push->n_adapters; i++) {
        if (!run->seen[i])
            return hr_fail(err, HR_ERR_INVALID,
                           "adapter %.200s is declared but got no tensors: nothing was published",
                           run->push->adapters[i].name);
    }
    if (run->push->sync_base && !run->base_seen)
        return hr_fail(err, HR_ERR_INVALID,
                       "sync_base is set but no base tensor came: nothing was published");
    return HR_OK;
}

/* ---- prepare and commit ---- */

static hr_status check_engine(const push_run *run, const hr_fleet_engine *e, hr_error *err) {
    const hr_engine_receipt *r = &e->receipt;
    char mine[HR_XXH3_HEX], theirs[HR_XXH3_HEX];
    if (!e->has_receipt || !r->has_xxh3)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s, prepare: no receipt with a digest came, so nothing shows that "
                       "the bytes were checked",
                       e->url);
    if (r->tensors != run->facts.tensors || r->bytes != run->facts.bytes ||
        memcmp(r->xxh3, run->facts.xxh3, HR_XXH3_SIZE) != 0)
        return hr_fail(err, HR_ERR_DIGEST,
                       "engine %s, prepare: it has %llu tensors, %llu bytes, digest %s; sent were "
                       "%llu, %llu, %s",
                       e->url, (unsigned long long)r->tensors, (unsigned long long)r->bytes,
                       hr_xxh3_format(r->xxh3, theirs), (unsigned long long)run->facts.tensors,
                       (unsigned long long)run->facts.bytes, hr_xxh3_format(run->facts.xxh3, mine));
    return HR_OK;
}

static hr_stage_request end_request(const push_run *run, hr_stage stage) {
    hr_stage_request request = request_of(run, stage);
    request.manifest = run->manifest;
    request.n_manifest = run->ledger.n;
    return request;
}

static hr_status prepare(push_run *run, hr_error *err) {
    uint64_t start = now(run);
    hr_stage_request request = end_request(run, HR_STAGE_PREPARE);
    HR_TRY(run_stage(run, &request, HR_RETRY_LOST, err));
    for (size_t i = 0; run->traits->atomic && i < run->p->fleet.n; i++)
        HR_TRY(check_engine(run, &run->p->fleet.engines[i], err));
    run->facts.prepare_ns = now(run) - start;
    return HR_OK;
}

/* "committed: A, B" and what can be done about the others. */
static void explain_commit(push_run *run, hr_error *err) {
    hr_buf text = {0};
    size_t done = 0;
    for (size_t i = 0; i < run->p->fleet.n; i++) {
        const hr_fleet_engine *e = &run->p->fleet.engines[i];
        if (!e->known || e->state != HR_SESSION_PUBLISHED)
            continue;
        hr_buf_printf(&text, "%s%s", done > 0 ? ", " : "", e->url);
        done++;
    }
    hr_error first = *err;
    hr_fail(err, first.status, "%.500s; committed: %.200s; %s%.64s", first.message,
            done > 0 && !text.failed ? text.data : "none",
            run->traits->atomic ? "bring the others there by resuming session "
                                : "push again: this transport cannot resume",
            run->traits->atomic ? run->session_id : "");
    hr_buf_free(&text);
}

static hr_status commit(push_run *run, hr_error *err) {
    uint64_t start = now(run);
    hr_stage_request request = end_request(run, HR_STAGE_COMMIT);
    if (!hr_publisher_tell(run->p, hr_stage_name(HR_STAGE_COMMIT)))
        return cancelled(err);
    run->committed = true;
    run->p->unstoppable = true;
    hr_status status =
        run_stage(run, &request, run->traits->atomic ? HR_RETRY_COMMIT : HR_RETRY_NOTHING, err);
    run->facts.commit_ns = now(run) - start;
    if (status != HR_OK) {
        explain_commit(run, err);
        return status;
    }
    request.stage = HR_STAGE_FLUSH;
    return flushes(run) && !pauses(run) ? run_stage(run, &request, HR_RETRY_ALL, err) : HR_OK;
}

/* ---- the end ---- */

static bool may_continue(const hr_fleet_engine *engine) {
    return engine->paused && !engine->unservable;
}

static void append(hr_error *err, const char *text) {
    hr_error first = *err;
    hr_fail(err, first.status, "%.800s; %s", first.message, text);
}

/* Engines go on; those with half-written base weights do not, and the message says so. */
static void continue_engines(push_run *run, bool failed, hr_error *err) {
    hr_stage_request request = request_of(run, HR_STAGE_CONTINUE);
    hr_error local;
    bool half = failed && run->moved && run->push->sync_base && !run->traits->base_rollback;
    bool unservable = false, paused = false;
    for (size_t i = 0; i < run->p->fleet.n; i++) {
        paused = paused || run->p->fleet.engines[i].paused;
        unservable =
            unservable || (run->p->fleet.engines[i].paused && run->p->fleet.engines[i].unservable);
    }
    if (!paused)
        return;
    if (half) {
        append(err, "engines stay paused: their base weights may be half written; push all base "
                    "weights again");
        return;
    }
    hr_status status = hr_fleet_run(&run->p->fleet, &request, HR_RETRY_LOST, may_continue, &local);
    if (unservable && failed)
        append(err, "engines that cannot serve stay paused: push all base weights again");
    if (status != HR_OK && failed)
        append(err, local.message);
    else if (status != HR_OK)
        *err = local;
}

/* After a failure before commit: no engine keeps a session of this push. */
static void roll_back(push_run *run) {
    hr_stage_request request = request_of(run, HR_STAGE_ABORT);
    hr_error ignored; /* the first cause is what counts; leases end what cannot be reached */
    (void)hr_fleet_run(&run->p->fleet, &request, HR_RETRY_LOST, NULL, &ignored);
}

/* On ranks that have opened and paused nothing there is nothing to do. */
static hr_status finish(push_run *run, hr_status status, hr_error *err) {
    hr_error late = {0};
    run->p->unstoppable = true;
    if (status != HR_OK && run->begun && !run->committed)
        roll_back(run);
    if (status != HR_OK)
        hr_publisher_forget_registered(run->p);
    continue_engines(run, status != HR_OK, status != HR_OK ? err : &late);
    if (late.status == HR_OK)
        return status;
    return hr_fail(err, late.status, "published on all engines, but %.900s", late.message);
}

static hr_status sum_up(push_run *run, hr_error *err) {
    HR_TRY(hr_ledger_manifest(&run->ledger, &run->manifest, err));
    run->facts.tensors = run->ledger.n;
    run->facts.bytes = run->ledger.bytes;
    return hr_manifest_overall(run->manifest, run->ledger.n, run->facts.xxh3, err);
}

static hr_status run_session(push_run *run, hr_error *err) {
    hr_error local;
    if (leads(run))
        note(run, open_session(run, &local), &local);
    uint64_t start = now(run);
    HR_TRY(stream(run, err));
    run->facts.stream_ns = now(run) - start;
    HR_TRY(check_stream(run, err));
    note(run, sum_up(run, &local), &local);
    if (leads(run) && run->failure.status == HR_OK)
        note(run, send_gathered(run, &local), &local);
    if (leads(run) && run->failure.status == HR_OK)
        note(run, prepare(run, &local), &local);
    HR_TRY(agree(run, err));
    if (leads(run))
        note(run, commit(run, &local), &local);
    return agree(run, err);
}

static hr_status run_push(push_run *run, hr_error *err) {
    hr_error local;
    bool skip = false;
    note(run, set_up(run, &local), &local);
    HR_TRY(declare(run, &skip, err));
    run->facts.skipped = skip;
    if (skip)
        return HR_OK;
    hr_status status = run_session(run, err);
    return finish(run, status, err);
}

/* ---- the calls ---- */

static hr_status enter_call(hr_publisher *p, hr_error *err) {
    bool idle = false;
    if (!atomic_compare_exchange_strong(&p->busy, &idle, true))
        return hr_fail(err, HR_ERR_BUSY, "another push of this publisher is under way");
    p->cancelled = p->unstoppable = false;
    p->sent_bytes = p->first_byte_ns = 0;
    p->progress = (hr_push_progress){.stage = "connect"};
    hr_fleet_reset(&p->fleet);
    return HR_OK;
}

/* The receipt, which is also the report, of a call that ended with status. */
static hr_status leave_call(hr_publisher *p, push_run *run, uint64_t start, hr_status status,
                            hr_push_receipt **receipt, hr_error *err) {
    hr_push_receipt *made = NULL;
    hr_error late;
    run->facts.session_id = run->session_id;
    run->facts.total_ns = hr_now_ns(&p->fleet.clock) - start;
    hr_status kept = hr_push_receipt_make(&run->facts, leads(run) ? &p->fleet : NULL,
                                          status != HR_OK ? err : NULL, &made, &late);
    if (kept == HR_OK)
        hr_publisher_set_report(p, made);
    else if (status == HR_OK)
        *err = late;
    if (status == HR_OK && kept == HR_OK && receipt != NULL)
        *receipt = made;
    else
        hr_push_receipt_free(made);
    atomic_store(&p->busy, false);
    return status != HR_OK ? status : kept;
}

static push_run new_run(hr_publisher *p, const hr_push *push) {
    const hr_group *group = p->options.group;
    push_run run = {.p = p, .push = push, .group = group};
    run.rank = group != NULL ? group->rank : 0;
    run.facts.rank = run.rank;
    run.facts.ranks = group != NULL ? group->size : 1;
    run.facts.transport = "";
    run.facts.weight_version = push->weight_version != NULL ? push->weight_version : "";
    snprintf(run.stream, sizeof run.stream, "r%u", run.rank);
    return run;
}

hr_status hr_publisher_push(hr_publisher *publisher, const hr_push *push, hr_push_receipt **receipt,
                            hr_error *err) {
    hr_error local = {0};
    if (err == NULL)
        err = &local;
    HR_TRY(enter_call(publisher, err));
    uint64_t start = hr_now_ns(&publisher->fleet.clock);
    publisher->progress.total_bytes = push->total_bytes;
    push_run run = new_run(publisher, push);
    hr_status status = run_push(&run, err);
    hr_unit_release(&run.pending);
    hr_push_bucket_free(&run.bucket);
    status = leave_call(publisher, &run, start, status, receipt, err);
    hr_ledger_free(&run.ledger);
    hr_gather_free(&run.gathered);
    free(run.manifest);
    free(run.seen);
    free(run.sent_whole);
    return status;
}

/* ---- resume ---- */

static hr_status check_resumed(const hr_publisher *p, const char *weight_version, hr_error *err) {
    for (size_t i = 0; weight_version != NULL && i < p->fleet.n; i++) {
        const hr_fleet_engine *e = &p->fleet.engines[i];
        if (!e->has_receipt || strcmp(e->receipt.weight_version, weight_version) != 0)
            return hr_fail(err, HR_ERR_SESSION,
                           "engine %s has committed the session, with weight version \"%.200s\" "
                           "instead of \"%.200s\"",
                           e->url, e->receipt.weight_version, weight_version);
    }
    return HR_OK;
}

static hr_status run_resume(push_run *run, const char *session_id, const char *weight_version,
                            hr_error *err) {
    hr_stage_request request = {.stage = HR_STAGE_COMMIT, .session_id = run->session_id};
    HR_TRY(hr_session_id_check(session_id, err));
    snprintf(run->session_id, sizeof run->session_id, "%s", session_id);
    HR_TRY(hr_publisher_connect(run->p, err));
    run->traits = run->p->fleet.transport.traits;
    run->facts.transport = run->traits->name;
    run->facts.atomic = run->traits->atomic;
    if (!run->traits->atomic)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "transport %s has no prepared sessions to resume; push again",
                       run->traits->name);
    hr_status status = run_stage(run, &request, HR_RETRY_COMMIT, err);
    if (status == HR_ERR_SESSION)
        append(err, "the session cannot be finished there: push the same weights again as a new "
                    "session, to all engines");
    HR_TRY(status);
    request.stage = HR_STAGE_CONTINUE; /* the push may have left an engine paused that was away */
    if (run->p->options.pause != HR_PUSH_PAUSE_NONE)
        HR_TRY(run_stage(run, &request, HR_RETRY_LOST, err));
    return check_resumed(run->p, weight_version, err);
}

hr_status hr_publisher_resume(hr_publisher *publisher, const char *session_id,
                              const char *weight_version, hr_push_receipt **receipt,
                              hr_error *err) {
    hr_error local = {0};
    const hr_push nothing = {.weight_version = weight_version};
    if (err == NULL)
        err = &local;
    HR_TRY(enter_call(publisher, err));
    uint64_t start = hr_now_ns(&publisher->fleet.clock);
    push_run run = new_run(publisher, &nothing);
    hr_status status = run_resume(&run, session_id, weight_version, err);
    run.facts.commit_ns = hr_now_ns(&publisher->fleet.clock) - start;
    return leave_call(publisher, &run, start, status, receipt, err);
}
