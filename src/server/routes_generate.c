/* /generate: SGLang's own route. */
#include "server/generate_job.h"
#include "server/generate_reply.h"
#include "server/reply.h"

static hr_reply_options reply_options(const hr_job *j, const char *weight_version) {
    return (hr_reply_options){.text_in_logprobs = j->request.return_text_in_logprobs,
                              .weight_version = weight_version,
                              .index = -1};
}

static void answer(const hr_job *j, hr_json_writer *w) {
    hr_reply_options options = reply_options(j, "");
    if (j->request.is_list)
        hr_json_array_begin(w);
    for (size_t i = 0; i < j->request.n_items; i++)
        hr_generate_reply_write(&j->sequences[i].output, &options, w);
    if (j->request.is_list)
        hr_json_array_end(w);
}

static void event(const hr_job *j, size_t index, const hr_generate_output *output, bool first,
                  const char *weight_version, hr_json_writer *w) {
    (void)first;
    hr_reply_options options = reply_options(j, weight_version);
    options.index = j->request.is_list ? (int64_t)index : -1;
    hr_generate_reply_write(output, &options, w);
}

static void error_event(const hr_error *err, hr_buf *out) {
    hr_error_body(hr_http_status_of(err->status), err->message, out);
}

static const hr_job_style style = {
    .fail = hr_reply_failure, .answer = answer, .event = event, .error_event = error_event};

void hr_route_generate(hr_exchange *exchange, void *app) {
    hr_error err;
    size_t len = 0;
    hr_job *j = hr_job_new(app, exchange, &style);
    if (j == NULL) {
        hr_reply_error(exchange, 500, "out of memory for the request");
        return;
    }
    const char *body = hr_exchange_body(exchange, &len);
    if (hr_generate_request_parse(body, len, &j->request, &err) != HR_OK) {
        hr_reply_failure(exchange, &err);
        hr_job_free(j);
        return;
    }
    hr_job_start(j);
}
