/* Log lines of updates. */
#include "engine/update_log.h"

#include "base/buf.h"
#include "base/log.h"

enum { MAX_LISTED = 8 };

static void put_adapters(const hr_receipt *r, hr_buf *line) {
    for (size_t i = 0; i < r->n_adapters && i < MAX_LISTED; i++)
        hr_buf_printf(line, "%s%.64s (id %llu)", i == 0 ? "adapters " : ", ", r->adapters[i].name,
                      (unsigned long long)r->adapters[i].id);
    if (r->n_adapters > MAX_LISTED)
        hr_buf_printf(line, " and %zu more", r->n_adapters - MAX_LISTED);
    hr_buf_puts(line, r->n_adapters == 0 ? "no adapters" : "");
}

void hr_update_log_published(void *self, const hr_receipt *r) {
    (void)self;
    hr_buf adapters = {0};
    uint64_t ns = r->receive_ns + r->verify_ns + r->build_ns + r->publish_ns;
    bool named = r->weight_version[0] != '\0';
    put_adapters(r, &adapters);
    hr_log(HR_LOG_INFO,
           "published session %s: %s, base %s, weight version %s, %llu tensors, %llu bytes, "
           "%.1f ms",
           r->session_id, adapters.failed ? "adapters" : adapters.data,
           r->base_tensors > 0 ? "yes" : "no", named ? r->weight_version : "unchanged",
           (unsigned long long)r->tensors, (unsigned long long)r->bytes, (double)ns / 1e6);
    hr_buf_free(&adapters);
}

void hr_update_log_rolled_back(void *self, const char *session_id, const hr_error *cause) {
    (void)self;
    hr_log(HR_LOG_WARN, "rolled back session %s: %.500s", session_id, cause->message);
}
