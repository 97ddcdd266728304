/* Answers of engines: any status and any bytes become a status and words, and what claims to be a
 * receipt is read within its bounds. The first byte chooses the HTTP status. */
#include "transport/engine_receipt.h"
#include "transport/reply.h"

#include "format/json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const unsigned statuses[] = {200, 400, 404, 413, 500, 503, 504, 99};
    if (size == 0)
        return 0;
    cJSON *tree = NULL;
    hr_error err;
    hr_engine_receipt receipt;
    unsigned http_status = statuses[data[0] % (sizeof statuses / sizeof statuses[0])];
    hr_status status = hr_reply_read(http_status, (const char *)data + 1, size - 1, &tree, &err);
    if (http_status != 200 && status == HR_OK)
        abort();
    const cJSON *object = hr_json_get_present(tree, "receipt");
    if (object != NULL && hr_engine_receipt_read(object, &receipt, &err) == HR_OK) {
        if (memchr(receipt.session_id, '\0', sizeof receipt.session_id) == NULL ||
            receipt.json == NULL)
            abort();
        hr_engine_receipt_clear(&receipt);
    }
    cJSON_Delete(tree);
    return 0;
}
