/* A push from the first check to the receipt.
 *
 * All ranks make the same rounds (round.h): what is pushed; one for every few adapters that are
 * registered; one for each bucket, whose first also says whether the session was begun, before
 * anybody sends; then prepared; committed. Rank 0 alone drives the session between them, every rank
 * sends its own buckets. A lone publisher makes the same rounds with itself. */
#include "publish/push_run.h"
#include "publish/receipt.h"
#include "weights/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what the parts share ---- */

/* Keeps the first failure of this rank for the next round. */
void hr_push_note(hr_push_run *run, hr_status status, const hr_error *err) {
    if (status != HR_OK && run->failure.status == HR_OK)
        run->failure = *err;
}

hr_status hr_push_cancelled(hr_error *err) {
    return hr_fail(err, HR_ERR_CANCELLED, "the push was cancelled by its caller");
}

bool hr_push_leaves_adapters(const hr_push_run *run) {
    bool touched = false;
    for (size_t i = 0; i < run->p->fleet.n; i++)
        touched = touched || run->p->fleet.engines[i].touched;
    return run->moved && touched && run->push->n_adapters > 0 && !run->traits->sessions;
}

hr_status hr_push_stage(hr_push_run *run, const hr_stage_request *request, hr_fleet_retry retry,
                        hr_error *err) {
    if (!hr_publisher_tell(run->p, hr_stage_name(request->stage)))
        return hr_push_cancelled(err);
    return hr_fleet_run(&run->p->fleet, request, retry, NULL, err);
}

uint64_t hr_push_lease_ms(const hr_push_run *run) {
    const hr_publisher *p = run->p;
    uint64_t lease_ms = HR_FLEET_LEASE_MS(p->fleet.timeout_ms);
    if (p->options.lease_ms > 0)
        return p->options.lease_ms;
    return lease_ms > HR_FLEET_MIN_LEASE_MS ? lease_ms : HR_FLEET_MIN_LEASE_MS;
}

/* The request of a stage with what all stages of this push share. */
hr_stage_request hr_push_request(const hr_push_run *run, hr_stage stage) {
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
        .lease_ms = hr_push_lease_ms(run),
        .requests_ms = HR_FLEET_REQUESTS_MS(run->p->fleet.timeout_ms),
        .weight_version = push->weight_version,
        .flush_cache = flush,
        .audit = run->p->options.audit,
    };
}

void hr_push_append(hr_error *err, const char *text) {
    hr_error first = *err;
    hr_fail(err, first.status, "%.800s; %s", first.message, text);
}

/* ---- the sequence ---- */

static hr_status agree(hr_push_run *run, bool *lost, hr_error *err) {
    hr_buf nothing = {0};
    return hr_round(run->group, &run->failure, &nothing, NULL, NULL, lost, err);
}

hr_status hr_push_agree(hr_push_run *run, hr_error *err) {
    return agree(run, NULL, err);
}

/* Rank 0 may have heard all others in a round that this rank has lost, and commit. */
static hr_status say_may_be_committed(hr_error *err) {
    hr_push_append(err,
                   "engines may have committed and serve the new weights: before anything else "
                   "is pushed, ask one for its weight_version, or rank 0 for its report");
    return err->status;
}

/* All are prepared, and rank 0 commits next. */
static hr_status agree_to_commit(hr_push_run *run, hr_error *err) {
    bool lost = false;
    hr_status status = agree(run, &lost, err);
    if (hr_push_leads(run))
        return status;
    run->facts.commit_begun = status == HR_OK || lost;
    return lost ? say_may_be_committed(err) : status;
}

/* The round after commit: what a rank that loses it says of the engines is all its trainer hears.
 */
static hr_status agree_on_commit(hr_push_run *run, hr_error *err) {
    bool lost = false;
    hr_status status = agree(run, &lost, err);
    if (!lost)
        return status;
    if (!hr_push_leads(run))
        return say_may_be_committed(err);
    if (run->failure.status == HR_OK) {
        hr_push_append(err, "all engines have committed before that and serve the new weights");
        return status;
    }
    hr_error group = *err;
    *err = run->failure; /* of commit, which says who has committed */
    hr_push_append(err, group.message);
    return err->status;
}

static hr_status sum_up(hr_push_run *run, hr_error *err) {
    HR_TRY(hr_ledger_manifest(&run->ledger, &run->manifest, err));
    run->facts.tensors = run->ledger.n;
    run->facts.bytes = run->ledger.bytes;
    return hr_manifest_overall(run->manifest, run->ledger.n, run->facts.xxh3, err);
}

static hr_status run_session(hr_push_run *run, hr_error *err) {
    hr_error local;
    HR_TRY(hr_push_open(run, err));
    uint64_t start = hr_push_now(run);
    HR_TRY(hr_push_stream(run, err));
    run->facts.stream_ns = hr_push_now(run) - start;
    HR_TRY(hr_push_check_stream(run, err));
    HR_TRY(hr_push_send_gathered(run, err));
    hr_push_note(run, sum_up(run, &local), &local);
    if (hr_push_leads(run) && run->failure.status == HR_OK)
        hr_push_note(run, hr_push_prepare(run, &local), &local);
    HR_TRY(agree_to_commit(run, err));
    if (hr_push_leads(run))
        hr_push_note(run, hr_push_commit(run, &local), &local);
    return agree_on_commit(run, err);
}

static hr_status run_push(hr_push_run *run, hr_error *err) {
    hr_error local;
    bool skip = false;
    hr_push_note(run, hr_push_set_up(run, &local), &local);
    HR_TRY(hr_push_declare(run, &skip, err));
    run->facts.skipped = skip;
    if (skip)
        return HR_OK;
    hr_status status = run_session(run, err);
    return hr_push_finish(run, status, err);
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

/* What an engine serves after this call, as far as its answers tell. "old" is what it served
 * before. A transport that takes nothing back may have left a part of it. */
static const char *served_by(const hr_push_run *run, const hr_fleet_engine *e, bool failed) {
    bool stays = hr_push_leaves_base(run) || (hr_push_leaves_adapters(run) && e->touched);
    if (run->facts.skipped)
        return "old";
    if (!failed || (e->known && e->state == HR_SESSION_PUBLISHED))
        return "new";
    if (stays || e->unservable || (run->facts.commit_begun && !e->known))
        return "unknown";
    return "old";
}

/* The receipt, which is also the report, of a call that ended with status. */
static hr_status leave_call(hr_publisher *p, hr_push_run *run, uint64_t start, hr_status status,
                            hr_push_receipt **receipt, hr_error *err) {
    hr_push_receipt *made = NULL;
    hr_error late;
    run->facts.session_id = run->session_id;
    run->facts.total_ns = hr_now_ns(&p->fleet.clock) - start;
    for (size_t i = 0; i < p->fleet.n; i++)
        p->fleet.engines[i].serves = served_by(run, &p->fleet.engines[i], status != HR_OK);
    hr_status kept = hr_push_receipt_make(&run->facts, hr_push_leads(run) ? &p->fleet : NULL,
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

static hr_push_run new_run(hr_publisher *p, const hr_push *push) {
    const hr_group *group = p->options.group;
    hr_push_run run = {.p = p, .push = push, .group = group};
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
    hr_push_run run = new_run(publisher, push);
    hr_status status = run_push(&run, err);
    hr_unit_release(&run.pending);
    hr_push_bucket_free(&run.bucket);
    for (size_t i = 0; i < 2; i++)
        hr_push_outgoing_free(&run.ways[i]);
    status = leave_call(publisher, &run, start, status, receipt, err);
    hr_ledger_free(&run.ledger);
    hr_gather_free(&run.gathered);
    free(run.manifest);
    free(run.seen);
    free(run.sent_whole);
    return status;
}

/* ---- resume ---- */

static hr_status run_resume(hr_push_run *run, const char *session_id, hr_error *err) {
    hr_stage_request request = {.stage = HR_STAGE_COMMIT, .session_id = run->session_id};
    HR_TRY(hr_session_id_check(session_id, err));
    snprintf(run->session_id, sizeof run->session_id, "%s", session_id);
    run->facts.commit_begun = true; /* by the push */
    for (size_t i = 0; i < run->p->fleet.n; i++)
        run->p->fleet.engines[i].known = false;
    HR_TRY(hr_publisher_connect(run->p, err));
    run->traits = run->p->fleet.transport.traits;
    run->facts.transport = run->traits->name;
    run->facts.atomic = run->traits->atomic;
    if (!run->traits->atomic)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "transport %s has no prepared sessions to resume; push again",
                       run->traits->name);
    hr_status status = hr_push_stage(run, &request, HR_RETRY_COMMIT, err);
    if (status != HR_OK && status != HR_ERR_CANCELLED)
        hr_push_explain_commit(run, err);
    HR_TRY(status);
    request.stage = HR_STAGE_CONTINUE; /* the push may have left an engine paused that was away */
    if (run->p->options.pause != HR_PUSH_PAUSE_NONE)
        HR_TRY(hr_push_stage(run, &request, HR_RETRY_LOST, err));
    return hr_push_check_committed(run, err);
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
    hr_push_run run = new_run(publisher, &nothing);
    hr_status status = run_resume(&run, session_id, err);
    run.facts.commit_ns = hr_now_ns(&publisher->fleet.clock) - start;
    return leave_call(publisher, &run, start, status, receipt, err);
}
