/* Receipts of a push. Private to the room. */
#ifndef HR_PUBLISH_RECEIPT_H
#define HR_PUBLISH_RECEIPT_H

#include "publish/fleet.h"

/* Makes a receipt of facts (whose strings are copied, engines and n_engines ignored) and of what
 * the engines of the fleet said; fleet NULL: no engines. failure NULL: none; it stands in the JSON
 * as "error". ERR_NO_MEMORY. */
hr_status hr_push_receipt_make(const hr_push_receipt *facts, const hr_fleet *fleet,
                               const hr_error *failure, hr_push_receipt **out, hr_error *err);

#endif
