/* The scheduler's life, and a step of it from the parts. */
#include "engine/scheduler.h"

#include "engine/scheduler_parts.h"

static bool space_create(hr_sampler_space *space, uint32_t n_vocab, const hr_alloc *alloc) {
    space->ids = hr_alloc_array(alloc, n_vocab, sizeof *space->ids);
    space->values = hr_alloc_array(alloc, n_vocab, sizeof *space->values);
    space->ranked_ids = hr_alloc_array(alloc, n_vocab, sizeof *space->ranked_ids);
    space->ranked_values = hr_alloc_array(alloc, n_vocab, sizeof *space->ranked_values);
    return space->ids != NULL && space->values != NULL && space->ranked_ids != NULL &&
           space->ranked_values != NULL;
}

static void space_destroy(hr_sampler_space *space, const hr_alloc *alloc) {
    hr_alloc_free(alloc, space->ids);
    hr_alloc_free(alloc, space->values);
    hr_alloc_free(alloc, space->ranked_ids);
    hr_alloc_free(alloc, space->ranked_values);
}

hr_status hr_scheduler_create(const hr_scheduler_config *config, hr_scheduler **out,
                              hr_error *err) {
    const hr_alloc *alloc = &config->alloc;
    hr_scheduler *s = hr_alloc_array(alloc, 1, sizeof *s);
    if (s == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the scheduler");
    s->c = *config;
    if (s->c.max_overtaken == 0)
        s->c.max_overtaken = 4 * config->max_running;
    hr_status status = hr_version_label_create(config->weight_version, alloc, &s->label, err);
    if (status != HR_OK)
        goto fail;
    status = hr_kv_pages_create(config->n_pages, alloc, &s->pages, err);
    if (status != HR_OK)
        goto fail;
    status = hr_prefix_cache_create(s->pages, alloc, &s->cache, err);
    if (status != HR_OK)
        goto fail;
    status = hr_plan_create(config->limits.chunked_prefill_size + config->max_running,
                            config->max_running, alloc, &s->plan, err);
    if (status != HR_OK)
        goto fail;
    s->running = hr_alloc_array(alloc, config->max_running, sizeof(hr_request *));
    s->spaces = hr_alloc_array(alloc, config->n_workers, sizeof *s->spaces);
    bool ok = s->running != NULL && s->spaces != NULL;
    for (uint32_t w = 0; ok && w < config->n_workers; w++)
        ok = space_create(&s->spaces[w], config->limits.vocab_size, alloc);
    if (!ok) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a scheduler of %u requests",
                         config->max_running);
        goto fail;
    }
    *out = s;
    return HR_OK;

fail:
    hr_scheduler_destroy(s);
    return status;
}

void hr_scheduler_destroy(hr_scheduler *s) {
    if (s == NULL)
        return;
    HR_ASSERT(s->n_running == 0 && s->n_queued == 0);
    hr_alloc alloc = s->c.alloc;
    for (uint32_t w = 0; s->spaces != NULL && w < s->c.n_workers; w++)
        space_destroy(&s->spaces[w], &alloc);
    hr_alloc_free(&alloc, s->spaces);
    hr_alloc_free(&alloc, s->running);
    hr_plan_destroy(&s->plan, &alloc);
    hr_prefix_cache_destroy(s->cache);
    hr_kv_pages_destroy(s->pages);
    hr_version_label_release(s->label, &alloc);
    hr_alloc_free(&alloc, s);
}

void hr_scheduler_add(hr_scheduler *s, hr_request *r) {
    r->serial = s->next_serial++;
    hr_schedule_queue_push_back(s, r);
    hr_schedule_renew(s, r); /* its adapter may have changed since it was leased */
}

void hr_scheduler_close(hr_scheduler *s, bool closed) {
    s->closed = closed;
}

bool hr_scheduler_step(hr_scheduler *s) {
    hr_schedule_admit(s);
    hr_schedule_secure_pages(s);
    hr_schedule_plan(s);
    if (s->plan.view.n_rows == 0)
        return false;
    s->c.executor.step(s->c.executor.self, &s->plan.view, hr_schedule_on_logits, s);
    s->stats.steps++;
    hr_schedule_deliver(s);
    return true;
}

/* ---- looking ---- */

bool hr_scheduler_has_work(const hr_scheduler *s) {
    return s->n_running > 0 || s->n_queued > 0;
}

hr_scheduler_stats hr_scheduler_stats_of(const hr_scheduler *s) {
    hr_scheduler_stats stats = s->stats;
    stats.running = s->n_running;
    stats.queued = s->n_queued;
    stats.kv_pages = hr_kv_pages_total(s->pages);
    stats.kv_pages_free = hr_kv_pages_free(s->pages);
    stats.kv_pages_cached = hr_prefix_cache_unheld(s->cache);
    return stats;
}

const hr_request *hr_scheduler_running(const hr_scheduler *s, uint32_t i) {
    return i < s->n_running ? s->running[i] : NULL;
}

const hr_request *hr_scheduler_queue(const hr_scheduler *s) {
    return s->queue_head;
}
