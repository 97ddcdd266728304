/* The headrace command: finds the subcommand and hands over. */
#include "cli/commands.h"
#include "cli/options.h"

#include <headrace/version.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"serve", "run a rollout engine: load a model, speak SGLang's HTTP API", hr_command_serve},
    {"push", "publish adapters or base weights on every engine, whole or not at all",
     hr_command_push},
    {"watch", "publish each checkpoint that a trainer writes", hr_command_watch},
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
    fputc('\n', stderr);
    return code;
}

int main(int argc, char **argv) {
    hr_error err;
    if (argc < 2) {
        print_help(stderr);
        return HR_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return HR_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("headrace %s\n", hr_version());
        return HR_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    }
    hr_fail(&err, HR_ERR_INVALID, "unknown command \"%s\"; `headrace --help` lists them", argv[1]);
    return hr_exit_error(HR_EXIT_USAGE, &err);
}
