/* Engines behind a transport that fails as it is told: each is a production receiver over a fake
 * sink, and what reaches it are images as they go over a wire. Time stands still unless somebody
 * sleeps or an answer is late. */
#ifndef HR_SIM_FAKE_FLEET_H
#define HR_SIM_FAKE_FLEET_H

#include "base/clock.h"
#include "fake_sink.h"
#include "transport/transport.h"

#include <pthread.h>
#include <stdatomic.h>

enum { FLEET_ENGINES = 3, FLEET_TIMEOUT_MS = 1000 };

typedef enum fleet_fault {
    FAULT_NONE,
    FAULT_REFUSE,     /* the engine refuses it */
    FAULT_LOSE_CALL,  /* it does not arrive, the connection is closed */
    FAULT_LOSE_REPLY, /* it is done, the answer is lost */
    FAULT_LATE,       /* it is done, after the deadline */
    FAULT_KILL,       /* the engine is gone from here on; nothing of it is left */
    FAULT_CORRUPT,    /* a byte of a bucket turns on its way; other calls are lost */
    FAULT_COUNT
} fleet_fault;

typedef struct fleet_engine {
    fake_sink sink;
    fake_memory memory;
    hr_receiver *receiver;
    bool dead, paused;
    unsigned continued;
    uint64_t begin_waits_ms; /* for requests, as the last begin asks */
} fleet_engine;

typedef struct fake_fleet {
    fleet_engine engines[FLEET_ENGINES];
    size_t n;
    pthread_mutex_t lock;
    atomic_ullong now_ns;
} fake_fleet;

/* One publisher's way to the engines. */
typedef struct fleet_link {
    fake_fleet *fleet;
    hr_transport_traits traits;
    unsigned calls; /* counted over all engines */
    unsigned fault_at;
    fleet_fault fault;
    unsigned repeat; /* calls after that fail in the same way */
    bool hit;        /* the fault has come about */
    hr_stage stage;  /* at which */
    uint32_t engine;
    bool mute, lies;                           /* receipts without a digest, or with another one */
    bool nameless_abort;                       /* abort ends whatever session is open */
    bool untouched;                            /* refusals are said to have changed nothing */
    bool no_configs;                           /* receipts without digests of configs */
    void (*twist)(hr_engine_receipt *receipt); /* what a commit answers; NULL: as it is */
    const hr_registration *rival;     /* registered on the engine of the first bucket, before it */
    unsigned attempts;                /* of the transport */
    size_t largest_bucket;            /* bytes of tensors */
    const hr_wire_bucket *now, *next; /* the last bucket, and the one that must follow it */
    unsigned looked;                  /* buckets that were made ahead of their turn */
} fleet_link;

void fake_fleet_open(fake_fleet *fleet, size_t n);
/* Checks that nothing is left in any engine. */
void fake_fleet_close(fake_fleet *fleet);
/* A new process in the place of a dead one. */
void fake_fleet_revive(fake_fleet *fleet);

/* The fault happens at the n-th call from now (0: the next); at none with FAULT_NONE. */
void fleet_link_init(fleet_link *link, fake_fleet *fleet, unsigned fault_at, fleet_fault fault);
hr_transport fleet_link_transport(fleet_link *link);

/* Clock and sleep of this fleet's time. */
hr_clock fake_fleet_clock(fake_fleet *fleet);
void fake_fleet_sleep(void *self, uint64_t ms);

#endif
