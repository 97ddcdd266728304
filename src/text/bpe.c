/* Byte pair encoding: a doubly linked list of symbols and a heap of candidate merges, so that even
 * one word of a megabyte costs O(n log n). */
#include "text/bpe.h"

#include "base/buf.h"
#include "text/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct hr_bpe_symbol {
    uint32_t id; /* HR_TOKEN_NONE: merged away */
    int32_t prev, next;
} symbol;

typedef struct hr_bpe_candidate {
    uint64_t key; /* rank << 32 | position: lowest rank first, then leftmost */
    uint32_t id;  /* the token the merge makes */
} candidate;

/* --- the merge table --- */

static const hr_bpe_merge *find_merge(const hr_bpe *bpe, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t slot = (uint32_t)((pair * 0x9E3779B97F4A7C15u) >> 32) & bpe->merge_mask;
    for (;; slot = (slot + 1) & bpe->merge_mask) {
        const hr_bpe_merge *merge = &bpe->merges[slot];
        if (merge->pair == pair)
            return merge;
        if (merge->pair == UINT64_MAX)
            return NULL;
    }
}

/* A pair listed twice keeps its last rank. */
static void put_merge(hr_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t id) {
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t slot = (uint32_t)((pair * 0x9E3779B97F4A7C15u) >> 32) & bpe->merge_mask;
    while (bpe->merges[slot].pair != UINT64_MAX && bpe->merges[slot].pair != pair)
        slot = (slot + 1) & bpe->merge_mask;
    bpe->merges[slot] = (hr_bpe_merge){pair, rank, id};
}

/* --- reading --- */

static hr_status read_vocab(hr_bpe *bpe, const cJSON *vocab, hr_error *err) {
    if (!cJSON_IsObject(vocab))
        return hr_fail(err, HR_ERR_CORRUPT, "model.vocab: wanted an object of token to id, got %s",
                       vocab == NULL ? "nothing" : hr_json_kind(vocab));
    size_t count = 0, bytes = 0;
    uint64_t highest = 0;
    for (const cJSON *item = vocab->child; item != NULL; item = item->next) {
        uint64_t id;
        HR_TRY(
            hr_json_u64(item, item->string, 0, HR_VOCAB_MAX_TOKENS - 1, HR_JSON_NUMBER, &id, err));
        highest = id > highest ? id : highest;
        bytes += strlen(item->string);
        count++;
    }
    HR_TRY(hr_vocab_init(&bpe->vocab, count, count == 0 ? 0 : highest + 1, bytes, err));
    for (const cJSON *item = vocab->child; item != NULL; item = item->next)
        HR_TRY(hr_vocab_add(&bpe->vocab, item->string, strlen(item->string),
                            (uint32_t)item->valuedouble, err));
    return HR_OK;
}

/* The two halves of a merge, in either of the two forms files use. */
static hr_status merge_halves(const cJSON *item, uint32_t rank, const char **left, size_t *left_len,
                              const char **right, hr_error *err) {
    if (cJSON_IsString(item)) {
        const char *space = strchr(item->valuestring, ' ');
        if (space != NULL && strchr(space + 1, ' ') == NULL) {
            *left = item->valuestring;
            *left_len = (size_t)(space - item->valuestring);
            *right = space + 1;
            return HR_OK;
        }
    } else if (cJSON_IsArray(item)) {
        const cJSON *a = item->child, *b = a == NULL ? NULL : a->next;
        if (cJSON_IsString(a) && cJSON_IsString(b) && b->next == NULL) {
            *left = a->valuestring;
            *left_len = strlen(a->valuestring);
            *right = b->valuestring;
            return HR_OK;
        }
    }
    return hr_fail(err, HR_ERR_CORRUPT,
                   "model.merges[%u]: wanted \"left right\" or [\"left\", \"right\"], got %s", rank,
                   hr_json_kind(item));
}

static hr_status add_merge(hr_bpe *bpe, const cJSON *item, uint32_t rank, hr_buf *joined,
                           hr_error *err) {
    const char *left = NULL, *right = NULL;
    size_t left_len = 0;
    HR_TRY(merge_halves(item, rank, &left, &left_len, &right, err));
    hr_buf_clear(joined);
    hr_buf_append(joined, left, left_len);
    hr_buf_puts(joined, right);
    if (joined->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to read merges");
    uint32_t a = hr_vocab_find(&bpe->vocab, left, left_len);
    uint32_t b = hr_vocab_find(&bpe->vocab, right, strlen(right));
    uint32_t id = hr_vocab_find(&bpe->vocab, joined->data, joined->len);
    if (a == HR_TOKEN_NONE || b == HR_TOKEN_NONE || id == HR_TOKEN_NONE)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "model.merges[%u]: \"%.*s\" + \"%.64s\" needs a token that the vocabulary "
                       "lacks",
                       rank, (int)(left_len < 64 ? left_len : 64), left, right);
    put_merge(bpe, a, b, rank, id);
    bpe->made[id] = true;
    return HR_OK;
}

static hr_status read_merges(hr_bpe *bpe, const cJSON *merges, hr_error *err) {
    if (!cJSON_IsArray(merges))
        return hr_fail(err, HR_ERR_CORRUPT, "model.merges: wanted an array, got %s",
                       merges == NULL ? "nothing" : hr_json_kind(merges));
    size_t count = (size_t)cJSON_GetArraySize(merges), slots = 16;
    if (count > HR_VOCAB_MAX_TOKENS)
        return hr_fail(err, HR_ERR_LIMIT, "model.merges: %zu merges, at most %u can be loaded",
                       count, HR_VOCAB_MAX_TOKENS);
    while (slots < count * 2)
        slots *= 2;
    bpe->merge_mask = (uint32_t)(slots - 1);
    bpe->merges = malloc(slots * sizeof *bpe->merges);
    bpe->made = calloc((size_t)bpe->vocab.n_ids + 1, sizeof *bpe->made);
    if (bpe->merges == NULL || bpe->made == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu merges", count);
    memset(bpe->merges, 0xFF, slots * sizeof *bpe->merges);
    hr_buf joined = {0};
    hr_status status = HR_OK;
    uint32_t rank = 0;
    for (const cJSON *item = merges->child; item != NULL && status == HR_OK; item = item->next) {
        bool header = cJSON_IsString(item) && strncmp(item->valuestring, "#version", 8) == 0;
        if (!header)
            status = add_merge(bpe, item, rank++, &joined, err);
    }
    hr_buf_free(&joined);
    return status;
}

static hr_status read_unknown(hr_bpe *bpe, const cJSON *model, hr_error *err) {
    const char *unk = NULL;
    HR_TRY(hr_json_opt_string(model, "unk_token", &unk, err));
    bpe->unk_id = HR_TOKEN_NONE;
    if (unk == NULL)
        return HR_OK;
    bpe->unk_id = hr_vocab_find(&bpe->vocab, unk, strlen(unk));
    if (bpe->unk_id == HR_TOKEN_NONE)
        return hr_fail(err, HR_ERR_CORRUPT, "model.unk_token \"%.64s\" is not in the vocabulary",
                       unk);
    return HR_OK;
}

/* Settings that change what a merge is, and that none of the served model families use. */
static hr_status refuse_unsupported(const cJSON *model, hr_error *err) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < 2; i++) {
        const char *affix = "";
        HR_TRY(hr_json_opt_string(model, affixes[i], &affix, err));
        if (affix[0] != '\0')
            return hr_fail(err, HR_ERR_UNSUPPORTED, "model.%s \"%.64s\" is not supported",
                           affixes[i], affix);
    }
    double dropout = 0;
    HR_TRY(hr_json_opt_double(model, "dropout", 0, 1, &dropout, err));
    if (dropout != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "model.dropout %g makes tokens random; set it to null", dropout);
    return HR_OK;
}

static void index_first_characters(hr_bpe *bpe) {
    for (uint32_t cp = 0; cp < 1024; cp++) {
        char text[4];
        bpe->first_ids[cp] = hr_vocab_find(&bpe->vocab, text, hr_utf8_put(cp, text));
    }
    for (unsigned b = 0; b < 256; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", b);
        bpe->byte_ids[b] = hr_vocab_find(&bpe->vocab, text, 6);
    }
}

hr_status hr_bpe_read(hr_bpe *bpe, const cJSON *model, hr_error *err) {
    *bpe = (hr_bpe){.unk_id = HR_TOKEN_NONE};
    const char *type = "BPE"; /* older files leave the type out */
    HR_TRY(hr_json_opt_string(model, "type", &type, err));
    if (strcmp(type, "BPE") != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "model type \"%.64s\" is not supported, only BPE is", type);
    HR_TRY(refuse_unsupported(model, err));
    HR_TRY(hr_json_opt_bool(model, "ignore_merges", &bpe->ignore_merges, err));
    HR_TRY(hr_json_opt_bool(model, "byte_fallback", &bpe->byte_fallback, err));
    HR_TRY(hr_json_opt_bool(model, "fuse_unk", &bpe->fuse_unk, err));
    HR_TRY(read_vocab(bpe, hr_json_get(model, "vocab"), err));
    HR_TRY(read_merges(bpe, hr_json_get(model, "merges"), err));
    HR_TRY(read_unknown(bpe, model, err));
    index_first_characters(bpe);
    return HR_OK;
}

void hr_bpe_free(hr_bpe *bpe) {
    hr_vocab_free(&bpe->vocab);
    free(bpe->merges);
    free(bpe->made);
    bpe->merges = NULL;
    bpe->made = NULL;
}

/* --- encoding --- */

hr_status hr_ids_append(hr_ids *ids, uint32_t id, hr_error *err) {
    if (ids->len == ids->cap) {
        size_t cap = ids->cap == 0 ? 64 : ids->cap * 2;
        uint32_t *data = realloc(ids->data, cap * sizeof *data);
        if (data == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu tokens", cap);
        ids->data = data;
        ids->cap = cap;
    }
    ids->data[ids->len++] = id;
    return HR_OK;
}

void hr_bpe_scratch_free(hr_bpe_scratch *scratch) {
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (hr_bpe_scratch){0};
}

static hr_status reserve(hr_bpe_scratch *s, size_t n, hr_error *err) {
    if (n <= s->symbols_cap)
        return HR_OK;
    if (n > HR_BPE_MAX_BYTES)
        return hr_fail(err, HR_ERR_LIMIT, "a word of %zu bytes: at most %zu can be encoded", n,
                       HR_BPE_MAX_BYTES);
    size_t cap = n < 256 ? 256 : n;
    symbol *symbols = realloc(s->symbols, cap * sizeof *symbols);
    if (symbols == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to encode a word of %zu bytes", n);
    s->symbols = symbols;
    s->symbols_cap = cap;
    return HR_OK;
}

static hr_status heap_push(hr_bpe_scratch *s, candidate c, hr_error *err) {
    if (s->heap_len == s->heap_cap) {
        size_t cap = s->heap_cap == 0 ? 256 : s->heap_cap * 2;
        candidate *heap = realloc(s->heap, cap * sizeof *heap);
        if (heap == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu possible merges", cap);
        s->heap = heap;
        s->heap_cap = cap;
    }
    size_t at = s->heap_len++;
    while (at > 0 && s->heap[(at - 1) / 2].key > c.key) {
        s->heap[at] = s->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    s->heap[at] = c;
    return HR_OK;
}

static candidate heap_pop(hr_bpe_scratch *s) {
    candidate top = s->heap[0], last = s->heap[--s->heap_len];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= s->heap_len)
            break;
        if (child + 1 < s->heap_len && s->heap[child + 1].key < s->heap[child].key)
            child++;
        if (s->heap[child].key >= last.key)
            break;
        s->heap[at] = s->heap[child];
        at = child;
    }
    s->heap[at] = last;
    return top;
}

static hr_status propose(const hr_bpe *bpe, hr_bpe_scratch *s, int32_t at, hr_error *err) {
    if (at < 0 || s->symbols[at].next < 0)
        return HR_OK;
    const hr_bpe_merge *merge =
        find_merge(bpe, s->symbols[at].id, s->symbols[s->symbols[at].next].id);
    if (merge == NULL)
        return HR_OK;
    return heap_push(s, (candidate){(uint64_t)merge->rank << 32 | (uint32_t)at, merge->id}, err);
}

static hr_status merge_all(const hr_bpe *bpe, hr_bpe_scratch *s, size_t n, hr_error *err) {
    s->heap_len = 0;
    for (size_t i = 0; i + 1 < n; i++)
        HR_TRY(propose(bpe, s, (int32_t)i, err));
    while (s->heap_len > 0) {
        candidate top = heap_pop(s);
        symbol *left = &s->symbols[(uint32_t)top.key];
        if (left->id == HR_TOKEN_NONE || left->next < 0)
            continue;
        symbol *right = &s->symbols[left->next];
        const hr_bpe_merge *merge = find_merge(bpe, left->id, right->id);
        if (merge == NULL || merge->id != top.id)
            continue; /* one of the two has merged otherwise since */
        left->id = top.id;
        left->next = right->next;
        right->id = HR_TOKEN_NONE;
        if (left->next >= 0)
            s->symbols[left->next].prev = (int32_t)(left - s->symbols);
        HR_TRY(propose(bpe, s, left->prev, err));
        HR_TRY(propose(bpe, s, (int32_t)(left - s->symbols), err));
    }
    return HR_OK;
}

static uint32_t char_id(const hr_bpe *bpe, const char *text, size_t *used) {
    uint32_t cp = hr_utf8_next(text, used);
    return cp < 1024 ? bpe->first_ids[cp] : hr_vocab_find(&bpe->vocab, text, *used);
}

static bool has_byte_tokens(const hr_bpe *bpe, const char *text, size_t len) {
    if (!bpe->byte_fallback)
        return false;
    for (size_t i = 0; i < len; i++)
        if (bpe->byte_ids[(unsigned char)text[i]] == HR_TOKEN_NONE)
            return false;
    return true;
}

/* The characters of word as symbols; returns how many. A pending unknown token goes out before the
 * next known character, but behind byte tokens that come between: the reference does it in this
 * order. */
static size_t spell(const hr_bpe *bpe, symbol *symbols, const char *word, size_t len) {
    size_t n = 0, used;
    bool unknown = false;
    for (size_t i = 0; i < len; i += used) {
        uint32_t id = char_id(bpe, word + i, &used);
        if (id != HR_TOKEN_NONE) {
            if (unknown)
                symbols[n++].id = bpe->unk_id;
            unknown = false;
            symbols[n++].id = id;
        } else if (has_byte_tokens(bpe, word + i, used)) {
            for (size_t b = 0; b < used; b++)
                symbols[n++].id = bpe->byte_ids[(unsigned char)word[i + b]];
        } else if (bpe->unk_id != HR_TOKEN_NONE) {
            if (unknown && !bpe->fuse_unk)
                symbols[n++].id = bpe->unk_id;
            unknown = true;
        }
    }
    if (unknown)
        symbols[n++].id = bpe->unk_id;
    for (size_t i = 0; i < n; i++) {
        symbols[i].prev = (int32_t)i - 1;
        symbols[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    return n;
}

hr_status hr_bpe_encode(const hr_bpe *bpe, hr_bpe_scratch *scratch, const char *word, size_t len,
                        hr_ids *ids, hr_error *err) {
    if (bpe->ignore_merges) {
        uint32_t whole = hr_vocab_find(&bpe->vocab, word, len);
        if (whole != HR_TOKEN_NONE)
            return hr_ids_append(ids, whole, err);
    }
    HR_TRY(reserve(scratch, len, err));
    size_t n = spell(bpe, scratch->symbols, word, len);
    HR_TRY(merge_all(bpe, scratch, n, err));
    for (int32_t at = n > 0 ? 0 : -1; at >= 0; at = scratch->symbols[at].next)
        HR_TRY(hr_ids_append(ids, scratch->symbols[at].id, err));
    return HR_OK;
}
