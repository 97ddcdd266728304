#include "weights/history.h"

#include "weights/receipt.h"

#include <string.h>

hr_past_session *hr_history_find(hr_history *history, const char *id) {
    for (size_t i = 0; i < HR_HISTORY_SIZE; i++)
        if (history->sessions[i].state != HR_SESSION_IDLE &&
            strcmp(history->sessions[i].id, id) == 0)
            return &history->sessions[i];
    return NULL;
}

const hr_past_session *hr_history_last(const hr_history *history) {
    const hr_past_session *last =
        &history->sessions[(history->next + HR_HISTORY_SIZE - 1) % HR_HISTORY_SIZE];
    return last->state != HR_SESSION_IDLE ? last : NULL;
}

static hr_past_session *put(hr_history *history, const char *id, hr_session_state state) {
    hr_past_session *past = &history->sessions[history->next];
    history->next = (history->next + 1) % HR_HISTORY_SIZE;
    hr_receipt_free(past->receipt);
    *past = (hr_past_session){.state = state};
    memcpy(past->id, id, strlen(id) + 1);
    return past;
}

void hr_history_put_published(hr_history *history, hr_session *session) {
    for (size_t i = 0; i < HR_HISTORY_SIZE; i++)
        if (history->sessions[i].receipt != NULL)
            hr_receipt_drop_audit(history->sessions[i].receipt);
    hr_past_session *past = put(history, session->id, HR_SESSION_PUBLISHED);
    memcpy(past->fingerprint, session->fingerprint, HR_XXH3_SIZE);
    memcpy(past->identity, session->identity, HR_XXH3_SIZE);
    past->receipt = session->receipt;
    session->receipt = NULL;
}

void hr_history_put_rolled_back(hr_history *history, const char *id, const hr_error *cause) {
    put(history, id, HR_SESSION_ROLLED_BACK)->cause = *cause;
}

void hr_history_clear(hr_history *history) {
    for (size_t i = 0; i < HR_HISTORY_SIZE; i++)
        hr_receipt_free(history->sessions[i].receipt);
    *history = (hr_history){0};
}
