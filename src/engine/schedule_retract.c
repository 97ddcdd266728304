/* Retraction: when KV pages run short, the youngest go back to the queue. */
#include "engine/scheduler_parts.h"

static void retract(hr_scheduler *s, hr_request *r) {
    hr_schedule_running_remove(s, r);
    hr_schedule_give_pages(s, r);
    r->retractions++;
    s->stats.retractions++;
    r->keeps_version = true;
    hr_schedule_queue_push_front(s, r);
}

void hr_scheduler_retract_all(hr_scheduler *s) {
    while (s->n_running > 0)
        retract(s, hr_schedule_running_youngest(s));
    hr_schedule_release_versions(s);
}

/* Terminates because each round takes a page or shrinks the running set, and one request alone
 * always fits (hr_request_max_ids). */
void hr_schedule_secure_pages(hr_scheduler *s) {
    uint32_t i = 0;
    while (i < s->n_running) {
        hr_request *r = s->running[i];
        if (r->n_pages >= hr_kv_pages_for(r->n_ids)) {
            i++;
        } else if (hr_schedule_take_pages(s, 1, &r->pages[r->n_pages])) {
            r->n_pages++;
        } else {
            HR_ASSERT(s->n_running > 1);
            retract(s, hr_schedule_running_youngest(s));
            i = 0;
        }
    }
}
