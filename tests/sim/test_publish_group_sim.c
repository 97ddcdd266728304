/* Four trainer ranks that publish as one, simulated: each on a thread, each with its part. All
 * succeed, or all raise the first cause in bounded time and nothing has changed (I13, I21, I28). */
#include "fake_fleet.h"
#include "fake_group.h"
#include "fake_weights.h"

#include "publish/publisher.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const urls[2] = {"http://engine-0", "http://engine-1"};

typedef struct rank {
    fake_rank member;
    hr_group group;
    fleet_link link;
    hr_publisher *publisher;
    fake_source source;
    hr_push push;
    char version[32];
    hr_status status;
    hr_error err;
    hr_push_receipt *receipt;
} rank;

typedef struct stand {
    fake_fleet fleet;
    fake_group group;
    rank ranks[GROUP_RANKS];
} stand;

static void stand_open(stand *s, uint64_t bucket_bytes) {
    memset(s, 0, sizeof *s);
    fake_fleet_open(&s->fleet, 2);
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        rank *k = &s->ranks[r];
        k->member = (fake_rank){
            .group = &s->group, .rank = r, .leave_at = UINT32_MAX, .lose_at = UINT32_MAX};
        k->group = fake_group_of(&k->member);
        fleet_link_init(&k->link, &s->fleet, 0, FAULT_NONE);
        hr_transport transport = fleet_link_transport(&k->link);
        hr_publisher_options options = {.engines = urls,
                                        .n_engines = 2,
                                        .bucket_bytes = bucket_bytes,
                                        .timeout_ms = FLEET_TIMEOUT_MS,
                                        .group = &k->group};
        assert_int_equal(hr_publisher_create_over(&options, &transport, &k->publisher, NULL),
                         HR_OK);
        k->publisher->fleet.clock = fake_fleet_clock(&s->fleet);
        k->publisher->fleet.sleep_ms = fake_fleet_sleep;
        k->publisher->fleet.sleep_self = &s->fleet;
    }
}

static void stand_close(stand *s) {
    for (uint32_t r = 0; r < GROUP_RANKS; r++)
        hr_publisher_destroy(s->ranks[r].publisher);
    fake_fleet_close(&s->fleet);
}

/* What every rank is to push; a test changes it before run. */
static void prepare(stand *s, uint64_t generation) {
    fake_group_init(&s->group);
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        rank *k = &s->ranks[r];
        k->member.rounds = 0;
        k->member.leave_at = k->member.lose_at = UINT32_MAX;
        k->receipt = NULL;
        k->source = (fake_source){.generation = generation,
                                  .rank = r,
                                  .ranks = GROUP_RANKS,
                                  .adapters = true,
                                  .base = true,
                                  .fail_at = -1};
        k->push = fake_push(&k->source, k->version);
    }
}

static void *run_rank(void *arg) {
    rank *k = arg;
    k->err = (hr_error){0};
    k->status = hr_publisher_push(k->publisher, &k->push, &k->receipt, &k->err);
    return NULL;
}

static void run(stand *s) {
    pthread_t threads[GROUP_RANKS];
    for (uint32_t r = 0; r < GROUP_RANKS; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &s->ranks[r]), 0);
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        pthread_join(threads[r], NULL);
        assert_int_equal(s->ranks[r].source.pulled, s->ranks[r].source.released);
    }
    fake_group_destroy(&s->group);
}

static void drop_receipts(stand *s) {
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        hr_push_receipt_free(s->ranks[r].receipt);
        s->ranks[r].receipt = NULL;
    }
}

static void push_all(stand *s, uint64_t generation) {
    prepare(s, generation);
    run(s);
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        if (s->ranks[r].status != HR_OK)
            fail_msg("rank %u: %s", r, s->ranks[r].err.message);
    }
    drop_receipts(s);
    for (size_t i = 0; i < s->fleet.n; i++)
        assert_true(fake_engine_serves(&s->fleet.engines[i], generation));
}

static hr_session_state state_of(const fleet_engine *e) {
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    return status.state;
}

static void expect_untouched(const stand *s, uint64_t generation) {
    for (size_t i = 0; i < s->fleet.n; i++) {
        const fleet_engine *e = &s->fleet.engines[i];
        if (e->dead)
            continue;
        assert_true(fake_engine_serves(e, generation));
        assert_int_equal(state_of(e), HR_SESSION_IDLE);
    }
}

/* All ranks raise the same. */
static void expect_same_failure(const stand *s, hr_status status, const char *text) {
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        const rank *k = &s->ranks[r];
        assert_int_equal(k->status, status);
        assert_null(k->receipt);
        if (strstr(k->err.message, text) == NULL)
            fail_msg("rank %u: \"%s\" does not say \"%s\"", r, k->err.message, text);
    }
}

/* ---- together ---- */

static void parts_of_four_ranks_become_one_push(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, 100, 700, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        stand s;
        stand_open(&s, sizes[i]);
        prepare(&s, 1);
        run(&s);
        uint64_t sent = 0;
        for (uint32_t r = 0; r < GROUP_RANKS; r++) {
            const hr_push_receipt *receipt = s.ranks[r].receipt;
            assert_int_equal(s.ranks[r].status, HR_OK);
            assert_int_equal(receipt->rank, r);
            assert_int_equal(receipt->ranks, GROUP_RANKS);
            assert_int_equal(receipt->tensors, WEIGHTS_ALL);
            assert_int_equal(receipt->n_engines, r == 0 ? 2 : 0);
            assert_string_equal(receipt->session_id, s.ranks[0].receipt->session_id);
            assert_memory_equal(receipt->xxh3, s.ranks[0].receipt->xxh3, 16);
            sent += receipt->sent_tensors;
        }
        assert_int_equal(sent, WEIGHTS_ALL); /* of equal replicas one */
        drop_receipts(&s);
        push_all(&s, 2);
        stand_close(&s);
    }
}

/* For engines that take an adapter in one call only, the parts come together on rank 0. */
static void adapters_that_must_go_whole_are_gathered(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 100);
    prepare(&s, 1);
    for (uint32_t r = 0; r < GROUP_RANKS; r++)
        s.ranks[r].link.traits.whole_adapters = true;
    run(&s);
    for (uint32_t r = 0; r < GROUP_RANKS; r++)
        assert_int_equal(s.ranks[r].status, HR_OK);
    assert_in_range(s.ranks[0].receipt->sent_tensors, 10, WEIGHTS_ALL); /* a and b, and base */
    assert_int_equal(s.ranks[0].link.largest_bucket, 813);              /* of b */
    for (size_t i = 0; i < s.fleet.n; i++)
        assert_true(fake_engine_serves(&s.fleet.engines[i], 1));
    drop_receipts(&s);
    stand_close(&s);
}

/* I21 */
static void replicas_that_differ_are_refused(void **state) {
    (void)state;
    for (uint32_t odd = 0; odd < GROUP_RANKS; odd++) {
        stand s;
        char text[128];
        stand_open(&s, 100);
        push_all(&s, 1);
        prepare(&s, 2);
        s.ranks[odd].source.twist = 1;
        run(&s);
        snprintf(text, sizeof text,
                 "tensor a:base_model.model.l0.lora_A.weight has other bytes on rank %u than on "
                 "rank 0",
                 odd > 0 ? odd : 1);
        expect_same_failure(&s, HR_ERR_DIGEST, text);
        expect_untouched(&s, 1);
        push_all(&s, 3);
        stand_close(&s);
    }
}

/* ---- a fault on each rank at each step ---- */

static bool try_fault(fleet_fault fault, uint32_t at_rank, unsigned at) {
    stand s;
    stand_open(&s, 200);
    push_all(&s, 1);
    prepare(&s, 2);
    fleet_link_init(&s.ranks[at_rank].link, &s.fleet, at, fault);
    run(&s);
    const fleet_link *link = &s.ranks[at_rank].link;
    bool hit = link->hit;
    hr_status status = s.ranks[0].status;
    if (status == HR_OK) {
        for (uint32_t r = 0; r < GROUP_RANKS; r++)
            assert_int_equal(s.ranks[r].status, HR_OK);
    } else if (link->stage == HR_STAGE_COMMIT) {
        expect_same_failure(&s, status, "rank 0: engine http://engine-");
        for (size_t i = 0; i < s.fleet.n; i++)
            assert_true(s.fleet.engines[i].dead || fake_engine_serves(&s.fleet.engines[i], 1) ||
                        fake_engine_serves(&s.fleet.engines[i], 2));
    } else {
        char text[128];
        snprintf(text, sizeof text, "rank %u: engine %s, %s", at_rank, urls[link->engine],
                 hr_stage_name(link->stage));
        /* A dead engine is dead for others too, who may come first. */
        expect_same_failure(&s, status, fault == FAULT_KILL ? "engine http://engine-" : text);
        assert_string_equal(s.ranks[3].err.message, s.ranks[1].err.message);
        expect_untouched(&s, 1);
    }
    drop_receipts(&s);
    fake_fleet_revive(&s.fleet);
    for (uint32_t r = 0; r < GROUP_RANKS; r++)
        fleet_link_init(&s.ranks[r].link, &s.fleet, 0, FAULT_NONE);
    if (link->stage == HR_STAGE_COMMIT || status != HR_OK)
        fake_fleet_sleep(&s.fleet, 700000); /* a session whose commit was lost runs out */
    push_all(&s, 3);
    stand_close(&s);
    return hit;
}

static void a_fault_on_each_rank_at_each_call(void **state) {
    (void)state;
    static const fleet_fault faults[] = {FAULT_REFUSE, FAULT_LOSE_REPLY, FAULT_LATE, FAULT_KILL};
    for (size_t f = 0; f < sizeof faults / sizeof faults[0]; f++) {
        for (uint32_t r = 0; r < GROUP_RANKS; r++) {
            unsigned at = 0;
            while (try_fault(faults[f], r, at))
                at++;
            assert_true(at > (r == 0 ? 8 : 1));
        }
    }
}

/* Ranks wait in a round for the registration of a few adapters, however many there are. */
static void adapters_are_registered_a_few_in_a_round(void **state) {
    (void)state;
    enum { MANY = 9 };
    hr_push_adapter many[MANY];
    char names[MANY][8];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "n%u", i);
        many[i] = (hr_push_adapter){.name = names[i], .config = "{\"r\": 8}", .config_len = 8};
    }
    for (unsigned round = 0; round < 3; round++) {
        stand s;
        stand_open(&s, 100);
        prepare(&s, 1);
        for (uint32_t r = 0; r < GROUP_RANKS; r++) {
            s.ranks[r].push.adapters = many;
            s.ranks[r].push.n_adapters = MANY;
        }
        fleet_link_init(&s.ranks[0].link, &s.fleet, 2 * round, FAULT_REFUSE);
        run(&s);
        assert_int_equal(s.ranks[0].link.stage, HR_STAGE_REGISTER);
        expect_same_failure(&s, HR_ERR_INVALID, "rank 0: engine http://engine-0, register");
        for (uint32_t r = 0; r < GROUP_RANKS; r++)
            assert_int_equal(s.ranks[r].member.rounds, 2 + round); /* after what is pushed */
        stand_close(&s);
    }
}

static void a_source_that_fails_on_any_rank_fails_all(void **state) {
    (void)state;
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        for (int at = 0; at < 3; at++) {
            stand s;
            char text[64];
            stand_open(&s, 100);
            push_all(&s, 1);
            prepare(&s, 2);
            s.ranks[r].source.fail_at = at;
            run(&s);
            snprintf(text, sizeof text, "rank %u: the source of tensors: the disk", r);
            expect_same_failure(&s, HR_ERR_IO, text);
            expect_untouched(&s, 1);
            push_all(&s, 3);
            stand_close(&s);
        }
    }
}

/* A rank that is gone at any round: the others end in bounded time, and nothing has changed unless
 * it was the round after commit. */
static void a_rank_that_is_gone_ends_the_others(void **state) {
    (void)state;
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        for (unsigned round = 0; round < 5; round++) {
            stand s;
            stand_open(&s, 1 << 20);
            push_all(&s, 1);
            prepare(&s, 2);
            s.ranks[r].member.leave_at = round;
            run(&s);
            for (uint32_t k = 0; k < GROUP_RANKS; k++) {
                assert_int_equal(s.ranks[k].status, HR_ERR_PEER);
                assert_non_null(strstr(s.ranks[k].err.message, "the trainer's group"));
            }
            expect_untouched(&s, 1);
            push_all(&s, 3);
            stand_close(&s);
        }
    }
}

/* The message and the report of a rank that ended after engines may have committed. */
static void expect_told(const rank *k, const char *text) {
    assert_int_equal(k->status, HR_ERR_PEER);
    if (strstr(k->err.message, text) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", k->err.message, text);
    assert_non_null(strstr(hr_publisher_report(k->publisher), "\"commit_begun\":true"));
}

static void expect_served(const stand *s, uint64_t generation) {
    for (size_t i = 0; i < s->fleet.n; i++)
        assert_true(fake_engine_serves(&s->fleet.engines[i], generation));
}

static const char all_have[] = "all engines have committed before that and serve the new weights",
                  may_have[] = "engines may have committed and serve the new weights";

static void a_rank_that_is_gone_after_commit_leaves_no_doubt_of_it(void **state) {
    (void)state;
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        stand s;
        stand_open(&s, 1 << 20);
        push_all(&s, 1);
        unsigned rounds = s.ranks[0].member.rounds;
        prepare(&s, 2);
        s.ranks[r].member.leave_at = rounds - 1;
        run(&s);
        expect_served(&s, 2);
        for (uint32_t k = 0; k < GROUP_RANKS; k++)
            expect_told(&s.ranks[k], k == 0 ? all_have : may_have);
        assert_non_null(strstr(hr_publisher_report(s.ranks[0].publisher), "\"published\":\"all\""));
        push_all(&s, 3);
        stand_close(&s);
    }
}

/* Rank 0 has heard that all are prepared, whoever else has not; or it has not, and rolls back. */
static void a_round_before_commit_that_one_rank_loses(void **state) {
    (void)state;
    for (uint32_t r = 0; r < GROUP_RANKS; r++) {
        stand s;
        stand_open(&s, 1 << 20);
        push_all(&s, 1);
        unsigned rounds = s.ranks[0].member.rounds;
        prepare(&s, 2);
        s.ranks[r].member.lose_at = rounds - 2;
        run(&s);
        expect_served(&s, r == 0 ? 1 : 2);
        for (uint32_t k = 1; k < GROUP_RANKS; k++)
            expect_told(&s.ranks[k], may_have);
        if (r > 0)
            expect_told(&s.ranks[0], all_have);
        else
            assert_null(strstr(s.ranks[0].err.message, "committed"));
        push_all(&s, 3);
        stand_close(&s);
    }
}

static void another_instance(hr_engine_receipt *receipt) {
    strcpy(receipt->instance, "another");
}

static void a_commit_that_fails_is_told_before_the_rank_that_is_gone(void **state) {
    (void)state;
    stand s;
    stand_open(&s, 1 << 20);
    push_all(&s, 1);
    unsigned rounds = s.ranks[0].member.rounds;
    prepare(&s, 2);
    s.ranks[0].link.twist = another_instance;
    s.ranks[3].member.leave_at = rounds - 1;
    run(&s);
    assert_int_equal(s.ranks[0].status, HR_ERR_SESSION);
    assert_non_null(strstr(s.ranks[0].err.message, "instance \"another\""));
    assert_non_null(strstr(s.ranks[0].err.message, "the trainer's group"));
    expect_told(&s.ranks[1], may_have);
    stand_close(&s);
}

/* ---- what must be the same on all ranks ---- */

typedef void (*change)(rank *k);

static void other_version(rank *k) {
    k->push.weight_version = "v77";
}
static void fewer_adapters(rank *k) {
    k->push.n_adapters = 1;
}
static void no_base(rank *k) {
    k->push.sync_base = k->push.complete_base = false;
}
static void other_config(rank *k) {
    static const char config[] = "{\"r\": 16}";
    static hr_push_adapter adapters[2];
    memcpy(adapters, fake_adapters, sizeof adapters);
    adapters[1].config = config;
    adapters[1].config_len = sizeof config - 1;
    k->push.adapters = adapters;
}

static void different_lists_are_refused_before_any_call(void **state) {
    (void)state;
    static const struct {
        change make;
        const char *text;
    } rows[] = {{other_version, "weight_version is \"v77\" on rank 2"},
                {fewer_adapters, "adapters is \"a\" on rank 2 and \"a, b\" on rank 0"},
                {no_base, "what of the base is \"sync_base=false"},
                {other_config, "configs"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        stand s;
        stand_open(&s, 100);
        prepare(&s, 2);
        rows[i].make(&s.ranks[2]);
        run(&s);
        expect_same_failure(&s, HR_ERR_INVALID, rows[i].text);
        for (uint32_t r = 0; r < GROUP_RANKS; r++)
            assert_int_equal(s.ranks[r].link.attempts, 0);
        stand_close(&s);
    }
}

/* I28: one rank that has something to push makes all push. */
static void the_decision_to_skip_is_taken_together(void **state) {
    (void)state;
    for (unsigned changed = 0; changed < 2; changed++) {
        stand s;
        stand_open(&s, 100);
        prepare(&s, 2);
        for (uint32_t r = 0; r < GROUP_RANKS; r++)
            s.ranks[r].push.unchanged = !(changed && r == 3);
        run(&s);
        for (uint32_t r = 0; r < GROUP_RANKS; r++) {
            assert_int_equal(s.ranks[r].status, HR_OK);
            assert_int_equal(s.ranks[r].receipt->skipped, !changed);
        }
        assert_int_equal(fake_engine_serves(&s.fleet.engines[0], 2), changed);
        drop_receipts(&s);
        stand_close(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_four_ranks_become_one_push),
        cmocka_unit_test(adapters_that_must_go_whole_are_gathered),
        cmocka_unit_test(replicas_that_differ_are_refused),
        cmocka_unit_test(a_fault_on_each_rank_at_each_call),
        cmocka_unit_test(adapters_are_registered_a_few_in_a_round),
        cmocka_unit_test(a_source_that_fails_on_any_rank_fails_all),
        cmocka_unit_test(a_rank_that_is_gone_ends_the_others),
        cmocka_unit_test(a_rank_that_is_gone_after_commit_leaves_no_doubt_of_it),
        cmocka_unit_test(a_round_before_commit_that_one_rank_loses),
        cmocka_unit_test(a_commit_that_fails_is_told_before_the_rank_that_is_gone),
        cmocka_unit_test(different_lists_are_refused_before_any_call),
        cmocka_unit_test(the_decision_to_skip_is_taken_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
