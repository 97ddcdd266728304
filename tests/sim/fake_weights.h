/* What the publishing simulations push: two adapters and a base, all bytes made from a generation,
 * in units whose memory is poisoned as soon as the publisher gives them back. */
#ifndef HR_SIM_FAKE_WEIGHTS_H
#define HR_SIM_FAKE_WEIGHTS_H

#include "fake_fleet.h"

#include <headrace/publisher.h>

enum { WEIGHTS_ALL = 13 }; /* tensors: 5 of a, 4 of b, one of them empty, and 3 + 1 */

/* A source of all of it or of a rank's part. */
typedef struct fake_source {
    uint64_t generation;
    unsigned rank, ranks; /* tensor i is on rank i % ranks; the first of each adapter on all */
    bool adapters, base;
    uint64_t twist; /* turns the bytes of the replicas on this rank; 0: not */
    /* faults: at this unit, counted from 0; < 0: none */
    int fail_at;
    /* what happened */
    unsigned at, pulled, released;
    uint64_t live, most_live, largest_unit;
} fake_source;

hr_unit_source fake_source_units(fake_source *source);

extern const hr_push_adapter fake_adapters[2];

/* The push of everything of this source, under the version "v<generation>" put into version. */
hr_push fake_push(fake_source *source, char version[32]);

/* Whether an engine serves exactly this generation of what the source pushes. */
bool fake_engine_serves(const fleet_engine *engine, uint64_t generation);

#endif
