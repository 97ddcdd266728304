/* How far loading or sending has come: one line that is rewritten on a terminal, a plain line now
 * and then elsewhere. */
#ifndef HR_CLI_PROGRESS_H
#define HR_CLI_PROGRESS_H

#include "base/buf.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct hr_progress {
    const char *what; /* "loading", "pushing" */
    bool terminal;
    uint64_t start_ns, last_ns; /* monotonic */
    bool shown;
} hr_progress;

/* Reports on stderr. what is a static string. */
void hr_progress_begin(hr_progress *progress, const char *what);

/* An engine's progress callback; ctx is the hr_progress. One thread at a time. */
void hr_progress_show(void *ctx, uint64_t done_bytes, uint64_t total_bytes);

/* Removes the line from the terminal. */
void hr_progress_end(hr_progress *progress);

/* "loading 120 MB of 270 MB, 44 %, 450 MB/s, 1 s left" appended to out; elapsed_ns is the time
 * since the first byte. A total of 0 is not known. */
void hr_progress_format(const char *what, uint64_t done_bytes, uint64_t total_bytes,
                        uint64_t elapsed_ns, hr_buf *out);

#endif
