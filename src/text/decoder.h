/* The decoder of tokenizer.json, run as a stream: tokens go in one at a time, the text that no
 * later token can change comes out. A full decode is the same stream, flushed, so that the two
 * cannot differ. */
#ifndef HR_TEXT_DECODER_H
#define HR_TEXT_DECODER_H

#include "base/buf.h"
#include "base/error.h"
#include "format/json.h"
#include "text/regex.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_DECODER_MAX_STEPS 16

typedef struct hr_decoder_step {
    enum {
        HR_DECODE_BYTE_LEVEL,
        HR_DECODE_BYTE_FALLBACK,
        HR_DECODE_METASPACE,
        HR_DECODE_REPLACE,
        HR_DECODE_STRIP,
        HR_DECODE_FUSE,
        HR_DECODE_JOIN, /* no decoder: tokens stand apart by a space */
    } kind;
    bool fused;         /* what comes in is one text in chunks, not separate tokens */
    uint32_t character; /* METASPACE: stands for a space. STRIP: is stripped */
    bool drop_leading;  /* METASPACE: the first token loses its spaces */
    size_t start, stop; /* STRIP: at most so many at either end */
    hr_regex *pattern;  /* REPLACE; owned */
    char *content;      /* REPLACE; owned */
} hr_decoder_step;

/* Immutable once read; safe for concurrent readers. */
typedef struct hr_decoder {
    hr_decoder_step steps[HR_DECODER_MAX_STEPS];
    size_t count;
} hr_decoder;

/* From the "decoder" value of tokenizer.json, NULL or null for none. ERR_UNSUPPORTED names what is
 * not known. *decoder is to be freed in every case. */
hr_status hr_decoder_read(hr_decoder *decoder, const cJSON *node, hr_error *err);
void hr_decoder_free(hr_decoder *decoder);

/* State of one step of one stream; held never grows beyond a character, a run of byte tokens or
 * stop characters. */
typedef struct hr_decoder_state {
    bool begun;
    hr_buf held; /* BYTE_LEVEL: bytes of an unfinished character. BYTE_FALLBACK: the run of bytes so
                    far */
    hr_buf made; /* working memory */
    size_t cut;  /* STRIP: characters dropped at the start so far */
    bool cut_done;  /* STRIP: something else has come */
    size_t waiting; /* STRIP: characters at the end that may be dropped */
} hr_decoder_state;

/* One stream; zero-initialise with decoder and matcher set. */
typedef struct hr_decoder_stream {
    const hr_decoder *decoder;
    hr_matcher *matcher; /* only for a decoder with REPLACE */
    hr_decoder_state states[HR_DECODER_MAX_STEPS];
} hr_decoder_stream;

/* Appends the text that has become certain. token: valid UTF-8; verbatim: plain text that
 * byte-level decoding must leave as it is. */
hr_status hr_decoder_push(hr_decoder_stream *stream, const char *token, size_t len, bool verbatim,
                          hr_buf *out, hr_error *err);
/* Appends what was held back; the stream is then as at the start. */
hr_status hr_decoder_flush(hr_decoder_stream *stream, hr_buf *out, hr_error *err);
void hr_decoder_stream_free(hr_decoder_stream *stream);

#endif
