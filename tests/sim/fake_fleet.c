#include "fake_fleet.h"

#include "base/buf.h"
#include "base/clock.h"
#include "format/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- engines ---- */

static uint64_t read_clock(void *self) {
    fake_fleet *fleet = self;
    return atomic_load(&fleet->now_ns);
}

hr_clock fake_fleet_clock(fake_fleet *fleet) {
    return (hr_clock){read_clock, fleet};
}

void fake_fleet_sleep(void *self, uint64_t ms) {
    fake_fleet *fleet = self;
    atomic_fetch_add(&fleet->now_ns, ms * 1000000);
}

static void start_engine(fake_fleet *fleet, fleet_engine *e) {
    *e = (fleet_engine){.memory = {.countdown = -1}};
    fake_sink_init(&e->sink);
    hr_receiver_options options = {.instance = "engine",
                                   .base_mode = "shadow",
                                   .lease_ms = 600000,
                                   .now_ns = read_clock,
                                   .clock_self = fleet,
                                   .alloc = fake_memory_alloc,
                                   .free = fake_memory_free,
                                   .alloc_self = &e->memory};
    hr_receiver_sink ops = fake_sink_ops(&e->sink);
    assert_int_equal(hr_receiver_create(&options, &ops, &e->receiver, NULL), HR_OK);
}

static void end_engine(fleet_engine *e) {
    hr_receiver_destroy(e->receiver);
    e->receiver = NULL;
    fake_sink_check_idle(&e->sink);
    assert_int_equal(e->memory.live, 0);
}

void fake_fleet_open(fake_fleet *fleet, size_t n) {
    memset(fleet, 0, sizeof *fleet);
    fleet->n = n;
    atomic_store(&fleet->now_ns, 1000000000);
    pthread_mutex_init(&fleet->lock, NULL);
    for (size_t i = 0; i < n; i++)
        start_engine(fleet, &fleet->engines[i]);
}

void fake_fleet_close(fake_fleet *fleet) {
    for (size_t i = 0; i < fleet->n; i++)
        end_engine(&fleet->engines[i]);
    pthread_mutex_destroy(&fleet->lock);
}

void fake_fleet_revive(fake_fleet *fleet) {
    for (size_t i = 0; i < fleet->n; i++) {
        if (!fleet->engines[i].dead)
            continue;
        end_engine(&fleet->engines[i]);
        start_engine(fleet, &fleet->engines[i]);
    }
}

/* ---- what a call does ---- */

/* The image as it comes out of a wire, in odd pieces. */
static void read_image(hr_wire_bucket *bucket, hr_buf *image) {
    char piece[97];
    while (image->len < bucket->size) {
        size_t want = 1 + image->len % sizeof piece;
        size_t got = hr_wire_bucket_read(bucket, image->len, piece, want);
        assert_true(got > 0 && got <= want);
        hr_buf_append(image, piece, got);
    }
    assert_int_equal(image->len, bucket->size);
}

static hr_status take_bucket(fleet_engine *e, const hr_stage_request *r, bool corrupt,
                             hr_error *err) {
    hr_buf image = {0};
    hr_safetensors *file = NULL;
    read_image(r->bucket, &image);
    if (corrupt && image.len > 0)
        image.data[image.len - 1] = (char)(image.data[image.len - 1] ^ 1);
    hr_status status = hr_safetensors_parse(image.data, image.len, "bucket", &file, err);
    assert_int_equal(status, HR_OK);
    hr_bucket bucket = {.tensors = hr_safetensors_at(file, 0),
                        .n = hr_safetensors_count(file),
                        .session_id = r->session_id,
                        .stream = r->stream,
                        .index = r->index};
    status = hr_receiver_bucket(e->receiver, &bucket, err);
    hr_safetensors_close(file);
    hr_buf_free(&image);
    return status;
}

static hr_status begin(fleet_engine *e, const hr_stage_request *r, hr_error *err) {
    char id[HR_SESSION_ID_SIZE];
    const char *names[16];
    for (size_t i = 0; i < r->n_adapters; i++)
        names[i] = r->adapters[i].name;
    e->begin_waits_ms = r->requests_ms;
    hr_session_options options = {.session_id = r->session_id,
                                  .sync_base = r->sync_base,
                                  .adapters = names,
                                  .n_adapters = r->n_adapters,
                                  .lease_ms = r->lease_ms,
                                  .timeout_ms = r->requests_ms,
                                  .audit = r->audit};
    return hr_receiver_begin(e->receiver, &options, id, err);
}

static hr_status prepare(fleet_engine *e, const hr_stage_request *r, hr_receipt **receipt,
                         hr_error *err) {
    hr_manifest_entry *entries = calloc(r->n_manifest + 1, sizeof *entries);
    char(*hex)[HR_XXH3_HEX] = calloc(r->n_manifest + 1, sizeof *hex);
    for (size_t i = 0; i < r->n_manifest; i++)
        entries[i] = (hr_manifest_entry){.name = r->manifest[i].name,
                                         .xxh3 = hr_xxh3_format(r->manifest[i].xxh3, hex[i])};
    hr_manifest manifest = {entries, r->n_manifest, true};
    hr_end_options options = {.session_id = r->session_id,
                              .manifest = &manifest,
                              .weight_version = r->weight_version,
                              .complete_base = r->complete_base,
                              .flush_cache = r->flush_cache,
                              .timeout_ms = r->requests_ms,
                              .audit = r->audit};
    hr_status status = hr_receiver_prepare(e->receiver, &options, receipt, err);
    free(entries);
    free(hex);
    return status;
}

static hr_status register_all(fleet_engine *e, const hr_stage_request *r, hr_error *err) {
    for (size_t i = 0; i < r->n_registrations; i++) {
        const hr_push_adapter *a = &r->registrations[i];
        hr_registration registration = {
            .name = a->name, .config = a->config, .config_len = a->config_len};
        bool pending = false;
        HR_TRY(hr_receiver_register(e->receiver, &registration, &pending, err));
    }
    return HR_OK;
}

static hr_status perform(fleet_engine *e, const hr_stage_request *r, bool corrupt,
                         hr_receipt **receipt, hr_error *err) {
    switch (r->stage) {
    case HR_STAGE_PAUSE:
        e->paused = true;
        return HR_OK;
    case HR_STAGE_CONTINUE:
        e->paused = false;
        e->continued++;
        return HR_OK;
    case HR_STAGE_REGISTER:
        return register_all(e, r, err);
    case HR_STAGE_BEGIN:
        return begin(e, r, err);
    case HR_STAGE_BUCKET:
        return take_bucket(e, r, corrupt, err);
    case HR_STAGE_PREPARE:
        return prepare(e, r, receipt, err);
    case HR_STAGE_COMMIT:
        return hr_receiver_commit(e->receiver, r->session_id, receipt, err);
    case HR_STAGE_ABORT:
        return hr_receiver_abort(e->receiver, r->session_id, err);
    default:
        return HR_OK;
    }
}

/* ---- the link ---- */

static void take_receipt(const fleet_link *link, const hr_receipt *from, hr_stage_answer *answer) {
    hr_engine_receipt *to = &answer->receipt;
    *to = (hr_engine_receipt){.state = from->state,
                              .ranks = from->ranks,
                              .tensors = from->tensors,
                              .bytes = from->bytes,
                              .has_xxh3 = !link->mute};
    memcpy(to->xxh3, from->xxh3, sizeof to->xxh3);
    to->xxh3[0] = (uint8_t)(to->xxh3[0] ^ link->lies);
    memcpy(to->weight_version, from->weight_version, sizeof to->weight_version);
    memcpy(to->session_id, from->session_id, sizeof to->session_id);
    memcpy(to->instance, from->instance, sizeof to->instance);
    to->adapters = calloc(from->n_adapters + 1, sizeof *to->adapters);
    for (size_t i = 0; i < from->n_adapters && !link->no_configs; i++) {
        hr_engine_adapter *a = &to->adapters[to->n_adapters++];
        memcpy(a->name, from->adapters[i].name, sizeof a->name);
        memcpy(a->config_digest, from->adapters[i].config_digest, sizeof a->config_digest);
    }
    if (link->twist != NULL && from->state == HR_SESSION_PUBLISHED)
        link->twist(to);
    cJSON *nothing = cJSON_CreateObject();
    to->json = cJSON_PrintUnformatted(nothing);
    cJSON_Delete(nothing);
    answer->has_receipt = true;
}

static void lose(hr_stage_answer *answer, hr_status status) {
    hr_engine_receipt_clear(&answer->receipt);
    answer->has_receipt = false;
    answer->lost = true;
    answer->status = hr_fail(&answer->err, status, "no answer came");
}

static void call(fleet_link *link, const hr_stage_request *r, uint32_t index,
                 hr_stage_answer *answer) {
    fleet_engine *e = &link->fleet->engines[index];
    unsigned number = link->calls++;
    bool hit = link->fault != FAULT_NONE && number >= link->fault_at &&
               number <= link->fault_at + link->repeat;
    fleet_fault fault = hit ? link->fault : FAULT_NONE;
    if (hit && !link->hit) {
        link->hit = true;
        link->stage = r->stage;
        link->engine = index;
    }
    bool corrupt = fault == FAULT_CORRUPT && r->stage == HR_STAGE_BUCKET;
    *answer = (hr_stage_answer){0};
    if (fault == FAULT_KILL)
        e->dead = true;
    if (e->dead || fault == FAULT_LOSE_CALL || (fault == FAULT_CORRUPT && !corrupt)) {
        lose(answer, HR_ERR_PEER);
        return;
    }
    if (fault == FAULT_REFUSE) {
        answer->status = hr_fail(&answer->err, HR_ERR_INVALID, "refused as it was told");
        answer->untouched = link->untouched;
        return;
    }
    hr_receipt *receipt = NULL;
    if (r->stage == HR_STAGE_BUCKET && link->rival != NULL)
        assert_int_equal(hr_receiver_register(e->receiver, link->rival, NULL, NULL), HR_OK);
    link->rival = r->stage == HR_STAGE_BUCKET ? NULL : link->rival;
    hr_stage_request nameless = *r;
    nameless.session_id = NULL;
    if (link->nameless_abort && r->stage == HR_STAGE_ABORT)
        r = &nameless;
    uint64_t start_ns = atomic_load(&link->fleet->now_ns);
    answer->status = perform(e, r, corrupt, &receipt, &answer->err);
    if (receipt != NULL)
        take_receipt(link, receipt, answer);
    hr_receipt_free(receipt);
    if (atomic_load(&link->fleet->now_ns) - start_ns >= r->timeout_ms * 1000000)
        lose(answer, HR_ERR_TIMEOUT);
    if (fault == FAULT_LATE)
        fake_fleet_sleep(link->fleet, r->timeout_ms + 1);
    if (fault == FAULT_LATE || fault == FAULT_LOSE_REPLY)
        lose(answer, fault == FAULT_LATE ? HR_ERR_TIMEOUT : HR_ERR_PEER);
}

static void attempt(void *self, const hr_stage_request *request, const uint32_t *engines, size_t n,
                    hr_stage_answer *answers) {
    fleet_link *link = self;
    link->attempts++;
    if (request->bucket != NULL) { /* the next one is asked for, and is then what comes next */
        assert_true(link->next == NULL || request->bucket == link->next ||
                    request->bucket == link->now);
        link->now = request->bucket;
        link->next = request->ahead != NULL ? request->ahead(request->ahead_ctx) : NULL;
        link->looked += link->next != NULL;
    } else {
        link->next = NULL;
    }
    if (request->bucket != NULL && request->bucket->bytes > link->largest_bucket)
        link->largest_bucket = request->bucket->bytes;
    pthread_mutex_lock(&link->fleet->lock);
    for (size_t i = 0; i < n; i++)
        call(link, request, engines[i], &answers[i]);
    pthread_mutex_unlock(&link->fleet->lock);
}

static void close_link(void *self) {
    (void)self;
}

void fleet_link_init(fleet_link *link, fake_fleet *fleet, unsigned fault_at, fleet_fault fault) {
    *link = (fleet_link){.fleet = fleet, .fault_at = fault_at, .fault = fault};
    link->traits = (hr_transport_traits){.name = "safetensors",
                                         .carries_base = true,
                                         .carries_adapters = true,
                                         .sessions = true,
                                         .atomic = true,
                                         .base_rollback = true,
                                         .flushes = true};
}

hr_transport fleet_link_transport(fleet_link *link) {
    return (hr_transport){&link->traits, link, attempt, close_link};
}
