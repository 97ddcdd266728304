/* What `push` and `watch` share: flags of a publisher, a push of directories, its receipt. */
#ifndef HR_CLI_PUBLISHING_H
#define HR_CLI_PUBLISHING_H

#include "cli/options.h"
#include "cli/progress.h"
#include "publish/dir_source.h"

#include <headrace/publisher.h>

typedef struct hr_publishing {
    /* filled by flags */
    hr_cli_list engines;
    const char *transport, *pause, *api_key;
    uint64_t bucket_size;
    double timeout; /* seconds */
    bool audit, pinned, json;
    bool tries_again; /* set by whoever repeats a push: failures are its to tell */
    bool unheard; /* the last push failed before engines heard of it: for a key, a transport or an
                     engine that is away, not for what is in it */
    /* filled by hr_publishing_open */
    uint64_t timeout_ms;
    hr_publisher *publisher;
    hr_progress progress;
} hr_publishing;

/* Defaults; api_key is HEADRACE_API_KEY of the environment. */
void hr_publishing_init(hr_publishing *publishing);

/* Appends the flags to a table with room for HR_PUBLISHING_FLAGS more; returns their number. */
enum { HR_PUBLISHING_FLAGS = 9 };
size_t hr_publishing_flags(hr_publishing *publishing, hr_cli_option *table);

/* Checks the flags and makes the publisher. Ctrl-C cancels its pushes from then on. ERR_INVALID. */
hr_status hr_publishing_open(hr_publishing *publishing, hr_error *err);
void hr_publishing_close(hr_publishing *publishing);

/* Reads the directories and publishes them. complete base weights are demanded when base is given.
 * The receipt is printed, as lines or as JSON; on failure, with --json, the report is. What a
 * success leaves in doubt is a warning on stderr. */
hr_status hr_publishing_push(hr_publishing *publishing, const hr_dir_adapter *adapters, size_t n,
                             const char *base, const char *weight_version, const char *session_id,
                             hr_error *err);
hr_status hr_publishing_resume(hr_publishing *publishing, const char *session_id,
                               const char *weight_version, hr_error *err);

/* Ends the session on all engines; where it is not open there is nothing to do, which is said.
 * Fails for an engine that does not answer, refuses, or has published it. */
hr_status hr_publishing_abort(hr_publishing *publishing, const char *session_id, hr_error *err);

/* Whether Ctrl-C or SIGTERM came. */
bool hr_publishing_stopped(void);

/* Whether the last push or resume, which failed, has left every engine as it was. */
bool hr_publishing_is_nothing(const hr_publishing *publishing);

/* "NAME=DIR" of a flag taken apart; *name is the caller's to free. ERR_INVALID. */
hr_status hr_cli_adapter(const char *text, char **name, const char **dir, hr_error *err);

#endif
