/* Units from files: PEFT directories and the checkpoint directory of a base model. */
#ifndef HR_PUBLISH_DIR_SOURCE_H
#define HR_PUBLISH_DIR_SOURCE_H

#include "base/error.h"

#include <headrace/publisher.h>

typedef struct hr_dir_source hr_dir_source;

typedef struct hr_dir_adapter {
    const char *name, *dir;
    bool pinned;
} hr_dir_adapter;

/* Whether a directory has the two files of an adapter; if not, what it is or lacks.
 * ERR_NOT_FOUND. */
hr_status hr_adapter_dir_check(const char *dir, hr_error *err);

/* Opens and checks all files. Adapters are read into memory, so that a writer may change the files
 * meanwhile; a base (NULL: none) is mapped, and its pages are given back as units are released.
 * Failures name the path. The strings are copied or not kept. */
hr_status hr_dir_source_open(const hr_dir_adapter *adapters, size_t n, const char *base,
                             hr_dir_source **out, hr_error *err);
void hr_dir_source_close(hr_dir_source *source); /* NULL is allowed */

/* The adapters for hr_push, with their configs; they live as long as the source. */
const hr_push_adapter *hr_dir_source_adapters(const hr_dir_source *source);
uint64_t hr_dir_source_bytes(const hr_dir_source *source);
/* A tensor is a unit; starts anew with each call of this function. One push at a time. */
hr_unit_source hr_dir_source_units(hr_dir_source *source);

#endif
