/* The tokenizer: text to token ids and back, from a Hugging Face tokenizer.json with a BPE model,
 * equal to the `tokenizers` package both ways. Two differences: added tokens always decode to their
 * own text, also when it holds characters of the byte alphabet; characters younger than the Unicode
 * tables of the system's PCRE2 and utf8proc count as unassigned. Truncation and padding in the file
 * are ignored: they are the caller's business. */
#ifndef HR_TEXT_TOKENIZER_H
#define HR_TEXT_TOKENIZER_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_TOKENIZER_NO_ID UINT32_MAX
#define HR_TOKENIZER_MAX_FILE ((size_t)256 << 20)
/* Longest text of one encode call, in bytes; one word of this length takes some 30 times
 * as much memory. */
#define HR_TOKENIZER_MAX_TEXT ((size_t)16 << 20)

/* Immutable after loading: every function below may run on many threads at once. */
typedef struct hr_tokenizer hr_tokenizer;

/* Reads model_dir/tokenizer.json. ERR_NOT_FOUND, ERR_IO; ERR_UNSUPPORTED names the component that
 * is not known; ERR_CORRUPT, ERR_INVALID, ERR_LIMIT, ERR_NO_MEMORY. Free *out with
 * hr_tokenizer_free. */
hr_status hr_tokenizer_load(const char *model_dir, hr_tokenizer **out, hr_error *err);
/* The same from the bytes of a tokenizer.json. */
hr_status hr_tokenizer_parse(const char *json, size_t len, hr_tokenizer **out, hr_error *err);
void hr_tokenizer_free(hr_tokenizer *tokenizer); /* NULL is fine */

/* Token ids of text. add_special: put the ids around it that the file's post-processor adds (BOS
 * and the like); texts of special tokens within text become their ids in any case. *ids is
 * malloc'ed (also when *n is 0), the caller frees it. ERR_INVALID when text is not UTF-8,
 * ERR_LIMIT, ERR_NO_MEMORY. */
hr_status hr_tokenizer_encode(const hr_tokenizer *tokenizer, const char *text, size_t len,
                              bool add_special, uint32_t **ids, size_t *n, hr_error *err);

/* Appends the text of n ids; valid UTF-8, U+FFFD for bytes that are none. skip_special: special
 * tokens give nothing. Ids that name no token give nothing (padded rows of an embedding have such
 * ids). */
hr_status hr_tokenizer_decode(const hr_tokenizer *tokenizer, const uint32_t *ids, size_t n,
                              bool skip_special, hr_buf *out, hr_error *err);
/* The same for one id, special or not: what stands beside its logprob. */
hr_status hr_tokenizer_token_text(const hr_tokenizer *tokenizer, uint32_t id, hr_buf *out,
                                  hr_error *err);

/* Highest id + 1, added tokens included. The model's vocabulary may be padded beyond it. */
uint32_t hr_tokenizer_vocab_size(const hr_tokenizer *tokenizer);
/* Id of a token as it stands in the file; HR_TOKENIZER_NO_ID when there is none. */
uint32_t hr_tokenizer_id_of(const hr_tokenizer *tokenizer, const char *token, size_t len);
/* False for ids that name no token. */
bool hr_tokenizer_is_special(const hr_tokenizer *tokenizer, uint32_t id);

#endif
