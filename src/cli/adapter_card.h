/* What the adapter_config.json of a PEFT directory says, for a person: rank, scale, modules, and
 * whether it can be served. */
#ifndef HR_CLI_ADAPTER_CARD_H
#define HR_CLI_ADAPTER_CARD_H

#include "base/error.h"
#include "format/json_writer.h"

#include <cjson/cJSON.h>

typedef struct hr_adapter_card {
    cJSON *config;
    hr_error refusal; /* HR_OK: its settings are served; what the tensors are is not looked at */
} hr_adapter_card;

/* Reads dir/adapter_config.json. What is JSON but would be refused by an engine is no failure.
 * ERR_NOT_FOUND, ERR_INVALID, ERR_LIMIT, ERR_IO. The caller frees *out with hr_adapter_card_free.
 */
hr_status hr_adapter_card_read(const char *dir, hr_adapter_card *out, hr_error *err);
void hr_adapter_card_free(hr_adapter_card *card);

/* As lines on stdout. */
void hr_adapter_card_print(const hr_adapter_card *card);

/* As an object under "adapter" in the object that w has open. */
void hr_adapter_card_write(const hr_adapter_card *card, hr_json_writer *w);

#endif
