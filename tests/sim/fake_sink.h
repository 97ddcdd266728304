/* An engine that is only what a receiver's sink must be: adapters and base weights are one number
 * each, made from all of their bytes, so that any mix of two versions shows. It checks that the
 * sink's contract is kept, and fails when told. */
#ifndef HR_SIM_FAKE_SINK_H
#define HR_SIM_FAKE_SINK_H

#include <headrace/receiver.h>

enum { FAKE_BASE = 3, FAKE_NAMES = 64 };

/* Memory that is counted, and that fails when told. */
typedef struct fake_memory {
    _Atomic int64_t live; /* allocations not freed; receipts are freed by any thread */
    int64_t countdown;    /* the n-th from now fails; < 0: none */
    bool failed;
    uint64_t most; /* the largest one asked for */
} fake_memory;

void *fake_memory_alloc(void *self, size_t bytes);
void fake_memory_free(void *self, void *memory);

typedef struct fake_live {
    char name[HR_LORA_NAME_SIZE];
    uint64_t value, id;
} fake_live;

typedef struct fake_sink {
    /* what requests see */
    fake_live live[FAKE_NAMES];
    size_t n_live;
    uint64_t base[FAKE_BASE];
    char version[HR_WEIGHT_VERSION_SIZE];

    /* aside */
    char rooms[FAKE_NAMES][HR_LORA_NAME_SIZE]; /* of new names */
    size_t n_rooms;
    int64_t built; /* and neither published nor discarded */
    bool base_begun, base_sealed;
    uint64_t shadow[FAKE_BASE];
    bool written[FAKE_BASE];
    uint64_t next_id, calls, publications, flushes, aborts;
    bool inside; /* a call is under way */

    /* faults: the n-th call from now fails so; < 0: none */
    int64_t countdown;
    hr_status failure;
    bool only_publish; /* count calls of publish only */
    bool failed;
    void (*on_build)(void *self); /* called within build_adapter */
    void *on_build_self;
    /* Waits within publish for requests to end; NULL: none runs. */
    hr_status (*requests)(void *self, uint64_t timeout_ms, hr_error *err);
    void *requests_self;
} fake_sink;

void fake_sink_init(fake_sink *fake);
hr_receiver_sink fake_sink_ops(fake_sink *fake);
void fake_sink_fail(fake_sink *fake, int64_t countdown, hr_status failure, bool only_publish);
/* 0: not there. */
uint64_t fake_sink_value(const fake_sink *fake, const char *name);
uint64_t fake_sink_id(const fake_sink *fake, const char *name);
/* The name gives way to others, as at a cap of names. */
void fake_sink_evict(fake_sink *fake, const char *name);
/* Nothing is left over from a session; rooms are those of registered names. */
void fake_sink_check_idle(const fake_sink *fake);

/* The number that an adapter of this config and these tensors (sorted by name) is, and that of a
 * base weight. */
uint64_t fake_adapter_value(const char *config, size_t config_len, const hr_tensor *tensors,
                            size_t n);
uint64_t fake_base_value(const hr_tensor *tensor);

#endif
