/* Which bytes may stand in a JSON string. */
#include "format/json_bytes.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static bool continues(const char *text, size_t len, size_t from, size_t n) {
    if (from + n > len)
        return false;
    for (size_t i = from; i < from + n; i++) {
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return false;
    }
    return true;
}

size_t hr_utf8_sequence(const char *text, size_t len) {
    if (len == 0)
        return 0;
    unsigned char first = (unsigned char)text[0];
    unsigned char second = len > 1 ? (unsigned char)text[1] : 0;
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return continues(text, len, 1, 1) ? 2 : 0;
    if (first >= 0xe0 && first <= 0xef) {
        bool overlong = first == 0xe0 && second < 0xa0;
        bool surrogate = first == 0xed && second >= 0xa0;
        return !overlong && !surrogate && continues(text, len, 1, 2) ? 3 : 0;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        bool overlong = first == 0xf0 && second < 0x90;
        bool beyond = first == 0xf4 && second >= 0x90;
        return !overlong && !beyond && continues(text, len, 1, 3) ? 4 : 0;
    }
    return 0;
}

size_t hr_json_plain(const char *text, size_t n) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    size_t at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, sizeof word);
        uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');
        uint64_t low = word - ones * 0x20; /* top bits tell, from the first byte that is below on */
        if (((low | (quote - ones) | (slash - ones) | word) & tops) != 0)
            break;
    }
    return at;
}
