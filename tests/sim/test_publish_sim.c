/* Publishing, simulated: the production publisher against production receivers, with every fault at
 * every call. After each, an engine serves the old weights or the new ones, never a mix; a push
 * that failed before commit has changed nothing and left no session; and the next push works. */
#include "fake_fleet.h"
#include "fake_weights.h"

#include "publish/publisher.h"

#include <cjson/cJSON.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const urls[FLEET_ENGINES] = {"http://engine-0", "http://engine-1",
                                                "http://engine-2"};

typedef struct stand {
    fake_fleet fleet;
    fleet_link link;
    hr_publisher *publisher;
    hr_error err;
    fake_source source; /* of the last push */
} stand;

static hr_publisher_options options_of(uint64_t bucket_bytes) {
    return (hr_publisher_options){.engines = urls,
                                  .n_engines = FLEET_ENGINES,
                                  .bucket_bytes = bucket_bytes,
                                  .timeout_ms = FLEET_TIMEOUT_MS};
}

static void stand_open(stand *s, const hr_publisher_options *options) {
    memset(s, 0, sizeof *s);
    fake_fleet_open(&s->fleet, FLEET_ENGINES);
    fleet_link_init(&s->link, &s->fleet, 0, FAULT_NONE);
    hr_transport transport = fleet_link_transport(&s->link);
    assert_int_equal(hr_publisher_create_over(options, &transport, &s->publisher, NULL), HR_OK);
    s->publisher->fleet.clock = fake_fleet_clock(&s->fleet);
    s->publisher->fleet.sleep_ms = fake_fleet_sleep;
    s->publisher->fleet.sleep_self = &s->fleet;
}

static void stand_close(stand *s) {
    hr_publisher_destroy(s->publisher);
    fake_fleet_close(&s->fleet);
}

/* Every unit that was pulled has come back, whatever happened. */
static hr_status push(stand *s, uint64_t generation, hr_push_receipt **receipt) {
    char version[32];
    hr_push_receipt *made = NULL;
    s->source =
        (fake_source){.generation = generation, .adapters = true, .base = true, .fail_at = -1};
    hr_push p = fake_push(&s->source, version);
    hr_status status = hr_publisher_push(s->publisher, &p, &made, &s->err);
    assert_int_equal(s->source.pulled, s->source.released);
    if (receipt != NULL)
        *receipt = made;
    else
        hr_push_receipt_free(made);
    return status;
}

static void expect_in(const char *text, const char *part) {
    if (text == NULL || strstr(text, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", text != NULL ? text : "", part);
}

static void expect_all(const stand *s, uint64_t generation) {
    for (size_t i = 0; i < s->fleet.n; i++)
        assert_true(fake_engine_serves(&s->fleet.engines[i], generation));
}

static hr_session_state state_of(const fleet_engine *e) {
    hr_receiver_status status;
    hr_receiver_status_get(e->receiver, &status);
    return status.state;
}

/* ---- without faults ---- */

static void a_push_reaches_every_engine(void **state) {
    (void)state;
    stand s;
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(256);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, &receipt), HR_OK);
    expect_all(&s, 1);
    assert_int_equal(receipt->tensors, WEIGHTS_ALL);
    assert_int_equal(receipt->bytes, 1621);
    assert_int_equal(receipt->sent_tensors, WEIGHTS_ALL);
    assert_true(receipt->atomic);
    assert_int_equal(receipt->n_engines, FLEET_ENGINES);
    for (size_t i = 0; i < FLEET_ENGINES; i++) {
        assert_string_equal(receipt->engines[i].state, "published");
        assert_string_equal(receipt->engines[i].weight_version, "v1");
        assert_memory_equal(receipt->engines[i].xxh3, receipt->xxh3, 16);
    }
    assert_string_equal(hr_push_receipt_json(receipt), hr_publisher_report(s.publisher));
    hr_push_receipt_free(receipt);
    stand_close(&s);
}

/* I27: any size from one byte to everything publishes the same bytes; a bucket stays below the
 * limit, and a unit that does not go into one travels alone. I22: what the units of a sender hold
 * is two buckets, of which one is made while the other is on its way, and the unit that did not
 * fit. */
static void any_bucket_size_publishes_the_same(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1,   2,   16,   63,   64,   65,     200,
                                     301, 702, 1620, 1621, 1622, 1 << 20};
    uint8_t first[16];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        stand s;
        hr_push_receipt *receipt = NULL;
        hr_publisher_options options = options_of(sizes[i]);
        stand_open(&s, &options);
        assert_int_equal(push(&s, 5, &receipt), HR_OK);
        expect_all(&s, 5);
        if (i == 0)
            memcpy(first, receipt->xxh3, sizeof first);
        assert_memory_equal(first, receipt->xxh3, sizeof first);
        assert_int_equal(s.link.looked, receipt->buckets - 1); /* all but the first */
        uint64_t most = sizes[i] > 700 ? sizes[i] - 1 : 700;
        assert_in_range(s.link.largest_bucket, 1, most);
        assert_in_range(s.source.most_live, 1, 2 * most + s.source.largest_unit);
        if (sizes[i] == 1) /* all alone, but for the empty one, which adds nothing */
            assert_in_range(receipt->buckets, WEIGHTS_ALL - 1, WEIGHTS_ALL);
        if (sizes[i] == 1622)
            assert_int_equal(receipt->buckets, 1);
        if (sizes[i] == 1621)
            assert_int_equal(receipt->buckets, 2);
        hr_push_receipt_free(receipt);
        stand_close(&s);
    }
}

/* MiBs of the adapter a, all of the same memory. */
typedef struct mib_source {
    hr_tensor tensors[64];
    char names[64][32];
    size_t at;
} mib_source;

static hr_status next_mib(void *self, hr_unit *unit, hr_error *err) {
    static const uint8_t mib[1 << 20];
    mib_source *s = self;
    (void)err;
    *unit = (hr_unit){0};
    if (s->at == 64)
        return HR_OK;
    snprintf(s->names[s->at], sizeof s->names[0], "l%zu.lora_A.weight", s->at);
    s->tensors[s->at] = (hr_tensor){.name = s->names[s->at],
                                    .dtype = HR_DTYPE_U8,
                                    .ndim = 1,
                                    .shape = {sizeof mib},
                                    .data = mib,
                                    .bytes = sizeof mib};
    *unit = (hr_unit){.adapter = "a", .tensors = &s->tensors[s->at++], .n = 1};
    return HR_OK;
}

/* Far below the limit an engine gets work while the rest is on its way; what a bucket costs, a
 * round trip, comes about as often for 10 GB as for 1. */
static void buckets_start_small_and_grow_with_what_has_left(void **state) {
    (void)state;
    stand s;
    mib_source mibs = {.at = 0};
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    hr_push p = {
        .adapters = fake_adapters, .n_adapters = 1, .source = {.self = &mibs, .next = next_mib}};
    assert_int_equal(hr_publisher_push(s.publisher, &p, &receipt, &s.err), HR_OK);
    assert_in_range(s.link.largest_bucket, (4 << 20) + 1, 8 << 20);
    assert_in_range(receipt->buckets, 64 / 8, 64 / 4);
    hr_push_receipt_free(receipt);
    stand_close(&s);
}

/* ---- a fault at every call ---- */

/* Nothing is open any more, and whoever lives serves old. */
static void expect_untouched(const stand *s, uint64_t generation) {
    for (size_t i = 0; i < s->fleet.n; i++) {
        const fleet_engine *e = &s->fleet.engines[i];
        if (e->dead)
            continue;
        assert_true(fake_engine_serves(e, generation));
        assert_int_equal(state_of(e), HR_SESSION_IDLE);
    }
}

static void expect_one_of(const stand *s, uint64_t old, uint64_t new) {
    for (size_t i = 0; i < s->fleet.n; i++) {
        const fleet_engine *e = &s->fleet.engines[i];
        assert_true(e->dead || fake_engine_serves(e, old) || fake_engine_serves(e, new));
    }
}

/* What the report of the last call says of each engine that lives is what it serves; and where it
 * does not know, it says so and the fault is one that leaves a doubt. */
static void expect_told(const stand *s, uint64_t old, uint64_t new) {
    cJSON *report = cJSON_Parse(hr_publisher_report(s->publisher));
    const cJSON *engines = cJSON_GetObjectItem(report, "engines");
    size_t fresh = 0, kept = 0;
    assert_int_equal(cJSON_GetArraySize(engines), s->fleet.n);
    for (size_t i = 0; i < s->fleet.n; i++) {
        const fleet_engine *e = &s->fleet.engines[i];
        const cJSON *said = cJSON_GetObjectItem(cJSON_GetArrayItem(engines, (int)i), "serves");
        bool says_new = strcmp(cJSON_GetStringValue(said), "new") == 0;
        bool says_old = strcmp(cJSON_GetStringValue(said), "old") == 0;
        fresh += says_new;
        kept += says_old;
        if (says_new || says_old)
            assert_true(e->dead || fake_engine_serves(e, says_new ? new : old));
        else
            assert_true(s->link.stage == HR_STAGE_COMMIT && s->link.fault != FAULT_REFUSE);
    }
    const char *published = cJSON_GetStringValue(cJSON_GetObjectItem(report, "published"));
    const char *want = fresh == s->fleet.n  ? "all"
                       : fresh > 0          ? "some"
                       : kept == s->fleet.n ? "none"
                                            : "unknown";
    assert_string_equal(published, want);
    cJSON_Delete(report);
}

static void expect_cause(const stand *s, hr_stage stage) {
    char where[64];
    snprintf(where, sizeof where, "%s, %s", urls[s->link.engine], hr_stage_name(stage));
    /* a corrupt bucket is found at the end */
    if (s->link.fault != FAULT_CORRUPT && strstr(s->err.message, where) == NULL)
        fail_msg("\"%s\" does not name %s", s->err.message, where);
}

/* A commit that was interrupted: resume brings all that live to the new version. */
static void finish_commit(stand *s, uint64_t generation) {
    char session[HR_SESSION_ID_SIZE];
    const char *at = strstr(s->err.message, "push-");
    hr_push_receipt *receipt = NULL;
    assert_non_null(at);
    snprintf(session, sizeof session, "%.29s", at);
    hr_status status = hr_publisher_resume(s->publisher, session, NULL, &receipt, &s->err);
    hr_push_receipt_free(receipt);
    if (s->link.fault == FAULT_KILL)
        assert_int_equal(status, HR_ERR_PEER);
    else
        assert_int_equal(status, HR_OK);
    for (size_t i = 0; i < s->fleet.n; i++)
        assert_true(s->fleet.engines[i].dead ||
                    fake_engine_serves(&s->fleet.engines[i], generation));
}

/* False when the push has fewer calls. */
static bool try_fault(fleet_fault fault, unsigned at, unsigned repeat) {
    stand s;
    hr_publisher_options options = options_of(400);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    fleet_link_init(&s.link, &s.fleet, at, fault);
    s.link.repeat = repeat;
    hr_status status = push(&s, 2, NULL);
    bool hit = s.link.hit;
    hr_stage stage = s.link.stage;
    bool session_left = repeat > 0; /* abort was lost as well */
    bool once = repeat == 0 && (fault == FAULT_LOSE_CALL || fault == FAULT_LOSE_REPLY ||
                                (fault == FAULT_CORRUPT && stage != HR_STAGE_BUCKET));
    assert_true(!once || status == HR_OK); /* what was lost once is made again */
    expect_one_of(&s, 1, 2);
    expect_told(&s, 1, 2);
    if (status == HR_OK) {
        expect_all(&s, 2);
        assert_true(!hit || fault == FAULT_LOSE_CALL || fault == FAULT_LOSE_REPLY ||
                    fault == FAULT_CORRUPT || stage == HR_STAGE_COMMIT);
    } else if (stage == HR_STAGE_COMMIT) {
        expect_cause(&s, stage);
        s.link.repeat = 0;
        finish_commit(&s, 2);
    } else {
        assert_true(hit);
        expect_cause(&s, stage);
        if (!session_left)
            expect_untouched(&s, 1);
    }
    /* The next push works: at once, or when the lease of a session that nobody could end is over.
     */
    fake_fleet_revive(&s.fleet);
    fleet_link_init(&s.link, &s.fleet, 0, FAULT_NONE);
    if (session_left)
        fake_fleet_sleep(&s.fleet, 700000);
    assert_int_equal(push(&s, 3, NULL), HR_OK);
    expect_all(&s, 3);
    stand_close(&s);
    return hit;
}

static void every_fault_at_every_call(void **state) {
    (void)state;
    for (int fault = FAULT_REFUSE; fault < FAULT_COUNT; fault++) {
        unsigned at = 0;
        while (try_fault((fleet_fault)fault, at, 0))
            at++;
        assert_in_range(at, 20, 200); /* register, begin, buckets, prepare, commit, by 3 */
    }
}

/* Too often for repeated calls to help. */
static void every_fault_that_lasts(void **state) {
    (void)state;
    static const fleet_fault faults[] = {FAULT_REFUSE, FAULT_LOSE_CALL, FAULT_LOSE_REPLY};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        unsigned at = 0;
        while (try_fault(faults[i], at, 60))
            at++;
        assert_true(at > 20);
    }
}

/* ---- what the receipts of engines say ---- */

static void bytes_that_turn_on_their_way_are_found(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(1 << 20);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    unsigned calls_before_bucket = 3 * 2;
    fleet_link_init(&s.link, &s.fleet, calls_before_bucket + 1, FAULT_CORRUPT);
    assert_int_equal(push(&s, 2, NULL), HR_ERR_DIGEST);
    assert_non_null(strstr(s.err.message, "http://engine-1, prepare"));
    expect_untouched(&s, 1);
    stand_close(&s);
}

/* I17: what guards must be acknowledged. */
static void an_engine_that_says_no_digest_is_not_believed(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    s.link.mute = true;
    assert_int_equal(push(&s, 1, NULL), HR_ERR_SESSION);
    assert_non_null(strstr(s.err.message, "nothing shows that the bytes were checked"));
    for (size_t i = 0; i < FLEET_ENGINES; i++)
        assert_int_equal(state_of(&s.fleet.engines[i]), HR_SESSION_IDLE);
    stand_close(&s);
}

static void an_engine_that_counts_otherwise_is_refused(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    s.link.lies = true;
    assert_int_equal(push(&s, 1, NULL), HR_ERR_DIGEST);
    assert_non_null(strstr(s.err.message, "http://engine-0, prepare: it has 13 tensors"));
    stand_close(&s);
}

static void an_engine_that_says_no_config_is_not_believed(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    s.link.no_configs = true;
    assert_int_equal(push(&s, 1, NULL), HR_ERR_SESSION);
    assert_non_null(strstr(s.err.message, "does not say with which config"));
    for (size_t i = 0; i < FLEET_ENGINES; i++)
        assert_int_equal(state_of(&s.fleet.engines[i]), HR_SESSION_IDLE);
    stand_close(&s);
}

/* Two trainers share a name: what one registers between begin and the first bucket of the other
 * would be the config of the other's bytes. */
static void an_adapter_is_not_published_under_the_config_of_somebody_else(void **state) {
    (void)state;
    stand s;
    hr_registration rival = {.name = "a", .config = "{\"r\": 16}", .config_len = 9};
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    s.link.rival = &rival;
    assert_int_equal(push(&s, 2, NULL), HR_ERR_SESSION);
    assert_non_null(strstr(s.err.message, "engine http://engine-0, prepare: the adapter 'a' was "
                                          "registered again by somebody else meanwhile"));
    expect_untouched(&s, 1);
    assert_int_equal(push(&s, 3, NULL), HR_OK);
    expect_all(&s, 3);
    stand_close(&s);
}

static void another_version(hr_engine_receipt *receipt) {
    receipt->weight_version[0] = 'x';
}
static void another_session(hr_engine_receipt *receipt) {
    receipt->session_id[0] = 'x';
}
static void another_process(hr_engine_receipt *receipt) {
    receipt->instance[0] = 'x';
}
static void other_bytes(hr_engine_receipt *receipt) {
    receipt->xxh3[15] ^= 1;
}
static void only_prepared(hr_engine_receipt *receipt) {
    receipt->state = HR_SESSION_PREPARED;
}

static void a_commit_that_is_answered_for_something_else_is_an_error(void **state) {
    (void)state;
    static const struct {
        void (*twist)(hr_engine_receipt *receipt);
        hr_status status;
        const char *text;
    } rows[] = {
        {another_version, HR_ERR_SESSION, "with weight version \"x1\" instead of \"v1\""},
        {another_session, HR_ERR_SESSION, "a receipt of session \"xush-"},
        {another_process, HR_ERR_SESSION, "as instance \"xngine\", but \"engine\" has prepared"},
        {other_bytes, HR_ERR_DIGEST, "with other tensors than it prepared"},
        {only_prepared, HR_ERR_SESSION, "that is prepared"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        stand s;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        s.link.twist = rows[i].twist;
        assert_int_equal(push(&s, 1, NULL), rows[i].status);
        assert_non_null(strstr(s.err.message, "engine http://engine-0 has "));
        assert_non_null(strstr(s.err.message, rows[i].text));
        assert_non_null(strstr(s.err.message, "push the same weights again, as a new session"));
        s.link.twist = NULL;
        assert_int_equal(push(&s, 2, NULL), HR_OK);
        expect_all(&s, 2);
        stand_close(&s);
    }
}

/* ---- sources ---- */

static void a_source_that_fails_changes_nothing(void **state) {
    (void)state;
    for (int at = 0; at <= WEIGHTS_ALL; at++) {
        stand s;
        char version[32];
        hr_push_receipt *receipt = NULL;
        hr_publisher_options options = options_of(300);
        stand_open(&s, &options);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        s.source = (fake_source){.generation = 2, .adapters = true, .base = true, .fail_at = at};
        hr_push p = fake_push(&s.source, version);
        assert_int_equal(hr_publisher_push(s.publisher, &p, &receipt, &s.err), HR_ERR_IO);
        assert_string_equal(s.err.message,
                            "the source of tensors: the disk of the trainer is full");
        assert_int_equal(s.source.pulled, s.source.released);
        expect_untouched(&s, 1);
        assert_int_equal(push(&s, 3, NULL), HR_OK);
        expect_all(&s, 3);
        stand_close(&s);
    }
}

/* One unit, then the end. */
typedef struct one_unit {
    hr_unit unit;
    bool given;
    unsigned released;
} one_unit;

static hr_status next_one(void *self, hr_unit *unit, hr_error *err) {
    one_unit *one = self;
    (void)err;
    *unit = one->given ? (hr_unit){0} : one->unit;
    one->given = true;
    return HR_OK;
}

static void count_release(void *owner) {
    ((one_unit *)owner)->released++;
}

/* I6, I11, I12: what must not leave does not, and the message says what is wrong with it. */
static void what_must_not_leave_is_refused(void **state) {
    (void)state;
    static const char bytes[64];
    static const char config[] = "{\"r\": 8}";
    const struct {
        const char *adapter, *name; /* of the unit; name NULL: no unit at all */
        size_t bytes;
        bool declared, sync_base;
        hr_status status;
        const char *text;
    } rows[] = {
        {"x", "l.lora_A.weight", 8, true, false, HR_ERR_INVALID, "does not declare"},
        {NULL, "layers.0", 8, true, false, HR_ERR_INVALID, "sync_base = false"},
        {NULL, "a:layers.0", 8, false, true, HR_ERR_INVALID, "has a ':' in its name"},
        {NULL, "l.lora_A.weight", 8, false, true, HR_ERR_INVALID, "lora_A"},
        {NULL, "l.base_layer.weight", 8, false, true, HR_ERR_INVALID, "base_layer"},
        {NULL, "layers.0", 9, false, true, HR_ERR_SHAPE, "9 bytes are not [8] U8"},
        {NULL, NULL, 0, true, false, HR_ERR_INVALID, "declared but got no tensors"},
        {NULL, NULL, 0, false, true, HR_ERR_INVALID, "no base tensor came"},
        {"a", "l.lora_A.weight", 8, true, true, HR_ERR_INVALID, "no base tensor came"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        stand s;
        hr_push_receipt *receipt = NULL;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        hr_tensor t = {.name = rows[i].name,
                       .dtype = HR_DTYPE_U8,
                       .ndim = 1,
                       .shape = {8},
                       .data = bytes,
                       .bytes = rows[i].bytes};
        one_unit one = {.given = rows[i].name == NULL};
        one.unit = (hr_unit){&t, 1, rows[i].adapter, &one, count_release};
        hr_push_adapter adapter = {"a", config, sizeof config - 1, false};
        hr_push p = {.adapters = &adapter,
                     .n_adapters = rows[i].declared,
                     .sync_base = rows[i].sync_base,
                     .source = {&one, next_one}};
        assert_int_equal(hr_publisher_push(s.publisher, &p, &receipt, &s.err), rows[i].status);
        if (strstr(s.err.message, rows[i].text) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", s.err.message, rows[i].text);
        assert_int_equal(one.released, rows[i].name != NULL);
        if (i < 6)
            assert_int_equal(s.link.largest_bucket, 0);
        for (size_t k = 0; k < FLEET_ENGINES; k++)
            assert_int_equal(state_of(&s.fleet.engines[k]), HR_SESSION_IDLE);
        stand_close(&s);
    }
}

static void a_bad_push_speaks_to_no_engine(void **state) {
    (void)state;
    static const char good[] = "{\"r\": 8}", bad[] = "[8]";
    const struct {
        const char *adapter, *config, *version, *session;
        bool complete;
        const char *text;
    } rows[] = {
        {"a:b", good, NULL, NULL, false, "':'"},
        {"", good, NULL, NULL, false, "adapter"},
        {"a", bad, NULL, NULL, false, "wanted an object"},
        {"a", NULL, NULL, NULL, false, "has no config"},
        {"a", good, "", NULL, false, "weight_version"},
        {"a", good, NULL, "not printable\n", false, "session"},
        {"a", good, NULL, NULL, true, "complete_base needs sync_base"},
        {NULL, NULL, NULL, NULL, false, "nothing to push"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        stand s;
        hr_push_receipt *receipt = NULL;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        hr_push_adapter adapter = {rows[i].adapter, rows[i].config,
                                   rows[i].config != NULL ? strlen(rows[i].config) : 0, false};
        one_unit one = {.given = true};
        hr_push p = {.adapters = &adapter,
                     .n_adapters = rows[i].adapter != NULL,
                     .weight_version = rows[i].version,
                     .session_id = rows[i].session,
                     .complete_base = rows[i].complete,
                     .source = {&one, next_one}};
        assert_true(hr_publisher_push(s.publisher, &p, &receipt, &s.err) != HR_OK);
        if (strstr(s.err.message, rows[i].text) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", s.err.message, rows[i].text);
        assert_int_equal(s.link.attempts, 0);
        stand_close(&s);
    }
}

static void nothing_changed_means_nothing_sent(void **state) {
    (void)state;
    stand s;
    char version[32];
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    s.source = (fake_source){.generation = 2, .adapters = true, .fail_at = -1};
    hr_push p = fake_push(&s.source, version);
    p.unchanged = true;
    assert_int_equal(hr_publisher_push(s.publisher, &p, &receipt, &s.err), HR_OK);
    assert_true(receipt->skipped);
    assert_int_equal(s.source.pulled, 0);
    assert_int_equal(s.link.attempts, 0);
    hr_push_receipt_free(receipt);
    stand_close(&s);
}

/* ---- cancelling, two at once ---- */

typedef struct canceller {
    unsigned calls, cancel_at;
    hr_publisher *publisher;
    hr_status nested;
} canceller;

static bool on_progress(void *ctx, const hr_push_progress *progress) {
    canceller *c = ctx;
    (void)progress;
    if (c->publisher != NULL) {
        hr_push nothing = {0};
        c->nested = hr_publisher_push(c->publisher, &nothing, NULL, NULL);
    }
    return c->calls++ != c->cancel_at;
}

static void a_push_is_cancelled_at_every_stage(void **state) {
    (void)state;
    for (unsigned at = 0; at < 60; at++) {
        stand s;
        canceller c = {.cancel_at = UINT32_MAX};
        hr_publisher_options options = options_of(300);
        options.progress = on_progress;
        options.progress_ctx = &c;
        stand_open(&s, &options);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        c.calls = 0;
        c.cancel_at = at;
        hr_status status = push(&s, 2, NULL);
        if (status == HR_OK) {
            expect_all(&s, 2);
        } else {
            assert_int_equal(status, HR_ERR_CANCELLED);
            expect_untouched(&s, 1);
        }
        assert_true(status != HR_OK || at > 8); /* there are more stages than that */
        bool over = c.calls < at;
        assert_true(!over || status == HR_OK);
        stand_close(&s);
        if (over)
            return;
    }
    fail_msg("a push has no end");
}

static void a_second_push_at_the_same_time_is_refused(void **state) {
    (void)state;
    stand s;
    canceller c = {.cancel_at = UINT32_MAX};
    hr_publisher_options options = options_of(0);
    options.progress = on_progress;
    options.progress_ctx = &c;
    stand_open(&s, &options);
    c.publisher = s.publisher;
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    assert_int_equal(c.nested, HR_ERR_BUSY);
    stand_close(&s);
}

/* ---- pausing ---- */

static void engines_go_on(fleet_fault fault) {
    for (unsigned at = 0; at < 40; at++) {
        stand s;
        hr_publisher_options options = options_of(0);
        options.pause = HR_PUSH_PAUSE_RETRACT;
        stand_open(&s, &options);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        fleet_link_init(&s.link, &s.fleet, at, fault);
        hr_status status = push(&s, 2, NULL);
        /* The one that refuses to go on stays as it is, and the push says so. */
        bool last = s.link.hit && s.link.stage == HR_STAGE_CONTINUE;
        bool refused_to = last && fault == FAULT_REFUSE;
        for (size_t i = 0; i < FLEET_ENGINES; i++)
            assert_int_equal(s.fleet.engines[i].paused, refused_to && i == s.link.engine);
        if (last)
            assert_non_null(strstr(s.err.message, "published on all engines, but"));
        assert_true(s.link.hit == (status != HR_OK));
        bool over = !s.link.hit;
        stand_close(&s);
        if (over)
            return;
    }
    fail_msg("a push has no end");
}

/* Also where it is not known whether the pause came about. */
static void engines_go_on_after_a_pause(void **state) {
    (void)state;
    engines_go_on(FAULT_REFUSE);
    engines_go_on(FAULT_LATE);
}

/* I25 */
static void half_written_engines_stay_paused_and_it_is_said(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(300);
    options.pause = HR_PUSH_PAUSE_RETRACT;
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    unsigned begun = 4 * 3; /* pause, register twice, begin */
    fleet_link_init(&s.link, &s.fleet, begun + 4, FAULT_REFUSE);
    s.link.traits.base_rollback = false;
    assert_int_equal(push(&s, 2, NULL), HR_ERR_INVALID);
    assert_non_null(strstr(s.err.message, "engines stay paused"));
    for (size_t i = 0; i < FLEET_ENGINES; i++)
        assert_true(s.fleet.engines[i].paused);
    stand_close(&s);
}

/* Without a pause they go on with what they have; without sessions adapters stay where they came.
 */
static void what_a_transport_cannot_take_back_is_said(void **state) {
    (void)state;
    for (int without_base = 0; without_base < 2; without_base++) {
        stand s;
        hr_publisher_options options = options_of(300);
        stand_open(&s, &options);
        fleet_link_init(&s.link, &s.fleet, 3 * 3 + 4, FAULT_REFUSE); /* register twice, begin */
        s.link.traits.base_rollback = without_base;
        s.link.traits.sessions = !without_base;
        assert_int_equal(push(&s, 1, NULL), HR_ERR_INVALID);
        assert_non_null(strstr(s.err.message, without_base
                                                  ? "engines may serve adapters that were sent"
                                                  : "base weights may be half written"));
        assert_non_null(strstr(hr_publisher_report(s.publisher), "\"published\":\"unknown\""));
        stand_close(&s);
    }
}

/* One engine after the other refuses its first adapter before anything came of it. */
static void what_was_refused_before_it_changed_a_thing_is_not_doubted(void **state) {
    (void)state;
    for (unsigned refused = 1; refused <= FLEET_ENGINES; refused++) {
        stand s;
        hr_publisher_options options = options_of(300);
        stand_open(&s, &options);
        fleet_link_init(&s.link, &s.fleet, 3 * 2, FAULT_REFUSE); /* register, begin */
        s.link.repeat = refused - 1;
        s.link.untouched = true;
        s.link.traits.sessions = false;
        assert_int_equal(push(&s, 1, NULL), HR_ERR_INVALID);
        bool all = refused == FLEET_ENGINES;
        assert_int_equal(strstr(s.err.message, "engines may serve adapters") == NULL, all);
        expect_in(hr_publisher_report(s.publisher),
                  all ? "\"published\":\"none\"" : "\"published\":\"unknown\"");
        expect_in(hr_publisher_report(s.publisher), "\"serves\":\"old\"");
        stand_close(&s);
    }
}

/* ---- other trainers ---- */

static void other_session(stand *s, size_t engine, uint64_t lease_ms) {
    char id[HR_SESSION_ID_SIZE];
    hr_session_options options = {.session_id = "other", .lease_ms = lease_ms, .sync_base = true};
    assert_int_equal(hr_receiver_begin(s->fleet.engines[engine].receiver, &options, id, &s->err),
                     HR_OK);
}

static void a_push_outlasts_the_session_of_a_dead_trainer(void **state) {
    (void)state;
    for (size_t engine = 0; engine < FLEET_ENGINES; engine++) {
        stand s;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        other_session(&s, engine, FLEET_TIMEOUT_MS + FLEET_TIMEOUT_MS / 8);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        expect_all(&s, 1);
        stand_close(&s);
    }
}

/* Also over a transport whose abort ends whatever is open. */
static void a_session_of_another_trainer_is_named_and_left_alone(void **state) {
    (void)state;
    for (size_t engine = 0; engine < FLEET_ENGINES; engine++) {
        stand s;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        other_session(&s, engine, 300000);
        s.link.nameless_abort = true;
        assert_int_equal(push(&s, 1, NULL), HR_ERR_SESSION);
        assert_non_null(strstr(s.err.message, urls[engine]));
        assert_non_null(strstr(s.err.message, "'other'"));
        assert_non_null(strstr(s.err.message, "--abort"));
        for (size_t i = 0; i < FLEET_ENGINES; i++)
            assert_int_equal(state_of(&s.fleet.engines[i]),
                             i == engine ? HR_SESSION_OPEN : HR_SESSION_IDLE);
        assert_int_equal(hr_receiver_abort(s.fleet.engines[engine].receiver, "other", NULL), HR_OK);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        stand_close(&s);
    }
}

/* It has tensors of an adapter that is to be registered, as after a trainer that died in its push
 * and is there again. */
static void a_session_that_holds_an_adapter_is_named_with_the_way_on(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    other_session(&s, 0, 300000);
    fake_source source = {.generation = 2, .adapters = true, .fail_at = -1};
    hr_unit_source units = fake_source_units(&source);
    hr_unit unit = {0};
    assert_int_equal(units.next(units.self, &unit, &s.err), HR_OK);
    char name[128];
    hr_tensor held = unit.tensors[0];
    snprintf(name, sizeof name, "%s:%s", unit.adapter, held.name);
    held.name = name;
    hr_bucket bucket = {.tensors = &held, .n = 1};
    assert_int_equal(hr_receiver_bucket(s.fleet.engines[0].receiver, &bucket, &s.err), HR_OK);
    unit.release(unit.owner);
    assert_int_equal(push(&s, 3, NULL), HR_ERR_BUSY);
    expect_in(s.err.message, "'other' holds tensors of the adapter");
    expect_in(s.err.message, "waited ");
    expect_in(s.err.message, "`headrace push --abort ID`");
    assert_int_equal(hr_receiver_abort(s.fleet.engines[0].receiver, "other", NULL), HR_OK);
    assert_int_equal(push(&s, 3, NULL), HR_OK);
    stand_close(&s);
}

/* Whoever has the first engine may go on: two trainers never hold a part of the fleet each. */
static void sessions_begin_at_the_same_engine(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    other_session(&s, 0, 300000);
    assert_int_equal(push(&s, 1, NULL), HR_ERR_SESSION);
    for (size_t i = 1; i < FLEET_ENGINES; i++) {
        hr_receiver_status status;
        hr_receiver_status_get(s.fleet.engines[i].receiver, &status);
        assert_int_equal(status.sessions_rolled_back, 0); /* none was ever open */
    }
    assert_int_equal(hr_receiver_abort(s.fleet.engines[0].receiver, "other", NULL), HR_OK);
    stand_close(&s);
}

/* ---- requests that run on ---- */

static hr_status run_on(void *self, uint64_t timeout_ms, hr_error *err) {
    fake_fleet_sleep(self, timeout_ms);
    return hr_fail(err, HR_ERR_TIMEOUT, "1 requests still ran");
}

/* The first n engines have requests that do not end. */
static void keep_busy(stand *s, size_t n) {
    for (size_t i = 0; i < FLEET_ENGINES; i++) {
        s->fleet.engines[i].sink.requests = i < n ? run_on : NULL;
        s->fleet.engines[i].sink.requests_self = &s->fleet;
    }
}

/* An engine that waits for its requests says so before the publisher stops listening: what it
 * serves is known, and a resume within the lease finishes it. */
static void requests_that_run_on_leave_no_doubt(void **state) {
    (void)state;
    for (size_t busy = 1; busy <= FLEET_ENGINES; busy++) {
        stand s;
        hr_publisher_options options = options_of(0);
        stand_open(&s, &options);
        assert_int_equal(push(&s, 1, NULL), HR_OK);
        keep_busy(&s, busy);
        assert_int_equal(push(&s, 2, NULL), HR_ERR_TIMEOUT);
        expect_in(s.err.message, "http://engine-0, commit: 1 requests still ran; committed: ");
        expect_in(s.err.message, "finish it within 10.0 s (the lease): `headrace push --resume ");
        expect_in(hr_publisher_report(s.publisher),
                  busy == FLEET_ENGINES ? "\"published\":\"none\"" : "\"published\":\"some\"");
        for (size_t i = 0; i < FLEET_ENGINES; i++)
            assert_true(fake_engine_serves(&s.fleet.engines[i], i < busy ? 1 : 2));
        keep_busy(&s, 0);
        finish_commit(&s, 2);
        stand_close(&s);
    }
}

/* Engines that write base weights in place wait for requests when the first ones come. */
static void a_begin_bounds_the_wait_for_requests_as_well(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    assert_in_range(s.fleet.engines[0].begin_waits_ms, FLEET_TIMEOUT_MS / 2, FLEET_TIMEOUT_MS - 1);
    stand_close(&s);
}

/* ---- resume ---- */

static void a_session_that_was_rolled_back_cannot_be_resumed(void **state) {
    (void)state;
    stand s;
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    assert_int_equal(hr_publisher_resume(s.publisher, "push-unknown", NULL, &receipt, &s.err),
                     HR_ERR_SESSION);
    assert_non_null(strstr(s.err.message, "http://engine-0, commit"));
    assert_non_null(strstr(s.err.message, "an engine that does not know it has restarted, or has "
                                          "dropped it when its lease ran out"));
    assert_non_null(strstr(s.err.message, "push the same weights again"));
    stand_close(&s);
}

/* Nothing is sent, so how many tensors there are and what they are is not known here. */
static void a_resume_says_only_what_it_knows(void **state) {
    (void)state;
    stand s;
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, &receipt), HR_OK);
    expect_in(hr_push_receipt_json(receipt), "\"tensors\":13,");
    char session[HR_SESSION_ID_SIZE];
    snprintf(session, sizeof session, "%s", receipt->session_id);
    hr_push_receipt_free(receipt);
    assert_int_equal(hr_publisher_resume(s.publisher, session, "v1", &receipt, &s.err), HR_OK);
    const char *json = hr_push_receipt_json(receipt);
    expect_in(json, "\"tensors\":null,\"bytes\":null,\"xxh3\":null,");
    expect_in(json, "\"stream\":null,\"prepare\":null,");
    expect_in(json, "\"published\":\"all\"");
    hr_push_receipt_free(receipt);
    stand_close(&s);
}

/* An engine that was away when the push committed and went on: resume does both for it. */
static void resume_makes_paused_engines_go_on(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    options.pause = HR_PUSH_PAUSE_RETRACT;
    stand_open(&s, &options);
    assert_int_equal(push(&s, 1, NULL), HR_OK);
    unsigned last_commit = s.link.calls - FLEET_ENGINES - 1;
    fleet_link_init(&s.link, &s.fleet, last_commit, FAULT_LOSE_CALL);
    s.link.repeat = 1000;
    assert_int_equal(push(&s, 2, NULL), HR_ERR_PEER);
    assert_int_equal(s.link.stage, HR_STAGE_COMMIT);
    assert_true(fake_engine_serves(&s.fleet.engines[0], 2));
    assert_true(fake_engine_serves(&s.fleet.engines[2], 1) && s.fleet.engines[2].paused);
    s.link.fault = FAULT_NONE;
    finish_commit(&s, 2);
    for (size_t i = 0; i < FLEET_ENGINES; i++)
        assert_false(s.fleet.engines[i].paused);
    stand_close(&s);
}

/* ---- transports ---- */

static void a_transport_that_cannot_carry_it_is_refused(void **state) {
    (void)state;
    stand s;
    hr_publisher_options options = options_of(0);
    stand_open(&s, &options);
    s.link.traits.carries_base = false;
    assert_int_equal(push(&s, 1, NULL), HR_ERR_UNSUPPORTED);
    s.link.traits.carries_base = true;
    s.link.traits.carries_adapters = false;
    assert_int_equal(push(&s, 1, NULL), HR_ERR_UNSUPPORTED);
    assert_int_equal(s.link.attempts, 0);
    stand_close(&s);
}

/* Adapters that must go whole are one bucket each, whatever its size. */
static void whole_adapters_are_not_divided(void **state) {
    (void)state;
    stand s;
    char version[32];
    hr_push_receipt *receipt = NULL;
    hr_publisher_options options = options_of(1);
    stand_open(&s, &options);
    s.link.traits.whole_adapters = true;
    s.source = (fake_source){.generation = 2, .adapters = true, .fail_at = -1};
    hr_push p = fake_push(&s.source, version);
    assert_int_equal(hr_publisher_push(s.publisher, &p, &receipt, &s.err), HR_OK);
    assert_int_equal(receipt->buckets, 2);
    hr_push_receipt_free(receipt);
    /* With base tensors among them b comes in two parts. */
    assert_int_equal(push(&s, 3, NULL), HR_ERR_INVALID);
    assert_non_null(strstr(s.err.message, "units of b do not come together"));
    stand_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_push_reaches_every_engine),
        cmocka_unit_test(any_bucket_size_publishes_the_same),
        cmocka_unit_test(buckets_start_small_and_grow_with_what_has_left),
        cmocka_unit_test(every_fault_at_every_call),
        cmocka_unit_test(every_fault_that_lasts),
        cmocka_unit_test(bytes_that_turn_on_their_way_are_found),
        cmocka_unit_test(an_engine_that_says_no_digest_is_not_believed),
        cmocka_unit_test(an_engine_that_counts_otherwise_is_refused),
        cmocka_unit_test(an_engine_that_says_no_config_is_not_believed),
        cmocka_unit_test(an_adapter_is_not_published_under_the_config_of_somebody_else),
        cmocka_unit_test(a_commit_that_is_answered_for_something_else_is_an_error),
        cmocka_unit_test(a_source_that_fails_changes_nothing),
        cmocka_unit_test(what_must_not_leave_is_refused),
        cmocka_unit_test(a_bad_push_speaks_to_no_engine),
        cmocka_unit_test(nothing_changed_means_nothing_sent),
        cmocka_unit_test(a_push_is_cancelled_at_every_stage),
        cmocka_unit_test(a_second_push_at_the_same_time_is_refused),
        cmocka_unit_test(engines_go_on_after_a_pause),
        cmocka_unit_test(half_written_engines_stay_paused_and_it_is_said),
        cmocka_unit_test(what_a_transport_cannot_take_back_is_said),
        cmocka_unit_test(what_was_refused_before_it_changed_a_thing_is_not_doubted),
        cmocka_unit_test(a_push_outlasts_the_session_of_a_dead_trainer),
        cmocka_unit_test(a_session_of_another_trainer_is_named_and_left_alone),
        cmocka_unit_test(a_session_that_holds_an_adapter_is_named_with_the_way_on),
        cmocka_unit_test(sessions_begin_at_the_same_engine),
        cmocka_unit_test(requests_that_run_on_leave_no_doubt),
        cmocka_unit_test(a_begin_bounds_the_wait_for_requests_as_well),
        cmocka_unit_test(a_session_that_was_rolled_back_cannot_be_resumed),
        cmocka_unit_test(a_resume_says_only_what_it_knows),
        cmocka_unit_test(resume_makes_paused_engines_go_on),
        cmocka_unit_test(a_transport_that_cannot_carry_it_is_refused),
        cmocka_unit_test(whole_adapters_are_not_divided),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
