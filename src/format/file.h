/* Small files read whole, with a bound. */
#ifndef HR_FORMAT_FILE_H
#define HR_FORMAT_FILE_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>

/* Appends the bytes of a regular file to out. ERR_NOT_FOUND when it does not exist, ERR_LIMIT when
 * it has more than max_bytes, ERR_IO; messages begin with the path. */
hr_status hr_file_read(const char *path, size_t max_bytes, hr_buf *out, hr_error *err);

/* True when path names an existing file of any kind. */
bool hr_file_exists(const char *path);

/* The same of dir + "/" + name; false without memory. */
bool hr_dir_has(const char *dir, const char *name);

/* dir + "/" + name, from malloc; NULL without memory. */
char *hr_path_join(const char *dir, const char *name);

#endif
