/* Digests by xxHash and OpenSSL. */
#include "tensor/digest.h"

#include "tensor/xxh3.inc.h"

#include <openssl/sha.h>
#include <stdlib.h>

static const hr_xxh3_ops *ops(void) {
    static const hr_xxh3_ops baseline = {one, update};
    return __builtin_cpu_supports("avx2") ? &hr_xxh3_avx2 : &baseline;
}

void hr_xxh3(const void *bytes, size_t size, uint8_t out[HR_XXH3_SIZE]) {
    ops()->one(bytes, size, out);
}

/* xxHash keeps the struct's layout and alignment to itself. */
static XXH3_state_t *state_of(hr_xxh3_stream *stream) {
    return (XXH3_state_t *)(void *)stream;
}

hr_xxh3_stream *hr_xxh3_stream_create(void) {
    XXH3_state_t *state = XXH3_createState();
    if (state != NULL)
        XXH3_128bits_reset(state);
    return (hr_xxh3_stream *)(void *)state;
}

void hr_xxh3_stream_reset(hr_xxh3_stream *stream) {
    XXH3_128bits_reset(state_of(stream));
}

void hr_xxh3_stream_update(hr_xxh3_stream *stream, const void *bytes, size_t size) {
    ops()->update(state_of(stream), bytes, size);
}

void hr_xxh3_stream_digest(const hr_xxh3_stream *stream, uint8_t out[HR_XXH3_SIZE]) {
    put(XXH3_128bits_digest((const XXH3_state_t *)(const void *)stream), out);
}

void hr_xxh3_stream_destroy(hr_xxh3_stream *stream) {
    if (stream != NULL)
        XXH3_freeState(state_of(stream));
}

static void format_hex(const uint8_t *bytes, size_t n, char *out) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * n] = '\0';
}

const char *hr_xxh3_format(const uint8_t digest[HR_XXH3_SIZE], char out[HR_XXH3_HEX]) {
    format_hex(digest, HR_XXH3_SIZE, out);
    return out;
}

static int hex_value(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool hr_xxh3_parse(const char *hex, uint8_t out[HR_XXH3_SIZE]) {
    uint8_t bytes[HR_XXH3_SIZE];
    if (strnlen(hex, HR_XXH3_HEX) != HR_XXH3_HEX - 1)
        return false;
    for (size_t i = 0; i < HR_XXH3_SIZE; i++) {
        int high = hex_value(hex[2 * i]), low = hex_value(hex[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    memcpy(out, bytes, sizeof bytes);
    return true;
}

void hr_sha256_hex(const void *bytes, size_t size, char out[HR_SHA256_HEX]) {
    uint8_t digest[SHA256_DIGEST_LENGTH];
    SHA256(bytes, size, digest);
    format_hex(digest, sizeof digest, out);
}
