/* The headrace command: finds the subcommand and hands over. */
#include "cli/commands.h"
#include "cli/options.h"

#include <errno.h>
#include <fcntl.h>
#include <headrace/version.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"serve", "run a rollout engine: load a model, speak SGLang's HTTP API", hr_command_serve},
    {"push", "publish adapters or base weights on every engine, whole or not at all",
     hr_command_push},
    {"watch", "publish the newest checkpoint whenever a trainer has written one", hr_command_watch},
    {"status", "what every engine serves now", hr_command_status},
    {"verify", "do all engines hold exactly these bytes?", hr_command_verify},
    {"inspect", "what is in a file or directory of weights", hr_command_inspect},
    {"generate", "send one prompt to an engine", hr_command_generate},
    {"bench", "check and time the kernels, or time the steps of a model", hr_command_bench},
};

static void print_help(FILE *out) {
    fprintf(out, "usage: headrace COMMAND [OPTIONS]\n\ncommands:\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(
        out,
        "\n`headrace COMMAND --help` explains a command; `headrace --version` prints the version.\n"
        "exit codes: 0 success, 1 failure while running, 2 wrong usage; more in a command's "
        "help\n");
}

int hr_exit_error(int code, const hr_error *err) {
    fflush(stdout);
    fputs("headrace: error: ", stderr);
    hr_cli_put_clean(stderr, err->message); /* an engine's words may be in it */
    fputs(code == HR_EXIT_USAGE ? "; see --help\n" : "\n", stderr);
    return code;
}

/* Whoever starts a command with stdout closed must not find its lines in a connection or a file
 * that got the number. */
static void open_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) == -1 && errno == EBADF)
            (void)open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);
    }
}

static bool is_reader_gone(void) {
    struct pollfd out = {.fd = STDOUT_FILENO};
    return poll(&out, 1, 0) > 0 && (out.revents & POLLERR) != 0;
}

/* What a command printed may not have come to its reader: that one has left on purpose, but a full
 * disk is a failure. What push and watch have done stands all the same, as their code says. */
static int finish(const char *name, int code) {
    hr_error err;
    bool acts = strcmp(name, "push") == 0 || strcmp(name, "watch") == 0;
    if ((fflush(stdout) == 0 && !ferror(stdout)) || is_reader_gone())
        return code;
    hr_fail(&err, HR_ERR_IO, "the output could not be written to stdout");
    hr_exit_error(code, &err);
    return code == HR_EXIT_OK && !acts ? HR_EXIT_FAILURE : code;
}

static int run(const char *name, int argc, char **argv) {
    hr_error err;
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(name, commands[i].name) == 0)
            return finish(name, commands[i].run(argc, argv));
    }
    hr_fail(&err, HR_ERR_INVALID, "unknown command \"%s\"", name);
    return hr_exit_error(HR_EXIT_USAGE, &err);
}

int main(int argc, char **argv) {
    static char help_flag[] = "--help";
    char *help[] = {help_flag, NULL};
    open_standard_streams();
    if (argc < 2) {
        print_help(stderr);
        return HR_EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 && argc > 2)
        return run(argv[2], 1, help);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return HR_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("headrace %s\n", hr_version());
        return HR_EXIT_OK;
    }
    return run(argv[1], argc - 2, argv + 2);
}
