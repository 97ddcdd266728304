/* Large memory that is kept for the next who needs as much: faulting fresh pages in costs more than
 * copying into them. The system may take the contents of what is kept (MADV_FREE). Thread-safe. */
#ifndef HR_BASE_PAGE_POOL_H
#define HR_BASE_PAGE_POOL_H

#include <stddef.h>

typedef struct hr_page_pool hr_page_pool;

/* max_kept: most bytes that are kept. NULL: no memory. Pages that are out keep their pool alive. */
hr_page_pool *hr_page_pool_create(size_t max_kept);
void hr_page_pool_unref(hr_page_pool *pool); /* NULL is allowed */

/* At least *size bytes, 2 MiB-aligned, at most four times as many; *size becomes what they are.
 * What is in them is not known. NULL when the system gives none. */
char *hr_page_pool_take(hr_page_pool *pool, size_t *size);
void hr_page_pool_give(hr_page_pool *pool, char *pages, size_t size);

/* Bytes that are kept. */
size_t hr_page_pool_kept(hr_page_pool *pool);

#endif
