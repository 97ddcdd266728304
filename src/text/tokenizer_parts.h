/* What a tokenizer is made of; for the files of this room only. */
#ifndef HR_TEXT_TOKENIZER_PARTS_H
#define HR_TEXT_TOKENIZER_PARTS_H

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pretokenize.h"
#include "text/tokenizer.h"

struct hr_tokenizer {
    hr_bpe bpe;
    hr_added_tokens added;
    hr_normalizer normalizer;
    hr_pretokenizer pre;
    hr_decoder decoder;
    hr_ids prefix, suffix; /* around every text when special tokens are asked for */
};

/* Text of a token as the file writes it; NULL when id names none. */
const char *hr_tokenizer_piece(const hr_tokenizer *tokenizer, uint32_t id, size_t *len);

#endif
