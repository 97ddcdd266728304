/* Token text <-> token id. The tokenizer holds two: the model's vocabulary, which merging sees, and
 * the added tokens, which it must not see. */
#ifndef HR_TEXT_VOCAB_H
#define HR_TEXT_VOCAB_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

#define HR_TOKEN_NONE UINT32_MAX
#define HR_VOCAB_MAX_TOKENS (1u << 22)

typedef struct hr_vocab_entry {
    uint32_t offset, len; /* into bytes; len 0 with offset HR_TOKEN_NONE: no token has this id */
} hr_vocab_entry;

/* Immutable once filled; then safe for concurrent readers. */
typedef struct hr_vocab {
    char *bytes;
    size_t bytes_len, bytes_cap;
    hr_vocab_entry *by_id;
    uint32_t n_ids;  /* highest id + 1 */
    uint32_t count;  /* tokens */
    uint32_t *slots; /* open addressing, id or HR_TOKEN_NONE */
    uint32_t slot_mask;
} hr_vocab;

/* Room for n_tokens tokens (at least 0) of total_bytes bytes with ids below n_ids. ERR_LIMIT,
 * ERR_NO_MEMORY. */
hr_status hr_vocab_init(hr_vocab *vocab, size_t n_tokens, size_t n_ids, size_t total_bytes,
                        hr_error *err);
/* Copies text. ERR_CORRUPT when the text or the id is already there. */
hr_status hr_vocab_add(hr_vocab *vocab, const char *text, size_t len, uint32_t id, hr_error *err);
void hr_vocab_free(hr_vocab *vocab);

/* HR_TOKEN_NONE when there is no such token. */
uint32_t hr_vocab_find(const hr_vocab *vocab, const char *text, size_t len);
/* Not NUL-terminated; NULL when no token has this id. */
const char *hr_vocab_text(const hr_vocab *vocab, uint32_t id, size_t *len);

#endif
