/* A few threads that run tasks in order. */
#include "server/worker.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#define MAX_TASKS 4096 /* requests may wait for adapters by the hundred */

struct hr_worker {
    pthread_t threads[HR_WORKER_MAX_THREADS];
    unsigned n_threads;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct {
        void (*run)(void *arg);
        void *arg;
    } tasks[MAX_TASKS]; /* a ring */
    size_t first, n;
    bool finishing, joined;
};

static void *work(void *arg) {
    hr_worker *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (w->n == 0 && !w->finishing)
            pthread_cond_wait(&w->changed, &w->lock);
        if (w->n == 0)
            break;
        void (*run)(void *) = w->tasks[w->first].run;
        void *task = w->tasks[w->first].arg;
        w->first = (w->first + 1) % MAX_TASKS;
        w->n--;
        pthread_mutex_unlock(&w->lock);
        run(task);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

hr_status hr_worker_create(unsigned n_threads, hr_worker **out, hr_error *err) {
    hr_worker *w = calloc(1, sizeof *w);
    if (w == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "out of memory for a worker");
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    while (w->n_threads < n_threads &&
           pthread_create(&w->threads[w->n_threads], NULL, work, w) == 0)
        w->n_threads++;
    if (w->n_threads < n_threads) {
        hr_worker_destroy(w);
        return hr_fail(err, HR_ERR_NO_MEMORY, "cannot start a worker thread");
    }
    *out = w;
    return HR_OK;
}

hr_status hr_worker_submit(hr_worker *w, void (*run)(void *arg), void *arg, hr_error *err) {
    hr_status status = HR_OK;
    pthread_mutex_lock(&w->lock);
    if (w->finishing) {
        status = hr_fail(err, HR_ERR_STOPPING, "the server is stopping");
    } else if (w->n == MAX_TASKS) {
        status = hr_fail(err, HR_ERR_BUSY,
                         "%d management calls are waiting already; try again later", MAX_TASKS);
    } else {
        size_t at = (w->first + w->n++) % MAX_TASKS;
        w->tasks[at].run = run;
        w->tasks[at].arg = arg;
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return status;
}

void hr_worker_finish(hr_worker *w) {
    pthread_mutex_lock(&w->lock);
    w->finishing = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    for (unsigned i = 0; i < w->n_threads && !w->joined; i++)
        pthread_join(w->threads[i], NULL);
    w->joined = true;
}

void hr_worker_destroy(hr_worker *w) {
    if (w == NULL)
        return;
    hr_worker_finish(w);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
