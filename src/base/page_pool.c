/* Kept pages: a short list, oldest first, under one lock. */
#include "base/page_pool.h"

#include "base/machine.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)2 << 20)
#define MAX_PIECES 64

typedef struct piece {
    char *pages;
    size_t size;
} piece;

struct hr_page_pool {
    pthread_mutex_t lock;
    size_t refs; /* the creator and every piece that is out */
    size_t max_kept, kept_bytes;
    piece kept[MAX_PIECES]; /* oldest first */
    size_t n_kept;
};

hr_page_pool *hr_page_pool_create(size_t max_kept) {
    hr_page_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pool->refs = 1;
    pool->max_kept = max_kept;
    return pool;
}

void hr_page_pool_unref(hr_page_pool *pool) {
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    if (!last)
        return;
    for (size_t i = 0; i < pool->n_kept; i++)
        hr_pages_free(pool->kept[i].pages, pool->kept[i].size);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

size_t hr_page_pool_kept(hr_page_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    size_t bytes = pool->kept_bytes;
    pthread_mutex_unlock(&pool->lock);
    return bytes;
}

/* Takes piece i out of the list. Under the lock. */
static piece unlist(hr_page_pool *pool, size_t i) {
    piece out = pool->kept[i];
    pool->kept_bytes -= out.size;
    memmove(&pool->kept[i], &pool->kept[i + 1], (--pool->n_kept - i) * sizeof pool->kept[0]);
    return out;
}

/* The smallest kept piece that is large enough and not far too large. Under the lock. */
static piece take_kept(hr_page_pool *pool, size_t size) {
    size_t best = MAX_PIECES;
    for (size_t i = 0; i < pool->n_kept; i++) {
        size_t has = pool->kept[i].size;
        if (has >= size && has / 4 <= size && (best == MAX_PIECES || has < pool->kept[best].size))
            best = i;
    }
    return best < MAX_PIECES ? unlist(pool, best) : (piece){NULL, size};
}

char *hr_page_pool_take(hr_page_pool *pool, size_t *size) {
    if (*size > SIZE_MAX / 2)
        return NULL;
    size_t whole = (*size + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&pool->lock);
    piece taken = take_kept(pool, whole);
    pool->refs++;
    pthread_mutex_unlock(&pool->lock);
    if (taken.pages == NULL)
        taken.pages = hr_pages_alloc(taken.size);
    if (taken.pages == NULL)
        hr_page_pool_unref(pool);
    else
        *size = taken.size;
    return taken.pages;
}

void hr_page_pool_give(hr_page_pool *pool, char *pages, size_t size) {
    piece drop[MAX_PIECES];
    size_t n = 0;
    bool keep = size <= pool->max_kept && madvise(pages, size, MADV_FREE) == 0;
    pthread_mutex_lock(&pool->lock);
    while (keep && pool->n_kept > 0 &&
           (pool->n_kept == MAX_PIECES || pool->kept_bytes + size > pool->max_kept))
        drop[n++] = unlist(pool, 0);
    if (keep) {
        pool->kept[pool->n_kept++] = (piece){pages, size};
        pool->kept_bytes += size;
    }
    pthread_mutex_unlock(&pool->lock);
    while (n-- > 0)
        hr_pages_free(drop[n].pages, drop[n].size);
    if (!keep)
        hr_pages_free(pages, size);
    hr_page_pool_unref(pool);
}
