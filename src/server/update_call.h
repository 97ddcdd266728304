/* A call of the update and session routes: arguments from the body or the query string, worked off
 * on a thread of the update pool because it decodes, copies and waits, answered in one of the
 * shapes that SGLang's clients read. A failure is always an HTTP error, and its body says
 * success: false as well. */
#ifndef HR_SERVER_UPDATE_CALL_H
#define HR_SERVER_UPDATE_CALL_H

#include "format/json_writer.h"
#include "server/app.h"

#include <cjson/cJSON.h>
#include <headrace/receiver.h>

typedef struct hr_update_call hr_update_call;

typedef enum hr_update_shape {
    HR_UPDATE_MESSAGE,  /* {"success", "message", ...} */
    HR_UPDATE_ADAPTERS, /* {"success", "error_message", "loaded_adapters", ...} */
    HR_UPDATE_PLAIN     /* what run wrote, as it is; a failure is {"error": {"message"}} */
} hr_update_shape;

typedef struct hr_update_route {
    const char *const *keys; /* of the arguments, NULL at the end */
    hr_update_shape shape;
    bool reads;   /* takes no turn of the receiver: not behind updates that wait for theirs */
    bool pickles; /* the arguments may hold pickles, which have counts of shared memory */
    bool image;   /* the body is a safetensors image, the arguments stand in the query string */
    /* On a worker thread. Members of its own go to call->w; on failure they are dropped. */
    hr_status (*run)(hr_update_call *call, hr_error *err);
} hr_update_route;

struct hr_update_call {
    const hr_update_route *route;
    hr_server *server;
    hr_exchange *exchange;
    hr_body body; /* until it is parsed; an image's stays until run takes it */
    cJSON *args;  /* those of the query string; in run: all of them, checked for unknown keys */

    /* What run says of a success. */
    char message[512];   /* "" = "Success" */
    hr_receipt *receipt; /* NULL: none */
    hr_buf members;      /* an object that w writes into, without its end */
    hr_json_writer w;

    unsigned http_status;
    hr_buf reply;
};

/* In a handler: reads what there is of the exchange and has run called. */
void hr_update_call_start(hr_server *server, hr_exchange *exchange, const hr_update_route *route);

/* The object of all adapters that are loaded, {name: path}. */
void hr_write_loaded_adapters(hr_engine *engine, hr_json_writer *w);

/* {"state", "session_id", ..., "milliseconds"}: a receipt as an object. */
void hr_write_receipt(const hr_receipt *receipt, hr_json_writer *w);

#endif
