/* Any tokenizer.json, then any text through it. The input is the file, a NUL byte, the text;
 * without a NUL the text is empty. What is taken must encode, and stream what it encodes as it
 * decodes it. */
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void decode_both_ways(const hr_tokenizer *t, const uint32_t *ids, size_t n, bool skip) {
    hr_buf whole = {0}, streamed = {0};
    hr_detokenizer *d = NULL;
    hr_status status = hr_tokenizer_decode(t, ids, n, skip, &whole, NULL);
    if (status == HR_OK && hr_detokenizer_create(t, skip, &d, NULL) == HR_OK) {
        for (size_t i = 0; i < n; i++) {
            HR_ASSERT(hr_detokenizer_push(d, ids[i], &streamed, NULL) == HR_OK);
            HR_ASSERT(hr_utf8_valid_prefix(streamed.data, streamed.len) == streamed.len);
        }
        HR_ASSERT(hr_detokenizer_flush(d, &streamed, NULL) == HR_OK);
        HR_ASSERT(streamed.len == whole.len);
        HR_ASSERT(whole.len == 0 || memcmp(streamed.data, whole.data, whole.len) == 0);
    }
    hr_detokenizer_free(d);
    hr_buf_free(&whole);
    hr_buf_free(&streamed);
}

static void round_trip(const hr_tokenizer *t, const char *text, size_t len) {
    uint32_t *ids;
    size_t n;
    hr_error err;
    if (hr_tokenizer_encode(t, text, len, true, &ids, &n, &err) != HR_OK)
        return;
    decode_both_ways(t, ids, n, false);
    decode_both_ways(t, ids, n, true);
    free(ids);
}

/* Every byte of the text as an id: reaches tokens that no text makes. */
static void decode_any_ids(const hr_tokenizer *t, const char *text, size_t len) {
    uint32_t ids[256];
    size_t n = len < 256 ? len : 256;
    for (size_t i = 0; i < n; i++)
        ids[i] = (unsigned char)text[i];
    decode_both_ways(t, ids, n, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || size > 65536)
        return 0;
    const char *file = (const char *)data;
    const char *nul = memchr(file, '\0', size);
    size_t file_len = nul == NULL ? size : (size_t)(nul - file);
    const char *text = nul == NULL ? file + size : nul + 1;
    hr_tokenizer *t;
    hr_error err;
    if (hr_tokenizer_parse(file, file_len, &t, &err) != HR_OK)
        return 0;
    round_trip(t, text, (size_t)(file + size - text));
    decode_any_ids(t, text, (size_t)(file + size - text));
    hr_tokenizer_free(t);
    return 0;
}
