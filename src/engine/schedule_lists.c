/* Who waits and who runs. Both are short, so plain lists serve: what matters is their order. */
#include "engine/scheduler_parts.h"

#include <string.h>

/* ---- the queue: a list ---- */

void hr_schedule_queue_push_back(hr_scheduler *s, hr_request *r) {
    r->next = NULL;
    r->prev = s->queue_tail;
    *(s->queue_tail != NULL ? &s->queue_tail->next : &s->queue_head) = r;
    s->queue_tail = r;
    s->n_queued++;
}

void hr_schedule_queue_push_front(hr_scheduler *s, hr_request *r) {
    r->prev = NULL;
    r->next = s->queue_head;
    *(s->queue_head != NULL ? &s->queue_head->prev : &s->queue_tail) = r;
    s->queue_head = r;
    s->n_queued++;
}

void hr_schedule_queue_remove(hr_scheduler *s, hr_request *r) {
    *(r->prev != NULL ? &r->prev->next : &s->queue_head) = r->next;
    *(r->next != NULL ? &r->next->prev : &s->queue_tail) = r->prev;
    r->prev = r->next = NULL;
    s->n_queued--;
}

/* ---- the running set: a sorted array ---- */

static bool runs_before(const hr_request *a, const hr_request *b) {
    return a->adapter_id != b->adapter_id ? a->adapter_id < b->adapter_id : a->serial < b->serial;
}

void hr_schedule_running_insert(hr_scheduler *s, hr_request *r) {
    uint32_t i = s->n_running++;
    for (; i > 0 && runs_before(r, s->running[i - 1]); i--)
        s->running[i] = s->running[i - 1];
    s->running[i] = r;
}

void hr_schedule_running_remove(hr_scheduler *s, const hr_request *r) {
    uint32_t i = 0;
    while (s->running[i] != r)
        i++;
    s->n_running--;
    memmove(s->running + i, s->running + i + 1, (s->n_running - i) * sizeof(hr_request *));
}

hr_request *hr_schedule_running_youngest(const hr_scheduler *s) {
    hr_request *youngest = s->running[0];
    for (uint32_t i = 1; i < s->n_running; i++)
        if (s->running[i]->serial > youngest->serial)
            youngest = s->running[i];
    return youngest;
}
