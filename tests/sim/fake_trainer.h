/* A trainer that pushes to one receiver, call by call, and the engine state that must follow.
 *
 * A push is a generation of weights (every byte depends on it) and a plan: which calls bring it. A
 * reference is what requests must see: all adapters, the base and the version of one moment. */
#ifndef HR_SIM_FAKE_TRAINER_H
#define HR_SIM_FAKE_TRAINER_H

#include "base/error.h"
#include "fake_sink.h"

enum { LEASE_MS = 1000, MAX_TENSORS = 32, MAX_ADAPTERS = 3 };

/* ---- one engine ---- */

typedef struct engine {
    fake_sink sink;
    fake_memory memory;
    uint64_t *now_ns;
    hr_receiver *receiver;
    int64_t owners; /* buckets whose memory the receiver still holds */
} engine;

void engine_open(engine *e, uint64_t *now_ns);
/* Closes it and checks that nothing is left. */
void engine_close(engine *e);
void engine_pass_ms(engine *e, uint64_t ms);

/* ---- what is seen ---- */

typedef struct reference {
    fake_live live[FAKE_NAMES];
    size_t n_live;
    uint64_t base[FAKE_BASE];
    char version[HR_WEIGHT_VERSION_SIZE];
} reference;

void reference_of(const engine *e, reference *out);
/* Ids apart, which only grow. */
bool reference_equals(const reference *a, const reference *b);

/* ---- pushes ---- */

typedef enum push_plan {
    PLAN_FULL,     /* registers a and b; base and both, mixed in buckets; prepare, then commit */
    PLAN_ADAPTERS, /* a and b, declared, a tensor a bucket, sync_base false, without a manifest */
    PLAN_STAGED,   /* a new name with defer_publish, and nothing declared */
    PLAN_UPSERT,   /* a again, in one call */
    PLAN_INSERT,   /* a new name, in one call */
    PLAN_BASE,     /* two of three base tensors, a tensor a bucket, without a manifest */
    PLAN_VERSION,  /* the weight version alone */
    PLAN_COUNT
} push_plan;

typedef enum step_kind {
    STEP_REGISTER,
    STEP_BEGIN,
    STEP_BUCKET,
    STEP_PREPARE,
    STEP_COMMIT,
    STEP_END,
    STEP_APPLY,
    STEP_VERSION
} step_kind;

typedef struct push_call {
    step_kind kind;
    size_t index; /* of the adapter or bucket */
} push_call;

typedef enum push_damage {
    DAMAGE_NONE,
    DAMAGE_BYTE,     /* of the first tensor in the bucket */
    DAMAGE_SWAPPED,  /* the bytes of two tensors */
    DAMAGE_MISSING,  /* a tensor */
    DAMAGE_EXTRA,    /* a tensor of the same adapter */
    DAMAGE_BASE,     /* a base tensor, not asked for or twice */
    DAMAGE_STRANGER, /* a tensor of an adapter that is registered but not declared */
    DAMAGE_FLUSH     /* asks for what a session beside running requests may not */
} push_damage;

typedef struct push_tensor {
    char name[64];  /* on the wire */
    size_t adapter; /* MAX_ADAPTERS: base */
    uint8_t *bytes;
    size_t size;
} push_tensor;

typedef struct push {
    push_plan plan;
    uint64_t generation;
    char session[32];
    char version[32];
    char adapters[MAX_ADAPTERS][32];
    size_t n_adapters;
    bool defer, sync_base, manifest, owned;
    push_tensor tensors[MAX_TENSORS];
    size_t n, per_bucket;
    push_call steps[32];
    size_t n_steps;
    push_damage damage; /* done to the bucket that is sent next */
    uint8_t digest[16]; /* of its last receipt */
    hr_error err;       /* of the last call */
} push;

void push_make(push *p, push_plan plan, uint64_t generation);
void push_free(push *p);
/* One call. The sender's memory is overwritten as soon as the receiver may not read it again. */
hr_status push_step(push *p, engine *e, size_t step);
bool push_step_publishes(const push *p, size_t step);
hr_status push_abort(push *p, engine *e);
/* The reference after this push, from the one before. */
void push_reference(const push *p, const reference *before, reference *after);

#endif
