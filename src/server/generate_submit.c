/* Handing a job over to the engine. Adapters that gave way are read back first, and may give way
 * again before they are leased. */
#include "server/generate_job_parts.h"

#define MAX_RELOADS 8 /* rounds in which load calls drop the adapters that were just read back */

static bool is_evicted(hr_job *j, const char *name) {
    return name != NULL &&
           hr_engine_adapter_state(j->server->options.engine, name) == HR_ADAPTER_EVICTED;
}

/* After a refusal for item i: true when its adapter has only given way to others meanwhile; it may
 * be back already, for another request. */
static bool can_reload(hr_job *j, size_t i, hr_status status) {
    const char *name = j->request.items[i].lora_name;
    return status == HR_ERR_ADAPTER_UNKNOWN && name != NULL &&
           hr_engine_adapter_state(j->server->options.engine, name) != HR_ADAPTER_UNKNOWN &&
           j->reloads++ < MAX_RELOADS;
}

/* The whole batch, before anything of it runs. False: an adapter must be read back first. */
static bool check_sequences(hr_job *j, hr_status *status, hr_error *err) {
    for (size_t i = 0; i < j->request.n_items; i++) {
        hr_request_params params = hr_job_engine_params(&j->sequences[i]);
        *status = hr_engine_check(j->server->options.engine, &params, err);
        if (*status == HR_OK)
            continue;
        if (can_reload(j, i, *status))
            return false;
        if (j->request.n_prompts > 1)
            hr_fail_context(err, *status, "prompt %zu", i / j->request.n_samples);
        return true;
    }
    return true;
}

/* What is decided about sequence i before it goes to the engine. */
typedef enum fate { FATE_SUBMIT, FATE_SKIP, FATE_GIVE_UP } fate;

static fate enter(hr_job *j, size_t i, const char *weight_version) {
    hr_sequence *s = &j->sequences[i];
    fate decided = FATE_SUBMIT;
    pthread_mutex_lock(&j->lock);
    if (j->gone || j->failed) {
        decided = FATE_GIVE_UP;
    } else if (s->abort_asked) {
        hr_generate_output_abort(
            &s->output, j->abort_message[0] != '\0' ? j->abort_message : "Abort in waiting queue",
            weight_version);
        s->dirty = true;
        decided = FATE_SKIP;
    } else {
        s->submitted = true;
        j->n_busy++;
    }
    pthread_mutex_unlock(&j->lock);
    return decided;
}

static void take_back(hr_job *j, size_t i) {
    pthread_mutex_lock(&j->lock);
    j->sequences[i].submitted = false;
    j->n_busy--;
    pthread_mutex_unlock(&j->lock);
}

/* Somebody asked for an abort while the sequence was on its way. */
static void abort_if_asked(hr_job *j, size_t i) {
    pthread_mutex_lock(&j->lock);
    bool asked = j->gone || j->sequences[i].abort_asked;
    pthread_mutex_unlock(&j->lock);
    if (asked)
        hr_engine_abort(j->server->options.engine, j->request.items[i].rid);
}

/* Hands every sequence to the engine, from where the last call stopped; when one is refused those
 * before it are aborted. False: an adapter must be read back before it can go on. */
static bool submit_all(hr_job *j) {
    hr_engine *engine = j->server->options.engine;
    char version[HR_WEIGHT_VERSION_SIZE];
    hr_error err = {.status = HR_ERR_CANCELLED};
    hr_status status = HR_OK;
    if (!j->checked && !check_sequences(j, &status, &err))
        return false;
    j->checked = true;
    hr_engine_weight_version(engine, version, sizeof version);
    for (; status == HR_OK && j->next_item < j->request.n_items; j->next_item++) {
        size_t i = j->next_item;
        hr_request_params params = hr_job_engine_params(&j->sequences[i]);
        fate decided = enter(j, i, version);
        if (decided == FATE_SKIP)
            continue;
        if (decided == FATE_GIVE_UP) {
            status = hr_fail(&err, HR_ERR_CANCELLED, "the client has gone");
            break;
        }
        status = hr_engine_submit(engine, &params, &err);
        if (status == HR_OK) {
            abort_if_asked(j, i);
            continue;
        }
        take_back(j, i);
        if (can_reload(j, i, status))
            return false;
    }
    if (status != HR_OK) {
        hr_job_fail(j, &err);
        hr_job_abort_sequences(j);
    }
    return true;
}

void hr_job_end_submitting(hr_job *j) {
    pthread_mutex_lock(&j->lock);
    j->submitting = false;
    pthread_mutex_unlock(&j->lock);
    if (j->request.stream)
        hr_exchange_wake(j->exchange);
    pthread_mutex_lock(&j->lock);
    hr_job_leave(j);
}

static hr_status reload_adapters(hr_job *j, hr_error *err) {
    for (size_t i = 0; i < j->n_lora_names; i++) {
        if (is_evicted(j, j->lora_names[i]))
            HR_TRY(hr_engine_ensure_adapter(j->server->options.engine, j->lora_names[i], err));
    }
    return HR_OK;
}

/* Reads back what gave way and submits. False: some of it gave way again before it was leased. */
static bool reload_and_submit(hr_job *j) {
    hr_error err;
    if (reload_adapters(j, &err) == HR_OK)
        return submit_all(j);
    hr_job_fail(j, &err);
    hr_job_abort_sequences(j);
    return true;
}

/* On the one thread for it: requests for more adapters than may be loaded, served side by side,
 * would push out each other's for ever. */
static void run_reload(void *arg) {
    hr_job *j = arg;
    while (!reload_and_submit(j)) {
    }
    hr_job_end_submitting(j);
}

static bool any_evicted(hr_job *j) {
    for (size_t i = 0; i < j->n_lora_names; i++) {
        if (is_evicted(j, j->lora_names[i]))
            return true;
    }
    return false;
}

bool hr_job_submit(hr_job *j) {
    hr_error err;
    if (!any_evicted(j) && submit_all(j)) {
        hr_job_end_submitting(j);
        return true;
    }
    if (hr_worker_submit(j->server->recalls, run_reload, j, &err) == HR_OK)
        return false;
    hr_job_fail(j, &err);
    hr_job_abort_sequences(j);
    hr_job_end_submitting(j);
    return true;
}
