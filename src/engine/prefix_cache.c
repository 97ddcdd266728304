/* The tree of known KV pages: one node per page of the arena, a hash table over (adapter, parent,
 * tokens), and a list of unheld pages in order of last use. A chain is released from its end, and
 * whoever holds a page holds its parents, so in that list a page stands after all its children: the
 * first one is always a leaf, and eviction needs no search. */
#include "engine/prefix_cache.h"

#include "engine/sampler.h" /* hr_sampler_mix */

#include <string.h>

typedef struct prefix_node {
    uint64_t adapter_id;
    uint32_t parent;
    uint32_t holders;
    uint32_t n_children; /* known ones */
    bool known;          /* in the table */
    uint32_t bucket_next;
    uint32_t older, newer; /* while known and unheld */
    uint32_t tokens[HR_KV_PAGE_TOKENS];
} prefix_node;

struct hr_prefix_cache {
    hr_alloc alloc;
    hr_kv_pages *pages;
    prefix_node *nodes; /* [n_pages], by page number */
    uint32_t *buckets;  /* [n_buckets], first page of each */
    uint32_t n_pages, n_buckets;
    uint32_t oldest, newest, n_unheld;
    uint64_t epoch;
};

static void empty_table(hr_prefix_cache *c) {
    for (uint32_t b = 0; b < c->n_buckets; b++)
        c->buckets[b] = HR_PREFIX_NONE;
    c->oldest = c->newest = HR_PREFIX_NONE;
    c->n_unheld = 0;
}

hr_status hr_prefix_cache_create(hr_kv_pages *pages, const hr_alloc *alloc, hr_prefix_cache **out,
                                 hr_error *err) {
    hr_prefix_cache *c = hr_alloc_array(alloc, 1, sizeof *c);
    if (c == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the prefix cache");
    *c = (hr_prefix_cache){.alloc = *alloc, .pages = pages, .n_pages = hr_kv_pages_total(pages)};
    c->n_buckets = 16;
    while (c->n_buckets < c->n_pages && c->n_buckets < 1u << 30)
        c->n_buckets *= 2;
    c->nodes = hr_alloc_array(alloc, c->n_pages, sizeof *c->nodes);
    c->buckets = hr_alloc_array(alloc, c->n_buckets, sizeof *c->buckets);
    if (c->nodes == NULL || c->buckets == NULL) {
        hr_alloc_free(alloc, c->buckets);
        hr_alloc_free(alloc, c->nodes);
        hr_alloc_free(alloc, c);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a prefix cache of %u pages",
                       hr_kv_pages_total(pages));
    }
    empty_table(c);
    *out = c;
    return HR_OK;
}

void hr_prefix_cache_destroy(hr_prefix_cache *c) {
    if (c == NULL)
        return;
    hr_prefix_cache_clear(c);
    hr_alloc alloc = c->alloc;
    hr_alloc_free(&alloc, c->buckets);
    hr_alloc_free(&alloc, c->nodes);
    hr_alloc_free(&alloc, c);
}

/* ---- the table ---- */

static uint32_t *bucket_of(const hr_prefix_cache *c, uint64_t adapter_id, uint32_t parent,
                           const uint32_t *tokens) {
    uint64_t hash = hr_sampler_mix(adapter_id ^ (uint64_t)parent << 32);
    for (uint32_t i = 0; i < HR_KV_PAGE_TOKENS; i += 2)
        hash = hr_sampler_mix(hash ^ (tokens[i] | (uint64_t)tokens[i + 1] << 32));
    return &c->buckets[hash & (c->n_buckets - 1)];
}

static bool is_page_of(const prefix_node *node, uint64_t adapter_id, uint32_t parent,
                       const uint32_t *tokens) {
    return node->adapter_id == adapter_id && node->parent == parent &&
           memcmp(node->tokens, tokens, sizeof node->tokens) == 0;
}

uint32_t hr_prefix_cache_find(const hr_prefix_cache *c, uint64_t adapter_id, uint32_t parent,
                              const uint32_t *tokens) {
    uint32_t page = *bucket_of(c, adapter_id, parent, tokens);
    while (page != HR_PREFIX_NONE && !is_page_of(&c->nodes[page], adapter_id, parent, tokens))
        page = c->nodes[page].bucket_next;
    return page;
}

void hr_prefix_cache_insert(hr_prefix_cache *c, uint64_t adapter_id, uint32_t parent,
                            const uint32_t *tokens, uint32_t page) {
    prefix_node *node = &c->nodes[page];
    HR_ASSERT(!node->known && node->holders == 0);
    HR_ASSERT(parent == HR_PREFIX_NONE || c->nodes[parent].holders > 0);
    uint32_t *bucket = bucket_of(c, adapter_id, parent, tokens);
    *node = (prefix_node){.adapter_id = adapter_id,
                          .parent = parent,
                          .holders = 1,
                          .known = true,
                          .bucket_next = *bucket};
    memcpy(node->tokens, tokens, sizeof node->tokens);
    *bucket = page;
    if (parent != HR_PREFIX_NONE)
        c->nodes[parent].n_children++;
}

static void table_remove(hr_prefix_cache *c, uint32_t page) {
    prefix_node *node = &c->nodes[page];
    uint32_t *link = bucket_of(c, node->adapter_id, node->parent, node->tokens);
    while (*link != page)
        link = &c->nodes[*link].bucket_next;
    *link = node->bucket_next;
    node->known = false;
    if (node->parent != HR_PREFIX_NONE)
        c->nodes[node->parent].n_children--;
}

/* ---- the unheld ---- */

static void unheld_append(hr_prefix_cache *c, uint32_t page) {
    c->nodes[page].older = c->newest;
    c->nodes[page].newer = HR_PREFIX_NONE;
    *(c->newest != HR_PREFIX_NONE ? &c->nodes[c->newest].newer : &c->oldest) = page;
    c->newest = page;
    c->n_unheld++;
}

static void unheld_remove(hr_prefix_cache *c, uint32_t page) {
    prefix_node *node = &c->nodes[page];
    *(node->older != HR_PREFIX_NONE ? &c->nodes[node->older].newer : &c->oldest) = node->newer;
    *(node->newer != HR_PREFIX_NONE ? &c->nodes[node->newer].older : &c->newest) = node->older;
    c->n_unheld--;
}

void hr_prefix_cache_hold(hr_prefix_cache *c, uint32_t page) {
    HR_ASSERT(c->nodes[page].known);
    if (c->nodes[page].holders++ == 0)
        unheld_remove(c, page);
}

void hr_prefix_cache_release(hr_prefix_cache *c, uint32_t n, const uint32_t *chain) {
    for (uint32_t i = n; i-- > 0;) {
        prefix_node *node = &c->nodes[chain[i]];
        HR_ASSERT(node->holders > 0);
        if (--node->holders > 0)
            continue;
        if (node->known)
            unheld_append(c, chain[i]);
        else
            hr_kv_pages_give(c->pages, 1, &chain[i]);
    }
}

bool hr_prefix_cache_is_held(const hr_prefix_cache *c, uint32_t page) {
    return c->nodes[page].holders > 0;
}

uint32_t hr_prefix_cache_unheld(const hr_prefix_cache *c) {
    return c->n_unheld;
}

static void drop(hr_prefix_cache *c, uint32_t page) {
    HR_ASSERT(c->nodes[page].holders == 0 && c->nodes[page].n_children == 0);
    unheld_remove(c, page);
    table_remove(c, page);
    hr_kv_pages_give(c->pages, 1, &page);
}

bool hr_prefix_cache_evict(hr_prefix_cache *c) {
    if (c->oldest == HR_PREFIX_NONE)
        return false;
    drop(c, c->oldest);
    return true;
}

void hr_prefix_cache_forget(hr_prefix_cache *c, uint64_t adapter_id) {
    for (uint32_t page = c->oldest, newer; page != HR_PREFIX_NONE; page = newer) {
        newer = c->nodes[page].newer;
        if (c->nodes[page].adapter_id == adapter_id)
            drop(c, page);
    }
}

void hr_prefix_cache_clear(hr_prefix_cache *c) {
    for (uint32_t page = 0; page < c->n_pages; page++) {
        prefix_node *node = &c->nodes[page];
        if (node->known && node->holders == 0)
            hr_kv_pages_give(c->pages, 1, &page);
        node->known = false;
    }
    empty_table(c);
    c->epoch++;
}

uint64_t hr_prefix_cache_epoch(const hr_prefix_cache *c) {
    return c->epoch;
}
