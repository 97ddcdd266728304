/* Sessions that have ended, so that a repeated call gets the answer that was lost. */
#ifndef HR_WEIGHTS_HISTORY_H
#define HR_WEIGHTS_HISTORY_H

#include "weights/session.h"

enum { HR_HISTORY_SIZE = 64 };

typedef struct hr_past_session {
    char id[HR_SESSION_ID_SIZE];
    hr_session_state state; /* published or rolled back; idle: no entry */
    uint8_t fingerprint[HR_XXH3_SIZE], identity[HR_XXH3_SIZE];
    hr_receipt *receipt; /* of a published one; only the newest keeps its audit */
    hr_error cause;      /* why it was rolled back */
} hr_past_session;

typedef struct hr_history {
    hr_past_session sessions[HR_HISTORY_SIZE];
    size_t next;
} hr_history;

/* NULL when it is not remembered. */
hr_past_session *hr_history_find(hr_history *history, const char *id);
/* The session that ended last; NULL when none has. */
const hr_past_session *hr_history_last(const hr_history *history);
/* Takes the receipt out of a published session. */
void hr_history_put_published(hr_history *history, hr_session *session);
void hr_history_put_rolled_back(hr_history *history, const char *id, const hr_error *cause);
void hr_history_clear(hr_history *history);

#endif
