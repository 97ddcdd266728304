/* A receiver with a fake sink, and the calls of a trainer in one line each. */
#ifndef HR_UNIT_RECEIVER_FIXTURE_H
#define HR_UNIT_RECEIVER_FIXTURE_H

#include "base/error.h"
#include "fake_sink.h"

typedef struct fixture {
    fake_sink sink;
    fake_memory memory;
    uint64_t now_ns;
    hr_receiver *receiver;
    hr_error err; /* of the last call */
} fixture;

enum { FIXTURE_LEASE_MS = 1000, FIXTURE_STASH = 1 << 20 };

void fixture_open(fixture *f);
void fixture_close(fixture *f); /* and nothing is left */
void fixture_pass_ms(fixture *f, uint64_t ms);

hr_status fixture_register(fixture *f, const char *name, const char *config, bool defer);
hr_status fixture_begin(fixture *f, bool sync_base);
hr_status fixture_begin_for(fixture *f, const char *id, bool sync_base, const char *adapter);
/* A tensor of uint8 with the text's bytes, in a bucket of its own. */
hr_status fixture_send(fixture *f, const char *name, const char *bytes);
hr_status fixture_end(fixture *f, const char *version);
hr_status fixture_end_with(fixture *f, const hr_manifest *manifest);
/* q.lora_A and q.lora_B of the adapter: the whole of it. */
void fixture_send_adapter(fixture *f, const char *adapter, const char *bytes);
/* Registers, streams and publishes it; what it is then. */
uint64_t fixture_publish(fixture *f, const char *adapter, const char *bytes);

hr_tensor fixture_tensor(const char *name, const char *bytes);

/* The last call failed so, and its message has this. */
void fixture_says(const fixture *f, hr_status came, hr_status wanted, const char *text);

#endif
