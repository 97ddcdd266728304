/* Bodies of requests, up to gigabytes of them: one piece of memory, sized from the announced length
 * before the first byte comes, never moved, handed on without a copy. The memory of large bodies is
 * kept for the next ones (page_pool.h). What is arriving at one time is bounded by the memory there
 * is. */
#ifndef HR_SERVER_BODY_H
#define HR_SERVER_BODY_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HR_BODY_LARGE ((size_t)1 << 20) /* from here on a body has pages of its own */

typedef struct hr_body_pool hr_body_pool;

/* Zero-initialise; hr_body_free ends it. data is NUL-terminated whenever it is not NULL. Not for
 * two threads at once, and not to be copied but by hr_body_move. */
typedef struct hr_body {
    char *data;
    size_t len, cap;
    hr_body_pool *pool; /* whose pages data are; NULL: of malloc */
    size_t announced;   /* counted in the pool as still to come, with what has come */
} hr_body;

/* max_kept: most bytes of unused pages that are kept. Bodies keep their pool alive. */
hr_status hr_body_pool_create(size_t max_kept, hr_body_pool **out, hr_error *err);
void hr_body_pool_unref(hr_body_pool *pool); /* NULL is allowed */

/* Bytes in unused pages that are kept. Thread-safe, as the rest of the pool. */
size_t hr_body_pool_kept(hr_body_pool *pool);

/* Makes room for length bytes in an empty body. ERR_LIMIT when this machine cannot give as much
 * beside the other bodies that are arriving; ERR_NO_MEMORY. */
hr_status hr_body_announce(hr_body *body, hr_body_pool *pool, size_t length, hr_error *err);

/* Grows as needed when more comes than was announced. */
hr_status hr_body_append(hr_body *body, hr_body_pool *pool, const void *bytes, size_t len,
                         hr_error *err);

/* Everything has come: it is no longer counted as arriving. */
void hr_body_complete(hr_body *body);

/* The body in a struct of its own; from is empty afterwards. */
hr_body hr_body_move(hr_body *from);
void hr_body_free(hr_body *body);

#endif
