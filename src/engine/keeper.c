/* The keeper's thread. */
#include "engine/keeper.h"

#include "base/cond.h"

#include <string.h>

struct hr_keeper {
    hr_alloc alloc;
    hr_adapter_store *store;
    hr_receiver *receiver;
    pthread_t thread;
    pthread_mutex_t lock; /* all below */
    pthread_cond_t work;
    bool woken, quit;
};

/* Sleeps until it is woken, at most a second; false: it shall end. */
static bool sleep_until_work(hr_keeper *k) {
    struct timespec until = hr_cond_deadline(1000);
    pthread_mutex_lock(&k->lock);
    bool in_time = true;
    while (!k->woken && !k->quit && in_time)
        in_time = pthread_cond_timedwait(&k->work, &k->lock, &until) == 0;
    k->woken = false;
    bool goes_on = !k->quit;
    pthread_mutex_unlock(&k->lock);
    return goes_on;
}

static void *keeper_main(void *arg) {
    hr_keeper *k = arg;
    while (sleep_until_work(k)) {
        hr_adapter_store_sweep(k->store);
        (void)hr_receiver_expire(k->receiver);
    }
    return NULL;
}

static void wake(void *self) {
    hr_keeper *k = self;
    pthread_mutex_lock(&k->lock);
    k->woken = true;
    pthread_cond_signal(&k->work);
    pthread_mutex_unlock(&k->lock);
}

hr_status hr_keeper_create(hr_adapter_store *store, hr_receiver *receiver, const hr_alloc *alloc,
                           hr_keeper **out, hr_error *err) {
    hr_keeper *k = hr_alloc_array(alloc, 1, sizeof *k);
    if (k == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the keeper thread");
    *k = (hr_keeper){.alloc = *alloc, .store = store, .receiver = receiver};
    pthread_mutex_init(&k->lock, NULL);
    hr_cond_init(&k->work);
    int rc = pthread_create(&k->thread, NULL, keeper_main, k);
    if (rc != 0) {
        pthread_cond_destroy(&k->work);
        pthread_mutex_destroy(&k->lock);
        hr_alloc_free(alloc, k);
        return hr_fail(err, HR_ERR_NO_MEMORY, "cannot start the keeper thread: %s", strerror(rc));
    }
    pthread_setname_np(k->thread, "hr-keeper");
    hr_adapter_store_set_sweeper(store, wake, k);
    *out = k;
    return HR_OK;
}

void hr_keeper_destroy(hr_keeper *k) {
    if (k == NULL)
        return;
    hr_adapter_store_set_sweeper(k->store, NULL, NULL);
    pthread_mutex_lock(&k->lock);
    k->quit = true;
    pthread_cond_signal(&k->work);
    pthread_mutex_unlock(&k->lock);
    pthread_join(k->thread, NULL);
    pthread_cond_destroy(&k->work);
    pthread_mutex_destroy(&k->lock);
    hr_adapter_store_sweep(k->store);
    hr_alloc alloc = k->alloc;
    hr_alloc_free(&alloc, k);
}
