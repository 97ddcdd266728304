/* The byte alphabet: printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and
 * up. */
#include "text/byte_level.h"

#include "text/utf8.h"

/* Others, in order: 00..20, 7F..A0, AD. */
static uint32_t char_of_byte(unsigned char b) {
    if (b <= 0x20)
        return 0x100u + b;
    if (b < 0x7F)
        return b;
    if (b <= 0xA0)
        return 0x100u + 0x21 + (b - 0x7Fu);
    if (b == 0xAD)
        return 0x100u + 0x21 + 0x22;
    return b;
}

/* -1 for a character outside the alphabet. */
static int byte_of_char(uint32_t cp) {
    if (cp >= 0x100)
        return cp <= 0x120   ? (int)(cp - 0x100)
               : cp <= 0x142 ? (int)(cp - 0x121 + 0x7F)
               : cp == 0x143 ? 0xAD
                             : -1;
    bool itself = (cp > 0x20 && cp < 0x7F) || (cp > 0xA0 && cp != 0xAD);
    return itself ? (int)cp : -1;
}

void hr_byte_level_spell(const char *bytes, size_t len, hr_buf *out) {
    char block[512];
    size_t used = 0;
    for (size_t i = 0; i < len; i++) {
        if (used > sizeof block - 4) {
            hr_buf_append(out, block, used);
            used = 0;
        }
        used += hr_utf8_put(char_of_byte((unsigned char)bytes[i]), block + used);
    }
    hr_buf_append(out, block, used);
}

static bool in_alphabet(const char *text, size_t len) {
    size_t used;
    for (size_t i = 0; i < len; i += used)
        if (byte_of_char(hr_utf8_next(text + i, &used)) < 0)
            return false;
    return true;
}

void hr_byte_level_unspell(const char *text, size_t len, hr_buf *out) {
    if (!in_alphabet(text, len)) {
        hr_buf_append(out, text, len);
        return;
    }
    size_t used;
    for (size_t i = 0; i < len; i += used)
        hr_buf_putc(out, (char)byte_of_char(hr_utf8_next(text + i, &used)));
}
