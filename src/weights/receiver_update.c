/* The calls of an update session, and what is said when one comes again. */
#include "weights/names.h"
#include "weights/receipt.h"
#include "weights/turn.h"

#include <string.h>
#include <sys/random.h>

/* ---- begin ---- */

static hr_status make_id(char id[HR_SESSION_ID_SIZE], hr_error *err) {
    uint8_t random[HR_XXH3_SIZE];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return hr_fail(err, HR_ERR_IO, "no random bytes for a session id");
    (void)hr_xxh3_format(random, id);
    return HR_OK;
}

static bool declares_same(const hr_session *session, const hr_session_options *options) {
    if (session->declares != (options->adapters != NULL))
        return false;
    if (session->declares && session->n_declared != options->n_adapters)
        return false;
    for (size_t i = 0; i < session->n_declared; i++)
        if (options->adapters[i] == NULL || strcmp(session->declared[i], options->adapters[i]) != 0)
            return false;
    return true;
}

/* The same call again, because its reply was lost. */
static bool is_begun_again(const hr_receiver *receiver, const hr_session_options *options) {
    const hr_session *session = receiver->session;
    return session != NULL && options->session_id != NULL &&
           strcmp(session->id, options->session_id) == 0 && session->state == HR_SESSION_OPEN &&
           session->stash.n == 0 && session->sync_base == options->sync_base &&
           session->audit == options->audit && declares_same(session, options);
}

hr_status hr_update_begin(hr_receiver *receiver, const hr_session_options *options, hr_error *err) {
    char id[HR_SESSION_ID_SIZE] = "";
    if (options->session_id != NULL)
        HR_TRY(hr_session_id_check(options->session_id, err));
    if (options->lease_ms > HR_MAX_LEASE_MS)
        return hr_fail(err, HR_ERR_LIMIT, "a lease may last a week, not %llu ms",
                       (unsigned long long)options->lease_ms);
    if (is_begun_again(receiver, options))
        return HR_OK;
    if (receiver->session != NULL)
        return hr_turn_fail_open(receiver, err);
    if (options->session_id != NULL) {
        const hr_past_session *past = hr_history_find(&receiver->history, options->session_id);
        if (past != NULL)
            return hr_turn_fail_past(past, err);
        memcpy(id, options->session_id, strlen(options->session_id) + 1);
    } else {
        HR_TRY(make_id(id, err));
    }
    return hr_session_open(&receiver->shared, id, options, &receiver->session, err);
}

hr_status hr_receiver_begin(hr_receiver *receiver, const hr_session_options *options,
                            char session_id[HR_SESSION_ID_SIZE], hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "begin_weight_update", options->timeout_ms, err));
    hr_status status = hr_update_begin(receiver, options, err);
    if (status == HR_OK) {
        hr_turn_renew_lease(receiver);
        memcpy(session_id, receiver->session->id, HR_SESSION_ID_SIZE);
    }
    hr_turn_leave(receiver);
    return status;
}

/* ---- buckets ---- */

hr_status hr_receiver_bucket(hr_receiver *receiver, const hr_bucket *bucket, hr_error *err) {
    bool kept = false;
    hr_status status = hr_turn_enter(receiver, "a bucket", 0, err);
    if (status == HR_OK) {
        status = hr_turn_find_open(receiver, bucket->session_id, err);
        if (status == HR_OK) {
            hr_error cause;
            status = hr_session_take(receiver->session, bucket, &kept, &cause);
            if (status != HR_OK && status != HR_ERR_DIGEST) /* that came before, and was taken */
                hr_session_note_refusal(receiver->session, bucket, cause.message);
            if (status != HR_OK && err != NULL)
                *err = cause;
            /* One that is refused and names no session may be anybody's; else the refused pushes of
             * another trainer would keep a dead one's session open. */
            if (status == HR_OK || bucket->session_id != NULL)
                hr_turn_renew_lease(receiver);
        }
        hr_turn_leave(receiver);
    }
    if (!kept && bucket->release != NULL)
        bucket->release(bucket->owner);
    return status;
}

void hr_receiver_bucket_unread(hr_receiver *receiver, const hr_bucket *bucket,
                               const hr_error *cause) {
    if (hr_turn_enter(receiver, "a bucket", 0, NULL) != HR_OK)
        return;
    if (hr_turn_find_open(receiver, bucket->session_id, NULL) == HR_OK)
        hr_session_note_refusal(receiver->session, bucket, cause->message);
    hr_turn_leave(receiver);
}

/* ---- prepare, commit, abort ---- */

hr_status hr_update_copy_receipt(const hr_receipt *receipt, hr_receipt **out, hr_error *err) {
    if (out == NULL)
        return HR_OK;
    hr_receipt *copy = hr_receipt_copy(receipt);
    if (copy == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receipt; ask for it again");
    *out = copy;
    return HR_OK;
}

/* The options of a call that came before, or a refusal. */
static hr_status check_same(hr_receiver *receiver, const char *id, const uint8_t *fingerprint,
                            const hr_end_options *options, hr_error *err) {
    uint8_t now_asked[HR_XXH3_SIZE];
    hr_end_fingerprint(options, receiver->shared.stream, now_asked);
    if (memcmp(now_asked, fingerprint, HR_XXH3_SIZE) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' was prepared with another manifest, version or options",
                       id);
    return HR_OK;
}

hr_status hr_update_find_published(hr_receiver *receiver, const hr_end_options *options,
                                   hr_past_session **past, hr_error *err) {
    *past = NULL;
    hr_past_session *found = options->session_id != NULL
                                 ? hr_history_find(&receiver->history, options->session_id)
                                 : NULL;
    if (found == NULL || found->state != HR_SESSION_PUBLISHED)
        return HR_OK;
    HR_TRY(check_same(receiver, found->id, found->fingerprint, options, err));
    *past = found;
    return HR_OK;
}

hr_status hr_update_prepare(hr_receiver *receiver, const hr_end_options *options, hr_error *err) {
    hr_session *session = receiver->session;
    if (session->state == HR_SESSION_PREPARED)
        return check_same(receiver, session->id, session->fingerprint, options, err);
    hr_error cause;
    hr_status status = hr_session_prepare(session, options, &cause);
    if (status == HR_OK)
        return HR_OK;
    hr_turn_roll_back(receiver, &cause);
    if (err != NULL)
        *err = cause;
    return status;
}

hr_status hr_update_publish(hr_receiver *receiver, bool keep_prepared, hr_receipt **reply,
                            hr_error *err) {
    hr_session *session = receiver->session;
    hr_error cause;
    hr_status status = hr_session_publish(session, &cause);
    if (status != HR_OK) {
        if (!keep_prepared)
            hr_turn_roll_back(receiver, &cause);
        if (err != NULL)
            *err = cause;
        return status;
    }
    if (session->weight_version[0] != '\0')
        memcpy(receiver->weight_version, session->weight_version, sizeof session->weight_version);
    const hr_receiver_sink *sink = &receiver->shared.sink;
    if (sink->published != NULL)
        sink->published(sink->self, session->receipt);
    if (reply != NULL) {
        *reply = session->reply;
        session->reply = NULL;
    }
    hr_history_put_published(&receiver->history, session);
    hr_session_free(session);
    receiver->session = NULL;
    receiver->published++;
    return HR_OK;
}

static hr_status find_and_prepare(hr_receiver *receiver, const hr_end_options *options,
                                  hr_receipt **receipt, hr_error *err) {
    hr_past_session *past;
    HR_TRY(hr_update_find_published(receiver, options, &past, err));
    if (past != NULL)
        return hr_update_copy_receipt(past->receipt, receipt, err);
    HR_TRY(hr_turn_find_session(receiver, options->session_id, err));
    bool again = receiver->session->state == HR_SESSION_PREPARED;
    HR_TRY(hr_update_prepare(receiver, options, err));
    hr_turn_renew_lease(receiver);
    hr_error cause;
    hr_status status = hr_update_copy_receipt(receiver->session->receipt, receipt, &cause);
    if (status != HR_OK && !again)
        hr_turn_roll_back(receiver, &cause);
    if (status != HR_OK && err != NULL)
        *err = cause;
    return status;
}

hr_status hr_receiver_prepare(hr_receiver *receiver, const hr_end_options *options,
                              hr_receipt **receipt, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "prepare", options->timeout_ms, err));
    hr_status status = find_and_prepare(receiver, options, receipt, err);
    hr_turn_leave(receiver);
    return status;
}

static hr_status commit(hr_receiver *receiver, const char *id, hr_receipt **receipt,
                        hr_error *err) {
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL && past->state == HR_SESSION_PUBLISHED)
        return hr_update_copy_receipt(past->receipt, receipt, err);
    HR_TRY(hr_turn_find_session(receiver, id, err));
    if (receiver->session->state != HR_SESSION_PREPARED)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' is open but not prepared; prepare it first",
                       receiver->session->id);
    hr_status status = hr_update_publish(receiver, true, receipt, err);
    hr_turn_renew_lease(receiver);
    return status;
}

hr_status hr_receiver_commit(hr_receiver *receiver, const char *session_id, hr_receipt **receipt,
                             hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "commit", 0, err));
    hr_status status = commit(receiver, session_id, receipt, err);
    hr_turn_leave(receiver);
    return status;
}

static hr_status abort_session(hr_receiver *receiver, const char *id, hr_error *err) {
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL && past->state == HR_SESSION_ROLLED_BACK)
        return HR_OK;
    if (id == NULL && hr_turn_forget_waiting(receiver, true))
        return HR_OK;
    HR_TRY(hr_turn_find_session(receiver, id, err));
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_CANCELLED, "it was aborted");
    hr_turn_roll_back(receiver, &cause);
    return HR_OK;
}

hr_status hr_receiver_abort(hr_receiver *receiver, const char *session_id, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "abort", 0, err));
    hr_status status = abort_session(receiver, session_id, err);
    hr_turn_leave(receiver);
    return status;
}

static hr_status end(hr_receiver *receiver, const hr_end_options *options, hr_receipt **receipt,
                     hr_error *err) {
    hr_past_session *past;
    HR_TRY(hr_update_find_published(receiver, options, &past, err));
    if (past != NULL)
        return hr_update_copy_receipt(past->receipt, receipt, err);
    HR_TRY(hr_turn_find_session(receiver, options->session_id, err));
    HR_TRY(hr_update_prepare(receiver, options, err));
    return hr_update_publish(receiver, false, receipt, err);
}

hr_status hr_receiver_end(hr_receiver *receiver, const hr_end_options *options,
                          hr_receipt **receipt, hr_error *err) {
    HR_TRY(hr_turn_enter(receiver, "end_weight_update", options->timeout_ms, err));
    hr_status status = end(receiver, options, receipt, err);
    hr_turn_leave(receiver);
    return status;
}
