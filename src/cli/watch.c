/* `headrace watch`: publishes each whole checkpoint that a trainer writes, the newest one first. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/checkpoints.h"
#include "cli/commands.h"
#include "cli/publishing.h"
#include "tensor/digest.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct watch_flags {
    hr_publishing publishing;
    hr_cli_list words;
    const char *adapter;
    bool base, once;
    double interval;
    hr_cli_option table[5 + HR_PUBLISHING_FLAGS];
    size_t n;
} watch_flags;

/* What has been seen and done. */
typedef struct watch_state {
    uint8_t seen[16];      /* the newest at the last look: stable when it is the same again */
    uint8_t done[16];      /* published, or refused for good */
    int64_t published_ns;  /* of what was published: older ones are not */
    bool published, empty; /* empty: it was said that nothing is there */
    char last_error[1024];
} watch_state;

static void make_table(watch_flags *f) {
    const hr_cli_option own[] = {
        {"--adapter", HR_CLI_TEXT, &f->adapter, "NAME", "publish PEFT adapters under this name"},
        {"--base", HR_CLI_FLAG, &f->base, NULL, "or publish base weights"},
        {"--interval", HR_CLI_DECIMAL, &f->interval, "SECONDS", "between looks (default: 1)"},
        {"--once", HR_CLI_FLAG, &f->once, NULL, "end after the first one that is published"},
    };
    hr_publishing_init(&f->publishing);
    f->publishing.tries_again = true;
    f->interval = 1;
    memcpy(f->table, own, sizeof own);
    f->n = sizeof own / sizeof own[0];
    f->n += hr_publishing_flags(&f->publishing, f->table + f->n);
}

static void print_help(const watch_flags *f) {
    printf(
        "usage: headrace watch DIR --engine URL... (--adapter NAME | --base)\n\n"
        "Publishes each whole checkpoint that a trainer writes to DIR or DIR/checkpoint-N, once, "
        "the newest\nfirst; its folder's name becomes the weight version. A checkpoint is whole "
        "when its files can be\nread to their end and did not change between two looks. Ends "
        "with Ctrl-C.\n\n");
    hr_cli_print_options(stdout, f->table, f->n);
    printf("\nexit codes: 0 ended by a signal or --once; 1 DIR cannot be read; 2 wrong usage\n");
}

static hr_status check(const watch_flags *f, hr_error *err) {
    if (f->words.n != 1)
        return hr_fail(err, HR_ERR_INVALID, "wanted one directory to watch, came %zu", f->words.n);
    if ((f->adapter != NULL) == f->base)
        return hr_fail(err, HR_ERR_INVALID, "give --adapter NAME or --base");
    const char *equals = f->adapter != NULL ? strchr(f->adapter, '=') : NULL;
    if (equals != NULL)
        return hr_fail(
            err, HR_ERR_INVALID,
            "--adapter: watch takes the name alone: --adapter %.*s, with the directory as "
            "the first word",
            (int)(equals - f->adapter), f->adapter);
    if (!(f->interval >= 0.01 && f->interval <= 86400))
        return hr_fail(err, HR_ERR_INVALID, "--interval: wanted 0.01 to 86400 seconds");
    return HR_OK;
}

/* Says a failure once, not at each look. */
static void complain(watch_state *s, const char *path, const char *message) {
    if (strcmp(s->last_error, message) == 0)
        return;
    snprintf(s->last_error, sizeof s->last_error, "%s", message);
    hr_log(HR_LOG_WARN, "%s: %s", path, message);
}

/* Whether another try can help: the engine was away or busy, not of another opinion. */
static bool may_pass(hr_status status) {
    switch (status) {
    case HR_ERR_PEER:
    case HR_ERR_TIMEOUT:
    case HR_ERR_BUSY:
    case HR_ERR_SESSION:
    case HR_ERR_STOPPING:
    case HR_ERR_NO_MEMORY:
    case HR_ERR_CANCELLED:
        return true;
    default:
        return false;
    }
}

static void publish(watch_flags *f, watch_state *s, const hr_found_weights *w) {
    hr_error err;
    const hr_dir_adapter adapter = {f->adapter, w->path, f->publishing.pinned};
    hr_status status = hr_publishing_push(&f->publishing, &adapter, f->base ? 0 : 1,
                                          f->base ? w->path : NULL, w->label, NULL, &err);
    if (status == HR_OK) {
        s->published = true;
        s->published_ns = w->newest_ns;
        s->last_error[0] = '\0';
        memcpy(s->done, w->fingerprint, sizeof s->done);
        return;
    }
    hr_buf text = {0};
    hr_buf_printf(&text, "%.900s; %s", err.message,
                  may_pass(status) ? "it is tried again"
                                   : "this checkpoint is given up, the next one is tried");
    complain(s, w->path, text.failed ? err.message : text.data);
    hr_buf_free(&text);
    if (!may_pass(status))
        memcpy(s->done, w->fingerprint, sizeof s->done);
}

/* Once: a trainer may write later, or elsewhere. */
static void say_empty(const watch_flags *f, watch_state *s) {
    if (!s->empty)
        hr_log(HR_LOG_INFO, "nothing there yet: waiting for %s, in it or in a checkpoint-N of it",
               f->base ? "config.json and model*.safetensors"
                       : "adapter_config.json and adapter_model.safetensors");
    s->empty = true;
}

/* One look. */
static hr_status look(watch_flags *f, watch_state *s, hr_error *err) {
    hr_found_weights w;
    hr_error incomplete;
    bool found = false;
    HR_TRY(hr_checkpoints_newest(f->words.items[0], f->adapter, &w, &found, err));
    if (!found)
        say_empty(f, s);
    if (!found || memcmp(w.fingerprint, s->done, sizeof s->done) == 0 ||
        (s->published && w.newest_ns < s->published_ns))
        return HR_OK;
    bool stable = memcmp(w.fingerprint, s->seen, sizeof s->seen) == 0;
    memcpy(s->seen, w.fingerprint, sizeof s->seen);
    if (!stable)
        return HR_OK;
    if (hr_checkpoints_check(w.path, !f->base, &incomplete) != HR_OK)
        complain(s, w.path, incomplete.message);
    else
        publish(f, s, &w);
    return HR_OK;
}

static void pause_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&left, NULL); /* a signal ends it early */
}

static hr_status watch(watch_flags *f, hr_error *err) {
    watch_state state = {0};
    hr_log(HR_LOG_INFO, "watching %s", f->words.items[0]);
    while (!hr_publishing_stopped() && !(f->once && state.published)) {
        HR_TRY(look(f, &state, err));
        if (!hr_publishing_stopped() && !(f->once && state.published))
            pause_for(f->interval);
    }
    return HR_OK;
}

int hr_command_watch(int argc, char **argv) {
    hr_error err;
    bool help = false;
    watch_flags *f = calloc(1, sizeof *f);
    int code = HR_EXIT_OK;
    if (f == NULL) {
        hr_fail(&err, HR_ERR_NO_MEMORY, "out of memory");
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    }
    make_table(f);
    if (hr_cli_parse(argc, argv, f->table, f->n, &f->words, &help, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_USAGE, &err);
    } else if (help) {
        print_help(f);
    } else if (check(f, &err) != HR_OK || hr_publishing_open(&f->publishing, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_USAGE, &err);
    } else if (watch(f, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_FAILURE, &err);
    }
    hr_publishing_close(&f->publishing);
    free(f);
    return code;
}
