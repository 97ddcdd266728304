/* All engines of a publisher as one: performs a stage on every one of them, repeats what got lost,
 * and remembers what each said last. Private to the room. */
#ifndef HR_PUBLISH_FLEET_H
#define HR_PUBLISH_FLEET_H

#include "base/clock.h"
#include "transport/transport.h"

typedef struct hr_fleet_engine {
    char *url;
    bool first; /* its URL is the smallest of all: sessions are begun there before they are
                   elsewhere */
    bool known; /* false: whether the last stage was done is not known */
    hr_session_state state;
    bool paused, unservable;
    /* By a bucket, perhaps: by all but those that it refused before it changed a thing. */
    bool touched;
    char error[512]; /* of its last failure; "" */
    hr_engine_receipt receipt;
    bool has_receipt;
    bool prepared; /* and its receipt was checked; by this process of the engine: */
    char instance[65];
    uint64_t retries;
    const char *serves; /* when a call has ended: "new", "old" or "unknown" weights; static */
} hr_fleet_engine;

typedef struct hr_fleet {
    hr_transport transport;
    hr_fleet_engine *engines;
    size_t n;
    hr_clock clock;
    void (*sleep_ms)(void *self, uint64_t ms); /* between tries */
    void *sleep_self;
    uint64_t timeout_ms; /* of a stage */
} hr_fleet;

/* What is tried again, until the deadline. */
typedef enum hr_fleet_retry {
    HR_RETRY_LOST,    /* calls without an answer, a few times */
    HR_RETRY_NOTHING, /* for engines to which a call cannot be repeated */
    HR_RETRY_BEGIN,  /* lost calls, and refusals while another session is open: its trainer will end
                        it, or its lease will. Up to HR_FLEET_WAIT_MS */
    HR_RETRY_WAIT,   /* those refusals alone */
    HR_RETRY_COMMIT, /* all but a refusal that time does not change */
    HR_RETRY_ALL     /* any refusal: flush, which waits for an idle engine */
} hr_fleet_retry;

/* A session that went silent is dropped after its lease, of which publishers ask for a little more
 * than their stage timeout: a stage ends within it, whichever engine is slow. Whoever waits for the
 * session of a dead trainer with the same timeout outlasts it, from 8 s on. */
#define HR_FLEET_MIN_LEASE_MS 10000
#define HR_FLEET_LEASE_MS(timeout_ms) ((timeout_ms) + (timeout_ms) / 8)
#define HR_FLEET_WAIT_MS(timeout_ms) ((timeout_ms) + (timeout_ms) / 4)

/* How long an engine may wait for its running requests: its refusal then arrives within the stage,
 * and it is known that nothing was changed. */
#define HR_FLEET_REQUESTS_MS(timeout_ms) ((timeout_ms) - (timeout_ms) / 8)

/* Whether an engine refused a session because another one is open. */
bool hr_fleet_is_taken(const hr_error *err);

/* Copies of urls; sleep and clock are the machine's until changed. */
hr_status hr_fleet_init(hr_fleet *fleet, const char *const *urls, size_t n, uint64_t timeout_ms,
                        hr_error *err);
void hr_fleet_free(hr_fleet *fleet); /* closes the transport, when there is one */

/* Forgets what engines said; paused stays. */
void hr_fleet_reset(hr_fleet *fleet);

/* The stage on every engine for which want (NULL: all) says true. Returns when each has done it or
 * failed, the failure that is decided first in the order of engines as *err: "engine URL, stage:
 * why". */
hr_status hr_fleet_run(hr_fleet *fleet, const hr_stage_request *request, hr_fleet_retry retry,
                       bool (*want)(const hr_fleet_engine *engine), hr_error *err);

#endif
