/* Receipts: one block of memory each, with a second one for an audit, freed by hr_receipt_free. */
#ifndef HR_WEIGHTS_RECEIPT_H
#define HR_WEIGHTS_RECEIPT_H

#include "weights/stash.h"

/* With room for the adapters, all fields zero. NULL when memory is short. */
hr_receipt *hr_receipt_create(const hr_memory *memory, size_t n_adapters);
/* Fills the audit from entries in order; false when memory is short. */
bool hr_receipt_put_audit(hr_receipt *receipt, hr_stash_entry *const *sorted, size_t n);
/* NULL when memory is short. */
hr_receipt *hr_receipt_copy(const hr_receipt *receipt);
/* An audit can be megabytes, and old receipts are kept. */
void hr_receipt_drop_audit(hr_receipt *receipt);

#endif
