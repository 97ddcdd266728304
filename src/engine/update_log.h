/* What updates leave in the log: a line for every session that was published or rolled back, so
 * that an operator sees what the engine took, and why not. */
#ifndef HR_ENGINE_UPDATE_LOG_H
#define HR_ENGINE_UPDATE_LOG_H

#include <headrace/receiver.h>

/* For hr_receiver_sink; self is not looked at. */
void hr_update_log_published(void *self, const hr_receipt *receipt);
void hr_update_log_rolled_back(void *self, const char *session_id, const hr_error *cause);

#endif
