/* Token ids to text, one id at a time: what a streaming reply needs. All pushes and the flush
 * together give exactly the text of hr_tokenizer_decode, and no text once given is ever taken back.
 */
#ifndef HR_TEXT_DETOKENIZER_H
#define HR_TEXT_DETOKENIZER_H

#include "text/tokenizer.h"

/* One stream. Not thread-safe; any number may share a tokenizer, which must outlive them. */
typedef struct hr_detokenizer hr_detokenizer;

/* skip_special: special tokens give nothing. ERR_NO_MEMORY. */
hr_status hr_detokenizer_create(const hr_tokenizer *tokenizer, bool skip_special,
                                hr_detokenizer **out, hr_error *err);
void hr_detokenizer_free(hr_detokenizer *detokenizer); /* NULL is fine */

/* Appends the text that id makes certain, often none: the bytes of an unfinished character are held
 * back. Amortised time of the token's own length. Ids that name no token give nothing. */
hr_status hr_detokenizer_push(hr_detokenizer *detokenizer, uint32_t id, hr_buf *out, hr_error *err);

/* Ends the stream: appends what was held back, U+FFFD for bytes that make no character. A new
 * stream may follow. */
hr_status hr_detokenizer_flush(hr_detokenizer *detokenizer, hr_buf *out, hr_error *err);

#endif
