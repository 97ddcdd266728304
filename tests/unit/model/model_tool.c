/* model_tool SPEC OUT: runs what the lines of SPEC say and writes the logits of every token,
 * float32, sequence after sequence, to OUT. For tests that compare the model with another
 * implementation, or with itself.
 *
 *   model DIR          dtype NAME        isa NAME        threads N       chunk N
 *   adapter DIR        the next adapter; they count from 1
 *   seq ADAPTER TOKEN...   a sequence; adapter 0 is the base
 *
 * Prints the load time and the median time of a step to standard error. */
#include "model_run.h"

#include "base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ADAPTERS = 64, MAX_SEQS = 4096 };

typedef struct spec {
    char *model, *dtype, *isa;
    unsigned threads, chunk;
    char *adapters[MAX_ADAPTERS];
    uint32_t n_adapters;
    run_seq seqs[MAX_SEQS];
    unsigned seq_adapter[MAX_SEQS];
    uint32_t n_seqs;
} spec;

static spec the;

static int usage(const char *what) {
    fprintf(stderr, "model_tool: %s\n", what);
    return 2;
}

static int read_seq(char *rest) {
    if (the.n_seqs == MAX_SEQS)
        return usage("too many sequences");
    run_seq *seq = &the.seqs[the.n_seqs];
    uint32_t *tokens = malloc((strlen(rest) / 2 + 1) * sizeof *tokens);
    if (tokens == NULL)
        return usage("no memory");
    the.seq_adapter[the.n_seqs++] = (unsigned)strtoul(rest, &rest, 10);
    for (char *end;; rest = end) {
        unsigned long token = strtoul(rest, &end, 10);
        if (end == rest)
            break;
        tokens[seq->n++] = (uint32_t)token;
    }
    seq->tokens = tokens;
    return 0;
}

static int read_line(char *line) {
    line[strcspn(line, "\n")] = '\0';
    char *rest = strchr(line, ' ');
    if (rest == NULL)
        return usage("a line without a value");
    *rest++ = '\0';
    if (strcmp(line, "model") == 0)
        the.model = strdup(rest);
    else if (strcmp(line, "dtype") == 0)
        the.dtype = strdup(rest);
    else if (strcmp(line, "isa") == 0)
        the.isa = strdup(rest);
    else if (strcmp(line, "threads") == 0)
        the.threads = (unsigned)strtoul(rest, NULL, 10);
    else if (strcmp(line, "chunk") == 0)
        the.chunk = (unsigned)strtoul(rest, NULL, 10);
    else if (strcmp(line, "adapter") == 0 && the.n_adapters < MAX_ADAPTERS)
        the.adapters[the.n_adapters++] = strdup(rest);
    else if (strcmp(line, "seq") == 0)
        return read_seq(rest);
    else
        return usage("an unknown line");
    return 0;
}

static int read_spec(const char *path) {
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return usage(strerror(errno));
    char *line = NULL;
    size_t size = 0;
    int rc = 0;
    while (rc == 0 && getline(&line, &size, file) > 0)
        rc = read_line(line);
    free(line);
    fclose(file);
    return rc;
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static hr_status run(const hr_model *model, hr_pool *pool, const char *out, hr_error *err) {
    hr_lora *loras[MAX_ADAPTERS + 1] = {NULL};
    uint32_t vocab = hr_model_info_of(model)->config->vocab_size, longest = 0;
    hr_status status = HR_OK;
    for (uint32_t i = 0; i < the.n_adapters && status == HR_OK; i++)
        status = hr_lora_load(model, the.adapters[i], &loras[i + 1], err);
    for (uint32_t s = 0; s < the.n_seqs; s++) {
        the.seqs[s].lora = loras[the.seq_adapter[s] % (MAX_ADAPTERS + 1)];
        the.seqs[s].logits = malloc((size_t)the.seqs[s].n * vocab * sizeof(float));
        longest = the.seqs[s].n > longest ? the.seqs[s].n : longest;
    }
    uint32_t n_steps = (longest + the.chunk - 1) / the.chunk;
    uint64_t *times = calloc(n_steps + 1, sizeof *times);
    if (status == HR_OK && the.n_seqs > 0)
        status = run_sequences(model, pool, the.seqs, the.n_seqs, the.chunk, times, err);
    FILE *file = fopen(out, "wb");
    if (file == NULL)
        status = hr_fail(err, HR_ERR_IO, "%s: %s", out, strerror(errno));
    for (uint32_t s = 0; s < the.n_seqs && status == HR_OK; s++)
        if (fwrite(the.seqs[s].logits, sizeof(float) * vocab, the.seqs[s].n, file) != the.seqs[s].n)
            status = hr_fail(err, HR_ERR_IO, "%s: %s", out, strerror(errno));
    if (file != NULL && fclose(file) != 0 && status == HR_OK)
        status = hr_fail(err, HR_ERR_IO, "%s: %s", out, strerror(errno));
    qsort(times, n_steps, sizeof *times, by_value);
    if (status == HR_OK && n_steps > 0)
        fprintf(stderr, "%u steps, median %.3f ms\n", n_steps, (double)times[n_steps / 2] / 1e6);
    free(times);
    for (uint32_t i = 0; i <= the.n_adapters; i++)
        hr_lora_destroy(loras[i]);
    return status;
}

int main(int argc, char **argv) {
    the.threads = 1;
    the.chunk = 16;
    if (argc != 3)
        return usage("usage: model_tool SPEC OUT");
    int rc = read_spec(argv[1]);
    if (rc != 0)
        return rc;
    hr_error err = {0};
    hr_pool *pool = NULL;
    hr_model *model = NULL;
    hr_clock clock = hr_clock_monotonic();
    uint64_t started = hr_now_ns(&clock);
    hr_status status = hr_pool_create(the.threads, &pool, &err);
    if (status == HR_OK) {
        hr_model_options options = {
            .dir = the.model, .dtype = the.dtype, .isa = the.isa, .pool = pool};
        status = hr_model_load(&options, &model, &err);
    }
    if (status == HR_OK) {
        fprintf(stderr, "loaded in %.0f ms, %" PRIu64 " bytes, %s\n",
                (double)(hr_now_ns(&clock) - started) / 1e6, hr_model_info_of(model)->weight_bytes,
                hr_model_info_of(model)->kernels->name);
        status = run(model, pool, argv[2], &err);
    }
    if (status != HR_OK)
        fprintf(stderr, "%s: %s\n", hr_status_name(status), err.message);
    hr_model_destroy(model);
    hr_pool_destroy(pool);
    for (uint32_t s = 0; s < the.n_seqs; s++)
        free(the.seqs[s].logits);
    return status == HR_OK ? 0 : 1;
}
