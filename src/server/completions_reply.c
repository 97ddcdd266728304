/* The JSON of /v1/completions. */
#include "server/completions_reply.h"

#include "server/generate_reply.h"

#include <string.h>

typedef struct writing {
    const hr_job *job;
    const hr_generate_output *out;
    hr_json_writer *w;
    hr_buf text;   /* working memory */
    hr_buf labels; /* of one top_logprobs object: its keys so far, each with its NUL */
} writing;

static const char *text_of(writing *x, uint32_t token) {
    hr_buf_clear(&x->text);
    if (hr_tokenizer_token_text(x->out->tokenizer, token, &x->text, NULL) != HR_OK ||
        x->text.data == NULL)
        return "";
    return x->text.data;
}

/* ---- logprobs ---- */

typedef struct parts {
    const hr_position_list *lists[2]; /* prompt (echo), then output */
} parts;

static void write_tokens(writing *x, const parts *p) {
    hr_json_key(x->w, "tokens");
    hr_json_array_begin(x->w);
    for (size_t l = 0; l < 2; l++) {
        for (size_t i = 0; i < p->lists[l]->n; i++)
            hr_json_write_string(x->w, text_of(x, p->lists[l]->positions[i].token));
    }
    hr_json_array_end(x->w);
}

static void write_token_logprobs(writing *x, const parts *p) {
    hr_json_key(x->w, "token_logprobs");
    hr_json_array_begin(x->w);
    for (size_t l = 0; l < 2; l++) {
        for (size_t i = 0; i < p->lists[l]->n; i++) {
            if (p->lists[l]->positions[i].has_logprob)
                hr_json_write_f32(x->w, p->lists[l]->positions[i].logprob);
            else
                hr_json_write_null(x->w);
        }
    }
    hr_json_array_end(x->w);
}

static void write_text_offsets(writing *x, const parts *p) {
    hr_json_key(x->w, "text_offset");
    hr_json_array_begin(x->w);
    for (size_t i = 0; i < p->lists[0]->n + p->lists[1]->n; i++)
        hr_json_write_i64(x->w, -1);
    hr_json_array_end(x->w);
}

static bool is_new_label(writing *x, const char *label) {
    for (size_t at = 0; at < x->labels.len; at += strlen(x->labels.data + at) + 1) {
        if (strcmp(x->labels.data + at, label) == 0)
            return false;
    }
    hr_buf_append(&x->labels, label, strlen(label) + 1);
    return true;
}

/* Tokens with the same text (bytes that are no character) share a key: the likeliest has it. */
static void write_alternatives(writing *x, const hr_position_list *list, const hr_position *p) {
    hr_buf_clear(&x->labels);
    hr_json_object_begin(x->w);
    for (size_t t = p->top_at; t < p->top_at + p->n_top; t++) {
        const char *label = text_of(x, list->top_ids[t]);
        if (!is_new_label(x, label))
            continue;
        hr_json_key(x->w, label);
        hr_json_write_f32(x->w, list->top_logprobs[t]);
    }
    hr_json_object_end(x->w);
}

static void write_top_logprobs(writing *x, const parts *p) {
    hr_json_key(x->w, "top_logprobs");
    if (x->job->completion.n_logprobs == 0) {
        hr_json_write_null(x->w);
        return;
    }
    hr_json_array_begin(x->w);
    for (size_t l = 0; l < 2; l++) {
        for (size_t i = 0; i < p->lists[l]->n; i++) {
            if (p->lists[l]->positions[i].has_logprob)
                write_alternatives(x, p->lists[l], &p->lists[l]->positions[i]);
            else
                hr_json_write_null(x->w);
        }
    }
    hr_json_array_end(x->w);
}

static void write_logprobs(writing *x) {
    parts p = {{&x->out->prompt, &x->out->tokens}};
    hr_json_key(x->w, "logprobs");
    if (!x->job->completion.logprobs) {
        hr_json_write_null(x->w);
        return;
    }
    hr_json_object_begin(x->w);
    write_tokens(x, &p);
    write_token_logprobs(x, &p);
    write_text_offsets(x, &p);
    write_top_logprobs(x, &p);
    hr_json_object_end(x->w);
}

/* ---- choices ---- */

static void write_text(writing *x, bool echo) {
    const hr_generate_item *item = x->out->item;
    hr_buf *text = &x->text;
    hr_buf_clear(text);
    if (echo && item->text != NULL)
        hr_buf_puts(text, item->text);
    else if (echo && hr_tokenizer_decode(x->out->tokenizer, item->input_ids, item->n_input_ids,
                                         item->skip_special_tokens, text, NULL) != HR_OK)
        text->failed = true;
    if (x->out->text.len > 0)
        hr_buf_append(text, x->out->text.data, x->out->text.len);
    if (text->failed)
        x->w->buf->failed = true;
    hr_json_key(x->w, "text");
    hr_json_write_string_n(x->w, text->data != NULL ? text->data : "", text->len);
}

static void write_finish(writing *x) {
    const hr_finish *finish = &x->out->finish;
    const char *matched = hr_generate_output_matched(x->out);
    hr_json_key(x->w, "finish_reason");
    if (!x->out->finished)
        hr_json_write_null(x->w);
    else if (finish->type == HR_FINISH_LENGTH)
        hr_json_write_string(x->w, "length");
    else if (finish->type == HR_FINISH_ABORT || finish->type == HR_FINISH_ERROR)
        hr_json_write_string(x->w, "abort");
    else
        hr_json_write_string(x->w, "stop");
    hr_json_key(x->w, "matched_stop");
    if (x->out->finished && finish->type == HR_FINISH_STOP_TOKEN)
        hr_json_write_u64(x->w, finish->matched_token);
    else if (x->out->finished && finish->type == HR_FINISH_STOP_CALLER && matched != NULL)
        hr_json_write_string(x->w, matched);
    else
        hr_json_write_null(x->w);
}

static void write_choice(const hr_job *job, size_t index, const hr_generate_output *out, bool echo,
                         hr_json_writer *w) {
    writing x = {.job = job, .out = out, .w = w};
    hr_json_object_begin(w);
    hr_json_put_u64(w, "index", index);
    write_text(&x, echo);
    write_logprobs(&x);
    write_finish(&x);
    hr_json_object_end(w);
    hr_buf_free(&x.text);
    hr_buf_free(&x.labels);
}

/* ---- the whole ---- */

static void begin(const hr_job *job, hr_json_writer *w) {
    const hr_generate_item *first = &job->request.items[0];
    hr_json_object_begin(w);
    hr_json_put_string(w, "id", first->batch_rid != NULL ? first->batch_rid : first->rid);
    hr_json_put_string(w, "object", "text_completion");
    hr_json_put_i64(w, "created", job->created);
    hr_json_put_string(w, "model",
                       job->completion.model != NULL ? job->completion.model
                                                     : job->server->options.served_model_name);
}

static void write_metadata(const hr_generate_output *out, hr_json_writer *w) {
    hr_json_key(w, "metadata");
    hr_json_object_begin(w);
    hr_json_put_string(w, "weight_version", out->weight_version);
    hr_json_key(w, "weight_versions");
    hr_generate_reply_spans(out, w);
    hr_json_key(w, "lora_path");
    if (out->item->lora_name != NULL)
        hr_json_write_string(w, out->item->lora_name);
    else
        hr_json_write_null(w);
    hr_json_object_end(w);
}

/* A prompt counts once, however many samples are drawn for it. */
static void write_usage(const hr_job *job, hr_json_writer *w) {
    uint64_t prompt = 0, completion = 0, cached = 0;
    for (size_t i = 0; i < job->request.n_items; i++) {
        const hr_generate_output *out = &job->sequences[i].output;
        bool first = i % job->request.n_samples == 0;
        prompt += first ? out->item->n_input_ids : 0;
        cached += first ? out->finish.cached_tokens : 0;
        completion += out->tokens.n;
    }
    hr_json_key(w, "usage");
    hr_json_object_begin(w);
    hr_json_put_u64(w, "prompt_tokens", prompt);
    hr_json_put_u64(w, "completion_tokens", completion);
    hr_json_put_u64(w, "total_tokens", prompt + completion);
    hr_json_key(w, "prompt_tokens_details");
    hr_json_object_begin(w);
    hr_json_put_u64(w, "cached_tokens", cached);
    hr_json_object_end(w);
    hr_json_object_end(w);
}

void hr_completions_reply_answer(const hr_job *job, hr_json_writer *w) {
    begin(job, w);
    hr_json_key(w, "choices");
    hr_json_array_begin(w);
    for (size_t i = 0; i < job->request.n_items; i++)
        write_choice(job, i, &job->sequences[i].output, job->completion.echo, w);
    hr_json_array_end(w);
    write_usage(job, w);
    write_metadata(&job->sequences[0].output, w);
    hr_json_object_end(w);
}

void hr_completions_reply_event(const hr_job *job, size_t index, const hr_generate_output *output,
                                bool first, const char *weight_version, hr_json_writer *w) {
    (void)weight_version;
    begin(job, w);
    hr_json_key(w, "choices");
    hr_json_array_begin(w);
    write_choice(job, index, output, first && job->completion.echo, w);
    hr_json_array_end(w);
    if (output->finished)
        write_metadata(output, w);
    hr_json_object_end(w);
}

void hr_completions_reply_last(const hr_job *job, hr_buf *out) {
    if (!job->completion.include_usage)
        return;
    hr_json_writer w;
    hr_buf_puts(out, "data: ");
    hr_json_writer_init(&w, out);
    begin(job, &w);
    hr_json_key(&w, "choices");
    hr_json_array_begin(&w);
    hr_json_array_end(&w);
    write_usage(job, &w);
    hr_json_object_end(&w);
    hr_buf_puts(out, "\n\n");
}
