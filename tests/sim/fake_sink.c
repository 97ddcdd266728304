#include "fake_sink.h"

#include "base/error.h"
#include "tensor/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

void *fake_memory_alloc(void *self, size_t bytes) {
    fake_memory *m = self;
    if (bytes > m->most)
        m->most = bytes;
    if (m->countdown >= 0 && m->countdown-- == 0) {
        m->failed = true;
        return NULL;
    }
    void *memory = malloc(bytes);
    memset(memory, 0xa5, bytes); /* not zeroed: nobody may count on it */
    m->live++;
    return memory;
}

void fake_memory_free(void *self, void *memory) {
    fake_memory *m = self;
    m->live--;
    free(memory);
}

static uint64_t mix(uint64_t state, const void *bytes, size_t size) {
    uint8_t digest[HR_XXH3_SIZE];
    uint64_t value;
    hr_xxh3(size > 0 ? bytes : "", size, digest);
    memcpy(&value, digest, sizeof value);
    return (state ^ value) * 0x9e3779b97f4a7c15u + (state >> 29);
}

uint64_t fake_base_value(const hr_tensor *tensor) {
    return mix(1, tensor->data, tensor->bytes);
}

uint64_t fake_adapter_value(const char *config, size_t config_len, const hr_tensor *tensors,
                            size_t n) {
    uint64_t value = mix(2, config, config_len);
    for (size_t i = 0; i < n; i++) {
        value = mix(value, tensors[i].name, strlen(tensors[i].name));
        value = mix(value, tensors[i].data, tensors[i].bytes);
    }
    return value;
}

/* ---- contract and faults ---- */

static hr_status enter(fake_sink *fake, bool is_publish, hr_error *err) {
    assert_false(fake->inside);
    fake->inside = true;
    fake->calls++;
    if (fake->countdown < 0 || (fake->only_publish && !is_publish) || fake->countdown-- > 0)
        return HR_OK;
    fake->failed = true;
    return hr_fail(err, fake->failure, "the engine failed as it was told");
}

static hr_status leave(fake_sink *fake, hr_status status) {
    fake->inside = false;
    return status;
}

void fake_sink_fail(fake_sink *fake, int64_t countdown, hr_status failure, bool only_publish) {
    fake->countdown = countdown;
    fake->failure = failure;
    fake->only_publish = only_publish;
    fake->failed = false;
}

static fake_live *find_live(const fake_sink *fake, const char *name) {
    for (size_t i = 0; i < fake->n_live; i++)
        if (strcmp(fake->live[i].name, name) == 0)
            return (fake_live *)(uintptr_t)&fake->live[i];
    return NULL;
}

static size_t find_room(const fake_sink *fake, const char *name) {
    size_t i = 0;
    while (i < fake->n_rooms && strcmp(fake->rooms[i], name) != 0)
        i++;
    return i;
}

static void give_room_back(fake_sink *fake, const char *name) {
    size_t i = find_room(fake, name);
    if (i < fake->n_rooms)
        memmove(fake->rooms[i], fake->rooms[i + 1], (--fake->n_rooms - i) * sizeof fake->rooms[0]);
}

uint64_t fake_sink_value(const fake_sink *fake, const char *name) {
    const fake_live *found = find_live(fake, name);
    return found != NULL ? found->value : 0;
}

uint64_t fake_sink_id(const fake_sink *fake, const char *name) {
    const fake_live *found = find_live(fake, name);
    return found != NULL ? found->id : 0;
}

void fake_sink_evict(fake_sink *fake, const char *name) {
    fake_live *found = find_live(fake, name);
    assert_non_null(found);
    *found = fake->live[--fake->n_live];
}

void fake_sink_check_idle(const fake_sink *fake) {
    assert_false(fake->inside);
    assert_int_equal(fake->built, 0);
    assert_false(fake->base_begun);
}

/* ---- the sink ---- */

static hr_status do_register(fake_sink *fake, const hr_registration *registration, hr_error *err) {
    if (strstr(registration->config, "\"r\":999") != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "rank 999 is over max_lora_rank 64");
    bool known = find_live(fake, registration->name) != NULL ||
                 find_room(fake, registration->name) < fake->n_rooms;
    if (known)
        return HR_OK;
    if (fake->n_live + fake->n_rooms >= FAKE_NAMES)
        return hr_fail(err, HR_ERR_LIMIT, "all %d places of max-loaded-loras are taken",
                       FAKE_NAMES);
    (void)snprintf(fake->rooms[fake->n_rooms++], sizeof fake->rooms[0], "%s", registration->name);
    return HR_OK;
}

static hr_status sink_register(void *self, const hr_registration *registration, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, false, err);
    return leave(fake, status == HR_OK ? do_register(fake, registration, err) : status);
}

static void sink_forget(void *self, const char *name) {
    fake_sink *fake = self;
    assert_false(fake->inside);
    give_room_back(fake, name);
}

static bool sink_has(void *self, const char *name) {
    return find_live(self, name) != NULL;
}

static hr_status sink_build(void *self, const hr_registration *registration,
                            const hr_tensor *tensors, size_t n, void **built, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, false, err);
    assert_true(find_live(fake, registration->name) != NULL ||
                find_room(fake, registration->name) < fake->n_rooms);
    for (size_t i = 1; i < n; i++)
        assert_true(strcmp(tensors[i - 1].name, tensors[i].name) < 0);
    if (fake->on_build != NULL)
        fake->on_build(fake->on_build_self);
    if (status != HR_OK)
        return leave(fake, status);
    uint64_t *value = malloc(sizeof *value);
    *value = fake_adapter_value(registration->config, registration->config_len, tensors, n);
    /* building reads only: once more gives the same */
    assert_int_equal(
        *value, fake_adapter_value(registration->config, registration->config_len, tensors, n));
    fake->built++;
    *built = value;
    return leave(fake, HR_OK);
}

static void sink_discard(void *self, void *built) {
    fake_sink *fake = self;
    assert_false(fake->inside);
    fake->built--;
    free(built);
}

static hr_status sink_base_begin(void *self, uint64_t timeout_ms, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, false, err);
    assert_false(fake->base_begun);
    assert_true(timeout_ms > 0);
    if (status != HR_OK)
        return leave(fake, status);
    fake->base_begun = true;
    fake->base_sealed = false;
    memcpy(fake->shadow, fake->base, sizeof fake->base);
    memset(fake->written, 0, sizeof fake->written);
    return leave(fake, HR_OK);
}

/* "layers.2" is 2. */
static size_t base_index(const hr_tensor *tensor) {
    unsigned i = FAKE_BASE;
    return sscanf(tensor->name, "layers.%u", &i) == 1 && i < FAKE_BASE ? i : FAKE_BASE;
}

static hr_status do_write(fake_sink *fake, const hr_tensor *tensors, size_t n, hr_error *err) {
    for (size_t i = 0; i < n; i++) {
        size_t at = base_index(&tensors[i]);
        if (at == FAKE_BASE)
            return hr_fail(err, HR_ERR_NOT_FOUND, "the model has no weight '%s'", tensors[i].name);
        assert_false(fake->written[at]);
    }
    for (size_t i = 0; i < n; i++) {
        fake->shadow[base_index(&tensors[i])] = fake_base_value(&tensors[i]);
        fake->written[base_index(&tensors[i])] = true;
    }
    return HR_OK;
}

static hr_status sink_base_write(void *self, const hr_tensor *tensors, size_t n, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, false, err);
    assert_true(fake->base_begun && !fake->base_sealed && n > 0);
    return leave(fake, status == HR_OK ? do_write(fake, tensors, n, err) : status);
}

static hr_status sink_base_seal(void *self, bool complete, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, false, err);
    assert_true(fake->base_begun && !fake->base_sealed);
    for (size_t i = 0; i < FAKE_BASE && status == HR_OK; i++)
        if (complete && !fake->written[i])
            status = hr_fail(err, HR_ERR_MODEL, "the weight 'layers.%zu' did not come", i);
    fake->base_sealed = status == HR_OK;
    return leave(fake, status);
}

static void sink_base_abandon(void *self) {
    fake_sink *fake = self;
    assert_false(fake->inside);
    assert_true(fake->base_begun);
    fake->base_begun = false;
}

static void make_live(fake_sink *fake, hr_published_adapter *adapter) {
    fake_live *live = find_live(fake, adapter->name);
    if (live == NULL) {
        assert_true(find_room(fake, adapter->name) < fake->n_rooms);
        give_room_back(fake, adapter->name);
        live = &fake->live[fake->n_live++];
        (void)snprintf(live->name, sizeof live->name, "%s", adapter->name);
    }
    live->value = *(uint64_t *)adapter->built;
    live->id = adapter->id = ++fake->next_id;
    fake->built--;
    free(adapter->built);
}

static hr_status sink_publish(void *self, hr_publication *publication, hr_error *err) {
    fake_sink *fake = self;
    hr_status status = enter(fake, true, err);
    assert_true(!publication->base || fake->base_sealed);
    assert_true(publication->timeout_ms > 0);
    if (status == HR_OK && publication->base && fake->requests != NULL)
        status = fake->requests(fake->requests_self, publication->timeout_ms, err);
    if (status != HR_OK)
        return leave(fake, status);
    for (size_t i = 0; i < publication->n_adapters; i++)
        make_live(fake, &publication->adapters[i]);
    if (publication->base) {
        memcpy(fake->base, fake->shadow, sizeof fake->base);
        fake->base_begun = false;
    }
    if (publication->weight_version != NULL)
        (void)snprintf(fake->version, sizeof fake->version, "%s", publication->weight_version);
    fake->publications++;
    fake->flushes += publication->flush_cache;
    fake->aborts += publication->abort_all_requests;
    return leave(fake, HR_OK);
}

void fake_sink_init(fake_sink *fake) {
    *fake = (fake_sink){.countdown = -1, .version = "v0"};
}

hr_receiver_sink fake_sink_ops(fake_sink *fake) {
    return (hr_receiver_sink){
        .self = fake,
        .register_adapter = sink_register,
        .forget_adapter = sink_forget,
        .has_adapter = sink_has,
        .build_adapter = sink_build,
        .discard_adapter = sink_discard,
        .base_begin = sink_base_begin,
        .base_write = sink_base_write,
        .base_seal = sink_base_seal,
        .base_abandon = sink_base_abandon,
        .publish = sink_publish,
    };
}
