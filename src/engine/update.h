/* The engine as the sink of a receiver: what sessions bring becomes adapters of the store and base
 * weights of the model, and goes live in one change between two steps.
 *
 * Everything that can fail happens before that change: adapters are built aside, base weights are
 * packed into a shadow (or in place, while no step runs), and the store has allocated what
 * publication needs.
 *
 * The base weights have one user at a time: an update, or whoever takes them otherwise. Weights
 * that are lost (an update in place that failed, memory given back) make the engine unservable
 * until all of them have come again, in one update or in several. */
#ifndef HR_ENGINE_UPDATE_H
#define HR_ENGINE_UPDATE_H

#include "engine/loop.h"
#include "model/base_update.h"
#include "model/lora.h"

#include <headrace/receiver.h>

typedef struct hr_update hr_update;

/* The objects outlive the sink. */
typedef struct hr_update_config {
    hr_model *model;
    hr_adapter_store *store;
    hr_loop *loop;
    bool enable_lora;
    uint32_t max_lora_rank; /* 0 = any */
    bool shadow;            /* false: base weights are written in place */
    hr_alloc alloc;
} hr_update_config;

hr_status hr_update_create(const hr_update_config *config, hr_update **out, hr_error *err);
/* After its receiver. Names that were registered and never published are forgotten. NULL is
 * allowed. */
void hr_update_destroy(hr_update *update);

/* For hr_receiver_create; lives as long as update. */
hr_receiver_sink hr_update_sink(hr_update *update);

/* The payload of the store for a built adapter. */
hr_adapter_payload hr_update_payload(hr_lora *lora);
/* HR_ERR_ADAPTER_INCOMPATIBLE when the rank is above the engine's. Thread-safe. */
hr_status hr_update_check_rank(const hr_update *update, uint32_t rank, hr_error *err);
/* The name is registered and waits for its first weights. Thread-safe. */
bool hr_update_is_registered(hr_update *update, const char *name);

/* Takes the base weights for another use; user says what for ("their memory is given back").
 * HR_ERR_BUSY, naming the present user. Thread-safe. */
hr_status hr_update_take_base(hr_update *update, const char *user, hr_error *err);
void hr_update_give_base(hr_update *update);
/* Called by who has taken them: they are lost, for this reason. */
void hr_update_lose_base(hr_update *update, const char *reason);

#endif
