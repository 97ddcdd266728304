/* Byte pair encoding of one word: characters become tokens, then the pair with the lowest rank
 * merges until none is left. */
#ifndef HR_TEXT_BPE_H
#define HR_TEXT_BPE_H

#include "base/error.h"
#include "format/json.h"
#include "text/vocab.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Longest word that one call may encode; positions are 32 bits wide. */
#define HR_BPE_MAX_BYTES ((size_t)1 << 28)

typedef struct hr_bpe_merge {
    uint64_t pair; /* left << 32 | right; both HR_TOKEN_NONE: an empty slot */
    uint32_t rank, id;
} hr_bpe_merge;

/* Immutable once read; safe for concurrent readers. */
typedef struct hr_bpe {
    hr_vocab vocab;
    hr_bpe_merge *merges; /* open addressing by pair */
    uint32_t merge_mask;
    bool *made;         /* by id: some merge makes this token */
    bool ignore_merges; /* a word that is a token as a whole is not taken apart */
    bool byte_fallback; /* unknown characters are spelled with the tokens <0x00>..<0xFF> */
    bool fuse_unk;
    uint32_t unk_id; /* HR_TOKEN_NONE: unknown characters vanish */
    uint32_t byte_ids[256];
    uint32_t
        first_ids[1024]; /* tokens of the first characters of Unicode, found without the table */
} hr_bpe;

/* From the "model" object of tokenizer.json. ERR_UNSUPPORTED, ERR_CORRUPT, ERR_INVALID, ERR_LIMIT,
 * ERR_NO_MEMORY. *bpe is to be freed in every case. */
hr_status hr_bpe_read(hr_bpe *bpe, const cJSON *model, hr_error *err);
void hr_bpe_free(hr_bpe *bpe);

/* A growing list of token ids. */
typedef struct hr_ids {
    uint32_t *data;
    size_t len, cap;
} hr_ids;
hr_status hr_ids_append(hr_ids *ids, uint32_t id, hr_error *err);

/* Working memory of one encoding thread; zero-initialise, free with hr_bpe_scratch_free. */
typedef struct hr_bpe_scratch {
    struct hr_bpe_symbol *symbols;
    size_t symbols_cap;
    struct hr_bpe_candidate *heap;
    size_t heap_len, heap_cap;
} hr_bpe_scratch;
void hr_bpe_scratch_free(hr_bpe_scratch *scratch);

/* Appends the ids of word (valid UTF-8, not empty) to ids. Time O(n log n). ERR_NO_MEMORY,
 * ERR_LIMIT. */
hr_status hr_bpe_encode(const hr_bpe *bpe, hr_bpe_scratch *scratch, const char *word, size_t len,
                        hr_ids *ids, hr_error *err);

#endif
