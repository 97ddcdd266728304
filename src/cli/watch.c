/* `headrace watch`: publishes the newest whole checkpoint that a trainer has written, at each look,
 * and again on engines that have lost it. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/checkpoints.h"
#include "cli/commands.h"
#include "cli/engine_calls.h"
#include "cli/holders.h"
#include "cli/publishing.h"
#include "weights/names.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* With --once: a checkpoint that stays unreadable for so many looks is no longer waited for. */
enum { UNREADABLE_LOOKS = 10 };

/* For engines to say whether they still have what was published; who is away has not lost it. */
#define ASK_MS 2000

typedef struct watch_flags {
    hr_publishing publishing;
    hr_cli_list words;
    const char *adapter;
    bool base, once;
    double interval;
    hr_cli_option table[5 + HR_PUBLISHING_FLAGS];
    size_t n;
} watch_flags;

/* What is known of a checkpoint for as long as its files stay the same. */
typedef struct past {
    unsigned looks;      /* that found it like this; it is stable at the second */
    unsigned unreadable; /* of these, the ones at which a file could not be read to its end */
    bool given_up;       /* engines have refused it */
} past;

/* What has been seen and done. */
typedef struct watch_state {
    hr_found_list found;   /* at the last look */
    past *pasts;           /* of each of them */
    bool published, empty; /* empty: it was said that nothing is there */
    uint8_t done[16];      /* what was published last */
    int64_t published_ns;  /* of it: older ones are not */
    char label[256];       /* of it */
    hr_holders holders;    /* engines that got it */
    char last_error[2100];
} watch_state;

typedef enum outcome { PUBLISHED, GIVEN_UP, TRY_AGAIN, REFUSES_ALL } outcome;

static void make_table(watch_flags *f) {
    const hr_cli_option own[] = {
        {"--adapter", HR_CLI_TEXT, &f->adapter, "NAME", "publish PEFT adapters under this name"},
        {"--base", HR_CLI_FLAG, &f->base, NULL, "or publish base weights"},
        {"--interval", HR_CLI_DECIMAL, &f->interval, "SECONDS", "between looks (default: 1)"},
        {"--once", HR_CLI_FLAG, &f->once, NULL, "end when one is published, or none can be"},
    };
    hr_publishing_init(&f->publishing);
    f->publishing.tries_again = true;
    f->interval = 1;
    memcpy(f->table, own, sizeof own);
    f->n = sizeof own / sizeof own[0];
    f->n += hr_publishing_flags(&f->publishing, f->table + f->n);
}

static void print_help(const watch_flags *f) {
    printf("usage: headrace watch DIR --engine URL... (--adapter NAME | --base)\n\n"
           "Publishes the newest whole checkpoint in DIR or DIR/checkpoint-N, looking every "
           "--interval: of several that\nwere written between two looks the older ones are left "
           "out. The folder's name becomes the weight version.\nA checkpoint is whole when its "
           "files can be read to their end and did not change between two looks. Where\nengines "
           "refuse one, the next older one is tried that is newer than what they have. An engine "
           "that restarts\ngets what was published last again. Ends with Ctrl-C.\n\n"
           "With --once, ends when one is published. Waits for a first checkpoint and for engines "
           "that are away; fails\nwhen every checkpoint is refused or stays unreadable for 10 "
           "looks, and for a wrong key.\n\n");
    hr_cli_print_options(stdout, f->table, f->n);
    printf("\nexit codes: 0 ended by a signal, or published with --once; 1 DIR cannot be read, or "
           "nothing could be\npublished with --once; 2 wrong usage\n");
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
    if (f->adapter != NULL && hr_adapter_name_check(f->adapter, err) != HR_OK)
        return hr_fail_context(err, HR_ERR_INVALID, "--adapter");
    if (!(f->interval >= 0.01 && f->interval <= 86400))
        return hr_fail(err, HR_ERR_INVALID, "--interval: wanted 0.01 to 86400 seconds");
    return HR_OK;
}

/* Says a failure once, not at each look. */
static void complain(watch_state *s, const char *path, const char *message) {
    char text[sizeof s->last_error];
    snprintf(text, sizeof text, "%.1000s: %s", path, message);
    if (strcmp(s->last_error, text) == 0)
        return;
    memcpy(s->last_error, text, sizeof text);
    hr_log(HR_LOG_WARN, "%s", text);
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
    case HR_ERR_UNSERVABLE:
        return true;
    default:
        return false;
    }
}

/* Whether the key does not open an engine's update routes. */
static bool refuses_key(const hr_publishing *to) {
    const char *path = "/weight_update_status";
    const hr_engine_ask question = {.method = "GET",
                                    .paths = &path,
                                    .n_paths = 1,
                                    .api_key = to->api_key,
                                    .timeout_ms = ASK_MS};
    hr_engine_call *calls = NULL;
    hr_error ignored; /* the push has said what is wrong */
    bool refused = false;
    if (hr_engine_calls(to->engines.items, to->engines.n, &question, &calls, &ignored) != HR_OK)
        return false;
    for (size_t i = 0; i < to->engines.n; i++)
        refused = refused || calls[i].http_status == 401 || calls[i].http_status == 403;
    hr_engine_calls_free(calls, to->engines.n);
    return refused;
}

/* Whose fault it is: the engines' for now, the checkpoint's, or of whatever else is pushed too. */
static outcome judge(const hr_publishing *to, hr_status status) {
    if (may_pass(status))
        return TRY_AGAIN;
    return to->unheard || refuses_key(to) ? REFUSES_ALL : GIVEN_UP;
}

static outcome push_to(watch_flags *f, hr_publishing *to, watch_state *s, const hr_found_weights *w,
                       hr_error *err) {
    const hr_dir_adapter adapter = {f->adapter, w->path, to->pinned};
    if (hr_weight_version_check(w->label, err) != HR_OK)
        return GIVEN_UP;
    hr_status status = hr_publishing_push(to, &adapter, f->base ? 0 : 1, f->base ? w->path : NULL,
                                          w->label, NULL, err);
    if (status != HR_OK)
        return judge(to, status);
    status = hr_holders_note(&s->holders, hr_publisher_report(to->publisher), err);
    if (status != HR_OK) /* published all the same */
        complain(s, w->path, err->message);
    return PUBLISHED;
}

static outcome publish(watch_flags *f, watch_state *s, const hr_found_weights *w, hr_error *err) {
    outcome result = push_to(f, &f->publishing, s, w, err);
    if (result == PUBLISHED) {
        s->published = true;
        s->published_ns = w->newest_ns;
        s->last_error[0] = '\0';
        memcpy(s->done, w->fingerprint, sizeof s->done);
        memcpy(s->label, w->label, sizeof s->label);
        return result;
    }
    bool ends = result == REFUSES_ALL && f->once; /* which is said at the end */
    hr_buf text = {0};
    hr_buf_printf(&text, "%.900s; %s", err->message,
                  result == GIVEN_UP ? "this checkpoint is given up" : "it is tried again");
    if (!ends)
        complain(s, w->path, text.failed ? err->message : text.data);
    hr_buf_free(&text);
    return result;
}

/* Once: a trainer may write later, or elsewhere. */
static void say_empty(const watch_flags *f, watch_state *s) {
    if (!s->empty)
        hr_log(HR_LOG_INFO, "nothing there yet: waiting for %s, in it or in a checkpoint-N of it",
               f->base ? "config.json and model*.safetensors"
                       : "adapter_config.json and adapter_model.safetensors");
    s->empty = true;
}

/* What is there now; what was known of those that are unchanged stays. */
static hr_status refresh(const watch_flags *f, watch_state *s, hr_error *err) {
    hr_found_list found = {0};
    HR_TRY(hr_checkpoints_list(f->words.items[0], f->adapter, &found, err));
    past *pasts = calloc(found.n + 1, sizeof *pasts);
    if (pasts == NULL) {
        hr_found_list_free(&found);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu checkpoints", found.n);
    }
    for (size_t i = 0; i < found.n; i++) {
        for (size_t k = 0; k < s->found.n && pasts[i].looks == 0; k++) {
            if (memcmp(found.items[i].fingerprint, s->found.items[k].fingerprint,
                       sizeof found.items[i].fingerprint) == 0)
                pasts[i] = s->pasts[k];
        }
        pasts[i].looks++;
    }
    hr_found_list_free(&s->found);
    free(s->pasts);
    s->found = found;
    s->pasts = pasts;
    return HR_OK;
}

static bool is_done(const watch_state *s, const hr_found_weights *w) {
    return s->published &&
           (memcmp(w->fingerprint, s->done, sizeof s->done) == 0 || w->newest_ns < s->published_ns);
}

/* Whether a checkpoint is whole now. *waits: it is not, but may be at another look. */
static bool is_whole(const watch_flags *f, watch_state *s, size_t at, bool *waits, hr_error *err) {
    past *p = &s->pasts[at];
    if (p->looks < 2) {
        *waits = true;
        return false;
    }
    if (hr_checkpoints_check(s->found.items[at].path, !f->base, err) == HR_OK)
        return true;
    if (p->unreadable == 0)
        complain(s, s->found.items[at].path, err->message);
    if (p->unreadable < UNREADABLE_LOOKS)
        p->unreadable++;
    *waits = *waits || p->unreadable < UNREADABLE_LOOKS;
    return false;
}

/* The newest one that engines take, of those that are newer than what they have. Fails where --once
 * can come to nothing. */
static hr_status publish_newest(watch_flags *f, watch_state *s, hr_error *err) {
    bool waits = false;
    hr_error why;
    for (size_t i = 0; i < s->found.n && !is_done(s, &s->found.items[i]); i++) {
        if (s->pasts[i].given_up || !is_whole(f, s, i, &waits, &why))
            continue;
        outcome result = publish(f, s, &s->found.items[i], &why);
        if (result == REFUSES_ALL && f->once)
            return hr_fail(err, why.status, "nothing was published: %.900s", why.message);
        if (result != GIVEN_UP)
            return HR_OK;
        s->pasts[i].given_up = true;
    }
    if (f->once && !s->published && s->found.n > 0 && !waits && !hr_publishing_stopped())
        return hr_fail(
            err, HR_ERR_NOT_FOUND, "%s: nothing was published: there %s %zu checkpoint%s, and %s",
            f->words.items[0], s->found.n == 1 ? "is" : "are", s->found.n,
            s->found.n == 1 ? "" : "s", s->found.n == 1 ? "it is given up" : "all are given up");
    return HR_OK;
}

/* ---- engines that restarted ---- */

static const hr_found_weights *find_done(const watch_state *s) {
    for (size_t i = 0; i < s->found.n; i++) {
        if (memcmp(s->found.items[i].fingerprint, s->done, sizeof s->done) == 0)
            return &s->found.items[i];
    }
    return NULL;
}

/* What was published goes to this engine alone: the others have it. */
static void push_again(watch_flags *f, watch_state *s, const char *engine,
                       const hr_found_weights *w) {
    hr_error err;
    hr_publishing to = f->publishing;
    to.engines = (hr_cli_list){.items = {engine}, .n = 1};
    to.publisher = NULL;
    outcome result =
        hr_publishing_open(&to, &err) == HR_OK ? push_to(f, &to, s, w, &err) : GIVEN_UP;
    if (result == PUBLISHED) {
        hr_log(HR_LOG_WARN, "engine %s had lost %s, as after a restart: it was pushed again",
               engine, w->label);
    } else if (result == GIVEN_UP) {
        hr_log(HR_LOG_WARN, "engine %s has lost %s and does not take it again: %s", engine,
               w->label, err.message);
        hr_holders_drop(&s->holders, engine);
    } else {
        complain(s, w->path, err.message);
    }
    hr_publishing_close(&to);
}

static hr_status restore(watch_flags *f, watch_state *s, hr_error *err) {
    const uint64_t timeout_ms = f->publishing.timeout_ms;
    const hr_held held = {f->adapter, s->label, f->publishing.api_key,
                          timeout_ms < ASK_MS ? timeout_ms : ASK_MS};
    const hr_found_weights *w = find_done(s);
    hr_cli_list lost;
    HR_TRY(hr_holders_lost(&s->holders, &held, &lost, err));
    for (size_t i = 0; i < lost.n && w != NULL && !hr_publishing_stopped(); i++)
        push_again(f, s, lost.items[i], w);
    if (lost.n == 0 || w != NULL)
        return HR_OK;
    hr_log(HR_LOG_WARN,
           "engine %s has lost %s, whose files are gone: all engines get the newest there is",
           lost.items[0], s->label);
    s->published = false;
    return HR_OK;
}

/* One look. */
static hr_status look(watch_flags *f, watch_state *s, hr_error *err) {
    HR_TRY(refresh(f, s, err));
    if (s->found.n == 0)
        say_empty(f, s);
    if (s->published)
        HR_TRY(restore(f, s, err));
    return publish_newest(f, s, err);
}

static void pause_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&left, NULL); /* a signal ends it early */
}

static hr_status watch(watch_flags *f, hr_error *err) {
    watch_state state = {0};
    hr_status status = HR_OK;
    hr_log(HR_LOG_INFO, "watching %s", f->words.items[0]);
    while (status == HR_OK && !hr_publishing_stopped() && !(f->once && state.published)) {
        status = look(f, &state, err);
        if (status == HR_OK && !hr_publishing_stopped() && !(f->once && state.published))
            pause_for(f->interval);
    }
    hr_holders_free(&state.holders);
    hr_found_list_free(&state.found);
    free(state.pasts);
    return status;
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
