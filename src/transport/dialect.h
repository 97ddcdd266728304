/* A dialect turns a stage into HTTP calls and reads their answers. Private to the room. */
#ifndef HR_TRANSPORT_DIALECT_H
#define HR_TRANSPORT_DIALECT_H

#include "transport/http_client.h"
#include "transport/transport.h"

#include <cjson/cJSON.h>

/* What is known of an engine. */
typedef struct hr_endpoint {
    char *url; /* without a slash at the end */
    uint64_t tp_size;
} hr_endpoint;

/* One engine's part in one attempt: calls one after the other until the dialect is done. */
typedef struct hr_step {
    const hr_endpoint *engine;
    const hr_push_adapter *registration; /* REGISTER: of this step; the request then has it alone */
    unsigned number;                     /* of calls answered so far */
    hr_status status;                    /* of the last one: HR_OK, or how the engine refused it */
    hr_error err;
    unsigned http_status;
    cJSON *reply; /* of the last call; NULL when it was not JSON */

    /* The next call, filled by the dialect: path of the URL and, for JSON, text. */
    hr_buf path, text;
    const char *content_type; /* NULL: JSON */
    hr_http_body body;        /* instead of text when its read is not NULL */
    bool once;                /* the engine cannot be asked twice */
    bool untouched;           /* what it refused has changed nothing there */
    void *body_state;         /* what body.self needs beside the request; freed with free() */
} hr_step;

typedef struct hr_dialect {
    hr_transport_traits traits;
    bool one_call_buckets; /* a bucket is one call, and the next one may begin before its answer */
    /* Says what to do next, looking at the answer before (number > 0). True: make the call that
     * stands in step. False: the stage is done with step->status and step->err. Memory that fails
     * shows in path.failed and text.failed, or as step->status with false. */
    bool (*next)(const hr_stage_request *request, hr_step *step);
} hr_dialect;

extern const hr_dialect hr_dialect_safetensors, hr_dialect_sglang, hr_dialect_sglang_load;

/* Parts that dialects share: POST of {} or of what `text` holds to path; pause, flush, continue. */
bool hr_step_post(hr_step *step, const char *path);
bool hr_step_control(const hr_stage_request *request, hr_step *step);
/* Done, refused with the given failure. */
bool hr_step_fail(hr_step *step, hr_status status, const char *message);

#endif
