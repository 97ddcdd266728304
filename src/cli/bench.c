/* `headrace bench`: `kernels` checks and times every op on every instruction set of this machine,
 * `model` times steps of a model. */
#include "cli/bench.h"

#include "kernels/check/bits.h"
#include "kernels/check/count.h"
#include "kernels/check/roof.h"
#include "kernels/check/speed.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_TIERS = 8, STREAM_PASSES = 60 };

typedef struct kernels_bench {
    bool json;
    const hr_kernels *tiers[MAX_TIERS]; /* slowest first, then NULL */
    double stream;
    hr_roof roof;
    hr_bits_result results[HR_BITS_RESULTS];
    bool all_same;
} kernels_bench;

/* The roof of what a tier multiplies with. That of the bf16 dot product is twice the fused
 * multiply-add's: two steps an instruction. */
static double roof_of(const kernels_bench *b, const hr_kernels *tier) {
    bool narrow = strcmp(tier->name, "ref") == 0 || strcmp(tier->name, "avx2") == 0;
    return narrow ? b->roof.fma_avx2 : b->roof.fma_avx512;
}

static void print_bits(kernels_bench *b, size_t n) {
    const char *comma = "";
    if (b->json)
        printf("\"bits\": [");
    else
        printf("\n%-12s %-12s %-5s %12s\n", "op", "tier", "bits", "values");
    for (size_t i = 0; i < n; i++) {
        const hr_bits_result *r = &b->results[i];
        bool same = r->different == 0;
        b->all_same = b->all_same && same;
        if (b->json)
            printf("%s{\"op\": \"%s\", \"tier\": \"%s\", \"same\": %s, \"values\": %" PRIu64 "}",
                   comma, r->op, r->tier->name, same ? "true" : "false", r->compared);
        else
            printf("%-12s %-12s %-5s %12" PRIu64 "%s%s\n", r->op, r->tier->name,
                   same ? "same" : "DIFF", r->compared, same ? "" : "  ", r->first);
        comma = ", ";
    }
    printf(b->json ? "], " : "\n");
}

/* Bits of one tier through its counting table, then what was counted. */
static void check_tier(kernels_bench *b, size_t t, const char *comma) {
    hr_kernels counting;
    hr_count_start(b->tiers[t], &counting);
    const hr_kernels *only[] = {&counting, NULL};
    printf(b->json ? "%s{\"tier\": \"%s\", " : "%s\ntier %s\n", comma, counting.name);
    print_bits(b, hr_bits_check(b->tiers[0], only, b->results));
    printf(b->json ? "\"calls\": {" : "calls:");
    for (size_t entry = 0; entry < HR_COUNT_ENTRIES; entry++) {
        const hr_kernels *owner = hr_count_owner(b->tiers, t, entry);
        if (b->json)
            printf("%s\"%s\": {\"code\": \"%s\", \"calls\": %" PRIu64 "}", entry > 0 ? ", " : "",
                   hr_count_name(entry), owner->name, hr_count_calls(entry));
        else
            printf("%s%s %" PRIu64 "%s%s", entry > 0 ? ", " : " ", hr_count_name(entry),
                   hr_count_calls(entry), owner == b->tiers[t] ? "" : " in code of ",
                   owner == b->tiers[t] ? "" : owner->name);
    }
    printf(b->json ? "}}" : "\n");
}

static void check_bits(kernels_bench *b) {
    if (b->json)
        printf("\"checks\": [");
    for (size_t t = 1; b->tiers[t] != NULL; t++)
        check_tier(b, t, b->json && t > 1 ? ", " : "");
    if (b->json)
        printf("], ");
}

static void print_speed(kernels_bench *b, hr_speed *speed, size_t op, size_t t, const char *comma) {
    const hr_kernels *tier = b->tiers[t];
    hr_speed_result r = hr_speed_measure(speed, b->tiers[0], tier, op);
    double fma = 100 * r.gflops / roof_of(b, tier), memory = 100 * r.gbps / b->stream;
    b->all_same = b->all_same && r.same_bits;
    if (b->json)
        printf("%s{\"op\": \"%s\", \"tier\": \"%s\", \"same\": %s, \"us\": %.3f, \"gflops\": %.2f, "
               "\"gbps\": %.2f, \"fma_percent\": %.1f, \"memory_percent\": %.1f}",
               comma, hr_speed_name(op), tier->name, r.same_bits ? "true" : "false",
               r.seconds * 1e6, r.gflops, r.gbps, fma, memory);
    else
        printf("%-34s %-10s %-5s %10.2f %9.1f %8.1f %6.0f %6.0f\n", hr_speed_name(op), tier->name,
               r.same_bits ? "same" : "DIFF", r.seconds * 1e6, r.gflops, r.gbps, fma, memory);
}

static void measure_roofs(kernels_bench *b, const hr_speed *speed, hr_pool *one_thread) {
    size_t bytes;
    const char *buffer = hr_speed_buffer(speed, &bytes);
    b->stream = hr_roof_stream(one_thread, buffer, bytes, STREAM_PASSES);
    b->roof = hr_roof_fma();
    if (b->json)
        printf("\"roof\": {\"threads\": 1, \"stream_gbps\": %.2f, \"fma_avx2_gflops\": %.1f, "
               "\"fma_avx512_gflops\": %.1f}, \"speeds\": [",
               b->stream, b->roof.fma_avx2, b->roof.fma_avx512);
    else
        printf(
            "\none thread: stream %.1f GB/s, fma avx2 %.0f GFLOP/s, avx512 %.0f GFLOP/s; the bf16 "
            "dot product takes two steps an instruction: up to 200 fma%%\n"
            "%-34s %-10s %-5s %10s %9s %8s %6s %6s\n",
            b->stream, b->roof.fma_avx2, b->roof.fma_avx512, "op", "tier", "bits", "us", "GFLOP/s",
            "GB/s", "fma%", "mem%");
}

static void measure_speeds(kernels_bench *b, hr_pool *one_thread) {
    hr_speed *speed = hr_speed_create();
    measure_roofs(b, speed, one_thread);
    for (size_t op = 0; op < hr_speed_ops(); op++)
        for (size_t t = 0; b->tiers[t] != NULL; t++)
            print_speed(b, speed, op, t, op + t > 0 ? ", " : "");
    hr_speed_destroy(speed);
    if (b->json)
        printf("], ");
}

static int bench_kernels(int argc, char **argv) {
    static kernels_bench b;
    hr_error err;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--json") != 0) {
            hr_fail(&err, HR_ERR_INVALID, "unknown argument %s; `bench kernels` takes --json",
                    argv[i]);
            return hr_exit_error(HR_EXIT_USAGE, &err);
        }
        b.json = true;
    }
    hr_pool *one_thread;
    if (hr_kernels_select(NULL, &b.tiers[0], NULL, 0, &err) != HR_OK ||
        hr_pool_create(1, &one_thread, &err) != HR_OK)
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    for (size_t i = 0; i + 1 < MAX_TIERS; i++)
        b.tiers[i] = hr_kernels_tier(i);
    b.all_same = true;
    if (b.json)
        printf("{");
    check_bits(&b);
    measure_speeds(&b, one_thread);
    printf(b.json ? "\"same\": %s}\n" : "\nall bits the same: %s\n", b.all_same ? "true" : "false");
    hr_pool_destroy(one_thread);
    return b.all_same ? HR_EXIT_OK : HR_EXIT_FAILURE;
}

static void print_usage(FILE *out) {
    fprintf(
        out,
        "usage: headrace bench kernels [--json]\n"
        "       headrace bench model --model DIR [--adapter DIR]... [--threads N] [--isa NAME] "
        "[--json]\n\n"
        "kernels   every op on every instruction set of this machine: the bits of the reference?"
        "\n          how fast, and which part of the roof? Exit code 1 when bits differ.\n"
        "model     steps of a model: decode and prefill beside this machine's memory and\n"
        "          arithmetic; with adapters also batches of one and of many of them.\n");
}

int hr_command_bench(int argc, char **argv) {
    if (argc > 0 && strcmp(argv[0], "kernels") == 0)
        return bench_kernels(argc - 1, argv + 1);
    if (argc > 0 && strcmp(argv[0], "model") == 0)
        return hr_bench_model(argc - 1, argv + 1);
    bool help = argc > 0 && (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0);
    print_usage(help ? stdout : stderr);
    return help ? HR_EXIT_OK : HR_EXIT_USAGE;
}
