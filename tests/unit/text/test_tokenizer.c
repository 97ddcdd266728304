/* The tokenizer and its stream, where no reference is needed: refusals, added tokens, what is held
 * back. That ids and text equal those of the `tokenizers` package is checked end to end. */
#include "text/detokenizer.h"
#include "text/tokenizer.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* "é" is the byte E9 of the alphabet, Ã and © are the two bytes of é, ðŁĺ Ģ those of an emoji. */
#define BYTE_VOCAB                                                                                 \
    "{\"a\":0,\"b\":1,\"ab\":2,\"\xC4\xA0\":3,\"\xC3\xA9\":4,\"\xC3\x83\":5,\"\xC2\xA9\":6,"       \
    "\"\xC3\xB0\":7,\"\xC5\x81\":8,\"\xC4\xBA\":9,\"\xC4\xA2\":10}"
#define BYTE_TOKENIZER                                                                             \
    "{\"added_tokens\":[{\"id\":11,\"content\":\"<s>\",\"special\":true},"                         \
    "{\"id\":12,\"content\":\"<\xC3\xA9>\",\"special\":true},"                                     \
    "{\"id\":13,\"content\":\"\xC4\xA0\xE4\xB8\x96\",\"special\":false,\"normalized\":false},"     \
    "{\"id\":14,\"content\":\"\xC4\xA0tool\",\"special\":false,\"normalized\":false}],"            \
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"                       \
    "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"   \
    "\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[11]}}},"       \
    "\"decoder\":{\"type\":\"ByteLevel\"},"                                                        \
    "\"model\":{\"type\":\"BPE\",\"vocab\":" BYTE_VOCAB ",\"merges\":[\"a b\"]}}"

#define SPELLED_TOKENIZER                                                                          \
    "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"        \
    "\"String\":\"_\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"        \
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":2}]},"                             \
    "\"model\":{\"vocab\":{\"_\":0,\"a\":1,\"<0xC3>\":2,\"<0xA9>\":3},\"merges\":[],"              \
    "\"byte_fallback\":true}}"

static hr_tokenizer *parse(const char *json) {
    hr_tokenizer *t = NULL;
    hr_error err;
    if (hr_tokenizer_parse(json, strlen(json), &t, &err) != HR_OK)
        fail_msg("%s", err.message);
    return t;
}

static void check_encode(const hr_tokenizer *t, const char *text, bool special, size_t n,
                         const uint32_t *want) {
    uint32_t *ids;
    size_t got;
    assert_int_equal(hr_tokenizer_encode(t, text, strlen(text), special, &ids, &got, NULL), HR_OK);
    assert_int_equal(got, n);
    if (n > 0)
        assert_memory_equal(ids, want, n * sizeof *want);
    free(ids);
}

/* pieces: what every push gives, then what the flush gives, each followed by a bar. */
static void check_stream(const hr_tokenizer *t, bool skip, const uint32_t *ids, size_t n,
                         const char *pieces) {
    hr_detokenizer *d;
    hr_buf got = {0};
    assert_int_equal(hr_detokenizer_create(t, skip, &d, NULL), HR_OK);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(hr_detokenizer_push(d, ids[i], &got, NULL), HR_OK);
        hr_buf_putc(&got, '|');
    }
    assert_int_equal(hr_detokenizer_flush(d, &got, NULL), HR_OK);
    hr_buf_putc(&got, '|');
    assert_string_equal(got.data, pieces);
    hr_buf_free(&got);
    hr_detokenizer_free(d);
}

#define IDS(...) (const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4

static void text_becomes_ids(void **state) {
    const hr_tokenizer *t = *state;
    check_encode(t, "", false, 0, NULL);
    check_encode(t, "", true, 1, (uint32_t[]){11});
    check_encode(t, "abba a", true, 6, (uint32_t[]){11, 2, 1, 0, 3, 0});
}

static void special_texts_become_their_ids_everywhere(void **state) {
    const hr_tokenizer *t = *state;
    check_encode(t, "a<s>ab", false, 3, (uint32_t[]){0, 11, 2});
    check_encode(t, "<\xC3\xA9>", false, 1, (uint32_t[]){12});
    check_encode(t, "\xC3\xA9", false, 2, (uint32_t[]){5, 6});
}

static void text_that_is_not_utf8_is_refused(void **state) {
    const hr_tokenizer *t = *state;
    uint32_t *ids;
    size_t n;
    hr_error err;
    assert_int_equal(hr_tokenizer_encode(t, "ab\xFFz", 4, false, &ids, &n, &err), HR_ERR_INVALID);
    assert_non_null(strstr(err.message, "0xFF at 2"));
}

/* Field case 68. */
static void added_tokens_decode_to_their_own_text(void **state) {
    const hr_tokenizer *t = *state;
    check_stream(t, false, IDS(12, 13, 14, 4),
                 "<\xC3\xA9>|\xC4\xA0\xE4\xB8\x96|\xC4\xA0tool||\xEF\xBF\xBD|");
    check_stream(t, true, IDS(0, 11, 12, 13, 14), "a|||\xC4\xA0\xE4\xB8\x96|\xC4\xA0tool||");
    check_stream(t, false, IDS(11, 11), "<s>|<s>||");
}

/* Field case 28. */
static void an_unfinished_character_is_held_back(void **state) {
    const hr_tokenizer *t = *state;
    check_stream(t, false, IDS(0, 7, 8, 9, 10, 3), "a||||\xF0\x9F\x98\x80| ||");
    check_stream(t, false, IDS(5, 0),
                 "|\xEF\xBF\xBD"
                 "a||");
    check_stream(t, false, IDS(7, 8, 9), "|||\xEF\xBF\xBD|");
    check_stream(t, false, IDS(5, 5, 6), "|\xEF\xBF\xBD|\xC3\xA9||");
    check_stream(t, true, IDS(5, 11, 6), "||\xC3\xA9||");
}

static void ids_that_name_no_token_give_nothing(void **state) {
    const hr_tokenizer *t = *state;
    check_stream(t, false, IDS(0, 15, 4000000000u, 1), "a|||b||");
    assert_false(hr_tokenizer_is_special(t, 4000000000u));
}

static void tokens_can_be_looked_up(void **state) {
    const hr_tokenizer *t = *state;
    hr_buf text = {0};
    assert_int_equal(hr_tokenizer_vocab_size(t), 15);
    assert_int_equal(hr_tokenizer_id_of(t, "ab", 2), 2);
    assert_int_equal(hr_tokenizer_id_of(t, "<s>", 3), 11);
    assert_int_equal(hr_tokenizer_id_of(t, "abc", 3), HR_TOKENIZER_NO_ID);
    assert_true(hr_tokenizer_is_special(t, 12));
    assert_false(hr_tokenizer_is_special(t, 13));
    assert_int_equal(hr_tokenizer_token_text(t, 3, &text, NULL), HR_OK);
    assert_int_equal(hr_tokenizer_token_text(t, 12, &text, NULL), HR_OK);
    assert_string_equal(text.data, " <\xC3\xA9>");
    hr_buf_free(&text);
}

/* A run of byte tokens is decided as a whole; what stripping may drop at the end waits. */
static void spelled_bytes_and_stripped_ends_wait(void **state) {
    (void)state;
    hr_tokenizer *t = parse(SPELLED_TOKENIZER);
    check_stream(t, false, IDS(0, 1, 2, 3, 1),
                 "|a|||\xC3\xA9"
                 "a||");
    check_stream(t, false, IDS(2, 3, 3, 1),
                 "|||\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
                 "a||");
    check_stream(t, false, IDS(1, 2), "a||\xEF\xBF\xBD|");
    check_stream(t, false, IDS(0, 0, 1, 0, 0, 0, 1), "|| a||| |  a||");
    check_stream(t, false, IDS(1, 0, 0), "a||||");
    hr_tokenizer_free(t);
}

/* A tokenizer file with one value replaced must be refused, and the message must name what is
 * wrong. */
static void what_is_not_known_is_refused_by_name(void **state) {
    (void)state;
    static const char model[] = "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}";
    static const struct {
        const char *part, *named;
    } cases[] = {
        {"\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}", "BertPreTokenizer"},
        {"\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},"
         "{\"type\":\"Digits\"}]}",
         "behind ByteLevel"},
        {"\"normalizer\":{\"type\":\"Precompiled\"}", "Precompiled"},
        {"\"post_processor\":{\"type\":\"BertProcessing\"}", "BertProcessing"},
        {"\"decoder\":{\"type\":\"WordPiece\"}", "WordPiece"},
        {"\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":"
         "\"ByteFallback\"}]}",
         "Fuse"},
        {"\"added_tokens\":[{\"id\":7,\"content\":\"<x>\"}]", "<x>"},
        {"\"model\":{\"type\":\"Unigram\"}", "Unigram"},
        {"\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\"}", "end_of_word_suffix"},
        {"\"model\":{\"type\":\"BPE\",\"dropout\":0.1}", "dropout"},
        {"\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}", "merges[0]"},
        {"\"model\":{\"vocab\":{\"a\":0},\"merges\":[3]}", "merges[0]"},
        {"\"model\":{\"vocab\":{\"a\":4194304},\"merges\":[]}", "a"},
        {"\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}", "given to two tokens"},
        {"\"model\":{\"vocab\":[],\"merges\":[]}", "vocab"},
        {"\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"<u>\"}", "<u>"},
        {"\"version\":\"1.0\"", "model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[512];
        bool whole =
            strstr(cases[i].part, "\"model\"") != NULL || strstr(cases[i].part, "version") != NULL;
        snprintf(json, sizeof json, whole ? "{%s}" : "{%s,%s}", cases[i].part, model);
        hr_tokenizer *t = NULL;
        hr_error err = {0};
        assert_int_not_equal(hr_tokenizer_parse(json, strlen(json), &t, &err), HR_OK);
        assert_null(t);
        if (strstr(err.message, cases[i].named) == NULL)
            fail_msg("\"%s\" does not name %s", err.message, cases[i].named);
    }
}

static void a_directory_without_a_tokenizer_says_what_to_do(void **state) {
    (void)state;
    hr_tokenizer *t = NULL;
    hr_error err;
    assert_int_equal(hr_tokenizer_load("/nonexistent", &t, &err), HR_ERR_NOT_FOUND);
    assert_non_null(strstr(err.message, "/nonexistent/tokenizer.json"));
    assert_non_null(strstr(err.message, "save_pretrained"));
}

/* Returns NULL when all went well. */
static void *encode_many(void *arg) {
    const hr_tokenizer *t = arg;
    for (int i = 0; i < 200; i++) {
        hr_buf text = {0};
        uint32_t *ids;
        size_t n;
        if (hr_tokenizer_encode(t, "abba <s>\xC3\xA9", 10, true, &ids, &n, NULL) != HR_OK)
            return arg;
        hr_status status = hr_tokenizer_decode(t, ids, n, true, &text, NULL);
        bool same = status == HR_OK && strcmp(text.data, "abba \xC3\xA9") == 0;
        free(ids);
        hr_buf_free(&text);
        if (!same)
            return arg;
    }
    return NULL;
}

static void many_threads_share_one_tokenizer(void **state) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, *state), 0);
    for (int i = 0; i < 4; i++) {
        void *failure;
        assert_int_equal(pthread_join(threads[i], &failure), 0);
        assert_null(failure);
    }
}

static int setup(void **state) {
    *state = parse(BYTE_TOKENIZER);
    return 0;
}

static int teardown(void **state) {
    hr_tokenizer_free(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_becomes_ids),
        cmocka_unit_test(special_texts_become_their_ids_everywhere),
        cmocka_unit_test(text_that_is_not_utf8_is_refused),
        cmocka_unit_test(added_tokens_decode_to_their_own_text),
        cmocka_unit_test(an_unfinished_character_is_held_back),
        cmocka_unit_test(ids_that_name_no_token_give_nothing),
        cmocka_unit_test(tokens_can_be_looked_up),
        cmocka_unit_test(spelled_bytes_and_stripped_ends_wait),
        cmocka_unit_test(what_is_not_known_is_refused_by_name),
        cmocka_unit_test(a_directory_without_a_tokenizer_says_what_to_do),
        cmocka_unit_test(many_threads_share_one_tokenizer),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
