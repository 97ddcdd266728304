/* The transport to engines that are reached by HTTP: safetensors images to Headrace, pickled
 * payloads to SGLang. */
#ifndef HR_TRANSPORT_HTTP_TRANSPORT_H
#define HR_TRANSPORT_HTTP_TRANSPORT_H

#include "transport/http_client.h"
#include "transport/transport.h"

/* Whether name is "auto", "safetensors", "sglang" or "sglang-load". */
bool hr_http_transport_known(const char *name);

/* Asks every engine for GET /server_info, and where the name is "auto" chooses the first form that
 * all of them speak. The client stays the caller's. urls come from hr_http_base_url. ERR_PEER,
 * ERR_TIMEOUT, ERR_UNSUPPORTED name the engine. The caller ends *out with its close. */
hr_status hr_http_transport_open(hr_http_client *client, const char *const *urls, size_t n,
                                 const char *name, uint64_t timeout_ms, hr_transport *out,
                                 hr_error *err);

#endif
