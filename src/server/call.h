/* A management call: read on an I/O thread, done on a worker thread because it reads files or
 * waits, answered on the I/O thread. */
#ifndef HR_SERVER_CALL_H
#define HR_SERVER_CALL_H

#include "server/app.h"

#include <cjson/cJSON.h>

typedef struct hr_call hr_call;

struct hr_call {
    hr_server *server;
    hr_exchange *exchange;
    cJSON *body;             /* an object; strings below may point into it */
    void (*run)(hr_call *c); /* on a worker thread: sets status, and err when it failed */
    void (*answer)(hr_exchange *exchange, hr_call *c);
    hr_status status;
    hr_error err;

    /* arguments, of whoever uses them */
    const char *name, *path;
    bool pinned;
    hr_pause_mode mode;
    uint64_t timeout_ms;
};

/* Reads the body of the exchange, which may be empty and must else be a JSON object. On failure the
 * exchange has been answered and NULL comes back. */
hr_call *hr_call_new(hr_server *server, hr_exchange *exchange);
void hr_call_free(hr_call *call);

/* Has run called on worker, then answer; takes the call over. When the worker refuses, answer is
 * called with that status. */
void hr_call_start(hr_call *call, hr_worker *worker);

#endif
