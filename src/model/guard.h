/* Keeps readers of weights outside steps (digests, values, an adapter that carries a weight of the
 * base) and writers apart.
 *
 * There are two sides of memory: the live one and the shadow. A reader holds the side that is live
 * while it reads one tensor. An exchange of the sides waits for nobody; who writes a side first
 * waits until its readers have left. Steps take no part: they and the writers of the live side
 * exclude each other by the engine's plan. */
#ifndef HR_MODEL_GUARD_H
#define HR_MODEL_GUARD_H

#include "base/error.h"

typedef struct hr_guard hr_guard;

hr_status hr_guard_create(hr_guard **out, hr_error *err); /* ERR_NO_MEMORY */
void hr_guard_destroy(hr_guard *guard);                   /* NULL is allowed */

/* The memory that was live on entry; its bytes stay as they are until it is left. */
typedef struct hr_reading {
    const char *memory;
    unsigned side;
} hr_reading;

/* live: where the address of live memory stands, which only hr_guard_exchange changes. Waits while
 * a writer has the live side, at most half a minute (ERR_BUSY). Any thread. */
hr_status hr_guard_enter(hr_guard *guard, char *const *live, hr_reading *out, hr_error *err);
void hr_guard_leave(hr_guard *guard, const hr_reading *reading);

/* For the one writer there is: waits for the last readers of the shadow (it gets no new ones), or
 * of the live side, which then lets none in before it is released. At most half a minute, ERR_BUSY.
 */
hr_status hr_guard_wait_shadow(hr_guard *guard, hr_error *err);
hr_status hr_guard_take_live(hr_guard *guard, hr_error *err);
void hr_guard_release_live(hr_guard *guard);

/* Calls exchange(ctx) while nobody enters; from then on readers enter the other side. */
void hr_guard_exchange(hr_guard *guard, void (*exchange)(void *ctx), void *ctx);

#endif
