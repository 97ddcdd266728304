/* Added tokens: reading them and finding them in text, leftmost first and then longest. */
#include "text/added_tokens.h"

#include "text/byte_level.h"
#include "text/utf8.h"

#include <stdlib.h>
#include <string.h>

/* --- the trie --- */

static hr_status trie_node(hr_trie *trie, unsigned char byte, uint32_t sibling, uint32_t *out,
                           hr_error *err) {
    if (trie->count == trie->cap) {
        uint32_t cap = trie->cap == 0 ? 256 : trie->cap * 2;
        hr_trie_node *nodes = realloc(trie->nodes, cap * sizeof *nodes);
        if (nodes == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for added tokens");
        trie->nodes = nodes;
        trie->cap = cap;
    }
    if (trie->count == 0) /* index 0 means none */
        trie->nodes[trie->count++] = (hr_trie_node){.token = HR_TOKEN_NONE};
    trie->nodes[trie->count] =
        (hr_trie_node){.sibling = sibling, .token = HR_TOKEN_NONE, .byte = byte};
    *out = trie->count++;
    return HR_OK;
}

static uint32_t trie_child(const hr_trie *trie, uint32_t node, unsigned char byte) {
    if (node == 0)
        return trie->first[byte];
    uint32_t at = trie->nodes[node].child;
    while (at != 0 && trie->nodes[at].byte != byte)
        at = trie->nodes[at].sibling;
    return at;
}

/* Of two tokens with one text the first put wins. */
static hr_status trie_put(hr_trie *trie, const char *text, size_t len, uint32_t token,
                          hr_error *err) {
    uint32_t node = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char byte = (unsigned char)text[i];
        uint32_t child = trie_child(trie, node, byte);
        if (child == 0) {
            HR_TRY(trie_node(trie, byte, node == 0 ? 0 : trie->nodes[node].child, &child, err));
            if (node == 0)
                trie->first[byte] = child;
            else
                trie->nodes[node].child = child;
        }
        node = child;
    }
    if (node != 0 && trie->nodes[node].token == HR_TOKEN_NONE)
        trie->nodes[node].token = token;
    return HR_OK;
}

/* Longest token at the start of text. */
static uint32_t trie_longest(const hr_trie *trie, const char *text, size_t len, size_t *matched) {
    uint32_t node = 0, token = HR_TOKEN_NONE;
    for (size_t i = 0; i < len; i++) {
        node = trie_child(trie, node, (unsigned char)text[i]);
        if (node == 0)
            break;
        if (trie->nodes[node].token != HR_TOKEN_NONE) {
            token = trie->nodes[node].token;
            *matched = i + 1;
        }
    }
    return token;
}

/* --- reading --- */

/* The id the reference gives to content as the next token of the list. */
static uint32_t expected_id(const hr_added_tokens *added, const hr_bpe *bpe, const char *content) {
    uint32_t id = hr_vocab_find(&bpe->vocab, content, strlen(content));
    if (id != HR_TOKEN_NONE)
        return id;
    return added->next_id > bpe->vocab.count ? added->next_id : bpe->vocab.count;
}

/* A token outside the vocabulary, or one that stands in it without being a byte or the result of a
 * merge, was written as plain text. */
static bool is_verbatim(const hr_bpe *bpe, const char *content, uint32_t id) {
    size_t used;
    if (hr_vocab_find(&bpe->vocab, content, strlen(content)) == HR_TOKEN_NONE)
        return true;
    hr_utf8_next(content, &used);
    return content[used] != '\0' && !bpe->made[id];
}

/* Whether byte-level decoding could garble it; plain ASCII stands for itself. */
static bool needs_verbatim(const char *content) {
    for (; *content != '\0'; content++)
        if ((unsigned char)*content >= 0x80)
            return true;
    return false;
}

static hr_status read_token(hr_added_tokens *added, const cJSON *item, const hr_bpe *bpe,
                            hr_error *err) {
    hr_added_token token = {0};
    const char *content;
    uint64_t id;
    HR_TRY(hr_json_get_string(item, "content", &content, err));
    HR_TRY(hr_json_get_u64(item, "id", 0, HR_VOCAB_MAX_TOKENS - 1, &id, err));
    HR_TRY(hr_json_opt_bool(item, "special", &token.special, err));
    token.normalized = !token.special;
    HR_TRY(hr_json_opt_bool(item, "normalized", &token.normalized, err));
    HR_TRY(hr_json_opt_bool(item, "single_word", &token.single_word, err));
    HR_TRY(hr_json_opt_bool(item, "lstrip", &token.lstrip, err));
    HR_TRY(hr_json_opt_bool(item, "rstrip", &token.rstrip, err));
    size_t len = strlen(content);
    if (len == 0)
        return HR_OK; /* would stand everywhere; the reference ignores it too */
    if (len > HR_ADDED_TOKEN_MAX_BYTES)
        return hr_fail(err, HR_ERR_LIMIT,
                       "added token %.64s... has %zu bytes, at most %d are allowed", content, len,
                       HR_ADDED_TOKEN_MAX_BYTES);
    uint32_t expected = expected_id(added, bpe, content);
    if (expected != id)
        return hr_fail(
            err, HR_ERR_CORRUPT,
            "added token \"%.64s\" is listed with id %u, but its place in the vocabulary is "
            "%u; save the tokenizer again with the tool that made it",
            content, (unsigned)id, expected);
    token.id = (uint32_t)id;
    token.verbatim = needs_verbatim(content) && is_verbatim(bpe, content, token.id);
    HR_TRY(hr_vocab_add(&added->vocab, content, len, token.id, err));
    added->tokens[added->count++] = token;
    added->next_id = token.id >= added->next_id ? token.id + 1 : added->next_id;
    return HR_OK;
}

static hr_status put_in_trie(hr_added_tokens *added, uint32_t index,
                             const hr_normalizer *normalizer, hr_matcher *matcher, hr_error *err) {
    const hr_added_token *token = &added->tokens[index];
    size_t len;
    const char *content = hr_vocab_text(&added->vocab, token->id, &len);
    if (!token->normalized)
        return trie_put(&added->raw, content, len, index, err);
    hr_buf text = {0}, other = {0};
    hr_buf_append(&text, content, len);
    hr_status status = text.failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for added tokens")
                                   : hr_normalizer_apply(normalizer, matcher, &text, &other, err);
    if (status == HR_OK)
        status = trie_put(&added->normalized, text.data, text.len, index, err);
    hr_buf_free(&text);
    hr_buf_free(&other);
    return status;
}

/* Special tokens first: of two that normalise to one text the special one is meant. */
static hr_status build_tries(hr_added_tokens *added, const hr_normalizer *normalizer,
                             hr_error *err) {
    hr_matcher *matcher;
    HR_TRY(hr_matcher_create(&matcher, err));
    hr_status status = HR_OK;
    for (int special = 1; special >= 0; special--)
        for (uint32_t i = 0; i < added->count && status == HR_OK; i++)
            if (added->tokens[i].special == special)
                status = put_in_trie(added, i, normalizer, matcher, err);
    hr_matcher_free(matcher);
    return status;
}

static int by_id(const void *a, const void *b) {
    uint32_t x = ((const hr_added_token *)a)->id, y = ((const hr_added_token *)b)->id;
    return (x > y) - (x < y);
}

hr_status hr_added_tokens_read(hr_added_tokens *added, const cJSON *list, const hr_bpe *bpe,
                               const hr_normalizer *normalizer, hr_error *err) {
    *added = (hr_added_tokens){0};
    bool none = list == NULL || cJSON_IsNull(list);
    if (!none && !cJSON_IsArray(list))
        return hr_fail(err, HR_ERR_CORRUPT, "added_tokens: wanted an array, got %s",
                       hr_json_kind(list));
    size_t count = 0, bytes = 0, n_ids = 0;
    for (const cJSON *item = none ? NULL : list->child; item != NULL; item = item->next) {
        const char *content;
        uint64_t id;
        HR_TRY(hr_json_get_string(item, "content", &content, err));
        HR_TRY(hr_json_get_u64(item, "id", 0, HR_VOCAB_MAX_TOKENS - 1, &id, err));
        bytes += strlen(content);
        n_ids = id + 1 > n_ids ? id + 1 : n_ids;
        count++;
    }
    HR_TRY(hr_vocab_init(&added->vocab, count, n_ids, bytes, err));
    added->tokens = calloc(count + 1, sizeof *added->tokens);
    if (added->tokens == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu added tokens", count);
    for (const cJSON *item = none ? NULL : list->child; item != NULL; item = item->next)
        HR_TRY(read_token(added, item, bpe, err));
    qsort(added->tokens, added->count, sizeof *added->tokens, by_id);
    HR_TRY(build_tries(added, normalizer, err));
    return HR_OK;
}

void hr_added_tokens_free(hr_added_tokens *added) {
    hr_vocab_free(&added->vocab);
    free(added->tokens);
    free(added->raw.nodes);
    free(added->normalized.nodes);
    *added = (hr_added_tokens){0};
}

const hr_added_token *hr_added_tokens_find(const hr_added_tokens *added, uint32_t id) {
    return bsearch(&(hr_added_token){.id = id}, added->tokens, added->count, sizeof *added->tokens,
                   by_id);
}

/* --- finding them --- */

hr_added_walk hr_added_walk_start(const hr_added_tokens *added, const hr_trie *trie,
                                  const char *text, size_t len) {
    return (hr_added_walk){.added = added, .trie = trie, .text = text, .len = len};
}

static size_t char_before(const char *text, size_t at) {
    do
        at--;
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80);
    return at;
}

static bool stands_alone(const char *text, size_t len, size_t start, size_t end) {
    size_t used;
    if (start > 0 && hr_char_is_word(hr_utf8_next(text + char_before(text, start), &used)))
        return false;
    return end == len || !hr_char_is_word(hr_utf8_next(text + end, &used));
}

static size_t skip_space_back(const char *text, size_t at, size_t floor) {
    size_t used;
    while (at > floor) {
        size_t before = char_before(text, at);
        if (!hr_char_is_space(hr_utf8_next(text + before, &used)))
            break;
        at = before;
    }
    return at;
}

static size_t skip_space(const char *text, size_t at, size_t len) {
    size_t used;
    while (at < len && hr_char_is_space(hr_utf8_next(text + at, &used)))
        at += used;
    return at;
}

/* Scans on to the next token; false when none is left. */
static bool find_next(hr_added_walk *walk, const hr_added_token **token, size_t *start,
                      size_t *end) {
    while (walk->scan < walk->len) {
        size_t at = walk->scan, matched = 0;
        uint32_t index = HR_TOKEN_NONE;
        if (walk->trie->first[(unsigned char)walk->text[at]] != 0)
            index = trie_longest(walk->trie, walk->text + at, walk->len - at, &matched);
        walk->scan += index == HR_TOKEN_NONE ? 1 : matched;
        if (index == HR_TOKEN_NONE)
            continue;
        const hr_added_token *candidate = &walk->added->tokens[index];
        if (candidate->single_word && !stands_alone(walk->text, walk->len, at, at + matched))
            continue;
        *token = candidate;
        *start = at;
        *end = at + matched;
        return true;
    }
    return false;
}

/* A token that is itself white space may lie in what an rstrip token before it has taken in; it
 * counts all the same, and plain text goes on behind it: the reference does so. */
bool hr_added_walk_next(hr_added_walk *walk, const hr_added_token **token, size_t *start,
                        size_t *end) {
    const hr_added_token *found = walk->pending;
    size_t from = walk->done, to = walk->pending_end;
    if (found == NULL && find_next(walk, &found, &from, &to)) {
        if (found->lstrip && from > walk->done)
            from = skip_space_back(walk->text, from, walk->done);
        if (found->rstrip)
            to = skip_space(walk->text, to, walk->len);
    }
    *token = found;
    if (found == NULL) { /* the rest is plain */
        *start = walk->done;
        *end = walk->done = walk->len;
        return *start < *end;
    }
    if (from > walk->done) { /* plain text first, the token at the next call */
        walk->pending = found;
        walk->pending_end = to;
        *token = NULL;
        *start = walk->done;
        *end = walk->done = from;
        return true;
    }
    walk->pending = NULL;
    *start = from;
    *end = walk->done = to;
    return true;
}
