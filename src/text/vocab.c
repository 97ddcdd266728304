/* Token text <-> token id: an open-addressing table over one arena of bytes. */
#include "text/vocab.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static uint32_t hash_bytes(const char *text, size_t len) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)text[i]) * 0x100000001b3u;
    return (uint32_t)(h ^ h >> 32);
}

hr_status hr_vocab_init(hr_vocab *vocab, size_t n_tokens, size_t n_ids, size_t total_bytes,
                        hr_error *err) {
    if (n_tokens > HR_VOCAB_MAX_TOKENS || n_ids > HR_VOCAB_MAX_TOKENS || total_bytes >= UINT32_MAX)
        return hr_fail(err, HR_ERR_LIMIT,
                       "vocabulary of %zu tokens with ids below %zu: at most %u can be loaded",
                       n_tokens, n_ids, HR_VOCAB_MAX_TOKENS);
    size_t slots = 16;
    while (slots < n_tokens * 2)
        slots *= 2;
    *vocab = (hr_vocab){.bytes_cap = total_bytes, .n_ids = (uint32_t)n_ids};
    vocab->slot_mask = (uint32_t)(slots - 1);
    vocab->bytes = malloc(total_bytes + 1);
    vocab->by_id = malloc((n_ids + 1) * sizeof *vocab->by_id);
    vocab->slots = malloc(slots * sizeof *vocab->slots);
    if (vocab->bytes == NULL || vocab->by_id == NULL || vocab->slots == NULL) {
        hr_vocab_free(vocab);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a vocabulary of %zu tokens", n_tokens);
    }
    memset(vocab->by_id, 0xFF, (n_ids + 1) * sizeof *vocab->by_id);
    memset(vocab->slots, 0xFF, slots * sizeof *vocab->slots);
    return HR_OK;
}

void hr_vocab_free(hr_vocab *vocab) {
    free(vocab->bytes);
    free(vocab->by_id);
    free(vocab->slots);
    *vocab = (hr_vocab){0};
}

/* The slot that holds text, or the empty one where it would go. */
static uint32_t find_slot(const hr_vocab *vocab, const char *text, size_t len) {
    uint32_t slot = hash_bytes(text, len) & vocab->slot_mask;
    for (;; slot = (slot + 1) & vocab->slot_mask) {
        uint32_t id = vocab->slots[slot];
        if (id == HR_TOKEN_NONE)
            return slot;
        const hr_vocab_entry *entry = &vocab->by_id[id];
        if (entry->len == len && memcmp(vocab->bytes + entry->offset, text, len) == 0)
            return slot;
    }
}

hr_status hr_vocab_add(hr_vocab *vocab, const char *text, size_t len, uint32_t id, hr_error *err) {
    HR_ASSERT(id < vocab->n_ids && len <= vocab->bytes_cap - vocab->bytes_len);
    uint32_t slot = find_slot(vocab, text, len);
    if (vocab->slots[slot] != HR_TOKEN_NONE)
        return hr_fail(err, HR_ERR_CORRUPT, "token \"%.*s\" is listed twice, as %u and %u",
                       (int)(len < 64 ? len : 64), text, vocab->slots[slot], id);
    if (vocab->by_id[id].offset != HR_TOKEN_NONE)
        return hr_fail(err, HR_ERR_CORRUPT, "token id %u is given to two tokens, one is \"%.*s\"",
                       id, (int)(len < 64 ? len : 64), text);
    if (len > 0)
        memcpy(vocab->bytes + vocab->bytes_len, text, len);
    vocab->by_id[id] = (hr_vocab_entry){(uint32_t)vocab->bytes_len, (uint32_t)len};
    vocab->bytes_len += len;
    vocab->slots[slot] = id;
    vocab->count++;
    return HR_OK;
}

uint32_t hr_vocab_find(const hr_vocab *vocab, const char *text, size_t len) {
    return vocab->slots[find_slot(vocab, text, len)];
}

const char *hr_vocab_text(const hr_vocab *vocab, uint32_t id, size_t *len) {
    if (id >= vocab->n_ids || vocab->by_id[id].offset == HR_TOKEN_NONE)
        return NULL;
    *len = vocab->by_id[id].len;
    return vocab->bytes + vocab->by_id[id].offset;
}
