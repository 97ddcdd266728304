/* The units that travel together next. Private to the room. */
#ifndef HR_PUBLISH_BUCKET_H
#define HR_PUBLISH_BUCKET_H

#include "base/buf.h"
#include "base/error.h"

#include <headrace/publisher.h>

/* One tensor of a unit and what became of it. */
typedef struct hr_packed_tensor {
    hr_tensor tensor;    /* name: as the unit has it */
    const char *adapter; /* NULL: base */
    size_t entry;        /* in the ledger */
    bool send;           /* false: another rank sends it */
} hr_packed_tensor;

typedef struct hr_push_bucket {
    hr_unit *units;
    size_t n_units, cap_units;
    hr_packed_tensor *tensors;
    size_t n, cap;
    uint64_t bytes;
} hr_push_bucket;

/* Takes the unit over when it succeeds. ERR_NO_MEMORY. */
hr_status hr_push_bucket_add(hr_push_bucket *bucket, const hr_unit *unit, hr_error *err);

/* Releases the units; keeps the memory of the lists. */
void hr_push_bucket_clear(hr_push_bucket *bucket);
void hr_push_bucket_free(hr_push_bucket *bucket); /* back to zero */

uint64_t hr_unit_bytes(const hr_unit *unit);
void hr_unit_release(hr_unit *unit); /* once; nothing on an empty unit */

/* "adapter:name" or "name", put into text. */
const char *hr_wire_name_format(const char *adapter, const char *name, hr_buf *text);

/* Refuses what must not leave: an adapter that is not declared, a base tensor without sync_base,
 * names that engines would misread, a tensor whose bytes are not those of its shape. ERR_INVALID,
 * ERR_SHAPE. */
hr_status hr_unit_check(const hr_unit *unit, const hr_push *push, hr_error *err);

#endif
