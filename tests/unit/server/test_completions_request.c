/* The body of /v1/completions becomes one of /generate. */
#include "server/completions_request.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static hr_completion completion;

static hr_generate_request parse(const char *body) {
    hr_generate_request r;
    hr_error err;
    if (hr_completions_request_parse(body, strlen(body), &r, &completion, &err) != HR_OK)
        fail_msg("%s\nwas refused: %s", body, err.message);
    return r;
}

static void defaults_are_openais(void **state) {
    (void)state;
    hr_generate_request r = parse("{\"model\":\"m\",\"prompt\":\"hello\"}");
    assert_int_equal(r.n_items, 1);
    assert_string_equal(r.items[0].text, "hello");
    assert_int_equal(r.items[0].sampling.max_new_tokens, 16);
    assert_false(r.items[0].return_logprob);
    assert_false(r.stream || completion.echo || completion.logprobs);
    assert_string_equal(completion.model, "m");
    assert_null(completion.adapter);
    assert_int_equal(r.n_unknown_keys, 0);
    hr_generate_request_free(&r);
}

static void prompts_come_in_four_forms(void **state) {
    (void)state;
    hr_generate_request r = parse("{\"prompt\":[\"a\",\"b\"],\"n\":2}");
    assert_int_equal(r.n_items, 4);
    assert_string_equal(r.items[2].text, "b");
    hr_generate_request_free(&r);
    r = parse("{\"prompt\":[1,2,3]}");
    assert_int_equal(r.n_items, 1);
    assert_int_equal(r.items[0].n_input_ids, 3);
    hr_generate_request_free(&r);
    r = parse("{\"prompt\":[[1,2],[3]]}");
    assert_int_equal(r.n_items, 2);
    assert_int_equal(r.items[1].input_ids[0], 3);
    hr_generate_request_free(&r);
}

static void fields_reach_the_item(void **state) {
    (void)state;
    hr_generate_request r = parse(
        "{\"prompt\":\"a\",\"max_tokens\":5,\"min_tokens\":2,\"seed\":9,\"temperature\":0.5,"
        "\"top_k\":4,\"stop\":[\"x\"],\"stop_regex\":\"y\",\"logprobs\":3,\"echo\":true,"
        "\"logit_bias\":{\"7\":-1},\"stream\":true,\"stream_options\":{\"include_usage\":true},"
        "\"rid\":\"me\",\"user\":\"u\",\"ignore_eos\":true,\"mystery\":1}");
    const hr_generate_item *item = &r.items[0];
    assert_int_equal(item->sampling.max_new_tokens, 5);
    assert_int_equal(item->sampling.min_new_tokens, 2);
    assert_true(item->sampling.has_seed && item->sampling.seed == 9);
    assert_int_equal(item->sampling.top_k, 4);
    assert_true(item->sampling.ignore_eos);
    assert_int_equal(item->sampling.n_logit_bias, 1);
    assert_string_equal(item->stops[0], "x");
    assert_string_equal(item->stop_regexes[0], "y");
    assert_true(item->return_logprob);
    assert_int_equal(item->logprob_start_len, 0);
    assert_int_equal(item->top_logprobs_num, 3);
    assert_string_equal(item->rid, "me");
    assert_true(r.stream && completion.include_usage && completion.echo && completion.logprobs);
    assert_int_equal(completion.n_logprobs, 3);
    assert_int_equal(r.n_unknown_keys, 1);
    assert_string_equal(r.unknown_keys[0], "mystery");
    hr_generate_request_free(&r);
}

static void the_adapter_in_model_wins(void **state) {
    (void)state;
    static const struct {
        const char *body, *lora;
    } table[] = {
        {"{\"prompt\":\"a\",\"model\":\"m:ad\"}", "ad"},
        {"{\"prompt\":\"a\",\"model\":\"m: ad \"}", "ad"},
        {"{\"prompt\":\"a\",\"model\":\"m:x:y\"}", "x:y"},
        {"{\"prompt\":\"a\",\"model\":\"m:\"}", NULL},
        {"{\"prompt\":\"a\",\"model\":\"m:\",\"lora_path\":\"b\"}", NULL},
        {"{\"prompt\":\"a\",\"model\":\"m:ad\",\"lora_path\":\"b\"}", "ad"},
        {"{\"prompt\":\"a\",\"model\":\"m\",\"lora_path\":\"b\"}", "b"},
        {"{\"prompt\":\"a\",\"lora_path\":null}", NULL},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        hr_generate_request r = parse(table[i].body);
        if (table[i].lora == NULL)
            assert_null(r.items[0].lora_name);
        else
            assert_string_equal(r.items[0].lora_name, table[i].lora);
        hr_generate_request_free(&r);
    }
}

static void refusals_name_the_field(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"{}", "prompt"},
        {"[]", "JSON object"},
        {"{\"prompt\":[]}", "prompt"},
        {"{\"prompt\":5}", "prompt"},
        {"{\"prompt\":[\"a\",5]}", "[1]"},
        {"{\"prompt\":\"a\",\"prompt\":\"b\"}", "stands twice"},
        {"{\"prompt\":\"a\",\"max_tokens\":-1}", "max_tokens"},
        {"{\"prompt\":\"a\",\"logprobs\":-1}", "logprobs"},
        {"{\"prompt\":\"a\",\"logprobs\":1000}", "logprobs"},
        {"{\"prompt\":\"a\",\"suffix\":\"x\"}", "suffix"},
        {"{\"prompt\":\"a\",\"best_of\":3}", "best_of"},
        {"{\"prompt\":\"a\",\"echo\":\"yes\"}", "echo"},
        {"{\"prompt\":\"a\",\"model\":5}", "model"},
        {"{\"prompt\":\"a\",\"regex\":\"x\"}", "regex"},
        {"{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}", "response_format"},
        {"{\"prompt\":\"a\",\"temperature\":-1}", "temperature"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        hr_generate_request r;
        hr_error err;
        if (hr_completions_request_parse(table[i][0], strlen(table[i][0]), &r, &completion, &err) ==
            HR_OK)
            fail_msg("%s was taken", table[i][0]);
        if (strstr(err.message, table[i][1]) == NULL)
            fail_msg("%s: \"%s\" lacks \"%s\"", table[i][0], err.message, table[i][1]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_openais),    cmocka_unit_test(prompts_come_in_four_forms),
        cmocka_unit_test(fields_reach_the_item),   cmocka_unit_test(the_adapter_in_model_wins),
        cmocka_unit_test(refusals_name_the_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
