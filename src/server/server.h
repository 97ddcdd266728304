/* The rollout server: SGLang's HTTP API over one engine. */
#ifndef HR_SERVER_SERVER_H
#define HR_SERVER_SERVER_H

#include "base/error.h"
#include "format/json_writer.h"
#include "server/router.h"
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
    bool incremental_output;  /* events of /generate show what is new, not all there is */
    uint32_t stream_interval; /* tokens between two events, at least 1 */
    hr_auth_keys keys;
    /* Writes the flags of the server as keys and values, for /server_info; NULL: none. Any thread.
     */
    void (*write_args)(void *ctx, hr_json_writer *w);
    void *write_args_ctx;
} hr_server_options;

/* Every route there is. */
const hr_route *hr_server_routes(size_t *n);

/* Serves on a socket of hr_http_bind, which it takes over on success. */
hr_status hr_server_start(const hr_server_options *options, int fd, hr_server **out, hr_error *err);

/* Accepts no more connections, drains the engine for at most drain_ms, sees the answers out and
 * frees. NULL is allowed. */
void hr_server_stop(hr_server *server, uint64_t drain_ms);

#endif
