/* KV pages that are kept and shared because their bits are known.
 *
 * K and V of a page depend on nothing but the weights (adapter id and base), the page's tokens and
 * all tokens before it. So a full page is known by (adapter id, the page before it, its tokens):
 * pages form a tree, one node per page, and a chain from the root is a prefix. By the arithmetic
 * promise a page found here holds the very bits that computing it again would give.
 *
 * Running sequences hold the pages of their chain by reference. What nobody holds stays, in order
 * of last use, until a page is needed: then the least recently used leaf goes. Adapter ids are new
 * for every load, so pages of an older adapter with the same name are never found; a change of base
 * weights begins a new epoch, after which no older page is found.
 *
 * Made once for all pages; nothing here allocates afterwards. Used by the scheduler thread alone.
 */
#ifndef HR_ENGINE_PREFIX_CACHE_H
#define HR_ENGINE_PREFIX_CACHE_H

#include "engine/kv_cache.h"

typedef struct hr_prefix_cache hr_prefix_cache;

/* What stands before the first page of a sequence; also "no page". */
#define HR_PREFIX_NONE UINT32_MAX

/* pages outlives the cache. */
hr_status hr_prefix_cache_create(hr_kv_pages *pages, const hr_alloc *alloc, hr_prefix_cache **out,
                                 hr_error *err);
/* Gives the pages back that it holds alone. NULL is allowed. */
void hr_prefix_cache_destroy(hr_prefix_cache *cache);

/* The page that holds tokens [HR_KV_PAGE_TOKENS] after the page parent, or HR_PREFIX_NONE. parent
 * is a page of this epoch that the caller holds or has just found. */
uint32_t hr_prefix_cache_find(const hr_prefix_cache *cache, uint64_t adapter_id, uint32_t parent,
                              const uint32_t *tokens);

/* Makes a full page known, which nobody else knows yet (find gave none). It was taken from pages;
 * the caller now holds it by reference. The caller holds parent too. */
void hr_prefix_cache_insert(hr_prefix_cache *cache, uint64_t adapter_id, uint32_t parent,
                            const uint32_t *tokens, uint32_t page);

/* One more holder of a page that was found. Whoever holds a page holds all before it. */
void hr_prefix_cache_hold(hr_prefix_cache *cache, uint32_t page);
/* Lets go of a chain [n] from the root. Pages without a holder stay until they are needed. */
void hr_prefix_cache_release(hr_prefix_cache *cache, uint32_t n, const uint32_t *chain);

bool hr_prefix_cache_is_held(const hr_prefix_cache *cache, uint32_t page);
/* Pages that nobody holds: as good as free. */
uint32_t hr_prefix_cache_unheld(const hr_prefix_cache *cache);
/* Gives the least recently used one of them back to pages; false when there is none. */
bool hr_prefix_cache_evict(hr_prefix_cache *cache);

/* Gives all unheld pages of one adapter back: it will not be asked for again. */
void hr_prefix_cache_forget(hr_prefix_cache *cache, uint64_t adapter_id);

/* Begins a new epoch: no page of before is found again. Held ones live until they are released. */
void hr_prefix_cache_clear(hr_prefix_cache *cache);
/* A chain that was begun in another epoch must neither be looked up nor made known. */
uint64_t hr_prefix_cache_epoch(const hr_prefix_cache *cache);

#endif
