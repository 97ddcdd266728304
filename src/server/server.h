/* The rollout server: SGLang's HTTP API over one engine. */
#ifndef HR_SERVER_SERVER_H
#define HR_SERVER_SERVER_H

#include "base/error.h"
#include "text/tokenizer.h"

#include <headrace/engine.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct hr_server hr_server;

typedef struct hr_server_options {
    hr_engine *engine;             /* must outlive the server */
    const hr_tokenizer *tokenizer; /* likewise; NULL: token ids only */
    const char *served_model_name; /* strings likewise */
    const char *tokenizer_path;
    bool has_random_seed; /* requests without a seed get seeds that follow from random_seed and
                             their order */
    uint64_t random_seed;
} hr_server_options;

/* Serves on a socket of hr_http_bind, which it takes over on success. */
hr_status hr_server_start(const hr_server_options *options, int fd, hr_server **out, hr_error *err);

/* Accepts no more connections, drains the engine for at most drain_ms, sees the answers out and
 * frees. NULL is allowed. */
void hr_server_stop(hr_server *server, uint64_t drain_ms);

#endif
