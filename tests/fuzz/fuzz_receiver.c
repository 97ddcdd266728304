/* Any bytes as calls of a trainer: names, manifests, digests, ids and versions as they come. The
 * receiver never crashes, publishes only what it says it published, and leaves nothing. */
#include "base/error.h"

#include <headrace/receiver.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_TENSORS = 8, MAX_TEXT = 300 };

/* ---- a sink that counts ---- */

typedef struct counting_sink {
    int64_t built, publications;
    bool base_begun, base_sealed;
} counting_sink;

static hr_status sink_register(void *self, const hr_registration *registration, hr_error *err) {
    (void)self;
    if (registration->config_len == 1)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "a config of one byte is none");
    return HR_OK;
}

static void sink_forget(void *self, const char *name) {
    (void)self;
    HR_ASSERT(name[0] != '\0' && strchr(name, ':') == NULL);
}

static hr_status sink_build(void *self, const hr_registration *registration,
                            const hr_tensor *tensors, size_t n, void **built, hr_error *err) {
    counting_sink *sink = self;
    HR_ASSERT(n > 0 && registration->name[0] != '\0');
    for (size_t i = 0; i < n; i++) {
        uint8_t sum = 0;
        for (uint64_t k = 0; k < tensors[i].bytes; k++)
            sum ^= ((const uint8_t *)tensors[i].data)[k];
        HR_ASSERT(i == 0 || strcmp(tensors[i - 1].name, tensors[i].name) < 0);
        if (sum == 0x55)
            return hr_fail(err, HR_ERR_SHAPE, "unwanted bytes");
    }
    sink->built++;
    *built = sink;
    return HR_OK;
}

static void sink_discard(void *self, void *built) {
    HR_ASSERT(built == self);
    ((counting_sink *)self)->built--;
}

static hr_status sink_base_begin(void *self, uint64_t timeout_ms, hr_error *err) {
    counting_sink *sink = self;
    (void)timeout_ms;
    (void)err;
    HR_ASSERT(!sink->base_begun);
    sink->base_begun = true;
    sink->base_sealed = false;
    return HR_OK;
}

static hr_status sink_base_write(void *self, const hr_tensor *tensors, size_t n, hr_error *err) {
    HR_ASSERT(((counting_sink *)self)->base_begun && n > 0);
    for (size_t i = 0; i < n; i++)
        if (tensors[i].name[0] == 'u')
            return hr_fail(err, HR_ERR_NOT_FOUND, "unknown weight");
    return HR_OK;
}

static hr_status sink_base_seal(void *self, bool complete, hr_error *err) {
    counting_sink *sink = self;
    HR_ASSERT(sink->base_begun && !sink->base_sealed);
    if (complete)
        return hr_fail(err, HR_ERR_MODEL, "it is never complete");
    sink->base_sealed = true;
    return HR_OK;
}

static void sink_base_abandon(void *self) {
    counting_sink *sink = self;
    HR_ASSERT(sink->base_begun);
    sink->base_begun = false;
}

static hr_status sink_publish(void *self, hr_publication *publication, hr_error *err) {
    counting_sink *sink = self;
    if (publication->weight_version != NULL && publication->weight_version[0] == 't')
        return hr_fail(err, HR_ERR_TIMEOUT, "requests run on");
    HR_ASSERT(!publication->base || sink->base_sealed);
    for (size_t i = 0; i < publication->n_adapters; i++)
        publication->adapters[i].id = (uint64_t)sink->publications + 1;
    sink->built -= (int64_t)publication->n_adapters;
    sink->base_begun = sink->base_begun && !publication->base;
    sink->publications++;
    return HR_OK;
}

/* ---- calls out of bytes ---- */

typedef struct input {
    const uint8_t *at;
    size_t left;
    char texts[4 * MAX_TENSORS][MAX_TEXT];
    size_t n_texts;
} input;

static uint8_t take(input *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->at++;
}

/* A length and so many bytes, or NULL for the length 255. */
static const char *take_text(input *in) {
    size_t len = take(in);
    if (len == 255 || in->n_texts == 4 * MAX_TENSORS)
        return NULL;
    if (len > in->left)
        len = in->left;
    char *text = in->texts[in->n_texts++];
    if (len > 0)
        memcpy(text, in->at, len);
    text[len] = '\0';
    in->at += len;
    in->left -= len;
    return text;
}

static size_t take_tensors(input *in, hr_tensor *tensors) {
    size_t n = take(in) % (MAX_TENSORS + 1);
    for (size_t i = 0; i < n; i++) {
        tensors[i] = (hr_tensor){.name = take_text(in), .dtype = HR_DTYPE_U8, .ndim = 1};
        size_t bytes = take(in);
        if (bytes > in->left)
            bytes = in->left;
        tensors[i].data = in->at;
        tensors[i].bytes = bytes;
        tensors[i].shape[0] = bytes;
        in->at += bytes;
        in->left -= bytes;
    }
    return n;
}

static void release(void *owner) {
    --*(int64_t *)owner;
}

static hr_bucket take_bucket(input *in, hr_tensor *tensors, int64_t *owned) {
    uint8_t flags = take(in);
    hr_bucket bucket = {.tensors = tensors, .n = take_tensors(in, tensors)};
    bucket.flush_cache = flags & 1;
    if (flags & 2)
        bucket.adapter = take_text(in);
    if (flags & 4)
        bucket.session_id = take_text(in);
    if (flags & 8)
        bucket.stream = take_text(in);
    bucket.index = flags >> 6;
    if (flags & 16)
        bucket.weight_version = take_text(in);
    if (flags & 32) {
        bucket.owner = owned;
        bucket.release = release;
        ++*owned;
    }
    return bucket;
}

static hr_end_options take_end(input *in, hr_manifest *manifest, hr_manifest_entry *entries) {
    uint8_t flags = take(in);
    hr_end_options end = {.complete_base = (flags & 7) == 7, .audit = flags & 8};
    if (flags & 16)
        end.session_id = take_text(in);
    if (flags & 32)
        end.weight_version = take_text(in);
    if (flags & 64) {
        *manifest = (hr_manifest){.entries = entries, .covers_base = flags & 128};
        manifest->n = take(in) % MAX_TENSORS;
        for (size_t i = 0; i < manifest->n; i++) {
            entries[i] = (hr_manifest_entry){.name = take_text(in)};
            entries[i].sha256 = take_text(in);
            entries[i].xxh3 = take_text(in);
        }
        end.manifest = manifest;
    }
    return end;
}

static hr_registration take_registration(input *in) {
    uint8_t flags = take(in);
    hr_registration registration = {.defer_publish = flags & 1, .refuse_existing = flags & 2};
    registration.name = take_text(in);
    registration.config = take_text(in);
    registration.config_len = registration.config != NULL ? strlen(registration.config) : 0;
    return registration;
}

static hr_session_options take_begin(input *in, const char **names) {
    uint8_t flags = take(in);
    hr_session_options begin = {.sync_base = flags & 1, .audit = flags & 2};
    if (flags & 4)
        begin.session_id = take_text(in);
    if (flags & 8) {
        begin.adapters = names;
        begin.n_adapters = flags >> 4 & 1;
        names[0] = begin.n_adapters > 0 ? take_text(in) : NULL;
    }
    return begin;
}

static void check_receipt(hr_receipt *receipt, hr_status status) {
    HR_ASSERT((receipt != NULL) == (status == HR_OK));
    if (receipt == NULL)
        return;
    uint64_t tensors = receipt->base_tensors;
    for (size_t i = 0; i < receipt->n_adapters; i++)
        tensors += receipt->adapters[i].tensors;
    HR_ASSERT(tensors == receipt->tensors && tensors > 0);
    for (size_t i = 0; i < receipt->n_audit; i++)
        HR_ASSERT(strlen(receipt->audit[i].sha256) == 64);
    hr_receipt_free(receipt);
}

static hr_status call(input *in, hr_receiver *receiver, int64_t *owned, hr_error *err) {
    hr_tensor tensors[MAX_TENSORS];
    hr_manifest manifest;
    hr_manifest_entry entries[MAX_TENSORS];
    const char *names[1];
    char id[HR_SESSION_ID_SIZE];
    hr_receipt *receipt = NULL;
    hr_status status = HR_OK;
    in->n_texts = 0;
    switch (take(in) % 9) {
    case 0: {
        hr_registration registration = take_registration(in);
        return hr_receiver_register(receiver, &registration, NULL, err);
    }
    case 1: {
        hr_session_options begin = take_begin(in, names);
        return hr_receiver_begin(receiver, &begin, id, err);
    }
    case 2: {
        hr_bucket bucket = take_bucket(in, tensors, owned);
        return hr_receiver_bucket(receiver, &bucket, err);
    }
    case 3: {
        hr_end_options end = take_end(in, &manifest, entries);
        status = hr_receiver_prepare(receiver, &end, &receipt, err);
        break;
    }
    case 4:
        status = hr_receiver_commit(receiver, take_text(in), &receipt, err);
        break;
    case 5: {
        hr_end_options end = take_end(in, &manifest, entries);
        status = hr_receiver_end(receiver, &end, &receipt, err);
        break;
    }
    case 6:
        return hr_receiver_abort(receiver, take_text(in), err);
    case 7: {
        hr_registration registration = take_registration(in);
        hr_bucket bucket = take_bucket(in, tensors, owned);
        hr_end_options end = take_end(in, &manifest, entries);
        status = hr_receiver_apply(receiver, registration.name != NULL ? &registration : NULL,
                                   &bucket, &end, &receipt, err);
        break;
    }
    default: {
        const char *text = take_text(in);
        if (text != NULL)
            return hr_receiver_unregister(receiver, text, err);
        return hr_receiver_set_version(receiver, take_text(in), false, err);
    }
    }
    check_receipt(receipt, status);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    counting_sink sink = {0};
    hr_receiver_sink ops = {.self = &sink,
                            .register_adapter = sink_register,
                            .forget_adapter = sink_forget,
                            .build_adapter = sink_build,
                            .discard_adapter = sink_discard,
                            .base_begin = sink_base_begin,
                            .base_write = sink_base_write,
                            .base_seal = sink_base_seal,
                            .base_abandon = sink_base_abandon,
                            .publish = sink_publish};
    hr_receiver_options options = {.instance = "fuzz", .base_mode = "shadow"};
    hr_receiver *receiver = NULL;
    HR_ASSERT(hr_receiver_create(&options, &ops, &receiver, NULL) == HR_OK);
    input *in = calloc(1, sizeof *in);
    HR_ASSERT(in != NULL);
    in->at = data;
    in->left = size;
    int64_t owned = 0;
    while (in->left > 0) {
        hr_error err = {0};
        hr_status status = call(in, receiver, &owned, &err);
        HR_ASSERT(status == HR_OK || (err.status == status && err.message[0] != '\0'));
        hr_receiver_status shown;
        hr_receiver_status_get(receiver, &shown);
        HR_ASSERT(sink.built == 0 || shown.state == HR_SESSION_PREPARED);
        HR_ASSERT(!sink.base_begun || shown.state != HR_SESSION_IDLE);
        HR_ASSERT(owned == 0 || shown.state == HR_SESSION_OPEN);
    }
    hr_receiver_destroy(receiver);
    HR_ASSERT(sink.built == 0 && !sink.base_begun && owned == 0);
    free(in);
    return 0;
}
