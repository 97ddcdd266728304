/* UTF-8 and the few character classes the tokenizer needs. Text is checked once where it enters;
 * behind that gate hr_utf8_next may assume it is valid. */
#ifndef HR_TEXT_UTF8_H
#define HR_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the longest valid prefix; equals len when the whole text is valid (no surrogates, no
 * overlong forms, nothing above U+10FFFF). */
size_t hr_utf8_valid_prefix(const char *text, size_t len);

/* What stands at the start of 1..len bytes that may be anything. */
typedef struct hr_utf8_unit {
    enum { HR_UTF8_VALID, HR_UTF8_INVALID, HR_UTF8_INCOMPLETE } kind;
    unsigned
        len; /* VALID: bytes of the character. INVALID: bytes that one U+FFFD replaces (the maximal
                subpart of an ill-formed sequence). INCOMPLETE: len given; more bytes decide */
} hr_utf8_unit;
hr_utf8_unit hr_utf8_examine(const char *text, size_t len);

/* Code point at text[0..], which must be valid and not empty; *used is its length in bytes. */
uint32_t hr_utf8_next(const char *text, size_t *used);

/* Writes cp (a valid scalar value) and returns its length, 1 to 4. */
size_t hr_utf8_put(uint32_t cp, char out[4]);

/* Unicode White_Space. */
bool hr_char_is_space(uint32_t cp);
/* Letters, marks, digits, letter numbers, connectors, joiners: what \w means for added tokens. */
bool hr_char_is_word(uint32_t cp);

#endif
