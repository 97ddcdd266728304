/* Live requests by their rid, and how they are asked to end from outside. */
#include "engine/loop_parts.h"

#include <string.h>

static hr_request **rid_bucket(hr_loop *loop, const char *rid) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = rid; *c != '\0'; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    return &loop->rids[hr_sampler_mix(hash) & (loop->n_buckets - 1)];
}

hr_request *hr_loop_rid_find(hr_loop *loop, const char *rid) {
    hr_request *r = *rid_bucket(loop, rid);
    while (r != NULL && strcmp(r->rid, rid) != 0)
        r = r->rid_next;
    return r;
}

void hr_loop_rid_insert(hr_loop *loop, hr_request *r) {
    hr_request **bucket = rid_bucket(loop, r->rid);
    r->rid_next = *bucket;
    *bucket = r;
}

void hr_loop_rid_remove(hr_loop *loop, hr_request *r) {
    hr_request **link = rid_bucket(loop, r->rid);
    while (*link != r)
        link = &(*link)->rid_next;
    *link = r->rid_next;
}

/* ---- ending from outside ---- */

/* Inside the lock. The first reason stays. */
static void ask_ending(hr_loop *loop, hr_request *r, int ending) {
    int none = HR_ENDING_NOT;
    atomic_compare_exchange_strong(&r->ending, &none, ending);
    loop->reap = true;
    pthread_cond_signal(&loop->work);
}

void hr_loop_ask_ending_of_all(hr_loop *loop, int ending) {
    for (size_t b = 0; b < loop->n_buckets; b++)
        for (hr_request *r = loop->rids[b]; r != NULL; r = r->rid_next)
            ask_ending(loop, r, ending);
}

bool hr_loop_abort(hr_loop *loop, const char *rid) {
    pthread_mutex_lock(&loop->lock);
    hr_request *r = hr_loop_rid_find(loop, rid);
    if (r != NULL)
        ask_ending(loop, r, HR_ENDING_ABORT);
    pthread_mutex_unlock(&loop->lock);
    return r != NULL;
}

void hr_loop_abort_all(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    hr_loop_ask_ending_of_all(loop, HR_ENDING_ABORT);
    pthread_mutex_unlock(&loop->lock);
}
