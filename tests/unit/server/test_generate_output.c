/* What callbacks of the engine become: text with stop strings and stop tokens cut as SGLang cuts
 * them, and the JSON of an answer. */
#include "server/generate_output.h"
#include "server/generate_reply.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Tokens: 0 a, 1 b, 2 c, 3 and 4 the two bytes of an accented e, 5 <eos>. */
static const char tokenizer_json[] =
    "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":5,"
    "\"content\":\"<eos>\","
    "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}"
    "],"
    "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
    "\"trim_offsets\":true,"
    "\"use_regex\":true},\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_"
    "space\":true,"
    "\"trim_offsets\":true,\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_"
    "token\":null,"
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_"
    "fallback\":false,"
    "\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"\\u00c3\":3,\"\\u00a9\":4},\"merges\":[]}}";

enum { A, B, C, E1, E2, EOS };

static hr_tokenizer *tokenizer;
static const uint32_t eos_ids[] = {EOS};

static int make_tokenizer(void **state) {
    (void)state;
    hr_error err;
    if (hr_tokenizer_parse(tokenizer_json, sizeof tokenizer_json - 1, &tokenizer, &err) == HR_OK)
        return 0;
    print_error("%s\n", err.message);
    return 1;
}

static int free_tokenizer(void **state) {
    (void)state;
    hr_tokenizer_free(tokenizer);
    return 0;
}

static hr_generate_item make_item(void) {
    return (hr_generate_item){.rid = "r",
                              .n_input_ids = 2,
                              .logprob_start_len = -1,
                              .sampling = hr_sampling_params_default(),
                              .skip_special_tokens = true};
}

/* Pushes tokens until one of them stops the sequence; returns how many went in. */
static size_t push(hr_generate_output *out, const uint32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++) {
        hr_position_logprobs p = {.token = tokens[i]};
        if (hr_generate_output_token(out, &p) == HR_TOKEN_STOP)
            return i + 1;
    }
    return n;
}

static void finish(hr_generate_output *out, hr_finish_type type) {
    hr_finish f = {.type = type,
                   .matched_token = EOS,
                   .message = "",
                   .prompt_tokens = 2,
                   .completion_tokens = (uint32_t)out->tokens.n,
                   .weight_version = "v1",
                   .adapter_id = out->item->lora_name != NULL ? 7 : 0,
                   .adapter_version = out->item->lora_name != NULL ? "step-3" : NULL};
    hr_generate_output_finish(out, &f);
}

static void start(hr_generate_output *out, const hr_generate_item *item) {
    hr_error err;
    assert_int_equal(hr_generate_output_init(out, item, tokenizer, eos_ids, 1, &err), HR_OK);
}

static void a_stop_string_ends_the_text_before_it(void **state) {
    (void)state;
    static const char *const stops[] = {"zz", "bc"};
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.stops = stops;
    item.n_stops = 2;
    start(&out, &item);
    assert_int_equal(push(&out, (uint32_t[]){A, B, C, A}, 4), 3);
    finish(&out, HR_FINISH_STOP_CALLER);
    assert_string_equal(out.text.data, "a");
    assert_int_equal(out.tokens.n, 3); /* the ids keep what the text loses */
    assert_int_equal(out.matched_stop, 1);
    hr_generate_output_free(&out);
}

static void no_stop_trim_keeps_the_stop_string(void **state) {
    (void)state;
    static const char *const stops[] = {"b"};
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.stops = stops;
    item.n_stops = 1;
    item.no_stop_trim = true;
    start(&out, &item);
    assert_int_equal(push(&out, (uint32_t[]){A, B}, 2), 2);
    finish(&out, HR_FINISH_STOP_CALLER);
    assert_string_equal(out.text.data, "ab");
    hr_generate_output_free(&out);
}

static void text_that_may_become_a_stop_string_waits(void **state) {
    (void)state;
    static const char *const stops[] = {"bc"};
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.stops = stops;
    item.n_stops = 1;
    start(&out, &item);
    push(&out, (uint32_t[]){A, B}, 2);
    assert_string_equal(out.text.data, "a");
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "ab");
    hr_generate_output_free(&out);
}

static void a_stop_that_only_the_last_text_completes_is_still_the_reason(void **state) {
    (void)state;
    static const char *const stops[] = {"\xef\xbf\xbd"}, *const regexes[] = {"b\xef\xbf\xbd"};
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.stops = stops;
    item.n_stops = 1;
    start(&out, &item);
    push(&out, (uint32_t[]){A, E1}, 2);
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "a");
    assert_int_equal(out.finish.type, HR_FINISH_STOP_CALLER);
    assert_string_equal(hr_generate_output_matched(&out), stops[0]);
    hr_generate_output_free(&out);

    item.n_stops = 0;
    item.stop_regexes = regexes;
    item.n_stop_regexes = 1;
    start(&out, &item);
    push(&out, (uint32_t[]){A, B, E1}, 3);
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "a");
    assert_int_equal(out.finish.type, HR_FINISH_STOP_CALLER);
    assert_string_equal(hr_generate_output_matched(&out), regexes[0]);
    hr_generate_output_free(&out);
}

static void a_copy_can_leave_out_what_was_shown(void **state) {
    (void)state;
    const uint32_t top_ids[] = {A, C};
    const float top[] = {-0.25f, -0.5f};
    hr_generate_item item = make_item();
    hr_generate_output out, copy = {0};
    start(&out, &item);
    hr_position_logprobs p = {
        .token = A, .has_logprob = true, .n_top = 2, .top_ids = top_ids, .top_logprobs = top};
    hr_generate_output_token(&out, &p);
    hr_output_mark mark = hr_generate_output_mark(&out);
    p.token = B;
    p.n_top = 1;
    p.top_ids = top_ids + 1;
    hr_generate_output_token(&out, &p);
    assert_true(hr_generate_output_copy(&copy, &out, mark));
    assert_string_equal(copy.text.data, "b");
    assert_int_equal(copy.tokens.n, 1);
    assert_int_equal(copy.tokens.positions[0].token, B);
    assert_int_equal(copy.tokens.top_ids[copy.tokens.positions[0].top_at], C);
    assert_int_equal(copy.before.tokens, 1);
    assert_true(hr_generate_output_copy(&copy, &out, hr_generate_output_mark(&out)));
    assert_int_equal(copy.tokens.n + copy.text.len, 0);
    hr_generate_output_free(&copy);
    hr_generate_output_free(&out);
}

static void a_character_is_never_split(void **state) {
    (void)state;
    hr_generate_item item = make_item();
    hr_generate_output out;
    start(&out, &item);
    push(&out, (uint32_t[]){A, E1}, 2);
    assert_string_equal(out.text.data, "a");
    push(&out, (uint32_t[]){E2}, 1);
    assert_string_equal(out.text.data, "a\xc3\xa9");
    push(&out, (uint32_t[]){E1}, 1);
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "a\xc3\xa9\xef\xbf\xbd");
    hr_generate_output_free(&out);
}

static void the_stop_token_is_in_the_ids_and_not_in_the_text(void **state) {
    (void)state;
    const uint32_t stop_ids[] = {B};
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.sampling.stop_token_ids = stop_ids;
    item.sampling.n_stop_token_ids = 1;
    start(&out, &item);
    push(&out, (uint32_t[]){A, B}, 2);
    finish(&out, HR_FINISH_STOP_TOKEN);
    assert_string_equal(out.text.data, "a");
    assert_int_equal(out.tokens.n, 2);
    hr_generate_output_free(&out);

    item.no_stop_trim = true;
    start(&out, &item);
    push(&out, (uint32_t[]){A, B}, 2);
    finish(&out, HR_FINISH_STOP_TOKEN);
    assert_string_equal(out.text.data, "ab");
    hr_generate_output_free(&out);
}

static void special_tokens_show_only_when_asked_for(void **state) {
    (void)state;
    hr_generate_item item = make_item();
    hr_generate_output out;
    item.sampling.ignore_eos = true;
    item.skip_special_tokens = false;
    start(&out, &item);
    push(&out, (uint32_t[]){A, EOS, B}, 3);
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "a<eos>b");
    hr_generate_output_free(&out);

    item.skip_special_tokens = true;
    start(&out, &item);
    push(&out, (uint32_t[]){A, EOS, B}, 3);
    finish(&out, HR_FINISH_LENGTH);
    assert_string_equal(out.text.data, "ab");
    hr_generate_output_free(&out);
}

static void stop_strings_need_a_tokenizer(void **state) {
    (void)state;
    static const char *const stops[] = {"b"};
    hr_generate_item item = make_item();
    hr_generate_output out;
    hr_error err;
    item.stops = stops;
    item.n_stops = 1;
    assert_int_equal(hr_generate_output_init(&out, &item, NULL, eos_ids, 1, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "sampling_params.stop"));
    hr_generate_output_free(&out);
}

static void assert_reply(const hr_generate_output *out, const hr_reply_options *options,
                         const char *wanted) {
    hr_buf json = {0};
    hr_json_writer w;
    hr_json_writer_init(&w, &json);
    hr_generate_reply_write(out, options, &w);
    assert_string_equal(json.data, wanted);
    hr_buf_free(&json);
}

static void an_answer_has_sglangs_shape(void **state) {
    (void)state;
    const uint32_t top_ids[] = {A, C}, asked[] = {B};
    const float top[] = {-0.25f, -INFINITY}, ids[] = {-1.5f};
    hr_generate_item item = make_item();
    hr_generate_output out, copy = {0};
    item.lora_name = "ad";
    item.return_logprob = true;
    item.logprob_start_len = 0;
    item.top_logprobs_num = 2;
    item.token_ids_logprob = asked;
    item.n_token_ids_logprob = 1;
    start(&out, &item);
    hr_position_logprobs positions[] = {{.token = C},
                                        {.token = A,
                                         .has_logprob = true,
                                         .logprob = -0.1f,
                                         .n_top = 2,
                                         .top_ids = top_ids,
                                         .top_logprobs = top,
                                         .n_ids = 1,
                                         .ids_logprobs = ids}};
    hr_generate_output_prompt(&out, 1, positions);
    hr_generate_output_prompt(&out, 1, positions + 1);
    hr_generate_output_token(&out, &positions[1]);

    hr_reply_options options = {.text_in_logprobs = true, .weight_version = "v0", .index = 3};
    assert_reply(
        &out, &options,
        "{\"text\":\"a\",\"output_ids\":[0],\"meta_info\":{\"id\":\"r\",\"finish_reason\":null,"
        "\"prompt_tokens\":2,\"weight_version\":\"v0\",\"num_retractions\":0,"
        "\"input_token_logprobs\":[[null,2,\"c\"],[-0.100000001,0,\"a\"]],"
        "\"output_token_logprobs\":[[-0.100000001,0,\"a\"]],"
        "\"input_top_logprobs\":[null,[[-0.25,0,\"a\"],[null,2,\"c\"]]],"
        "\"output_top_logprobs\":[[[-0.25,0,\"a\"],[null,2,\"c\"]]],"
        "\"input_token_ids_logprobs\":[null,[[-1.5,1,\"b\"]]],"
        "\"output_token_ids_logprobs\":[[[-1.5,1,\"b\"]]],"
        "\"completion_tokens\":1,\"cached_tokens\":0,\"reasoning_tokens\":0,\"lora_path\":\"ad\","
        "\"lora_name\":\"ad\",\"lora_id\":null,\"lora_version\":null},\"index\":3}");

    item.return_logprob = false;
    finish(&out, HR_FINISH_LENGTH);
    options = (hr_reply_options){.weight_version = "v0", .index = -1};
    static const char wanted[] =
        "{\"text\":\"a\",\"output_ids\":[0],\"meta_info\":{\"id\":\"r\",\"finish_reason\":{"
        "\"type\":\"length\","
        "\"length\":1},\"prompt_tokens\":2,\"weight_version\":\"v1\",\"num_retractions\":0,"
        "\"completion_tokens\":1,"
        "\"cached_tokens\":0,\"reasoning_tokens\":0,\"lora_path\":\"ad\",\"lora_name\":\"ad\","
        "\"lora_id\":"
        "7,\"lora_version\":\"step-3\",\"weight_versions\":[{"
        "\"version\":\"v1\",\"start\":0,"
        "\"end\":1}],\"e2e_latency\":0.0}}";
    assert_reply(&out, &options, wanted);
    assert_true(hr_generate_output_copy(&copy, &out, (hr_output_mark){0}));
    assert_reply(&copy, &options, wanted);
    hr_generate_output_free(&copy);
    hr_generate_output_free(&out);
}

static void assert_finish_reason(hr_finish_type type, const char *wanted) {
    hr_generate_item item = make_item();
    hr_generate_output out;
    hr_buf json = {0};
    hr_json_writer w;
    hr_reply_options options = {.weight_version = "", .index = -1};
    assert_int_equal(hr_generate_output_init(&out, &item, NULL, eos_ids, 1, NULL), HR_OK);
    finish(&out, type);
    hr_json_writer_init(&w, &json);
    hr_generate_reply_write(&out, &options, &w);
    assert_non_null(strstr(json.data, wanted));
    assert_null(strstr(json.data, "\"text\"")); /* no tokenizer, no text */
    hr_buf_free(&json);
    hr_generate_output_free(&out);
}

static void finish_reasons(void **state) {
    (void)state;
    assert_finish_reason(HR_FINISH_LENGTH, "\"finish_reason\":{\"type\":\"length\",\"length\":0}");
    assert_finish_reason(HR_FINISH_STOP_TOKEN,
                         "\"finish_reason\":{\"type\":\"stop\",\"matched\":5}");
    assert_finish_reason(HR_FINISH_ABORT,
                         "\"finish_reason\":{\"type\":\"abort\",\"message\":\"Aborted\","
                         "\"status_code\":null,\"err_type\":null}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_string_ends_the_text_before_it),
        cmocka_unit_test(no_stop_trim_keeps_the_stop_string),
        cmocka_unit_test(text_that_may_become_a_stop_string_waits),
        cmocka_unit_test(a_stop_that_only_the_last_text_completes_is_still_the_reason),
        cmocka_unit_test(a_copy_can_leave_out_what_was_shown),
        cmocka_unit_test(a_character_is_never_split),
        cmocka_unit_test(the_stop_token_is_in_the_ids_and_not_in_the_text),
        cmocka_unit_test(special_tokens_show_only_when_asked_for),
        cmocka_unit_test(stop_strings_need_a_tokenizer),
        cmocka_unit_test(an_answer_has_sglangs_shape),
        cmocka_unit_test(finish_reasons),
    };
    return cmocka_run_group_tests(tests, make_tokenizer, free_tokenizer);
}
