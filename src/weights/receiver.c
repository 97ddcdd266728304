/* A receiver's life. */
#include "base/clock.h"
#include "base/cond.h"
#include "weights/turn.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_LEASE_MS = 300000 };

const char *hr_session_state_name(hr_session_state state) {
    static const char *const names[] = {"idle", "open", "prepared", "published", "rolled_back"};
    return (unsigned)state < sizeof names / sizeof *names ? names[state] : "unknown";
}

static void *system_alloc(void *self, size_t bytes) {
    (void)self;
    return malloc(bytes);
}

static void system_free(void *self, void *memory) {
    (void)self;
    free(memory);
}

static void copy_text(char *to, size_t size, const char *text) {
    size_t len = text != NULL ? strnlen(text, size - 1) : 0;
    if (len > 0)
        memcpy(to, text, len);
    to[len] = '\0';
}

hr_status hr_receiver_create(const hr_receiver_options *options, const hr_receiver_sink *sink,
                             hr_receiver **out, hr_error *err) {
    hr_memory memory = {system_alloc, system_free, NULL};
    if (options->alloc != NULL)
        memory = (hr_memory){options->alloc, options->free, options->alloc_self};
    hr_receiver *receiver = hr_memory_zeroed(&memory, 1, sizeof *receiver);
    hr_xxh3_stream *stream = receiver != NULL ? hr_xxh3_stream_create() : NULL;
    if (stream == NULL) {
        hr_memory_free(&memory, receiver);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receiver of weights");
    }
    hr_receiving *shared = &receiver->shared;
    shared->memory = memory;
    shared->sink = *sink;
    shared->stream = stream;
    shared->clock = options->now_ns != NULL ? (hr_clock){options->now_ns, options->clock_self}
                                            : hr_clock_monotonic();
    copy_text(shared->instance, sizeof shared->instance, options->instance);
    copy_text(shared->base_mode, sizeof shared->base_mode, options->base_mode);
    shared->ranks = options->ranks != 0 ? options->ranks : 1;
    shared->lease_ns =
        (options->lease_ms != 0 ? options->lease_ms : DEFAULT_LEASE_MS) * (uint64_t)1000000;
    shared->max_stash_bytes =
        options->max_stash_bytes != 0 ? options->max_stash_bytes : (uint64_t)64 << 30;
    hr_registry_init(&shared->registry, &memory);
    pthread_mutex_init(&receiver->lock, NULL);
    hr_cond_init(&receiver->turn_ended);
    *out = receiver;
    return HR_OK;
}

void hr_receiver_destroy(hr_receiver *receiver) {
    if (receiver == NULL)
        return;
    hr_error cause;
    (void)hr_fail(&cause, HR_ERR_STOPPING, "the engine stopped");
    if (receiver->session != NULL)
        hr_turn_roll_back(receiver, &cause);
    hr_receiving *shared = &receiver->shared;
    while (shared->registry.first != NULL)
        hr_receiving_forget(shared, shared->registry.first);
    hr_registry_destroy(&shared->registry);
    hr_history_clear(&receiver->history);
    hr_xxh3_stream_destroy(shared->stream);
    pthread_cond_destroy(&receiver->turn_ended);
    pthread_mutex_destroy(&receiver->lock);
    hr_memory memory = shared->memory;
    hr_memory_free(&memory, receiver);
}
