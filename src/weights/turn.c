/* Turns, leases, and which session a call means. */
#include "weights/turn.h"

#include "base/cond.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char *or_unnamed(const char *id) {
    return id[0] != '\0' ? id : "none";
}

void hr_turn_roll_back(hr_receiver *receiver, const hr_error *cause) {
    hr_history_put_rolled_back(&receiver->history, receiver->session->id, cause);
    hr_session_roll_back(receiver->session);
    const hr_receiver_sink *sink = &receiver->shared.sink;
    if (sink->rolled_back != NULL)
        sink->rolled_back(sink->self, receiver->session->id, cause);
    hr_session_free(receiver->session);
    receiver->session = NULL;
    receiver->rolled_back++;
}

/* ---- turns and leases ---- */

uint64_t hr_turn_now(const hr_receiver *receiver) {
    return hr_now_ns(&receiver->shared.clock);
}

static bool roll_back_expired(hr_receiver *receiver) {
    hr_session *session = receiver->session;
    if (session == NULL || hr_turn_now(receiver) - receiver->last_call_ns < session->lease_ns)
        return false;
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_TIMEOUT, "its lease ran out: %llu ms without a call",
                  (unsigned long long)((hr_turn_now(receiver) - receiver->last_call_ns) / 1000000));
    hr_turn_roll_back(receiver, &cause);
    return true;
}

bool hr_turn_forget_waiting(hr_receiver *receiver, bool all) {
    if (receiver->session != NULL)
        return false;
    bool some = false;
    hr_registered *next;
    for (hr_registered *r = receiver->shared.registry.first; r != NULL; r = next) {
        next = r->next;
        if (r->pending &&
            (all || hr_turn_now(receiver) - r->since_ns >= receiver->shared.lease_ns)) {
            hr_receiving_forget(&receiver->shared, r);
            some = true;
        }
    }
    return some;
}

static void begin_turn(hr_receiver *receiver) {
    (void)roll_back_expired(receiver);
    (void)hr_turn_forget_waiting(receiver, false);
}

hr_status hr_turn_enter(hr_receiver *receiver, const char *call, uint64_t timeout_ms,
                        hr_error *err) {
    if (timeout_ms == 0)
        timeout_ms = HR_DEFAULT_WAIT_MS;
    if (timeout_ms > HR_MAX_LEASE_MS)
        timeout_ms = HR_MAX_LEASE_MS;
    struct timespec until = hr_cond_deadline(timeout_ms);
    hr_status status = HR_OK;
    pthread_mutex_lock(&receiver->lock);
    while (receiver->turn != NULL && status == HR_OK)
        if (pthread_cond_timedwait(&receiver->turn_ended, &receiver->lock, &until) == ETIMEDOUT &&
            receiver->turn != NULL)
            status = hr_fail(err, HR_ERR_TIMEOUT,
                             "%s waited %llu ms for another call, %s (session %s), which is still "
                             "at work; try again later",
                             call, (unsigned long long)timeout_ms, receiver->turn,
                             or_unnamed(receiver->shown.session_id));
    if (status == HR_OK)
        receiver->turn = call;
    pthread_mutex_unlock(&receiver->lock);
    if (status == HR_OK)
        begin_turn(receiver);
    return status;
}

static hr_receiver_status what_to_show(const hr_receiver *receiver) {
    const hr_session *session = receiver->session;
    hr_receiver_status shown = {.state = HR_SESSION_IDLE,
                                .sessions_published = receiver->published,
                                .sessions_rolled_back = receiver->rolled_back};
    if (session != NULL) {
        shown.state = session->state;
        memcpy(shown.session_id, session->id, sizeof session->id);
        shown.sync_base = session->sync_base;
        shown.tensors = session->stash.n;
        shown.bytes = session->stash.adapter_bytes + session->stash.base_bytes;
        shown.lease_ms = session->lease_ns / 1000000;
    }
    return shown;
}

void hr_turn_leave(hr_receiver *receiver) {
    pthread_mutex_lock(&receiver->lock);
    receiver->shown = what_to_show(receiver);
    receiver->shown_last_call_ns = receiver->last_call_ns;
    receiver->turn = NULL;
    pthread_cond_signal(&receiver->turn_ended);
    pthread_mutex_unlock(&receiver->lock);
}

void hr_turn_renew_lease(hr_receiver *receiver) {
    receiver->last_call_ns = hr_turn_now(receiver);
}

bool hr_receiver_expire(hr_receiver *receiver) {
    pthread_mutex_lock(&receiver->lock);
    bool free = receiver->turn == NULL;
    if (free)
        receiver->turn = "expire";
    pthread_mutex_unlock(&receiver->lock);
    if (!free)
        return false; /* a call is at work: the session lives */
    bool expired = roll_back_expired(receiver);
    (void)hr_turn_forget_waiting(receiver, false);
    hr_turn_leave(receiver);
    return expired;
}

/* ---- which session is meant ---- */

enum { HR_OPEN_TEXT = 512 };

/* The session that is open, when it goes by itself, and how to be rid of it now. */
static const char *describe_open(const hr_receiver *receiver, char text[HR_OPEN_TEXT]) {
    const hr_session *session = receiver->session;
    uint64_t idle_ns = hr_turn_now(receiver) - receiver->last_call_ns;
    uint64_t left_ns = session->lease_ns > idle_ns ? session->lease_ns - idle_ns : 0;
    (void)snprintf(text, HR_OPEN_TEXT,
                   "'%s' (%s, last call %.1f s ago); without another call it is rolled back in "
                   "%.1f s. End it, or abort it: POST /abort_weight_update {\"session_id\": "
                   "\"%s\"}",
                   session->id, hr_session_state_name(session->state), (double)idle_ns / 1e9,
                   (double)left_ns / 1e9, session->id);
    return text;
}

hr_status hr_turn_fail_past(const hr_past_session *past, hr_error *err) {
    if (past->state == HR_SESSION_PUBLISHED)
        return hr_fail(err, HR_ERR_SESSION, "the session '%s' is published already", past->id);
    return hr_fail(err, HR_ERR_SESSION,
                   "the session '%s' was rolled back: %.700s; begin a new one and push "
                   "everything again",
                   past->id, past->cause.message);
}

/* A call that names no session: perhaps the one it means was rolled back, which its caller may not
 * know. */
static hr_status fail_none_open(const hr_receiver *receiver, const char *id, hr_error *err) {
    const hr_past_session *last = id == NULL ? hr_history_last(&receiver->history) : NULL;
    if (last != NULL && last->state == HR_SESSION_ROLLED_BACK)
        return hr_fail(err, HR_ERR_SESSION,
                       "no weight update session is open: the last one, '%s', was rolled back: "
                       "%.700s; begin one first and push everything again",
                       last->id, last->cause.message);
    return hr_fail(err, HR_ERR_SESSION, "no weight update session is open%s%.64s; begin one first",
                   id != NULL ? ", nor is one known as " : "", id != NULL ? id : "");
}

hr_status hr_turn_find_session(hr_receiver *receiver, const char *id, hr_error *err) {
    const hr_session *session = receiver->session;
    if (session != NULL && (id == NULL || strcmp(session->id, id) == 0))
        return HR_OK;
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL)
        return hr_turn_fail_past(past, err);
    if (session == NULL)
        return fail_none_open(receiver, id, err);
    char open[HR_OPEN_TEXT];
    return hr_fail(err, HR_ERR_SESSION, "the session '%.64s' is not known; open is %s", id,
                   describe_open(receiver, open));
}

hr_status hr_turn_find_open(hr_receiver *receiver, const char *id, hr_error *err) {
    HR_TRY(hr_turn_find_session(receiver, id, err));
    if (receiver->session->state != HR_SESSION_OPEN)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' is prepared and takes no more tensors; commit or abort it",
                       receiver->session->id);
    return HR_OK;
}

hr_status hr_turn_fail_open(const hr_receiver *receiver, hr_error *err) {
    char open[HR_OPEN_TEXT];
    return hr_fail(err, HR_ERR_SESSION, "a weight update session is already open: %s",
                   describe_open(receiver, open));
}

/* ---- looking ---- */

void hr_receiver_status_get(hr_receiver *receiver, hr_receiver_status *out) {
    pthread_mutex_lock(&receiver->lock);
    *out = receiver->shown;
    uint64_t last_call_ns = receiver->shown_last_call_ns;
    pthread_mutex_unlock(&receiver->lock);
    uint64_t now_ns = hr_turn_now(receiver);
    if (out->state != HR_SESSION_IDLE && now_ns > last_call_ns)
        out->idle_ms = (now_ns - last_call_ns) / 1000000;
    hr_registry_count(&receiver->shared.registry, &out->registered, &out->pending);
    memcpy(out->instance, receiver->shared.instance, sizeof out->instance);
}

bool hr_receiver_is_pending(hr_receiver *receiver, const char *name) {
    return hr_registry_is_pending(&receiver->shared.registry, name);
}
