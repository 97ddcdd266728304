/* The safetensors container: strict reader over a mapped file or bytes in memory, and a writer.
 *
 * A file is an 8-byte little-endian header length, a JSON header and the data. The reader accepts
 * what the reference implementation accepts: offsets that cover the data exactly, without overlap,
 * hole or rest. */
#ifndef HR_FORMAT_SAFETENSORS_H
#define HR_FORMAT_SAFETENSORS_H

#include "base/buf.h"
#include "base/error.h"

#include <headrace/tensor.h>

#define HR_SAFETENSORS_MAX_HEADER ((uint64_t)100 * 1000 * 1000)
#define HR_SAFETENSORS_ALIGN 64

typedef struct hr_safetensors hr_safetensors;

/* Maps path read-only and checks it whole before returning. The mapping is private to this object;
 * a file that another process cuts shorter meanwhile makes reads raise SIGBUS, which is not guarded
 * against: for files that are replaced by rename. ERR_NOT_FOUND, ERR_IO, ERR_CORRUPT (message:
 * path, what is wrong; for a file cut short, the size needed and found). */
hr_status hr_safetensors_open(const char *path, hr_safetensors **out, hr_error *err);

/* The same, but read into memory that is private to this object, for files that their writer may
 * change or cut at any time: what was checked is what is used. The data is read once the header has
 * been found good. ERR_LIMIT for a file over max_bytes; ERR_CORRUPT also when it is written to
 * meanwhile. */
hr_status hr_safetensors_read(const char *path, uint64_t max_bytes, hr_safetensors **out,
                              hr_error *err);

/* The same for files too large to be read at once: only the header is read, and a tensor's bytes
 * may be looked at once it was fetched, until it is dropped. Fetching is nothing where all bytes
 * are there already; one tensor is fetched or dropped by one thread at a time. ERR_IO; ERR_CORRUPT
 * when the file was written to since it was opened. */
hr_status hr_safetensors_open_unread(const char *path, hr_safetensors **out, hr_error *err);
hr_status hr_safetensors_fetch(const hr_safetensors *file, const hr_tensor *tensor, hr_error *err);

/* The same on bytes that the caller keeps until hr_safetensors_close; label stands for the path in
 * messages. */
hr_status hr_safetensors_parse(const void *bytes, size_t size, const char *label,
                               hr_safetensors **out, hr_error *err);

/* Unmaps and frees; views into it end here. NULL is allowed. */
void hr_safetensors_close(hr_safetensors *file);

/* Tensors in data order, one array: hr_safetensors_at(file, 0)[i] is tensor i. index < count.
 * Pointers live until close. Reading is thread-safe. */
size_t hr_safetensors_count(const hr_safetensors *file);
const hr_tensor *hr_safetensors_at(const hr_safetensors *file, size_t index);
/* By name; NULL when absent. */
const hr_tensor *hr_safetensors_find(const hr_safetensors *file, const char *name);
/* Value of a __metadata__ key; NULL when absent. */
const char *hr_safetensors_metadata(const hr_safetensors *file, const char *key);

/* Lets the system take back the whole pages that hold only this tensor; a later read of a mapped
 * file finds them there again. Nothing on bytes from memory. Thread-safe. */
void hr_safetensors_drop(const hr_safetensors *file, const hr_tensor *tensor);

/* Appends an image to the buffer. The data begins at a multiple of HR_SAFETENSORS_ALIGN; tensors
 * whose size is such a multiple stand first, so each of them is aligned to it, and the others
 * follow, aligned to their elements (the format allows no holes for padding). ERR_INVALID for two
 * equal names, ERR_NO_MEMORY. */
hr_status hr_safetensors_write(const hr_tensor *tensors, size_t n, hr_buf *image, hr_error *err);

/* Appends only what stands before the data of such an image: the length and the header. order[i]
 * gets the tensor whose data comes i-th, each right after the one before. For
 * images that are never in one piece. Errors as above. */
hr_status hr_safetensors_write_head(const hr_tensor *tensors, size_t n, const hr_tensor **order,
                                    hr_buf *head, hr_error *err);

/* Writes an image to path through a temporary file beside it and a rename, so that a reader sees
 * the old file or the whole new one. */
hr_status hr_safetensors_save(const char *path, const hr_tensor *tensors, size_t n, hr_error *err);

#endif
