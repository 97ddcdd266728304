/* The byte alphabet of byte-level BPE: every byte has a printable character, so that a vocabulary
 * of text can spell any bytes. */
#ifndef HR_TEXT_BYTE_LEVEL_H
#define HR_TEXT_BYTE_LEVEL_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Appends the characters that stand for the bytes. */
void hr_byte_level_spell(const char *bytes, size_t len, hr_buf *out);

/* Appends the bytes that the characters of text (valid UTF-8) stand for; a text with any character
 * outside the alphabet is appended as it is. */
void hr_byte_level_unspell(const char *text, size_t len, hr_buf *out);

#endif
