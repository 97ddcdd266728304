/* Which directory of a training run holds the newest whole set of weights. */
#ifndef HR_CLI_CHECKPOINTS_H
#define HR_CLI_CHECKPOINTS_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

/* Weights in a directory, as its files say without being read. */
typedef struct hr_found_weights {
    char path[4096];
    char label[256];         /* the directory's own name, "checkpoint-100" */
    uint8_t fingerprint[16]; /* of names, sizes, times and inodes of its files */
    int64_t newest_ns;       /* latest change of a file */
    uint64_t step;           /* of "checkpoint-N"; 0 for another */
} hr_found_weights;

/* Looks at root itself and at root/checkpoint-N; with an adapter's name also at the folder of that
 * name in each of them, where PEFT puts an adapter that is not called "default". Of those that have
 * the files of an adapter (adapter NULL: of a base model), the one changed last; of equals the
 * highest step. *found false when there is none. ERR_NOT_FOUND when root cannot be read. */
hr_status hr_checkpoints_newest(const char *root, const char *adapter, hr_found_weights *newest,
                                bool *found, hr_error *err);

/* Whether every file can be read whole now. The reason why not goes to err. */
hr_status hr_checkpoints_check(const char *path, bool is_adapter, hr_error *err);

#endif
