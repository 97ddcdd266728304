/* Base64 by tables: four characters make three bytes through four lookups whose words are or-ed;
 * a character outside the alphabet sets a high bit that no good one has. */
#include "format/base64.h"

#include <stdint.h>
#include <string.h>

#define BAD 0x80000000u

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Value of a character, or BAD. */
static uint32_t value_of(unsigned char c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A' + 0u;
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26u;
    if (c >= '0' && c <= '9')
        return c - '0' + 52u;
    return c == '+' ? 62u : c == '/' ? 63u : BAD;
}

/* Word of a character in each of the four places: its bits where they lie in the three bytes, first
 * byte lowest. 4 KiB, made on the stack for each call, which costs under two microseconds. */
typedef struct tables {
    uint32_t place[4][256];
} tables;

static void make_tables(tables *t) {
    for (unsigned c = 0; c < 256; c++)
        for (unsigned p = 0; p < 4; p++)
            t->place[p][c] = BAD;
    for (uint32_t v = 0; v < 64; v++) {
        unsigned char c = (unsigned char)alphabet[v];
        t->place[0][c] = v << 2;
        t->place[1][c] = v >> 4 | (v & 0xfu) << 12;
        t->place[2][c] = (v >> 2) << 8 | (v & 0x3u) << 22;
        t->place[3][c] = v << 16;
    }
}

static hr_status refuse(const unsigned char *text, size_t from, size_t n, hr_error *err) {
    size_t at = from;
    while (at < n && value_of(text[at]) != BAD)
        at++;
    unsigned c = text[at < n ? at : n - 1];
    return hr_fail(err, HR_ERR_INVALID,
                   c > 0x20 && c < 0x7f && c != '='
                       ? "base64: character '%c' at position %zu is not of the standard alphabet"
                       : "base64: character 0x%02x at position %zu does not belong there (no white "
                         "space, no line breaks, padding only at the end)",
                   c, at);
}

/* The last four characters: none, one or two of them padding. */
static hr_status decode_last(const unsigned char *text, size_t at, size_t n, unsigned char *out,
                             size_t *size, hr_error *err) {
    unsigned pad = text[n - 1] != '=' ? 0 : text[n - 2] != '=' ? 1 : 2;
    uint32_t bits = 0;
    for (size_t i = at; i < n - pad; i++) {
        uint32_t v = value_of(text[i]);
        if (v == BAD)
            return refuse(text, at, n, err);
        bits = bits << 6 | v;
    }
    bits <<= 6 * pad;
    if ((pad == 1 && (bits & 0xffu) != 0) || (pad == 2 && (bits & 0xffffu) != 0))
        return hr_fail(err, HR_ERR_INVALID,
                       "base64: character at position %zu carries bits beyond the last byte",
                       n - pad - 1);
    for (unsigned i = 0; i < 3 - pad; i++)
        out[i] = (unsigned char)(bits >> (16 - 8 * i));
    *size = 3 - pad;
    return HR_OK;
}

hr_status hr_base64_decode(const char *text, size_t n, void *out, size_t *size, hr_error *err) {
    const unsigned char *in = (const unsigned char *)text;
    unsigned char *to = out;
    size_t last = 0;
    tables t;
    if (n % 4 != 0)
        return hr_fail(err, HR_ERR_INVALID,
                       "base64: %zu characters are not whole groups of four; the text was cut or "
                       "its padding is missing",
                       n);
    if (n == 0) {
        *size = 0;
        return HR_OK;
    }
    make_tables(&t);
    for (size_t at = 0; at < n - 4; at += 4, to += 3) {
        uint32_t word = t.place[0][in[at]] | t.place[1][in[at + 1]] | t.place[2][in[at + 2]] |
                        t.place[3][in[at + 3]];
        if (word & BAD)
            return refuse(in, at, n, err);
        to[0] = (unsigned char)word;
        to[1] = (unsigned char)(word >> 8);
        to[2] = (unsigned char)(word >> 16);
    }
    HR_TRY(decode_last(in, n - 4, n, to, &last, err));
    *size = (n - 4) / 4 * 3 + last;
    return HR_OK;
}

static void encode_bits(uint32_t bits, char *out) {
    out[0] = alphabet[bits >> 18];
    out[1] = alphabet[bits >> 12 & 63];
    out[2] = alphabet[bits >> 6 & 63];
    out[3] = alphabet[bits & 63];
}

/* Whole groups of three bytes, then one of one or two bytes with its padding. */
static size_t encode(const unsigned char *in, size_t n, char *out) {
    char *to = out;
    for (; n >= 3; n -= 3, in += 3, to += 4)
        encode_bits((uint32_t)in[0] << 16 | (uint32_t)in[1] << 8 | in[2], to);
    if (n > 0) {
        encode_bits((uint32_t)in[0] << 16 | (n > 1 ? (uint32_t)in[1] << 8 : 0), to);
        to[3] = '=';
        if (n == 1)
            to[2] = '=';
        to += 4;
    }
    return (size_t)(to - out);
}

void hr_base64_append(hr_buf *buf, const void *bytes, size_t size) {
    const unsigned char *in = bytes;
    char block[4096];
    while (size > 0) {
        size_t most = sizeof block / 4 * 3, take = size < most ? size : most;
        hr_buf_append(buf, block, encode(in, take, block));
        in += take;
        size -= take;
    }
}
