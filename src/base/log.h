/* Log lines on stderr: "[2026-11-29 18:00:00] LEVEL message". One write per line, so lines of
 * several threads never mix. Keys and payloads are never logged. */
#ifndef HR_BASE_LOG_H
#define HR_BASE_LOG_H

typedef enum hr_log_level { HR_LOG_DEBUG, HR_LOG_INFO, HR_LOG_WARN, HR_LOG_ERROR } hr_log_level;

/* The only global of the library, set once by the program at start: lines below it are dropped.
 * Default HR_LOG_INFO. */
void hr_log_set_level(hr_log_level level);

void hr_log(hr_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
