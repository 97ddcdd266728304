/* The receiver's promises, by the numbers of the invariants that a weight stream must keep. Those
 * that need every step and every fault are in the session simulation. */
#include "receiver_fixture.h"

#include "tensor/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char config[] = "{\"r\":8}";

/* ---- payloads ---- */

static void count_release(void *owner) {
    ++*(int *)owner;
}

static void i01_a_bucket_with_an_owner_is_released_once_when_it_is_built(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin_for(&f, "s", false, NULL), HR_OK);
    int released = 0;
    hr_tensor tensor = fixture_tensor("q.lora_A.weight", "owned");
    hr_bucket bucket = {
        .tensors = &tensor, .n = 1, .adapter = "x", .owner = &released, .release = count_release};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_OK);
    assert_int_equal(released, 0);
    hr_end_options end = {.session_id = "s"};
    assert_int_equal(hr_receiver_prepare(f.receiver, &end, NULL, &f.err), HR_OK);
    assert_int_equal(released, 1);
    assert_int_equal(hr_receiver_commit(f.receiver, "s", NULL, &f.err), HR_OK);
    /* refused ones go back at once */
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_SESSION);
    assert_int_equal(released, 2);
    fixture_close(&f);
    assert_int_equal(released, 2);
}

static void i01_base_tensors_of_an_owner_are_released_when_the_sink_has_them(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    int released = 0;
    hr_tensor tensor = fixture_tensor("layers.0.weight", "base");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .owner = &released, .release = count_release};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_OK);
    assert_int_equal(released, 1);
    fixture_close(&f);
    assert_int_equal(released, 1);
}

static void i04_after_the_reply_the_senders_memory_is_not_read_again(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t wanted = fixture_publish(&f, "x", "right");
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    char memory[] = "right";
    fixture_send_adapter(&f, "x", memory);
    memcpy(memory, "wrong", sizeof memory);
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_int_equal(fake_sink_value(&f.sink, "x"), wanted);
    fixture_close(&f);
}

/* ---- content ---- */

static void i06_a_part_of_an_adapter_is_not_applied(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_send(&f, "x:q.lora_A.weight", "new"), HR_OK);
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION,
                 "different tensor set than its previous sync (partial stream?)");
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    /* another set of as many is no better */
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_send(&f, "x:q.lora_A.weight", "new"), HR_OK);
    assert_int_equal(fixture_send(&f, "x:k.lora_B.weight", "new"), HR_OK);
    assert_int_equal(fixture_end(&f, NULL), HR_ERR_SESSION);
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    fixture_close(&f);
}

static void i06_the_set_of_tensors_is_forgotten_with_a_new_registration(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_register(&f, "x", "{\"r\":16}", false), HR_OK);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_send(&f, "x:k.lora_A.weight", "new"), HR_OK);
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_int_not_equal(fake_sink_value(&f.sink, "x"), old);
    fixture_close(&f);
}

static void i06_a_manifest_may_change_the_set_of_tensors(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    (void)fixture_publish(&f, "x", "old");
    hr_manifest_entry entry = {.name = "x:k.lora_A.weight"};
    hr_manifest manifest = {.entries = &entry, .n = 1};
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_send(&f, entry.name, "new"), HR_OK);
    assert_int_equal(fixture_end_with(&f, &manifest), HR_OK);
    fixture_close(&f);
}

static void i06_a_tensor_that_comes_twice_is_refused(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "x:q.lora_A.weight", "one"), HR_OK);
    fixture_says(&f, fixture_send(&f, "x:q.lora_A.weight", "two"), HR_ERR_INVALID, "twice");
    hr_tensor tensors[2] = {fixture_tensor("layers.1.weight", "one"),
                            fixture_tensor("layers.1.weight", "two")};
    hr_bucket bucket = {.tensors = tensors, .n = 2};
    fixture_says(&f, hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_INVALID, "twice");
    /* nothing of that bucket is there */
    assert_int_equal(fixture_send(&f, "layers.1.weight", "three"), HR_OK);
    fixture_close(&f);
}

static void i07_a_registered_name_serves_its_old_version_until_commit(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    uint64_t id = fake_sink_id(&f.sink, "x");
    assert_int_equal(fixture_register(&f, "x", "{\"r\":16}", false), HR_OK);
    assert_int_equal(fixture_begin_for(&f, "s", false, NULL), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    hr_end_options end = {.session_id = "s"};
    assert_int_equal(hr_receiver_prepare(f.receiver, &end, NULL, NULL), HR_OK);
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    hr_receipt *receipt = NULL;
    assert_int_equal(hr_receiver_commit(f.receiver, "s", &receipt, NULL), HR_OK);
    assert_int_not_equal(fake_sink_value(&f.sink, "x"), old);
    assert_int_not_equal(receipt->adapters[0].id, id);
    hr_receipt_free(receipt);
    fixture_close(&f);
}

static void i08_one_bad_adapter_leaves_all_of_them_and_the_base(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t x = fixture_publish(&f, "x", "old"), y = fixture_publish(&f, "y", "old");
    uint64_t base = f.sink.base[0];
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    assert_int_equal(fixture_send(&f, "y:q.lora_A.weight", "new"), HR_OK);
    assert_int_equal(fixture_end(&f, "v2"), HR_ERR_SESSION);
    assert_int_equal(fake_sink_value(&f.sink, "x"), x);
    assert_int_equal(fake_sink_value(&f.sink, "y"), y);
    assert_int_equal(f.sink.base[0], base);
    assert_string_equal(f.sink.version, "v0");
    fixture_close(&f);
}

static void i08_a_failed_build_leaves_the_others(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t x = fixture_publish(&f, "x", "old"), y = fixture_publish(&f, "y", "old");
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    fixture_send_adapter(&f, "y", "new");
    fake_sink_fail(&f.sink, 1, HR_ERR_SHAPE, false); /* the second build */
    assert_int_equal(fixture_end(&f, NULL), HR_ERR_SHAPE);
    assert_int_equal(fake_sink_value(&f.sink, "x"), x);
    assert_int_equal(fake_sink_value(&f.sink, "y"), y);
    fixture_close(&f);
}

static void i08_a_failed_load_restores_the_registration_before_it(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    hr_registration upsert = {.name = "x", .config = "{\"r\":16}", .config_len = 8};
    hr_tensor tensors[2] = {fixture_tensor("q.lora_A.weight", "new"),
                            fixture_tensor("q.lora_B.weight", "new")};
    hr_bucket bucket = {.tensors = tensors, .n = 2, .adapter = "x"};
    hr_end_options end = {0};
    fake_sink_fail(&f.sink, 1, HR_ERR_SHAPE, false); /* after register: build */
    assert_int_equal(hr_receiver_apply(f.receiver, &upsert, &bucket, &end, NULL, NULL),
                     HR_ERR_SHAPE);
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    /* under the old config the same bytes give the same adapter */
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    fixture_send_adapter(&f, "x", "old");
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    fixture_close(&f);
}

static void i10_without_sync_base_the_base_is_refused_and_untouched(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    uint64_t calls = f.sink.calls;
    fixture_says(&f, fixture_send(&f, "layers.0.weight", "new"), HR_ERR_INVALID,
                 "base tensors arrived in a sync_base=False weight-update session");
    assert_int_equal(f.sink.calls, calls);
    fixture_close(&f);
}

static void i10_a_session_with_sync_base_but_no_base_tensor_leaves_the_base_alone(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t base = f.sink.base[0];
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_int_equal(f.sink.base[0], base);
    fixture_close(&f);
}

static void i11_an_adapters_name_never_reaches_the_base(void **state) {
    (void)state;
    static const char *const names[] = {
        "model.layers.0.self_attn.q_proj.lora_A.weight", "model.q_proj.lora_B.default.weight",
        "model.embed_tokens.lora_embedding_A", "model.q_proj.lora_magnitude_vector.weight"};
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        fixture_says(&f, fixture_send(&f, names[i], "x"), HR_ERR_INVALID, "<lora_name>:");
    fixture_says(&f, fixture_send(&f, "model.q_proj.base_layer.weight", "x"), HR_ERR_INVALID,
                 "base_layer");
    assert_false(f.sink.base_begun);
    fixture_close(&f);
}

static void i11_a_name_is_split_at_its_first_colon(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "x:a:b.lora_A.weight", "x"), HR_OK);
    hr_end_options end = {.audit = true};
    hr_receipt *receipt = NULL;
    assert_int_equal(hr_receiver_end(f.receiver, &end, &receipt, NULL), HR_OK);
    assert_string_equal(receipt->audit[0].name, "x:a:b.lora_A.weight");
    assert_string_equal(receipt->adapters[0].name, "x");
    hr_receipt_free(receipt);
    fixture_close(&f);
}

static void i12_a_session_that_brought_nothing_is_a_failure(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_begin_for(&f, NULL, false, "x"), HR_OK);
    fixture_says(&f, fixture_end(&f, "v2"), HR_ERR_SESSION, "'x' but none of its tensors came");
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    fixture_says(&f, fixture_end(&f, "v2"), HR_ERR_SESSION, "no tensor came");
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_end(&f, "v2"), HR_ERR_SESSION);
    assert_string_equal(f.sink.version, "v0");
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    fixture_close(&f);
}

static void i12_the_base_instead_of_the_declared_adapter_is_a_failure(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin_for(&f, NULL, true, "x"), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "none of its tensors came");
    assert_int_equal(f.sink.base[0], 0);
    fixture_close(&f);
}

static void i12_the_receipt_says_when_an_adapter_did_not_change(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    (void)fixture_publish(&f, "x", "same");
    static const char *const bytes[] = {"same", "other"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(fixture_begin(&f, false), HR_OK);
        fixture_send_adapter(&f, "x", bytes[i]);
        hr_end_options end = {0};
        hr_receipt *receipt = NULL;
        assert_int_equal(hr_receiver_end(f.receiver, &end, &receipt, NULL), HR_OK);
        assert_int_equal(receipt->adapters[0].unchanged, i == 0);
        hr_receipt_free(receipt);
    }
    fixture_close(&f);
}

/* ---- order and life ---- */

static void i13_the_first_cause_is_told_afterwards(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_begin_for(&f, "s", false, NULL), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    fake_sink_fail(&f.sink, 0, HR_ERR_SHAPE, false);
    hr_end_options end = {.session_id = "s"};
    assert_int_equal(hr_receiver_prepare(f.receiver, &end, NULL, &f.err), HR_ERR_SHAPE);
    fixture_says(&f, hr_receiver_commit(f.receiver, "s", NULL, &f.err), HR_ERR_SESSION,
                 "rolled back: the engine failed as it was told");
    fixture_says(&f, hr_receiver_prepare(f.receiver, &end, NULL, &f.err), HR_ERR_SESSION,
                 "rolled back: the engine failed as it was told");
    assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_OK);
    fixture_close(&f);
}

static void i14_a_dead_trainer_holds_nothing_after_its_lease(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "dead", true, NULL), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    fixture_pass_ms(&f, FIXTURE_LEASE_MS - 1);
    fixture_says(&f, fixture_begin_for(&f, "next", true, NULL), HR_ERR_SESSION, "already open");
    assert_non_null(strstr(f.err.message, "rolled back in 0.0 s"));
    assert_non_null(strstr(f.err.message, "POST /abort_weight_update {\"session_id\": \"dead\"}"));
    hr_end_options other = {.session_id = "other"};
    fixture_says(&f, hr_receiver_end(f.receiver, &other, NULL, &f.err), HR_ERR_SESSION,
                 "/abort_weight_update");
    fixture_pass_ms(&f, 1);
    assert_int_equal(fixture_begin_for(&f, "next", true, NULL), HR_OK);
    hr_end_options end = {.session_id = "dead"};
    fixture_says(&f, hr_receiver_end(f.receiver, &end, NULL, &f.err), HR_ERR_SESSION, "lease");
    assert_false(f.sink.base_begun);
    fixture_close(&f);
}

static void i14_the_state_says_the_lease_of_its_session(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_receiver_status status;
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.lease_ms, 0);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    fixture_pass_ms(&f, 7);
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.idle_ms, 7);
    assert_int_equal(status.lease_ms, FIXTURE_LEASE_MS);
    assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_OK);
    hr_session_options options = {.sync_base = true, .lease_ms = 3 * FIXTURE_LEASE_MS};
    char id[HR_SESSION_ID_SIZE];
    assert_int_equal(hr_receiver_begin(f.receiver, &options, id, NULL), HR_OK);
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.lease_ms, 3 * FIXTURE_LEASE_MS);
    assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_OK);
    hr_receiver_status_get(f.receiver, &status);
    assert_int_equal(status.lease_ms, 0);
    fixture_close(&f);
}

static void
i14_refused_buckets_that_name_no_session_do_not_keep_a_dead_trainer_alive(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "dead", true, NULL), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    for (int i = 0; i < 3; i++) {
        fixture_pass_ms(&f, FIXTURE_LEASE_MS / 4);
        fixture_says(&f, fixture_send(&f, "layers.0.weight", "new"), HR_ERR_INVALID, "twice");
    }
    fixture_pass_ms(&f, FIXTURE_LEASE_MS / 4);
    assert_true(hr_receiver_expire(f.receiver));
    fixture_close(&f);
}

static void i14_a_trainer_whose_bucket_is_refused_keeps_its_session(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
    fixture_pass_ms(&f, FIXTURE_LEASE_MS / 2);
    hr_tensor again = fixture_tensor("layers.0.weight", "new");
    hr_bucket bucket = {.tensors = &again, .n = 1, .session_id = "s"};
    fixture_says(&f, hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_INVALID, "twice");
    fixture_pass_ms(&f, FIXTURE_LEASE_MS / 2);
    assert_false(hr_receiver_expire(f.receiver));
    fixture_close(&f);
}

static void i14_a_new_name_whose_session_never_opens_is_forgotten(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
    assert_true(hr_receiver_is_pending(f.receiver, "x@1"));
    fixture_pass_ms(&f, FIXTURE_LEASE_MS);
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
    assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_OK);
    assert_false(hr_receiver_is_pending(f.receiver, "x@1"));
    assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_ERR_SESSION);
    fixture_close(&f);
}

static void i15_registration_comes_before_bytes(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    fixture_says(&f, fixture_register(&f, "x", "{\"r\":999}", false), HR_ERR_ADAPTER_CONFIG,
                 "rank 999");
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    fixture_says(&f, fixture_send(&f, "x:q.lora_A.weight", "new"), HR_ERR_ADAPTER_UNKNOWN,
                 "register");
    fixture_close(&f);
}

static void i15_a_refused_config_leaves_the_registration_before_it(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint64_t old = fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_register(&f, "x", "{\"r\":999}", false), HR_ERR_ADAPTER_CONFIG);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    fixture_send_adapter(&f, "x", "old");
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_int_equal(fake_sink_value(&f.sink, "x"), old);
    fixture_close(&f);
}

static void config_of_published(fixture *f, const hr_registration *registration,
                                uint8_t digest[HR_XXH3_SIZE]) {
    hr_receipt *receipt = NULL;
    assert_int_equal(hr_receiver_register(f->receiver, registration, NULL, NULL), HR_OK);
    assert_int_equal(fixture_begin(f, false), HR_OK);
    assert_int_equal(fixture_send(f, "x:q.lora_A.weight", "same"), HR_OK);
    assert_int_equal(
        hr_receiver_end(f->receiver, &(hr_end_options){.session_id = NULL}, &receipt, NULL), HR_OK);
    assert_int_equal(receipt->n_adapters, 1);
    memcpy(digest, receipt->adapters[0].config_digest, HR_XXH3_SIZE);
    hr_receipt_free(receipt);
}

/* Under which config its bytes were built, by the digest of whoever registered it. */
static void i15_the_receipt_says_which_registration_it_was(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    uint8_t said[HR_XXH3_SIZE], own[HR_XXH3_SIZE], named[HR_XXH3_SIZE];
    hr_registration x = {.name = "x", .config = "{\"r\":16}", .config_len = 8};
    hr_xxh3(x.config, x.config_len, own);
    config_of_published(&f, &x, said);
    assert_memory_equal(said, own, sizeof said);
    x.config_digest = "000102030405060708090A0b0c0d0e0f";
    assert_true(hr_xxh3_parse(x.config_digest, named));
    config_of_published(&f, &x, said);
    assert_memory_equal(said, named, sizeof said);
    x.config_digest = "000102030405060708090a0b0c0d0e0";
    fixture_says(&f, hr_receiver_register(f.receiver, &x, NULL, &f.err), HR_ERR_INVALID,
                 "32 hex digits");
    fixture_close(&f);
}

static void i16_a_name_cannot_change_while_a_session_streams_it(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    (void)fixture_publish(&f, "x", "old");
    assert_int_equal(fixture_begin_for(&f, "s", false, NULL), HR_OK);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK); /* nothing came yet */
    assert_int_equal(fixture_send(&f, "x:q.lora_A.weight", "new"), HR_OK);
    fixture_says(&f, fixture_register(&f, "x", config, false), HR_ERR_BUSY, "'s' holds tensors");
    fixture_says(&f, hr_receiver_unregister(f.receiver, "x", &f.err), HR_ERR_BUSY, "'s'");
    assert_int_equal(hr_receiver_unregister(f.receiver, "unknown", &f.err), HR_OK);
    assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_OK);
    assert_int_equal(hr_receiver_unregister(f.receiver, "x", &f.err), HR_OK);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(fixture_send(&f, "x:q.lora_A.weight", "new"), HR_ERR_ADAPTER_UNKNOWN);
    fixture_close(&f);
}

static void i17_a_deferred_name_is_acknowledged_as_pending(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_registration fresh = {
        .name = "x@1", .config = config, .config_len = sizeof config - 1, .defer_publish = true};
    bool pending = false;
    assert_int_equal(hr_receiver_register(f.receiver, &fresh, &pending, NULL), HR_OK);
    assert_true(pending);
    fresh.name = "x";
    fresh.defer_publish = false;
    assert_int_equal(hr_receiver_register(f.receiver, &fresh, &pending, NULL), HR_OK);
    assert_false(pending);
    fixture_close(&f);
}

static void i18_the_version_changes_at_commit_only(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    hr_tensor tensor = fixture_tensor("layers.0.weight", "new");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .weight_version = "v7"};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, NULL), HR_OK);
    hr_end_options end = {.session_id = "s"};
    assert_int_equal(hr_receiver_prepare(f.receiver, &end, NULL, NULL), HR_OK);
    assert_string_equal(f.sink.version, "v0");
    assert_int_equal(hr_receiver_commit(f.receiver, "s", NULL, NULL), HR_OK);
    assert_string_equal(f.sink.version, "v7");
    assert_int_equal(f.sink.aborts, 0);
    assert_int_equal(f.sink.flushes, 0);
    /* the present one again is no event for requests */
    uint64_t publications = f.sink.publications;
    assert_int_equal(hr_receiver_set_version(f.receiver, "v7", true, NULL), HR_OK);
    assert_int_equal(f.sink.publications, publications);
    assert_int_equal(hr_receiver_set_version(f.receiver, "v8", true, NULL), HR_OK);
    assert_string_equal(f.sink.version, "v8");
    assert_int_equal(f.sink.aborts, 1);
    fixture_close(&f);
}

static void i18_an_aborted_session_leaves_the_version(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin_for(&f, "s", true, NULL), HR_OK);
    hr_tensor tensor = fixture_tensor("layers.0.weight", "new");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .weight_version = "v7", .flush_cache = true};
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, NULL), HR_OK);
    assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_OK);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    assert_int_equal(fixture_send(&f, "layers.0.weight", "newer"), HR_OK);
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_string_equal(f.sink.version, "v0");
    assert_int_equal(f.sink.flushes, 0);
    fixture_close(&f);
}

static void i20_a_new_name_is_pending_until_it_is_published_or_dropped(void **state) {
    (void)state;
    for (int publish = 0; publish < 2; publish++) {
        fixture f;
        fixture_open(&f);
        assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
        assert_int_equal(fixture_begin(&f, false), HR_OK);
        fixture_says(&f, fixture_register(&f, "x@1", config, true), HR_ERR_BUSY, "waits");
        fixture_says(&f, fixture_register(&f, "x@1", config, false), HR_ERR_BUSY, "waits");
        fixture_says(&f, hr_receiver_unregister(f.receiver, "x@1", &f.err), HR_ERR_BUSY, "waits");
        fixture_send_adapter(&f, "x@1", "new");
        assert_true(hr_receiver_is_pending(f.receiver, "x@1"));
        hr_manifest_entry entries[] = {{.name = "x@1:q.lora_A.weight"},
                                       {.name = "x@1:q.lora_B.weight"}};
        hr_manifest manifest = {.entries = entries, .n = 2};
        if (publish)
            assert_int_equal(fixture_end_with(&f, &manifest), HR_OK);
        else
            fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "[LORA-CHECK]");
        assert_false(hr_receiver_is_pending(f.receiver, "x@1"));
        assert_int_equal(fake_sink_value(&f.sink, "x@1") != 0, publish);
        assert_int_equal(fixture_register(&f, "x@1", config, true),
                         publish ? HR_ERR_ADAPTER_EXISTS : HR_OK);
        fixture_close(&f);
    }
}

/* Its trainer may be dead, and the next one pushes the same name, perhaps with another config. */
static void i20_a_pending_name_that_no_session_holds_may_be_registered_again(void **state) {
    (void)state;
    static const char other[] = "{\"r\":8}";
    for (int how = 0; how < 4; how++) {
        fixture f;
        fixture_open(&f);
        assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
        assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
        bool staged = how != 1;
        if (how == 2) /* by another trainer, whose session cannot bring it */
            assert_int_equal(fixture_begin_for(&f, "s", false, "x"), HR_OK);
        if (how == 3) /* or after an unload */
            assert_int_equal(hr_receiver_unregister(f.receiver, "x@1", &f.err), HR_OK);
        assert_int_equal(fixture_register(&f, "x@1", other, staged), HR_OK);
        assert_int_equal(hr_receiver_is_pending(f.receiver, "x@1"), staged);
        if (how == 2)
            assert_int_equal(hr_receiver_abort(f.receiver, "s", NULL), HR_OK);
        assert_int_equal(fixture_begin_for(&f, NULL, false, "x@1"), HR_OK);
        fixture_send_adapter(&f, "x@1", "new");
        hr_manifest_entry entries[] = {{.name = "x@1:q.lora_A.weight"},
                                       {.name = "x@1:q.lora_B.weight"}};
        hr_manifest manifest = {.entries = entries, .n = 2};
        assert_int_equal(fixture_end_with(&f, &manifest), HR_OK);
        assert_true(fake_sink_value(&f.sink, "x@1") != 0);
        fixture_close(&f);
    }
}

static void i20_a_name_that_was_registered_and_never_published_may_be_staged(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x@1", config, false), HR_OK);
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
    assert_true(hr_receiver_is_pending(f.receiver, "x@1"));
    fixture_close(&f);
}

static void a_name_that_gave_way_is_as_new_again(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_tensor tensors[2] = {fixture_tensor("q.lora_A.weight", "new"),
                            fixture_tensor("q.lora_B.weight", "new")};
    hr_bucket bucket = {.tensors = tensors, .n = 2, .adapter = "x"};
    hr_registration x = {
        .name = "x", .config = config, .config_len = sizeof config - 1, .refuse_existing = true};
    hr_end_options end = {0};
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_OK);
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL),
                     HR_ERR_ADAPTER_EXISTS);
    fake_sink_evict(&f.sink, "x");
    end.weight_version = "\n"; /* refused once it is registered: the room goes back */
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_ERR_INVALID);
    assert_int_equal(f.sink.n_rooms, 0);
    end.weight_version = NULL;
    assert_int_equal(hr_receiver_apply(f.receiver, &x, &bucket, &end, NULL, NULL), HR_OK);
    fake_sink_evict(&f.sink, "x");
    assert_int_equal(fixture_register(&f, "x", config, true), HR_OK); /* staged, as a new one */
    assert_int_equal(f.sink.n_rooms, 1);
    assert_int_equal(hr_receiver_unregister(f.receiver, "x", &f.err), HR_OK);
    assert_int_equal(f.sink.n_rooms, 0);
    fixture_close(&f);
}

static void registrations_go_with_the_names_that_gave_way(void **state) {
    (void)state;
    fixture f;
    hr_receiver_status status;
    fixture_open(&f);
    (void)fixture_publish(&f, "stays", "old");
    for (int i = 0; i < 2000; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "x@%d", i);
        (void)fixture_publish(&f, name, "new");
        fake_sink_evict(&f.sink, name);
        hr_receiver_status_get(f.receiver, &status);
        assert_true(status.registered <= 257);
    }
    assert_int_equal(fixture_register(&f, "stays", config, true), HR_ERR_ADAPTER_EXISTS);
    fixture_close(&f);
}

static void i20_a_pending_name_without_tensors_fails_its_session(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "'x@1' waits");
    /* but not one that declared others */
    assert_int_equal(fixture_register(&f, "x@1", config, true), HR_OK);
    assert_int_equal(fixture_begin_for(&f, NULL, false, "x"), HR_OK);
    fixture_send_adapter(&f, "x", "new");
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    assert_true(hr_receiver_is_pending(f.receiver, "x@1"));
    fixture_close(&f);
}

/* ---- resources ---- */

static void i24_a_tensor_whose_bytes_are_not_its_shapes_is_refused(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_begin(&f, true), HR_OK);
    hr_tensor good = fixture_tensor("layers.0.weight", "four");
    hr_tensor bad[5] = {good, good, good, good, good};
    bad[0].bytes = 3;
    bad[1].shape[0] = UINT64_MAX;
    bad[2].data = NULL;
    bad[3].ndim = HR_TENSOR_MAX_DIMS + 1;
    bad[4].dtype = HR_DTYPE_COUNT;
    for (size_t i = 0; i < 5; i++) {
        hr_bucket bucket = {.tensors = &bad[i], .n = 1};
        assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err),
                         i < 4 ? HR_ERR_INVALID : HR_ERR_DTYPE);
    }
    assert_false(f.sink.base_begun);
    fixture_close(&f);
}

static void i27_any_buckets_give_the_same_bytes_and_the_same_receipt(void **state) {
    (void)state;
    enum { N = 7 };
    static const char *const names[N] = {
        "layers.2.weight",   "x:q.lora_A.weight", "y:q.lora_B.weight", "layers.0.weight",
        "x:q.lora_B.weight", "y:q.lora_A.weight", "layers.1.weight"};
    static const char *const bytes[N] = {"1", "22", "333", "4444", "55555", "", "7777777"};
    uint8_t digest[16];
    uint64_t x = 0, y = 0, base = 0;
    for (size_t per_bucket = 1; per_bucket <= N; per_bucket++) {
        fixture f;
        fixture_open(&f);
        assert_int_equal(fixture_register(&f, "y", config, false), HR_OK);
        assert_int_equal(fixture_register(&f, "x", config, false), HR_OK);
        assert_int_equal(fixture_begin(&f, true), HR_OK);
        for (size_t i = 0; i < N; i += per_bucket) {
            hr_tensor tensors[N];
            size_t n = 0;
            for (; n < per_bucket && i + n < N; n++)
                tensors[n] = fixture_tensor(names[(i + n) * (per_bucket % 2 ? 3 : 1) % N],
                                            bytes[(i + n) * (per_bucket % 2 ? 3 : 1) % N]);
            hr_bucket bucket = {.tensors = tensors, .n = n};
            assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, NULL), HR_OK);
        }
        hr_end_options end = {.complete_base = true};
        hr_receipt *receipt = NULL;
        assert_int_equal(hr_receiver_end(f.receiver, &end, &receipt, NULL), HR_OK);
        assert_int_equal(receipt->tensors, N);
        assert_int_equal(receipt->bytes, 22);
        assert_int_equal(receipt->base_bytes, 12);
        assert_int_equal(receipt->ranks, 2);
        assert_string_equal(receipt->base_mode, "shadow");
        if (per_bucket == 1) {
            memcpy(digest, receipt->xxh3, sizeof digest);
            x = fake_sink_value(&f.sink, "x");
            y = fake_sink_value(&f.sink, "y");
            base = f.sink.base[1];
        }
        assert_memory_equal(receipt->xxh3, digest, sizeof digest);
        assert_int_equal(fake_sink_value(&f.sink, "x"), x);
        assert_int_equal(fake_sink_value(&f.sink, "y"), y);
        assert_int_equal(f.sink.base[1], base);
        hr_receipt_free(receipt);
        fixture_close(&f);
    }
}

static void i29_the_base_is_begun_once_and_sealed_or_abandoned_once(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f); /* the fake sink asserts the order of calls */
    for (int round = 0; round < 4; round++) {
        assert_int_equal(fixture_begin(&f, true), HR_OK);
        uint64_t calls = f.sink.calls;
        assert_int_equal(fixture_send(&f, "layers.0.weight", "new"), HR_OK);
        assert_int_equal(fixture_send(&f, "layers.1.weight", "new"), HR_OK);
        assert_int_equal(f.sink.calls, calls + 3); /* begin, write, write */
        if (round % 2 == 0)
            assert_int_equal(fixture_end(&f, NULL), HR_OK);
        else
            assert_int_equal(hr_receiver_abort(f.receiver, NULL, NULL), HR_OK);
        fake_sink_check_idle(&f.sink);
    }
    fixture_close(&f);
}

static void i30_the_same_stream_twice_gives_the_same_adapter(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f); /* the fake sink also builds twice from the same stash */
    uint64_t first = fixture_publish(&f, "x", "bytes");
    uint64_t id = fake_sink_id(&f.sink, "x");
    assert_int_equal(fixture_publish(&f, "x", "bytes"), first);
    assert_int_not_equal(fake_sink_id(&f.sink, "x"), id);
    fixture_close(&f);
}

static void i31_a_name_whose_load_failed_is_free_again(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    hr_registration fresh = {.name = "x", .config = config, .config_len = sizeof config - 1};
    hr_tensor tensor = fixture_tensor("q.lora_A.weight", "new");
    hr_bucket bucket = {.tensors = &tensor, .n = 1, .adapter = "x"};
    hr_end_options end = {0};
    fake_sink_fail(&f.sink, 1, HR_ERR_SHAPE, false);
    assert_int_equal(hr_receiver_apply(f.receiver, &fresh, &bucket, &end, NULL, NULL),
                     HR_ERR_SHAPE);
    assert_int_equal(f.sink.n_rooms, 0);
    assert_int_equal(fixture_register(&f, "x", config, true), HR_OK);
    fixture_close(&f);
}

/* A trainer that does not look at replies must not publish what is left of its push. */
static void
i09_a_refused_bucket_is_remembered_until_it_comes_or_a_manifest_shows_all(void **state) {
    (void)state;
    fixture f;
    fixture_open(&f);
    assert_int_equal(fixture_register(&f, "a", "{}", false), HR_OK);
    hr_tensor stranger = fixture_tensor("b:q.lora_A.weight", "1");
    hr_bucket bucket = {.tensors = &stranger, .n = 1};
    hr_error unread = {.status = HR_ERR_CORRUPT, .message = "base64: bad character"};

    /* without a stream nothing can come again */
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    assert_int_equal(hr_receiver_bucket(f.receiver, &bucket, &f.err), HR_ERR_ADAPTER_UNKNOWN);
    fixture_send_adapter(&f, "a", "1");
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "was refused and did not come again");

    /* one that could not even be read counts, and its cause is told */
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    hr_receiver_bucket_unread(f.receiver, &bucket, &unread);
    fixture_send_adapter(&f, "a", "1");
    fixture_says(&f, fixture_end(&f, NULL), HR_ERR_SESSION, "base64: bad character");

    /* a manifest shows that nothing is missing */
    assert_int_equal(fixture_begin(&f, false), HR_OK);
    hr_receiver_bucket_unread(f.receiver, &bucket, &unread);
    fixture_send_adapter(&f, "a", "1");
    const hr_manifest_entry entries[] = {{.name = "a:q.lora_A.weight"},
                                         {.name = "a:q.lora_B.weight"}};
    const hr_manifest manifest = {.entries = entries, .n = 2};
    assert_int_equal(fixture_end_with(&f, &manifest), HR_OK);

    /* the same bucket of its stream comes after all; that of another trainer is not this one's */
    char id[HR_SESSION_ID_SIZE];
    hr_session_options named = {.session_id = "mine"};
    hr_tensor a[] = {fixture_tensor("a:q.lora_A.weight", "2"),
                     fixture_tensor("a:q.lora_B.weight", "2")};
    hr_bucket first = {.tensors = a, .n = 1, .session_id = "mine", .stream = "s", .index = 0};
    hr_bucket second = {.tensors = a + 1, .n = 1, .session_id = "mine", .stream = "s", .index = 1};
    assert_int_equal(hr_receiver_begin(f.receiver, &named, id, NULL), HR_OK);
    assert_int_equal(hr_receiver_bucket(f.receiver, &first, NULL), HR_OK);
    hr_receiver_bucket_unread(f.receiver, &second, &unread);
    hr_receiver_bucket_unread(f.receiver, &bucket, &unread);
    assert_int_equal(hr_receiver_bucket(f.receiver, &second, NULL), HR_OK);
    assert_int_equal(fixture_end(&f, NULL), HR_OK);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(i01_a_bucket_with_an_owner_is_released_once_when_it_is_built),
        cmocka_unit_test(i01_base_tensors_of_an_owner_are_released_when_the_sink_has_them),
        cmocka_unit_test(i04_after_the_reply_the_senders_memory_is_not_read_again),
        cmocka_unit_test(i06_a_part_of_an_adapter_is_not_applied),
        cmocka_unit_test(i06_the_set_of_tensors_is_forgotten_with_a_new_registration),
        cmocka_unit_test(i06_a_manifest_may_change_the_set_of_tensors),
        cmocka_unit_test(i06_a_tensor_that_comes_twice_is_refused),
        cmocka_unit_test(i07_a_registered_name_serves_its_old_version_until_commit),
        cmocka_unit_test(i08_one_bad_adapter_leaves_all_of_them_and_the_base),
        cmocka_unit_test(i08_a_failed_build_leaves_the_others),
        cmocka_unit_test(i08_a_failed_load_restores_the_registration_before_it),
        cmocka_unit_test(i09_a_refused_bucket_is_remembered_until_it_comes_or_a_manifest_shows_all),
        cmocka_unit_test(i10_without_sync_base_the_base_is_refused_and_untouched),
        cmocka_unit_test(i10_a_session_with_sync_base_but_no_base_tensor_leaves_the_base_alone),
        cmocka_unit_test(i11_an_adapters_name_never_reaches_the_base),
        cmocka_unit_test(i11_a_name_is_split_at_its_first_colon),
        cmocka_unit_test(i12_a_session_that_brought_nothing_is_a_failure),
        cmocka_unit_test(i12_the_base_instead_of_the_declared_adapter_is_a_failure),
        cmocka_unit_test(i12_the_receipt_says_when_an_adapter_did_not_change),
        cmocka_unit_test(i13_the_first_cause_is_told_afterwards),
        cmocka_unit_test(i14_a_dead_trainer_holds_nothing_after_its_lease),
        cmocka_unit_test(i14_the_state_says_the_lease_of_its_session),
        cmocka_unit_test(i14_refused_buckets_that_name_no_session_do_not_keep_a_dead_trainer_alive),
        cmocka_unit_test(i14_a_trainer_whose_bucket_is_refused_keeps_its_session),
        cmocka_unit_test(i14_a_new_name_whose_session_never_opens_is_forgotten),
        cmocka_unit_test(i15_registration_comes_before_bytes),
        cmocka_unit_test(i15_a_refused_config_leaves_the_registration_before_it),
        cmocka_unit_test(i15_the_receipt_says_which_registration_it_was),
        cmocka_unit_test(i16_a_name_cannot_change_while_a_session_streams_it),
        cmocka_unit_test(i17_a_deferred_name_is_acknowledged_as_pending),
        cmocka_unit_test(i18_the_version_changes_at_commit_only),
        cmocka_unit_test(i18_an_aborted_session_leaves_the_version),
        cmocka_unit_test(i20_a_new_name_is_pending_until_it_is_published_or_dropped),
        cmocka_unit_test(i20_a_pending_name_that_no_session_holds_may_be_registered_again),
        cmocka_unit_test(i20_a_name_that_was_registered_and_never_published_may_be_staged),
        cmocka_unit_test(a_name_that_gave_way_is_as_new_again),
        cmocka_unit_test(registrations_go_with_the_names_that_gave_way),
        cmocka_unit_test(i20_a_pending_name_without_tensors_fails_its_session),
        cmocka_unit_test(i24_a_tensor_whose_bytes_are_not_its_shapes_is_refused),
        cmocka_unit_test(i27_any_buckets_give_the_same_bytes_and_the_same_receipt),
        cmocka_unit_test(i29_the_base_is_begun_once_and_sealed_or_abandoned_once),
        cmocka_unit_test(i30_the_same_stream_twice_gives_the_same_adapter),
        cmocka_unit_test(i31_a_name_whose_load_failed_is_free_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
