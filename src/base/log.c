/* Log lines on stderr. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_int lowest = HR_LOG_INFO;

void hr_log_set_level(hr_log_level level) {
    atomic_store_explicit(&lowest, (int)level, memory_order_relaxed);
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
    for (; said < used;
         said++) /* words of a client write no lines of their own, nor on a terminal */
        if ((unsigned char)line[said] < 0x20 || line[said] == 0x7f)
            line[said] = ' ';
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written; /* nowhere left to report to */
}
