/* What a request may ask: every refusal names its field, every bound is checked before memory is
 * taken. */
#include "engine/request.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static const uint32_t eos[] = {2};
static const hr_request_limits limits = {.vocab_size = 100,
                                         .context_length = 64,
                                         .kv_tokens = 96,
                                         .chunked_prefill_size = 16,
                                         .eos_ids = eos,
                                         .n_eos_ids = 1,
                                         .enable_lora = false};

static const uint32_t prompt[200] = {1, 5, 99};

static hr_token_verdict on_token(void *ctx, const hr_position_logprobs *token) {
    (void)ctx;
    (void)token;
    return HR_TOKEN_CONTINUE;
}

static void on_finish(void *ctx, const hr_finish *finish) {
    (void)ctx;
    (void)finish;
}

static void on_prompt(void *ctx, uint32_t first, uint32_t n,
                      const hr_position_logprobs *positions) {
    (void)ctx;
    (void)first;
    (void)n;
    (void)positions;
}

static hr_request_params good(void) {
    return (hr_request_params){.rid = "r",
                               .input_ids = prompt,
                               .n_input_ids = 3,
                               .sampling = hr_sampling_params_default(),
                               .logprob_start_len = -1,
                               .on_prompt_logprobs = on_prompt,
                               .on_token = on_token,
                               .on_finish = on_finish};
}

static void assert_refused(const hr_request_params *p, const char *field) {
    hr_error err = {0};
    assert_int_equal(hr_request_check(p, &limits, &err), HR_ERR_INVALID);
    if (strstr(err.message, field) == NULL)
        fail_msg("'%s' does not name %s", err.message, field);
}

static void the_defaults_are_accepted(void **state) {
    (void)state;
    hr_request_params p = good();
    assert_int_equal(hr_request_check(&p, &limits, NULL), HR_OK);
    p.rid = "";
    assert_refused(&p, "rid");
}

static void sampling_values_out_of_range_are_refused(void **state) {
    (void)state;
#define REFUSE(field, value)                                                                       \
    do {                                                                                           \
        hr_request_params p = good();                                                              \
        p.sampling.field = (value);                                                                \
        assert_refused(&p, #field);                                                                \
    } while (0)
    REFUSE(temperature, -0.1f);
    REFUSE(temperature, NAN);
    REFUSE(temperature, INFINITY);
    REFUSE(top_p, 0);
    REFUSE(top_p, 1.01f);
    REFUSE(top_p, NAN);
    REFUSE(top_k, 0);
    REFUSE(top_k, -2);
    REFUSE(min_p, -0.01f);
    REFUSE(min_p, 1.01f);
    REFUSE(frequency_penalty, 2.01f);
    REFUSE(presence_penalty, -2.01f);
    REFUSE(repetition_penalty, 0);
    REFUSE(repetition_penalty, 2.01f);
    REFUSE(min_new_tokens, 129);
#undef REFUSE
}

static void ids_outside_the_vocabulary_are_refused(void **state) {
    (void)state;
    const uint32_t bad[] = {5, 100};
    const float bias[] = {1, NAN};
    hr_request_params p = good();
    p.input_ids = bad;
    p.n_input_ids = 2;
    assert_refused(&p, "input_ids[1] is 100");
    p = good();
    p.sampling.stop_token_ids = bad;
    p.sampling.n_stop_token_ids = 2;
    assert_refused(&p, "stop_token_ids");
    p = good();
    p.sampling.logit_bias_ids = bad;
    p.sampling.logit_bias = bias;
    p.sampling.n_logit_bias = 2;
    assert_refused(&p, "logit_bias");
    const uint32_t fine[] = {5, 6};
    p.sampling.logit_bias_ids = fine;
    assert_refused(&p, "logit_bias");
    p = good();
    p.token_ids_logprob = bad;
    p.n_token_ids_logprob = 2;
    assert_refused(&p, "token_ids_logprob");
    p.n_token_ids_logprob = 101;
    assert_refused(&p, "token_ids_logprob");
}

static void lengths_out_of_bounds_are_refused(void **state) {
    (void)state;
    hr_request_params p = good();
    p.n_input_ids = 0;
    assert_refused(&p, "input_ids cannot be empty");
    p.n_input_ids = 64; /* no room for a token */
    assert_refused(&p, "context length");
    p.sampling.max_new_tokens = 0;
    assert_int_equal(hr_request_check(&p, &limits, NULL), HR_OK);
    p.n_input_ids = 65;
    assert_refused(&p, "context length");
    p = good();
    p.logprob_start_len = 4;
    assert_refused(&p, "logprob_start_len");
    p.logprob_start_len = -2;
    assert_refused(&p, "logprob_start_len");
    p = good();
    p.top_logprobs_num = 101;
    assert_refused(&p, "top_logprobs_num");
    hr_request_limits small = limits;
    small.kv_tokens = 32;
    p = good();
    p.n_input_ids = 32;
    hr_error err;
    assert_int_equal(hr_request_check(&p, &small, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "KV cache"));
}

static void an_adapter_without_lora_enabled_is_refused(void **state) {
    (void)state;
    hr_request_params p = good();
    p.lora_name = "x";
    assert_refused(&p, "LoRA adapter 'x' was requested, but LoRA is not enabled");
    p.lora_name = "";
    assert_int_equal(hr_request_check(&p, &limits, NULL), HR_OK);
}

static void everything_given_is_copied(void **state) {
    (void)state;
    hr_alloc alloc = hr_alloc_system();
    char rid[] = "mine";
    uint32_t ids[] = {1, 2, 3}, stop[] = {7}, bias_ids[] = {4}, wish[] = {9};
    float bias[] = {2};
    hr_request_params p = good();
    p.rid = rid;
    p.input_ids = ids;
    p.sampling.stop_token_ids = stop;
    p.sampling.n_stop_token_ids = 1;
    p.sampling.logit_bias_ids = bias_ids;
    p.sampling.logit_bias = bias;
    p.sampling.n_logit_bias = 1;
    p.return_logprob = true;
    p.token_ids_logprob = wish;
    p.n_token_ids_logprob = 1;
    hr_request *r = NULL;
    assert_int_equal(hr_request_create(&p, &limits, 11, &alloc, &r, NULL), HR_OK);
    rid[0] = 'x';
    ids[0] = stop[0] = bias_ids[0] = wish[0] = 50;
    bias[0] = 50;
    assert_string_equal(r->rid, "mine");
    assert_int_equal(r->ids[0], 1);
    assert_int_equal(r->stop_ids[0], 2); /* eos first */
    assert_int_equal(r->stop_ids[1], 7);
    assert_int_equal(r->sampler.bias_ids[0], 4);
    assert_true(r->sampler.bias[0] == 2);
    assert_int_equal(r->wish.ids[0], 9);
    assert_int_equal(r->sampler.seed, 11);
    hr_request_destroy(r, &alloc);
}

/* Prompt logprobs of any size are held for a bounded number of rows at a time. */
static void results_of_a_long_prompt_take_bounded_memory(void **state) {
    (void)state;
    hr_alloc alloc = hr_alloc_system();
    hr_request_limits large = limits;
    large.vocab_size = 150000;
    large.context_length = large.kv_tokens = 20000;
    large.chunked_prefill_size = 8192;
    uint32_t *ids = calloc(10000, sizeof *ids);
    assert_non_null(ids);
    const uint32_t tops[] = {0, 5, 1000, 150000};
    const uint32_t rows[] = {8192, 8192, 65, 1};
    for (int i = 0; i < 4; i++) {
        hr_request_params p = good();
        p.input_ids = ids;
        p.n_input_ids = 10000;
        p.return_logprob = true;
        p.logprob_start_len = 0;
        p.top_logprobs_num = tops[i];
        hr_request *r = NULL;
        assert_int_equal(hr_request_create(&p, &large, 0, &alloc, &r, NULL), HR_OK);
        assert_true(hr_request_prepare(r, &large, &alloc));
        assert_int_equal(r->result_rows, rows[i]);
        hr_request_destroy(r, &alloc);
    }
    free(ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_defaults_are_accepted),
        cmocka_unit_test(sampling_values_out_of_range_are_refused),
        cmocka_unit_test(ids_outside_the_vocabulary_are_refused),
        cmocka_unit_test(lengths_out_of_bounds_are_refused),
        cmocka_unit_test(an_adapter_without_lora_enabled_is_refused),
        cmocka_unit_test(everything_given_is_copied),
        cmocka_unit_test(results_of_a_long_prompt_take_bounded_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
