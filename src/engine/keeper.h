/* The thread for what nobody waits for: it frees adapters that are gone, away from the thread that
 * computes steps, and rolls back update sessions whose trainer has gone silent. Looks once a second
 * and when it is woken; a look at an idle engine is two locks. */
#ifndef HR_ENGINE_KEEPER_H
#define HR_ENGINE_KEEPER_H

#include "weights/adapter_store.h"

#include <headrace/receiver.h>

typedef struct hr_keeper hr_keeper;

/* Both outlive the keeper. No other call to store may be under way; it becomes its sweeper. */
hr_status hr_keeper_create(hr_adapter_store *store, hr_receiver *receiver, const hr_alloc *alloc,
                           hr_keeper **out, hr_error *err);
/* No other call to store may be under way. NULL is allowed. */
void hr_keeper_destroy(hr_keeper *keeper);

#endif
