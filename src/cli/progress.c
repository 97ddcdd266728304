/* How far loading or sending has come. */
#include "cli/progress.h"

#include "base/clock.h"

#include <stdio.h>
#include <unistd.h>

#define TERMINAL_NS UINT64_C(100000000)
#define PLAIN_NS UINT64_C(5000000000)

void hr_progress_format(const char *what, uint64_t done_bytes, uint64_t total_bytes,
                        uint64_t elapsed_ns, hr_buf *out) {
    double done = (double)done_bytes, total = (double)total_bytes,
           seconds = (double)elapsed_ns * 1e-9;
    double rate = seconds > 0 ? done / seconds : 0;
    hr_buf_printf(out, "%s %.0f MB", what, done / 1e6);
    if (total > 0)
        hr_buf_printf(out, " of %.0f MB, %.0f %%", total / 1e6, 100 * done / total);
    if (rate > 0)
        hr_buf_printf(out, ", %.0f MB/s", rate / 1e6);
    if (rate > 0 && total > 0)
        hr_buf_printf(out, ", %.0f s left", total > done ? (total - done) / rate : 0);
}

static uint64_t now_ns(void) {
    hr_clock clock = hr_clock_monotonic();
    return hr_now_ns(&clock);
}

void hr_progress_begin(hr_progress *progress, const char *what) {
    uint64_t now = now_ns();
    *progress = (hr_progress){
        .what = what, .terminal = isatty(STDERR_FILENO) == 1, .start_ns = now, .last_ns = now};
}

void hr_progress_show(void *ctx, uint64_t done_bytes, uint64_t total_bytes) {
    hr_progress *p = ctx;
    uint64_t now = now_ns();
    if (now - p->last_ns < (p->terminal ? TERMINAL_NS : PLAIN_NS))
        return;
    p->last_ns = now;
    hr_buf line = {0};
    hr_progress_format(p->what, done_bytes, total_bytes, now - p->start_ns, &line);
    if (!line.failed)
        fprintf(stderr, p->terminal ? "\r%s\033[K" : "%s\n", line.data);
    fflush(stderr);
    hr_buf_free(&line);
    p->shown = true;
}

void hr_progress_end(hr_progress *progress) {
    if (progress->terminal && progress->shown)
        fputs("\r\033[K", stderr);
}
