/* A session's adapters on their way from tensors to what the sink makes of them: by two threads
 * where the sink allows it, since a push may bring dozens of small ones. */
#include "base/cores.h"
#include "weights/session.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MAX_BUILDERS = 2, MIN_SHARED_PARTS = 4 }; /* fewer parts are not worth a thread's start */

/* What one thread builds: part after part that nobody has begun, up to its first failure. */
typedef struct builder {
    hr_session *session;
    atomic_size_t *next;
    hr_tensor *tensors; /* room for the largest part */
    size_t part;        /* the one it built last */
    hr_status status;   /* of that part */
    hr_error err;
} builder;

static hr_status build_part(builder *b, hr_session_part *part) {
    const hr_receiver_sink *sink = &b->session->shared->sink;
    for (size_t i = 0; i < part->n; i++)
        b->tensors[i] = part->entries[i]->tensor;
    hr_status status = sink->build_adapter(sink->self, &part->adapter->registration, b->tensors,
                                           part->n, &part->built, &b->err);
    part->is_built = status == HR_OK;
    return status;
}

static void *build_parts(void *arg) {
    builder *b = arg;
    size_t n = b->session->n_parts;
    for (size_t i; b->status == HR_OK && (i = atomic_fetch_add(b->next, 1)) < n;) {
        b->part = i;
        b->status = build_part(b, &b->session->parts[i]);
    }
    if (b->status != HR_OK)
        atomic_store(b->next, n); /* what stands before has been begun, the rest is of no use */
    return NULL;
}

/* The failure that building one after the other would have met; NULL when there is none. */
static const builder *first_failed(const builder *builders, size_t n) {
    const builder *first = NULL;
    for (size_t i = 0; i < n; i++)
        if (builders[i].status != HR_OK && (first == NULL || builders[i].part < first->part))
            first = &builders[i];
    return first;
}

static size_t largest_part(const hr_session *session) {
    size_t most = 0;
    for (size_t i = 0; i < session->n_parts; i++)
        most = session->parts[i].n > most ? session->parts[i].n : most;
    return most;
}

hr_status hr_session_build_adapters(hr_session *session, hr_error *err) {
    if (session->n_parts == 0)
        return HR_OK;
    const hr_memory *memory = &session->shared->memory;
    bool shared = session->shared->sink.builds_together && session->n_parts >= MIN_SHARED_PARTS;
    size_t n = shared ? MAX_BUILDERS : 1, room = largest_part(session);
    builder builders[MAX_BUILDERS] = {0};
    atomic_size_t next = 0;
    hr_tensor *tensors = hr_memory_array(memory, n * room, sizeof *tensors);
    if (tensors == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n * room);
    for (size_t i = 0; i < n; i++)
        builders[i] = (builder){.session = session, .next = &next, .tensors = tensors + i * room};
    pthread_t thread;
    bool started = shared && hr_core_start_apart(&thread, build_parts, &builders[1]) == 0;
    build_parts(&builders[0]); /* all of them when the other has not started */
    if (started)
        pthread_join(thread, NULL);
    hr_memory_free(memory, tensors);
    const builder *failed = first_failed(builders, n);
    return failed == NULL ? HR_OK : hr_fail(err, failed->status, "%s", failed->err.message);
}
