/* The publisher behind <headrace/publisher.h>. Private to the room and its tests. */
#ifndef HR_PUBLISH_PUBLISHER_H
#define HR_PUBLISH_PUBLISHER_H

#include "publish/fleet.h"
#include "transport/http_client.h"

#include <headrace/publisher.h>
#include <stdatomic.h>

#define HR_PUSH_BUCKET_BYTES ((uint64_t)512 << 20)
#define HR_PUSH_TIMEOUT_MS 60000
#define HR_PUSH_MAX_ENGINES 1024

/* A name that engines know with this config already, for transports that register once. */
typedef struct hr_registered {
    char *name;
    uint8_t config[HR_XXH3_SIZE];
} hr_registered;

struct hr_publisher {
    hr_publisher_options options; /* arrays and strings of its own */
    char *api_key, *transport_name;
    hr_http_client *client; /* NULL over a transport of the caller */
    hr_fleet fleet;         /* its transport is opened by the first push */
    atomic_bool busy;
    char *report;
    hr_registered *registered;
    size_t n_registered;
    /* For progress while a push runs. */
    hr_push_progress progress;
    const hr_wire_bucket *leaving; /* the bucket that is on its way; NULL: none */
    uint64_t sent_bytes, first_byte_ns;
    bool cancelled;
    bool unstoppable; /* commit and cleaning up are not cancelled */
};

/* hr_publisher_create, but over this transport instead of HTTP; it is closed with the publisher.
 * For tests, which also replace clock and sleep in publisher->fleet. */
hr_status hr_publisher_create_over(const hr_publisher_options *options,
                                   const hr_transport *transport, hr_publisher **out,
                                   hr_error *err);

/* Tells the caller's progress where the push is; false when it wants to stop, and may. */
bool hr_publisher_tell(hr_publisher *publisher, const char *stage);

/* Opens the transport where that has not been done. */
hr_status hr_publisher_connect(hr_publisher *publisher, hr_error *err);

/* Keeps the JSON of a receipt as the report. */
void hr_publisher_set_report(hr_publisher *publisher, const hr_push_receipt *receipt);

/* What register_once transports have registered. */
bool hr_publisher_is_registered(const hr_publisher *publisher, const hr_push_adapter *adapter);
hr_status hr_publisher_set_registered(hr_publisher *publisher, const hr_push_adapter *adapter,
                                      hr_error *err);
void hr_publisher_forget_registered(hr_publisher *publisher);

#endif
