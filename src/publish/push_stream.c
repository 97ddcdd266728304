/* The stream of a push: units into buckets, a round of all ranks for each, then sending. */
#include "publish/push_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensors of a bucket when they are small: then each costs more than its bytes do, and engines work
 * on them while the next ones are collected. */
enum { MANY_TENSORS = 2048 };
/* Of one trainer, a bucket has a few MiB, and an eighth of what has left when that is more: engines
 * check it while the next one is on its way, and round trips stay few. */
enum { SMALL_BUCKET = 4 << 20, SMALL_SHARE = 8 };

/* ---- filling a bucket ---- */

/* Whether a bucket must be one whole adapter; a group gathers adapters before they leave. */
static bool one_part(const hr_push_run *run) {
    return run->traits->whole_adapters && hr_push_alone(run);
}

static size_t adapter_index(const hr_push_run *run, const char *name) {
    size_t i = 0;
    while (i < run->push->n_adapters && strcmp(run->push->adapters[i].name, name) != 0)
        i++;
    return i;
}

/* The adapter before the colon of a wire name; NULL for base, and where this push declares none. */
static const hr_push_adapter *adapter_of(hr_push_run *run, const char *wire_name) {
    const char *colon = strchr(wire_name, ':');
    size_t n = run->push->n_adapters;
    for (size_t i = 0; colon != NULL && i < n; i++) {
        size_t at = (run->last_adapter + i) % n; /* tensors of one adapter come together */
        const char *name = run->push->adapters[at].name;
        if (strncmp(name, wire_name, (size_t)(colon - wire_name)) == 0 &&
            name[colon - wire_name] == '\0') {
            run->last_adapter = at;
            return &run->push->adapters[at];
        }
    }
    return NULL;
}

/* Whether the unit belongs to what the bucket holds, where adapters go whole. */
static bool same_part(const hr_push_run *run, const hr_unit *unit) {
    const char *part = run->bucket.tensors[0].adapter;
    if (part == NULL || unit->adapter == NULL)
        return part == unit->adapter;
    return strcmp(part, unit->adapter) == 0;
}

/* Bytes that a bucket may have. */
static uint64_t bucket_room(const hr_push_run *run) {
    uint64_t room = run->p->options.bucket_bytes - 1;       /* a bucket stays below the limit */
    if (!hr_push_alone(run) || run->traits->whole_adapters) /* where others wait for each bucket */
        return room;
    uint64_t share = run->facts.sent_bytes / SMALL_SHARE;
    uint64_t small = share > SMALL_BUCKET ? share : SMALL_BUCKET;
    return small < room ? small : room;
}

static bool must_leave_first(const hr_push_run *run, const hr_unit *unit) {
    if (run->bucket.n_units == 0)
        return false;
    if (one_part(run) && !same_part(run, unit))
        return true;
    if (one_part(run) && unit->adapter != NULL)
        return false;
    uint64_t room = bucket_room(run), bytes = hr_unit_bytes(unit);
    if (run->bucket.n + unit->n > MANY_TENSORS)
        return true;
    return bytes > room || run->bucket.bytes > room - bytes;
}

static hr_status check_whole(hr_push_run *run, const hr_unit *unit, hr_error *err) {
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
static hr_status pull(hr_push_run *run, hr_unit *unit, hr_error *err) {
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

static hr_status fill(hr_push_run *run, hr_error *err) {
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
static hr_status enter(hr_push_run *run, uint32_t rank, const char *wire_name,
                       const hr_tensor *tensor, const uint8_t *xxh3, size_t *entry, bool *fresh,
                       hr_error *err) {
    const hr_push_adapter *adapter = adapter_of(run, wire_name);
    HR_TRY(hr_ledger_add(&run->ledger, rank, wire_name, tensor, xxh3, entry, fresh, err));
    run->base_seen = run->base_seen || strchr(wire_name, ':') == NULL;
    if (adapter != NULL)
        run->seen[adapter - run->push->adapters] = true;
    return HR_OK;
}

/* Alone: digests follow when the bytes leave. */
static hr_status enter_own(hr_push_run *run, hr_error *err) {
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

static void put_bucket(const hr_push_run *run, hr_buf *out) {
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
        if (hr_push_gathers(run) && t->adapter != NULL)
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
static hr_status gather(hr_push_run *run, const char *wire_name, const hr_tensor *tensor,
                        bool fresh, hr_round_reader *reader, hr_error *err) {
    const void *bytes = hr_round_get_bytes(reader, tensor->bytes);
    const hr_push_adapter *adapter = adapter_of(run, wire_name);
    if (bytes == NULL || !fresh || !hr_push_leads(run))
        return HR_OK;
    if (adapter == NULL)
        return HR_OK; /* not declared: its own rank has refused it */
    return hr_gather_add(&run->gathered, adapter->name, wire_name, tensor, bytes, err);
}

static hr_status read_bucket(void *ctx, uint32_t rank, hr_round_reader *reader, hr_error *err) {
    hr_push_run *run = ctx;
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
        bool gathered = hr_push_gathers(run) && strchr(name, ':') != NULL;
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
static hr_status exchange_buckets(hr_push_run *run, bool *last, hr_error *err) {
    hr_buf mine = {0};
    run->all_done = run->all_empty = 0;
    if (hr_push_alone(run)) {
        if (run->failure.status == HR_OK) {
            hr_status status = enter_own(run, err);
            hr_push_note(run, status, err);
        }
        *last = run->ended && run->pending.n == 0 && run->bucket.n == 0;
        return hr_push_agree(run, err);
    }
    if (run->failure.status == HR_OK)
        put_bucket(run, &mine);
    hr_status status = hr_round(run->group, &run->failure, &mine, read_bucket, run, NULL, err);
    hr_buf_free(&mine);
    *last = run->all_done == run->facts.ranks && run->all_empty == run->facts.ranks;
    return status;
}

/* ---- sending ---- */

static hr_wire_bucket *look_ahead(void *run);

/* The tensors this rank sends, under their wire names. */
static size_t list_wire(const hr_push_run *run, hr_tensor *list, size_t *entries) {
    size_t n = 0;
    for (size_t i = 0; i < run->bucket.n; i++) {
        const hr_packed_tensor *t = &run->bucket.tensors[i];
        if (!t->send)
            continue;
        list[n] = t->tensor;
        entries[n] = t->entry;
        list[n++].name = run->ledger.entries[t->entry].name;
    }
    return n;
}

/* Digests of what left; a rank of a group knew them before, and they must be the same. */
static hr_status keep_digests(hr_push_run *run, const hr_wire_bucket *wire, const hr_tensor *list,
                              const size_t *entries, hr_error *err) {
    for (size_t i = 0; i < wire->n; i++) {
        const hr_wire_tensor *t = &wire->tensors[i];
        hr_ledger_entry *e = &run->ledger.entries[entries[t->tensor - list]];
        if (!hr_push_alone(run) && memcmp(e->xxh3, t->xxh3, HR_XXH3_SIZE) != 0)
            return hr_fail(err, HR_ERR_DIGEST,
                           "tensor %.300s changed while it was pushed: keep it unchanged until its "
                           "unit is released",
                           e->name);
        memcpy(e->xxh3, t->xxh3, HR_XXH3_SIZE);
        if (hr_push_alone(run))
            memcpy(e->sha256, t->sha256, HR_SHA256_HEX);
    }
    return HR_OK;
}

/* wire was opened on list; entries: in the ledger, by place in list. */
static hr_status send_wire(hr_push_run *run, hr_wire_bucket *wire, const hr_tensor *list,
                           const size_t *entries, hr_error *err) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_BUCKET);
    request.bucket = wire;
    request.stream = run->stream;
    request.index = run->index;
    if (hr_push_alone(run)) { /* ranks of a group fill their buckets in rounds */
        request.ahead = look_ahead;
        request.ahead_ctx = run;
    }
    run->moved = true;
    run->p->leaving = wire;
    if (run->traits->needs_sha256 && (hr_push_alone(run) || hr_push_gathers(run)))
        hr_wire_bucket_sha256(wire);
    if (run->p->first_byte_ns == 0)
        run->p->first_byte_ns = hr_push_now(run);
    hr_status status = hr_push_stage(run, &request, HR_RETRY_LOST, err);
    run->p->leaving = NULL;
    HR_TRY(status);
    hr_wire_bucket_digest(wire);
    run->p->sent_bytes += wire->bytes;
    run->facts.sent_bytes += wire->bytes;
    run->facts.sent_tensors += wire->n;
    run->facts.buckets++;
    run->index++;
    return keep_digests(run, wire, list, entries, err);
}

static hr_status send_list(hr_push_run *run, const hr_tensor *list, size_t n, hr_error *err) {
    hr_wire_bucket wire = {0};
    if (n == 0)
        return HR_OK;
    size_t *entries = calloc(n, sizeof *entries);
    if (entries == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a bucket of %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        entries[i] = hr_ledger_find(&run->ledger, list[i].name);
    hr_status status = hr_wire_bucket_open(list, n, &wire, err);
    if (status == HR_OK)
        status = send_wire(run, &wire, list, entries, err);
    hr_wire_bucket_close(&wire);
    free(entries);
    return status;
}

void hr_push_outgoing_free(hr_push_outgoing *out) {
    hr_wire_bucket_close(&out->wire);
    free(out->list);
    free(out->entries);
    hr_push_bucket_clear(&out->bucket);
    hr_push_bucket_free(&out->bucket);
    *out = (hr_push_outgoing){0};
}

/* What was filled becomes a bucket to send; the next one can be filled then. */
static hr_status pack(hr_push_run *run, hr_push_outgoing *out, hr_error *err) {
    out->list = calloc(run->bucket.n + 1, sizeof *out->list);
    out->entries = calloc(run->bucket.n + 1, sizeof *out->entries);
    if (out->list == NULL || out->entries == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a bucket of %zu tensors",
                       run->bucket.n);
    size_t n = list_wire(run, out->list, out->entries);
    if (n > 0)
        HR_TRY(hr_wire_bucket_open(out->list, n, &out->wire, err));
    out->bucket = run->bucket;
    run->bucket = (hr_push_bucket){0};
    out->packed = true;
    return HR_OK;
}

static hr_push_outgoing *next_way(hr_push_run *run) {
    return &run->ways[1 - run->leaving];
}

/* Fills, enters and packs the next bucket while engines work on the one before. */
static hr_status prepare_ahead(hr_push_run *run, hr_error *err) {
    HR_TRY(fill(run, err));
    if (run->bucket.n == 0)
        return HR_OK;
    HR_TRY(enter_own(run, err));
    return pack(run, next_way(run), err);
}

static hr_wire_bucket *look_ahead(void *ctx) {
    hr_push_run *run = ctx;
    hr_error local;
    if (run->failure.status == HR_OK && !next_way(run)->packed)
        hr_push_note(run, prepare_ahead(run, &local), &local);
    return run->failure.status == HR_OK && next_way(run)->packed ? &next_way(run)->wire : NULL;
}

static hr_status send_adapter(hr_push_run *run, const char *adapter, hr_error *err) {
    hr_tensor *list = calloc(run->gathered.n + 1, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu tensors", run->gathered.n);
    hr_status status = send_list(run, list, hr_gather_list(&run->gathered, adapter, list), err);
    free(list);
    return status;
}

hr_status hr_push_send_gathered(hr_push_run *run, hr_error *err) {
    hr_error local;
    for (size_t i = 0; hr_push_gathers(run) && i < run->push->n_adapters; i++) {
        if (hr_push_leads(run))
            hr_push_note(run, send_adapter(run, run->push->adapters[i].name, &local), &local);
        HR_TRY(hr_push_agree(run, err));
    }
    return HR_OK;
}

/* The bucket whose turn it is; *last when no rank has one. */
static hr_status next_bucket(hr_push_run *run, bool *last, hr_error *err) {
    hr_error local;
    run->leaving = 1 - run->leaving;
    if (run->ways[run->leaving].packed)
        return hr_push_agree(run, err);
    if (run->failure.status == HR_OK)
        hr_push_note(run, fill(run, &local), &local);
    HR_TRY(exchange_buckets(run, last, err));
    if (!*last)
        hr_push_note(run, pack(run, &run->ways[run->leaving], &local), &local);
    return HR_OK;
}

hr_status hr_push_stream(hr_push_run *run, hr_error *err) {
    for (bool last = false;;) {
        hr_error local;
        hr_status status = next_bucket(run, &last, err);
        hr_push_outgoing *out = &run->ways[run->leaving];
        if (status == HR_OK && !last && out->wire.n > 0)
            hr_push_note(run, send_wire(run, &out->wire, out->list, out->entries, &local), &local);
        hr_push_outgoing_free(out);
        if (status != HR_OK || last)
            return status;
    }
}

hr_status hr_push_check_stream(const hr_push_run *run, hr_error *err) {
    for (size_t i = 0; i < run->push->n_adapters; i++) {
        if (!run->seen[i])
            return hr_fail(err, HR_ERR_INVALID, "adapter %.200s is declared but got no tensors",
                           run->push->adapters[i].name);
    }
    if (run->push->sync_base && !run->base_seen)
        return hr_fail(err, HR_ERR_INVALID, "sync_base is set but no base tensor came");
    return HR_OK;
}
