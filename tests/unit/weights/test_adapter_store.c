/* The adapter store: names, versions, leases, the cap, pinning and what a refusal says. */
#include "weights/adapter_store.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct payload {
    int destroyed;
} payload;

static void destroy_payload(void *data) {
    ((payload *)data)->destroyed++;
}

static hr_adapter_store *open_store(uint32_t max_loaded, uint32_t max_per_batch) {
    hr_alloc alloc = hr_alloc_system();
    hr_adapter_store_limits limits = {max_loaded, max_per_batch};
    hr_adapter_store *store = NULL;
    assert_int_equal(hr_adapter_store_create(&limits, &alloc, &store, NULL), HR_OK);
    return store;
}

static hr_status reserve(hr_adapter_store *store, const char *name, bool pinned,
                         hr_adapter_reservation **out, hr_error *err) {
    return hr_adapter_store_reserve(store, name, "/some/where", pinned, out, err);
}

static uint64_t load(hr_adapter_store *store, const char *name, bool pinned, payload *p) {
    hr_adapter_reservation *reservation = NULL;
    assert_int_equal(reserve(store, name, pinned, &reservation, NULL), HR_OK);
    hr_adapter_payload content = {p, destroy_payload, 100, 8};
    return hr_adapter_store_publish(store, reservation, &content);
}

static hr_adapter_lease acquire(hr_adapter_store *store, const char *name) {
    hr_adapter_lease lease = {0};
    assert_int_equal(hr_adapter_store_acquire(store, name, &lease, NULL), HR_OK);
    return lease;
}

static void assert_names(hr_adapter_store *store, const char *wanted) {
    hr_adapter_entry *entries = NULL;
    size_t n = 0;
    char text[1024] = "";
    assert_int_equal(hr_adapter_store_list(store, &entries, &n, NULL), HR_OK);
    for (size_t i = 0; i < n; i++) {
        strcat(text, i > 0 ? " " : "");
        strcat(text, entries[i].name);
    }
    free(entries);
    assert_string_equal(text, wanted);
}

static void a_loaded_name_can_be_leased_and_the_count_shows_it(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload p = {0};
    uint64_t id = load(store, "x", false, &p);
    hr_adapter_lease first = acquire(store, "x"), second = acquire(store, "x");
    assert_int_equal(hr_adapter_lease_id(&first), id);
    assert_ptr_equal(hr_adapter_lease_data(&second), &p);
    hr_adapter_store_stats stats;
    hr_adapter_store_stats_get(store, &stats);
    assert_int_equal(stats.leases_acquired, 2);
    assert_int_equal(stats.leases_released, 0);
    hr_adapter_store_release(store, &first);
    hr_adapter_store_release(store, &first); /* a lease that is back is not given back again */
    hr_adapter_store_release(store, &second);
    hr_adapter_store_stats_get(store, &stats);
    assert_int_equal(stats.leases_released, 2);
    assert_int_equal(p.destroyed, 0);
    hr_adapter_store_destroy(store);
    assert_int_equal(p.destroyed, 1);
}

static void unload_takes_the_name_at_once_and_the_memory_with_the_last_lease(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload p = {0};
    load(store, "x", false, &p);
    hr_adapter_lease one = acquire(store, "x"), two = acquire(store, "x"), none = {0};
    hr_error err;
    assert_int_equal(hr_adapter_store_unload(store, "x", &err), HR_OK);
    assert_names(store, "");
    assert_int_equal(hr_adapter_store_acquire(store, "x", &none, &err), HR_ERR_ADAPTER_UNKNOWN);
    hr_adapter_store_release(store, &one);
    assert_int_equal(p.destroyed, 0);
    hr_adapter_store_release(store, &two);
    assert_int_equal(p.destroyed, 1);
    assert_int_equal(hr_adapter_store_unload(store, "x", &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_string_equal(err.message, "LoRA with name x does not exist");
    hr_adapter_store_destroy(store);
}

static void a_name_loaded_again_is_another_version(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload old = {0}, new = {0};
    uint64_t old_id = load(store, "x", false, &old);
    hr_adapter_lease running = acquire(store, "x");
    assert_int_equal(hr_adapter_store_unload(store, "x", NULL), HR_OK);
    uint64_t new_id = load(store, "x", false, &new);
    assert_int_not_equal(old_id, new_id);
    hr_adapter_lease fresh = acquire(store, "x");
    assert_ptr_equal(hr_adapter_lease_data(&running), &old);
    assert_ptr_equal(hr_adapter_lease_data(&fresh), &new);
    hr_adapter_store_stats stats;
    hr_adapter_store_stats_get(store, &stats);
    assert_int_equal(stats.loaded, 1);
    assert_int_equal(stats.versions, 2);
    hr_adapter_store_release(store, &running);
    hr_adapter_store_release(store, &fresh);
    assert_int_equal(old.destroyed, 1);
    hr_adapter_store_destroy(store);
}

static void a_name_is_loaded_once_at_a_time(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload p = {0};
    hr_adapter_reservation *first = NULL, *second = NULL;
    hr_error err;
    assert_int_equal(reserve(store, "x", false, &first, &err), HR_OK);
    assert_int_equal(reserve(store, "x", false, &second, &err), HR_ERR_ADAPTER_EXISTS);
    assert_non_null(strstr(err.message, "already loaded"));
    hr_adapter_lease none;
    assert_int_equal(hr_adapter_store_acquire(store, "x", &none, &err), HR_ERR_ADAPTER_UNKNOWN);
    hr_adapter_store_cancel(store, first);
    load(store, "x", false, &p);
    assert_int_equal(reserve(store, "x", false, &second, &err), HR_ERR_ADAPTER_EXISTS);
    assert_non_null(strstr(err.message, "already loaded"));
    hr_adapter_store_destroy(store);
}

static void at_the_cap_the_least_recently_used_unpinned_name_gives_way(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(3, 8);
    payload p[6] = {{0}};
    load(store, "pinned", true, &p[0]);
    load(store, "a", false, &p[1]);
    load(store, "b", false, &p[2]);
    hr_adapter_lease used = acquire(store, "a");
    load(store, "c", false, &p[3]);
    assert_names(store, "pinned a c");
    assert_int_equal(p[2].destroyed, 1);
    load(store, "d", false, &p[4]);
    assert_names(store, "pinned a d"); /* a is in use, however long ago that use began */
    hr_adapter_lease last = acquire(store, "d");
    load(store, "e", false, &p[5]);
    assert_names(store, "pinned d e"); /* all are in use: a's name goes, its weights stay */
    assert_int_equal(p[1].destroyed, 0);
    hr_adapter_store_release(store, &used);
    assert_int_equal(p[1].destroyed, 1);
    hr_adapter_store_release(store, &last);
    hr_adapter_lease none;
    hr_error err;
    assert_int_equal(hr_adapter_store_acquire(store, "b", &none, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "not loaded: it gave way"));
    assert_int_equal(hr_adapter_store_acquire(store, "never", &none, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "never been loaded"));
    assert_non_null(strstr(err.message, "not loaded"));
    assert_non_null(strstr(err.message, "pinned, d, e"));
    hr_adapter_store_destroy(store);
}

/* What serving a name does: recalls it when it gave way. Its path, or "" when it was there. */
static const char *serve(hr_adapter_store *store, const char *name, payload *p) {
    static char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    hr_error err;
    path[0] = '\0';
    if (hr_adapter_store_recall(store, name, path, &reservation, &err) != HR_OK)
        return strcpy(path, err.message);
    if (reservation != NULL) {
        hr_adapter_payload content = {p, destroy_payload, 100, 8};
        assert_true(hr_adapter_store_publish(store, reservation, &content) > 0);
    }
    hr_adapter_lease lease = acquire(store, name);
    hr_adapter_store_release(store, &lease);
    return path;
}

static void a_name_that_gave_way_comes_back_from_where_it_was(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[8] = {{0}};
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    assert_string_equal(serve(store, "a", NULL), "");
    load(store, "c", false, &p[2]);
    assert_names(store, "a c");
    assert_int_equal(hr_adapter_store_state(store, "b"), HR_ADAPTER_EVICTED);
    assert_string_equal(serve(store, "b", &p[3]), "/some/where");
    assert_names(store, "c b");
    assert_int_equal(hr_adapter_store_state(store, "b"), HR_ADAPTER_LOADED);
    assert_int_equal(hr_adapter_store_state(store, "a"), HR_ADAPTER_EVICTED);
    assert_int_equal(hr_adapter_store_state(store, "never"), HR_ADAPTER_UNKNOWN);
    /* What is unloaded by name does not come back, evicted or not. */
    assert_int_equal(hr_adapter_store_unload(store, "b", NULL), HR_OK);
    assert_non_null(strstr(serve(store, "b", NULL), "never been loaded"));
    assert_int_equal(hr_adapter_store_unload(store, "a", NULL), HR_OK);
    assert_non_null(strstr(serve(store, "a", NULL), "never been loaded"));
    assert_int_equal(hr_adapter_store_unload(store, "a", NULL), HR_ERR_ADAPTER_UNKNOWN);
    /* Loaded again from elsewhere, it is not the evicted one any more. */
    load(store, "d", false, &p[4]);
    load(store, "e", false, &p[5]);
    assert_int_equal(hr_adapter_store_state(store, "c"), HR_ADAPTER_EVICTED);
    load(store, "c", false, &p[6]);
    assert_int_equal(hr_adapter_store_unload(store, "c", NULL), HR_OK);
    assert_int_equal(hr_adapter_store_state(store, "c"), HR_ADAPTER_UNKNOWN);
    hr_adapter_store_destroy(store);
}

static void a_recall_that_fails_or_is_revoked_leaves_the_right_memory(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[3] = {{0}};
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    assert_int_equal(hr_adapter_store_recall(store, "a", path, &reservation, NULL), HR_OK);
    hr_adapter_store_cancel(store, reservation);
    assert_int_equal(hr_adapter_store_state(store, "a"),
                     HR_ADAPTER_EVICTED); /* may be tried again */
    assert_int_equal(hr_adapter_store_recall(store, "a", path, &reservation, NULL), HR_OK);
    assert_int_equal(hr_adapter_store_unload(store, "a", NULL), HR_OK); /* while it is read */
    hr_adapter_payload content = {&p[2], destroy_payload, 100, 8};
    assert_int_equal(hr_adapter_store_publish(store, reservation, &content), 0);
    assert_int_equal(p[2].destroyed, 1);
    assert_names(store, "b");
    assert_int_equal(hr_adapter_store_state(store, "a"), HR_ADAPTER_UNKNOWN);
    hr_adapter_store_destroy(store);
}

/* A directory may be rewritten after its adapter was loaded. */
static void a_recalled_name_takes_only_what_it_stood_for(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[3] = {{0}};
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    hr_adapter_payload old = {&p[0], destroy_payload, 100, 8, .contents = {1, [15] = 2}};
    hr_adapter_payload other = {&p[1], destroy_payload, 100, 8, .contents = {1, [15] = 3}};
    assert_int_equal(hr_adapter_store_reserve(store, "a", "/a", false, &reservation, NULL), HR_OK);
    assert_true(hr_adapter_store_accepts(reservation, &old)); /* a new name may be anything */
    assert_true(hr_adapter_store_accepts(reservation, &other));
    hr_adapter_store_publish(store, reservation, &old);
    load(store, "b", false, &p[2]);
    assert_int_equal(hr_adapter_store_recall(store, "a", path, &reservation, NULL), HR_OK);
    assert_true(hr_adapter_store_accepts(reservation, &old));
    assert_false(hr_adapter_store_accepts(reservation, &other));
    hr_adapter_store_cancel(store, reservation);
    hr_adapter_store_destroy(store);
}

static void recall(hr_adapter_store *store, const char *name, payload *p) {
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    hr_adapter_payload content = {p, destroy_payload, 100, 8};
    assert_int_equal(hr_adapter_store_recall(store, name, path, &reservation, NULL), HR_OK);
    assert_true(hr_adapter_store_publish(store, reservation, &content) > 0);
}

/* Else a request for two evicted names would never get both while others keep theirs in use. */
static void a_recalled_name_does_not_give_way_before_it_was_leased(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[7] = {{0}};
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    load(store, "c", false, &p[2]);
    load(store, "d", false, &p[3]);
    hr_adapter_lease c = acquire(store, "c"), d = acquire(store, "d");
    recall(store, "a", &p[4]);
    recall(store, "b", &p[5]);
    assert_names(store, "a b");
    hr_adapter_lease a = acquire(store, "a");
    hr_adapter_store_release(store, &a);
    recall(store, "c", &p[6]); /* now a has been of use */
    assert_names(store, "b c");
    hr_adapter_store_release(store, &c);
    hr_adapter_store_release(store, &d);
    hr_adapter_store_destroy(store);
}

/* The rules as a list would have it, against the store, over random loads, uses and unloads. */
static void the_store_agrees_with_a_plain_list(void **state) {
    (void)state;
    enum { CAP = 3, N_LRU_NAMES = 6 };
    static payload p[4000];
    hr_adapter_store *store = open_store(CAP, 8);
    char list[CAP + 1] = ""; /* one letter a name, least recently used first */
    bool known[N_LRU_NAMES] = {false};
    uint32_t random = 1, n = 0;
    for (int i = 0; i < 3000; i++) {
        random = random * 1664525 + 1013904223;
        uint32_t name_index = (random >> 16) % N_LRU_NAMES, what = (random >> 24) % 4;
        char name[2] = {(char)('a' + name_index), '\0'}, *at = strchr(list, name[0]);
        if (what == 0 && at == NULL) {
            load(store, name, false, &p[n++]);
        } else if (what == 1) {
            assert_int_equal(hr_adapter_store_unload(store, name, NULL),
                             known[name_index] ? HR_OK : HR_ERR_ADAPTER_UNKNOWN);
            known[name_index] = false;
            if (at != NULL)
                memmove(at, at + 1, strlen(at));
            continue;
        } else if (!known[name_index]) {
            assert_int_equal(hr_adapter_store_state(store, name), HR_ADAPTER_UNKNOWN);
            continue;
        } else {
            assert_string_equal(serve(store, name, &p[n++]), at != NULL ? "" : "/some/where");
        }
        known[name_index] = true;
        if (at != NULL)
            memmove(at, at + 1, strlen(at));
        else if (strlen(list) == CAP)
            memmove(list, list + 1, CAP);
        strcat(list, name);
        for (uint32_t k = 0; k < N_LRU_NAMES; k++) {
            char other[2] = {(char)('a' + k), '\0'};
            assert_int_equal(hr_adapter_store_state(store, other), strchr(list, other[0]) != NULL
                                                                       ? HR_ADAPTER_LOADED
                                                                   : known[k] ? HR_ADAPTER_EVICTED
                                                                              : HR_ADAPTER_UNKNOWN);
        }
    }
    assert_true(n > 500);
    hr_adapter_store_destroy(store);
}

/* Many want one evicted name at once: one loads, the others wait for him. */
typedef struct wanting {
    hr_adapter_store *store;
    _Atomic int *n_loads;
    payload *p;
} wanting;

static void *want_a(void *arg) {
    wanting *w = arg;
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *reservation = NULL;
    HR_ASSERT(hr_adapter_store_recall(w->store, "a", path, &reservation, NULL) == HR_OK);
    if (reservation != NULL) {
        atomic_fetch_add(w->n_loads, 1);
        usleep(20000);
        hr_adapter_payload content = {w->p, destroy_payload, 100, 8};
        HR_ASSERT(hr_adapter_store_publish(w->store, reservation, &content) > 0);
    }
    return NULL;
}

static void concurrent_recalls_of_one_name_load_it_once(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[3] = {{0}};
    _Atomic int n_loads = 0;
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    wanting w = {store, &n_loads, &p[2]};
    pthread_t threads[8];
    for (int t = 0; t < 8; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, want_a, &w), 0);
    for (int t = 0; t < 8; t++)
        pthread_join(threads[t], NULL);
    assert_int_equal(n_loads, 1);
    assert_names(store, "a");
    hr_adapter_store_destroy(store);
}

/* ---- publication by sessions ---- */

static hr_adapter_publication item(hr_adapter_store *store, const char *name, const char *path,
                                   payload *p) {
    hr_adapter_publication item = {
        .name = name, .path = path, .payload = {p, destroy_payload, 50, 4}};
    assert_int_equal(
        hr_adapter_store_reserve_streamed(store, name, path, false, false, &item.reservation, NULL),
        HR_OK);
    return item;
}

static void publish_all(hr_adapter_store *store, hr_adapter_publication *items, size_t n) {
    assert_int_equal(hr_adapter_store_prepare(store, items, n, NULL), HR_OK);
    hr_adapter_store_publish_all(store, items, n);
}

static void a_registered_name_is_unknown_until_it_is_published(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload p = {0};
    hr_adapter_publication x = item(store, "x", NULL, &p);
    hr_error err;
    hr_adapter_lease lease = {0};
    assert_int_equal(hr_adapter_store_acquire(store, "x", &lease, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "not loaded"));
    assert_non_null(strstr(err.message, "awaiting publication"));
    hr_adapter_reservation *other = NULL;
    assert_int_equal(reserve(store, "x", false, &other, &err), HR_ERR_ADAPTER_EXISTS);
    assert_non_null(strstr(err.message, "already loaded"));
    char path[HR_ADAPTER_PATH_MAX + 1];
    assert_int_equal(hr_adapter_store_recall(store, "x", path, &other, &err),
                     HR_ERR_ADAPTER_UNKNOWN); /* at once: nobody loads it */
    uint64_t changes = hr_adapter_store_changes(store);
    publish_all(store, &x, 1);
    assert_true(x.id > 0 && hr_adapter_store_changes(store) > changes);
    lease = acquire(store, "x");
    assert_int_equal(hr_adapter_lease_id(&lease), x.id);
    hr_adapter_store_release(store, &lease);
    hr_adapter_entry *entries = NULL;
    size_t n = 0;
    assert_int_equal(hr_adapter_store_list(store, &entries, &n, NULL), HR_OK);
    assert_int_equal(n, 1);
    assert_string_equal(entries[0].path, "__stream__");
    free(entries);
    hr_adapter_store_destroy(store);
    assert_int_equal(p.destroyed, 1);
}

static void names_change_together_and_old_versions_live_while_leased(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload old[2] = {{0}}, new[2] = {{0}};
    load(store, "x", false, &old[0]);
    load(store, "y", false, &old[1]);
    hr_adapter_lease held = acquire(store, "x"), copy = held;
    hr_adapter_publication items[] = {item(store, "x", NULL, &new[0]),
                                      item(store, "y", "/some/where", &new[1])};
    assert_null(items[0].reservation); /* a published name needs none */
    publish_all(store, items, 2);
    assert_int_equal(old[0].destroyed, 0);
    assert_int_equal(old[1].destroyed, 1);
    assert_names(store, "x y"); /* in their places */
    hr_adapter_store_stats stats;
    hr_adapter_store_stats_get(store, &stats);
    assert_int_equal(stats.loaded, 2);
    assert_int_equal(stats.versions, 3);
    assert_false(hr_adapter_store_is_current(store, &held));
    assert_int_equal(hr_adapter_store_renew(store, &held), HR_LEASE_RENEWED);
    assert_int_equal(hr_adapter_lease_id(&held), items[0].id);
    assert_ptr_not_equal(held.version, copy.version);
    assert_int_equal(old[0].destroyed, 1);
    assert_int_equal(hr_adapter_store_renew(store, &held), HR_LEASE_CURRENT);
    assert_int_equal(hr_adapter_store_unload(store, "x", NULL), HR_OK);
    assert_int_equal(hr_adapter_store_renew(store, &held), HR_LEASE_UNLOADED);
    assert_int_equal(new[0].destroyed, 0);
    hr_adapter_store_release(store, &held);
    assert_int_equal(new[0].destroyed, 1);
    hr_adapter_lease none = {0};
    assert_int_equal(hr_adapter_store_renew(store, &none), HR_LEASE_CURRENT);
    hr_adapter_store_destroy(store);
}

static void a_name_that_is_loaded_again_after_an_unload_is_another_adapter(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    payload first = {0}, upsert = {0}, other = {0};
    load(store, "x", false, &first);
    hr_adapter_lease held = acquire(store, "x");
    hr_adapter_publication items[] = {item(store, "x", NULL, &upsert)};
    publish_all(store, items, 1);
    assert_int_equal(hr_adapter_store_unload(store, "x", NULL), HR_OK);
    load(store, "x", false, &other);
    assert_int_equal(hr_adapter_store_renew(store, &held), HR_LEASE_UNLOADED);
    assert_int_equal(first.destroyed, 0);
    assert_false(hr_adapter_store_is_current(store, &held));
    hr_adapter_store_release(store, &held);
    hr_adapter_store_destroy(store);
}

static void what_came_by_stream_gives_way_to_no_registered_name(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[5] = {{0}};
    hr_adapter_publication x = item(store, "x", NULL, &p[0]);
    publish_all(store, &x, 1);
    load(store, "a", false, &p[1]);
    hr_error err;
    hr_adapter_reservation *reservation = NULL;
    assert_int_equal(
        hr_adapter_store_reserve_streamed(store, "y", NULL, false, false, &reservation, &err),
        HR_ERR_LIMIT); /* it takes no loaded adapter's place */
    assert_non_null(strstr(err.message, "max-loaded-loras"));
    hr_adapter_publication again = item(store, "x", NULL, &p[2]); /* an upsert needs no place */
    publish_all(store, &again, 1);
    load(store, "b", false, &p[3]); /* "a" is newer than "x", but "x" could not come back */
    assert_names(store, "x b");
    hr_adapter_publication c = item(store, "c", "/some/where", &p[4]); /* with a path it may */
    publish_all(store, &c, 1);
    assert_names(store, "x c");
    hr_adapter_lease evicted = {0};
    assert_int_equal(hr_adapter_store_acquire(store, "b", &evicted, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_int_equal(hr_adapter_store_state(store, "b"), HR_ADAPTER_EVICTED);
    hr_adapter_store_destroy(store);
}

/* Of a load call, which has no session to be refused before. */
static hr_adapter_publication displacing(hr_adapter_store *store, const char *name, payload *p) {
    hr_adapter_publication item = {.name = name, .payload = {p, destroy_payload, 50, 4}};
    assert_int_equal(
        hr_adapter_store_reserve_streamed(store, name, NULL, false, true, &item.reservation, NULL),
        HR_OK);
    return item;
}

static void push(hr_adapter_store *store, const char *name, payload *p) {
    hr_adapter_publication pushed = displacing(store, name, p);
    publish_all(store, &pushed, 1);
}

static void what_came_by_stream_gives_way_to_a_load_call_by_last_use(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(3, 8);
    payload p[8] = {{0}};
    push(store, "a", &p[0]);
    load(store, "disk", false, &p[1]);
    push(store, "b", &p[2]);
    hr_adapter_lease lease = acquire(store, "a"); /* in use: the last to give way */
    push(store, "c", &p[3]);
    assert_names(store, "a b c");
    push(store, "d", &p[4]);
    assert_names(store, "a c d");
    assert_int_equal(p[2].destroyed, 1);
    hr_error err;
    hr_adapter_lease none = {0};
    hr_adapter_reservation *reservation = NULL;
    char path[HR_ADAPTER_PATH_MAX + 1];
    assert_int_equal(hr_adapter_store_acquire(store, "b", &none, &err), HR_ERR_ADAPTER_UNKNOWN);
    assert_non_null(strstr(err.message, "not loaded"));
    assert_non_null(strstr(err.message, "gave way"));
    assert_non_null(strstr(err.message, "push it again"));
    assert_int_equal(hr_adapter_store_state(store, "b"), HR_ADAPTER_UNKNOWN);
    assert_int_equal(hr_adapter_store_recall(store, "b", path, &reservation, &err),
                     HR_ERR_ADAPTER_UNKNOWN);
    /* A request for what is in a directory takes no only copy away. */
    assert_int_equal(hr_adapter_store_recall(store, "disk", path, &reservation, &err),
                     HR_ERR_LIMIT);
    push(store, "b", &p[5]);
    push(store, "e", &p[6]);
    assert_names(store, "a b e");
    hr_adapter_store_release(store, &lease);
    hr_adapter_store_destroy(store);
}

static void
a_lease_outlives_the_eviction_of_a_streamed_name_and_follows_it_when_it_is_back(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[3] = {{0}};
    push(store, "a", &p[0]);
    hr_adapter_lease lease = acquire(store, "a");
    push(store, "b", &p[1]);
    assert_names(store, "b");
    assert_int_equal(p[0].destroyed, 0);
    assert_int_equal(hr_adapter_store_renew(store, &lease), HR_LEASE_CURRENT);
    push(store, "a", &p[2]);
    assert_int_equal(hr_adapter_store_renew(store, &lease), HR_LEASE_RENEWED);
    assert_int_equal(p[0].destroyed, 1);
    hr_adapter_store_release(store, &lease);
    hr_adapter_store_destroy(store);
}

static void a_load_call_finds_no_place_among_pinned_and_registered_names(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[2] = {{0}};
    load(store, "pinned", true, &p[0]);
    hr_adapter_publication registered = item(store, "registered", NULL, &p[1]);
    hr_error err;
    hr_adapter_reservation *none = NULL;
    assert_int_equal(hr_adapter_store_reserve_streamed(store, "x", NULL, false, true, &none, &err),
                     HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "max-loaded-loras"));
    hr_adapter_store_cancel(store, registered.reservation);
    hr_adapter_store_destroy(store);
}

static void a_load_under_way_keeps_its_place_when_a_load_call_comes_between(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(3, 8);
    payload p[5] = {{0}};
    load(store, "old", false, &p[0]); /* whose place "new" will take */
    push(store, "a", &p[1]);
    push(store, "b", &p[2]);
    hr_adapter_reservation *new = NULL;
    assert_int_equal(reserve(store, "new", false, &new, NULL), HR_OK);
    push(store, "c", &p[3]);
    assert_names(store, "old b c"); /* "old" was used before "a" */
    hr_adapter_payload content = {&p[4], destroy_payload, 100, 8};
    (void)hr_adapter_store_publish(store, new, &content);
    assert_names(store, "b c new");
    hr_adapter_store_destroy(store);
}

static void an_upsert_pins_no_more_than_a_load_may(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 2);
    payload p[2] = {{0}};
    load(store, "a", true, &p[0]);
    load(store, "b", false, &p[1]);
    hr_error err;
    hr_adapter_reservation *none = NULL;
    assert_int_equal(hr_adapter_store_reserve_streamed(store, "b", NULL, true, false, &none, &err),
                     HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "pin"));
    assert_int_equal(hr_adapter_store_reserve_streamed(store, "a", NULL, true, false, &none, &err),
                     HR_OK); /* pinned already */
    assert_null(none);
    hr_adapter_store_destroy(store);
}

static void a_lease_of_an_evicted_name_stays_current(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[3] = {{0}};
    load(store, "a", false, &p[0]);
    hr_adapter_lease lease = acquire(store, "a");
    load(store, "b", false, &p[1]);
    assert_int_equal(hr_adapter_store_renew(store, &lease), HR_LEASE_CURRENT);
    assert_true(hr_adapter_store_is_current(store, &lease));
    recall(store, "a", &p[2]); /* its path again: another version */
    assert_int_equal(hr_adapter_store_renew(store, &lease), HR_LEASE_RENEWED);
    hr_adapter_store_release(store, &lease);
    hr_adapter_store_destroy(store);
}

/* What comes back is what gave way, byte for byte: so is the version it was published under. */
static void the_version_of_a_publication_stays_with_what_it_published(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(1, 8);
    payload p[4] = {{0}};
    hr_adapter_publication a = item(store, "a", "/a", &p[0]);
    a.weight_version = "step-3";
    publish_all(store, &a, 1);
    hr_adapter_lease lease = acquire(store, "a"), none = {0};
    load(store, "b", false, &p[1]);
    assert_string_equal(hr_adapter_lease_weight_version(&lease), "step-3");
    assert_null(hr_adapter_lease_weight_version(&none));
    hr_adapter_store_release(store, &lease);
    lease = acquire(store, "b");
    assert_null(hr_adapter_lease_weight_version(&lease)); /* from a path: no version was named */
    hr_adapter_store_release(store, &lease);
    recall(store, "a", &p[2]);
    hr_adapter_entry *list = NULL;
    size_t n = 0;
    assert_int_equal(hr_adapter_store_list(store, &list, &n, NULL), HR_OK);
    assert_int_equal(n, 1);
    assert_string_equal(list[0].weight_version, "step-3");
    free(list);
    assert_int_equal(hr_adapter_store_unload(store, "a", NULL), HR_OK);
    load(store, "a", false, &p[3]);
    lease = acquire(store, "a");
    assert_null(hr_adapter_lease_weight_version(&lease)); /* another adapter of that name */
    hr_adapter_store_release(store, &lease);
    hr_adapter_store_destroy(store);
}

/* It holds its own place: that of what is being read back is the same. */
static void a_name_that_is_registered_again_is_read_back_until_it_is_published(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[5] = {{0}};
    hr_adapter_publication s = item(store, "s", NULL, &p[0]);
    publish_all(store, &s, 1);
    load(store, "a", false, &p[1]);
    load(store, "b", false, &p[2]);
    assert_names(store, "s b");
    hr_adapter_publication a = item(store, "a", "/some/where", &p[3]);
    assert_string_equal(serve(store, "a", &p[4]), "/some/where");
    assert_names(store, "s a");
    publish_all(store, &a, 1);
    assert_names(store, "s a");
    assert_int_equal(p[4].destroyed, 1);
    hr_adapter_store_destroy(store);
}

static void a_stream_that_overtakes_a_recall_wins(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[5] = {{0}};
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    load(store, "c", false, &p[2]);
    char path[HR_ADAPTER_PATH_MAX + 1];
    hr_adapter_reservation *recalled = NULL;
    hr_adapter_publication a = {
        .name = "a", .path = "/new", .payload = {&p[3], destroy_payload, 9, 4}};
    assert_int_equal(hr_adapter_store_recall(store, "a", path, &recalled, NULL), HR_OK);
    publish_all(store, &a, 1); /* a name that gave way since it was registered */
    hr_adapter_payload content = {&p[4], destroy_payload, 100, 8};
    assert_int_equal(hr_adapter_store_publish(store, recalled, &content), a.id);
    assert_int_equal(p[4].destroyed, 1);
    assert_int_equal(p[3].destroyed, 0);
    hr_adapter_store_destroy(store);
}

static void count_wake(void *self) {
    ++*(uint32_t *)self;
}

static void with_a_sweeper_nothing_is_freed_where_it_dies(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    uint32_t wakes = 0;
    hr_adapter_store_set_sweeper(store, count_wake, &wakes);
    payload p[2] = {{0}};
    load(store, "x", false, &p[0]);
    hr_adapter_lease lease = acquire(store, "x");
    hr_adapter_publication x = item(store, "x", NULL, &p[1]);
    publish_all(store, &x, 1);
    assert_int_equal(wakes, 0);
    hr_adapter_store_release(store, &lease);
    assert_int_equal(wakes, 1);
    assert_int_equal(p[0].destroyed, 0);
    hr_adapter_store_sweep(store);
    assert_int_equal(p[0].destroyed, 1);
    hr_adapter_store_destroy(store);
}

static void checking_a_name_is_no_use_of_it(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[3] = {{0}};
    load(store, "a", false, &p[0]);
    load(store, "b", false, &p[1]);
    assert_int_equal(hr_adapter_store_check(store, "a", NULL), HR_OK);
    load(store, "c", false, &p[2]);
    assert_names(store, "b c");
    assert_int_equal(hr_adapter_store_check(store, "a", NULL), HR_ERR_ADAPTER_UNKNOWN);
    hr_adapter_store_destroy(store);
}

static void a_load_that_could_not_stay_is_refused_before_it_starts(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(2, 8);
    payload p[3] = {{0}};
    load(store, "a", true, &p[0]);
    load(store, "b", true, &p[1]);
    hr_adapter_reservation *reservation = NULL, *other = NULL;
    hr_error err;
    assert_int_equal(reserve(store, "c", false, &reservation, &err), HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "Maximum number of loaded LoRA adapters"));
    assert_int_equal(hr_adapter_store_unload(store, "b", NULL), HR_OK);
    assert_int_equal(reserve(store, "c", false, &reservation, &err), HR_OK);
    /* the one free place is promised to c */
    assert_int_equal(reserve(store, "d", false, &other, &err), HR_ERR_LIMIT);
    hr_adapter_store_cancel(store, reservation);
    assert_int_equal(reserve(store, "d", false, &other, &err), HR_OK);
    hr_adapter_store_cancel(store, other);
    hr_adapter_store_destroy(store);
}

static void pinning_leaves_a_place_in_the_batch(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 3);
    payload p[3] = {{0}};
    hr_adapter_reservation *reservation = NULL;
    hr_error err;
    load(store, "a", true, &p[0]);
    load(store, "b", true, &p[1]);
    assert_int_equal(reserve(store, "c", true, &reservation, &err), HR_ERR_LIMIT);
    assert_non_null(strstr(err.message, "starvation"));
    assert_non_null(strstr(err.message, "not allowed to pin all slots"));
    load(store, "c", false, &p[2]);
    hr_adapter_store_destroy(store);
}

static void bad_names_are_refused(void **state) {
    (void)state;
    hr_adapter_store *store = open_store(0, 8);
    char long_name[HR_LORA_NAME_SIZE + 1];
    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    const char *const bad[] = {"", "a:b", ":", "line\nbreak", long_name, NULL};
    hr_adapter_reservation *reservation = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(reserve(store, bad[i], false, &reservation, NULL), HR_ERR_INVALID);
    long_name[HR_LORA_NAME_SIZE - 1] = '\0';
    payload p = {0};
    load(store, long_name, false, &p);
    assert_names(store, long_name);
    hr_adapter_store_destroy(store);
}

/* ---- memory ---- */

typedef struct failing {
    int countdown, live;
} failing;

static void *failing_get(void *self, size_t bytes) {
    failing *f = self;
    if (f->countdown-- == 0)
        return NULL;
    f->live++;
    return calloc(1, bytes);
}

static void failing_free(void *self, void *memory) {
    ((failing *)self)->live -= memory != NULL;
    free(memory);
}

static void short_memory_refuses_and_leaves_nothing(void **state) {
    (void)state;
    for (int n = 0; n < 7; n++) {
        failing f = {.countdown = n};
        hr_alloc alloc = {failing_get, failing_free, &f};
        hr_adapter_store_limits limits = {0, 8};
        hr_adapter_store *store = NULL;
        hr_status status = hr_adapter_store_create(&limits, &alloc, &store, NULL);
        assert_int_equal(status, n == 0 ? HR_ERR_NO_MEMORY : HR_OK);
        if (status != HR_OK)
            continue;
        hr_adapter_reservation *reservation = NULL;
        status = reserve(store, "x", false, &reservation, NULL);
        assert_int_equal(status, n < 6 ? HR_ERR_NO_MEMORY : HR_OK);
        hr_adapter_store_cancel(store, reservation);
        hr_adapter_store_destroy(store);
        assert_int_equal(f.live, 0);
    }
}

/* ---- threads ---- */

static void *lease_and_return(void *arg) {
    hr_adapter_store *store = arg;
    for (int i = 0; i < 3000; i++) {
        hr_adapter_lease lease = {0};
        if (hr_adapter_store_acquire(store, i & 1 ? "a" : "b", &lease, NULL) == HR_OK) {
            HR_ASSERT(((payload *)hr_adapter_lease_data(&lease))->destroyed == 0);
            hr_adapter_store_release(store, &lease);
        }
    }
    return NULL;
}

static void leases_hold_while_names_come_and_go(void **state) {
    (void)state;
    enum { ROUNDS = 500 };
    static payload p[ROUNDS];
    hr_adapter_store *store = open_store(1, 8); /* every load evicts */
    pthread_t threads[4];
    for (int t = 0; t < 4; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, lease_and_return, store), 0);
    for (int i = 0; i < ROUNDS; i++) {
        const char *name = i & 1 ? "a" : "b";
        load(store, name, false, &p[i]);
        if (i % 3 == 0)
            assert_int_equal(hr_adapter_store_unload(store, name, NULL), HR_OK);
    }
    for (int t = 0; t < 4; t++)
        pthread_join(threads[t], NULL);
    hr_adapter_store_stats stats;
    hr_adapter_store_stats_get(store, &stats);
    assert_int_equal(stats.leases_acquired, stats.leases_released);
    assert_int_equal(stats.versions, stats.loaded);
    hr_adapter_store_destroy(store);
    for (int i = 0; i < ROUNDS; i++)
        assert_int_equal(p[i].destroyed, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loaded_name_can_be_leased_and_the_count_shows_it),
        cmocka_unit_test(unload_takes_the_name_at_once_and_the_memory_with_the_last_lease),
        cmocka_unit_test(a_name_loaded_again_is_another_version),
        cmocka_unit_test(a_name_is_loaded_once_at_a_time),
        cmocka_unit_test(at_the_cap_the_least_recently_used_unpinned_name_gives_way),
        cmocka_unit_test(a_name_that_gave_way_comes_back_from_where_it_was),
        cmocka_unit_test(a_recall_that_fails_or_is_revoked_leaves_the_right_memory),
        cmocka_unit_test(a_recalled_name_takes_only_what_it_stood_for),
        cmocka_unit_test(a_recalled_name_does_not_give_way_before_it_was_leased),
        cmocka_unit_test(the_store_agrees_with_a_plain_list),
        cmocka_unit_test(concurrent_recalls_of_one_name_load_it_once),
        cmocka_unit_test(a_registered_name_is_unknown_until_it_is_published),
        cmocka_unit_test(names_change_together_and_old_versions_live_while_leased),
        cmocka_unit_test(a_name_that_is_loaded_again_after_an_unload_is_another_adapter),
        cmocka_unit_test(what_came_by_stream_gives_way_to_no_registered_name),
        cmocka_unit_test(what_came_by_stream_gives_way_to_a_load_call_by_last_use),
        cmocka_unit_test(
            a_lease_outlives_the_eviction_of_a_streamed_name_and_follows_it_when_it_is_back),
        cmocka_unit_test(a_load_call_finds_no_place_among_pinned_and_registered_names),
        cmocka_unit_test(a_load_under_way_keeps_its_place_when_a_load_call_comes_between),
        cmocka_unit_test(an_upsert_pins_no_more_than_a_load_may),
        cmocka_unit_test(a_lease_of_an_evicted_name_stays_current),
        cmocka_unit_test(the_version_of_a_publication_stays_with_what_it_published),
        cmocka_unit_test(a_name_that_is_registered_again_is_read_back_until_it_is_published),
        cmocka_unit_test(a_stream_that_overtakes_a_recall_wins),
        cmocka_unit_test(with_a_sweeper_nothing_is_freed_where_it_dies),
        cmocka_unit_test(checking_a_name_is_no_use_of_it),
        cmocka_unit_test(a_load_that_could_not_stay_is_refused_before_it_starts),
        cmocka_unit_test(pinning_leaves_a_place_in_the_batch),
        cmocka_unit_test(bad_names_are_refused),
        cmocka_unit_test(short_memory_refuses_and_leaves_nothing),
        cmocka_unit_test(leases_hold_while_names_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
