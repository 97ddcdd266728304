/* Bodies of requests. */
#include "server/body.h"

#include "base/machine.h"
#include "base/page_pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct hr_body_pool {
    pthread_mutex_t lock;
    size_t refs; /* the creator and every body with pages */
    hr_page_pool *pages;
    size_t arriving; /* announced by bodies that are not complete */
};

hr_status hr_body_pool_create(size_t max_kept, hr_body_pool **out, hr_error *err) {
    hr_body_pool *pool = calloc(1, sizeof *pool);
    hr_page_pool *pages = hr_page_pool_create(max_kept);
    if (pool == NULL || pages == NULL) {
        free(pool);
        hr_page_pool_unref(pages);
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for request bodies");
    }
    pthread_mutex_init(&pool->lock, NULL);
    pool->refs = 1;
    pool->pages = pages;
    *out = pool;
    return HR_OK;
}

static void ref(hr_body_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->refs++;
    pthread_mutex_unlock(&pool->lock);
}

void hr_body_pool_unref(hr_body_pool *pool) {
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    if (!last)
        return;
    hr_page_pool_unref(pool->pages);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

size_t hr_body_pool_kept(hr_body_pool *pool) {
    return hr_page_pool_kept(pool->pages);
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
    data = hr_page_pool_take(pool->pages, &cap);
    if (data == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a body of %zu bytes", length);
    ref(pool);
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
    if (body->pool != NULL) {
        hr_page_pool_give(body->pool->pages, body->data, body->cap);
        hr_body_pool_unref(body->pool);
    } else {
        free(body->data);
    }
    *body = (hr_body){0};
}
