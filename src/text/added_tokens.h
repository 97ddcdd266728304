/* Added tokens: texts that become one token wherever they stand, found before (or right after)
 * normalisation and never by merging. */
#ifndef HR_TEXT_ADDED_TOKENS_H
#define HR_TEXT_ADDED_TOKENS_H

#include "base/error.h"
#include "format/json.h"
#include "text/bpe.h"
#include "text/normalizer.h"
#include "text/vocab.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_ADDED_TOKEN_MAX_BYTES 4096

typedef struct hr_added_token {
    uint32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
    bool verbatim; /* its text is plain text, not a spelling that byte-level decoding undoes */
} hr_added_token;

/* A trie over bytes; node 0 is the root. */
typedef struct hr_trie_node {
    uint32_t child, sibling; /* 0: none */
    uint32_t token;          /* index of the added token that ends here; HR_TOKEN_NONE: none */
    unsigned char byte;
} hr_trie_node;
typedef struct hr_trie {
    hr_trie_node *nodes;
    uint32_t count, cap;
    uint32_t first[256]; /* children of the root */
} hr_trie;

/* Immutable once read; safe for concurrent readers. */
typedef struct hr_added_tokens {
    hr_vocab vocab;         /* their texts and ids */
    hr_added_token *tokens; /* by id */
    uint32_t count;
    uint32_t next_id;        /* highest id + 1 */
    hr_trie raw, normalized; /* those matched before and those matched after normalisation */
} hr_added_tokens;

/* From the "added_tokens" array of tokenizer.json, NULL or null for none. Ids must be the ones the
 * `tokenizers` package would give: the vocabulary's own id, or the next free one. *added is to be
 * freed in every case. */
hr_status hr_added_tokens_read(hr_added_tokens *added, const cJSON *list, const hr_bpe *bpe,
                               const hr_normalizer *normalizer, hr_error *err);
void hr_added_tokens_free(hr_added_tokens *added);

/* NULL when id is no added token. */
const hr_added_token *hr_added_tokens_find(const hr_added_tokens *added, uint32_t id);

/* A walk over text as runs of plain text and added tokens. */
typedef struct hr_added_walk {
    const hr_added_tokens *added;
    const hr_trie *trie;
    const char *text;
    size_t len, scan, done;
    const hr_added_token *pending; /* found, to be handed out after the plain text before it */
    size_t pending_end;
} hr_added_walk;
hr_added_walk hr_added_walk_start(const hr_added_tokens *added, const hr_trie *trie,
                                  const char *text, size_t len);
/* False at the end. Else either *token is set, or it is NULL and text[*start, *end) is plain and
 * not empty. */
bool hr_added_walk_next(hr_added_walk *walk, const hr_added_token **token, size_t *start,
                        size_t *end);

#endif
