/* Digests of tensor bytes: XXH3-128, computed always and as the bytes pass by, and SHA-256,
 * computed where somebody asks for it.
 *
 * Both run over the raw bytes of a tensor in row-major order and know nothing of dtype or shape. */
#ifndef HR_TENSOR_DIGEST_H
#define HR_TENSOR_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HR_XXH3_SIZE = 16, HR_XXH3_HEX = 33, HR_SHA256_HEX = 65 };

/* Of bytes that lie together; canonical (big-endian) byte order, as `xxh128sum` prints it. */
void hr_xxh3(const void *bytes, size_t size, uint8_t out[HR_XXH3_SIZE]);

/* The same piece by piece. Make one, update any number of times, finish once. NULL when memory is
 * short. Not for two threads at once. */
typedef struct hr_xxh3_stream hr_xxh3_stream;
hr_xxh3_stream *hr_xxh3_stream_create(void);
void hr_xxh3_stream_reset(hr_xxh3_stream *stream);
void hr_xxh3_stream_update(hr_xxh3_stream *stream, const void *bytes, size_t size);
void hr_xxh3_stream_digest(const hr_xxh3_stream *stream, uint8_t out[HR_XXH3_SIZE]);
void hr_xxh3_stream_destroy(hr_xxh3_stream *stream);

/* Lower-case hex with the NUL; returns out. */
const char *hr_xxh3_format(const uint8_t digest[HR_XXH3_SIZE], char out[HR_XXH3_HEX]);
/* Of exactly 32 hex digits, either case; false, out untouched, otherwise. */
bool hr_xxh3_parse(const char *hex, uint8_t out[HR_XXH3_SIZE]);

/* SHA-256 as lower-case hex with the NUL. */
void hr_sha256_hex(const void *bytes, size_t size, char out[HR_SHA256_HEX]);

#endif
