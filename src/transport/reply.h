/* An engine's answer to a call of the update routes, as a status and a message. */
#ifndef HR_TRANSPORT_REPLY_H
#define HR_TRANSPORT_REPLY_H

#include "base/error.h"
#include "transport/http_client.h"

#include <cjson/cJSON.h>
#include <stddef.h>

/* HR_OK: the engine did what was asked; else the status that the reply names or that its HTTP
 * status stands for, with the engine's own words. Bodies in any form are taken: {"success",
 * "message" or "error_message", "status"}, {"error": {"message"}}, {"detail"}, plain text. An
 * object that was cut short is no answer: ERR_PEER with *tree NULL, which nothing else is. *tree
 * gets the reply as JSON, which the caller frees, or NULL when it is none. Thread-safe. */
hr_status hr_reply_read(unsigned http_status, const char *text, size_t len, cJSON **tree,
                        hr_error *err);

/* The same of a call that has its answer (status HR_OK). Where the engine wants a key the message
 * tells one that was not sent from one that is not the engine's. */
hr_status hr_reply_of_call(const hr_http_call *call, cJSON **tree, hr_error *err);

/* The status of a name ("ERR_DIGEST"); fallback when there is none. */
hr_status hr_status_from_name(const char *name, hr_status fallback);

#endif
