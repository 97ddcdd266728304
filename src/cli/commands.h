/* The subcommands. Each takes the arguments after its name and returns the exit code of the
 * process. */
#ifndef HR_CLI_COMMANDS_H
#define HR_CLI_COMMANDS_H

#include "base/error.h"

/* What every command exits with; push also with PARTIAL (it failed, but engines serve the new
 * weights or a part of them, or may), verify with DIFFERS. */
enum {
    HR_EXIT_OK = 0,
    HR_EXIT_FAILURE = 1,
    HR_EXIT_USAGE = 2,
    HR_EXIT_PARTIAL = 3,
    HR_EXIT_DIFFERS = 4
};

/* "headrace: error: <message>" as one line on stderr, which points at --help after wrong usage;
 * returns code. */
int hr_exit_error(int code, const hr_error *err);

int hr_command_serve(int argc, char **argv);
int hr_command_bench(int argc, char **argv);
int hr_command_push(int argc, char **argv);
int hr_command_watch(int argc, char **argv);
int hr_command_status(int argc, char **argv);
int hr_command_generate(int argc, char **argv);
int hr_command_inspect(int argc, char **argv);
int hr_command_verify(int argc, char **argv);

#endif
