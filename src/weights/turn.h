/* Inside the receiver: whose turn it is, which session is meant, and the steps that several calls
 * share. Private to the room.
 *
 * One call at a time changes things (its turn); it works without the mutex, which guards only whose
 * turn it is and what status_get shows, so looking never waits for a build. */
#ifndef HR_WEIGHTS_TURN_H
#define HR_WEIGHTS_TURN_H

#include "weights/history.h"
#include "weights/session.h"

struct hr_receiver {
    pthread_mutex_t lock; /* turn, shown */
    pthread_cond_t turn_ended;
    const char *turn; /* which call is at work; NULL: none */
    hr_receiver_status shown;
    uint64_t shown_last_call_ns;

    /* of whose turn it is */
    hr_receiving shared;
    hr_session *session; /* open or prepared; NULL: none */
    uint64_t last_call_ns;
    hr_history history;
    char weight_version[HR_WEIGHT_VERSION_SIZE]; /* the last that was published here */
    uint64_t published, rolled_back;
};

enum { HR_DEFAULT_WAIT_MS = 60000, HR_MAX_LEASE_MS = 7 * 24 * 3600 * 1000 };

/* ---- turns and leases (turn.c); all but enter are of whose turn it is ---- */

/* Waits, at most so long (0: a minute), until no other call is at work, then rolls back what has
 * run out. HR_ERR_TIMEOUT names the call that is waited for. */
hr_status hr_turn_enter(hr_receiver *receiver, const char *call, uint64_t timeout_ms,
                        hr_error *err);
void hr_turn_leave(hr_receiver *receiver);
/* A call of the session's trainer: it lives. At the call's end, for a build may take long. */
void hr_turn_renew_lease(hr_receiver *receiver);
uint64_t hr_turn_now(const hr_receiver *receiver);

/* Ends the session and remembers why. */
void hr_turn_roll_back(hr_receiver *receiver, const hr_error *cause);
/* Names that wait for a session which never opened; without all only those that waited too long.
 * True when there were any; false while a session is open. */
bool hr_turn_forget_waiting(hr_receiver *receiver, bool all);

/* The session with this id (NULL: whichever) is there, or also still open. HR_ERR_SESSION. */
hr_status hr_turn_find_session(hr_receiver *receiver, const char *id, hr_error *err);
hr_status hr_turn_find_open(hr_receiver *receiver, const char *id, hr_error *err);
/* HR_ERR_SESSION: one is open already; this one has ended so. */
hr_status hr_turn_fail_open(const hr_receiver *receiver, hr_error *err);
hr_status hr_turn_fail_past(const hr_past_session *past, hr_error *err);

/* ---- registrations (receiver_control.c) ---- */

/* A registration takes the place of an older one of its name, which is kept until it is settled or
 * undone. */
typedef struct hr_update_change {
    hr_registered *added, *replaced;
} hr_update_change;

hr_status hr_update_register(hr_receiver *receiver, const hr_registration *registration,
                             hr_update_change *out, hr_error *err);
void hr_update_settle(hr_receiver *receiver, const hr_update_change *made);
void hr_update_undo(hr_receiver *receiver, const hr_update_change *made);

/* ---- steps of a session (receiver_update.c) ---- */

hr_status hr_update_begin(hr_receiver *receiver, const hr_session_options *options, hr_error *err);
/* A failure has rolled the session back. */
hr_status hr_update_prepare(hr_receiver *receiver, const hr_end_options *options, hr_error *err);
/* *reply (NULL: not wanted) is the caller's. A failure rolls the session back, or leaves it
 * prepared to be published again. */
hr_status hr_update_publish(hr_receiver *receiver, bool keep_prepared, hr_receipt **reply,
                            hr_error *err);
/* Nothing to do when out is NULL. */
hr_status hr_update_copy_receipt(const hr_receipt *receipt, hr_receipt **out, hr_error *err);
/* Published under this id already, by a call with the same options: *past, else NULL. */
hr_status hr_update_find_published(hr_receiver *receiver, const hr_end_options *options,
                                   hr_past_session **past, hr_error *err);

#endif
