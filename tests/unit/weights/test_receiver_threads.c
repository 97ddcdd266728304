/* Many threads at one receiver: calls take turns, and looking waits for none of them. */
#include "receiver_fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

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

/* ---- a sink that builds two adapters at a time ---- */

enum { MANY = 9, MEET_MS = 5000 };

/* Around the fake sink, which is for one thread at a time. */
typedef struct pair_sink {
    hr_receiver_sink plain;
    pthread_mutex_t lock;
    atomic_uint begun;
    atomic_bool met;     /* the first two were under way at once */
    const char *failing; /* the first letters of names that fail */
} pair_sink;

static pair_sink pair;

static void pause_ms(long ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void meet_another(void) {
    atomic_fetch_add(&pair.begun, 1);
    for (int i = 0; i < MEET_MS && atomic_load(&pair.begun) < 2; i++)
        pause_ms(1);
    if (atomic_load(&pair.begun) >= 2)
        atomic_store(&pair.met, true);
}

static hr_status build_beside(void *self, const hr_registration *registration,
                              const hr_tensor *tensors, size_t n, void **built, hr_error *err) {
    meet_another();
    if (strchr(pair.failing, registration->name[0]) != NULL) {
        pause_ms(registration->name[0] == pair.failing[0] ? 5 : 0); /* the first fails last */
        return hr_fail(err, HR_ERR_SHAPE, "%s is none", registration->name);
    }
    pthread_mutex_lock(&pair.lock);
    hr_status status = pair.plain.build_adapter(self, registration, tensors, n, built, err);
    pthread_mutex_unlock(&pair.lock);
    return status;
}

static const char *const names[MANY] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};

static hr_status push_many(fixture *f, const char *failing) {
    hr_tensor tensors[MANY];
    char keys[MANY][32];
    hr_bucket bucket = {.tensors = tensors, .n = MANY};
    hr_end_options end = {0};
    hr_receipt *receipt = NULL;
    pair.failing = failing;
    atomic_store(&pair.begun, 0);
    atomic_store(&pair.met, false);
    for (size_t i = 0; i < MANY; i++) {
        assert_int_equal(fixture_register(f, names[i], "{\"r\":8}", false), HR_OK);
        (void)snprintf(keys[i], sizeof keys[i], "%s:q.lora_A.weight", names[i]);
        tensors[i] = fixture_tensor(keys[i], keys[i]);
    }
    assert_int_equal(fixture_begin(f, false), HR_OK);
    assert_int_equal(hr_receiver_bucket(f->receiver, &bucket, &f->err), HR_OK);
    hr_status status = hr_receiver_end(f->receiver, &end, &receipt, &f->err);
    hr_receipt_free(receipt);
    return status;
}

static void adapters_are_built_two_at_a_time_and_the_first_failure_by_name_is_told(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    pair = (pair_sink){.plain = fake_sink_ops(&f.sink), .lock = PTHREAD_MUTEX_INITIALIZER};
    hr_receiver_sink ops = pair.plain;
    ops.build_adapter = build_beside;
    ops.builds_together = true;
    hr_receiver_destroy(f.receiver);
    assert_int_equal(
        hr_receiver_create(&(hr_receiver_options){.instance = "engine-1"}, &ops, &f.receiver, NULL),
        HR_OK);
    static const char *const failing[] = {"ab", "bc", "de", "hi", "i"};
    for (size_t i = 0; i < sizeof failing / sizeof *failing; i++) {
        assert_int_equal(push_many(&f, failing[i]), HR_ERR_SHAPE);
        assert_true(atomic_load(&pair.met));
        assert_int_equal(f.err.message[0], failing[i][0]);
        assert_int_equal(f.sink.built, 0); /* what had been built is discarded */
        assert_int_equal(fake_sink_value(&f.sink, "a"), 0);
    }
    assert_int_equal(push_many(&f, ""), HR_OK);
    assert_true(atomic_load(&pair.met));
    for (size_t i = 0; i < MANY; i++)
        assert_int_not_equal(fake_sink_value(&f.sink, names[i]), 0);
    hr_receiver_destroy(f.receiver);
    pthread_mutex_destroy(&pair.lock);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sessions_of_many_trainers_never_mix),
        cmocka_unit_test(adapters_are_built_two_at_a_time_and_the_first_failure_by_name_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
