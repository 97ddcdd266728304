/* The JSON of /generate answers. */
#include "server/generate_reply.h"

typedef struct writing {
    hr_json_writer *w;
    const hr_generate_output *out;
    bool text;
    hr_buf token_text; /* working memory */
} writing;

static void write_triple(writing *x, bool has_logprob, float logprob, uint32_t token) {
    hr_json_array_begin(x->w);
    if (has_logprob)
        hr_json_write_f32(x->w, logprob);
    else
        hr_json_write_null(x->w);
    hr_json_write_u64(x->w, token);
    hr_buf_clear(&x->token_text);
    if (x->text && hr_tokenizer_token_text(x->out->tokenizer, token, &x->token_text, NULL) == HR_OK)
        hr_json_write_string_n(x->w, x->token_text.data != NULL ? x->token_text.data : "",
                               x->token_text.len);
    else
        hr_json_write_null(x->w);
    hr_json_array_end(x->w);
}

static void write_logprobs(writing *x, const char *key, const hr_position_list *list) {
    hr_json_key(x->w, key);
    hr_json_array_begin(x->w);
    for (size_t i = 0; i < list->n; i++)
        write_triple(x, list->positions[i].has_logprob, list->positions[i].logprob,
                     list->positions[i].token);
    hr_json_array_end(x->w);
}

static void write_top(writing *x, const char *key, const hr_position_list *list) {
    hr_json_key(x->w, key);
    hr_json_array_begin(x->w);
    for (size_t i = 0; i < list->n; i++) {
        const hr_position *p = &list->positions[i];
        if (!p->has_logprob) {
            hr_json_write_null(x->w);
            continue;
        }
        hr_json_array_begin(x->w);
        for (size_t t = p->top_at; t < p->top_at + p->n_top; t++)
            write_triple(x, true, list->top_logprobs[t], list->top_ids[t]);
        hr_json_array_end(x->w);
    }
    hr_json_array_end(x->w);
}

static void write_ids(writing *x, const char *key, const hr_position_list *list) {
    hr_json_key(x->w, key);
    hr_json_array_begin(x->w);
    for (size_t i = 0; i < list->n; i++) {
        const hr_position *p = &list->positions[i];
        if (!p->has_logprob) {
            hr_json_write_null(x->w);
            continue;
        }
        hr_json_array_begin(x->w);
        for (size_t t = 0; t < p->n_ids; t++)
            write_triple(x, true, list->ids_logprobs[p->ids_at + t],
                         x->out->item->token_ids_logprob[t]);
        hr_json_array_end(x->w);
    }
    hr_json_array_end(x->w);
}

static void write_stop(hr_json_writer *w, const hr_generate_output *out) {
    hr_json_put_string(w, "type", "stop");
    hr_json_key(w, "matched");
    if (out->finish.type == HR_FINISH_STOP_TOKEN)
        hr_json_write_u64(w, out->finish.matched_token);
    else if (hr_generate_output_matched(out) != NULL)
        hr_json_write_string(w, hr_generate_output_matched(out));
    else
        hr_json_write_null(w);
}

static void write_abort(hr_json_writer *w, const hr_generate_output *out) {
    bool stopping = out->finish.status == HR_ERR_STOPPING;
    hr_json_put_string(w, "type", "abort");
    hr_json_put_string(w, "message", out->message[0] != '\0' ? out->message : "Aborted");
    hr_json_key(w, "status_code");
    if (stopping)
        hr_json_write_u64(w, 503);
    else
        hr_json_write_null(w);
    hr_json_put_null(w, "err_type");
}

static void write_finish_reason(hr_json_writer *w, const hr_generate_output *out) {
    hr_json_key(w, "finish_reason");
    if (!out->finished) {
        hr_json_write_null(w);
        return;
    }
    hr_json_object_begin(w);
    switch (out->finish.type) {
    case HR_FINISH_LENGTH:
        hr_json_put_string(w, "type", "length");
        hr_json_put_u64(w, "length", out->finish.completion_tokens);
        break;
    case HR_FINISH_STOP_TOKEN:
    case HR_FINISH_STOP_CALLER:
        write_stop(w, out);
        break;
    case HR_FINISH_ABORT:
    case HR_FINISH_ERROR:
        write_abort(w, out);
        break;
    }
    hr_json_object_end(w);
}

static void write_all_logprobs(writing *x) {
    const hr_generate_item *item = x->out->item;
    write_logprobs(x, "input_token_logprobs", &x->out->prompt);
    write_logprobs(x, "output_token_logprobs", &x->out->tokens);
    if (item->top_logprobs_num > 0) {
        write_top(x, "input_top_logprobs", &x->out->prompt);
        write_top(x, "output_top_logprobs", &x->out->tokens);
    }
    if (item->n_token_ids_logprob > 0) {
        write_ids(x, "input_token_ids_logprobs", &x->out->prompt);
        write_ids(x, "output_token_ids_logprobs", &x->out->tokens);
    }
}

void hr_generate_reply_spans(const hr_generate_output *out, hr_json_writer *w) {
    hr_json_array_begin(w);
    for (size_t i = 0; i < out->n_spans; i++) {
        hr_json_object_begin(w);
        hr_json_put_string(w, "version", out->spans[i].version);
        hr_json_put_u64(w, "start", out->spans[i].start);
        hr_json_put_u64(w, "end", out->spans[i].end);
        hr_json_object_end(w);
    }
    hr_json_array_end(w);
}

/* Which adapter serves, and, once it is certain, which version of it did. */
static void write_adapter(const hr_generate_output *out, hr_json_writer *w) {
    static const char *const keys[] = {"lora_path", "lora_name"};
    for (int i = 0; i < 2; i++) {
        hr_json_key(w, keys[i]);
        if (out->item->lora_name != NULL)
            hr_json_write_string(w, out->item->lora_name);
        else
            hr_json_write_null(w);
    }
    if (out->finished && out->finish.adapter_id != 0)
        hr_json_put_u64(w, "lora_id", out->finish.adapter_id);
    else
        hr_json_put_null(w, "lora_id");
    if (out->finished && out->finish.adapter_version != NULL)
        hr_json_put_string(w, "lora_version", out->finish.adapter_version);
    else
        hr_json_put_null(w, "lora_version");
}

static void write_meta(writing *x, const hr_reply_options *options) {
    hr_json_writer *w = x->w;
    const hr_generate_output *out = x->out;
    hr_json_key(w, "meta_info");
    hr_json_object_begin(w);
    hr_json_put_string(w, "id", out->item->rid);
    write_finish_reason(w, out);
    hr_json_put_u64(w, "prompt_tokens", out->item->n_input_ids);
    hr_json_put_string(w, "weight_version",
                       out->finished ? out->weight_version : options->weight_version);
    hr_json_put_u64(w, "num_retractions", out->finish.retractions);
    if (out->item->return_logprob)
        write_all_logprobs(x);
    hr_json_put_u64(w, "completion_tokens", out->before.tokens + out->tokens.n);
    hr_json_put_u64(w, "cached_tokens", out->finish.cached_tokens);
    hr_json_put_u64(w, "reasoning_tokens", 0);
    write_adapter(out, w);
    if (out->finished) {
        hr_json_key(w, "weight_versions");
        hr_generate_reply_spans(out, w);
        hr_json_key(w, "e2e_latency");
        hr_json_write_f32(w, (float)((double)out->finish.e2e_ns * 1e-9));
    }
    hr_json_object_end(w);
}

void hr_generate_reply_write(const hr_generate_output *output, const hr_reply_options *options,
                             hr_json_writer *w) {
    writing x = {
        .w = w, .out = output, .text = options->text_in_logprobs && output->tokenizer != NULL};
    hr_json_object_begin(w);
    if (output->tokenizer != NULL) {
        hr_json_key(w, "text");
        hr_json_write_string_n(w, output->text.data != NULL ? output->text.data : "",
                               output->text.len);
    }
    hr_json_key(w, "output_ids");
    hr_json_array_begin(w);
    for (size_t i = 0; i < output->tokens.n; i++)
        hr_json_write_u64(w, output->tokens.positions[i].token);
    hr_json_array_end(w);
    write_meta(&x, options);
    if (options->index >= 0)
        hr_json_put_i64(w, "index", options->index);
    hr_json_object_end(w);
    hr_buf_free(&x.token_text);
}
