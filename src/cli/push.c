/* `headrace push`: adapters and a base checkpoint from directories to every engine. */
#include "cli/commands.h"
#include "cli/publishing.h"
#include "weights/names.h"

#include <stdlib.h>
#include <string.h>

typedef struct push_flags {
    hr_publishing publishing;
    hr_cli_list adapters;
    const char *base, *version, *session, *resume, *abort;
    hr_cli_option table[6 + HR_PUBLISHING_FLAGS];
    size_t n;
} push_flags;

static void make_table(push_flags *f) {
    const hr_cli_option own[] = {
        {"--adapter", HR_CLI_LIST, &f->adapters, "NAME=DIR...",
         "PEFT directories, each under its name"},
        {"--base", HR_CLI_TEXT, &f->base, "DIR", "base weights of a Hugging Face model directory"},
        {"--version", HR_CLI_TEXT, &f->version, "V", "weight version that engines say afterwards"},
        {"--session-id", HR_CLI_TEXT, &f->session, "ID", "instead of one that is made"},
        {"--resume", HR_CLI_TEXT, &f->resume, "ID",
         "finish a push whose commit was interrupted; sends no weights"},
        {"--abort", HR_CLI_TEXT, &f->abort, "ID",
         "end a session that a dead trainer left open; nothing of it is served"},
    };
    hr_publishing_init(&f->publishing);
    memcpy(f->table, own, sizeof own);
    f->n = sizeof own / sizeof own[0];
    f->n += hr_publishing_flags(&f->publishing, f->table + f->n);
}

static void print_help(const push_flags *f) {
    printf("usage: headrace push --engine URL... [--adapter NAME=DIR]... [--base DIR] "
           "[--version V]\n\n"
           "Publishes adapters and base weights on all engines: everywhere or nowhere, checked by "
           "digests,\nand prints a receipt.\n\n");
    hr_cli_print_options(stdout, f->table, f->n);
    printf(
        "\nexit codes: 0 all engines serve the new weights; 1 failed, and no engine serves "
        "anything of it;\n2 wrong usage; 3 failed, but engines serve it or a part of it, or may: "
        "the message says which, and\nwhether --resume ID or a new push is the way on. With "
        "--abort: 0 no engine has the session open;\n1 one has published it, refused or did not "
        "answer.\n\n"
        "An engine takes one session at a time: a push waits up to 1.25 times its --timeout for "
        "one that is\nopen. A session that nobody speaks to is dropped after its lease, here a "
        "little more than --timeout;\n--abort ID ends it at once (`headrace status` shows its "
        "ID).\n");
}

static hr_status check_names(const push_flags *f, hr_error *err) {
    const char *const sessions[] = {f->session, f->resume, f->abort};
    static const char *const flags[] = {"--session-id", "--resume", "--abort"};
    for (size_t i = 0; i < 3; i++) {
        if (sessions[i] != NULL && hr_session_id_check(sessions[i], err) != HR_OK)
            return hr_fail_context(err, HR_ERR_INVALID, "%s", flags[i]);
    }
    if (f->version != NULL && hr_weight_version_check(f->version, err) != HR_OK)
        return hr_fail_context(err, HR_ERR_INVALID, "--version");
    if (f->base != NULL && f->base[0] == '\0')
        return hr_fail(err, HR_ERR_INVALID, "--base is empty; wanted a directory");
    return HR_OK;
}

static hr_status check(const push_flags *f, hr_error *err) {
    bool sends = f->adapters.n > 0 || f->base != NULL;
    for (size_t i = 0; i < f->adapters.n; i++) {
        char *name = NULL;
        const char *dir = NULL;
        HR_TRY(hr_cli_adapter(f->adapters.items[i], &name, &dir, err));
        size_t len = strlen(name);
        free(name);
        for (size_t k = 0; k < i; k++) {
            if (strncmp(f->adapters.items[i], f->adapters.items[k], len + 1) == 0)
                return hr_fail(err, HR_ERR_INVALID, "--adapter: %.*s is listed twice", (int)len,
                               f->adapters.items[i]);
        }
    }
    if (f->resume != NULL && (sends || f->session != NULL))
        return hr_fail(err, HR_ERR_INVALID,
                       "--resume sends no weights: leave --adapter, --base and --session-id away");
    if (f->abort != NULL && (sends || f->session != NULL || f->resume != NULL))
        return hr_fail(err, HR_ERR_INVALID,
                       "--abort sends no weights: leave --adapter, --base, --session-id and "
                       "--resume away");
    if (f->resume == NULL && f->abort == NULL && !sends)
        return hr_fail(err, HR_ERR_INVALID, "nothing to push: give --adapter NAME=DIR or --base");
    return check_names(f, err);
}

static hr_status push(push_flags *f, hr_dir_adapter *adapters, char **names, hr_error *err) {
    for (size_t i = 0; i < f->adapters.n; i++) {
        HR_TRY(hr_cli_adapter(f->adapters.items[i], &names[i], &adapters[i].dir, err));
        adapters[i].name = names[i];
        adapters[i].pinned = f->publishing.pinned;
    }
    return hr_publishing_push(&f->publishing, adapters, f->adapters.n, f->base, f->version,
                              f->session, err);
}

static hr_status run(push_flags *f, hr_error *err) {
    if (f->abort != NULL)
        return hr_publishing_abort(&f->publishing, f->abort, err);
    if (f->resume != NULL)
        return hr_publishing_resume(&f->publishing, f->resume, f->version, err);
    hr_dir_adapter *adapters = calloc(f->adapters.n + 1, sizeof *adapters);
    char **names = calloc(f->adapters.n + 1, sizeof *names);
    hr_status status = adapters != NULL && names != NULL
                           ? push(f, adapters, names, err)
                           : hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the adapters");
    for (size_t i = 0; names != NULL && i < f->adapters.n; i++)
        free(names[i]);
    free(names);
    free(adapters);
    return status;
}

/* Says what the exit code says; where something was published the message has who has it. */
static int fail(const push_flags *f, const hr_error *err) {
    hr_error said = *err;
    if (f->abort != NULL)
        return hr_exit_error(HR_EXIT_FAILURE, err);
    if (!hr_publishing_is_nothing(&f->publishing))
        return hr_exit_error(HR_EXIT_PARTIAL, err);
    if (f->resume == NULL)
        hr_fail(&said, err->status, "%.900s; nothing was published", err->message);
    return hr_exit_error(HR_EXIT_FAILURE, &said);
}

int hr_command_push(int argc, char **argv) {
    hr_error err;
    bool help = false;
    push_flags *f = calloc(1, sizeof *f);
    int code = HR_EXIT_OK;
    if (f == NULL) {
        hr_fail(&err, HR_ERR_NO_MEMORY, "out of memory");
        return hr_exit_error(HR_EXIT_FAILURE, &err);
    }
    make_table(f);
    if (hr_cli_parse(argc, argv, f->table, f->n, NULL, &help, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_USAGE, &err);
    } else if (help) {
        print_help(f);
    } else if (hr_publishing_open(&f->publishing, &err) != HR_OK || check(f, &err) != HR_OK) {
        code = hr_exit_error(HR_EXIT_USAGE, &err);
    } else if (run(f, &err) != HR_OK) {
        code = fail(f, &err);
    }
    hr_publishing_close(&f->publishing);
    free(f);
    return code;
}
