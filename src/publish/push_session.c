/* The session of a push on all engines: opened, prepared, committed, and cleaned up after. */
#include "publish/push_run.h"

#include <stdio.h>
#include <string.h>

/* ---- opening the session ---- */

static bool pauses(const hr_push_run *run) {
    return run->push->sync_base && run->p->options.pause != HR_PUSH_PAUSE_NONE;
}

/* Engines that do not flush when they commit are flushed while paused, or after it. */
static bool flushes(const hr_push_run *run) {
    return run->push->sync_base && !run->traits->flushes &&
           run->p->options.pause != HR_PUSH_PAUSE_IN_PLACE;
}

static hr_status pause_engines(hr_push_run *run, hr_error *err) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_PAUSE);
    if (!pauses(run))
        return HR_OK;
    HR_TRY(hr_push_stage(run, &request, HR_RETRY_LOST, err));
    request.stage = HR_STAGE_FLUSH;
    return flushes(run) ? hr_push_stage(run, &request, HR_RETRY_ALL, err) : HR_OK;
}

/* A refusal because of another trainer's session that outlasted the wait for it. */
static hr_status explain_taken(const hr_push_run *run, hr_status status, hr_error *err) {
    char text[160];
    if (status == HR_OK || !hr_fleet_is_taken(err))
        return status;
    snprintf(text, sizeof text,
             "waited %.1f s for that; if its trainer is gone, `headrace push --abort ID` with the "
             "engines' URLs ends it",
             (double)HR_FLEET_WAIT_MS(run->p->fleet.timeout_ms) / 1e3);
    hr_push_append(err, text);
    return status;
}

/* A push of many adapters would otherwise spend most of its time on the way to and fro. */
enum { REGISTER_AT_ONCE = 4 };

/* The adapters of the push from first on that are registered in one round. */
static size_t register_together(const hr_push_run *run, size_t first) {
    size_t left = run->push->n_adapters - first;
    size_t most = run->traits->register_once ? 1 : REGISTER_AT_ONCE;
    return left < most ? left : most;
}

static hr_status register_adapters(hr_push_run *run, size_t first, size_t n, hr_error *err) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_REGISTER);
    const hr_push_adapter *adapters = &run->push->adapters[first];
    bool once = run->traits->register_once;
    if (once && hr_publisher_is_registered(run->p, adapters))
        return HR_OK;
    request.registrations = adapters;
    request.n_registrations = n;
    hr_status status = hr_push_stage(run, &request, HR_RETRY_BEGIN, err);
    HR_TRY(explain_taken(run, status, err));
    return once ? hr_publisher_set_registered(run->p, adapters, err) : HR_OK;
}

static bool is_first(const hr_fleet_engine *engine) {
    return engine->first;
}

static bool is_other(const hr_fleet_engine *engine) {
    return !engine->first;
}

/* Two trainers that begin at the same time and wait for each other would wait for ever if each had
 * some engines: all begin at the same one. */
static hr_status begin(hr_push_run *run, hr_error *err) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_BEGIN);
    hr_fleet_retry retry = run->traits->atomic ? HR_RETRY_BEGIN : HR_RETRY_WAIT;
    if (!hr_publisher_tell(run->p, hr_stage_name(HR_STAGE_BEGIN)))
        return hr_push_cancelled(err);
    run->begun = true;
    hr_status status = hr_fleet_run(&run->p->fleet, &request, retry, is_first, err);
    if (status == HR_OK)
        status = hr_fleet_run(&run->p->fleet, &request, retry, is_other, err);
    return explain_taken(run, status, err);
}

hr_status hr_push_open(hr_push_run *run, hr_error *err) {
    hr_error local;
    uint64_t start = hr_push_now(run);
    if (hr_push_leads(run))
        hr_push_note(run, pause_engines(run, &local), &local);
    run->facts.pause_ns = hr_push_now(run) - start;
    start = hr_push_now(run);
    for (size_t i = 0; i < run->push->n_adapters;) {
        size_t n = register_together(run, i);
        if (hr_push_leads(run) && run->failure.status == HR_OK)
            hr_push_note(run, register_adapters(run, i, n, &local), &local);
        HR_TRY(hr_push_agree(run, err));
        i += n;
    }
    run->facts.register_ns = hr_push_now(run) - start;
    start = hr_push_now(run);
    if (hr_push_leads(run) && run->failure.status == HR_OK)
        hr_push_note(run, begin(run, &local), &local);
    run->facts.begin_ns = hr_push_now(run) - start;
    return HR_OK;
}

/* ---- prepare and commit ---- */

static bool has_what_was_sent(const hr_push_run *run, const hr_engine_receipt *r) {
    return r->tensors == run->facts.tensors && r->bytes == run->facts.bytes &&
           memcmp(r->xxh3, run->facts.xxh3, HR_XXH3_SIZE) == 0;
}

/* Anybody may register a name again until its first tensor comes. */
static hr_status check_config(const hr_fleet_engine *e, const hr_push_adapter *adapter,
                              hr_error *err) {
    const hr_engine_receipt *r = &e->receipt;
    uint8_t digest[HR_XXH3_SIZE];
    char mine[HR_XXH3_HEX], theirs[HR_XXH3_HEX];
    size_t i = 0;
    hr_xxh3(adapter->config, adapter->config_len, digest);
    while (i < r->n_adapters && strcmp(r->adapters[i].name, adapter->name) != 0)
        i++;
    if (i == r->n_adapters)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s, prepare: its receipt does not say with which config it built "
                       "the adapter '%s'",
                       e->url, adapter->name);
    if (memcmp(r->adapters[i].config_digest, digest, sizeof digest) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s, prepare: the adapter '%s' was registered again by somebody else "
                       "meanwhile, with another config (digest %s; this push registered %s); let "
                       "one trainer publish under a name",
                       e->url, adapter->name, hr_xxh3_format(r->adapters[i].config_digest, theirs),
                       hr_xxh3_format(digest, mine));
    return HR_OK;
}

static hr_status check_prepared(const hr_push_run *run, hr_fleet_engine *e, hr_error *err) {
    const hr_engine_receipt *r = &e->receipt;
    char mine[HR_XXH3_HEX], theirs[HR_XXH3_HEX];
    if (!e->has_receipt || !r->has_xxh3)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s, prepare: no receipt with a digest came, so nothing shows that "
                       "the bytes were checked",
                       e->url);
    if (!has_what_was_sent(run, r))
        return hr_fail(err, HR_ERR_DIGEST,
                       "engine %s, prepare: it has %llu tensors, %llu bytes, digest %s; sent were "
                       "%llu, %llu, %s",
                       e->url, (unsigned long long)r->tensors, (unsigned long long)r->bytes,
                       hr_xxh3_format(r->xxh3, theirs), (unsigned long long)run->facts.tensors,
                       (unsigned long long)run->facts.bytes, hr_xxh3_format(run->facts.xxh3, mine));
    for (size_t i = 0; i < run->push->n_adapters; i++)
        HR_TRY(check_config(e, &run->push->adapters[i], err));
    e->prepared = true;
    memcpy(e->instance, r->instance, sizeof e->instance);
    return HR_OK;
}

/* What this engine says it has committed is what was prepared and asked for. */
static hr_status check_committed(const hr_push_run *run, const hr_fleet_engine *e, hr_error *err) {
    const hr_engine_receipt *r = &e->receipt;
    const char *version = run->push->weight_version;
    if (!e->has_receipt || r->state != HR_SESSION_PUBLISHED ||
        strcmp(r->session_id, run->session_id) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s has answered the commit of session %s with a receipt of session "
                       "\"%s\" that is %s",
                       e->url, run->session_id, r->session_id, hr_session_state_name(r->state));
    if (version != NULL && strcmp(r->weight_version, version) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s has committed the session, with weight version \"%.200s\" "
                       "instead of \"%.200s\"",
                       e->url, r->weight_version, version);
    if (e->prepared && strcmp(r->instance, e->instance) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "engine %s has committed the session as instance \"%s\", but \"%s\" has "
                       "prepared it",
                       e->url, r->instance, e->instance);
    if (e->prepared && (!r->has_xxh3 || !has_what_was_sent(run, r)))
        return hr_fail(err, HR_ERR_DIGEST,
                       "engine %s has committed the session with other tensors than it prepared",
                       e->url);
    return HR_OK;
}

hr_status hr_push_check_committed(const hr_push_run *run, hr_error *err) {
    for (size_t i = 0; i < run->p->fleet.n; i++) {
        hr_status status = check_committed(run, &run->p->fleet.engines[i], err);
        if (status != HR_OK)
            hr_push_append(err, "push the same weights again, as a new session");
        HR_TRY(status);
    }
    return HR_OK;
}

static hr_stage_request end_request(const hr_push_run *run, hr_stage stage) {
    hr_stage_request request = hr_push_request(run, stage);
    request.manifest = run->manifest;
    request.n_manifest = run->ledger.n;
    return request;
}

hr_status hr_push_prepare(hr_push_run *run, hr_error *err) {
    uint64_t start = hr_push_now(run);
    hr_stage_request request = end_request(run, HR_STAGE_PREPARE);
    HR_TRY(hr_push_stage(run, &request, HR_RETRY_LOST, err));
    for (size_t i = 0; run->traits->atomic && i < run->p->fleet.n; i++)
        HR_TRY(check_prepared(run, &run->p->fleet.engines[i], err));
    run->facts.prepare_ns = hr_push_now(run) - start;
    return HR_OK;
}

/* What can be done about engines that have not committed. */
static void describe_way_on(const hr_push_run *run, hr_status status, char text[320]) {
    char until[64] = "before its lease runs out";
    if (run->begun)
        snprintf(until, sizeof until, "within %.1f s (the lease)",
                 (double)hr_push_lease_ms(run) / 1e3);
    if (!run->traits->atomic)
        snprintf(text, 320, "push again: this transport cannot resume");
    else if (status == HR_ERR_SESSION)
        snprintf(text, 320,
                 "the session cannot be finished there (an engine that does not know it has "
                 "restarted, or has dropped it when its lease ran out): push the same weights "
                 "again as a new session, to all engines");
    else
        snprintf(text, 320,
                 "finish it %s: `headrace push --resume %.64s` with the engines' URLs, or "
                 "publisher.resume(\"%.64s\"); where an engine has restarted, push again",
                 until, run->session_id, run->session_id);
}

void hr_push_explain_commit(const hr_push_run *run, hr_error *err) {
    hr_buf text = {0};
    char way_on[320];
    size_t done = 0;
    for (size_t i = 0; i < run->p->fleet.n; i++) {
        const hr_fleet_engine *e = &run->p->fleet.engines[i];
        if (!e->known || e->state != HR_SESSION_PUBLISHED)
            continue;
        hr_buf_printf(&text, "%s%s", done > 0 ? ", " : "", e->url);
        done++;
    }
    hr_error first = *err;
    describe_way_on(run, first.status, way_on);
    hr_fail(err, first.status, "%.450s; committed: %.200s; %s", first.message,
            done > 0 && !text.failed ? text.data : "none", way_on);
    hr_buf_free(&text);
}

hr_status hr_push_commit(hr_push_run *run, hr_error *err) {
    uint64_t start = hr_push_now(run);
    hr_stage_request request = end_request(run, HR_STAGE_COMMIT);
    if (!hr_publisher_tell(run->p, hr_stage_name(HR_STAGE_COMMIT)))
        return hr_push_cancelled(err);
    run->committed = run->facts.commit_begun = true;
    run->p->unstoppable = true;
    hr_status status =
        hr_push_stage(run, &request, run->traits->atomic ? HR_RETRY_COMMIT : HR_RETRY_NOTHING, err);
    run->facts.commit_ns = hr_push_now(run) - start;
    if (status != HR_OK) {
        hr_push_explain_commit(run, err);
        return status;
    }
    if (run->traits->atomic)
        HR_TRY(hr_push_check_committed(run, err));
    request.stage = HR_STAGE_FLUSH;
    return flushes(run) && !pauses(run) ? hr_push_stage(run, &request, HR_RETRY_ALL, err) : HR_OK;
}

/* ---- the end ---- */

static bool may_continue(const hr_fleet_engine *engine) {
    return engine->paused && !engine->unservable;
}

static void say_what_stays(const hr_push_run *run, bool paused, hr_error *err) {
    if (hr_push_leaves_base(run) && !paused)
        hr_push_append(err, "base weights may be half written, and engines serve them as they are: "
                            "push all base weights again");
    if (hr_push_leaves_adapters(run))
        hr_push_append(err,
                       "engines may serve adapters that were sent before: this transport takes "
                       "nothing back; push again");
}

/* Engines go on; those with half-written base weights do not, and the message says so. */
static void continue_engines(hr_push_run *run, bool failed, hr_error *err) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_CONTINUE);
    hr_error local;
    bool half = failed && hr_push_leaves_base(run);
    bool unservable = false, paused = false;
    for (size_t i = 0; i < run->p->fleet.n; i++) {
        paused = paused || run->p->fleet.engines[i].paused;
        unservable =
            unservable || (run->p->fleet.engines[i].paused && run->p->fleet.engines[i].unservable);
    }
    if (failed)
        say_what_stays(run, paused, err);
    if (!paused)
        return;
    if (half) {
        hr_push_append(err,
                       "engines stay paused: their base weights may be half written; push all base "
                       "weights again");
        return;
    }
    hr_status status = hr_fleet_run(&run->p->fleet, &request, HR_RETRY_LOST, may_continue, &local);
    if (unservable && failed)
        hr_push_append(err, "engines that cannot serve stay paused: push all base weights again");
    if (status != HR_OK && failed)
        hr_push_append(err, local.message);
    else if (status != HR_OK)
        *err = local;
}

/* An engine that refused to begin may have the session of another trainer open, which an abort
 * without an id would end. */
static bool may_be_open(const hr_fleet_engine *engine) {
    return !engine->known || engine->state != HR_SESSION_IDLE;
}

/* After a failure before commit: no engine keeps a session of this push. */
static void roll_back(hr_push_run *run) {
    hr_stage_request request = hr_push_request(run, HR_STAGE_ABORT);
    hr_error ignored; /* the first cause is what counts; leases end what cannot be reached */
    (void)hr_fleet_run(&run->p->fleet, &request, HR_RETRY_LOST, may_be_open, &ignored);
}

hr_status hr_push_finish(hr_push_run *run, hr_status status, hr_error *err) {
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
