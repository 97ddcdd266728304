/* Memory that the engine gives back to the system for a while, and the weights checker's changes of
 * base weights: what stops all steps, but is no update. */
#ifndef HR_ENGINE_OCCUPATION_H
#define HR_ENGINE_OCCUPATION_H

#include "engine/update.h"

typedef struct hr_occupation hr_occupation;

typedef struct hr_occupation_config {
    hr_model *model;
    hr_loop *loop;
    hr_update *update;
    char *kv; /* pages of hr_pages_alloc */
    uint64_t kv_bytes;
    hr_alloc alloc;
} hr_occupation_config;

hr_status hr_occupation_create(const hr_occupation_config *config, hr_occupation **out,
                               hr_error *err);
/* NULL is allowed. */
void hr_occupation_destroy(hr_occupation *occupation);

/* As the functions of headrace/engine.h with these names. */
hr_status hr_occupation_release(hr_occupation *occupation, unsigned kinds, hr_error *err);
void hr_occupation_resume(hr_occupation *occupation, unsigned kinds);
/* Random base weights. */
hr_status hr_occupation_randomize(hr_occupation *occupation, hr_error *err);

#endif
