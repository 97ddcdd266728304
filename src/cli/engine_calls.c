/* Calls of commands to several engines at once. */
#include "cli/engine_calls.h"

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

hr_status hr_engine_urls_check(const char *const *urls, size_t n, hr_error *err) {
    if (n == 0)
        return hr_fail(err, HR_ERR_INVALID, "--engine is missing: which engine?");
    for (size_t i = 0; i < n; i++) {
        char *url = NULL;
        HR_TRY(hr_http_base_url(urls[i], &url, err));
        free(url);
    }
    return HR_OK;
}

hr_status hr_engine_call_fail(const hr_engine_call *call, hr_error *err) {
    if (call->http_status == 0 && call->status == HR_ERR_PEER)
        return hr_fail(err, call->status,
                       "engine %s is not reachable: %.800s; is `headrace serve` running there?",
                       call->url, call->err.message);
    return hr_fail(err, call->status, "engine %s: %.900s", call->url, call->err.message);
}

static void read_reply(const hr_http_call *http, hr_engine_call *call) {
    call->status = http->status;
    call->err = http->err;
    call->http_status = http->http_status;
    if (http->status == HR_OK)
        call->status = hr_reply_of_call(http, &call->reply, &call->err);
}

static hr_status fill(const hr_engine_ask *ask, const char *url, const char *path, char **text,
                      hr_http_call *http, hr_engine_call *call, hr_error *err) {
    HR_TRY(hr_http_base_url(url, &call->url, err));
    if (asprintf(text, "%s%s", call->url, path) < 0) {
        *text = NULL;
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a URL");
    }
    *http = (hr_http_call){.method = ask->method,
                           .url = *text,
                           .text = ask->body,
                           .text_len = ask->body != NULL ? strlen(ask->body) : 0};
    return HR_OK;
}

hr_status hr_engine_calls(const char *const *urls, size_t n, const hr_engine_ask *ask,
                          hr_engine_call **calls, hr_error *err) {
    hr_http_client *client = NULL;
    hr_http_client_options options = {.api_key = ask->api_key};
    size_t all = n * ask->n_paths;
    hr_engine_call *made = calloc(all + 1, sizeof *made);
    hr_http_call *http = calloc(all + 1, sizeof *http);
    char **texts = calloc(all + 1, sizeof *texts);
    hr_status status = HR_OK;
    if (made == NULL || http == NULL || texts == NULL) {
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu engines", n);
        goto out;
    }
    for (size_t i = 0; i < all && status == HR_OK; i++)
        status = fill(ask, urls[i % n], ask->paths[i / n], &texts[i], &http[i], &made[i], err);
    if (status == HR_OK)
        status = hr_http_client_create(&options, &client, err);
    if (status != HR_OK)
        goto out;
    hr_http_client_run(client, http, all, ask->timeout_ms, NULL);
    for (size_t i = 0; i < all; i++)
        read_reply(&http[i], &made[i]);
    *calls = made;
    made = NULL;
out:
    for (size_t i = 0; i < all; i++) {
        if (http != NULL)
            hr_buf_free(&http[i].reply);
        if (texts != NULL)
            free(texts[i]);
    }
    free(http);
    free(texts);
    hr_http_client_destroy(client);
    hr_engine_calls_free(made, all);
    return status;
}
