/* What the receiver refuses and what it says then: manifests, limits, repeated calls, ids. */
#include "receiver_fixture.h"

#include "tensor/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char config[] = "{\"r\":8}";

/* ---- manifests ---- */

typedef struct listed {
    hr_manifest_entry entry;
    char xxh3[HR_XXH3_HEX], sha256[HR_SHA256_HEX];
} listed;

static void list(listed *l, const char *name, const char *bytes) {
    uint8_t digest[HR_XXH3_SIZE];
    hr_xxh3(bytes, strlen(bytes), digest);
    hr_sha256_hex(bytes, strlen(bytes), l->sha256);
    l->entry = (hr_manifest_entry){name, l->sha256, hr_xxh3_format(digest, l->xxh3)};
}

/* x with A "aa" and B "bb", ended with these entries. */
static hr_status end_x(fixture *f, const hr_manifest_entry *entries, size_t n) {
    assert_int_equal(fixture_begin(f, false), HR_OK);
    assert_int_equal(fixture_send(f, "x:A.lora_A.weight", "aa"), HR_OK);
    assert_int_equal(fixture_send(f, "x:B.lora_B.weight", "bb"), HR_OK);
    hr_manifest manifest = {.entries = entries, .n = n};
    hr_status status = fixture_end_with(f, &manifest);
    if (status != HR_OK)
        assert_ptr_equal(strstr(f->err.message, "[LORA-CHECK]"), f->err.message);
    return status;
}

static void a_manifest_is_compared_in_every_way(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    listed a, b;
    list(&a, "x:A.lora_A.weight", "aa");
    list(&b, "x:B.lora_B.weight", "bb");
    hr_manifest_entry good[] = {a.entry, b.entry};

    hr_manifest_entry e[3] = {a.entry, b.entry, {.name = "x:C.lora_A.weight"}};
    fixture_says(&f, end_x(&f, e, 3), HR_ERR_SESSION, "did not come");
    e[2].name = NULL;
    fixture_says(&f, end_x(&f, e, 3), HR_ERR_INVALID, "no name");
    e[2] = a.entry;
    fixture_says(&f, end_x(&f, e, 3), HR_ERR_INVALID, "twice");
    fixture_says(&f, end_x(&f, e, 1), HR_ERR_SESSION, "'x:B.lora_B.weight' came but is not");
    fixture_says(&f, end_x(&f, NULL, 0), HR_ERR_SESSION, "came but is not");
    e[0].sha256 = b.sha256;
    fixture_says(&f, end_x(&f, e, 2), HR_ERR_DIGEST, "wanted SHA-256");
    e[0].sha256 = NULL;
    e[0].xxh3 = b.xxh3;
    fixture_says(&f, end_x(&f, e, 2), HR_ERR_DIGEST, "wanted XXH3-128");
    e[0].xxh3 = "123";
    fixture_says(&f, end_x(&f, e, 2), HR_ERR_INVALID, "is not an XXH3-128");
    e[0].xxh3 = NULL;
    e[0].sha256 = "zz";
    fixture_says(&f, end_x(&f, e, 2), HR_ERR_INVALID, "is not a SHA-256");
    assert_int_equal(f.sink.n_live, 0);

    for (char *c = a.sha256; *c != '\0'; c++)
        *c = (char)(*c >= 'a' ? *c - 'a' + 'A' : *c);
    assert_int_equal(end_x(&f, good, 2), HR_OK);
    fixture_close(&f);
}

static void an_adapter_of_the_manifest_that_did_not_come_is_named(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_register(&f, "y", config, false), HR_OK);
    hr_manifest_entry e[] = {{.name = "x:A.lora_A.weight"},
                             {.name = "x:B.lora_B.weight"},
                             {.name = "y:A.lora_A.weight"}};
    fixture_says(&f, end_x(&f, e, 3), HR_ERR_SESSION, "'y:A.lora_A.weight'");
    fixture_close(&f);
}

static void base_tensors_are_compared_when_they_are_listed(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    listed base;
    list(&base, "layers.0.weight", "base");
    base.entry.sha256 = NULL;
    hr_manifest manifest = {.entries = &base.entry, .n = 1, .covers_base = true};
    for (int covers = 0; covers < 2; covers++) {
        manifest.covers_base = covers == 1;
        assert_int_equal(fixture_begin(&f, true), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.0.weight", "base"), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.1.weight", "more"), HR_OK);
        assert_int_equal(fixture_end_with(&f, &manifest), covers ? HR_ERR_SESSION : HR_OK);
        assert_int_equal(fixture_begin(&f, true), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.0.weight", "evil"), HR_OK);
        assert_int_equal(fixture_end_with(&f, &manifest), HR_ERR_DIGEST);
    }
    fixture_close(&f);
}

static void sha256_of_base_tensors_is_there_when_the_session_began_with_audit(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    listed base;
    list(&base, "layers.0.weight", "base");
    hr_manifest manifest = {.entries = &base.entry, .n = 1};
    for (int audit = 0; audit < 2; audit++) {
        hr_session_options begin = {.sync_base = true, .audit = audit == 1};
        hr_end_options end = {.manifest = &manifest, .audit = audit == 1};
        char id[HR_SESSION_ID_SIZE];
        hr_receipt *receipt = NULL;
        assert_int_equal(hr_receiver_begin(f.receiver, &begin, id, NULL), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.0.weight", "base"), HR_OK);
        hr_status status = hr_receiver_end(f.receiver, &end, &receipt, &f.err);
        if (audit == 0) {
            fixture_says(&f, status, HR_ERR_INVALID, "begin the session with audit");
            continue;
        }
        assert_int_equal(status, HR_OK);
        assert_string_equal(receipt->audit[0].sha256, base.sha256);
        hr_receipt_free(receipt);
    }
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "base"), HR_OK);
    hr_end_options end = {.audit = true};
    fixture_says(&f, hr_receiver_end(f.receiver, &end, NULL, &f.err), HR_ERR_INVALID,
                 "begin the session with audit");
    fixture_close(&f);
}

/* ---- limits ---- */

static void a_session_holds_no_more_than_it_may_and_asks_for_no_more(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    f.memory.most = 0;
    static uint8_t bytes[FIXTURE_STASH];
    hr_tensor large = {.name = "x:A.lora_A.weight",
                       .dtype = HR_DTYPE_U8,
                       .ndim = 1,
                       .shape = {FIXTURE_STASH},
                       .data = bytes,
                       .bytes = FIXTURE_STASH};
    hr_bucket bucket = {.tensors = &large, .n = 1};
    fixture_says(&f, hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_LIMIT,
                 "does not fit into");
    assert_true(f.memory.most < 4096);
    large.shape[0] = large.bytes = FIXTURE_STASH / 2;
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_OK);
    large.name = "x:B.lora_B.weight";
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_LIMIT);
    fixture_close(&f);
}

static void empty_and_overlong_things_are_refused(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    char name[2048];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_int_equal(fixture_register(&f, "", config, false), HR_ERR_INVALID);
    fixture_says(&f, fixture_register(&f, "a:b", config, false), HR_ERR_INVALID,
                 "must not contain ':'");
    assert_int_equal(fixture_register(&f, "a\nb", config, false), HR_ERR_INVALID);
    assert_int_equal(fixture_register(&f, name, config, false), HR_ERR_INVALID);
    assert_int_equal(fixture_register(&f, "x", "", false), HR_ERR_ADAPTER_CONFIG);
    assert_int_equal(fixture_begin_for(&f, name, true, NULL), HR_ERR_INVALID);
    assert_int_equal(fixture_begin_for(&f, "a b", true, NULL), HR_ERR_INVALID);
    assert_int_equal(fixture_begin_for(&f, "", true, NULL), HR_ERR_INVALID);
    assert_int_equal(fixture_begin_for(&f, "s", true, "unknown"), HR_ERR_ADAPTER_UNKNOWN);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    assert_int_equal(fixture_send(&f, name, "x"), HR_ERR_INVALID);
    assert_int_equal(fixture_send(&f, "", "x"), HR_ERR_INVALID);
    assert_int_equal(fixture_send(&f, ":q.weight", "x"), HR_ERR_INVALID);
    assert_int_equal(fixture_send(&f, "x:", "x"), HR_ERR_INVALID);
    assert_int_equal(fixture_send(&f, NULL, "x"), HR_ERR_INVALID);
    hr_bucket empty = {0};
    assert_int_equal(hr_receiver_bucket(f.receiver, &empty, &f.err), HR_ERR_INVALID);
    hr_tensor tensor = fixture_tensor("layers.0.weight", "x");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .weight_version = name};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_INVALID);
    fixture_says(&f, fixture_send(&f, "layers.9.weight", "x"), HR_ERR_NOT_FOUND, "layers.9");
    assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_OK);
    assert_int_equal(hr_receiver_set_version(f.receiver, name, true, NULL), HR_ERR_INVALID);
    fixture_close(&f);
}

static void what_a_call_may_ask_for_is_bounded(void **state) {
    (void)state;
    enum { LARGE = (1 << 20) + 1 };
    fixture f;
    fixture_open(&f);
    char *large = malloc(LARGE + 1);
    memset(large, ' ', LARGE);
    large[LARGE] = '\0';
    f.memory.most = 0;
    assert_int_equal(fixture_register(&f, "x", large, false), HR_ERR_LIMIT);
    hr_registration far = {.name = "x", .config = config, .config_len = 7, .path = large};
    assert_int_equal(hr_receiver_register(f.receiver, &far, NULL, NULL), HR_ERR_LIMIT);
    hr_session_options begin = {.session_id = "s", .lease_ms = UINT64_MAX};
    char id[HR_SESSION_ID_SIZE];
    assert_int_equal(hr_receiver_begin(f.receiver, &begin, id, NULL), HR_ERR_LIMIT);
    static const char *const no_names[1];
    begin = (hr_session_options){.adapters = no_names, .n_adapters = LARGE};
    assert_int_equal(hr_receiver_begin(f.receiver, &begin, id, NULL), HR_ERR_LIMIT);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    hr_tensor tensor = fixture_tensor("layers.0.weight", "x");
    hr_bucket bucket = {.tensors = &tensor, .n = LARGE};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, NULL), HR_ERR_LIMIT);
    bucket = (hr_bucket){.tensors = &tensor, .n = 1, .stream = large};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, NULL), HR_ERR_LIMIT);
    assert_true(f.memory.most < 4096);
    free(large);
    fixture_close(&f);
}

static void a_receiver_without_memory_is_not_made(void **state) {
    (void)state;
    fake_memory memory = {.countdown = 0};
    fake_sink sink;
    fake_sink_init(&sink);
    hr_receiver_sink ops = fake_sink_ops(&sink);
    hr_receiver_options options = {
        .alloc = fake_memory_alloc, .free = fake_memory_free, .alloc_self = &memory};
    hr_receiver *receiver = NULL;
    assert_int_equal(hr_receiver_create(&options, &ops, &receiver, NULL), HR_ERR_NO_MEMORY);
    assert_null(receiver);
    /* by default memory and time are the system's */
    options = (hr_receiver_options){.instance = NULL};
    assert_int_equal(hr_receiver_create(&options, &ops, &receiver, NULL), HR_OK);
    hr_receiver_status status;
    hr_receiver_status_get(receiver, &status);
    assert_int_equal(status.state, HR_SESSION_IDLE);
    hr_receiver_destroy(receiver);
    hr_receiver_destroy(NULL);
}

static void at_the_cap_a_new_name_is_refused_but_not_an_old_one(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    char name[16];
    for (int i = 0; i < FAKE_NAMES; i++) {
        (void)snprintf(name, sizeof name, "n%d", i);
        assert_int_equal(fixture_register(&f, name, config, false), HR_OK);
    }
    fixture_says(&f, fixture_register(&f, "more", config, false), HR_ERR_LIMIT, "max-loaded-loras");
    assert_int_equal(fixture_register(&f, "n3", config, false), HR_OK);
    fixture_close(&f);
}

/* ---- buckets that come again ---- */

static hr_status send_at(fixture *f, const char *stream, uint64_t index, const char *name,
                         const char *bytes) {
    hr_tensor tensor = fixture_tensor(name, bytes);
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .stream = stream, .index = index};
    return hr_receiver_bucket(f->receiver, &bucket, &f->err);
}

static void each_stream_is_counted_from_zero(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    fixture_says(&f, send_at(&f, "r0", 1, "x:a.lora_A.weight", "1"), HR_ERR_INVALID, "0 is next");
    assert_int_equal(send_at(&f, "r0", 0, "x:a.lora_A.weight", "1"), HR_OK);
    assert_int_equal(send_at(&f, "r1", 0, "layers.0.weight", "2"), HR_OK);
    assert_int_equal(send_at(&f, "r0", 1, "x:b.lora_A.weight", "3"), HR_OK);
    uint64_t calls = f.sink.calls;
    assert_int_equal(send_at(&f, "r1", 0, "layers.0.weight", "2"), HR_OK);
    assert_int_equal(send_at(&f, "r0", 0, "x:a.lora_A.weight", "1"), HR_OK);
    assert_int_equal(f.sink.calls, calls);
    fixture_says(&f, send_at(&f, "r0", 0, "x:a.lora_A.weight", "x"), HR_ERR_DIGEST, "contents");
    assert_int_equal(send_at(&f, "r0", 0, "x:c.lora_A.weight", "1"), HR_ERR_DIGEST);
    hr_receiver_status status;
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.tensors, 3);
    assert_int_equal(status.bytes, 3);
    for (uint64_t i = 2; i < 40; i++) { /* more than the first room for digests */
        char name[32];
        (void)snprintf(name, sizeof name, "x:%u.lora_A.weight", (unsigned)i);
        assert_int_equal(send_at(&f, "r0", i, name, "4"), HR_OK);
    }
    assert_int_equal(send_at(&f, "r0", 3, "x:3.lora_A.weight", "4"), HR_OK);
    fixture_close(&f);
}

static void a_type_is_part_of_a_buckets_contents(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    hr_tensor tensor = fixture_tensor("x:a.lora_A.weight", "four");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .stream = "r0"};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_OK);
    tensor.dtype = HR_DTYPE_BF16;
    tensor.shape[0] = 2;
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_DIGEST);
    fixture_close(&f);
}

/* ---- ids ---- */

static void an_id_is_used_once(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK); /* the reply was lost */
    assert_int_equal(fixture_begin_for(&f, "s", false, NULL), HR_ERR_SESSION);
    assert_int_equal(fixture_begin_for(&f, "s", true, "x"), HR_ERR_SESSION);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_ERR_SESSION);
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    fixture_says(&f, fixture_begin_for(&f, "s", true, NULL), HR_ERR_SESSION, "published already");
    assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_ERR_SESSION);
    assert_int_equal(fixture_begin_for(&f, "t", true, NULL), HR_OK);
    assert_int_equal(hr_receiver_abort(f.receiver, "t", NULL), HR_OK);
    fixture_says(&f, fixture_begin_for(&f, "t", true, NULL), HR_ERR_SESSION, "rolled back");
    fixture_close(&f);
}

static void made_ids_differ(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    char ids[2][HR_SESSION_ID_SIZE];
    hr_session_options begin = {.sync_base = true};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(hr_receiver_begin(f.receiver, &begin, ids[i], NULL), HR_OK);
        assert_int_equal(hr_receiver_abort(f.receiver, ids[i], NULL), HR_OK);
    }
    assert_string_not_equal(ids[0], ids[1]);
    fixture_close(&f);
}

static void the_last_64_sessions_are_remembered(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    char id[16];
    for (int i = 0; i < 70; i++) {
        (void)snprintf(id, sizeof id, "s%d", i);
        hr_session_options begin = {.session_id = id, .sync_base = true, .audit = true};
        char made[HR_SESSION_ID_SIZE];
        assert_int_equal(hr_receiver_begin(f.receiver, &begin, made, NULL), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.0.weight", id), HR_OK);
        hr_end_options end = {.session_id = id, .audit = true};
        assert_int_equal(hr_receiver_end(f.receiver, &end, NULL, NULL), HR_OK);
    }
    assert_int_equal(hr_receiver_commit(f.receiver, "s5", NULL, NULL), HR_ERR_SESSION);
    for (int i = 6; i < 70; i++) {
        hr_receipt *receipt = NULL;
        (void)snprintf(id, sizeof id, "s%d", i);
        assert_int_equal(hr_receiver_commit(f.receiver, id, &receipt, NULL), HR_OK);
        assert_string_equal(receipt->session_id, id);
        assert_int_equal(receipt->n_audit, i == 69); /* only the newest keeps its audit */
        hr_receipt_free(receipt);
    }
    hr_receiver_status status;
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.sessions_published, 70);
    fixture_close(&f);
}

/* ---- loads in one call ---- */

static void a_load_of_a_published_name_may_be_refused(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_registration x = {
        .name = "x", .config = config, .config_len = sizeof config - 1, .refuse_existing = true};
    hr_tensor tensor = fixture_tensor("q.lora_A.weight", "new");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .adapter = "x"};
    hr_end_options end = {.weight_version = "v1"};
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_OK);
    assert_string_equal(f.sink.version, "v1");
    uint64_t value = fake_sink_value(&f.sink, "x");
    fixture_says(&f, hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, &f.err),
                 HR_ERR_ADAPTER_EXISTS, "already loaded");
    assert_int_equal(fake_sink_value(&f.sink, "x"), value);
    x.defer_publish = true;
    x.name = "y";
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_ERR_INVALID);
    fixture_close(&f);
}

static void a_load_brings_its_own_adapter_only(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "y", config, false), HR_OK);
    hr_registration x = {.name = "x", .config = config, .config_len = sizeof config - 1};
    hr_tensor tensors[2] = {fixture_tensor("q.lora_A.weight", "new"),
                            fixture_tensor("y:q.lora_A.weight", "new")};
    hr_bucket bucket = {.tensors = tensors, .n = 2, .adapter = "x"};
    hr_end_options end = {0};
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL),
                     HR_ERR_ADAPTER_UNKNOWN);
    bucket.n = 0;
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_ERR_INVALID);
    assert_int_equal(f.sink.n_live, 0);
    assert_int_equal(f.sink.n_rooms, 1); /* y's */
    fixture_close(&f);
}

static void a_bucket_outside_a_session_is_one_of_its_own(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    (void)fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK); /* waits for another */
    hr_tensor tensors[3] = {fixture_tensor("layers.0.weight", "new"),
                            fixture_tensor("x:q.lora_A.weight", "new"),
                            fixture_tensor("x:q.lora_B.weight", "new")};
    hr_bucket bucket = {.tensors = tensors, .n = 3, .flush_cache = true, .session_id = "s"};
    hr_end_options end = {.audit = true};
    hr_receipt *receipt = NULL, *again = NULL;
    assert_int_equal(hr_receiver_apply(f.receiver, NULL, &bucket, &end, &receipt, NULL), HR_OK);
    assert_int_equal(f.sink.flushes, 1);
    assert_int_equal(receipt->base_tensors, 1);
    assert_int_equal(receipt->n_audit, 3);
    assert_int_equal(hr_receiver_apply(f.receiver, NULL, &bucket, &end, &again, NULL), HR_OK);
    assert_int_equal(again->adapters[0].id, receipt->adapters[0].id);
    assert_int_equal(f.sink.flushes, 1);
    assert_true(hr_receiver_is_pending(f.receiver, "x@1"));
    hr_receipt_free(receipt);
    hr_receipt_free(again);
    fixture_close(&f);
}

static void a_bucket_outside_a_session_may_have_a_manifest_of_base_tensors(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    (void)fixture_publish(&f, "x", "old");
    (void)fixture_publish(&f, "y", "old");
    hr_tensor tensors[5] = {
        fixture_tensor("layers.0.weight", "new"), fixture_tensor("x:q.lora_A.weight", "new"),
        fixture_tensor("y:q.lora_A.weight", "new"), fixture_tensor("x:q.lora_B.weight", "new"),
        fixture_tensor("y:q.lora_B.weight", "new")};
    listed lists[5];
    hr_manifest_entry entries[5];
    for (size_t i = 0; i < 5; i++) {
        list(&lists[i], tensors[i].name, "new");
        entries[i] = lists[i].entry;
    }
    hr_manifest manifest = {.entries = entries, .n = 5, .covers_base = true};
    hr_bucket bucket = {.tensors = tensors, .n = 5};
    hr_end_options end = {.manifest = &manifest};
    assert_int_equal(hr_receiver_apply(f.receiver, NULL, &bucket, &end, NULL, NULL), HR_OK);
    entries[0].sha256 = "0000000000000000000000000000000000000000000000000000000000000000";
    assert_int_equal(hr_receiver_apply(f.receiver, NULL, &bucket, &end, NULL, NULL), HR_ERR_DIGEST);
    for (int64_t nth = 0;; nth++) { /* and every allocation of it may fail */
        uint64_t x = fake_sink_id(&f.sink, "x");
        entries[0].sha256 = lists[0].sha256;
        f.memory.failed = false;
        f.memory.countdown = nth;
        hr_status status = hr_receiver_apply(f.receiver, NULL, &bucket, &end, NULL, &f.err);
        f.memory.countdown = -1;
        assert_int_equal(status, f.memory.failed ? HR_ERR_NO_MEMORY : HR_OK);
        assert_int_equal(fake_sink_id(&f.sink, "x") == x, f.memory.failed);
        if (status == HR_OK)
            break;
    }
    fixture_close(&f);
}

/* The call may name no session, and its caller may not have heard how the last one ended. */
static void after_a_rollback_the_next_calls_say_so(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "empty", true, NULL), HR_OK);
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "it is closed now");
    fixture_says(&f, fixture_send(&f, "layers.0.weight", "x"), HR_ERR_SESSION,
                 "'empty', was rolled back: no tensor came");
    assert_non_null(strstr(f.err.message, "push everything again"));
    hr_end_options end = {.session_id = "empty"};
    fixture_says(&f, hr_receiver_end(f.receiver, &end, NULL, &f.err), HR_ERR_SESSION,
                 "push everything again");
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "x"), HR_OK);
    hr_manifest_entry wrong = {.name = "layers.0.weight",
                               .xxh3 = "00000000000000000000000000000000"};
    hr_manifest manifest = {.entries = &wrong, .n = 1};
    fixture_says(&f, fixture_end_with(&f, &manifest), HR_ERR_DIGEST,
                 "push everything again in a new one");
    fixture_close(&f);
}

static void without_a_session_nothing_is_taken(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_end_options end = {0};
    fixture_says(&f, fixture_send(&f, "layers.0.weight", "x"), HR_ERR_SESSION, "begin one first");
    assert_int_equal(hr_receiver_prepare(f.receiver, &end, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_end(f.receiver, &end, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_commit(f.receiver, NULL, NULL, NULL), HR_ERR_SESSION);
    assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_ERR_SESSION);
    fixture_says(&f, hr_receiver_abort(f.receiver, "what", &f.err), HR_ERR_SESSION, "what");
    assert_string_equal(hr_session_state_name(HR_SESSION_ROLLED_BACK), "rolled_back");
    assert_string_equal(hr_session_state_name((hr_session_state)9), "unknown");
    fixture_close(&f);
}

static void every_base_weight_must_come_when_that_is_asked_for(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    hr_end_options end = {.complete_base = true};
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    fixture_says(&f, hr_receiver_end(f.receiver, &end, NULL, &f.err), HR_ERR_MODEL, "layers.1");
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    fixture_says(&f, hr_receiver_end(f.receiver, &end, NULL, &f.err), HR_ERR_SESSION,
                 "no base tensor came");
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_manifest_is_compared_in_every_way),
        cmocka_unit_test(an_adapter_of_the_manifest_that_did_not_come_is_named),
        cmocka_unit_test(base_tensors_are_compared_when_they_are_listed),
        cmocka_unit_test(sha256_of_base_tensors_is_there_when_the_session_began_with_audit),
        cmocka_unit_test(a_session_holds_no_more_than_it_may_and_asks_for_no_more),
        cmocka_unit_test(empty_and_overlong_things_are_refused),
        cmocka_unit_test(what_a_call_may_ask_for_is_bounded),
        cmocka_unit_test(a_receiver_without_memory_is_not_made),
        cmocka_unit_test(at_the_cap_a_new_name_is_refused_but_not_an_old_one),
        cmocka_unit_test(each_stream_is_counted_from_zero),
        cmocka_unit_test(a_type_is_part_of_a_buckets_contents),
        cmocka_unit_test(an_id_is_used_once),
        cmocka_unit_test(made_ids_differ),
        cmocka_unit_test(the_last_64_sessions_are_remembered),
        cmocka_unit_test(a_load_of_a_published_name_may_be_refused),
        cmocka_unit_test(a_load_brings_its_own_adapter_only),
        cmocka_unit_test(a_bucket_outside_a_session_is_one_of_its_own),
        cmocka_unit_test(a_bucket_outside_a_session_may_have_a_manifest_of_base_tensors),
        cmocka_unit_test(after_a_rollback_the_next_calls_say_so),
        cmocka_unit_test(without_a_session_nothing_is_taken),
        cmocka_unit_test(every_base_weight_must_come_when_that_is_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
