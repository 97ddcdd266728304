/* The streaming decoder. Steps call one another: each takes a token (or, behind a fusing step, a
 * chunk of the one fused text) and hands on what it is sure of. */
#include "text/decoder.h"

#include "text/byte_level.h"
#include "text/normalizer.h"
#include "text/utf8.h"

#include <stdlib.h>
#include <string.h>

#define MAX_NESTING 8
#define MAX_STRIP 1024
#define REPLACEMENT "\xEF\xBF\xBD"

/* --- reading --- */

static hr_status one_character(const char *text, const char *what, uint32_t *out, hr_error *err) {
    size_t used = 0;
    uint32_t cp = text[0] == '\0' ? 0 : hr_utf8_next(text, &used);
    if (cp == 0 || text[used] != '\0')
        return hr_fail(err, HR_ERR_CORRUPT, "%s must be one character, not \"%.64s\"", what, text);
    *out = cp;
    return HR_OK;
}

static hr_status read_metaspace(hr_decoder_step *step, const cJSON *node, hr_error *err) {
    const char *replacement;
    bool add = true;
    step->kind = HR_DECODE_METASPACE;
    HR_TRY(hr_json_get_string(node, "replacement", &replacement, err));
    HR_TRY(hr_json_opt_bool(node, "add_prefix_space", &add, err));
    const char *scheme = add ? "always" : "never";
    HR_TRY(hr_json_opt_string(node, "prepend_scheme", &scheme, err));
    step->drop_leading = strcmp(scheme, "never") != 0;
    return one_character(replacement, "decoder Metaspace: replacement", &step->character, err);
}

static hr_status read_strip(hr_decoder_step *step, const cJSON *node, hr_error *err) {
    const char *content;
    uint64_t start, stop;
    step->kind = HR_DECODE_STRIP;
    HR_TRY(hr_json_get_string(node, "content", &content, err));
    HR_TRY(hr_json_get_u64(node, "start", 0, MAX_STRIP, &start, err));
    HR_TRY(hr_json_get_u64(node, "stop", 0, MAX_STRIP, &stop, err));
    step->start = (size_t)start;
    step->stop = (size_t)stop;
    return one_character(content, "decoder Strip: content", &step->character, err);
}

static hr_status read_replace(hr_decoder_step *step, const cJSON *node, hr_error *err) {
    const char *content;
    step->kind = HR_DECODE_REPLACE;
    HR_TRY(hr_json_get_string(node, "content", &content, err));
    HR_TRY(hr_pattern_read(node, &step->pattern, err));
    step->content = strdup(content);
    return step->content != NULL ? HR_OK
                                 : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a decoder");
}

static hr_status read_step(hr_decoder_step *step, const cJSON *node, const char *type,
                           hr_error *err) {
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(step, node, err);
    if (strcmp(type, "Strip") == 0)
        return read_strip(step, node, err);
    if (strcmp(type, "Replace") == 0)
        return read_replace(step, node, err);
    if (strcmp(type, "ByteLevel") == 0)
        step->kind = HR_DECODE_BYTE_LEVEL;
    else if (strcmp(type, "ByteFallback") == 0)
        step->kind = HR_DECODE_BYTE_FALLBACK;
    else if (strcmp(type, "Fuse") == 0)
        step->kind = HR_DECODE_FUSE;
    else
        return hr_fail(err, HR_ERR_UNSUPPORTED, "decoder \"%.64s\" is not supported", type);
    return HR_OK;
}

static hr_status read_node(hr_decoder *decoder, const cJSON *node, int depth, hr_error *err) {
    const char *type;
    HR_TRY(hr_json_get_string(node, "type", &type, err));
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *list = hr_json_get(node, "decoders");
        if (!cJSON_IsArray(list) || depth == MAX_NESTING)
            return hr_fail(err, HR_ERR_CORRUPT,
                           "decoder Sequence: wanted an array \"decoders\", nested at most %d deep",
                           MAX_NESTING);
        for (const cJSON *item = list->child; item != NULL; item = item->next)
            HR_TRY(read_node(decoder, item, depth + 1, err));
        return HR_OK;
    }
    if (decoder->count == HR_DECODER_MAX_STEPS)
        return hr_fail(err, HR_ERR_LIMIT, "more than %d decoders", HR_DECODER_MAX_STEPS);
    return read_step(&decoder->steps[decoder->count++], node, type, err);
}

/* Behind a step that makes one text of all tokens only stripping and fusing can go on as a stream.
 */
static hr_status mark_fused(hr_decoder *decoder, hr_error *err) {
    bool fused = false;
    for (size_t i = 0; i < decoder->count; i++) {
        hr_decoder_step *step = &decoder->steps[i];
        step->fused = fused;
        if (fused && step->kind != HR_DECODE_STRIP && step->kind != HR_DECODE_FUSE)
            return hr_fail(err, HR_ERR_UNSUPPORTED,
                           "decoder: behind ByteLevel or Fuse only Strip and Fuse are supported");
        fused = fused || step->kind == HR_DECODE_FUSE || step->kind == HR_DECODE_BYTE_LEVEL;
    }
    return HR_OK;
}

hr_status hr_decoder_read(hr_decoder *decoder, const cJSON *node, hr_error *err) {
    *decoder = (hr_decoder){0};
    if (node == NULL || cJSON_IsNull(node)) {
        decoder->steps[decoder->count++].kind = HR_DECODE_JOIN;
        return HR_OK;
    }
    HR_TRY(read_node(decoder, node, 0, err));
    return mark_fused(decoder, err);
}

void hr_decoder_free(hr_decoder *decoder) {
    for (size_t i = 0; i < decoder->count; i++) {
        hr_regex_free(decoder->steps[i].pattern);
        free(decoder->steps[i].content);
    }
    decoder->count = 0;
}

/* --- streaming --- */

static hr_status push(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                      bool verbatim, hr_buf *out, hr_error *err);

/* Hands on the whole characters of bytes; U+FFFD for what can be none; holds an unfinished end,
 * unless it is last. */
static void take_characters(hr_buf *bytes, hr_buf *text, bool last) {
    size_t at = 0;
    while (at < bytes->len) {
        size_t valid = hr_utf8_valid_prefix(bytes->data + at, bytes->len - at);
        hr_buf_append(text, bytes->data + at, valid);
        at += valid;
        if (at == bytes->len)
            break;
        hr_utf8_unit unit = hr_utf8_examine(bytes->data + at, bytes->len - at);
        if (unit.kind == HR_UTF8_INCOMPLETE && !last)
            break;
        hr_buf_puts(text, REPLACEMENT);
        at += unit.len;
    }
    if (at > 0) {
        bytes->len -= at;
        memmove(bytes->data, bytes->data + at, bytes->len + 1);
    }
}

static hr_status push_byte_level(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                                 bool verbatim, hr_buf *out, hr_error *err) {
    hr_decoder_state *state = &s->states[index];
    if (verbatim)
        hr_buf_append(&state->held, token, len);
    else
        hr_byte_level_unspell(token, len, &state->held);
    hr_buf_clear(&state->made);
    take_characters(&state->held, &state->made, false);
    if (state->held.failed || state->made.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to decode a token");
    return push(s, index + 1, state->made.data, state->made.len, false, out, err);
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte of a token "<0xAB>", -1 for any other token. */
static int byte_token(const char *token, size_t len) {
    if (len != 6 || memcmp(token, "<0x", 3) != 0 || token[5] != '>')
        return -1;
    int high = hex_digit(token[3]), low = hex_digit(token[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* A run of byte tokens is one text when it is valid as a whole; else every byte is a U+FFFD. So
 * nothing of it is certain before it ends. */
static hr_status end_byte_run(hr_decoder_stream *s, size_t index, hr_buf *out, hr_error *err) {
    hr_decoder_state *state = &s->states[index];
    hr_buf *run = &state->held;
    if (run->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to decode byte tokens");
    if (run->len == 0)
        return HR_OK;
    hr_status status = HR_OK;
    if (hr_utf8_valid_prefix(run->data, run->len) == run->len)
        status = push(s, index + 1, run->data, run->len, false, out, err);
    else
        for (size_t i = 0; i < run->len && status == HR_OK; i++)
            status = push(s, index + 1, REPLACEMENT, 3, false, out, err);
    hr_buf_clear(run);
    return status;
}

static hr_status push_byte_fallback(hr_decoder_stream *s, size_t index, const char *token,
                                    size_t len, hr_buf *out, hr_error *err) {
    int byte = byte_token(token, len);
    if (byte >= 0) {
        hr_buf_putc(&s->states[index].held, (char)byte);
        return HR_OK;
    }
    HR_TRY(end_byte_run(s, index, out, err));
    return push(s, index + 1, token, len, false, out, err);
}

static hr_status push_metaspace(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                                hr_buf *out, hr_error *err) {
    const hr_decoder_step *step = &s->decoder->steps[index];
    hr_decoder_state *state = &s->states[index];
    bool drop = !state->begun && step->drop_leading;
    size_t used;
    hr_buf_clear(&state->made);
    for (size_t i = 0; i < len; i += used) {
        if (hr_utf8_next(token + i, &used) != step->character)
            hr_buf_append(&state->made, token + i, used);
        else if (!drop)
            hr_buf_putc(&state->made, ' ');
    }
    state->begun = true;
    if (state->made.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to decode a token");
    return push(s, index + 1, state->made.data, state->made.len, false, out, err);
}

static hr_status push_replace(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                              hr_buf *out, hr_error *err) {
    const hr_decoder_step *step = &s->decoder->steps[index];
    hr_buf *made = &s->states[index].made;
    if (len == 0)
        return push(s, index + 1, token, len, false, out, err);
    hr_buf_clear(made);
    HR_TRY(hr_replace_all(step->pattern, s->matcher, token, len, step->content, made, err));
    if (made->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to decode a token");
    return push(s, index + 1, made->data, made->len, false, out, err);
}

/* Drops step->start characters at the start of the text and keeps back those at its end that
 * flushing drops. */
static hr_status push_strip(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                            hr_buf *out, hr_error *err) {
    const hr_decoder_step *step = &s->decoder->steps[index];
    hr_decoder_state *state = &s->states[index];
    char strip[4];
    size_t strip_len = hr_utf8_put(step->character, strip), used;
    hr_buf_clear(&state->made);
    for (size_t i = 0; i < len; i += used) {
        bool is_strip = hr_utf8_next(token + i, &used) == step->character;
        if (is_strip && !state->cut_done && state->cut < step->start) {
            state->cut++;
            continue;
        }
        state->cut_done = true;
        if (is_strip && state->waiting < step->stop) {
            state->waiting++;
            continue;
        }
        if (!is_strip)
            for (; state->waiting > 0; state->waiting--)
                hr_buf_append(&state->made, strip, strip_len);
        hr_buf_append(&state->made, token + i, used);
    }
    if (state->made.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to decode a token");
    if (!step->fused)
        state->cut = state->waiting = state->cut_done = 0;
    return push(s, index + 1, state->made.data, state->made.len, false, out, err);
}

static hr_status push(hr_decoder_stream *s, size_t index, const char *token, size_t len,
                      bool verbatim, hr_buf *out, hr_error *err) {
    if (index == s->decoder->count) {
        hr_buf_append(out, token, len);
        return out->failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for decoded text") : HR_OK;
    }
    hr_decoder_state *state = &s->states[index];
    switch (s->decoder->steps[index].kind) {
    case HR_DECODE_BYTE_LEVEL:
        return push_byte_level(s, index, token, len, verbatim, out, err);
    case HR_DECODE_BYTE_FALLBACK:
        return push_byte_fallback(s, index, token, len, out, err);
    case HR_DECODE_METASPACE:
        return push_metaspace(s, index, token, len, out, err);
    case HR_DECODE_REPLACE:
        return push_replace(s, index, token, len, out, err);
    case HR_DECODE_STRIP:
        return push_strip(s, index, token, len, out, err);
    case HR_DECODE_FUSE:
        return push(s, index + 1, token, len, false, out, err);
    case HR_DECODE_JOIN:
        if (state->begun)
            HR_TRY(push(s, index + 1, " ", 1, false, out, err));
        state->begun = true;
        return push(s, index + 1, token, len, false, out, err);
    }
    return hr_fail(err, HR_ERR_INTERNAL, "unknown decoder step");
}

hr_status hr_decoder_push(hr_decoder_stream *stream, const char *token, size_t len, bool verbatim,
                          hr_buf *out, hr_error *err) {
    return push(stream, 0, token, len, verbatim, out, err);
}

/* In order: what an early step lets go still passes the later ones. */
hr_status hr_decoder_flush(hr_decoder_stream *stream, hr_buf *out, hr_error *err) {
    for (size_t i = 0; i < stream->decoder->count; i++) {
        hr_decoder_state *state = &stream->states[i];
        if (stream->decoder->steps[i].kind == HR_DECODE_BYTE_FALLBACK)
            HR_TRY(end_byte_run(stream, i, out, err));
        if (stream->decoder->steps[i].kind == HR_DECODE_BYTE_LEVEL && state->held.len > 0) {
            hr_buf_clear(&state->made);
            take_characters(&state->held, &state->made, true);
            HR_TRY(push(stream, i + 1, state->made.data, state->made.len, false, out, err));
        }
        state->begun = state->cut_done = false;
        state->cut = state->waiting = 0;
        hr_buf_clear(&state->held);
    }
    return HR_OK;
}

void hr_decoder_stream_free(hr_decoder_stream *stream) {
    for (size_t i = 0; i < HR_DECODER_MAX_STEPS; i++) {
        hr_buf_free(&stream->states[i].held);
        hr_buf_free(&stream->states[i].made);
    }
}
