/* The sampling_params object of /generate: one table of keys, defaults and ranges. */
#ifndef HR_SERVER_GENERATE_SAMPLING_H
#define HR_SERVER_GENERATE_SAMPLING_H

#include "format/json.h"
#include "server/generate_memory.h"
#include "server/generate_request.h"

/* Fills the sampling, stop and text fields of item and *n_samples from params (NULL or JSON null:
 * the defaults). what names the object in messages: "sampling_params" or "sampling_params[2]".
 * Arrays live in memory. */
hr_status hr_generate_sampling_parse(const cJSON *params, const char *what,
                                     struct hr_generate_memory *memory, hr_generate_item *item,
                                     size_t *n_samples, hr_error *err);

/* A list of token ids, as *ids and *n in memory; an empty list is n 0. */
hr_status hr_generate_ids_parse(const cJSON *list, const char *what,
                                struct hr_generate_memory *memory, const uint32_t **ids, size_t *n,
                                hr_error *err);

#endif
