/* A publisher's life: options, connection, progress, report. The push itself is in push.c. */
#include "publish/publisher.h"

#include "publish/receipt.h"
#include "transport/http_transport.h"

#include <stdlib.h>
#include <string.h>

/* ---- creation ---- */

static hr_status check_group(const hr_group *group, hr_error *err) {
    if (group == NULL)
        return HR_OK;
    if (group->size == 0 || group->rank >= group->size || group->allgather == NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "group: rank %u of %u; wanted a rank below the size, and an allgather",
                       group->rank, group->size);
    return HR_OK;
}

static hr_status check_options(const hr_publisher_options *o, hr_error *err) {
    if (o->n_engines == 0 || o->n_engines > HR_PUSH_MAX_ENGINES)
        return hr_fail(err, HR_ERR_INVALID, "%zu engines; wanted 1 to %d", o->n_engines,
                       HR_PUSH_MAX_ENGINES);
    if (o->transport != NULL && !hr_http_transport_known(o->transport))
        return hr_fail(err, HR_ERR_INVALID,
                       "transport \"%.100s\" is not known; there are auto, safetensors, sglang and "
                       "sglang-load",
                       o->transport);
    if ((unsigned)o->pause > HR_PUSH_PAUSE_ABORT)
        return hr_fail(err, HR_ERR_INVALID, "pause mode %d is not known", (int)o->pause);
    return check_group(o->group, err);
}

/* URLs in one form, none of them twice. */
static hr_status copy_urls(const hr_publisher_options *o, char **urls, hr_error *err) {
    for (size_t i = 0; i < o->n_engines; i++) {
        HR_TRY(hr_http_base_url(o->engines[i], &urls[i], err));
        for (size_t j = 0; j < i; j++) {
            if (strcmp(urls[i], urls[j]) == 0)
                return hr_fail(err, HR_ERR_INVALID, "engine %.200s is listed twice", urls[i]);
        }
    }
    return HR_OK;
}

static char *copy(const char *text, bool *failed) {
    char *out = text != NULL ? strdup(text) : NULL;
    *failed = *failed || (text != NULL && out == NULL);
    return out;
}

hr_status hr_publisher_create_over(const hr_publisher_options *options,
                                   const hr_transport *transport, hr_publisher **out,
                                   hr_error *err) {
    bool failed = false;
    hr_publisher *p = NULL;
    HR_TRY(check_options(options, err));
    char **urls = calloc(options->n_engines, sizeof *urls);
    hr_status status = urls == NULL ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for engine URLs")
                                    : copy_urls(options, urls, err);
    if (status != HR_OK)
        goto out;
    p = calloc(1, sizeof *p);
    if (p == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a publisher");
        goto out;
    }
    p->options = *options;
    p->options.engines = NULL; /* the fleet has copies */
    p->api_key = copy(options->api_key, &failed);
    p->transport_name = copy(options->transport != NULL ? options->transport : "auto", &failed);
    if (p->options.bucket_bytes == 0)
        p->options.bucket_bytes = HR_PUSH_BUCKET_BYTES;
    status = failed
                 ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a publisher")
                 : hr_fleet_init(&p->fleet, (const char *const *)urls, options->n_engines,
                                 options->timeout_ms > 0 ? options->timeout_ms : HR_PUSH_TIMEOUT_MS,
                                 err);
    if (status == HR_OK) {
        hr_fleet_reset(&p->fleet);
        if (transport != NULL)
            p->fleet.transport = *transport;
        *out = p;
        p = NULL;
    }
out:
    hr_publisher_destroy(p);
    for (size_t i = 0; urls != NULL && i < options->n_engines; i++)
        free(urls[i]);
    free(urls);
    return status;
}

static bool on_tick(void *ctx) {
    hr_publisher *p = ctx;
    return hr_publisher_tell(p, p->progress.stage);
}

hr_status hr_publisher_create(const hr_publisher_options *options, hr_publisher **out,
                              hr_error *err) {
    hr_publisher *p = NULL;
    HR_TRY(hr_publisher_create_over(options, NULL, &p, err));
    hr_http_client_options client = {.api_key = p->api_key, .tick = on_tick, .tick_ctx = p};
    hr_status status = hr_http_client_create(&client, &p->client, err);
    if (status != HR_OK)
        hr_publisher_destroy(p);
    else
        *out = p;
    return status;
}

void hr_publisher_destroy(hr_publisher *publisher) {
    if (publisher == NULL)
        return;
    hr_fleet_free(&publisher->fleet);
    hr_http_client_destroy(publisher->client);
    hr_publisher_forget_registered(publisher);
    free(publisher->api_key);
    free(publisher->transport_name);
    free(publisher->report);
    free(publisher);
}

hr_status hr_publisher_connect(hr_publisher *publisher, hr_error *err) {
    hr_fleet *fleet = &publisher->fleet;
    if (fleet->transport.attempt != NULL)
        return HR_OK;
    const char **urls = calloc(fleet->n, sizeof *urls);
    if (urls == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", fleet->n);
    for (size_t i = 0; i < fleet->n; i++)
        urls[i] = fleet->engines[i].url;
    hr_status status =
        hr_http_transport_open(publisher->client, urls, fleet->n, publisher->transport_name,
                               fleet->timeout_ms, &fleet->transport, err);
    free(urls);
    return status;
}

/* ---- progress and report ---- */

/* Tensor bytes of the leaving bucket that have been read once. */
static uint64_t leaving_bytes(const hr_wire_bucket *bucket) {
    if (bucket == NULL || bucket->n == 0)
        return 0;
    uint64_t done = bucket->bytes;
    if (bucket->hashed < bucket->n)
        done = bucket->tensors[bucket->hashed].start - bucket->head.len + bucket->hashed_bytes;
    return done;
}

bool hr_publisher_tell(hr_publisher *publisher, const char *stage) {
    hr_push_progress *progress = &publisher->progress;
    progress->stage = stage;
    progress->bytes = publisher->sent_bytes + leaving_bytes(publisher->leaving);
    uint64_t now = hr_now_ns(&publisher->fleet.clock);
    uint64_t since = publisher->first_byte_ns > 0 ? now - publisher->first_byte_ns : 0;
    progress->rate = since > 0 ? (double)progress->bytes * 1e9 / (double)since : 0;
    if (publisher->options.progress != NULL &&
        !publisher->options.progress(publisher->options.progress_ctx, progress))
        publisher->cancelled = true;
    return !publisher->cancelled || publisher->unstoppable;
}

void hr_publisher_set_report(hr_publisher *publisher, const hr_push_receipt *receipt) {
    char *report = strdup(hr_push_receipt_json(receipt));
    free(publisher->report);
    publisher->report = report;
}

const char *hr_publisher_report(const hr_publisher *publisher) {
    return publisher->report != NULL ? publisher->report : "{}";
}

/* ---- names registered once ---- */

static hr_registered *find_registered(const hr_publisher *p, const char *name) {
    for (size_t i = 0; i < p->n_registered; i++) {
        if (strcmp(p->registered[i].name, name) == 0)
            return &p->registered[i];
    }
    return NULL;
}

bool hr_publisher_is_registered(const hr_publisher *publisher, const hr_push_adapter *adapter) {
    uint8_t digest[HR_XXH3_SIZE];
    const hr_registered *known = find_registered(publisher, adapter->name);
    hr_xxh3(adapter->config, adapter->config_len, digest);
    return known != NULL && memcmp(known->config, digest, sizeof digest) == 0;
}

hr_status hr_publisher_set_registered(hr_publisher *publisher, const hr_push_adapter *adapter,
                                      hr_error *err) {
    hr_registered *known = find_registered(publisher, adapter->name);
    if (known == NULL) {
        hr_registered *more =
            realloc(publisher->registered, (publisher->n_registered + 1) * sizeof *more);
        if (more != NULL)
            publisher->registered = more;
        char *name = more != NULL ? strdup(adapter->name) : NULL;
        if (name == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an adapter's name");
        known = &more[publisher->n_registered++];
        known->name = name;
    }
    hr_xxh3(adapter->config, adapter->config_len, known->config);
    return HR_OK;
}

void hr_publisher_forget_registered(hr_publisher *publisher) {
    for (size_t i = 0; i < publisher->n_registered; i++)
        free(publisher->registered[i].name);
    free(publisher->registered);
    publisher->registered = NULL;
    publisher->n_registered = 0;
}
