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

static bool list_copy(hr_position_list *copy, const hr_position_list *list) {
    size_t cap = copy->cap_top;
    if (!reserve(&copy->positions, 0, list->n, sizeof *list->positions, &copy->cap) ||
        !reserve(&copy->top_ids, 0, list->n_top, sizeof *list->top_ids, &cap) ||
        !reserve(&copy->top_logprobs, 0, list->n_top, sizeof *list->top_logprobs, &copy->cap_top) ||
        !reserve(&copy->ids_logprobs, 0, list->n_ids, sizeof *list->ids_logprobs, &copy->cap_ids))
        return false;
    copy->n = list->n;
    copy->n_top = list->n_top;
    copy->n_ids = list->n_ids;
    if (list->n > 0)
        memcpy(copy->positions, list->positions, list->n * sizeof *list->positions);
    if (list->n_top > 0) {
        memcpy(copy->top_ids, list->top_ids, list->n_top * sizeof *list->top_ids);
        memcpy(copy->top_logprobs, list->top_logprobs, list->n_top * sizeof *list->top_logprobs);
    }
    if (list->n_ids > 0)
        memcpy(copy->ids_logprobs, list->ids_logprobs, list->n_ids * sizeof *list->ids_logprobs);
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

static void take_text(hr_generate_output *out, const hr_buf *piece) {
    if (piece->failed)
        out->failed = true;
    else if (out->stop == NULL)
        hr_buf_append(&out->text, piece->data, piece->len);
    else if (piece->len > 0 && out->matched_stop < 0 &&
             hr_stop_push(out->stop, piece->data, piece->len, out->item->no_stop_trim, &out->text,
                          &out->matched_stop, NULL) != HR_OK)
        out->failed = true;
    out->failed |= out->text.failed;
}

static void push_token(hr_generate_output *out, uint32_t id) {
    hr_buf piece = {0};
    if (hr_detokenizer_push(out->detokenizer, id, &piece, NULL) != HR_OK)
        out->failed = true;
    else
        take_text(out, &piece);
    hr_buf_free(&piece);
}

static void end_text(hr_generate_output *out) {
    hr_buf rest = {0};
    if (out->has_withheld && out->finish.type != HR_FINISH_STOP_TOKEN)
        push_token(out, out->withheld);
    if (out->matched_stop >= 0)
        return;
    if (hr_detokenizer_flush(out->detokenizer, &rest, NULL) != HR_OK)
        out->failed = true;
    else
        take_text(out, &rest);
    hr_buf_free(&rest);
    if (out->stop != NULL && out->matched_stop < 0 &&
        hr_stop_flush(out->stop, &out->text, NULL) != HR_OK)
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
    if (tokenizer == NULL)
        return item->n_stops == 0
                   ? HR_OK
                   : hr_fail(err, HR_ERR_INVALID,
                             "sampling_params.stop needs a tokenizer; this server runs with "
                             "--skip-tokenizer-init");
    HR_TRY(hr_detokenizer_create(tokenizer, item->skip_special_tokens, &out->detokenizer, err));
    if (item->n_stops == 0)
        return HR_OK;
    hr_status status = hr_stop_create(item->stops, item->n_stops, &out->stop, err);
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "sampling_params.stop");
}

void hr_generate_output_free(hr_generate_output *out) {
    list_free(&out->prompt);
    list_free(&out->tokens);
    hr_buf_free(&out->text);
    hr_detokenizer_free(out->detokenizer);
    hr_stop_free(out->stop);
    *out = (hr_generate_output){0};
}

void hr_generate_output_prompt(hr_generate_output *out, uint32_t n,
                               const hr_position_logprobs *positions) {
    for (uint32_t i = 0; i < n && !out->failed; i++)
        out->failed = !list_append(&out->prompt, &positions[i]);
}

hr_token_verdict hr_generate_output_token(hr_generate_output *out,
                                          const hr_position_logprobs *token) {
    if (out->failed || !list_append(&out->tokens, token)) {
        out->failed = true;
        return HR_TOKEN_STOP;
    }
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

void hr_generate_output_finish(hr_generate_output *out, const hr_finish *finish) {
    out->finish = *finish;
    snprintf(out->message, sizeof out->message, "%s",
             finish->message != NULL ? finish->message : "");
    snprintf(out->weight_version, sizeof out->weight_version, "%s",
             finish->weight_version != NULL ? finish->weight_version : "");
    out->finish.message = out->message;
    out->finish.weight_version = out->weight_version;
    if (out->tokenizer != NULL && !out->failed)
        end_text(out);
    out->finished = true;
}

bool hr_generate_output_copy(hr_generate_output *copy, const hr_generate_output *out) {
    hr_position_list prompt = copy->prompt, tokens = copy->tokens;
    hr_buf text = copy->text;
    *copy = *out;
    copy->detokenizer = NULL;
    copy->stop = NULL;
    copy->finish.message = copy->message;
    copy->finish.weight_version = copy->weight_version;
    copy->prompt = prompt;
    copy->tokens = tokens;
    copy->text = text;
    hr_buf_clear(&copy->text);
    hr_buf_append(&copy->text, out->text.data, out->text.len);
    return list_copy(&copy->prompt, &out->prompt) && list_copy(&copy->tokens, &out->tokens) &&
           !copy->text.failed;
}
