/* The door: which requests come in. */
#include "engine/loop_parts.h"

static bool names_adapter(const hr_request_params *params) {
    return params->lora_name != NULL && params->lora_name[0] != '\0';
}

/* Inside the lock: may one more request come in? */
static hr_status check_door(hr_loop *loop, const char *rid, hr_error *err) {
    if (loop->stopping)
        return hr_fail(err, HR_ERR_STOPPING, "the engine is stopping and takes no new requests");
    if (loop->unservable[0] != '\0')
        return hr_fail(err, HR_ERR_UNSERVABLE, "%s", loop->unservable);
    uint32_t queued = loop->live - loop->scheduled.running;
    if (queued >= loop->c.max_queued)
        return hr_fail(
            err, HR_ERR_BUSY,
            "the queue is full (%u requests wait, --max-queued-requests %u); retry later", queued,
            loop->c.max_queued);
    if (hr_loop_rid_find(loop, rid) != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "rid '%.200s' belongs to a request that is still running", rid);
    return HR_OK;
}

static void accept_request(hr_loop *loop, hr_request *r) {
    hr_loop_rid_insert(loop, r);
    loop->live++;
    loop->unfinished++;
    loop->started++;
    *(loop->inbox_tail != NULL ? &loop->inbox_tail->next : &loop->inbox_head) = r;
    loop->inbox_tail = r;
    pthread_cond_signal(&loop->work);
}

static uint64_t next_seed(hr_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    uint64_t seed = hr_sampler_mix(loop->seeds++);
    pthread_mutex_unlock(&loop->lock);
    return seed;
}

hr_status hr_loop_submit(hr_loop *loop, const hr_request_params *params, hr_error *err) {
    hr_adapter_store *store = loop->c.store;
    const hr_alloc *alloc = &loop->c.scheduler.alloc;
    hr_request *r = NULL;
    hr_adapter_lease lease = {0};
    uint64_t now = hr_now_ns(&loop->c.scheduler.clock);
    HR_TRY(hr_request_create(params, &loop->c.scheduler.limits, next_seed(loop), alloc, &r, err));
    r->submit_ns = now;
    hr_status status = HR_OK;
    if (names_adapter(params))
        status = hr_adapter_store_acquire(store, params->lora_name, &lease, err);
    if (status != HR_OK)
        goto refuse;
    hr_request_set_adapter(r, lease);

    pthread_mutex_lock(&loop->lock);
    status = check_door(loop, r->rid, err);
    if (status == HR_OK)
        accept_request(loop, r);
    pthread_mutex_unlock(&loop->lock);
    if (status == HR_OK)
        return HR_OK;

refuse:
    hr_adapter_store_release(store, &r->lease);
    hr_request_destroy(r, alloc);
    return status;
}

hr_status hr_loop_check(hr_loop *loop, const hr_request_params *params, hr_error *err) {
    HR_TRY(hr_request_check(params, &loop->c.scheduler.limits, err));
    if (names_adapter(params))
        HR_TRY(hr_adapter_store_check(loop->c.store, params->lora_name, err));
    pthread_mutex_lock(&loop->lock);
    hr_status status = check_door(loop, params->rid, err);
    pthread_mutex_unlock(&loop->lock);
    return status;
}
