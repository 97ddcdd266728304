/* Bodies of requests. */
#include "server/body.h"

#include "base/machine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)2 << 20)
#define MAX_KEPT_PIECES 8

struct hr_body_pool {
    pthread_mutex_t lock;
    size_t refs; /* the creator and every body with pages */
    size_t max_kept, kept_bytes;
    size_t arriving; /* announced by bodies that are not complete */
    struct {
        char *data;
        size_t cap;
    } kept[MAX_KEPT_PIECES]; /* oldest first */
    size_t n_kept;
};

hr_status hr_body_pool_create(size_t max_kept, hr_body_pool **out, hr_error *err) {
    hr_body_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for request bodies");
    pthread_mutex_init(&pool->lock, NULL);
    pool->refs = 1;
    pool->max_kept = max_kept;
    *out = pool;
    return HR_OK;
}

void hr_body_pool_unref(hr_body_pool *pool) {
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    if (!last)
        return;
    for (size_t i = 0; i < pool->n_kept; i++)
        hr_pages_free(pool->kept[i].data, pool->kept[i].cap);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

size_t hr_body_pool_kept(hr_body_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    size_t bytes = pool->kept_bytes;
    pthread_mutex_unlock(&pool->lock);
    return bytes;
}

/* Takes piece i out of the list. Under the lock. */
static void unlist(hr_body_pool *pool, size_t i) {
    pool->kept_bytes -= pool->kept[i].cap;
    memmove(&pool->kept[i], &pool->kept[i + 1], (--pool->n_kept - i) * sizeof pool->kept[0]);
}

/* Pages for cap bytes: the smallest kept piece that is large enough and not far too large, else
 * fresh ones. */
static char *take_pages(hr_body_pool *pool, size_t *cap) {
    char *data = NULL;
    size_t best = MAX_KEPT_PIECES;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < pool->n_kept; i++) {
        if (pool->kept[i].cap >= *cap && pool->kept[i].cap / 4 <= *cap &&
            (best == MAX_KEPT_PIECES || pool->kept[i].cap < pool->kept[best].cap))
            best = i;
    }
    if (best < MAX_KEPT_PIECES) {
        data = pool->kept[best].data;
        *cap = pool->kept[best].cap;
        unlist(pool, best);
    }
    pool->refs++;
    pthread_mutex_unlock(&pool->lock);
    if (data == NULL)
        data = hr_pages_alloc(*cap);
    if (data == NULL)
        hr_body_pool_unref(pool);
    return data;
}

static void give_pages(hr_body_pool *pool, char *data, size_t cap) {
    char *drop[MAX_KEPT_PIECES];
    size_t drop_cap[MAX_KEPT_PIECES], n = 0;
    bool keep = cap <= pool->max_kept && madvise(data, cap, MADV_FREE) == 0;
    pthread_mutex_lock(&pool->lock);
    while (keep && pool->n_kept > 0 &&
           (pool->n_kept == MAX_KEPT_PIECES || pool->kept_bytes + cap > pool->max_kept)) {
        drop[n] = pool->kept[0].data;
        drop_cap[n++] = pool->kept[0].cap;
        unlist(pool, 0);
    }
    if (keep) {
        pool->kept[pool->n_kept].data = data;
        pool->kept[pool->n_kept++].cap = cap;
        pool->kept_bytes += cap;
    }
    pthread_mutex_unlock(&pool->lock);
    while (n-- > 0)
        hr_pages_free(drop[n], drop_cap[n]);
    if (!keep)
        hr_pages_free(data, cap);
    hr_body_pool_unref(pool);
}

/* Counts length bytes as arriving when there is memory for them. */
static hr_status admit(hr_body *body, hr_body_pool *pool, size_t length, hr_error *err) {
    uint64_t available = hr_machine_memory_available(NULL);
    pthread_mutex_lock(&pool->lock);
    size_t others = pool->arriving;
    bool fits = length <= available && others <= available - length;
    if (fits)
        pool->arriving += length;
    pthread_mutex_unlock(&pool->lock);
    if (!fits)
        return hr_fail(err, HR_ERR_LIMIT,
                       "the request body has %zu bytes, and %llu bytes of memory are left for it "
                       "(bodies of %zu bytes are arriving already); send smaller buckets",
                       length, (unsigned long long)available, others);
    body->announced = length;
    return HR_OK;
}

static hr_status make_room(hr_body *body, hr_body_pool *pool, size_t length, hr_error *err) {
    size_t cap = length + 1; /* the NUL */
    char *data;
    if (cap <= HR_BODY_LARGE) {
        if (body->cap >= cap)
            return HR_OK;
        data = realloc(body->data, cap);
        if (data == NULL)
            return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a body of %zu bytes", length);
        body->data = data;
        body->cap = cap;
        return HR_OK;
    }
    cap = (cap + PAGE - 1) / PAGE * PAGE;
    data = take_pages(pool, &cap);
    if (data == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a body of %zu bytes", length);
    hr_body old = hr_body_move(body);
    if (old.len > 0)
        memcpy(data, old.data, old.len);
    *body = (hr_body){data, old.len, cap, pool, 0};
    hr_body_free(&old);
    return admit(body, pool, length, err); /* only address space so far */
}

hr_status hr_body_announce(hr_body *body, hr_body_pool *pool, size_t length, hr_error *err) {
    if (length > SIZE_MAX / 2)
        return hr_fail(err, HR_ERR_LIMIT, "a request body of %zu bytes", length);
    return make_room(body, pool, length, err);
}

hr_status hr_body_append(hr_body *body, hr_body_pool *pool, const void *bytes, size_t len,
                         hr_error *err) {
    if (len >= body->cap - body->len) {
        size_t want = body->cap < 4096 ? 4096 : body->cap;
        while (len >= want - body->len)
            want *= 2;
        HR_TRY(make_room(body, pool, want - 1, err));
    }
    if (len > 0)
        memcpy(body->data + body->len, bytes, len);
    body->len += len;
    body->data[body->len] = '\0';
    return HR_OK;
}

void hr_body_complete(hr_body *body) {
    if (body->announced == 0)
        return;
    pthread_mutex_lock(&body->pool->lock);
    body->pool->arriving -= body->announced;
    pthread_mutex_unlock(&body->pool->lock);
    body->announced = 0;
}

hr_body hr_body_move(hr_body *from) {
    hr_body body = *from;
    *from = (hr_body){0};
    return body;
}

void hr_body_free(hr_body *body) {
    hr_body_complete(body);
    if (body->pool != NULL)
        give_pages(body->pool, body->data, body->cap);
    else
        free(body->data);
    *body = (hr_body){0};
}
