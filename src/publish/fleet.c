/* All engines of a publisher as one. */
#include "publish/fleet.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LOST_TRIES = 4, FIRST_PAUSE_MS = 20, LONGEST_PAUSE_MS = 1000, LONGEST_WAIT_MS = 100 };

static void sleep_really(void *self, uint64_t ms) {
    (void)self;
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

hr_status hr_fleet_init(hr_fleet *fleet, const char *const *urls, size_t n, uint64_t timeout_ms,
                        hr_error *err) {
    *fleet = (hr_fleet){
        .clock = hr_clock_monotonic(), .sleep_ms = sleep_really, .timeout_ms = timeout_ms};
    fleet->engines = calloc(n, sizeof *fleet->engines);
    if (fleet->engines == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
    fleet->n = n;
    size_t first = 0;
    for (size_t i = 0; i < n; i++) {
        fleet->engines[i].url = strdup(urls[i]);
        if (fleet->engines[i].url == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
        first = strcmp(urls[i], urls[first]) < 0 ? i : first;
    }
    fleet->engines[first].first = true;
    return HR_OK;
}

void hr_fleet_reset(hr_fleet *fleet) {
    for (size_t i = 0; i < fleet->n; i++) {
        hr_fleet_engine *e = &fleet->engines[i];
        hr_engine_receipt_clear(&e->receipt);
        *e =
            (hr_fleet_engine){.url = e->url, .first = e->first, .known = true, .paused = e->paused};
        e->serves = "unknown";
    }
}

void hr_fleet_free(hr_fleet *fleet) {
    for (size_t i = 0; i < fleet->n; i++) {
        hr_engine_receipt_clear(&fleet->engines[i].receipt);
        free(fleet->engines[i].url);
    }
    free(fleet->engines);
    if (fleet->transport.close != NULL)
        fleet->transport.close(fleet->transport.self);
    *fleet = (hr_fleet){0};
}

/* ---- what an answer means ---- */

/* The state a stage leaves when it succeeds. */
static void advance(hr_fleet_engine *e, hr_stage stage) {
    e->known = true;
    e->error[0] = '\0';
    switch (stage) {
    case HR_STAGE_PAUSE:
        e->paused = true;
        break;
    case HR_STAGE_CONTINUE:
        e->paused = false;
        break;
    case HR_STAGE_BEGIN:
        e->state = HR_SESSION_OPEN;
        break;
    case HR_STAGE_PREPARE:
        e->state = HR_SESSION_PREPARED;
        break;
    case HR_STAGE_COMMIT:
        e->state = HR_SESSION_PUBLISHED;
        break;
    case HR_STAGE_ABORT:
        e->state = HR_SESSION_ROLLED_BACK;
        break;
    default:
        break;
    }
}

static void take_answer(hr_fleet_engine *e, hr_stage stage, hr_stage_answer *answer) {
    if (answer->has_receipt) {
        hr_engine_receipt_clear(&e->receipt);
        e->receipt = answer->receipt;
        e->has_receipt = true;
    }
    e->unservable = e->unservable || answer->unservable;
    e->touched = e->touched || (stage == HR_STAGE_BUCKET && !answer->untouched);
    if (answer->status == HR_OK) {
        advance(e, stage);
        return;
    }
    e->known = !answer->lost;
    e->paused = e->paused || (stage == HR_STAGE_PAUSE && answer->lost); /* it may well be */
    if (stage == HR_STAGE_ABORT && (!answer->lost || e->error[0] != '\0'))
        return; /* nothing was open there, or what came first says more */
    snprintf(e->error, sizeof e->error, "%s: %.480s", hr_stage_name(stage), answer->err.message);
}

typedef struct stage_run {
    uint32_t *targets; /* engines that still have to answer */
    size_t n;
    hr_stage_answer *answers;     /* by target */
    hr_error *failures;           /* by engine; HR_OK: none */
    unsigned lost;                /* tries of which an answer was lost */
    bool time_left, time_to_wait; /* for another call; for one that waits for another session */
} stage_run;

/* Refusals that no further call changes. An engine that says TIMEOUT has waited for its requests as
 * long as it may: another call would have no time left to hear that again. */
static bool is_final(hr_status status) {
    switch (status) {
    case HR_ERR_BUSY:
    case HR_ERR_PEER:
    case HR_ERR_NO_MEMORY:
    case HR_ERR_INTERNAL:
    case HR_ERR_IO:
        return false;
    default:
        return true;
    }
}

/* Engines say it in these words, SGLang's with another status. */
bool hr_fleet_is_taken(const hr_error *err) {
    return err->status != HR_OK && (strstr(err->message, "already open") != NULL ||
                                    strstr(err->message, "holds tensors of the adapter") != NULL);
}

static bool again(hr_fleet_retry retry, const hr_stage_answer *answer, const stage_run *run) {
    if (answer->status == HR_OK || answer->status == HR_ERR_CANCELLED)
        return false;
    if (answer->lost ? !run->time_left : !run->time_to_wait)
        return false;
    switch (retry) {
    case HR_RETRY_LOST:
        return answer->lost && run->lost < LOST_TRIES;
    case HR_RETRY_BEGIN:
        return answer->lost ? run->lost < LOST_TRIES : hr_fleet_is_taken(&answer->err);
    case HR_RETRY_WAIT:
        return !answer->lost && hr_fleet_is_taken(&answer->err);
    case HR_RETRY_COMMIT:
        return answer->lost || !is_final(answer->status);
    case HR_RETRY_ALL:
        return true;
    default:
        return false;
    }
}

/* ---- a stage ---- */

/* Reads all answers; keeps those engines that are asked again. */
static void sort_answers(hr_fleet *fleet, const hr_stage_request *request, hr_fleet_retry retry,
                         stage_run *run) {
    size_t kept = 0;
    bool lost = false;
    for (size_t i = 0; i < run->n; i++)
        lost = lost || run->answers[i].lost;
    run->lost += lost;
    for (size_t i = 0; i < run->n; i++) {
        hr_fleet_engine *e = &fleet->engines[run->targets[i]];
        hr_stage_answer *answer = &run->answers[i];
        take_answer(e, request->stage, answer);
        run->failures[run->targets[i]] = answer->status == HR_OK ? (hr_error){0} : answer->err;
        if (again(retry, answer, run)) {
            e->retries++;
            run->targets[kept++] = run->targets[i];
        }
    }
    run->n = kept;
}

static void run_tries(hr_fleet *fleet, const hr_stage_request *request, hr_fleet_retry retry,
                      stage_run *run) {
    bool waits = retry == HR_RETRY_BEGIN || retry == HR_RETRY_WAIT;
    hr_deadline deadline = hr_deadline_after_ms(&fleet->clock, fleet->timeout_ms);
    hr_deadline wait =
        !waits ? deadline
               : hr_deadline_after_ms(&fleet->clock, HR_FLEET_WAIT_MS(fleet->timeout_ms));
    uint64_t pause_ms = FIRST_PAUSE_MS, longest_ms = waits ? LONGEST_WAIT_MS : LONGEST_PAUSE_MS;
    while (run->n > 0) {
        uint64_t now = hr_now_ns(&fleet->clock);
        hr_deadline end = now < deadline ? deadline : wait;
        hr_stage_request attempt = *request;
        attempt.timeout_ms = now < end ? (end - now) / 1000000 + 1 : 1;
        fleet->transport.attempt(fleet->transport.self, &attempt, run->targets, run->n,
                                 run->answers);
        uint64_t next = hr_now_ns(&fleet->clock) + pause_ms * 1000000;
        run->time_left = next < deadline;
        run->time_to_wait = next < wait;
        sort_answers(fleet, request, retry, run);
        if (run->n > 0)
            fleet->sleep_ms(fleet->sleep_self, pause_ms);
        pause_ms = 2 * pause_ms < longest_ms ? 2 * pause_ms : longest_ms;
    }
}

hr_status hr_fleet_run(hr_fleet *fleet, const hr_stage_request *request, hr_fleet_retry retry,
                       bool (*want)(const hr_fleet_engine *engine), hr_error *err) {
    hr_status status = HR_OK;
    stage_run run = {.targets = calloc(fleet->n, sizeof *run.targets),
                     .answers = calloc(fleet->n, sizeof *run.answers),
                     .failures = calloc(fleet->n, sizeof *run.failures)};
    if (run.targets == NULL || run.answers == NULL || run.failures == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "%s: no memory for %zu engines",
                         hr_stage_name(request->stage), fleet->n);
        goto out;
    }
    for (size_t i = 0; i < fleet->n; i++) {
        if (want == NULL || want(&fleet->engines[i]))
            run.targets[run.n++] = (uint32_t)i;
    }
    run_tries(fleet, request, retry, &run);
    for (size_t i = 0; i < fleet->n && status == HR_OK; i++) {
        if (run.failures[i].status == HR_ERR_CANCELLED) /* which is no engine's doing */
            status = hr_fail(err, HR_ERR_CANCELLED, "the push was cancelled by its caller (at %s)",
                             hr_stage_name(request->stage));
        else if (run.failures[i].status != HR_OK)
            status =
                hr_fail(err, run.failures[i].status, "engine %s, %s: %.800s", fleet->engines[i].url,
                        hr_stage_name(request->stage), run.failures[i].message);
    }
out:
    free(run.targets);
    free(run.answers);
    free(run.failures);
    return status;
}
