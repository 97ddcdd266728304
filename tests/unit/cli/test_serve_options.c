/* The flags of `headrace serve`: SGLang's names, defaults, and refusals that name the flag. */
#include "cli/progress.h"
#include "cli/serve_options.h"

#include <headrace/engine.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_ARGS 32

/* Splits line at spaces (in place) and parses it. */
static hr_status parse(char *line, hr_serve_options *out, hr_error *err) {
    static char *argv[MAX_ARGS];
    int argc = 0;
    for (char *save = NULL, *word = strtok_r(line, " ", &save); word != NULL && argc < MAX_ARGS;
         word = strtok_r(NULL, " ", &save))
        argv[argc++] = word;
    return hr_serve_options_parse(argc, argv, out, err);
}

static void assert_refused(const char *text, const char *in_message) {
    char line[256];
    hr_serve_options options;
    hr_error err;
    strcpy(line, text);
    if (parse(line, &options, &err) == HR_OK)
        fail_msg("\"%s\" was taken; wanted a refusal with \"%s\"", text, in_message);
    if (strstr(err.message, in_message) == NULL)
        fail_msg("\"%s\" was refused with \"%s\", which lacks \"%s\"", text, err.message,
                 in_message);
}

static void only_the_model_is_needed(void **state) {
    (void)state;
    char line[] = "--model-path m";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_string_equal(o.model_path, "m");
    assert_string_equal(o.host, "127.0.0.1");
    assert_int_equal(o.port, 30000);
    assert_int_equal(o.drain_timeout, 30);
    assert_int_equal(o.max_running_requests, 0); /* the engine's default */
    assert_false(o.has_random_seed);
    hr_serve_options_free(&o);
}

static void flags_are_taken_in_both_forms(void **state) {
    (void)state;
    char line[] =
        "--model m --port=0 --host 0.0.0.0 --dtype=float32 --context-length 4096 --threads 3 "
        "--mem-fraction-static 0.5 --random-seed 0 --skip-tokenizer-init --enable-lora "
        "--max-loras-per-batch 4 --max-loaded-loras 4 --lora-target-modules q_proj all";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_int_equal(o.port, 0);
    assert_string_equal(o.dtype, "float32");
    assert_int_equal(o.context_length, 4096);
    assert_int_equal(o.threads, 3);
    assert_true(o.mem_fraction_static == 0.5);
    assert_true(o.has_random_seed && o.skip_tokenizer_init && o.enable_lora);
    assert_int_equal(o.max_loaded_loras, 4);
    assert_int_equal(o.n_lora_target_modules, 2);
    hr_serve_options_free(&o);
}

static void prompts_may_be_left_whole(void **state) {
    (void)state;
    char line[] = "--model m --chunked-prefill-size -1 --served-model-name s --lora-paths m=/x";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_int_equal(o.chunked_prefill_size, HR_WHOLE_PROMPTS);
    hr_serve_options_free(&o);
}

static void adapters_are_named_in_three_ways(void **state) {
    (void)state;
    char line[] = "--model-path m --lora-paths a=/x /y "
                  "{\"lora_name\":\"c\",\"lora_path\":\"/z\",\"pinned\":true} --port 1";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_int_equal(o.n_lora_items, 3);
    assert_string_equal(o.loras[0].name, "a");
    assert_string_equal(o.loras[0].path, "/x");
    assert_string_equal(o.loras[1].name, "/y");
    assert_string_equal(o.loras[1].path, "/y");
    assert_string_equal(o.loras[2].name, "c");
    assert_true(o.loras[2].pinned && !o.loras[0].pinned);
    assert_int_equal(o.port, 1);
    hr_serve_options_free(&o);
}

static void refusals_name_the_flag(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"", "--model-path is needed"},
        {"--model-path", "--model-path needs a value"},
        {"--model-path m --nonsense", "unknown flag --nonsense"},
        {"--model-path m --api-key=", "--api-key"},
        {"--model-path m --stream-interval 0", "--stream-interval"},
        {"--model-path m extra", "unexpected argument \"extra\""},
        {"--model-path m --port", "--port needs a value"},
        {"--model-path m --port x", "--port"},
        {"--model-path m --port 65536", "--port"},
        {"--model-path m --port -1", "--port"},
        {"--model-path m --dtype float8", "--dtype"},
        {"--model-path m --dtype auto|bfloat16", "--dtype"},
        {"--model-path m --mem-fraction-static 1.5", "--mem-fraction-static"},
        {"--model-path m --mem-fraction-static 0", "--mem-fraction-static"},
        {"--model-path m --mem-fraction-static 0x0.8", "--mem-fraction-static"},
        {"--model-path m --threads 0", "--threads"},
        {"--model-path m --skip-tokenizer-init=1", "--skip-tokenizer-init takes no value"},
        {"--model-path m --lora-paths", "--lora-paths needs"},
        {"--model-path m --lora-paths =x", "--lora-paths"},
        {"--model-path m --lora-paths a=/x a=/y", "\"a\" stands twice"},
        {"--model-path m --lora-paths m=/x", "name of the base model"},
        {"--model-path m --served-model-name s --lora-paths s=/x", "name of the base model"},
        {"--model-path m --chunked-prefill-size -2", "--chunked-prefill-size"},
        {"--model-path m --chunked-prefill-size 0", "--chunked-prefill-size"},
        {"--model-path m --lora-paths {\"lora_name\":\"c\"}", "lora_path"},
        {"--model-path m --lora-target-modules q_proj spin", "spin"},
        {"--model-path m --max-loaded-loras 2 --max-loras-per-batch 3", "--max-loaded-loras"},
        {"--model-path m --served-model-name a:b", "--served-model-name"},
        {"--model-path m --tp-size 2", "--tp-size 2"},
        {"--model-path m --tp 8", "--tp 8"},
        {"--model-path m --dp-size 2", "--dp-size 2"},
        {"--model-path m --quantization fp8", "--quantization"},
        {"--model-path m --device cuda", "--device cuda"},
        {"--model-path m --kv-cache-dtype fp8_e5m2", "--kv-cache-dtype"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_refused(table[i][0], table[i][1]);
}

static void foreign_flags_without_effect_are_listed_once(void **state) {
    (void)state;
    char line[] = "--tp-size 1 --model-path m --cuda-graph-bs 1 2 4 --attention-backend triton "
                  "--disable-cuda-graph "
                  "--attention-backend fa3 --device cpu";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_int_equal(o.n_ignored, 5);
    assert_string_equal(o.ignored[1], "--cuda-graph-bs");
    hr_serve_options_free(&o);
}

static void the_flags_can_be_read_but_not_the_keys(void **state) {
    (void)state;
    char line[] = "--model-path m --api-key secret --admin-api-key=hidden --stream-output "
                  "--lora-paths a=/x --threads 2 --disable-radix-cache";
    hr_serve_options o;
    hr_buf json = {0};
    hr_json_writer w;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_string_equal(o.api_key, "secret");
    assert_string_equal(o.admin_api_key, "hidden");
    hr_json_writer_init(&w, &json);
    hr_json_object_begin(&w);
    hr_serve_options_write(&o, &w);
    hr_json_object_end(&w);
    static const char *const wanted[] = {"\"model_path\":\"m\"",
                                         "\"incremental_streaming_output\":true",
                                         "\"stream_interval\":1",
                                         "\"lora_paths\":[\"a=/x\"]",
                                         "\"threads\":2",
                                         "\"max_loaded_loras\":null",
                                         "\"disable_radix_cache\":true",
                                         "\"tp_size\":1",
                                         "\"served_model_name\":null"};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        assert_non_null(strstr(json.data, wanted[i]));
    assert_null(strstr(json.data, "secret"));
    assert_null(strstr(json.data, "hidden"));
    hr_buf_free(&json);
    hr_serve_options_free(&o);
}

static void help_wins_over_what_is_missing(void **state) {
    (void)state;
    char line[] = "--help";
    hr_serve_options o;
    assert_int_equal(parse(line, &o, NULL), HR_OK);
    assert_true(o.help);
    hr_serve_options_free(&o);
}

static void progress_tells_bytes_rate_and_rest(void **state) {
    (void)state;
    hr_buf line = {0};
    hr_progress_format("loading", 100000000, 300000000, UINT64_C(2000000000), &line);
    assert_string_equal(line.data, "loading 100 MB of 300 MB, 33 %, 50 MB/s, 4 s left");
    hr_buf_clear(&line);
    hr_progress_format("loading", 0, 0, 0, &line);
    assert_string_equal(line.data, "loading 0 MB");
    hr_buf_free(&line);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_model_is_needed),
        cmocka_unit_test(flags_are_taken_in_both_forms),
        cmocka_unit_test(prompts_may_be_left_whole),
        cmocka_unit_test(adapters_are_named_in_three_ways),
        cmocka_unit_test(refusals_name_the_flag),
        cmocka_unit_test(foreign_flags_without_effect_are_listed_once),
        cmocka_unit_test(the_flags_can_be_read_but_not_the_keys),
        cmocka_unit_test(help_wins_over_what_is_missing),
        cmocka_unit_test(progress_tells_bytes_rate_and_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
