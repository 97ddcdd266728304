/* The engine over a real, tiny model: the public header's promises, end to end. */
#include "../model/tiny_model.h"
#include "asked.h"

#include "base/error.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_CROWD = 12 };

static char work_dir[64], model_dir[96], adapter_dir[96];

/* ---- engines ---- */

static hr_engine_options options(void) {
    return (hr_engine_options){.model_path = model_dir,
                               .threads = 1,
                               .enable_lora = true,
                               .max_total_tokens = 4096,
                               .max_running_requests = 16};
}

static hr_engine *open_engine(const hr_engine_options *o) {
    hr_engine *engine = NULL;
    hr_error err = {0};
    if (hr_engine_create(o, &engine, &err) != HR_OK)
        fail_msg("%s", err.message);
    return engine;
}

static void load(hr_engine *engine, const char *name) {
    hr_error err = {0};
    if (hr_engine_load_adapter(engine, name, adapter_dir, false, &err) != HR_OK)
        fail_msg("%s", err.message);
}

/* The crowd: prompts of many lengths, greedy and sampled, base and two adapters. */
static void ask_crowd(asked *crowd) {
    static const char *const names[] = {NULL, "x", "y"};
    for (uint32_t i = 0; i < N_CROWD; i++)
        ask(&crowd[i], i, 1 + i * 7 % 60, 60 + i, names[i % 3]);
}

static void run_crowd(hr_engine *engine, asked *crowd, bool together) {
    ask_crowd(crowd);
    if (together) /* all begin at once */
        assert_int_equal(hr_engine_pause(engine, HR_PAUSE_IN_PLACE, 60000, NULL), HR_OK);
    for (uint32_t i = 0; i < N_CROWD; i++) {
        submit(engine, &crowd[i]);
        if (!together)
            wait_for(&crowd[i]);
    }
    hr_engine_continue(engine);
    for (uint32_t i = 0; together && i < N_CROWD; i++)
        wait_for(&crowd[i]);
}

static void assert_same(const asked *a, const asked *b) {
    assert_int_equal(a->finish.type, HR_FINISH_LENGTH);
    assert_int_equal(a->finish.type, b->finish.type);
    assert_int_equal(a->n_tokens, a->params.sampling.max_new_tokens);
    assert_int_equal(a->n_prompt_seen, a->params.n_input_ids);
    assert_memory_equal(a->tokens, b->tokens, sizeof a->tokens);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_memory_equal(a->prompt_logprobs, b->prompt_logprobs, sizeof a->prompt_logprobs);
}

/* ---- the promises ---- */

static void batch_chunk_threads_and_retraction_change_no_bit(void **state) {
    (void)state;
    static asked alone[N_CROWD], crowd[N_CROWD];
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    load(engine, "y");
    run_crowd(engine, alone, false);
    run_crowd(engine, crowd, true);
    for (uint32_t i = 0; i < N_CROWD; i++)
        assert_same(&alone[i], &crowd[i]);
    hr_engine_destroy(engine);

    const uint32_t chunks[] = {1, 7, 33, HR_WHOLE_PROMPTS}, threads[] = {2, 1, 3, 2};
    for (int c = 0; c < 4; c++) {
        o.chunked_prefill_size = chunks[c];
        o.threads = threads[c];
        o.max_total_tokens = 192; /* six pages: requests must give way to each other */
        o.max_loras_per_batch = 2;
        engine = open_engine(&o);
        load(engine, "x");
        load(engine, "y");
        run_crowd(engine, crowd, true);
        for (uint32_t i = 0; i < N_CROWD; i++)
            assert_same(&alone[i], &crowd[i]);
        uint32_t retractions = 0;
        for (uint32_t i = 0; i < N_CROWD; i++)
            retractions += crowd[i].finish.retractions;
        assert_true(retractions > 0);
        hr_engine_stats stats;
        hr_engine_stats_get(engine, &stats);
        assert_int_equal(stats.kv_pages_free + stats.kv_pages_cached, stats.kv_pages);
        assert_int_equal(stats.leases, 0);
        assert_int_equal(stats.requests_finished, N_CROWD);
        hr_engine_destroy(engine);
    }
}

/* Prompts that begin alike, in twos and threes: a crowd in which prefixes are found. */
static void ask_family(asked *crowd, const char *const *names, uint32_t n_names) {
    static const int64_t starts[] = {-1, 0, 40, 70, 71};
    for (uint32_t i = 0; i < N_CROWD; i++) {
        ask(&crowd[i], i, 71 + i % 3, 30, names[i % n_names]);
        for (uint32_t p = 0; p < 71; p++)
            crowd[i].prompt[p] = (p * 13 + (p < 40 ? 0 : i / 6)) % TINY_VOCAB;
        crowd[i].params.logprob_start_len = starts[i % 5];
    }
}

static void assert_same_answer(const asked *a, const asked *b) {
    assert_int_equal(a->finish.type, HR_FINISH_LENGTH);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->n_prompt_seen, b->n_prompt_seen);
    assert_memory_equal(a->tokens, b->tokens, sizeof a->tokens);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_memory_equal(a->prompt_logprobs, b->prompt_logprobs, sizeof a->prompt_logprobs);
}

static uint32_t run_family(hr_engine *engine, asked *crowd, const char *const *names,
                           uint32_t n_names, bool together) {
    uint32_t cached = 0;
    ask_family(crowd, names, n_names);
    for (uint32_t i = 0; i < N_CROWD; i++) {
        submit(engine, &crowd[i]);
        if (!together)
            wait_for(&crowd[i]);
    }
    for (uint32_t i = 0; i < N_CROWD; i++) {
        if (together)
            wait_for(&crowd[i]);
        cached += crowd[i].finish.cached_tokens;
        int64_t start = crowd[i].params.logprob_start_len;
        if (start >= 0 && start < (int64_t)crowd[i].params.n_input_ids)
            assert_true(crowd[i].finish.cached_tokens <= (start > 0 ? start - 1 : 0));
    }
    return cached;
}

static void prefix_hits_change_no_bit(void **state) {
    (void)state;
    static asked cold[N_CROWD], hot[N_CROWD];
    static const char *const names[] = {NULL, "x", "y"};
    hr_engine_options o = options();
    o.disable_prefix_cache = true;
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    load(engine, "y");
    assert_int_equal(run_family(engine, cold, names, 3, false), 0);
    hr_engine_destroy(engine);

    const uint32_t chunks[] = {512, 7, 33};
    const uint64_t tokens[] = {4096, 256, 320};
    for (int c = 0; c < 3; c++) { /* also with so few pages that they are evicted and retracted */
        o = options();
        o.chunked_prefill_size = chunks[c];
        o.max_total_tokens = tokens[c];
        engine = open_engine(&o);
        load(engine, "x");
        load(engine, "y");
        for (int round = 0; round < 3; round++) {
            uint32_t cached = run_family(engine, hot, names, 3, round != 1);
            assert_true(cached > 0 || c > 0);
            for (uint32_t i = 0; i < N_CROWD; i++)
                assert_same_answer(&cold[i], &hot[i]);
        }
        assert_int_equal(hr_engine_flush_cache(engine, 1000, NULL), HR_OK);
        hr_engine_stats stats;
        hr_engine_stats_get(engine, &stats);
        assert_int_equal(stats.kv_pages_free, stats.kv_pages);
        assert_int_equal(stats.leases, 0);
        hr_engine_destroy(engine);
    }
}

static void an_adapter_loaded_again_finds_nothing_in_the_cache(void **state) {
    (void)state;
    static asked a;
    static const char *const names[] = {"x", "y", NULL};
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    for (int round = 0; round < 3; round++) {
        load(engine, "x");
        load(engine, "y");
        for (int i = 0; i < 6; i++) { /* each adapter's first use finds nothing, its second does */
            ask(&a, 0, 70, 4, names[i % 3]);
            a.params.logprob_start_len = -1;
            submit(engine, &a);
            wait_for(&a);
            bool first = i < 3 && (i < 2 || round == 0); /* the base stays */
            assert_int_equal(a.finish.cached_tokens, first ? 0 : 64);
        }
        assert_int_equal(hr_engine_unload_adapter(engine, "x", NULL), HR_OK);
        assert_int_equal(hr_engine_unload_adapter(engine, "y", NULL), HR_OK);
    }
    hr_engine_destroy(engine);
}

static void pausing_in_any_mode_changes_no_bit(void **state) {
    (void)state;
    static asked alone[N_CROWD], crowd[N_CROWD];
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    load(engine, "y");
    run_crowd(engine, alone, false);
    for (int round = 0; round < 6; round++) {
        ask_crowd(crowd);
        for (uint32_t i = 0; i < N_CROWD; i++)
            submit(engine, &crowd[i]);
        for (int p = 0; p < 3; p++) {
            hr_pause_mode mode = (p + round) % 2 == 0 ? HR_PAUSE_RETRACT : HR_PAUSE_IN_PLACE;
            assert_int_equal(hr_engine_pause(engine, mode, 60000, NULL), HR_OK);
            hr_engine_stats stats;
            hr_engine_stats_get(engine, &stats);
            assert_true(stats.paused);
            if (mode == HR_PAUSE_RETRACT) {
                assert_int_equal(stats.running, 0);
                assert_int_equal(hr_engine_flush_cache(engine, 0, NULL), HR_OK);
            }
            hr_engine_continue(engine);
            struct timespec moment = {0, 2000000};
            nanosleep(&moment, NULL);
        }
        for (uint32_t i = 0; i < N_CROWD; i++) {
            wait_for(&crowd[i]);
            assert_same(&alone[i], &crowd[i]);
        }
    }
    hr_engine_destroy(engine);
}

static void an_evicted_adapter_comes_back_when_it_is_wanted(void **state) {
    (void)state;
    static asked first, again;
    hr_engine_options o = options();
    o.max_loaded_loras = 1;
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    ask(&first, 0, 40, 20, "x");
    submit(engine, &first);
    wait_for(&first);
    load(engine, "y");
    assert_int_equal(hr_engine_adapter_state(engine, "x"), HR_ADAPTER_EVICTED);
    assert_int_equal(hr_engine_ensure_adapter(engine, "y", NULL), HR_OK);
    assert_int_equal(hr_engine_ensure_adapter(engine, "x", NULL), HR_OK);
    assert_int_equal(hr_engine_adapter_state(engine, "x"), HR_ADAPTER_LOADED);
    ask(&again, 0, 40, 20, "x");
    submit(engine, &again);
    wait_for(&again);
    assert_same(&first, &again);

    char hidden[128];
    snprintf(hidden, sizeof hidden, "%s.away", adapter_dir);
    HR_ASSERT(rename(adapter_dir, hidden) == 0);
    hr_error err;
    assert_int_not_equal(hr_engine_ensure_adapter(engine, "y", &err), HR_OK);
    assert_non_null(strstr(err.message, "Failed to implicitly load LoRA adapter y: "));
    assert_non_null(strstr(err.message, adapter_dir));
    assert_int_equal(hr_engine_adapter_state(engine, "x"), HR_ADAPTER_LOADED); /* undisturbed */
    HR_ASSERT(rename(hidden, adapter_dir) == 0);
    assert_int_equal(hr_engine_ensure_adapter(engine, "y", NULL), HR_OK); /* may be tried again */
    assert_int_equal(hr_engine_ensure_adapter(engine, "never", &err), HR_ERR_ADAPTER_UNKNOWN);
    hr_engine_destroy(engine);
}

static void a_generated_token_scores_the_same_bits(void **state) {
    (void)state;
    static asked made, scored;
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    for (uint32_t i = 0; i < 4; i++) { /* greedy and T = 1, base and adapter */
        ask(&made, i, 9, 40, i < 2 ? NULL : "x");
        submit(engine, &made);
        wait_for(&made);
        ask(&scored, 100, 9, 0, i < 2 ? NULL : "x");
        memcpy(scored.prompt, made.prompt, sizeof scored.prompt);
        memcpy(scored.prompt + 9, made.tokens, made.n_tokens * sizeof made.tokens[0]);
        scored.params.n_input_ids = 49;
        submit(engine, &scored);
        wait_for(&scored);
        assert_int_equal(scored.finish.type, HR_FINISH_LENGTH);
        assert_int_equal(scored.n_tokens, 0);
        assert_int_equal(scored.n_prompt_seen, 49);
        assert_memory_equal(scored.prompt_logprobs + 9, made.logprobs, 40 * sizeof(float));
    }
    hr_engine_destroy(engine);
}

static void unload_takes_the_name_but_not_the_running_request(void **state) {
    (void)state;
    static asked before, during, after;
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    load(engine, "x");
    ask(&before, 0, 9, 100, "x");
    submit(engine, &before);
    wait_for(&before);
    ask(&during, 0, 9, 100, "x");
    during.token_ns = 1000000;
    submit(engine, &during);
    wait_running(engine, 1);
    hr_error err;
    assert_int_equal(hr_engine_unload_adapter(engine, "x", &err), HR_OK);
    ask(&after, 1, 9, 10, "x");
    assert_int_equal(hr_engine_submit(engine, &after.params, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "not loaded"));
    assert_non_null(strstr(err.message, "never been loaded"));
    wait_for(&during);
    assert_memory_equal(before.tokens, during.tokens, sizeof before.tokens);
    assert_memory_equal(before.logprobs, during.logprobs, sizeof before.logprobs);
    ask(&after, 0, 9, 100, NULL);
    submit(engine, &after);
    wait_for(&after);
    assert_memory_not_equal(before.logprobs, after.logprobs, sizeof before.logprobs);
    hr_engine_destroy(engine);
}

static void a_long_request_can_be_aborted_and_drain_ends_the_rest(void **state) {
    (void)state;
    static asked a, b;
    hr_engine_options o = options();
    hr_engine *engine = open_engine(&o);
    ask(&a, 0, 5, 100, NULL);
    ask(&b, 1, 5, 100, NULL);
    a.token_ns = 20000000;
    submit(engine, &a);
    submit(engine, &b);
    assert_false(hr_engine_abort(engine, "r")); /* exact names only */
    assert_true(hr_engine_abort(engine, "r0"));
    wait_for(&a);
    hr_engine_drain(engine, 60000);
    assert_true(b.is_ended);
    assert_int_equal(b.finish.type, HR_FINISH_LENGTH);
    assert_int_equal(b.n_tokens, 100);
    assert_int_equal(a.finish.completion_tokens, a.n_tokens);
    hr_error err;
    assert_int_equal(hr_engine_submit(engine, &a.params, &err), HR_ERR_STOPPING);
    hr_engine_destroy(engine);
    wait_for(&b);
}

static void adapters_are_listed_and_refused_by_the_rules(void **state) {
    (void)state;
    hr_engine_options o = options();
    o.max_loaded_loras = 2;
    hr_engine *engine = open_engine(&o);
    hr_error err;
    assert_int_equal(hr_engine_load_adapter(engine, "bad:name", adapter_dir, false, &err),
                     HR_ERR_INVALID);
    assert_int_not_equal(hr_engine_load_adapter(engine, "x", "/no/such/adapter", false, &err),
                         HR_OK);
    assert_non_null(strstr(err.message, "LoRA adapter 'x'"));
    load(engine, "x"); /* a failed load left the name free */
    assert_int_equal(hr_engine_load_adapter(engine, "x", adapter_dir, false, &err),
                     HR_ERR_ADAPTER_EXISTS);
    load(engine, "y");
    load(engine, "z"); /* x gives way */
    hr_adapter_info *list = NULL;
    size_t n = 0;
    assert_int_equal(hr_engine_list_adapters(engine, &list, &n, &err), HR_OK);
    assert_int_equal(n, 2);
    assert_string_equal(list[0].name, "y");
    assert_string_equal(list[1].name, "z");
    assert_string_equal(list[1].path, adapter_dir);
    assert_int_equal(list[1].rank, 5);
    assert_true(list[1].id > list[0].id && list[1].bytes > 0);
    free(list);
    hr_engine_destroy(engine);

    o.max_lora_rank = 4;
    engine = open_engine(&o);
    assert_int_equal(hr_engine_load_adapter(engine, "x", adapter_dir, false, &err),
                     HR_ERR_ADAPTER_INCOMPATIBLE);
    assert_non_null(strstr(err.message, "incompatible"));
    assert_non_null(strstr(err.message, "--max-lora-rank"));
    hr_engine_destroy(engine);

    o.enable_lora = false;
    engine = open_engine(&o);
    assert_int_equal(hr_engine_load_adapter(engine, "x", adapter_dir, false, &err),
                     HR_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "LoRA is not enabled"));
    hr_engine_destroy(engine);
}

static void options_out_of_range_leave_nothing_behind(void **state) {
    (void)state;
    hr_engine *engine = NULL;
    hr_error err;
    hr_engine_options o = options();
    o.mem_fraction_static = 1.5;
    assert_int_equal(hr_engine_create(&o, &engine, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "--mem-fraction-static"));
    o = options();
    o.model_path = "/no/such/model";
    assert_int_not_equal(hr_engine_create(&o, &engine, &err), HR_OK);
    o = options();
    o.mem_fraction_static = 1e-12; /* not even the weights */
    assert_int_equal(hr_engine_create(&o, &engine, &err), HR_ERR_NO_MEMORY);
    assert_non_null(strstr(err.message, "KV cache"));
    assert_null(engine);
}

static void generation_ends_at_the_context_length(void **state) {
    (void)state;
    static asked a;
    hr_engine_options o = options();
    o.context_length = 40;
    hr_engine *engine = open_engine(&o);
    ask(&a, 0, 35, 100, NULL);
    submit(engine, &a);
    wait_for(&a);
    assert_int_equal(a.finish.type, HR_FINISH_LENGTH);
    assert_int_equal(a.n_tokens, 5);
    hr_engine_destroy(engine);
}

int main(void) {
    snprintf(work_dir, sizeof work_dir, "/tmp/headrace-engine-XXXXXX");
    HR_ASSERT(mkdtemp(work_dir) != NULL);
    tiny_model_write(work_dir);
    snprintf(model_dir, sizeof model_dir, "%s/model", work_dir);
    snprintf(adapter_dir, sizeof adapter_dir, "%s/adapter", work_dir);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batch_chunk_threads_and_retraction_change_no_bit),
        cmocka_unit_test(prefix_hits_change_no_bit),
        cmocka_unit_test(an_adapter_loaded_again_finds_nothing_in_the_cache),
        cmocka_unit_test(pausing_in_any_mode_changes_no_bit),
        cmocka_unit_test(an_evicted_adapter_comes_back_when_it_is_wanted),
        cmocka_unit_test(a_generated_token_scores_the_same_bits),
        cmocka_unit_test(unload_takes_the_name_but_not_the_running_request),
        cmocka_unit_test(a_long_request_can_be_aborted_and_drain_ends_the_rest),
        cmocka_unit_test(adapters_are_listed_and_refused_by_the_rules),
        cmocka_unit_test(options_out_of_range_leave_nothing_behind),
        cmocka_unit_test(generation_ends_at_the_context_length),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tiny_model_remove(work_dir);
    return failed;
}
