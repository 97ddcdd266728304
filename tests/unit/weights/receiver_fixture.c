#include "receiver_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static uint64_t read_clock(void *self) {
    return *(uint64_t *)self;
}

void fixture_open(fixture *f) {
    *f = (fixture){.memory = {.countdown = -1}};
    fake_sink_init(&f->sink);
    hr_receiver_options options = {.instance = "engine-1",
                                   .base_mode = "shadow",
                                   .lease_ms = FIXTURE_LEASE_MS,
                                   .max_stash_bytes = FIXTURE_STASH,
                                   .ranks = 2,
                                   .now_ns = read_clock,
                                   .clock_self = &f->now_ns,
                                   .alloc = fake_memory_alloc,
                                   .free = fake_memory_free,
                                   .alloc_self = &f->memory};
    hr_receiver_sink ops = fake_sink_ops(&f->sink);
    assert_int_equal(hr_receiver_create(&options, &ops, &f->receiver, NULL), HR_OK);
}

void fixture_close(fixture *f) {
    hr_receiver_destroy(f->receiver);
    fake_sink_check_idle(&f->sink);
    assert_int_equal(f->sink.n_rooms, 0);
    assert_int_equal(f->memory.live, 0);
}

void fixture_pass_ms(fixture *f, uint64_t ms) {
    f->now_ns += ms * 1000000;
}

hr_status fixture_register(fixture *f, const char *name, const char *config, bool defer) {
    hr_registration registration = {
        .name = name, .config = config, .config_len = strlen(config), .defer_publish = defer};
    return hr_receiver_register(f->receiver, &registration, NULL, &f->err);
}

hr_status fixture_begin_for(fixture *f, const char *id, bool sync_base, const char *adapter) {
    hr_session_options options = {.session_id = id,
                                  .sync_base = sync_base,
                                  .adapters = adapter != NULL ? &adapter : NULL,
                                  .n_adapters = adapter != NULL};
    char made[HR_SESSION_ID_SIZE];
    return hr_receiver_begin(f->receiver, &options, made, &f->err);
}

hr_status fixture_begin(fixture *f, bool sync_base) {
    return fixture_begin_for(f, NULL, sync_base, NULL);
}

hr_tensor fixture_tensor(const char *name, const char *bytes) {
    return (hr_tensor){.name = name,
                       .dtype = HR_DTYPE_U8,
                       .ndim = 1,
                       .shape = {strlen(bytes)},
                       .data = bytes,
                       .bytes = strlen(bytes)};
}

hr_status fixture_send(fixture *f, const char *name, const char *bytes) {
    hr_tensor tensor = fixture_tensor(name, bytes);
    hr_bucket bucket = {.tensors = &tensor, .n = 1};
    return hr_receiver_bucket(f->receiver, &bucket, &f->err);
}

hr_status fixture_end(fixture *f, const char *version) {
    hr_end_options options = {.weight_version = version};
    return hr_receiver_end(f->receiver, &options, NULL, &f->err);
}

hr_status fixture_end_with(fixture *f, const hr_manifest *manifest) {
    hr_end_options options = {.manifest = manifest};
    return hr_receiver_end(f->receiver, &options, NULL, &f->err);
}

void fixture_send_adapter(fixture *f, const char *adapter, const char *bytes) {
    static const char *const keys[] = {"q.lora_A.weight", "q.lora_B.weight"};
    for (size_t i = 0; i < 2; i++) {
        char name[HR_LORA_NAME_SIZE + 32];
        (void)snprintf(name, sizeof name, "%s:%s", adapter, keys[i]);
        assert_int_equal(fixture_send(f, name, bytes), HR_OK);
    }
}

uint64_t fixture_publish(fixture *f, const char *adapter, const char *bytes) {
    assert_int_equal(fixture_register(f, adapter, "{\"r\":8}", false), HR_OK);
    assert_int_equal(fixture_begin_for(f, NULL, false, adapter), HR_OK);
    fixture_send_adapter(f, adapter, bytes);
    assert_int_equal(fixture_end(f, NULL), HR_OK);
    return fake_sink_value(&f->sink, adapter);
}

void fixture_says(const fixture *f, hr_status came, hr_status wanted, const char *text) {
    assert_int_equal(came, wanted);
    if (strstr(f->err.message, text) == NULL)
        fail_msg("'%s' is not in: %s", text, f->err.message);
}
