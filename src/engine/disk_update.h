/* Base weights from a Hugging Face directory, as one update session: all of them or none. */
#ifndef HR_ENGINE_DISK_UPDATE_H
#define HR_ENGINE_DISK_UPDATE_H

#include "format/hf_config.h"

#include <headrace/engine.h>

/* The directory must hold a model of the same geometry as served; a key that differs is named
 * (HR_ERR_MODEL). Other refusals are those of format/checkpoint.h and headrace/receiver.h. */
hr_status hr_disk_update_run(hr_receiver *receiver, const hr_hf_config *served,
                             const hr_disk_update *update, hr_receipt **receipt, hr_error *err);

#endif
