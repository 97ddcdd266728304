/* How requests end, and what is said of them then: every way out of the scheduler leads through
 * here. */
#include "engine/scheduler_parts.h"

/* The last span ends here; one without tokens is left out. */
static void report_versions(const hr_scheduler *s, hr_request *r, hr_finish *f) {
    f->spans = r->spans;
    f->n_spans = r->n_spans;
    if (f->n_spans > 0 && r->spans[f->n_spans - 1].start == f->completion_tokens)
        f->n_spans--;
    if (f->n_spans > 0)
        r->spans[f->n_spans - 1].end = f->completion_tokens;
    uint32_t last = f->n_spans > 0 ? (uint32_t)f->n_spans : r->n_spans;
    f->weight_version = last > 0 ? r->labels[last - 1]->text : s->label->text;
}

void hr_schedule_end(hr_scheduler *s, hr_request *r, hr_finish f) {
    uint64_t now = hr_now_ns(&s->c.clock);
    f.message = f.message != NULL ? f.message : "";
    f.prompt_tokens = r->n_prompt;
    f.completion_tokens = r->n_ids - r->n_prompt;
    f.cached_tokens = r->cached_tokens;
    f.retractions = r->retractions;
    f.adapter_id = r->adapter_id;
    f.adapter_version = hr_adapter_lease_weight_version(&r->lease);
    report_versions(s, r, &f);
    f.queue_ns = (r->admit_ns != 0 ? r->admit_ns : now) - r->submit_ns;
    f.first_token_ns = r->first_token_ns != 0 ? r->first_token_ns - r->submit_ns : 0;
    f.e2e_ns = now - r->submit_ns;
    s->c.finish(s->c.finish_self, r, &f);
}

void hr_schedule_end_queued(hr_scheduler *s, hr_request *r, hr_finish f) {
    hr_schedule_queue_remove(s, r);
    hr_schedule_end(s, r, f);
}

void hr_schedule_end_running(hr_scheduler *s, hr_request *r, hr_finish f) {
    hr_schedule_running_remove(s, r);
    hr_schedule_give_pages(s, r);
    hr_schedule_end(s, r, f);
}

static hr_finish ending_of(const hr_request *r, int ending, bool queued) {
    hr_finish f = {.type = HR_FINISH_ABORT, .status = HR_ERR_CANCELLED};
    if (ending == HR_ENDING_STOP) {
        f.status = HR_ERR_STOPPING;
        f.message = "the engine is stopping";
    } else {
        f.message = queued && r->retractions == 0 ? "Abort in waiting queue" : "Aborted";
    }
    return f;
}

void hr_scheduler_reap(hr_scheduler *s) {
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        int ending = atomic_load(&r->ending);
        if (ending != HR_ENDING_NOT)
            hr_schedule_end_queued(s, r, ending_of(r, ending, true));
    }
    for (uint32_t i = s->n_running; i-- > 0;) {
        hr_request *r = s->running[i];
        int ending = atomic_load(&r->ending);
        if (ending != HR_ENDING_NOT)
            hr_schedule_end_running(s, r, ending_of(r, ending, false));
    }
}

void hr_scheduler_fail_all(hr_scheduler *s, hr_status status, const char *message) {
    hr_finish f = {.type = HR_FINISH_ERROR, .status = status, .message = message};
    while (s->n_running > 0)
        hr_schedule_end_running(s, s->running[s->n_running - 1], f);
    while (s->queue_head != NULL)
        hr_schedule_end_queued(s, s->queue_head, f);
}
