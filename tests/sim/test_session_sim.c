/* Every step of the update protocol under every fault, driving the production receiver.
 *
 * A fake trainer pushes to a fake engine (one number for each adapter and base weight, made of all
 * their bytes). At each step of each plan one fault is put in: a call of the engine fails, an
 * allocation fails, the trainer dies, a call comes twice, a reply is lost, a lease runs out, a
 * tensor is damaged, swapped, missing or too many, a publish times out, another trainer calls, the
 * same trainer calls what does not belong there.
 * After every call requests must see wholly the old or wholly the new weights, the right one of the
 * two; nothing may be left over; and the next full push must work.
 * Then the same at random, with two trainers, and with a fleet of two engines.
 * Argument: number of random runs (default 200; nightly 10000). */
#include "fake_trainer.h"

#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static unsigned n_random_runs = 200;

typedef enum sim_fault {
    FAULT_NONE,
    FAULT_SINK,         /* the n-th call of the engine within the step fails */
    FAULT_SINK_RETRY,   /* and the trainer calls again */
    FAULT_MEMORY,       /* the n-th allocation within the step fails */
    FAULT_MEMORY_RETRY, /* and the trainer calls again */
    FAULT_KILL_BEFORE,  /* the trainer dies before the step */
    FAULT_KILL_AFTER,   /* or before it has the reply */
    FAULT_TWICE,        /* the reply is lost, so the call comes again */
    FAULT_LATE,         /* the lease runs out before the step */
    FAULT_SLOW,         /* every step takes most of a lease */
    FAULT_PUBLISH_LATE, /* running requests do not end in time */
    FAULT_SECOND,       /* another trainer tries everything before the step */
    FAULT_OUT_OF_ORDER, /* the next bucket comes first; a call comes again, but different */
    FAULT_SILENT,       /* from this bucket on none is sent */
    FAULT_NO_MANIFEST,  /* where there must be one */
    FAULT_DEAF,         /* a bucket is refused, and the trainer goes on as if it were not */
    FAULT_DAMAGE_BYTE,  /* a bucket is not what the manifest says */
    FAULT_DAMAGE_SWAPPED,
    FAULT_DAMAGE_MISSING,
    FAULT_DAMAGE_EXTRA,
    FAULT_DAMAGE_BASE,
    FAULT_DAMAGE_STRANGER,
    FAULT_DAMAGE_FLUSH,
    FAULT_COUNT
} sim_fault;

typedef enum sim_outcome { DONE, FAILED, DEAD } sim_outcome;

/* One push under one fault. */
typedef struct trial {
    engine engine;
    uint64_t now_ns;
    push push;
    reference before, after;
    sim_fault fault;
    size_t at; /* the step of the fault */
    int64_t nth;
    bool holds; /* the engine keeps something for the trainer: a lease is running */
    bool begun, published;
    bool refused; /* at once, so that the trainer could put it right */
    bool hit;
} trial;

static void check_seen(const trial *t) {
    reference seen;
    reference_of(&t->engine, &seen);
    assert_true(reference_equals(&seen, t->published ? &t->after : &t->before));
}

/* ---- another trainer ---- */

static const hr_tensor intruder = {.name = "a:k_proj.lora_A.weight",
                                   .dtype = HR_DTYPE_U8,
                                   .ndim = 1,
                                   .shape = {4},
                                   .data = "evil",
                                   .bytes = 4};

/* While a session is open nothing of another trainer gets in, and nothing it does ends it. */
static void try_to_intrude(trial *t) {
    hr_receiver *r = t->engine.receiver;
    hr_receiver_status before, after;
    hr_receiver_status_get(r, &before);
    if (before.state == HR_SESSION_IDLE)
        return;
    char id[HR_SESSION_ID_SIZE];
    hr_session_options begin = {.session_id = "intruder", .sync_base = true};
    hr_bucket bucket = {.tensors = &intruder, .n = 1, .session_id = "intruder"};
    hr_end_options end = {.session_id = "intruder", .weight_version = "evil"};
    hr_error err;
    assert_int_equal(hr_receiver_begin(r, &begin, id, &err), HR_ERR_SESSION);
    assert_non_null(strstr(err.message, "already open"));
    assert_non_null(strstr(err.message, t->push.session));
    assert_int_equal(hr_receiver_bucket(r, &bucket, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_prepare(r, &end, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_commit(r, "intruder", NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_end(r, &end, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_abort(r, "intruder", NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_apply(r, NULL, &bucket, &end, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_set_version(r, "evil", true, NULL), HR_ERR_SESSION);
    assert_false(hr_receiver_expire(r));
    if (before.tensors > 0 && t->push.n_adapters > 0) {
        hr_registration registration = {
            .name = t->push.adapters[0], .config = "{\"r\":4}", .config_len = 7};
        hr_status status = hr_receiver_register(r, &registration, NULL, NULL);
        if (t->push.tensors[0].adapter == 0)
            assert_int_equal(status, HR_ERR_BUSY);
        status = hr_receiver_unregister(r, t->push.adapters[0], NULL);
        if (t->push.tensors[0].adapter == 0)
            assert_int_equal(status, HR_ERR_BUSY);
    }
    hr_registration staged = {
        .name = "a", .config = "{\"r\":4}", .config_len = 7, .defer_publish = true};
    if (fake_sink_value(&t->engine.sink, "a") != 0)
        assert_int_equal(hr_receiver_register(r, &staged, NULL, NULL), HR_ERR_ADAPTER_EXISTS);
    staged.name = t->push.adapters[0];
    if (t->push.defer)
        assert_int_equal(hr_receiver_register(r, &staged, NULL, NULL), HR_ERR_BUSY);
    hr_receiver_status_get(r, &after);
    assert_string_equal(after.session_id, before.session_id);
    assert_int_equal(after.state, before.state);
    assert_int_equal(after.tensors, before.tensors);
    check_seen(t);
}

/* Calls of the right trainer at the wrong time. */
static void try_what_does_not_belong(trial *t, size_t next) {
    engine *e = &t->engine;
    push *p = &t->push;
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    if (status.state == HR_SESSION_OPEN)
        assert_int_equal(hr_receiver_commit(e->receiver, p->session, NULL, NULL), HR_ERR_SESSION);
    if (status.state == HR_SESSION_OPEN && status.tensors > 0)
        for (size_t i = 0; i < next; i++)
            if (p->steps[i].kind == STEP_BEGIN)
                assert_int_equal(push_step(p, e, i), HR_ERR_SESSION);
    if (status.state == HR_SESSION_PREPARED)
        assert_int_equal(push_step(p, e, next - 2), HR_ERR_SESSION); /* the last bucket */
    if (p->steps[next].kind == STEP_BUCKET && p->steps[next + 1].kind == STEP_BUCKET) {
        assert_int_equal(push_step(p, e, next + 1), HR_ERR_INVALID);
        assert_non_null(strstr(p->err.message, "is next"));
    }
    check_seen(t);
}

/* A call that was answered comes again, but says something else. */
static void repeat_differently(trial *t, size_t step) {
    push *p = &t->push;
    step_kind kind = p->steps[step].kind;
    char version[sizeof p->version];
    memcpy(version, p->version, sizeof version);
    if (kind == STEP_BUCKET || kind == STEP_APPLY) {
        p->damage = DAMAGE_BYTE;
        assert_int_equal(push_step(p, &t->engine, step),
                         kind == STEP_APPLY ? HR_ERR_SESSION : HR_ERR_DIGEST);
        p->damage = DAMAGE_NONE;
    }
    if ((kind == STEP_PREPARE || kind == STEP_END) && p->plan != PLAN_BASE) {
        memcpy(p->version, "other", sizeof "other");
        assert_int_equal(push_step(p, &t->engine, step), HR_ERR_SESSION);
        memcpy(p->version, version, sizeof version);
    }
    check_seen(t);
}

/* ---- a step under a fault ---- */

static push_damage damage_of(sim_fault fault) {
    return fault >= FAULT_DAMAGE_BYTE && fault < FAULT_COUNT
               ? (push_damage)(DAMAGE_BYTE + (fault - FAULT_DAMAGE_BYTE))
               : DAMAGE_NONE;
}

static void arm(trial *t) {
    if (t->fault == FAULT_SINK || t->fault == FAULT_SINK_RETRY)
        fake_sink_fail(&t->engine.sink, t->nth, HR_ERR_INTERNAL, false);
    if (t->fault == FAULT_PUBLISH_LATE)
        fake_sink_fail(&t->engine.sink, 0, HR_ERR_TIMEOUT, true);
    if (t->fault == FAULT_MEMORY || t->fault == FAULT_MEMORY_RETRY || t->fault == FAULT_DEAF) {
        t->engine.memory.countdown = t->nth;
        t->engine.memory.failed = false;
    }
    t->push.damage = damage_of(t->fault);
}

static void disarm(trial *t) {
    t->hit = t->engine.sink.failed || t->engine.memory.failed || damage_of(t->fault) != DAMAGE_NONE;
    fake_sink_fail(&t->engine.sink, -1, HR_OK, false);
    t->engine.memory.countdown = -1;
    t->engine.memory.failed = false;
    t->push.damage = DAMAGE_NONE;
}

static hr_status call(trial *t, size_t step) {
    hr_status status = push_step(&t->push, &t->engine, step);
    step_kind kind = t->push.steps[step].kind;
    if (status == HR_OK) {
        t->published |= push_step_publishes(&t->push, step);
        t->begun |= kind == STEP_BEGIN;
        t->holds = !t->published && (t->holds || t->push.defer || kind == STEP_BEGIN);
        if (kind == STEP_PREPARE) /* it is built: the bytes are not needed any more */
            assert_int_equal(t->engine.owners, 0);
    }
    check_seen(t);
    return status;
}

/* Calls that fail without ending the session, so that the same call again must work. */
static bool can_be_repeated(const trial *t, size_t step) {
    step_kind kind = t->push.steps[step].kind;
    return kind == STEP_REGISTER || kind == STEP_BEGIN || kind == STEP_BUCKET ||
           kind == STEP_VERSION || kind == STEP_COMMIT;
}

static bool is_repeated(const trial *t) {
    return t->fault == FAULT_SINK_RETRY || t->fault == FAULT_MEMORY_RETRY ||
           t->fault == FAULT_PUBLISH_LATE || damage_of(t->fault) != DAMAGE_NONE;
}

/* What a trainer does whose reply was lost: it calls again. */
static void call_twice(trial *t, size_t step) {
    uint64_t publications = t->engine.sink.publications;
    uint8_t digest[16];
    memcpy(digest, t->push.digest, sizeof digest);
    assert_int_equal(call(t, step), HR_OK);
    assert_int_equal(t->engine.sink.publications, publications);
    assert_memory_equal(digest, t->push.digest, sizeof digest);
}

static hr_status call_with_fault(trial *t, size_t step) {
    arm(t);
    hr_status status = call(t, step);
    disarm(t);
    if (t->fault == FAULT_PUBLISH_LATE && t->push.steps[step].kind == STEP_COMMIT)
        assert_int_equal(status, HR_ERR_TIMEOUT);
    if (status != HR_OK && is_repeated(t)) {
        t->refused = can_be_repeated(t, step);
        status = call(t, step);
        if (t->refused)
            assert_int_equal(status, HR_OK);
    }
    if (t->fault == FAULT_TWICE)
        call_twice(t, step);
    return status;
}

/* Looking never waits, and a call at work is no dead trainer, however long it takes. */
static void look_while_it_builds(void *self) {
    trial *t = self;
    hr_receiver_status status;
    engine_pass_ms(&t->engine, 2 * LEASE_MS);
    hr_receiver_status_get(t->engine.receiver, &status);
    (void)hr_receiver_is_pending(t->engine.receiver, "a");
    assert_false(hr_receiver_expire(t->engine.receiver));
    check_seen(t);
}

static void check_is_closed(const engine *e) {
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    assert_int_equal(status.state, HR_SESSION_IDLE);
}

/* What a trainer does that cannot go on. */
static void give_up(trial *t, step_kind failed) {
    hr_receiver *r = t->engine.receiver;
    if (failed == STEP_PREPARE || failed == STEP_END || failed == STEP_APPLY)
        check_is_closed(&t->engine);
    (void)push_abort(&t->push, &t->engine);
    if (t->holds && !t->begun) /* only a new name waits */
        assert_int_equal(hr_receiver_abort(r, NULL, NULL), HR_OK);
    t->holds = false;
}

static void before_step(trial *t, size_t step) {
    if (t->fault == FAULT_LATE)
        engine_pass_ms(&t->engine, LEASE_MS);
    if (t->fault == FAULT_SECOND)
        try_to_intrude(t);
    if (t->fault == FAULT_OUT_OF_ORDER)
        try_what_does_not_belong(t, step);
    if (t->fault == FAULT_NO_MANIFEST)
        t->push.manifest = false;
}

static sim_outcome run_push(trial *t) {
    t->engine.sink.on_build = t->fault == FAULT_SLOW ? look_while_it_builds : NULL;
    t->engine.sink.on_build_self = t;
    for (size_t i = 0; i < t->push.n_steps; i++) {
        step_kind kind = t->push.steps[i].kind;
        bool here = i == t->at;
        if (here && t->fault == FAULT_KILL_BEFORE)
            return DEAD;
        if (t->fault == FAULT_SLOW)
            engine_pass_ms(&t->engine, LEASE_MS - 1);
        if (t->fault == FAULT_SILENT && i >= t->at && kind == STEP_BUCKET)
            continue;
        if (here)
            before_step(t, i);
        bool late = here && t->fault == FAULT_LATE && t->holds;
        hr_status status = here ? call_with_fault(t, i) : call(t, i);
        if (late && kind != STEP_REGISTER && kind != STEP_BEGIN)
            assert_int_not_equal(status, HR_OK);
        if (here && t->fault == FAULT_KILL_AFTER)
            return DEAD;
        if (status != HR_OK && t->fault == FAULT_DEAF && kind == STEP_BUCKET)
            continue;
        if (status != HR_OK) {
            give_up(t, kind);
            return FAILED;
        }
        if (here && t->fault == FAULT_OUT_OF_ORDER)
            repeat_differently(t, i);
    }
    return DONE;
}

/* ---- trials ---- */

static void push_cleanly(engine *e, push_plan plan, uint64_t generation) {
    reference before, after, seen;
    push p;
    push_make(&p, plan, generation);
    reference_of(e, &before);
    push_reference(&p, &before, &after);
    for (size_t i = 0; i < p.n_steps; i++)
        if (push_step(&p, e, i) != HR_OK)
            fail_msg("step %zu of a clean push: %s", i, p.err.message);
    reference_of(e, &seen);
    assert_true(reference_equals(&seen, &after));
    push_free(&p);
}

static void check_nothing_held(const engine *e) {
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    assert_int_equal(status.state, HR_SESSION_IDLE);
    assert_int_equal(status.pending, 0);
    assert_int_equal(status.registered, e->sink.n_live + e->sink.n_rooms);
    assert_int_equal(e->owners, 0);
    fake_sink_check_idle(&e->sink);
}

/* A dead trainer holds the engine for a lease and no longer. */
static void bury(trial *t) {
    hr_receiver_status status;
    hr_receiver_status_get(t->engine.receiver, &status);
    assert_int_equal(status.state != HR_SESSION_IDLE || status.pending > 0, t->holds);
    engine_pass_ms(&t->engine, LEASE_MS - 1);
    assert_false(hr_receiver_expire(t->engine.receiver));
    try_to_intrude(t);
    engine_pass_ms(&t->engine, 1);
    assert_int_equal(hr_receiver_expire(t->engine.receiver), status.state != HR_SESSION_IDLE);
    check_seen(t);
}

static bool must_work(const trial *t) {
    return t->fault == FAULT_NONE || t->fault == FAULT_TWICE || t->fault == FAULT_SLOW ||
           t->fault == FAULT_SECOND || t->fault == FAULT_OUT_OF_ORDER || t->refused;
}

static bool must_be_refused(const trial *t) {
    return (damage_of(t->fault) != DAMAGE_NONE && !t->refused) || t->fault == FAULT_SILENT ||
           t->fault == FAULT_NO_MANIFEST || t->fault == FAULT_DEAF;
}

/* An adapter that is known but has nothing to do with these pushes. */
static void register_stranger(engine *e) {
    hr_registration stranger = {.name = "stranger", .config = "{\"r\":8}", .config_len = 7};
    assert_int_equal(hr_receiver_register(e->receiver, &stranger, NULL, NULL), HR_OK);
}

static uint32_t count_registered(const engine *e) {
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    return status.registered;
}

/* The n-th failure of a step may not exist: false then. */
static bool try_fault(push_plan plan, sim_fault fault, size_t at, int64_t nth, size_t *n_steps) {
    trial t = {.fault = fault, .at = at, .nth = nth};
    engine_open(&t.engine, &t.now_ns);
    push_cleanly(&t.engine, PLAN_FULL, 1);
    register_stranger(&t.engine);
    uint32_t registered = count_registered(&t.engine);
    push_make(&t.push, plan, 2 + (at + (size_t)nth) % 2);
    *n_steps = t.push.n_steps;
    reference_of(&t.engine, &t.before);
    push_reference(&t.push, &t.before, &t.after);

    sim_outcome outcome = run_push(&t);
    if (must_work(&t) && outcome != DONE)
        fail_msg("plan %d fault %d at step %zu: %s", plan, fault, at, t.push.err.message);
    if (must_be_refused(&t) && outcome != FAILED)
        fail_msg("plan %d: damage %d of bucket %zu was taken", plan, fault, at);
    if (outcome == DEAD)
        bury(&t);
    else
        assert_int_equal(t.published, outcome == DONE);
    check_seen(&t);
    check_nothing_held(&t.engine);
    if (!t.published)
        assert_int_equal(count_registered(&t.engine), registered);
    t.engine.sink.on_build = NULL;

    push_free(&t.push);
    push_cleanly(&t.engine, PLAN_FULL, 9);
    push_cleanly(&t.engine, PLAN_ADAPTERS, 10);
    engine_close(&t.engine);
    return t.hit;
}

/* Damage is found by a manifest; without one only what it does to the set of names is. */
static bool applies(push_plan plan, sim_fault fault, size_t at) {
    push p;
    push_make(&p, plan, 2);
    step_kind kind = p.steps[at].kind;
    bool carries = kind == STEP_BUCKET || kind == STEP_APPLY;
    size_t first = p.steps[at].index * p.per_bucket;
    size_t end = carries && p.n - first > p.per_bucket ? first + p.per_bucket : p.n;
    bool two_alike =
        carries && end - first > 1 && p.tensors[end - 1].size == p.tensors[end - 2].size;
    bool without_manifest = kind == STEP_END || kind == STEP_PREPARE;
    push_free(&p);
    switch (fault) {
    case FAULT_SILENT:
        return kind == STEP_BUCKET && (plan != PLAN_BASE || p.steps[at].index == 0);
    case FAULT_DEAF:
        return kind == STEP_BUCKET;
    case FAULT_NO_MANIFEST:
        return without_manifest && plan == PLAN_STAGED;
    case FAULT_DAMAGE_BYTE:
        return carries && p.manifest;
    case FAULT_DAMAGE_SWAPPED:
        return carries && p.manifest && two_alike;
    case FAULT_DAMAGE_STRANGER:
    case FAULT_DAMAGE_MISSING:
    case FAULT_DAMAGE_EXTRA:
    case FAULT_DAMAGE_BASE:
        return carries && plan != PLAN_BASE;
    case FAULT_DAMAGE_FLUSH:
        return kind == STEP_BUCKET && plan == PLAN_STAGED;
    default:
        return true;
    }
}

static void every_step_under_every_fault(void **state) {
    (void)state;
    unsigned n = 0;
    for (push_plan plan = 0; plan < PLAN_COUNT; plan++)
        for (sim_fault fault = 0; fault < FAULT_COUNT; fault++) {
            size_t n_steps = 1;
            for (size_t at = 0; at < n_steps; at++) {
                push p;
                push_make(&p, plan, 2);
                n_steps = p.n_steps;
                push_free(&p);
                if (!applies(plan, fault, at))
                    continue;
                bool counts = fault >= FAULT_SINK && fault <= FAULT_MEMORY_RETRY;
                int64_t nth = 0;
                do {
                    n++;
                } while (try_fault(plan, fault, at, nth++, &n_steps) && counts);
            }
        }
    print_message("%u trials\n", n);
}

/* ---- two calls at once ---- */

typedef struct long_build {
    engine *engine;
    push *push;
    sem_t building, go_on;
    hr_status status;
} long_build;

static void wait_in_build(void *self) {
    long_build *b = self;
    sem_post(&b->building);
    sem_wait(&b->go_on);
}

static void *run_end(void *self) {
    long_build *b = self;
    b->status = push_step(b->push, b->engine, b->push->n_steps - 1);
    return NULL;
}

static void a_call_waits_for_the_one_before_and_says_so(void **state) {
    (void)state;
    uint64_t now_ns = 0;
    engine e;
    push p;
    engine_open(&e, &now_ns);
    push_cleanly(&e, PLAN_FULL, 1);
    push_make(&p, PLAN_ADAPTERS, 2);
    for (size_t i = 0; i + 1 < p.n_steps; i++)
        assert_int_equal(push_step(&p, &e, i), HR_OK);
    long_build b = {.engine = &e, .push = &p};
    sem_init(&b.building, 0, 0);
    sem_init(&b.go_on, 0, 0);
    e.sink.on_build = wait_in_build;
    e.sink.on_build_self = &b;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_end, &b), 0);
    sem_wait(&b.building);

    hr_session_options begin = {.session_id = "other", .timeout_ms = 20};
    char id[HR_SESSION_ID_SIZE];
    hr_error err = {0};
    assert_int_equal(hr_receiver_begin(e.receiver, &begin, id, &err), HR_ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "end_weight_update"));
    hr_receiver_status status;
    hr_receiver_status_get(e.receiver, &status);
    assert_string_equal(status.session_id, "session-2");
    assert_false(hr_receiver_is_pending(e.receiver, "a"));

    sem_post(&b.go_on);
    sem_post(&b.go_on); /* two adapters are built */
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(b.status, HR_OK);
    e.sink.on_build = NULL;
    push_cleanly(&e, PLAN_FULL, 3);
    sem_destroy(&b.building);
    sem_destroy(&b.go_on);
    push_free(&p);
    engine_close(&e);
}

/* ---- a fleet ---- */

enum { FLEET = 2 };

typedef struct fleet {
    engine engines[FLEET];
    push pushes[FLEET]; /* the same weights to each */
    reference before[FLEET], after[FLEET];
    uint64_t now_ns;
} fleet;

static void fleet_open(fleet *f) {
    for (size_t k = 0; k < FLEET; k++) {
        engine_open(&f->engines[k], &f->now_ns);
        push_cleanly(&f->engines[k], PLAN_FULL, 1);
        push_make(&f->pushes[k], PLAN_FULL, 2);
        reference_of(&f->engines[k], &f->before[k]);
        push_reference(&f->pushes[k], &f->before[k], &f->after[k]);
    }
}

static void fleet_close(fleet *f) {
    for (size_t k = 0; k < FLEET; k++) {
        check_nothing_held(&f->engines[k]);
        push_cleanly(&f->engines[k], PLAN_FULL, 9);
        push_free(&f->pushes[k]);
        engine_close(&f->engines[k]);
    }
}

static bool fleet_sees(const fleet *f, const reference *which) {
    for (size_t k = 0; k < FLEET; k++) {
        reference seen;
        reference_of(&f->engines[k], &seen);
        if (!reference_equals(&seen, &which[k]))
            return false;
    }
    return true;
}

/* Everything up to prepare; the receipts agree, however the bytes came. */
static hr_status fleet_prepare(fleet *f) {
    for (size_t i = 0; i + 1 < f->pushes[0].n_steps; i++)
        for (size_t k = 0; k < FLEET; k++) {
            hr_status status = push_step(&f->pushes[k], &f->engines[k], i);
            if (status != HR_OK)
                return status;
        }
    assert_memory_equal(f->pushes[0].digest, f->pushes[1].digest, 16);
    return HR_OK;
}

static hr_status fleet_commit(fleet *f, size_t k) {
    return push_step(&f->pushes[k], &f->engines[k], f->pushes[k].n_steps - 1);
}

static void a_fleet_commits_after_all_are_prepared(void **state) {
    (void)state;
    fleet f = {0};
    fleet_open(&f);
    assert_int_equal(fleet_prepare(&f), HR_OK);
    assert_true(fleet_sees(&f, f.before));
    for (size_t k = 0; k < FLEET; k++)
        assert_int_equal(fleet_commit(&f, k), HR_OK);
    assert_true(fleet_sees(&f, f.after));
    fleet_close(&f);
}

static void a_fleet_killed_between_commits_is_driven_to_the_version(void **state) {
    (void)state;
    for (size_t committed = 0; committed <= FLEET; committed++) {
        fleet f = {0};
        fleet_open(&f);
        assert_int_equal(fleet_prepare(&f), HR_OK);
        for (size_t k = 0; k < committed; k++)
            assert_int_equal(fleet_commit(&f, k), HR_OK);
        /* the trainer is gone; a new one resumes within the lease, knowing only the id */
        engine_pass_ms(&f.engines[0], LEASE_MS - 1);
        for (size_t k = 0; k < FLEET; k++)
            assert_int_equal(fleet_commit(&f, k), HR_OK);
        assert_true(fleet_sees(&f, f.after));
        fleet_close(&f);
    }
}

static void a_fleet_of_which_one_fails_to_commit_is_driven_to_the_version(void **state) {
    (void)state;
    fleet f = {0};
    fleet_open(&f);
    assert_int_equal(fleet_prepare(&f), HR_OK);
    assert_int_equal(fleet_commit(&f, 0), HR_OK);
    fake_sink_fail(&f.engines[1].sink, 0, HR_ERR_NO_MEMORY, true);
    assert_int_equal(fleet_commit(&f, 1), HR_ERR_NO_MEMORY);
    for (size_t k = 0; k < FLEET; k++)
        assert_int_equal(fleet_commit(&f, k), HR_OK);
    assert_true(fleet_sees(&f, f.after));
    fleet_close(&f);
}

static void a_fleet_of_which_one_cannot_prepare_is_rolled_back(void **state) {
    (void)state;
    for (size_t bad = 0; bad < FLEET; bad++) {
        fleet f = {0};
        fleet_open(&f);
        f.pushes[bad].tensors[5].bytes[0] ^= 1; /* before its digest is taken: other weights */
        for (size_t i = 0; i + 2 < f.pushes[0].n_steps; i++)
            for (size_t k = 0; k < FLEET; k++)
                assert_int_equal(push_step(&f.pushes[k], &f.engines[k], i), HR_OK);
        f.pushes[bad].tensors[5].bytes[0] ^= 1; /* what the manifest says */
        size_t prepare = f.pushes[0].n_steps - 2;
        for (size_t k = 0; k < FLEET; k++)
            assert_int_equal(push_step(&f.pushes[k], &f.engines[k], prepare),
                             k == bad ? HR_ERR_DIGEST : HR_OK);
        assert_int_equal(fleet_commit(&f, bad), HR_ERR_SESSION);
        for (size_t k = 0; k < FLEET; k++)
            assert_int_equal(push_abort(&f.pushes[k], &f.engines[k]), HR_OK);
        assert_true(fleet_sees(&f, f.before));
        fleet_close(&f);
    }
}

static void prepared_engines_of_a_dead_trainer_go_back(void **state) {
    (void)state;
    fleet f = {0};
    fleet_open(&f);
    assert_int_equal(fleet_prepare(&f), HR_OK);
    engine_pass_ms(&f.engines[0], LEASE_MS);
    for (size_t k = 0; k < FLEET; k++) {
        assert_int_equal(fleet_commit(&f, k), HR_ERR_SESSION);
        assert_non_null(strstr(f.pushes[k].err.message, "lease"));
    }
    assert_true(fleet_sees(&f, f.before));
    fleet_close(&f);
}

/* ---- at random ---- */

typedef struct player {
    push push;
    size_t next; /* step */
    bool playing, began;
} player;

typedef struct game {
    uint64_t random, now_ns, generation;
    engine engine;
    reference reference; /* what requests must see now */
    player players[2];
} game;

static uint64_t draw(game *g, uint64_t below) {
    g->random ^= g->random << 13;
    g->random ^= g->random >> 7;
    g->random ^= g->random << 17;
    return g->random % below;
}

static void check_game(const game *g) {
    reference seen;
    reference_of(&g->engine, &seen);
    assert_true(reference_equals(&seen, &g->reference));
}

static void stop_playing(game *g, player *p, bool politely) {
    if (politely)
        (void)push_abort(&p->push, &g->engine);
    push_free(&p->push);
    p->playing = false;
}

static void arm_at_random(game *g, push *p) {
    uint64_t what = draw(g, 12);
    if (what == 0)
        fake_sink_fail(&g->engine.sink, (int64_t)draw(g, 3), HR_ERR_INTERNAL, false);
    else if (what == 1)
        g->engine.memory.countdown = (int64_t)draw(g, 12);
    else if (what == 2)
        fake_sink_fail(&g->engine.sink, 0, HR_ERR_TIMEOUT, true);
    else if (what == 3 && p->manifest && p->n > 4)
        p->damage = DAMAGE_BYTE;
}

static void play(game *g, player *p) {
    if (!p->playing) {
        push_make(&p->push, (push_plan)draw(g, PLAN_COUNT), ++g->generation);
        p->next = 0;
        p->playing = true;
    }
    reference after;
    push_reference(&p->push, &g->reference, &after);
    arm_at_random(g, &p->push);
    hr_status status = push_step(&p->push, &g->engine, p->next);
    fake_sink_fail(&g->engine.sink, -1, HR_OK, false);
    g->engine.memory.countdown = -1;
    bool damaged = p->push.damage != DAMAGE_NONE;
    p->push.damage = DAMAGE_NONE;
    if (status == HR_OK && push_step_publishes(&p->push, p->next))
        g->reference = after;
    check_game(g);
    bool again = draw(g, 4) == 0;
    if (status == HR_OK && again && p->push.steps[p->next].kind == STEP_BUCKET)
        assert_int_equal(push_step(&p->push, &g->engine, p->next), damaged ? HR_ERR_DIGEST : HR_OK);
    if (status == HR_OK && ++p->next == p->push.n_steps)
        stop_playing(g, p, false);
    else if (status != HR_OK && !again)
        stop_playing(g, p, draw(g, 3) > 0);
    else if (draw(g, 40) == 0)
        stop_playing(g, p, false);
    check_game(g);
}

static void run_at_random(uint64_t seed) {
    game g = {.random = seed * 0x9e3779b97f4a7c15u + 1, .generation = 1};
    engine_open(&g.engine, &g.now_ns);
    push_cleanly(&g.engine, PLAN_FULL, ++g.generation);
    reference_of(&g.engine, &g.reference);
    for (unsigned i = 0; i < 120; i++) {
        play(&g, &g.players[draw(&g, 2)]);
        engine_pass_ms(&g.engine, draw(&g, 60) == 0 ? 2 * LEASE_MS : draw(&g, LEASE_MS / 8));
        if (g.engine.sink.n_live > FAKE_NAMES - 4)
            break;
    }
    for (size_t k = 0; k < 2; k++)
        if (g.players[k].playing)
            stop_playing(&g, &g.players[k], false);
    engine_pass_ms(&g.engine, LEASE_MS);
    (void)hr_receiver_expire(g.engine.receiver);
    check_game(&g);
    check_nothing_held(&g.engine);
    push_cleanly(&g.engine, PLAN_FULL, ++g.generation);
    engine_close(&g.engine);
}

static void random_schedules_of_two_trainers(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= n_random_runs; seed++)
        run_at_random(seed);
}

int main(int argc, char **argv) {
    if (argc > 1)
        n_random_runs = (unsigned)strtoul(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_step_under_every_fault),
        cmocka_unit_test(a_call_waits_for_the_one_before_and_says_so),
        cmocka_unit_test(a_fleet_commits_after_all_are_prepared),
        cmocka_unit_test(a_fleet_killed_between_commits_is_driven_to_the_version),
        cmocka_unit_test(a_fleet_of_which_one_fails_to_commit_is_driven_to_the_version),
        cmocka_unit_test(a_fleet_of_which_one_cannot_prepare_is_rolled_back),
        cmocka_unit_test(prepared_engines_of_a_dead_trainer_go_back),
        cmocka_unit_test(random_schedules_of_two_trainers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
