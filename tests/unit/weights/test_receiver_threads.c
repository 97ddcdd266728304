/* Many threads at one receiver: calls take turns, and looking waits for none of them. */
#include "receiver_fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { TRAINERS = 3, ROUNDS = 60 };

typedef struct crowd {
    fixture fixture;
    atomic_bool stop;
    atomic_uint published, wrong;
} crowd;

typedef struct trainer {
    crowd *crowd;
    unsigned number;
} trainer;

/* The fixture's calls keep their error in the fixture; threads bring their own. */
static bool push_once(crowd *c, const char *id, const char *bytes) {
    hr_receiver *r = c->fixture.receiver;
    hr_session_options begin = {.session_id = id, .sync_base = true, .timeout_ms = 5000};
    hr_tensor tensors[2] = {fixture_tensor("layers.0.weight", bytes),
                            fixture_tensor("x:q.lora_A.weight", bytes)};
    hr_bucket bucket = {.tensors = tensors, .n = 2, .session_id = id};
    hr_end_options end = {.session_id = id, .weight_version = id};
    char made[HR_SESSION_ID_SIZE];
    if (hr_receiver_begin(r, &begin, made, NULL) != HR_OK)
        return false; /* another trainer's session is open */
    hr_receipt *receipt = NULL;
    bool good = hr_receiver_bucket(r, &bucket, NULL) == HR_OK &&
                hr_receiver_prepare(r, &end, NULL, NULL) == HR_OK &&
                hr_receiver_commit(r, id, &receipt, NULL) == HR_OK &&
                strcmp(receipt->session_id, id) == 0 && receipt->tensors == 2;
    hr_receipt_free(receipt);
    if (!good)
        atomic_fetch_add(&c->wrong, 1);
    return good;
}

static void *run_trainer(void *self) {
    const trainer *t = self;
    for (unsigned i = 0; i < ROUNDS; i++) {
        char id[32];
        (void)snprintf(id, sizeof id, "t%u-%u", t->number, i);
        while (!push_once(t->crowd, id, id) && atomic_load(&t->crowd->wrong) == 0)
            ;
        atomic_fetch_add(&t->crowd->published, 1);
    }
    return NULL;
}

static void *run_watcher(void *self) {
    crowd *c = self;
    hr_receiver_status status;
    while (!atomic_load(&c->stop)) {
        hr_receiver_status_get(c->fixture.receiver, &status);
        if (status.state > HR_SESSION_PREPARED || status.registered != 1 ||
            hr_receiver_is_pending(c->fixture.receiver, "x") ||
            hr_receiver_expire(c->fixture.receiver))
            atomic_fetch_add(&c->wrong, 1);
    }
    return NULL;
}

static void sessions_of_many_trainers_never_mix(void **state) {
    (void)state;
    crowd c = {0};
    fixture_open(&c.fixture);
    assert_int_equal(fixture_register(&c.fixture, "x", "{\"r\":8}", false), HR_OK);
    pthread_t threads[TRAINERS], watcher;
    trainer trainers[TRAINERS];
    assert_int_equal(pthread_create(&watcher, NULL, run_watcher, &c), 0);
    for (unsigned i = 0; i < TRAINERS; i++) {
        trainers[i] = (trainer){&c, i};
        assert_int_equal(pthread_create(&threads[i], NULL, run_trainer, &trainers[i]), 0);
    }
    for (unsigned i = 0; i < TRAINERS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    atomic_store(&c.stop, true);
    assert_int_equal(pthread_join(watcher, NULL), 0);
    assert_int_equal(atomic_load(&c.wrong), 0);
    assert_int_equal(atomic_load(&c.published), TRAINERS * ROUNDS);
    assert_int_equal(c.fixture.sink.publications, TRAINERS * ROUNDS);
    /* base, adapter and version are of one push */
    hr_tensor base = fixture_tensor("layers.0.weight", c.fixture.sink.version);
    hr_tensor adapter = fixture_tensor("q.lora_A.weight", c.fixture.sink.version);
    assert_int_equal(c.fixture.sink.base[0], fake_base_value(&base));
    assert_int_equal(fake_sink_value(&c.fixture.sink, "x"),
                     fake_adapter_value("{\"r\":8}", 7, &adapter, 1));
    fixture_close(&c.fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sessions_of_many_trainers_never_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
