/* The receiver: whose turn it is, which session is meant, its lease, and calls that come again.
 *
 * One call at a time changes things (its turn); it works without the mutex, which guards only whose
 * turn it is and what status_get shows, so looking never waits for a build. */
#include "base/clock.h"
#include "weights/history.h"
#include "weights/names.h"
#include "weights/receipt.h"
#include "weights/session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

enum {
    DEFAULT_LEASE_MS = 300000,
    DEFAULT_WAIT_MS = 60000,
    MAX_LEASE_MS = 7 * 24 * 3600 * 1000,
    MAX_CONFIG = 1 << 20,
    MAX_PATH = 4095,
    MAX_REGISTERED = 1 << 16
};

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

static const char *or_unnamed(const char *id) {
    return id[0] != '\0' ? id : "none";
}

const char *hr_session_state_name(hr_session_state state) {
    static const char *const names[] = {"idle", "open", "prepared", "published", "rolled_back"};
    return (unsigned)state < sizeof names / sizeof *names ? names[state] : "unknown";
}

/* ---- life ---- */

static void *system_alloc(void *self, size_t bytes) {
    (void)self;
    return malloc(bytes);
}

static void system_free(void *self, void *memory) {
    (void)self;
    free(memory);
}

static void copy_text(char *to, size_t size, const char *text) {
    size_t len = text != NULL ? strnlen(text, size - 1) : 0;
    if (len > 0)
        memcpy(to, text, len);
    to[len] = '\0';
}

hr_status hr_receiver_create(const hr_receiver_options *options, const hr_receiver_sink *sink,
                             hr_receiver **out, hr_error *err) {
    hr_memory memory = {system_alloc, system_free, NULL};
    if (options->alloc != NULL)
        memory = (hr_memory){options->alloc, options->free, options->alloc_self};
    hr_receiver *receiver = hr_memory_zeroed(&memory, 1, sizeof *receiver);
    hr_xxh3_stream *stream = receiver != NULL ? hr_xxh3_stream_create() : NULL;
    if (stream == NULL) {
        hr_memory_free(&memory, receiver);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receiver of weights");
    }
    hr_receiving *shared = &receiver->shared;
    shared->memory = memory;
    shared->sink = *sink;
    shared->stream = stream;
    shared->clock = options->now_ns != NULL ? (hr_clock){options->now_ns, options->clock_self}
                                            : hr_clock_monotonic();
    copy_text(shared->instance, sizeof shared->instance, options->instance);
    copy_text(shared->base_mode, sizeof shared->base_mode, options->base_mode);
    shared->ranks = options->ranks != 0 ? options->ranks : 1;
    shared->lease_ns =
        (options->lease_ms != 0 ? options->lease_ms : DEFAULT_LEASE_MS) * (uint64_t)1000000;
    shared->max_stash_bytes =
        options->max_stash_bytes != 0 ? options->max_stash_bytes : (uint64_t)64 << 30;
    hr_registry_init(&shared->registry, &memory);
    pthread_mutex_init(&receiver->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&receiver->turn_ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = receiver;
    return HR_OK;
}

static void roll_back(hr_receiver *receiver, const hr_error *cause) {
    hr_history_put_rolled_back(&receiver->history, receiver->session->id, cause);
    hr_session_roll_back(receiver->session);
    hr_session_free(receiver->session);
    receiver->session = NULL;
    receiver->rolled_back++;
}

void hr_receiver_destroy(hr_receiver *receiver) {
    if (receiver == NULL)
        return;
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_STOPPING, "the engine stopped");
    if (receiver->session != NULL)
        roll_back(receiver, &cause);
    hr_receiving *shared = &receiver->shared;
    while (shared->registry.first != NULL)
        hr_receiving_forget(shared, shared->registry.first);
    hr_registry_destroy(&shared->registry);
    hr_history_clear(&receiver->history);
    hr_xxh3_stream_destroy(shared->stream);
    pthread_cond_destroy(&receiver->turn_ended);
    pthread_mutex_destroy(&receiver->lock);
    hr_memory memory = shared->memory;
    hr_memory_free(&memory, receiver);
}

/* ---- turns and leases ---- */

static uint64_t now(const hr_receiver *receiver) {
    return hr_now_ns(&receiver->shared.clock);
}

static bool roll_back_expired(hr_receiver *receiver) {
    hr_session *session = receiver->session;
    if (session == NULL || now(receiver) - receiver->last_call_ns < session->lease_ns)
        return false;
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_TIMEOUT, "its lease ran out: %llu ms without a call",
                  (unsigned long long)((now(receiver) - receiver->last_call_ns) / 1000000));
    roll_back(receiver, &cause);
    return true;
}

/* Names that wait for a session which never opened: their trainer is gone. */
static bool forget_waiting(hr_receiver *receiver, bool all) {
    if (receiver->session != NULL)
        return false;
    bool some = false;
    hr_registered *next;
    for (hr_registered *r = receiver->shared.registry.first; r != NULL; r = next) {
        next = r->next;
        if (r->pending && (all || now(receiver) - r->since_ns >= receiver->shared.lease_ns)) {
            hr_receiving_forget(&receiver->shared, r);
            some = true;
        }
    }
    return some;
}

static void begin_turn(hr_receiver *receiver) {
    (void)roll_back_expired(receiver);
    (void)forget_waiting(receiver, false);
}

/* Waits, at most so long, until no other call is at work. */
static hr_status enter(hr_receiver *receiver, const char *call, uint64_t timeout_ms,
                       hr_error *err) {
    if (timeout_ms == 0)
        timeout_ms = DEFAULT_WAIT_MS;
    if (timeout_ms > MAX_LEASE_MS)
        timeout_ms = MAX_LEASE_MS;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
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
    }
    return shown;
}

static void leave(hr_receiver *receiver) {
    pthread_mutex_lock(&receiver->lock);
    receiver->shown = what_to_show(receiver);
    receiver->shown_last_call_ns = receiver->last_call_ns;
    receiver->turn = NULL;
    pthread_cond_signal(&receiver->turn_ended);
    pthread_mutex_unlock(&receiver->lock);
}

/* A call of the session's trainer: it lives. At the call's end, for a build may take long. */
static void renew_lease(hr_receiver *receiver) {
    receiver->last_call_ns = now(receiver);
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
    (void)forget_waiting(receiver, false);
    leave(receiver);
    return expired;
}

/* ---- which session is meant ---- */

static hr_status fail_past(const hr_past_session *past, hr_error *err) {
    if (past->state == HR_SESSION_PUBLISHED)
        return hr_fail(err, HR_ERR_SESSION, "the session '%s' is published already", past->id);
    return hr_fail(err, HR_ERR_SESSION, "the session '%s' was rolled back: %s", past->id,
                   past->cause.message);
}

/* The open or prepared session of this id (NULL: whichever). */
static hr_status find_session(hr_receiver *receiver, const char *id, hr_error *err) {
    const hr_session *session = receiver->session;
    if (session != NULL && (id == NULL || strcmp(session->id, id) == 0))
        return HR_OK;
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL)
        return fail_past(past, err);
    if (session == NULL)
        return hr_fail(err, HR_ERR_SESSION,
                       "no weight update session is open%s%.64s; begin one first",
                       id != NULL ? ", nor is one known as " : "", id != NULL ? id : "");
    return hr_fail(err, HR_ERR_SESSION, "the session '%.64s' is not known; '%s' is open", id,
                   session->id);
}

static hr_status find_open(hr_receiver *receiver, const char *id, hr_error *err) {
    HR_TRY(find_session(receiver, id, err));
    if (receiver->session->state != HR_SESSION_OPEN)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' is prepared and takes no more tensors; commit or abort it",
                       receiver->session->id);
    return HR_OK;
}

static hr_status fail_open(const hr_receiver *receiver, hr_error *err) {
    return hr_fail(
        err, HR_ERR_SESSION,
        "a weight update session is already open: '%s' (%s, last call %llu ms ago, lease "
        "%llu ms); end or abort it first",
        receiver->session->id, hr_session_state_name(receiver->session->state),
        (unsigned long long)((now(receiver) - receiver->last_call_ns) / 1000000),
        (unsigned long long)(receiver->session->lease_ns / 1000000));
}

/* ---- control plane ---- */

static hr_status check_registration(const hr_registration *registration, hr_error *err) {
    HR_TRY(hr_adapter_name_check(registration->name, err));
    if (registration->config == NULL || registration->config_len == 0)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "the adapter '%s' has no config",
                       registration->name);
    if (registration->config_len > MAX_CONFIG)
        return hr_fail(err, HR_ERR_LIMIT, "the config of the adapter '%s' is over %d bytes",
                       registration->name, MAX_CONFIG);
    if (registration->path != NULL && strnlen(registration->path, MAX_PATH + 1) > MAX_PATH)
        return hr_fail(err, HR_ERR_LIMIT, "the path of the adapter '%s' is over %d bytes",
                       registration->name, MAX_PATH);
    return HR_OK;
}

static hr_status check_replaceable(const hr_receiver *receiver, const hr_registration *registration,
                                   const hr_registered *old, hr_error *err) {
    if (old == NULL && receiver->shared.registry.n >= MAX_REGISTERED)
        return hr_fail(err, HR_ERR_LIMIT, "%d adapters are registered; unload some first",
                       MAX_REGISTERED);
    if (old == NULL)
        return HR_OK;
    if (registration->defer_publish)
        return hr_fail(
            err, HR_ERR_ADAPTER_EXISTS,
            "the adapter '%s' is already registered, and defer_publish needs a new name; "
            "choose another",
            registration->name);
    if (old->pending)
        return hr_fail(err, HR_ERR_BUSY,
                       "the adapter '%s' waits for publication; end or abort its session first",
                       registration->name);
    if (old->tensors > 0)
        return hr_fail(err, HR_ERR_BUSY,
                       "the session '%s' holds tensors of the adapter '%s'; end or abort it first",
                       receiver->session->id, registration->name);
    if (registration->refuse_existing && old->published)
        return hr_fail(err, HR_ERR_ADAPTER_EXISTS,
                       "the adapter '%s' is already loaded; unload it first, or replace it with "
                       "upsert",
                       registration->name);
    return HR_OK;
}

/* A registration takes the place of an older one of its name, which is kept until settled. */
typedef struct change {
    hr_registered *added, *replaced;
} change;

static hr_status register_adapter(hr_receiver *receiver, const hr_registration *registration,
                                  change *out, hr_error *err) {
    hr_receiving *shared = &receiver->shared;
    HR_TRY(check_registration(registration, err));
    hr_registered *old =
        hr_registry_find(&shared->registry, registration->name, strlen(registration->name));
    HR_TRY(check_replaceable(receiver, registration, old, err));
    hr_registered *added = hr_registered_create(&shared->memory, registration);
    if (added == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to register the adapter '%s'",
                       registration->name);
    hr_status status = shared->sink.register_adapter(shared->sink.self, &added->registration, err);
    if (status != HR_OK) {
        hr_registered_destroy(&shared->memory, added);
        return status;
    }
    added->since_ns = now(receiver);
    added->pending = registration->defer_publish;
    added->published = old != NULL && old->published;
    if (old != NULL)
        hr_registry_take(&shared->registry, old);
    hr_registry_put(&shared->registry, added);
    *out = (change){added, old};
    return HR_OK;
}

static void settle_registration(hr_receiver *receiver, const change *made) {
    hr_registered_destroy(&receiver->shared.memory, made->replaced);
}

static void undo_registration(hr_receiver *receiver, const change *made) {
    if (made->added == NULL)
        return;
    if (made->replaced == NULL) {
        hr_receiving_forget(&receiver->shared, made->added);
        return;
    }
    hr_registry_take(&receiver->shared.registry, made->added);
    hr_registered_destroy(&receiver->shared.memory, made->added);
    hr_registry_put(&receiver->shared.registry, made->replaced);
}

hr_status hr_receiver_register(hr_receiver *receiver, const hr_registration *registration,
                               bool *pending, hr_error *err) {
    HR_TRY(enter(receiver, "register_lora_adapter", 0, err));
    change made;
    hr_status status = register_adapter(receiver, registration, &made, err);
    if (status == HR_OK) {
        settle_registration(receiver, &made);
        if (pending != NULL)
            *pending = made.added->pending;
    }
    leave(receiver);
    return status;
}

static hr_status unregister(hr_receiver *receiver, const char *name, hr_error *err) {
    hr_registered *found = hr_registry_find(&receiver->shared.registry, name, strlen(name));
    if (found == NULL)
        return HR_OK;
    if (found->pending)
        return hr_fail(err, HR_ERR_BUSY,
                       "the adapter '%s' waits for publication; end or abort its session first",
                       name);
    if (found->tensors > 0)
        return hr_fail(err, HR_ERR_BUSY,
                       "the session '%s' holds tensors of the adapter '%s'; end or abort it first",
                       receiver->session->id, name);
    hr_receiving_forget(&receiver->shared, found);
    return HR_OK;
}

hr_status hr_receiver_unregister(hr_receiver *receiver, const char *name, hr_error *err) {
    HR_TRY(enter(receiver, "unload_lora_adapter", 0, err));
    hr_status status = unregister(receiver, name, err);
    leave(receiver);
    return status;
}

static hr_status set_version(hr_receiver *receiver, const char *weight_version,
                             bool abort_all_requests, hr_error *err) {
    HR_TRY(hr_weight_version_check(weight_version, err));
    if (receiver->session != NULL)
        return fail_open(receiver, err);
    if (strcmp(receiver->weight_version, weight_version) == 0)
        return HR_OK;
    hr_publication publication = {.weight_version = weight_version,
                                  .abort_all_requests = abort_all_requests,
                                  .timeout_ms = DEFAULT_WAIT_MS};
    const hr_receiver_sink *sink = &receiver->shared.sink;
    HR_TRY(sink->publish(sink->self, &publication, err));
    memcpy(receiver->weight_version, weight_version, strlen(weight_version) + 1);
    return HR_OK;
}

hr_status hr_receiver_set_version(hr_receiver *receiver, const char *weight_version,
                                  bool abort_all_requests, hr_error *err) {
    HR_TRY(enter(receiver, "update_weight_version", 0, err));
    hr_status status = set_version(receiver, weight_version, abort_all_requests, err);
    leave(receiver);
    return status;
}

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

static hr_status begin(hr_receiver *receiver, const hr_session_options *options, hr_error *err) {
    char id[HR_SESSION_ID_SIZE] = "";
    if (options->session_id != NULL)
        HR_TRY(hr_session_id_check(options->session_id, err));
    if (options->lease_ms > MAX_LEASE_MS)
        return hr_fail(err, HR_ERR_LIMIT, "a lease may last a week, not %llu ms",
                       (unsigned long long)options->lease_ms);
    if (is_begun_again(receiver, options))
        return HR_OK;
    if (receiver->session != NULL)
        return fail_open(receiver, err);
    if (options->session_id != NULL) {
        const hr_past_session *past = hr_history_find(&receiver->history, options->session_id);
        if (past != NULL)
            return fail_past(past, err);
        memcpy(id, options->session_id, strlen(options->session_id) + 1);
    } else {
        HR_TRY(make_id(id, err));
    }
    return hr_session_open(&receiver->shared, id, options, &receiver->session, err);
}

hr_status hr_receiver_begin(hr_receiver *receiver, const hr_session_options *options,
                            char session_id[HR_SESSION_ID_SIZE], hr_error *err) {
    HR_TRY(enter(receiver, "begin_weight_update", options->timeout_ms, err));
    hr_status status = begin(receiver, options, err);
    if (status == HR_OK) {
        renew_lease(receiver);
        memcpy(session_id, receiver->session->id, HR_SESSION_ID_SIZE);
    }
    leave(receiver);
    return status;
}

/* ---- buckets ---- */

hr_status hr_receiver_bucket(hr_receiver *receiver, const hr_bucket *bucket, hr_error *err) {
    bool kept = false;
    hr_status status = enter(receiver, "a bucket", 0, err);
    if (status == HR_OK) {
        status = find_open(receiver, bucket->session_id, err);
        if (status == HR_OK) {
            status = hr_session_take(receiver->session, bucket, &kept, err);
            renew_lease(receiver);
        }
        leave(receiver);
    }
    if (!kept && bucket->release != NULL)
        bucket->release(bucket->owner);
    return status;
}

/* ---- prepare, commit, abort ---- */

static hr_status copy_receipt(const hr_receipt *receipt, hr_receipt **out, hr_error *err) {
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

/* Published under this id already, by a call like this one: *past, else NULL. */
static hr_status find_published(hr_receiver *receiver, const hr_end_options *options,
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

static hr_status prepare(hr_receiver *receiver, const hr_end_options *options, hr_error *err) {
    hr_session *session = receiver->session;
    if (session->state == HR_SESSION_PREPARED)
        return check_same(receiver, session->id, session->fingerprint, options, err);
    hr_error cause;
    hr_status status = hr_session_prepare(session, options, &cause);
    if (status == HR_OK)
        return HR_OK;
    roll_back(receiver, &cause);
    if (err != NULL)
        *err = cause;
    return status;
}

/* Whoever gives reply takes the receipt. */
static hr_status publish(hr_receiver *receiver, bool keep_after_timeout, hr_receipt **reply,
                         hr_error *err) {
    hr_session *session = receiver->session;
    hr_error cause;
    hr_status status = hr_session_publish(session, &cause);
    if (status != HR_OK) {
        if (status != HR_ERR_TIMEOUT || !keep_after_timeout)
            roll_back(receiver, &cause);
        if (err != NULL)
            *err = cause;
        return status;
    }
    if (session->weight_version[0] != '\0')
        memcpy(receiver->weight_version, session->weight_version, sizeof session->weight_version);
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
    HR_TRY(find_published(receiver, options, &past, err));
    if (past != NULL)
        return copy_receipt(past->receipt, receipt, err);
    HR_TRY(find_session(receiver, options->session_id, err));
    bool again = receiver->session->state == HR_SESSION_PREPARED;
    HR_TRY(prepare(receiver, options, err));
    renew_lease(receiver);
    hr_error cause;
    hr_status status = copy_receipt(receiver->session->receipt, receipt, &cause);
    if (status != HR_OK && !again)
        roll_back(receiver, &cause);
    if (status != HR_OK && err != NULL)
        *err = cause;
    return status;
}

hr_status hr_receiver_prepare(hr_receiver *receiver, const hr_end_options *options,
                              hr_receipt **receipt, hr_error *err) {
    HR_TRY(enter(receiver, "prepare", options->timeout_ms, err));
    hr_status status = find_and_prepare(receiver, options, receipt, err);
    leave(receiver);
    return status;
}

static hr_status commit(hr_receiver *receiver, const char *id, hr_receipt **receipt,
                        hr_error *err) {
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL && past->state == HR_SESSION_PUBLISHED)
        return copy_receipt(past->receipt, receipt, err);
    HR_TRY(find_session(receiver, id, err));
    if (receiver->session->state != HR_SESSION_PREPARED)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' is open but not prepared; prepare it first",
                       receiver->session->id);
    hr_status status = publish(receiver, true, receipt, err);
    renew_lease(receiver);
    return status;
}

hr_status hr_receiver_commit(hr_receiver *receiver, const char *session_id, hr_receipt **receipt,
                             hr_error *err) {
    HR_TRY(enter(receiver, "commit", 0, err));
    hr_status status = commit(receiver, session_id, receipt, err);
    leave(receiver);
    return status;
}

static hr_status abort_session(hr_receiver *receiver, const char *id, hr_error *err) {
    const hr_past_session *past = id != NULL ? hr_history_find(&receiver->history, id) : NULL;
    if (past != NULL && past->state == HR_SESSION_ROLLED_BACK)
        return HR_OK;
    if (id == NULL && forget_waiting(receiver, true))
        return HR_OK;
    HR_TRY(find_session(receiver, id, err));
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_CANCELLED, "it was aborted");
    roll_back(receiver, &cause);
    return HR_OK;
}

hr_status hr_receiver_abort(hr_receiver *receiver, const char *session_id, hr_error *err) {
    HR_TRY(enter(receiver, "abort", 0, err));
    hr_status status = abort_session(receiver, session_id, err);
    leave(receiver);
    return status;
}

static hr_status end(hr_receiver *receiver, const hr_end_options *options, hr_receipt **receipt,
                     hr_error *err) {
    hr_past_session *past;
    HR_TRY(find_published(receiver, options, &past, err));
    if (past != NULL)
        return copy_receipt(past->receipt, receipt, err);
    HR_TRY(find_session(receiver, options->session_id, err));
    HR_TRY(prepare(receiver, options, err));
    return publish(receiver, false, receipt, err);
}

hr_status hr_receiver_end(hr_receiver *receiver, const hr_end_options *options,
                          hr_receipt **receipt, hr_error *err) {
    HR_TRY(enter(receiver, "end_weight_update", options->timeout_ms, err));
    hr_status status = end(receiver, options, receipt, err);
    leave(receiver);
    return status;
}

/* ---- a bucket as a session of its own ---- */

/* The adapters of a bucket are what its session declares, so that names which wait for another one
 * are left alone. */
static hr_status declare_names(hr_receiver *receiver, const hr_bucket *bucket, const char ***names,
                               size_t *n, hr_error *err) {
    const hr_registry *registry = &receiver->shared.registry;
    const char **list = hr_memory_array(&receiver->shared.memory, registry->n, sizeof *list);
    if (list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of adapters");
    size_t count = 0;
    const hr_registered *last = NULL;
    for (size_t i = 0; i < bucket->n; i++) {
        hr_wire_name name;
        if (hr_wire_name_split(bucket->tensors[i].name, bucket->adapter, &name, NULL) != HR_OK ||
            name.adapter == NULL)
            continue; /* what is wrong with it is said when it is taken */
        if (last != NULL && hr_registered_is(last, name.adapter, name.adapter_len))
            continue; /* tensors of one adapter come together */
        const hr_registered *r = hr_registry_find(registry, name.adapter, name.adapter_len);
        last = r;
        size_t k = 0;
        while (r != NULL && k < count && list[k] != r->registration.name)
            k++;
        if (r != NULL && k == count)
            list[count++] = r->registration.name;
    }
    *names = list;
    *n = count;
    return HR_OK;
}

static bool wants_base_sha256(const hr_end_options *options) {
    const hr_manifest *manifest = options->manifest;
    for (size_t i = 0; manifest != NULL && i < manifest->n; i++)
        if (manifest->entries[i].sha256 != NULL && manifest->entries[i].name != NULL &&
            strchr(manifest->entries[i].name, ':') == NULL)
            return true;
    return options->audit;
}

static hr_status stream_bucket(hr_receiver *receiver, const hr_registration *registration,
                               const hr_bucket *bucket, const hr_end_options *options,
                               const char *const *names, size_t n_names, bool *kept,
                               hr_receipt **receipt, hr_error *err) {
    hr_session_options session = {.session_id = bucket->session_id,
                                  .sync_base = registration == NULL,
                                  .adapters = names,
                                  .n_adapters = n_names,
                                  .timeout_ms = options->timeout_ms,
                                  .audit = wants_base_sha256(options)};
    HR_TRY(begin(receiver, &session, err));
    hr_error cause;
    hr_status status = hr_session_take(receiver->session, bucket, kept, &cause);
    if (status != HR_OK) {
        roll_back(receiver, &cause);
        if (err != NULL)
            *err = cause;
        return status;
    }
    HR_TRY(prepare(receiver, options, err));
    return publish(receiver, false, receipt, err);
}

/* The bucket was applied under this id: the receipt again, when it is the same bucket. */
static hr_status apply_again(hr_receiver *receiver, const hr_bucket *bucket,
                             const hr_past_session *past, hr_receipt **receipt, hr_error *err) {
    hr_receiving *shared = &receiver->shared;
    hr_parcel *parcel = NULL;
    uint8_t identity[HR_XXH3_SIZE];
    HR_TRY(hr_parcel_create(&shared->memory, &shared->registry, bucket->tensors, bucket->n,
                            bucket->adapter, shared->max_stash_bytes, &parcel, err));
    hr_parcel_digest(parcel);
    hr_parcel_identity(parcel, shared->stream, identity);
    hr_parcel_destroy(&shared->memory, parcel);
    if (memcmp(identity, past->identity, sizeof identity) != 0)
        return hr_fail(err, HR_ERR_SESSION,
                       "the session '%s' was published with other tensors; use a new session_id",
                       past->id);
    return copy_receipt(past->receipt, receipt, err);
}

static hr_status apply(hr_receiver *receiver, const hr_registration *registration,
                       const hr_bucket *bucket, const hr_end_options *options, bool *kept,
                       hr_receipt **receipt, hr_error *err) {
    hr_past_session *past;
    hr_end_options as_bucket = *options;
    as_bucket.session_id = bucket->session_id;
    HR_TRY(find_published(receiver, &as_bucket, &past, err));
    if (past != NULL && bucket->tensors != NULL)
        return apply_again(receiver, bucket, past, receipt, err);
    if (receiver->session != NULL)
        return fail_open(receiver, err);
    if (bucket->n == 0 || bucket->tensors == NULL)
        return hr_fail(err, HR_ERR_INVALID, "a load without tensors; send at least one");
    if (registration != NULL && registration->defer_publish)
        return hr_fail(
            err, HR_ERR_INVALID,
            "a load publishes the adapter '%.256s' at once; defer_publish is for sessions",
            registration->name);
    change made = {0};
    if (registration != NULL)
        HR_TRY(register_adapter(receiver, registration, &made, err));
    const char **names = NULL;
    size_t n_names = 0;
    hr_status status;
    if (registration != NULL) {
        status = stream_bucket(receiver, registration, bucket, options, &registration->name, 1,
                               kept, receipt, err);
    } else {
        status = declare_names(receiver, bucket, &names, &n_names, err);
        if (status == HR_OK)
            status =
                stream_bucket(receiver, NULL, bucket, options, names, n_names, kept, receipt, err);
        hr_memory_free(&receiver->shared.memory, names);
    }
    if (status == HR_OK)
        settle_registration(receiver, &made);
    else
        undo_registration(receiver, &made);
    return status;
}

hr_status hr_receiver_apply(hr_receiver *receiver, const hr_registration *registration,
                            const hr_bucket *bucket, const hr_end_options *options,
                            hr_receipt **receipt, hr_error *err) {
    bool kept = false;
    hr_status status = enter(receiver, "a load call", options->timeout_ms, err);
    if (status == HR_OK) {
        status = apply(receiver, registration, bucket, options, &kept, receipt, err);
        leave(receiver);
    }
    if (!kept && bucket->release != NULL)
        bucket->release(bucket->owner);
    return status;
}

/* ---- looking ---- */

void hr_receiver_status_get(hr_receiver *receiver, hr_receiver_status *out) {
    pthread_mutex_lock(&receiver->lock);
    *out = receiver->shown;
    uint64_t last_call_ns = receiver->shown_last_call_ns;
    pthread_mutex_unlock(&receiver->lock);
    uint64_t now_ns = now(receiver);
    if (out->state != HR_SESSION_IDLE && now_ns > last_call_ns)
        out->idle_ms = (now_ns - last_call_ns) / 1000000;
    hr_registry_count(&receiver->shared.registry, &out->registered, &out->pending);
}

bool hr_receiver_is_pending(hr_receiver *receiver, const char *name) {
    return hr_registry_is_pending(&receiver->shared.registry, name);
}
