/* Giving memory back and taking it again. */
#include "engine/occupation.h"

#include "base/log.h"

#include <pthread.h>
#include <sys/mman.h>

enum { RANDOMIZE_WAIT_MS = 60000, RANDOM_SEED = 1 };

struct hr_occupation {
    hr_occupation_config c;
    pthread_mutex_t lock; /* one release or resume at a time */
    unsigned released;    /* steps are held while this is not 0 */
};

hr_status hr_occupation_create(const hr_occupation_config *config, hr_occupation **out,
                               hr_error *err) {
    hr_occupation *o = hr_alloc_array(&config->alloc, 1, sizeof *o);
    if (o == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the engine's book of memory");
    o->c = *config;
    pthread_mutex_init(&o->lock, NULL);
    *out = o;
    return HR_OK;
}

void hr_occupation_destroy(hr_occupation *o) {
    if (o == NULL)
        return;
    pthread_mutex_destroy(&o->lock);
    hr_alloc alloc = o->c.alloc;
    hr_alloc_free(&alloc, o);
}

typedef struct stopping {
    hr_loop *loop;
    uint32_t running;
} stopping;

static void count_running(void *self) {
    stopping *s = self;
    hr_engine_stats stats;
    hr_loop_stats_get(s->loop, &stats);
    s->running = stats.running;
}

/* Stops all steps; requests that run, frozen ones too, still need the memory. */
static hr_status stop_idle(hr_occupation *o, bool flush, hr_error *err) {
    stopping s = {.loop = o->c.loop};
    hr_loop_change hold = {
        .self = &s, .apply = count_running, .base = true, .hold = true, .flush_cache = flush};
    hr_status status = hr_loop_change_apply(o->c.loop, &hold, err);
    if (status == HR_OK && s.running == 0)
        return HR_OK;
    if (status == HR_OK)
        hr_loop_resume(o->c.loop);
    if (status != HR_OK && status != HR_ERR_TIMEOUT)
        return status;
    return hr_fail(err, HR_ERR_BUSY,
                   "memory is not given back: requests run; wait for them, abort them, or pause "
                   "with mode retract or abort");
}

static void give_back(hr_occupation *o, unsigned kinds) {
    if (kinds & HR_MEMORY_WEIGHTS)
        hr_model_release_weights(o->c.model);
    if (kinds & HR_MEMORY_KV_CACHE) /* zero pages come again as they are touched */
        (void)madvise(o->c.kv, o->c.kv_bytes, MADV_DONTNEED);
}

static hr_status release(hr_occupation *o, unsigned kinds, hr_error *err) {
    kinds &= ~o->released;
    if (kinds == 0)
        return HR_OK;
    bool weights = kinds & HR_MEMORY_WEIGHTS;
    if (weights)
        HR_TRY(hr_update_take_base(o->c.update,
                                   "their memory is given back (resume_memory_occupation)", err));
    hr_status status = stop_idle(o, kinds & HR_MEMORY_KV_CACHE, err);
    if (status != HR_OK) {
        if (weights)
            hr_update_give_base(o->c.update);
        return status;
    }
    give_back(o, kinds);
    if (o->released != 0)
        hr_loop_resume(o->c.loop); /* held already */
    o->released |= kinds;
    return HR_OK;
}

hr_status hr_occupation_release(hr_occupation *o, unsigned kinds, hr_error *err) {
    pthread_mutex_lock(&o->lock);
    hr_status status = release(o, kinds, err);
    pthread_mutex_unlock(&o->lock);
    return status;
}

void hr_occupation_resume(hr_occupation *o, unsigned kinds) {
    pthread_mutex_lock(&o->lock);
    kinds &= o->released;
    if (kinds & HR_MEMORY_WEIGHTS) {
        hr_update_lose_base(o->c.update,
                            "the base weights are incomplete after their memory was given back; "
                            "send a full base update");
        hr_update_give_base(o->c.update);
    }
    o->released &= ~kinds;
    if (kinds != 0 && o->released == 0)
        hr_loop_resume(o->c.loop);
    pthread_mutex_unlock(&o->lock);
}

static hr_status randomize(hr_occupation *o, hr_error *err) {
    hr_loop_change hold = {
        .base = true, .hold = true, .flush_cache = true, .timeout_ms = RANDOMIZE_WAIT_MS};
    HR_TRY(hr_loop_change_apply(o->c.loop, &hold, err));
    hr_status status = hr_model_randomize(o->c.model, RANDOM_SEED, err);
    hr_loop_resume(o->c.loop);
    return status;
}

hr_status hr_occupation_randomize(hr_occupation *o, hr_error *err) {
    HR_TRY(hr_update_take_base(o->c.update, "the weights checker writes random values", err));
    hr_status status = randomize(o, err);
    hr_update_give_base(o->c.update);
    if (status == HR_OK)
        hr_log(HR_LOG_WARN, "the weights checker wrote random base weights, for a test; send the "
                            "real ones before anything is served");
    return status;
}
