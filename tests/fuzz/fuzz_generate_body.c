/* Any bytes as the body of /generate and of /v1/completions: parsed or refused, and what is parsed
 * keeps its promises. Stop expressions, which come from outside too, run over a text. */
#include "server/completions_request.h"
#include "server/generate_request.h"
#include "text/stop.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void run_stops(const hr_generate_item *item) {
    static const char text[] = "Once upon a time\n\nHuman: \xc3\xa9t\xc3\xa9, aaaaaaaaaaaa 12345";
    hr_stop *stop = NULL;
    hr_buf out = {0};
    int matched = -1;
    if (hr_stop_create(item->stops, item->n_stops, &stop, NULL) != HR_OK)
        return;
    if (hr_stop_add_regexes(stop, item->stop_regexes, item->n_stop_regexes, NULL) == HR_OK) {
        hr_status status = hr_stop_push(stop, text, 20, false, &out, &matched, NULL);
        if (status == HR_OK && matched < 0)
            status = hr_stop_push(stop, text + 20, sizeof text - 21, false, &out, &matched, NULL);
        if (status == HR_OK && matched < 0)
            status = hr_stop_flush(stop, &out, NULL);
        if (status == HR_OK && (out.len > sizeof text - 1 || memcmp(text, out.data, out.len) != 0))
            abort();
    }
    hr_buf_free(&out);
    hr_stop_free(stop);
}

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
    if (item->n_stops + item->n_stop_regexes > 0)
        run_stops(item);
}

static void check(hr_status status, hr_generate_request *request, const hr_error *err) {
    if (status != HR_OK) {
        if (err->status == HR_OK || err->message[0] == '\0')
            abort();
        return;
    }
    if (request->n_items == 0 || request->n_items != request->n_prompts * request->n_samples)
        abort();
    for (size_t i = 0; i < request->n_items && i < 16; i++)
        check_item(&request->items[i]);
    hr_generate_request_free(request);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hr_generate_request request;
    hr_completion completion;
    hr_error err = {.status = HR_OK};
    /* an exact copy, so that a read past the end is seen */
    char *body = malloc(size > 0 ? size : 1);
    if (body == NULL)
        return 0;
    if (size > 0)
        memcpy(body, data, size);
    check(hr_generate_request_parse(body, size, &request, &err), &request, &err);
    err.status = HR_OK;
    check(hr_completions_request_parse(body, size, &request, &completion, &err), &request, &err);
    free(body);
    return 0;
}
