/* A push while it runs: what its parts share. Declaration (push_declare.c), session
 * (push_session.c) and stream (push_stream.c) are put together in push.c. Private to the room. */
#ifndef HR_PUBLISH_PUSH_RUN_H
#define HR_PUBLISH_PUSH_RUN_H

#include "publish/bucket.h"
#include "publish/gather.h"
#include "publish/ledger.h"
#include "publish/publisher.h"
#include "publish/round.h"

/* A bucket on its way: its units, which live as long, and the tensors it sends. */
typedef struct hr_push_outgoing {
    hr_push_bucket bucket;
    hr_tensor *list;     /* what is sent, under wire names */
    size_t *entries;     /* in the ledger, by place in list */
    hr_wire_bucket wire; /* n = 0: nothing to send */
    bool packed;
} hr_push_outgoing;

typedef struct hr_push_run {
    hr_publisher *p;
    const hr_push *push;
    const hr_group *group; /* NULL: alone */
    uint32_t rank;
    const hr_transport_traits *traits;
    char session_id[HR_SESSION_ID_SIZE];
    hr_push_receipt facts;

    hr_unit pending;          /* pulled, and did not fit */
    bool ended;               /* the source has no more */
    hr_push_bucket bucket;    /* being filled */
    hr_push_outgoing ways[2]; /* the bucket that leaves, and a lone publisher's next one, which is
                                 filled meanwhile; they stay where they are */
    unsigned leaving;
    uint64_t index; /* of the next bucket of this rank */
    char stream[16];
    hr_ledger ledger;
    hr_gather gathered; /* on rank 0 of a group, where adapters go whole */
    hr_manifest_digest *manifest;
    size_t last_adapter; /* of the push, whose tensor came last */
    bool *seen;          /* by adapter of the push: got a tensor, from any rank */
    bool base_seen;
    bool *sent_whole;           /* by adapter: its one bucket has left (whole_adapters) */
    size_t all_done, all_empty; /* ranks of the last round that have no more, and sent nothing */
    hr_error failure;           /* of this rank since the last round */

    bool begun, moved, committed; /* sessions may be open; base bytes may be written; no way back */
} hr_push_run;

static inline bool hr_push_leads(const hr_push_run *run) {
    return run->rank == 0;
}

static inline bool hr_push_alone(const hr_push_run *run) {
    return run->group == NULL || run->group->size == 1;
}

static inline bool hr_push_gathers(const hr_push_run *run) {
    return run->traits->whole_adapters && !hr_push_alone(run);
}

/* Whether a failure leaves what the transport has written and cannot take back: base weights,
 * perhaps half of them; or adapters, each as it came. */
static inline bool hr_push_leaves_base(const hr_push_run *run) {
    return run->moved && run->push->sync_base && !run->traits->base_rollback;
}

bool hr_push_leaves_adapters(const hr_push_run *run);

static inline uint64_t hr_push_now(const hr_push_run *run) {
    return hr_now_ns(&run->p->fleet.clock);
}

/* Keeps the first failure of this rank for the next round. */
void hr_push_note(hr_push_run *run, hr_status status, const hr_error *err);

/* A round that carries failures alone. */
hr_status hr_push_agree(hr_push_run *run, hr_error *err);

/* The failure of a push that its caller cancelled. */
hr_status hr_push_cancelled(hr_error *err);

/* Puts "; text" behind the message. */
void hr_push_append(hr_error *err, const char *text);

/* After which engines drop a session that went silent. */
uint64_t hr_push_lease_ms(const hr_push_run *run);

/* The request of a stage with what all stages of this push share, and performing it on all engines
 * unless the caller cancels. */
hr_stage_request hr_push_request(const hr_push_run *run, hr_stage stage);
hr_status hr_push_stage(hr_push_run *run, const hr_stage_request *request, hr_fleet_retry retry,
                        hr_error *err);

/* ---- push_declare.c ---- */

/* Checks what this rank was given, and connects; the transport must carry it. */
hr_status hr_push_set_up(hr_push_run *run, hr_error *err);
/* The first round: all ranks push the same; the session id comes from rank 0. *skip: none of them
 * has anything new. */
hr_status hr_push_declare(hr_push_run *run, bool *skip, hr_error *err);

/* ---- push_session.c ---- */

/* Rank 0 pauses and flushes where asked, registers, begins. All ranks call it: with a round for
 * every few adapters nobody waits longer for the others when there are more of them. How begin
 * ended is told in the round that follows. */
hr_status hr_push_open(hr_push_run *run, hr_error *err);
/* The rest of it on rank 0 alone.
 *
 * Prepares on all engines and compares their receipts with what was sent. */
hr_status hr_push_prepare(hr_push_run *run, hr_error *err);
/* Commits on all; a failure says who has and what to do. */
hr_status hr_push_commit(hr_push_run *run, hr_error *err);
/* Puts "committed: A, B" and what can be done about the others behind a failure of commit. */
void hr_push_explain_commit(const hr_push_run *run, hr_error *err);
/* That the receipts of engines, all of which have committed, are of this session, its version and,
 * where it was prepared here, its tensors and the process that had them. */
hr_status hr_push_check_committed(const hr_push_run *run, hr_error *err);
/* Whatever came before: no session of a failed push stays, engines go on. Returns status, or what
 * went wrong here after a success. On ranks that have opened and paused nothing there is nothing to
 * do. */
hr_status hr_push_finish(hr_push_run *run, hr_status status, hr_error *err);

/* ---- push_stream.c ---- */

/* Rounds of buckets until no rank has more. */
hr_status hr_push_stream(hr_push_run *run, hr_error *err);
void hr_push_outgoing_free(hr_push_outgoing *out); /* back to zero */
/* That everything declared has come; found in the same way on every rank. */
hr_status hr_push_check_stream(const hr_push_run *run, hr_error *err);
/* Adapters that were gathered on rank 0, each in a bucket of its own and a round. */
hr_status hr_push_send_gathered(hr_push_run *run, hr_error *err);

#endif
