/* Log lines on stderr. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_int lowest = HR_LOG_INFO;

void hr_log_set_level(hr_log_level level) {
    atomic_store_explicit(&lowest, (int)level, memory_order_relaxed);
}

/* Bytes of the valid UTF-8 sequence of more than one byte at text; 0: there is none. */
static size_t sequence_at(const unsigned char *text, size_t len) {
    unsigned char first = text[0];
    size_t n = first >= 0xf0 && first <= 0xf4   ? 4
               : first >= 0xe0 && first <= 0xef ? 3
               : first >= 0xc2 && first <= 0xdf ? 2
                                                : 0;
    if (n == 0 || n > len)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (first == 0xe0 && text[1] < 0xa0) || (first == 0xf0 && text[1] < 0x90);
    bool surrogate = first == 0xed && text[1] > 0x9f;
    bool beyond = first == 0xf4 && text[1] > 0x8f;
    return overlong || surrogate || beyond ? 0 : n;
}

/* Words of a client write no lines of their own, nor on a terminal, and whoever reads the log reads
 * text: a reader that stops at a bad byte leaves a full pipe behind, and a full pipe stops us. */
static void make_plain(char *text, size_t len) {
    unsigned char *at = (unsigned char *)text;
    for (size_t i = 0; i < len;) {
        size_t n = at[i] < 0x80 ? 1 : sequence_at(at + i, len - i);
        if (n == 0 || (n == 1 && (at[i] < 0x20 || at[i] == 0x7f)))
            at[i] = n == 0 ? '?' : ' ';
        i += n > 0 ? n : 1;
    }
}

void hr_log(hr_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"DEBUG", "INFO", "WARN", "ERROR"};
    if ((int)level < atomic_load_explicit(&lowest, memory_order_relaxed))
        return;
    char line[2048];
    time_t now = time(NULL);
    struct tm tm;
    localtime_r(&now, &tm);
    size_t used = strftime(line, sizeof line, "[%Y-%m-%d %H:%M:%S] ", &tm);
    used += (size_t)snprintf(line + used, sizeof line - used, "%s ", names[level]);
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line + used, sizeof line - used - 1, fmt, args);
    va_end(args);
    if (n < 0)
        return;
    size_t said = used;
    used += (size_t)n < sizeof line - used - 1 ? (size_t)n : sizeof line - used - 2;
    make_plain(line + said, used - said);
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written; /* nowhere left to report to */
}
