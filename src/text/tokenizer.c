/* Encoding: added tokens out of the raw text, normalisation of what is between, added tokens again,
 * words, merges. */
#include "text/detokenizer.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

#include <stdlib.h>
#include <string.h>

typedef struct encoding {
    const hr_tokenizer *t;
    hr_pretokenizer_run run;
    hr_bpe_scratch scratch;
    hr_buf normal, other; /* text being normalised */
    hr_ids ids;
} encoding;

static hr_status encode_word(void *arg, const char *word, size_t len, hr_error *err) {
    encoding *e = arg;
    return hr_bpe_encode(&e->t->bpe, &e->scratch, word, len, &e->ids, err);
}

/* Text that has its normal form: the added tokens that are looked for in this form, and the words
 * between. */
static hr_status encode_normal(encoding *e, const char *text, size_t len, bool at_start,
                               hr_error *err) {
    hr_added_walk walk = hr_added_walk_start(&e->t->added, &e->t->added.normalized, text, len);
    const hr_added_token *token;
    size_t start, end;
    while (hr_added_walk_next(&walk, &token, &start, &end)) {
        if (token != NULL)
            HR_TRY(hr_ids_append(&e->ids, token->id, err));
        else
            HR_TRY(hr_pretokenize(&e->run, text + start, end - start, at_start && start == 0, err));
    }
    return HR_OK;
}

static hr_status encode_plain(encoding *e, const char *text, size_t len, bool at_start,
                              hr_error *err) {
    if (e->t->normalizer.count == 0)
        return encode_normal(e, text, len, at_start, err);
    hr_buf_clear(&e->normal);
    hr_buf_append(&e->normal, text, len);
    if (e->normal.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to normalise %zu bytes", len);
    HR_TRY(hr_normalizer_apply(&e->t->normalizer, e->run.matcher, &e->normal, &e->other, err));
    return encode_normal(e, e->normal.data, e->normal.len, at_start, err);
}

static hr_status encode_text(encoding *e, const char *text, size_t len, hr_error *err) {
    hr_added_walk walk = hr_added_walk_start(&e->t->added, &e->t->added.raw, text, len);
    const hr_added_token *token;
    size_t start, end;
    while (hr_added_walk_next(&walk, &token, &start, &end)) {
        if (token != NULL)
            HR_TRY(hr_ids_append(&e->ids, token->id, err));
        else
            HR_TRY(encode_plain(e, text + start, end - start, start == 0, err));
    }
    return HR_OK;
}

static hr_status append_all(hr_ids *ids, const hr_ids *more, hr_error *err) {
    for (size_t i = 0; i < more->len; i++)
        HR_TRY(hr_ids_append(ids, more->data[i], err));
    return HR_OK;
}

static hr_status encode_whole(encoding *e, const char *text, size_t len, bool add_special,
                              hr_error *err) {
    HR_TRY(hr_matcher_create(&e->run.matcher, err));
    if (add_special)
        HR_TRY(append_all(&e->ids, &e->t->prefix, err));
    HR_TRY(encode_text(e, text, len, err));
    if (add_special)
        HR_TRY(append_all(&e->ids, &e->t->suffix, err));
    if (e->ids.data == NULL && (e->ids.data = malloc(sizeof *e->ids.data)) == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for tokens");
    return HR_OK;
}

static void encoding_free(encoding *e) {
    hr_matcher_free(e->run.matcher);
    hr_bpe_scratch_free(&e->scratch);
    hr_buf_free(&e->normal);
    hr_buf_free(&e->other);
    for (size_t i = 0; i < HR_PRETOKENIZER_MAX_STEPS; i++)
        hr_buf_free(&e->run.scratch[i]);
    free(e->ids.data);
}

hr_status hr_tokenizer_encode(const hr_tokenizer *t, const char *text, size_t len, bool add_special,
                              uint32_t **ids, size_t *n, hr_error *err) {
    if (len > HR_TOKENIZER_MAX_TEXT)
        return hr_fail(err, HR_ERR_LIMIT, "text of %zu bytes: at most %zu can be tokenized at once",
                       len, HR_TOKENIZER_MAX_TEXT);
    size_t valid = hr_utf8_valid_prefix(text, len);
    if (valid != len)
        return hr_fail(err, HR_ERR_INVALID,
                       "text is not UTF-8: byte 0x%02X at %zu cannot stand there",
                       (unsigned char)text[valid], valid);
    encoding e = {.t = t, .run = {.pre = &t->pre, .sink = encode_word}};
    e.run.sink_arg = &e;
    hr_status status = encode_whole(&e, text, len, add_special, err);
    if (status == HR_OK) {
        *ids = e.ids.data;
        *n = e.ids.len;
        e.ids.data = NULL;
    }
    encoding_free(&e);
    return status;
}

hr_status hr_tokenizer_decode(const hr_tokenizer *t, const uint32_t *ids, size_t n,
                              bool skip_special, hr_buf *out, hr_error *err) {
    hr_detokenizer *d;
    HR_TRY(hr_detokenizer_create(t, skip_special, &d, err));
    hr_status status = HR_OK;
    for (size_t i = 0; i < n && status == HR_OK; i++)
        status = hr_detokenizer_push(d, ids[i], out, err);
    if (status == HR_OK)
        status = hr_detokenizer_flush(d, out, err);
    hr_detokenizer_free(d);
    return status;
}

hr_status hr_tokenizer_token_text(const hr_tokenizer *t, uint32_t id, hr_buf *out, hr_error *err) {
    return hr_tokenizer_decode(t, &id, 1, false, out, err);
}

const char *hr_tokenizer_piece(const hr_tokenizer *t, uint32_t id, size_t *len) {
    const char *text = hr_vocab_text(&t->added.vocab, id, len);
    return text != NULL ? text : hr_vocab_text(&t->bpe.vocab, id, len);
}

uint32_t hr_tokenizer_vocab_size(const hr_tokenizer *t) {
    uint32_t model = t->bpe.vocab.n_ids, added = t->added.vocab.n_ids;
    return model > added ? model : added;
}

uint32_t hr_tokenizer_id_of(const hr_tokenizer *t, const char *token, size_t len) {
    uint32_t id = hr_vocab_find(&t->added.vocab, token, len);
    return id != HR_TOKEN_NONE ? id : hr_vocab_find(&t->bpe.vocab, token, len);
}

bool hr_tokenizer_is_special(const hr_tokenizer *t, uint32_t id) {
    const hr_added_token *token = hr_added_tokens_find(&t->added, id);
    return token != NULL && token->special;
}
