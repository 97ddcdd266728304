/* The engine: a model, an adapter store, the scheduler's loop and a receiver of weights put
 * together behind headrace/engine.h. */
#include "base/log.h"
#include "base/machine.h"
#include "base/pool.h"
#include "engine/disk_update.h"
#include "engine/keeper.h"
#include "engine/loop.h"
#include "engine/occupation.h"
#include "engine/update.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

/* What a bucket in flight takes at most, beside a second set of base weights; no more than the set.
 */
enum { BUCKET_BYTES = 512 << 20 };

#define MAX_CHUNK (1u << 16) /* rows of a step: buffers are made for so many */

struct hr_engine {
    hr_alloc alloc;
    hr_pool *pool;
    hr_model *model;
    hr_model_workspace *workspace;
    hr_kv kv;
    uint64_t kv_bytes;
    hr_adapter_store *store;
    hr_loop *loop;
    hr_update *update;
    hr_receiver *receiver;
    hr_keeper *keeper;
    hr_occupation *occupation;
    bool shadow; /* memory allows a second set of base weights */
    char *model_path;
    uint32_t eos_ids[HR_HF_MAX_EOS];
    hr_engine_info info;
};

/* ---- the model as an executor ---- */

static void model_step(void *self, const hr_view *view, hr_logits_fn on_logits, void *ctx) {
    hr_engine *e = self;
    hr_model_forward(e->model, e->workspace, e->pool, &e->kv, view, on_logits, ctx);
}

static void model_clear_page(void *self, uint32_t page) {
    hr_engine *e = self;
    hr_model_kv_clear_page(e->model, &e->kv, page);
}

/* ---- creation ---- */

/* Fills every default in. */
static hr_status resolve_options(hr_engine_options *o, hr_error *err) {
    if (o->model_path == NULL || o->model_path[0] == '\0')
        return hr_fail(err, HR_ERR_INVALID,
                       "no model path is given; name a Hugging Face model directory");
    o->threads = o->threads > 0 ? o->threads : hr_machine_threads();
    o->max_running_requests = o->max_running_requests > 0 ? o->max_running_requests : 64;
    o->max_queued_requests = o->max_queued_requests > 0 ? o->max_queued_requests : 8192;
    o->chunked_prefill_size = o->chunked_prefill_size > 0 ? o->chunked_prefill_size : 512;
    o->max_loras_per_batch = o->max_loras_per_batch > 0 ? o->max_loras_per_batch : 8;
    o->weight_version = o->weight_version != NULL ? o->weight_version : "default";
    if (strlen(o->weight_version) >= HR_WEIGHT_VERSION_SIZE)
        return hr_fail(err, HR_ERR_INVALID, "--weight-version is longer than %d bytes",
                       HR_WEIGHT_VERSION_SIZE - 1);
    if (o->mem_fraction_static == 0)
        o->mem_fraction_static = 0.8;
    if (!(o->mem_fraction_static > 0 && o->mem_fraction_static <= 1))
        return hr_fail(err, HR_ERR_INVALID, "--mem-fraction-static must be in (0, 1], got %g",
                       o->mem_fraction_static);
    if (o->threads > 1024)
        return hr_fail(err, HR_ERR_INVALID, "at most 1024 threads are allowed, got %u", o->threads);
    if (o->max_running_requests > 4096)
        return hr_fail(err, HR_ERR_INVALID, "--max-running-requests must be at most 4096, got %u",
                       o->max_running_requests);
    if (o->max_queued_requests > 1u << 20)
        return hr_fail(err, HR_ERR_INVALID, "--max-queued-requests must be at most %u, got %u",
                       1u << 20, o->max_queued_requests);
    if (o->chunked_prefill_size > MAX_CHUNK && o->chunked_prefill_size != HR_WHOLE_PROMPTS)
        return hr_fail(err, HR_ERR_INVALID, "--chunked-prefill-size must be at most %u, got %u",
                       MAX_CHUNK, o->chunked_prefill_size);
    return HR_OK;
}

static hr_status load_model(hr_engine *e, hr_engine_options *o, hr_error *err) {
    HR_TRY(hr_pool_create(o->threads, &e->pool, err));
    hr_model_options model = {
        .dir = o->model_path,
        .dtype = o->dtype,
        .isa = o->isa,
        .context_length = o->context_length,
        .pool = e->pool,
        .progress = o->progress,
        .progress_ctx = o->progress_ctx,
    };
    HR_TRY(hr_model_load(&model, &e->model, err));
    if (o->chunked_prefill_size == HR_WHOLE_PROMPTS) {
        uint32_t longest = hr_model_info_of(e->model)->context_length;
        o->chunked_prefill_size = longest < MAX_CHUNK ? longest : MAX_CHUNK;
    }
    return hr_model_workspace_create(e->model, o->threads,
                                     o->chunked_prefill_size + o->max_running_requests,
                                     o->max_running_requests, &e->workspace, err);
}

/* What of the room for KV is kept for a second set of weights: all of it, or nothing where that
 * would cost more than half of the KV cache. */
static uint64_t shadow_room(uint64_t weight_bytes, uint64_t room) {
    return weight_bytes <= room / 2 ? weight_bytes : 0;
}

/* available and source: memory before anything was loaded. Decides how base updates are applied. */
static hr_status create_kv(hr_engine *e, const hr_engine_options *o, uint64_t available,
                           const char *source, hr_error *err) {
    const hr_model_info *m = hr_model_info_of(e->model);
    uint64_t budget = (uint64_t)((double)available * o->mem_fraction_static);
    uint64_t used = m->weight_bytes + hr_model_workspace_bytes(e->workspace);
    uint64_t room = budget > used ? budget - used : 0, kept = shadow_room(m->weight_bytes, room);
    hr_kv_sizing sizing = {
        .page_bytes = m->kv_page_bytes,
        .memory_bytes = room - kept,
        .memory_source = source,
        .max_total_tokens = o->max_total_tokens,
        .max_running_requests = o->max_running_requests,
        .context_length = m->context_length,
    };
    HR_TRY(hr_kv_size(&sizing, &e->kv.n_pages, &e->info.kv_source, err));
    e->kv_bytes = e->kv.n_pages * m->kv_page_bytes;
    uint64_t bucket = m->weight_bytes < BUCKET_BYTES ? m->weight_bytes : BUCKET_BYTES;
    e->shadow = used + e->kv_bytes + m->weight_bytes + bucket <= available;
    e->kv.base = hr_pages_alloc(e->kv_bytes);
    if (e->kv.base == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY,
                       "the system refused %llu bytes for the KV cache; lower "
                       "--max-total-tokens or --mem-fraction-static",
                       (unsigned long long)e->kv_bytes);
    return HR_OK;
}

static char *copy_text(const hr_alloc *alloc, const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = hr_alloc_array(alloc, size, 1);
    if (copy != NULL)
        memcpy(copy, text, size);
    return copy;
}

static hr_status fill_info(hr_engine *e, const hr_engine_options *o, hr_error *err) {
    const hr_model_info *m = hr_model_info_of(e->model);
    e->model_path = copy_text(&e->alloc, o->model_path);
    if (e->model_path == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the engine's description");
    hr_engine_info *info = &e->info;
    for (uint32_t i = 0; i < m->config->n_eos; i++)
        if (m->config->eos_token_id[i] < m->config->vocab_size)
            e->eos_ids[info->n_eos_token_ids++] = m->config->eos_token_id[i];
    info->eos_token_ids = e->eos_ids;
    info->model_path = e->model_path;
    info->architecture = m->config->architecture;
    info->model_type = m->config->model_type;
    info->dtype = m->compute == HR_COMPUTE_BF16 ? "bfloat16" : "float32";
    info->isa = m->kernels->name;
    info->isa_note = m->kernels_note;
    info->threads = o->threads;
    info->vocab_size = m->config->vocab_size;
    info->context_length = m->context_length;
    info->max_running_requests = o->max_running_requests;
    info->chunked_prefill_size = o->chunked_prefill_size;
    info->max_total_tokens = (uint64_t)e->kv.n_pages * HR_KV_PAGE_TOKENS;
    info->kv_bytes = e->kv_bytes;
    info->weight_bytes = m->weight_bytes;
    info->bos_token_id = m->config->has_bos ? m->config->bos_token_id : UINT32_MAX;
    info->max_loras_per_batch = o->max_loras_per_batch;
    info->max_loaded_loras = o->max_loaded_loras;
    info->max_lora_rank = o->max_lora_rank;
    info->enable_lora = o->enable_lora;
    return HR_OK;
}

/* Positions for which attention multiplies as often as a layer's linears do for a row. */
static uint32_t attention_depth(const hr_hf_config *c) {
    uint64_t q = (uint64_t)c->num_attention_heads * c->head_dim,
             kv = (uint64_t)c->num_key_value_heads * c->head_dim;
    uint64_t linears = c->hidden_size * (2 * q + 2 * kv + 3 * (uint64_t)c->intermediate_size);
    uint64_t depth = linears / (2 * q);
    return depth > 0 && depth < UINT32_MAX ? (uint32_t)depth : 1;
}

static hr_status start_loop(hr_engine *e, const hr_engine_options *o, hr_error *err) {
    hr_adapter_store_limits store = {.max_loaded = o->max_loaded_loras,
                                     .max_per_batch = o->max_loras_per_batch};
    HR_TRY(hr_adapter_store_create(&store, &e->alloc, &e->store, err));
    hr_loop_config loop = {
        .scheduler =
            {
                .limits =
                    {
                        .vocab_size = e->info.vocab_size,
                        .context_length = e->info.context_length,
                        .kv_tokens = (uint32_t)e->info.max_total_tokens,
                        .chunked_prefill_size = o->chunked_prefill_size,
                        .eos_ids = e->eos_ids,
                        .n_eos_ids = e->info.n_eos_token_ids,
                        .enable_lora = o->enable_lora,
                    },
                .max_running = o->max_running_requests,
                .max_adapters = o->max_loras_per_batch,
                .attention_depth = attention_depth(hr_model_info_of(e->model)->config),
                .n_pages = e->kv.n_pages,
                .n_workers = o->threads,
                .disable_prefix_cache = o->disable_prefix_cache,
                .kernels = hr_model_info_of(e->model)->kernels,
                .executor = {e, model_step, model_clear_page},
                .clock = hr_clock_monotonic(),
                .alloc = e->alloc,
                .weight_version = o->weight_version,
            },
        .store = e->store,
        .max_queued = o->max_queued_requests,
    };
    return hr_loop_create(&loop, &e->loop, err);
}

/* Names this process among engines, for receipts. */
static void draw_instance(char text[33]) {
    uint64_t random[2] = {0, 0};
    hr_clock clock = hr_clock_monotonic();
    if (getrandom(random, sizeof random, GRND_NONBLOCK) != sizeof random)
        random[0] = hr_sampler_mix(hr_now_ns(&clock));
    snprintf(text, 33, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

static hr_status start_updates(hr_engine *e, const hr_engine_options *o, hr_error *err) {
    hr_update_config update = {.model = e->model,
                               .store = e->store,
                               .loop = e->loop,
                               .enable_lora = o->enable_lora,
                               .max_lora_rank = o->max_lora_rank,
                               .shadow = e->shadow,
                               .alloc = e->alloc};
    HR_TRY(hr_update_create(&update, &e->update, err));
    char instance[33];
    draw_instance(instance);
    hr_receiver_options receiver = {
        .instance = instance, .base_mode = hr_engine_base_mode(e), .ranks = 1};
    hr_receiver_sink sink = hr_update_sink(e->update);
    HR_TRY(hr_receiver_create(&receiver, &sink, &e->receiver, err));
    hr_occupation_config occupation = {.model = e->model,
                                       .loop = e->loop,
                                       .update = e->update,
                                       .kv = e->kv.base,
                                       .kv_bytes = e->kv_bytes,
                                       .alloc = e->alloc};
    HR_TRY(hr_occupation_create(&occupation, &e->occupation, err));
    HR_TRY(hr_keeper_create(e->store, e->receiver, &e->alloc, &e->keeper, err));
    hr_log(HR_LOG_INFO, "base updates: %s",
           e->shadow
               ? "shadow (a second set of weights, made live between two steps)"
               : "in_place (no memory for a second set of weights: no request runs meanwhile)");
    return HR_OK;
}

hr_status hr_engine_create(const hr_engine_options *options, hr_engine **out, hr_error *err) {
    hr_engine_options o = *options;
    HR_TRY(resolve_options(&o, err));
    const char *source;
    uint64_t available = hr_machine_memory_available(&source);
    hr_alloc alloc = hr_alloc_system();
    hr_engine *e = hr_alloc_array(&alloc, 1, sizeof *e);
    if (e == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the engine");
    e->alloc = alloc;
    hr_status status = load_model(e, &o, err);
    if (status == HR_OK)
        status = create_kv(e, &o, available, source, err);
    if (status == HR_OK)
        status = fill_info(e, &o, err);
    if (status == HR_OK)
        status = start_loop(e, &o, err);
    if (status == HR_OK)
        status = start_updates(e, &o, err);
    if (status != HR_OK) {
        hr_engine_destroy(e);
        return status;
    }
    *out = e;
    return HR_OK;
}

void hr_engine_drain(hr_engine *e, uint64_t drain_ms) {
    hr_loop_drain(e->loop, drain_ms);
}

void hr_engine_destroy(hr_engine *e) {
    if (e == NULL)
        return;
    if (e->loop != NULL)
        hr_loop_drain(e->loop, 0);
    hr_keeper_destroy(e->keeper);
    hr_occupation_destroy(e->occupation);
    hr_receiver_destroy(e->receiver);
    hr_update_destroy(e->update);
    hr_loop_destroy(e->loop);
    hr_adapter_store_destroy(e->store);
    hr_pages_free(e->kv.base, e->kv_bytes);
    hr_model_workspace_destroy(e->workspace);
    hr_model_destroy(e->model);
    hr_pool_destroy(e->pool);
    hr_alloc alloc = e->alloc;
    hr_alloc_free(&alloc, e->model_path);
    hr_alloc_free(&alloc, e);
}

/* ---- facts and counters ---- */

const hr_engine_info *hr_engine_info_of(const hr_engine *e) {
    return &e->info;
}

void hr_engine_stats_get(hr_engine *e, hr_engine_stats *out) {
    hr_loop_stats_get(e->loop, out);
}

void hr_engine_weight_version(hr_engine *e, char *out, size_t size) {
    hr_loop_weight_version(e->loop, out, size);
}

/* ---- requests ---- */

hr_status hr_engine_submit(hr_engine *e, const hr_request_params *params, hr_error *err) {
    return hr_loop_submit(e->loop, params, err);
}

hr_status hr_engine_check(hr_engine *e, const hr_request_params *params, hr_error *err) {
    return hr_loop_check(e->loop, params, err);
}

bool hr_engine_abort(hr_engine *e, const char *rid) {
    return hr_loop_abort(e->loop, rid);
}

void hr_engine_abort_all(hr_engine *e) {
    hr_loop_abort_all(e->loop);
}

/* ---- control ---- */

hr_status hr_engine_pause(hr_engine *e, hr_pause_mode mode, uint64_t timeout_ms, hr_error *err) {
    return hr_loop_pause(e->loop, mode, timeout_ms, err);
}

void hr_engine_continue(hr_engine *e) {
    hr_loop_continue(e->loop);
}

hr_status hr_engine_flush_cache(hr_engine *e, uint64_t timeout_ms, hr_error *err) {
    return hr_loop_flush_cache(e->loop, timeout_ms, err);
}

/* ---- adapters ---- */

static hr_status check_lora_enabled(const hr_engine *e, hr_error *err) {
    if (e->info.enable_lora)
        return HR_OK;
    return hr_fail(err, HR_ERR_UNSUPPORTED, "LoRA is not enabled; start with --enable-lora");
}

/* Reads the adapter of a reservation and publishes it; a failure gives the reservation back. */
static hr_status load_reserved(hr_engine *e, hr_adapter_reservation *reservation, const char *name,
                               const char *path, hr_error *err) {
    hr_lora *lora = NULL;
    hr_status status = hr_lora_load(e->model, path, &lora, err);
    if (status == HR_OK)
        status = hr_update_check_rank(e->update, hr_lora_max_rank(lora), err);
    if (status != HR_OK) {
        hr_lora_destroy(lora);
        hr_adapter_store_cancel(e->store, reservation);
        return status;
    }
    hr_adapter_payload payload = hr_update_payload(lora);
    hr_lora_contents(e->model, lora, payload.contents);
    if (!hr_adapter_store_accepts(reservation, &payload)) {
        hr_lora_destroy(lora);
        hr_adapter_store_cancel(e->store, reservation);
        return hr_fail(err, HR_ERR_CORRUPT,
                       "%s does not hold what was served under this name; unload it and load it "
                       "again, or send its tensors",
                       path);
    }
    uint32_t rank = hr_lora_max_rank(lora);
    uint64_t id = hr_adapter_store_publish(e->store, reservation, &payload);
    if (id == 0)
        return hr_fail(err, HR_ERR_ADAPTER_UNKNOWN, "it was unloaded while it was being loaded");
    hr_log(HR_LOG_INFO, "loaded adapter %s from %s (id %llu, rank %u, %llu bytes)", name, path,
           (unsigned long long)id, rank, (unsigned long long)payload.bytes);
    return HR_OK;
}

hr_status hr_engine_load_adapter(hr_engine *e, const char *name, const char *path, bool pinned,
                                 hr_error *err) {
    HR_TRY(check_lora_enabled(e, err));
    hr_adapter_reservation *reservation = NULL;
    HR_TRY(hr_adapter_store_reserve(e->store, name, path, pinned, &reservation, err));
    hr_status status = load_reserved(e, reservation, name, path, err);
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "LoRA adapter '%s'", name);
}

hr_adapter_state hr_engine_adapter_state(hr_engine *e, const char *name) {
    return hr_adapter_store_state(e->store, name);
}

hr_status hr_engine_ensure_adapter(hr_engine *e, const char *name, hr_error *err) {
    HR_TRY(check_lora_enabled(e, err));
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    HR_TRY(hr_adapter_store_recall(e->store, name, path, &reservation, err));
    if (reservation == NULL)
        return HR_OK;
    hr_status status = load_reserved(e, reservation, name, path, err);
    return status == HR_OK
               ? HR_OK
               : hr_fail_context(err, status, "Failed to implicitly load LoRA adapter %s", name);
}

hr_status hr_engine_unload_adapter(hr_engine *e, const char *name, hr_error *err) {
    HR_TRY(check_lora_enabled(e, err));
    bool registered = name != NULL && hr_update_is_registered(e->update, name);
    if (name != NULL)
        HR_TRY(hr_receiver_unregister(e->receiver, name, err));
    hr_status status = hr_adapter_store_unload(e->store, name, err);
    hr_loop_renew_waiting(e->loop);
    if (registered && status == HR_ERR_ADAPTER_UNKNOWN)
        status = HR_OK;
    if (status == HR_OK)
        hr_log(HR_LOG_INFO, "unloaded adapter %s", name);
    return status;
}

/* ---- updates from a trainer ---- */

hr_receiver *hr_engine_receiver(hr_engine *e) {
    return e->receiver;
}

const char *hr_engine_base_mode(const hr_engine *e) {
    return e->shadow ? "shadow" : "in_place";
}

hr_status hr_engine_update_from_disk(hr_engine *e, const hr_disk_update *update,
                                     hr_receipt **receipt, hr_error *err) {
    return hr_disk_update_run(e->receiver, hr_model_info_of(e->model)->config, update, receipt,
                              err);
}

hr_status hr_engine_release_memory(hr_engine *e, unsigned kinds, hr_error *err) {
    return hr_occupation_release(e->occupation, kinds, err);
}

void hr_engine_resume_memory(hr_engine *e, unsigned kinds) {
    hr_occupation_resume(e->occupation, kinds);
}

hr_status hr_engine_weight_values(hr_engine *e, const char *name, size_t max_rows, float **out,
                                  size_t *rows, size_t *columns, bool *is_vector, hr_error *err) {
    return hr_model_weight_values(e->model, name, max_rows, out, rows, columns, is_vector, err);
}

hr_status hr_engine_weight_digests(hr_engine *e, const char *adapter, hr_digest_fn fn, void *ctx,
                                   hr_error *err) {
    if (adapter == NULL)
        return hr_model_weight_digests(e->model, fn, ctx, err);
    hr_adapter_lease lease = {0};
    HR_TRY(hr_adapter_store_acquire(e->store, adapter, &lease, err));
    hr_status status = hr_lora_digests(e->model, hr_adapter_lease_data(&lease), fn, ctx, err);
    hr_adapter_store_release(e->store, &lease);
    return status;
}

hr_status hr_engine_check_snapshot(hr_engine *e, hr_error *err) {
    return hr_model_snapshot(e->model, err);
}

hr_status hr_engine_check_reset(hr_engine *e, hr_error *err) {
    return hr_occupation_randomize(e->occupation, err);
}

hr_status hr_engine_check_compare(hr_engine *e, hr_error *err) {
    char name[160];
    double max_abs_err;
    bool equal;
    HR_TRY(hr_model_compare_snapshot(e->model, name, &max_abs_err, &equal, err));
    if (equal)
        return HR_OK;
    return hr_fail(err, HR_ERR_DIGEST, "%s differs from the snapshot: max_abs_err %g", name,
                   max_abs_err);
}

/* ---- looking at adapters ---- */

hr_status hr_engine_list_adapters(hr_engine *e, hr_adapter_info **out, size_t *n, hr_error *err) {
    hr_adapter_entry *entries = NULL;
    size_t count = 0;
    HR_TRY(hr_adapter_store_list(e->store, &entries, &count, err));
    hr_adapter_info *infos = calloc(count > 0 ? count : 1, sizeof *infos);
    if (infos == NULL) {
        free(entries);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu adapters", count);
    }
    for (size_t i = 0; i < count; i++) {
        snprintf(infos[i].name, sizeof infos[i].name, "%s", entries[i].name);
        snprintf(infos[i].path, sizeof infos[i].path, "%s", entries[i].path);
        infos[i].id = entries[i].id;
        infos[i].pinned = entries[i].pinned;
        infos[i].rank = entries[i].rank;
        infos[i].bytes = entries[i].bytes;
        memcpy(infos[i].weight_version, entries[i].weight_version, sizeof infos[i].weight_version);
    }
    free(entries);
    *out = infos;
    *n = count;
    return HR_OK;
}
