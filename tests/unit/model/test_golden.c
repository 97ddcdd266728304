/* Golden bits: the logits of a tiny model, hashed, must be those of tests/golden/tiny_llama.bits
 * for every tier, thread count and chunk size, whatever compiler built this.
 *
 * A change of the file is a change of docs/arithmetic.md: deliberate, never a by-product. It is
 * written anew with `test_golden FILE --write`. */
#include "model_run.h"
#include "tiny_model.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

enum { N_TOKENS = 600 }; /* more than a block of attention */

typedef struct golden {
    const char *dtype;
    bool adapted;
    uint64_t bits;
} golden;

static golden goldens[] = {
    {"bfloat16", false, 0}, {"bfloat16", true, 0}, {"float32", false, 0}, {"float32", true, 0}};
enum { N_GOLDENS = sizeof goldens / sizeof goldens[0] };

static char dir[] = "/tmp/headrace-golden-XXXXXX";

/* FNV-1a over the bytes of all logits. */
static uint64_t hash_logits(const float *logits, size_t n) {
    const unsigned char *bytes = (const unsigned char *)logits;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n * sizeof *logits; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void check(hr_status status, const hr_error *err) {
    if (status != HR_OK)
        fail_msg("%s", err->message);
}

static uint64_t logit_bits(const golden *g, const char *isa, unsigned threads, uint32_t chunk) {
    hr_error err = {0};
    hr_pool *pool = NULL;
    hr_model *model = NULL;
    hr_lora *lora = NULL;
    char path[1200];
    snprintf(path, sizeof path, "%s/model", dir);
    hr_model_options options = {.dir = path, .dtype = g->dtype, .isa = isa};
    check(hr_pool_create(threads, &pool, &err), &err);
    options.pool = pool;
    check(hr_model_load(&options, &model, &err), &err);
    snprintf(path, sizeof path, "%s/adapter", dir);
    if (g->adapted)
        check(hr_lora_load(model, path, &lora, &err), &err);

    static uint32_t tokens[N_TOKENS];
    static float logits[N_TOKENS * TINY_VOCAB];
    for (uint32_t i = 0; i < N_TOKENS; i++)
        tokens[i] = i * i * 7 % TINY_VOCAB;
    run_seq seq = {.lora = lora, .tokens = tokens, .n = N_TOKENS, .logits = logits};
    check(run_sequences(model, pool, &seq, 1, chunk, NULL, &err), &err);
    hr_lora_destroy(lora);
    hr_model_destroy(model);
    hr_pool_destroy(pool);
    return hash_logits(logits, (size_t)N_TOKENS * TINY_VOCAB);
}

static void expect_golden(const char *isa, unsigned threads, uint32_t chunk) {
    for (size_t i = 0; i < N_GOLDENS; i++) {
        uint64_t bits = logit_bits(&goldens[i], isa, threads, chunk);
        if (bits != goldens[i].bits)
            fail_msg("%s%s on %s: %016" PRIx64 ", golden is %016" PRIx64, goldens[i].dtype,
                     goldens[i].adapted ? " with adapter" : "", isa, bits, goldens[i].bits);
    }
}

static void every_tier_gives_the_golden_bits(void **state) {
    (void)state;
    for (size_t i = 0; hr_kernels_tier(i) != NULL; i++)
        expect_golden(hr_kernels_tier(i)->name, 1, 256);
}

static void any_threads_and_chunks_give_the_golden_bits(void **state) {
    (void)state;
    expect_golden("", 2, 37);
    expect_golden("", 3, 600);
}

static void read_goldens(const char *path) {
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    for (size_t i = 0; i < N_GOLDENS; i++) {
        char dtype[32], which[32];
        assert_int_equal(fscanf(file, "%31s %31s %" SCNx64, dtype, which, &goldens[i].bits), 3);
        assert_string_equal(dtype, goldens[i].dtype);
        assert_string_equal(which, goldens[i].adapted ? "adapter" : "base");
    }
    fclose(file);
}

static int write_goldens(const char *path) {
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return 1;
    for (size_t i = 0; i < N_GOLDENS; i++)
        fprintf(file, "%s %s %016" PRIx64 "\n", goldens[i].dtype,
                goldens[i].adapted ? "adapter" : "base", logit_bits(&goldens[i], "ref", 1, 256));
    return fclose(file) == 0 ? 0 : 1;
}

static const char *golden_path;

static int set_up(void **state) {
    (void)state;
    read_goldens(golden_path);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2 || mkdtemp(dir) == NULL)
        return 2;
    tiny_model_write(dir);
    golden_path = argv[1];
    int rc;
    if (argc > 2 && strcmp(argv[2], "--write") == 0) {
        rc = write_goldens(golden_path);
    } else {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test(every_tier_gives_the_golden_bits),
            cmocka_unit_test(any_threads_and_chunks_give_the_golden_bits),
        };
        rc = cmocka_run_group_tests(tests, set_up, NULL);
    }
    tiny_model_remove(dir);
    return rc;
}
