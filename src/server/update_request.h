/* What the update and session routes are asked, read from their arguments into what a receiver
 * takes. Strings belong to the arguments unless said otherwise. */
#ifndef HR_SERVER_UPDATE_REQUEST_H
#define HR_SERVER_UPDATE_REQUEST_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <headrace/receiver.h>

/* Registrations. */
typedef struct hr_update_registration {
    hr_registration registration;
    char *config; /* owned: its config as text */
} hr_update_registration;

/* lora_name, config_dict, config_digest, pinned, lora_path, defer_publish; added_tokens_config must
 * not add tokens to a vocabulary of vocab_size. config_required: without config_dict it is refused,
 * else registration.config is NULL then. Freed also after a failure. */
hr_status hr_update_registration_read(const cJSON *args, uint32_t vocab_size, bool config_required,
                                      hr_update_registration *out, hr_error *err);
void hr_update_registration_free(hr_update_registration *registration);

/* What must have come. manifest is NULL when nothing was said. */
typedef struct hr_update_manifest {
    hr_manifest *manifest; /* owned with all that follows */
    hr_manifest_entry *entries;
    char **names; /* those that were put together, n_names of them */
    size_t n_names;
} hr_update_manifest;

/* Keys "manifest" ({name: {xxh3, sha256}}, {name: hex of either}, or a list of names),
 * "covers_base" and "expected_lora_checksums" ({adapter: {name: sha256}}); of the two forms only
 * one. Freed also after a failure. */
hr_status hr_update_manifest_read(const cJSON *args, hr_update_manifest *out, hr_error *err);
/* Key "expected_checksums" ({name: sha256}) of one adapter. */
hr_status hr_update_manifest_read_adapter(const cJSON *args, const char *lora_name,
                                          hr_update_manifest *out, hr_error *err);
void hr_update_manifest_free(hr_update_manifest *manifest);

/* Of a bucket, or of the end of a session. */
typedef struct hr_update_options {
    const char *session_id, *stream, *weight_version;
    uint64_t index, timeout_ms;
    bool flush_cache, abort_all_requests;
    bool complete_base, audit;
} hr_update_options;

/* Keys of the same names (timeout_seconds); selector is checked. */
hr_status hr_update_options_read(const cJSON *args, bool flush_cache_default,
                                 hr_update_options *out, hr_error *err);

/* Beginning a session. */
typedef struct hr_update_begin {
    hr_session_options session;
    const char **adapters; /* owned */
} hr_update_begin;

/* selector, sync_base, session_id, lease_seconds, timeout_seconds, audit, and the declared adapters
 * as "adapters" or "new_lora_names". Freed also after a failure. */
hr_status hr_update_begin_read(const cJSON *args, hr_update_begin *out, hr_error *err);
void hr_update_begin_free(hr_update_begin *begin);

/* Which way tensors are laid out in a payload: null, "direct" and "flattened_bucket". */
hr_status hr_update_load_format_read(const cJSON *args, bool *flattened, hr_error *err);

#endif
