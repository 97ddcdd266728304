/* Which directories of a training run hold weights, and whether they are whole. */
#ifndef HR_CLI_CHECKPOINTS_H
#define HR_CLI_CHECKPOINTS_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Weights in a directory, as its files say without being read. */
typedef struct hr_found_weights {
    char path[4096];
    char label[256];         /* the directory's own name, "checkpoint-100" */
    uint8_t fingerprint[16]; /* of names, sizes, times and inodes of its files */
    int64_t newest_ns;       /* latest change of a file */
    uint64_t step;           /* of "checkpoint-N"; 0 for another */
} hr_found_weights;

typedef struct hr_found_list {
    hr_found_weights *items; /* newest first: changed last, of equals the highest step */
    size_t n;
} hr_found_list;

/* Looks at root itself and at root/checkpoint-N; with an adapter's name also at the folder of that
 * name in each of them, where PEFT puts an adapter that is not called "default". Lists those that
 * have the files of an adapter (adapter NULL: of a base model); free it with hr_found_list_free.
 * ERR_NOT_FOUND when root cannot be read, ERR_NO_MEMORY. */
hr_status hr_checkpoints_list(const char *root, const char *adapter, hr_found_list *out,
                              hr_error *err);
void hr_found_list_free(hr_found_list *list);

/* Whether every file can be read whole now. The reason why not goes to err. */
hr_status hr_checkpoints_check(const char *path, bool is_adapter, hr_error *err);

#endif
