/* The body of /generate: what is taken, what it becomes, and what is refused by name. */
#include "server/generate_request.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static hr_generate_request parse(const char *body) {
    hr_generate_request r;
    hr_error err;
    if (hr_generate_request_parse(body, strlen(body), &r, &err) != HR_OK)
        fail_msg("%s\nwas refused: %s", body, err.message);
    return r;
}

static void assert_refused(const char *body, const char *in_message) {
    hr_generate_request r;
    hr_error err;
    if (hr_generate_request_parse(body, strlen(body), &r, &err) == HR_OK)
        fail_msg("%s\nwas taken; wanted a refusal with \"%s\"", body, in_message);
    if (strstr(err.message, in_message) == NULL)
        fail_msg("%s\nwas refused with \"%s\", which lacks \"%s\"", body, err.message, in_message);
}

static void each_refusal_names_the_field(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"", "not valid JSON"},
        {"[1]", "wanted a JSON object"},
        {"{\"text\":\"a\",}", "not valid JSON"},
        {"{}", "text and input_ids"},
        {"{\"text\":null,\"input_ids\":null}", "text and input_ids"},
        {"{\"text\":\"a\",\"input_ids\":[1]}", "both came"},
        {"{\"text\":\"a\",\"text\":\"b\"}", "\"text\" stands twice"},
        {"{\"text\":7}", "text"},
        {"{\"text\":[]}", "text cannot be empty"},
        {"{\"text\":[\"a\",3]}", "text[1]"},
        {"{\"text\":[\"a\",null]}", "text[1]"},
        {"{\"input_ids\":[]}", "input_ids cannot be empty"},
        {"{\"input_ids\":[[1],[]]}", "input_ids[1] cannot be empty"},
        {"{\"input_ids\":[1,-1]}", "input_ids[1]"},
        {"{\"input_ids\":[1,\"2\"]}", "input_ids[1]"},
        {"{\"input_ids\":[1,4294967296]}", "input_ids[1]"},
        {"{\"input_ids\":[1,1.5]}", "input_ids[1]"},
        {"{\"input_ids\":[1,[2]]}", "input_ids[1]"},
        {"{\"input_ids\":[[1],2]}", "input_ids[1]"},
        {"{\"input_ids\":\"a\"}", "input_ids"},
        {"{\"input_embeds\":[[0.5]],\"text\":\"a\"}", "input_embeds is not supported"},
        {"{\"session_params\":{\"id\":1},\"text\":\"a\"}", "session_params is not supported"},
        {"{\"custom_logit_processor\":\"x\",\"text\":\"a\"}",
         "custom_logit_processor is not supported"},
        {"{\"image_data\":[\"x\"],\"text\":\"a\"}", "image_data is not supported"},
        {"{\"return_hidden_states\":true,\"text\":\"a\"}", "return_hidden_states is not supported"},
        {"{\"routed_dp_rank\":1,\"text\":\"a\"}", "routed_dp_rank is not supported"},
        {"{\"text\":\"a\",\"stream\":1}", "stream"},
        {"{\"text\":\"a\",\"rid\":\"\"}", "rid"},
        {"{\"text\":\"a\",\"rid\":5}", "rid"},
        {"{\"text\":[\"a\",\"b\"],\"rid\":[\"x\"]}", "rid"},
        {"{\"text\":[\"a\",\"b\"],\"rid\":[\"x\",\"x\"]}", "duplicate \"x\""},
        {"{\"text\":\"a\",\"return_logprob\":\"yes\"}", "return_logprob"},
        {"{\"text\":[\"a\",\"b\"],\"return_logprob\":[true]}", "return_logprob"},
        {"{\"text\":\"a\",\"logprob_start_len\":-2}", "logprob_start_len"},
        {"{\"text\":\"a\",\"top_logprobs_num\":-1}", "top_logprobs_num"},
        {"{\"text\":\"a\",\"token_ids_logprob\":5}", "token_ids_logprob"},
        {"{\"text\":\"a\",\"token_ids_logprob\":[-5]}", "token_ids_logprob[0]"},
        {"{\"text\":\"a\",\"lora_path\":5}", "lora_path"},
        {"{\"text\":[\"a\",\"b\"],\"lora_path\":[\"x\",4]}", "lora_path[1]"},
        {"{\"text\":[\"a\",\"b\"],\"lora_path\":[\"x\"]}", "lora_path"},
        {"{\"text\":\"a\",\"sampling_params\":3}", "sampling_params"},
        {"{\"text\":[\"a\",\"b\"],\"sampling_params\":[{}]}", "sampling_params"},
        {"{\"text\":[\"a\",\"b\"],\"sampling_params\":[{},{\"top_p\":2}]}",
         "sampling_params[1].top_p"},
        {"{\"text\":[\"a\",\"b\"],\"sampling_params\":[{\"n\":1},{\"n\":2}]}", "agree on n"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_refused(table[i][0], table[i][1]);
}

static void each_refused_sampling_parameter_is_named(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"\"surprise\":1", "unknown key \"surprise\""},
        {"\"max_tokens\":1", "unknown key \"max_tokens\"; here it is max_new_tokens"},
        {"\"logprobs\":1", "here it is return_logprob, beside sampling_params"},
        {"\"temperature\":-0.1", "temperature"},
        {"\"temperature\":\"hot\"", "temperature"},
        {"\"temperature\":1e39", "temperature"},
        {"\"top_p\":0", "top_p"},
        {"\"top_p\":1e-60", "top_p"},
        {"\"top_p\":1.01", "top_p"},
        {"\"min_p\":1.5", "min_p"},
        {"\"min_p\":-0.5", "min_p"},
        {"\"top_k\":0", "top_k"},
        {"\"top_k\":-2", "top_k"},
        {"\"top_k\":2.5", "top_k"},
        {"\"frequency_penalty\":2.1", "frequency_penalty"},
        {"\"presence_penalty\":-2.1", "presence_penalty"},
        {"\"repetition_penalty\":0", "repetition_penalty"},
        {"\"repetition_penalty\":2.1", "repetition_penalty"},
        {"\"max_new_tokens\":-1", "max_new_tokens"},
        {"\"max_new_tokens\":\"ten\"", "max_new_tokens"},
        {"\"max_new_tokens\":4294967296", "max_new_tokens"},
        {"\"min_new_tokens\":129", "min_new_tokens"},
        {"\"n\":0", "sampling_params.n"},
        {"\"n\":1000000", "sampling_params.n"},
        {"\"stop\":[\"\"]", "stop[0]"},
        {"\"stop\":[\"a\",2]", "stop[1]"},
        {"\"stop\":4", "stop"},
        {"\"stop_token_ids\":[1,\"x\"]", "stop_token_ids[1]"},
        {"\"ignore_eos\":\"no\"", "ignore_eos"},
        {"\"logit_bias\":[1]", "logit_bias"},
        {"\"logit_bias\":{\"x\":1}", "logit_bias"},
        {"\"logit_bias\":{\"-1\":1}", "logit_bias"},
        {"\"logit_bias\":{\"3\":\"1\"}", "logit_bias[\"3\"]"},
        {"\"sampling_seed\":18446744073709551616", "sampling_seed"},
        {"\"sampling_seed\":-9223372036854775809", "sampling_seed"},
        {"\"sampling_seed\":1.5", "sampling_seed"},
        {"\"json_schema\":\"{}\"", "json_schema"},
        {"\"regex\":\"a\"", "regex"},
        {"\"ebnf\":\"a\"", "ebnf"},
        {"\"structural_tag\":\"a\"", "structural_tag"},
        {"\"stop_regex\":4", "stop_regex"},
        {"\"stop_regex\":[\"a\",\"\"]", "stop_regex[1]"},
        {"\"stream_interval\":0", "stream_interval"},
        {"\"custom_params\":{}", "custom_params"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"text\":\"a\",\"sampling_params\":{%s}}", table[i][0]);
        assert_refused(body, table[i][1]);
    }
}

static void defaults_are_sglangs(void **state) {
    (void)state;
    hr_generate_request r = parse(
        "{\"text\":\"hello\",\"sampling_params\":{\"top_p\":null,\"stop\":null,\"regex\":null}}");
    assert_false(r.is_list);
    assert_false(r.stream);
    assert_int_equal(r.n_items, 1);
    const hr_generate_item *item = &r.items[0];
    assert_string_equal(item->text, "hello");
    assert_int_equal(strlen(item->rid), 32);
    assert_null(item->lora_name);
    assert_false(item->return_logprob);
    assert_int_equal(item->logprob_start_len, -1);
    assert_int_equal(item->sampling.max_new_tokens, 128);
    assert_true(item->sampling.temperature == 1.0f && item->sampling.top_p == 1.0f);
    assert_int_equal(item->sampling.top_k, -1);
    assert_false(item->sampling.has_seed);
    assert_true(item->skip_special_tokens && item->spaces_between_special_tokens);
    assert_false(item->no_stop_trim);
    hr_generate_request_free(&r);
}

static void a_seed_is_any_integer_of_64_bits(void **state) {
    (void)state;
    static const struct {
        const char *body;
        uint64_t seed;
    } table[] = {
        {"{\"input_ids\":[5],\"sampling_params\":{\"sampling_seed\":9007199254740993}}",
         9007199254740993u},
        {"{\"input_ids\":[5],\"sampling_params\":{\"sampling_seed\":18446744073709551615}}",
         UINT64_MAX},
        {"{\"input_ids\":[5],\"sampling_params\":{\"sampling_seed\":-1}}", UINT64_MAX},
        {"{\"input_ids\":[5],\"sampling_params\":{\"sampling_seed\":-9223372036854775808}}",
         (uint64_t)1 << 63},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        hr_generate_request r = parse(table[i].body);
        assert_true(r.items[0].sampling.has_seed);
        assert_true(r.items[0].sampling.seed == table[i].seed);
        hr_generate_request_free(&r);
    }
}

static void every_parameter_reaches_the_item(void **state) {
    (void)state;
    hr_generate_request r = parse(
        "{\"input_ids\":[5,6,7],\"lora_path\":\"ad\",\"rid\":\"me\",\"stream\":true,\"return_"
        "logprob\":true,"
        "\"logprob_start_len\":\"1\",\"top_logprobs_num\":3,\"token_ids_logprob\":[9,8],"
        "\"return_text_in_logprobs\":true,\"sampling_params\":{\"max_new_tokens\":\"16\",\"min_new_"
        "tokens\":2,"
        "\"temperature\":0.5,\"top_p\":0.9,\"top_k\":4,\"min_p\":0.1,\"frequency_penalty\":0.25,"
        "\"presence_penalty\":-0.25,\"repetition_penalty\":1.5,\"stop\":[\"x\",\"yy\"],\"stop_"
        "token_ids\":[3],"
        "\"ignore_eos\":true,\"skip_special_tokens\":false,\"no_stop_trim\":true,\"logit_bias\":{"
        "\"12\":-2.5},"
        "\"sampling_seed\":\"18446744073709551615\"}}");
    const hr_generate_item *item = &r.items[0];
    const hr_sampling_params *s = &item->sampling;
    assert_true(r.stream && r.return_text_in_logprobs && !r.is_list);
    assert_int_equal(item->n_input_ids, 3);
    assert_int_equal(item->input_ids[2], 7);
    assert_string_equal(item->lora_name, "ad");
    assert_string_equal(item->rid, "me");
    assert_true(item->return_logprob);
    assert_int_equal(item->logprob_start_len, 1);
    assert_int_equal(item->top_logprobs_num, 3);
    assert_int_equal(item->n_token_ids_logprob, 2);
    assert_int_equal(item->token_ids_logprob[1], 8);
    assert_int_equal(s->max_new_tokens, 16);
    assert_int_equal(s->min_new_tokens, 2);
    assert_true(s->temperature == 0.5f && s->top_p == 0.9f && s->min_p == 0.1f);
    assert_true(s->frequency_penalty == 0.25f && s->presence_penalty == -0.25f &&
                s->repetition_penalty == 1.5f);
    assert_int_equal(s->top_k, 4);
    assert_int_equal(item->n_stops, 2);
    assert_string_equal(item->stops[1], "yy");
    assert_int_equal(s->n_stop_token_ids, 1);
    assert_int_equal(s->stop_token_ids[0], 3);
    assert_true(s->ignore_eos && !item->skip_special_tokens && item->no_stop_trim);
    assert_int_equal(s->n_logit_bias, 1);
    assert_int_equal(s->logit_bias_ids[0], 12);
    assert_true(s->logit_bias[0] == -2.5f);
    assert_true(s->has_seed && s->seed == UINT64_MAX);
    hr_generate_request_free(&r);
}

static void lists_are_read_prompt_by_prompt(void **state) {
    (void)state;
    hr_generate_request r =
        parse("{\"input_ids\":[[1],[2,3],[4]],\"lora_path\":[\"a\",null,\"\"],\"return_logprob\":["
              "true,false,true],"
              "\"logprob_start_len\":[0,0,-1],\"top_logprobs_num\":[1,2,3],\"token_ids_logprob\":[["
              "7],null,[8,9]],"
              "\"sampling_params\":[{\"top_k\":1},{},{\"top_k\":3}],\"rid\":[\"x\",\"y\",\"z\"]}");
    assert_true(r.is_list);
    assert_int_equal(r.n_items, 3);
    assert_string_equal(r.items[0].lora_name, "a");
    assert_null(r.items[1].lora_name);
    assert_null(r.items[2].lora_name);
    assert_int_equal(r.items[1].n_input_ids, 2);
    assert_int_equal(r.items[0].logprob_start_len, 0);
    assert_int_equal(r.items[1].top_logprobs_num, 0); /* no logprobs were asked for there */
    assert_int_equal(r.items[2].top_logprobs_num, 3);
    assert_int_equal(r.items[2].n_token_ids_logprob, 2);
    assert_int_equal(r.items[0].sampling.top_k, 1);
    assert_int_equal(r.items[1].sampling.top_k, -1);
    assert_string_equal(r.items[2].rid, "z");
    hr_generate_request_free(&r);
}

static void samples_of_a_prompt_stand_together(void **state) {
    (void)state;
    hr_generate_request r = parse("{\"text\":[\"p\",\"q\"],\"rid\":\"X\",\"sampling_params\":{"
                                  "\"n\":2,\"sampling_seed\":10}}");
    static const char *const texts[] = {"p", "p", "q", "q"}, *const rids[] = {"X_0", "X_1", "X_2",
                                                                              "X_3"};
    assert_int_equal(r.n_items, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(r.items[i].text, texts[i]);
        assert_string_equal(r.items[i].rid, rids[i]);
        assert_string_equal(r.items[i].batch_rid, "X");
        assert_int_equal(r.items[i].sampling.seed,
                         10 + i % 2); /* else both samples would be the same */
    }
    hr_generate_request_free(&r);

    r = parse("{\"text\":[\"p\",\"q\"],\"rid\":[\"A\",\"B\"],\"sampling_params\":{\"n\":2}}");
    assert_string_equal(r.items[1].rid, "A_1");
    assert_string_equal(r.items[2].rid, "B_0");
    hr_generate_request_free(&r);

    r = parse("{\"text\":\"p\",\"sampling_params\":{\"n\":3}}");
    assert_true(r.is_list);
    assert_int_equal(r.n_items, 3);
    assert_string_not_equal(r.items[0].rid, r.items[1].rid);
    hr_generate_request_free(&r);
}

static void a_list_of_one_is_still_a_list(void **state) {
    (void)state;
    hr_generate_request r = parse("{\"text\":[\"p\"],\"rid\":\"X\"}");
    assert_true(r.is_list);
    assert_string_equal(r.items[0].rid, "X");
    assert_null(r.items[0].batch_rid);
    hr_generate_request_free(&r);
}

static void unknown_keys_are_reported_not_refused(void **state) {
    (void)state;
    hr_generate_request r = parse(
        "{\"text\":\"p\",\"new_thing\":1,\"priority\":3,\"image_data\":null,\"extra_key\":\"k\"}");
    assert_int_equal(r.n_unknown_keys, 1);
    assert_string_equal(r.unknown_keys[0], "new_thing");
    hr_generate_request_free(&r);
}

static void too_many_sequences_are_refused(void **state) {
    (void)state;
    assert_refused("{\"text\":[\"a\",\"b\"],\"sampling_params\":{\"n\":8192}}", "over the limit");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_refusal_names_the_field),
        cmocka_unit_test(each_refused_sampling_parameter_is_named),
        cmocka_unit_test(defaults_are_sglangs),
        cmocka_unit_test(a_seed_is_any_integer_of_64_bits),
        cmocka_unit_test(every_parameter_reaches_the_item),
        cmocka_unit_test(lists_are_read_prompt_by_prompt),
        cmocka_unit_test(samples_of_a_prompt_stand_together),
        cmocka_unit_test(a_list_of_one_is_still_a_list),
        cmocka_unit_test(unknown_keys_are_reported_not_refused),
        cmocka_unit_test(too_many_sequences_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
