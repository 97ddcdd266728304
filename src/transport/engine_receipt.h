/* What an engine says about a session, read from its reply. */
#ifndef HR_TRANSPORT_ENGINE_RECEIPT_H
#define HR_TRANSPORT_ENGINE_RECEIPT_H

#include "base/error.h"
#include "tensor/digest.h"

#include <headrace/receiver.h>

#include <cjson/cJSON.h>

typedef struct hr_engine_adapter {
    char name[HR_LORA_NAME_SIZE];
    uint8_t config_digest[HR_XXH3_SIZE];
} hr_engine_adapter;

typedef struct hr_engine_receipt {
    hr_session_state state;
    char session_id[HR_SESSION_ID_SIZE];
    char instance[65];
    char weight_version[HR_WEIGHT_VERSION_SIZE];
    char base_mode[16];
    uint64_t ranks, tensors, bytes;
    bool has_xxh3;
    uint8_t xxh3[HR_XXH3_SIZE];
    uint64_t receive_ns, verify_ns, build_ns, publish_ns;
    hr_engine_adapter *adapters; /* those of which it says a config's digest */
    size_t n_adapters;
    char *json; /* as it came */
} hr_engine_receipt;

/* Reads a receipt object; unknown keys are left alone. ERR_INVALID names the key, ERR_NO_MEMORY. */
hr_status hr_engine_receipt_read(const cJSON *object, hr_engine_receipt *out, hr_error *err);
void hr_engine_receipt_clear(hr_engine_receipt *receipt); /* back to zero */

/* "rolled_back" and so on; false when it is none of them. */
bool hr_session_state_from_name(const char *name, hr_session_state *out);

#endif
