/* Calls of commands to several engines at once. */
#include "cli/engine_calls.h"

#include "base/clock.h"
#include "transport/http_client.h"
#include "transport/reply.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void hr_engine_calls_free(hr_engine_call *calls, size_t n) {
    for (size_t i = 0; calls != NULL && i < n; i++) {
        free(calls[i].url);
        cJSON_Delete(calls[i].reply);
    }
    free(calls);
}

static void read_reply(const hr_http_call *http, hr_engine_call *call) {
    call->status = http->status;
    call->err = http->err;
    if (http->status == HR_OK)
        call->status = hr_reply_read(http->http_status, http->reply.data, http->reply.len,
                                     &call->reply, &call->err);
}

static hr_status run(hr_http_client *client, hr_engine_call *calls, hr_http_call *http,
                     char **texts, const char *const *urls, size_t n, const char *method,
                     const char *path, const char *body, uint64_t timeout_ms, hr_error *err) {
    hr_clock clock = hr_clock_monotonic();
    for (size_t i = 0; i < n; i++) {
        HR_TRY(hr_http_base_url(urls[i], &calls[i].url, err));
        if (asprintf(&texts[i], "%s%s", calls[i].url, path) < 0) {
            texts[i] = NULL;
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a URL");
        }
        http[i] = (hr_http_call){.method = method,
                                 .url = texts[i],
                                 .text = body,
                                 .text_len = body != NULL ? strlen(body) : 0};
    }
    uint64_t start = hr_now_ns(&clock);
    hr_http_client_run(client, http, n, timeout_ms, NULL);
    for (size_t i = 0; i < n; i++) {
        read_reply(&http[i], &calls[i]);
        calls[i].ns = hr_now_ns(&clock) - start;
    }
    return HR_OK;
}

hr_status hr_engine_calls(const char *const *urls, size_t n, const char *api_key,
                          const char *method, const char *path, const char *body,
                          uint64_t timeout_ms, hr_engine_call **calls, hr_error *err) {
    hr_http_client *client = NULL;
    hr_http_client_options options = {.api_key = api_key};
    hr_engine_call *made = calloc(n + 1, sizeof *made);
    hr_http_call *http = calloc(n + 1, sizeof *http);
    char **texts = calloc(n + 1, sizeof *texts);
    hr_status status = HR_OK;
    if (made == NULL || http == NULL || texts == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
    if (status == HR_OK)
        status = hr_http_client_create(&options, &client, err);
    if (status == HR_OK)
        status = run(client, made, http, texts, urls, n, method, path, body, timeout_ms, err);
    for (size_t i = 0; i < n; i++) {
        if (http != NULL)
            hr_buf_free(&http[i].reply);
        if (texts != NULL)
            free(texts[i]);
    }
    free(http);
    free(texts);
    hr_http_client_destroy(client);
    if (status == HR_OK)
        *calls = made;
    else
        hr_engine_calls_free(made, n);
    return status;
}
