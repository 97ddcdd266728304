/* UTF-8 checking and decoding. */
#include "text/utf8.h"

#include <string.h>
#include <utf8proc.h>

/* Bounds of the second byte after a lead; the later ones are always 80..BF. Length 0: not a lead
 * byte. */
static unsigned lead_length(unsigned char lead, unsigned char *low, unsigned char *high) {
    *low = 0x80;
    *high = 0xBF;
    if (lead < 0x80)
        return 1;
    if (lead < 0xC2 || lead > 0xF4)
        return 0;
    if (lead < 0xE0)
        return 2;
    if (lead < 0xF0) {
        if (lead == 0xE0)
            *low = 0xA0;
        if (lead == 0xED)
            *high = 0x9F;
        return 3;
    }
    if (lead == 0xF0)
        *low = 0x90;
    if (lead == 0xF4)
        *high = 0x8F;
    return 4;
}

hr_utf8_unit hr_utf8_examine(const char *text, size_t len) {
    const unsigned char *bytes = (const unsigned char *)text;
    unsigned char low, high;
    unsigned need = lead_length(bytes[0], &low, &high);
    if (need == 0)
        return (hr_utf8_unit){HR_UTF8_INVALID, 1};
    for (unsigned i = 1; i < need; i++) {
        if (i == len)
            return (hr_utf8_unit){HR_UTF8_INCOMPLETE, i};
        if (bytes[i] < low || bytes[i] > high)
            return (hr_utf8_unit){HR_UTF8_INVALID, i};
        low = 0x80;
        high = 0xBF;
    }
    return (hr_utf8_unit){HR_UTF8_VALID, need};
}

size_t hr_utf8_valid_prefix(const char *text, size_t len) {
    size_t at = 0;
    while (at < len) {
        if ((unsigned char)text[at] < 0x80) {
            at++;
            continue;
        }
        hr_utf8_unit unit = hr_utf8_examine(text + at, len - at);
        if (unit.kind != HR_UTF8_VALID)
            break;
        at += unit.len;
    }
    return at;
}

uint32_t hr_utf8_next(const char *text, size_t *used) {
    const unsigned char *b = (const unsigned char *)text;
    if (b[0] < 0x80) {
        *used = 1;
        return b[0];
    }
    if (b[0] < 0xE0) {
        *used = 2;
        return (uint32_t)(b[0] & 0x1F) << 6 | (b[1] & 0x3Fu);
    }
    if (b[0] < 0xF0) {
        *used = 3;
        return (uint32_t)(b[0] & 0x0F) << 12 | (uint32_t)(b[1] & 0x3F) << 6 | (b[2] & 0x3Fu);
    }
    *used = 4;
    return (uint32_t)(b[0] & 0x07) << 18 | (uint32_t)(b[1] & 0x3F) << 12 |
           (uint32_t)(b[2] & 0x3F) << 6 | (b[3] & 0x3Fu);
}

size_t hr_utf8_put(uint32_t cp, char out[4]) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

bool hr_char_is_space(uint32_t cp) {
    return (cp >= 0x09 && cp <= 0x0D) || cp == 0x20 || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

/* Symbols that Unicode counts as alphabetic although their category is So. */
static bool is_enclosed_letter(uint32_t cp) {
    return (cp >= 0x24B6 && cp <= 0x24E9) || (cp >= 0x1F130 && cp <= 0x1F149) ||
           (cp >= 0x1F150 && cp <= 0x1F169) || (cp >= 0x1F170 && cp <= 0x1F189);
}

bool hr_char_is_word(uint32_t cp) {
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return cp == 0x200C || cp == 0x200D || is_enclosed_letter(cp);
    }
}
