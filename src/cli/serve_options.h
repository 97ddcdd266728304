/* The flags of `headrace serve`, under SGLang's names: one table says how each is written, what it
 * takes, what it does and its default; parsing, `--help` and the tests all read that table. */
#ifndef HR_CLI_SERVE_OPTIONS_H
#define HR_CLI_SERVE_OPTIONS_H

#include "base/buf.h"
#include "base/error.h"
#include "format/json_writer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct hr_lora_spec {
    char *name, *path;
    bool pinned;
} hr_lora_spec;

/* Strings belong to argv unless said otherwise. */
typedef struct hr_serve_options {
    bool help;
    const char *model_path, *tokenizer_path, *served_model_name, *dtype, *host, *log_level,
        *weight_version, *api_key, *admin_api_key;
    uint64_t port, context_length, max_running_requests, max_queued_requests, chunked_prefill_size;
    uint64_t max_total_tokens, threads, random_seed, drain_timeout;
    uint64_t max_loras_per_batch, max_loaded_loras, max_lora_rank, stream_interval;
    double mem_fraction_static;
    bool enable_lora, skip_tokenizer_init, has_random_seed, incremental_streaming_output,
        disable_radix_cache;
    const char **lora_target_modules;
    size_t n_lora_target_modules;
    const char **lora_items; /* --lora-paths as given */
    size_t n_lora_items;
    hr_lora_spec *loras;  /* and as understood; owned */
    const char **ignored; /* flags that have no effect here, each once */
    size_t n_ignored;
} hr_serve_options;

/* Reads the arguments after "serve". Refusals are ERR_INVALID and name the flag. The caller frees
 * *out with hr_serve_options_free, also when help was asked for. */
hr_status hr_serve_options_parse(int argc, char **argv, hr_serve_options *out, hr_error *err);
void hr_serve_options_free(hr_serve_options *options);

/* One item of --lora-paths: PATH (which is then the name too), NAME=PATH, or a JSON object with
 * lora_name, lora_path and pinned. The strings in *out are the caller's to free. */
hr_status hr_lora_spec_parse(const char *item, hr_lora_spec *out, hr_error *err);

void hr_serve_options_help(FILE *out);

/* Every flag as a key and its value, flat, under the names that clients of SGLang look for; keys of
 * access are left out. Into the object that w has open. */
void hr_serve_options_write(const hr_serve_options *options, hr_json_writer *w);

#endif
