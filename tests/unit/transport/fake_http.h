/* An HTTP server of a test: one thread for each connection, answers by a script, counts what came.
 */
#ifndef HR_TEST_FAKE_HTTP_H
#define HR_TEST_FAKE_HTTP_H

#include "base/buf.h"

#include <pthread.h>
#include <stdatomic.h>

typedef enum fake_way {
    FAKE_ANSWER,       /* reads the whole body, answers */
    FAKE_CLOSE_AFTER,  /* the same, then closes without having said so */
    FAKE_SILENT,       /* reads and never answers */
    FAKE_DROP,         /* reads the whole body, closes without an answer */
    FAKE_CUT_REPLY,    /* promises more bytes than it sends */
    FAKE_REFUSE_EARLY, /* answers 400 before the body has come, then closes */
    FAKE_ENDLESS       /* sends a reply without end */
} fake_way;

typedef struct fake_http {
    int listener;
    unsigned port;
    char url[64];
    pthread_t thread;
    pthread_t connections[64];
    atomic_uint n_connections, requests;
    atomic_int way;
    atomic_bool stopping;
    pthread_mutex_t lock;
    hr_buf head, body; /* of the last request */
    bool keep_body;    /* else only counted */
    atomic_ullong body_bytes;
    const char *reply; /* of FAKE_ANSWER; NULL: {"success": true} */
    unsigned status;   /* 0: 200 */
} fake_http;

void fake_http_start(fake_http *fake);
void fake_http_stop(fake_http *fake);

#endif
