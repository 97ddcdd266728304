/* Any bytes as the body of /generate: parsed or refused, and what is parsed keeps its promises. */
#include "server/generate_request.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_item(const hr_generate_item *item) {
    if ((item->text == NULL) != (item->n_input_ids > 0) || item->rid == NULL ||
        item->rid[0] == '\0')
        abort();
    const hr_sampling_params *s = &item->sampling;
    if (!(s->temperature >= 0) || !(s->top_p > 0 && s->top_p <= 1) ||
        !(s->min_p >= 0 && s->min_p <= 1) || s->top_k == 0 || s->top_k < -1 ||
        s->min_new_tokens > s->max_new_tokens || !(s->repetition_penalty > 0))
        abort();
    for (size_t i = 0; i < item->n_stops; i++) {
        if (strlen(item->stops[i]) == 0)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hr_generate_request request;
    hr_error err = {.status = HR_OK};
    /* an exact copy, so that a read past the end is seen */
    char *body = malloc(size > 0 ? size : 1);
    if (body == NULL)
        return 0;
    if (size > 0)
        memcpy(body, data, size);
    if (hr_generate_request_parse(body, size, &request, &err) == HR_OK) {
        if (request.n_items == 0 || request.n_items != request.n_prompts * request.n_samples)
            abort();
        for (size_t i = 0; i < request.n_items; i++)
            check_item(&request.items[i]);
        hr_generate_request_free(&request);
    } else if (err.status == HR_OK || err.message[0] == '\0') {
        abort();
    }
    free(body);
    return 0;
}
