/* The parts of `headrace bench` with a file of their own. */
#ifndef HR_CLI_BENCH_H
#define HR_CLI_BENCH_H

#include "cli/commands.h"

/* `headrace bench model`: the arguments after it; returns the exit code. */
int hr_bench_model(int argc, char **argv);

#endif
