/* What one sequence has produced so far. */
#include "server/generate_output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

/* Room for n + extra elements in *list. */
static bool reserve(void *list, size_t n, size_t extra, size_t size, size_t *cap) {
    if (n + extra <= *cap)
        return true;
    size_t want = *cap < 16 ? 16 : *cap;
    while (want < n + extra)
        want *= 2;
    void *old = NULL;
    memcpy(&old, list, sizeof old);
    void *grown = realloc(old, want * size);
    if (grown == NULL)
        return false;
    memcpy(list, &grown, sizeof grown);
    *cap = want;
    return true;
}

static bool list_append(hr_position_list *list, const hr_position_logprobs *p) {
    if (!reserve(&list->positions, list->n, 1, sizeof *list->positions, &list->cap))
        return false;
    if (p->n_top > 0) {
        size_t cap = list->cap_top; /* both lists grow alike */
        if (!reserve(&list->top_ids, list->n_top, p->n_top, sizeof *list->top_ids, &cap) ||
            !reserve(&list->top_logprobs, list->n_top, p->n_top, sizeof *list->top_logprobs,
                     &list->cap_top))
            return false;
        memcpy(list->top_ids + list->n_top, p->top_ids, p->n_top * sizeof *p->top_ids);
        memcpy(list->top_logprobs + list->n_top, p->top_logprobs,
               p->n_top * sizeof *p->top_logprobs);
    }
    if (p->n_ids > 0) {
        if (!reserve(&list->ids_logprobs, list->n_ids, p->n_ids, sizeof *list->ids_logprobs,
                     &list->cap_ids))
            return false;
        memcpy(list->ids_logprobs + list->n_ids, p->ids_logprobs,
               p->n_ids * sizeof *p->ids_logprobs);
    }
    list->positions[list->n++] = (hr_position){
        .token = p->token,
        .logprob = p->logprob,
        .has_logprob = p->has_logprob,
        .n_top = p->n_top,
        .n_ids = p->n_ids,
        .top_at = list->n_top,
        .ids_at = list->n_ids,
    };
    list->n_top += p->n_top;
    list->n_ids += p->n_ids;
    return true;
}

/* The positions from `from` on. */
static bool list_copy(hr_position_list *copy, const hr_position_list *list, size_t from) {
    size_t n = list->n - from, cap = copy->cap_top;
    size_t top_at = n > 0 ? list->positions[from].top_at : list->n_top;
    size_t ids_at = n > 0 ? list->positions[from].ids_at : list->n_ids;
    size_t n_top = list->n_top - top_at, n_ids = list->n_ids - ids_at;
    if (!reserve(&copy->positions, 0, n, sizeof *list->positions, &copy->cap) ||
        !reserve(&copy->top_ids, 0, n_top, sizeof *list->top_ids, &cap) ||
        !reserve(&copy->top_logprobs, 0, n_top, sizeof *list->top_logprobs, &copy->cap_top) ||
        !reserve(&copy->ids_logprobs, 0, n_ids, sizeof *list->ids_logprobs, &copy->cap_ids))
        return false;
    copy->n = n;
    copy->n_top = n_top;
    copy->n_ids = n_ids;
    if (n > 0)
        memcpy(copy->positions, list->positions + from, n * sizeof *list->positions);
    for (size_t i = 0; i < n; i++) {
        copy->positions[i].top_at -= top_at;
        copy->positions[i].ids_at -= ids_at;
    }
    if (n_top > 0) {
        memcpy(copy->top_ids, list->top_ids + top_at, n_top * sizeof *list->top_ids);
        memcpy(copy->top_logprobs, list->top_logprobs + top_at, n_top * sizeof *list->top_logprobs);
    }
    if (n_ids > 0)
        memcpy(copy->ids_logprobs, list->ids_logprobs + ids_at, n_ids * sizeof *list->ids_logprobs);
    return true;
}

static void list_free(hr_position_list *list) {
    free(list->positions);
    free(list->top_ids);
    free(list->top_logprobs);
    free(list->ids_logprobs);
    *list = (hr_position_list){0};
}

/* ---- text ---- */

static void out_of_memory(hr_generate_output *out) {
    out->failed = true;
    hr_fail(&out->error, HR_ERR_NO_MEMORY, "out of memory for the answer");
}

static void take_text(hr_generate_output *out, const hr_buf *piece) {
    if (piece->failed)
        out_of_memory(out);
    else if (out->stop == NULL)
        hr_buf_append(&out->text, piece->data, piece->len);
    else if (piece->len > 0 && out->matched_stop < 0 &&
             hr_stop_push(out->stop, piece->data, piece->len, out->item->no_stop_trim, &out->text,
                          &out->matched_stop, &out->error) != HR_OK)
        out->failed = true;
    if (out->text.failed)
        out_of_memory(out);
}

static void push_token(hr_generate_output *out, uint32_t id) {
    hr_buf piece = {0};
    if (hr_detokenizer_push(out->detokenizer, id, &piece, &out->error) != HR_OK)
        out->failed = true;
    else
        take_text(out, &piece);
    hr_buf_free(&piece);
}

static void end_text(hr_generate_output *out) {
    hr_buf rest = {0};
    if (out->has_withheld && out->finish.type != HR_FINISH_STOP_TOKEN)
        push_token(out, out->withheld);
    if (out->matched_stop >= 0 || out->failed)
        return;
    if (hr_detokenizer_flush(out->detokenizer, &rest, &out->error) != HR_OK)
        out->failed = true;
    else
        take_text(out, &rest);
    hr_buf_free(&rest);
    if (out->stop != NULL && out->matched_stop < 0 && !out->failed &&
        hr_stop_flush(out->stop, &out->text, &out->error) != HR_OK)
        out->failed = true;
}

static bool contains(const uint32_t *ids, size_t n, uint32_t id) {
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == id)
            return true;
    }
    return false;
}

static bool is_stop_token(const hr_generate_output *out, uint32_t id) {
    const hr_sampling_params *s = &out->item->sampling;
    return contains(s->stop_token_ids, s->n_stop_token_ids, id) ||
           (!s->ignore_eos && contains(out->eos_ids, out->n_eos_ids, id));
}

/* ---- the output ---- */

hr_status hr_generate_output_init(hr_generate_output *out, const hr_generate_item *item,
                                  const hr_tokenizer *tokenizer, const uint32_t *eos_ids,
                                  size_t n_eos_ids, hr_error *err) {
    *out = (hr_generate_output){
        .item = item,
        .tokenizer = tokenizer,
        .eos_ids = eos_ids,
        .n_eos_ids = n_eos_ids,
        .matched_stop = -1,
    };
    bool stops = item->n_stops > 0 || item->n_stop_regexes > 0;
    if (tokenizer == NULL)
        return !stops ? HR_OK
                      : hr_fail(err, HR_ERR_INVALID,
                                "sampling_params.%s needs a tokenizer; this server runs with "
                                "--skip-tokenizer-init",
                                item->n_stops > 0 ? "stop" : "stop_regex");
    HR_TRY(hr_detokenizer_create(tokenizer, item->skip_special_tokens, &out->detokenizer, err));
    if (!stops)
        return HR_OK;
    hr_status status = hr_stop_create(item->stops, item->n_stops, &out->stop, err);
    if (status != HR_OK)
        return hr_fail_context(err, status, "sampling_params.stop");
    if (item->n_stop_regexes == 0)
        return HR_OK;
    status = hr_stop_add_regexes(out->stop, item->stop_regexes, item->n_stop_regexes, err);
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "sampling_params.stop_regex");
}

void hr_generate_output_free(hr_generate_output *out) {
    list_free(&out->prompt);
    list_free(&out->tokens);
    hr_buf_free(&out->text);
    hr_detokenizer_free(out->detokenizer);
    hr_stop_free(out->stop);
    if (!out->is_copy)
        free(out->spans);
    *out = (hr_generate_output){0};
}

void hr_generate_output_prompt(hr_generate_output *out, uint32_t n,
                               const hr_position_logprobs *positions) {
    for (uint32_t i = 0; i < n && !out->failed; i++) {
        if (!list_append(&out->prompt, &positions[i]))
            out_of_memory(out);
    }
}

hr_token_verdict hr_generate_output_token(hr_generate_output *out,
                                          const hr_position_logprobs *token) {
    if (!out->failed && !list_append(&out->tokens, token))
        out_of_memory(out);
    if (out->failed)
        return HR_TOKEN_STOP;
    if (out->tokenizer == NULL)
        return HR_TOKEN_CONTINUE;
    if (!out->item->no_stop_trim && is_stop_token(out, token->token)) {
        out->has_withheld = true;
        out->withheld = token->token;
        return HR_TOKEN_CONTINUE;
    }
    push_token(out, token->token);
    return out->failed || out->matched_stop >= 0 ? HR_TOKEN_STOP : HR_TOKEN_CONTINUE;
}

/* An engine that keeps no spans made everything under one version. */
static void take_spans(hr_generate_output *out, const hr_finish *finish) {
    hr_version_span all = {out->weight_version, 0, (uint32_t)out->tokens.n};
    const hr_version_span *spans = finish->n_spans > 0 ? finish->spans : &all;
    size_t n = finish->n_spans > 0 ? finish->n_spans : out->tokens.n > 0;
    out->spans = calloc(n > 0 ? n : 1, sizeof *out->spans);
    if (out->spans == NULL) {
        out_of_memory(out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        snprintf(out->spans[i].version, sizeof out->spans[i].version, "%s", spans[i].version);
        out->spans[i].start = spans[i].start;
        out->spans[i].end = spans[i].end;
    }
    out->n_spans = n;
}

void hr_generate_output_finish(hr_generate_output *out, const hr_finish *finish) {
    out->finish = *finish;
    out->finish.spans = NULL;
    out->finish.n_spans = 0;
    snprintf(out->message, sizeof out->message, "%s",
             finish->message != NULL ? finish->message : "");
    snprintf(out->weight_version, sizeof out->weight_version, "%s",
             finish->weight_version != NULL ? finish->weight_version : "");
    snprintf(out->adapter_version, sizeof out->adapter_version, "%s",
             finish->adapter_version != NULL ? finish->adapter_version : "");
    out->finish.message = out->message;
    out->finish.weight_version = out->weight_version;
    out->finish.adapter_version = finish->adapter_version != NULL ? out->adapter_version : NULL;
    take_spans(out, finish);
    if (out->tokenizer != NULL && !out->failed)
        end_text(out);
    /* The very last text may complete a stop that no token did. */
    if (out->matched_stop >= 0 && out->finish.type == HR_FINISH_LENGTH)
        out->finish.type = HR_FINISH_STOP_CALLER;
    out->finished = true;
}

void hr_generate_output_abort(hr_generate_output *out, const char *message,
                              const char *weight_version) {
    hr_finish finish = {.type = HR_FINISH_ABORT,
                        .status = HR_ERR_CANCELLED,
                        .message = message,
                        .prompt_tokens = (uint32_t)out->item->n_input_ids,
                        .weight_version = weight_version};
    hr_generate_output_finish(out, &finish);
}

const char *hr_generate_output_matched(const hr_generate_output *out) {
    size_t which = (size_t)out->matched_stop;
    if (out->matched_stop < 0)
        return NULL;
    return which < out->item->n_stops ? out->item->stops[which]
                                      : out->item->stop_regexes[which - out->item->n_stops];
}

hr_output_mark hr_generate_output_mark(const hr_generate_output *out) {
    return (hr_output_mark){out->text.len, out->prompt.n, out->tokens.n};
}

bool hr_generate_output_copy(hr_generate_output *copy, const hr_generate_output *out,
                             hr_output_mark since) {
    hr_position_list prompt = copy->prompt, tokens = copy->tokens;
    hr_buf text = copy->text;
    *copy = *out;
    copy->detokenizer = NULL;
    copy->stop = NULL;
    copy->finish.message = copy->message;
    copy->finish.weight_version = copy->weight_version;
    if (copy->finish.adapter_version != NULL)
        copy->finish.adapter_version = copy->adapter_version;
    copy->prompt = prompt;
    copy->tokens = tokens;
    copy->text = text;
    copy->is_copy = true;
    copy->before = since;
    hr_buf_clear(&copy->text);
    if (out->text.len > since.text)
        hr_buf_append(&copy->text, out->text.data + since.text, out->text.len - since.text);
    return list_copy(&copy->prompt, &out->prompt, since.prompt) &&
           list_copy(&copy->tokens, &out->tokens, since.tokens) && !copy->text.failed;
}
