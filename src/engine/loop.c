/* The loop's life, and what can be read of it. */
#include "engine/loop.h"

#include "base/cond.h"
#include "engine/loop_parts.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static size_t bucket_count(const hr_loop_config *config) {
    size_t n = 64;
    while (n < (size_t)config->max_queued + config->scheduler.max_running)
        n *= 2;
    return n;
}

static uint64_t first_seed(const hr_clock *clock) {
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed)
        seed = hr_sampler_mix(hr_now_ns(clock));
    return seed;
}

hr_status hr_loop_create(const hr_loop_config *config, hr_loop **out, hr_error *err) {
    const hr_alloc *alloc = &config->scheduler.alloc;
    hr_loop *loop = hr_alloc_array(alloc, 1, sizeof *loop);
    if (loop == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the scheduler thread");
    loop->c = *config;
    loop->c.scheduler.finish = hr_loop_end_request;
    loop->c.scheduler.finish_self = loop;
    loop->seeds = first_seed(&config->scheduler.clock);
    loop->n_buckets = bucket_count(config);
    hr_status status = HR_OK;
    loop->rids = hr_alloc_array(alloc, loop->n_buckets, sizeof(hr_request *));
    if (loop->rids == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a queue of %u requests",
                         config->max_queued);
        goto free_loop;
    }
    loop->c.scheduler.store = config->store;
    status = hr_scheduler_create(&loop->c.scheduler, &loop->scheduler, err);
    if (status != HR_OK)
        goto free_rids;
    memcpy(loop->weight_version, config->scheduler.weight_version,
           strlen(config->scheduler.weight_version) + 1);
    pthread_mutex_init(&loop->lock, NULL);
    pthread_cond_init(&loop->work, NULL);
    hr_cond_init(&loop->done);
    int rc = pthread_create(&loop->thread, NULL, hr_loop_main, loop);
    if (rc != 0) {
        status =
            hr_fail(err, HR_ERR_NO_MEMORY, "cannot start the scheduler thread: %s", strerror(rc));
        goto free_scheduler;
    }
    pthread_setname_np(loop->thread, "hr-scheduler");
    hr_adapter_store_watch(config->store, hr_loop_adapter_gone, loop);
    *out = loop;
    return HR_OK;

free_scheduler:
    pthread_cond_destroy(&loop->done);
    pthread_cond_destroy(&loop->work);
    pthread_mutex_destroy(&loop->lock);
    hr_scheduler_destroy(loop->scheduler);
free_rids:
    hr_alloc_free(alloc, loop->rids);
free_loop:
    hr_alloc_free(alloc, loop);
    return status;
}

void hr_loop_destroy(hr_loop *loop) {
    if (loop == NULL)
        return;
    hr_loop_drain(loop, 0);
    pthread_mutex_lock(&loop->lock);
    loop->quit = true;
    pthread_cond_signal(&loop->work);
    pthread_mutex_unlock(&loop->lock);
    pthread_join(loop->thread, NULL);
    hr_adapter_store_watch(loop->c.store, NULL, NULL);
    pthread_cond_destroy(&loop->done);
    pthread_cond_destroy(&loop->work);
    pthread_mutex_destroy(&loop->lock);
    hr_scheduler_destroy(loop->scheduler);
    hr_alloc alloc = loop->c.scheduler.alloc;
    hr_alloc_free(&alloc, loop->rids);
    hr_alloc_free(&alloc, loop);
}

void hr_loop_weight_version(hr_loop *loop, char *out, size_t size) {
    pthread_mutex_lock(&loop->lock);
    if (size > 0)
        snprintf(out, size, "%s", loop->weight_version);
    pthread_mutex_unlock(&loop->lock);
}

void hr_loop_stats_get(hr_loop *loop, hr_engine_stats *out) {
    hr_adapter_store_stats store;
    hr_adapter_store_stats_get(loop->c.store, &store);
    pthread_mutex_lock(&loop->lock);
    const hr_scheduler_stats *s = &loop->scheduled;
    *out = (hr_engine_stats){
        .running = s->running,
        .queued = loop->live - s->running,
        .paused = loop->paused,
        .kv_pages_cached = s->kv_pages_cached,
        .cached_prompt_tokens = s->cached_prompt_tokens,
        .leases = store.leases_acquired - store.leases_released,
        .leases_acquired = store.leases_acquired,
        .leases_released = store.leases_released,
        .kv_pages = s->kv_pages,
        .kv_pages_free = s->kv_pages_free,
        .requests_started = loop->started,
        .requests_finished = loop->finished,
        .requests_aborted = loop->aborted,
        .prompt_tokens = s->prompt_tokens,
        .generated_tokens = s->generated_tokens,
        .steps = s->steps,
    };
    pthread_mutex_unlock(&loop->lock);
}
