/* Weights that change while requests wait, run or are paused: who is computed with which version,
 * and what its spans say. */
#include "engine/scheduler_parts.h"

#include <stdio.h>

static hr_finish no_memory_for_versions(void) {
    return (hr_finish){.type = HR_FINISH_ERROR,
                       .status = HR_ERR_NO_MEMORY,
                       .message = "no memory to note the weight version of this request"};
}

/* The name is gone: who never ran is refused, who was paused ends as if aborted. */
static void end_without_adapter(hr_scheduler *s, hr_request *r) {
    char message[HR_LORA_NAME_SIZE + 120];
    snprintf(message, sizeof message, "LoRA adapter '%s' is not loaded: it was unloaded while %s",
             hr_adapter_lease_name(&r->lease),
             hr_schedule_has_begun(r) ? "this request was paused" : "this request waited");
    hr_finish f = {.type = HR_FINISH_ERROR, .status = HR_ERR_ADAPTER_UNKNOWN, .message = message};
    if (hr_schedule_has_begun(r))
        f = (hr_finish){
            .type = HR_FINISH_ABORT, .status = HR_ERR_ADAPTER_UNKNOWN, .message = message};
    hr_schedule_end_queued(s, r, f);
}

void hr_schedule_renew(hr_scheduler *s, hr_request *r) {
    if (r->keeps_version)
        return;
    hr_lease_state state = hr_adapter_store_renew(s->c.store, &r->lease);
    if (state == HR_LEASE_UNLOADED) {
        end_without_adapter(s, r);
    } else if (state == HR_LEASE_RENEWED) {
        hr_request_set_adapter(r, r->lease);
        if (hr_schedule_has_begun(r) && !hr_request_note_version(r, s->label, &s->c.alloc))
            hr_schedule_end_queued(s, r, no_memory_for_versions());
    }
}

bool hr_scheduler_is_outdated(const hr_scheduler *s) {
    return s->n_queued > 0 && s->renewed != hr_adapter_store_changes(s->c.store);
}

void hr_scheduler_renew_waiting(hr_scheduler *s) {
    s->renewed = hr_adapter_store_changes(s->c.store);
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        hr_schedule_renew(s, r);
    }
}

/* Frozen requests go on with what their adapters' names stand for now. Their KV is of both
 * versions, so it is theirs alone. */
static void renew_running(hr_scheduler *s) {
    for (uint32_t i = 0; i < s->n_running; i++) {
        hr_request *r = s->running[i];
        if (hr_adapter_store_renew(s->c.store, &r->lease) != HR_LEASE_RENEWED)
            continue;
        hr_request_set_adapter(r, r->lease);
        r->cache_epoch = HR_REQUEST_OWN_KV;
    }
    uint32_t n = s->n_running;
    for (s->n_running = 0; s->n_running < n;)
        hr_schedule_running_insert(s, s->running[s->n_running]);
}

/* A request whose adapter has changed under it is still made by the older version. */
static bool is_of_new_version(hr_scheduler *s, const hr_request *r, bool base) {
    return hr_schedule_has_begun(r) && (base || hr_adapter_store_is_current(s->c.store, &r->lease));
}

static void note_label(hr_scheduler *s, bool base) {
    for (uint32_t i = s->n_running; i-- > 0;) {
        hr_request *r = s->running[i];
        if (is_of_new_version(s, r, base) && !hr_request_note_version(r, s->label, &s->c.alloc))
            hr_schedule_end_running(s, r, no_memory_for_versions());
    }
    for (hr_request *r = s->queue_head, *next; r != NULL; r = next) {
        next = r->next;
        if (is_of_new_version(s, r, base) && !hr_request_note_version(r, s->label, &s->c.alloc))
            hr_schedule_end_queued(s, r, no_memory_for_versions());
    }
}

void hr_schedule_release_versions(hr_scheduler *s) {
    s->renewed = UINT64_MAX; /* whatever was not renewed so far is now */
    for (hr_request *r = s->queue_head; r != NULL; r = r->next)
        r->keeps_version = false;
}

void hr_scheduler_changed(hr_scheduler *s, const hr_scheduler_change *change) {
    HR_ASSERT(!change->base || change->frozen || hr_scheduler_begun(s) == 0);
    if (change->base || change->flush)
        hr_prefix_cache_clear(s->cache);
    if (change->label != NULL) {
        hr_version_label_release(s->label, &s->c.alloc);
        s->label = change->label;
    }
    if (change->frozen) {
        hr_schedule_release_versions(s);
        renew_running(s);
    }
    hr_scheduler_renew_waiting(s);
    note_label(s, change->base);
}

uint32_t hr_scheduler_begun(const hr_scheduler *s) {
    uint32_t n = s->n_running;
    for (const hr_request *r = s->queue_head; r != NULL; r = r->next)
        n += r->keeps_version;
    return n;
}
