/* One stream of token ids through the tokenizer's decoder. */
#include "text/detokenizer.h"

#include "text/tokenizer_parts.h"

#include <stdlib.h>

struct hr_detokenizer {
    const hr_tokenizer *tokenizer;
    bool skip_special;
    hr_decoder_stream stream;
};

static bool needs_matcher(const hr_decoder *decoder) {
    for (size_t i = 0; i < decoder->count; i++)
        if (decoder->steps[i].kind == HR_DECODE_REPLACE)
            return true;
    return false;
}

hr_status hr_detokenizer_create(const hr_tokenizer *tokenizer, bool skip_special,
                                hr_detokenizer **out, hr_error *err) {
    hr_detokenizer *d = calloc(1, sizeof *d);
    if (d == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a detokenizer");
    d->tokenizer = tokenizer;
    d->skip_special = skip_special;
    d->stream.decoder = &tokenizer->decoder;
    if (needs_matcher(&tokenizer->decoder)) {
        hr_status status = hr_matcher_create(&d->stream.matcher, err);
        if (status != HR_OK) {
            hr_detokenizer_free(d);
            return status;
        }
    }
    *out = d;
    return HR_OK;
}

void hr_detokenizer_free(hr_detokenizer *d) {
    if (d == NULL)
        return;
    hr_decoder_stream_free(&d->stream);
    hr_matcher_free(d->stream.matcher);
    free(d);
}

hr_status hr_detokenizer_push(hr_detokenizer *d, uint32_t id, hr_buf *out, hr_error *err) {
    size_t len;
    const char *piece = hr_tokenizer_piece(d->tokenizer, id, &len);
    if (piece == NULL)
        return HR_OK;
    const hr_added_token *added = hr_added_tokens_find(&d->tokenizer->added, id);
    if (added != NULL && added->special && d->skip_special)
        return HR_OK;
    return hr_decoder_push(&d->stream, piece, len, added != NULL && added->verbatim, out, err);
}

hr_status hr_detokenizer_flush(hr_detokenizer *d, hr_buf *out, hr_error *err) {
    return hr_decoder_flush(&d->stream, out, err);
}
