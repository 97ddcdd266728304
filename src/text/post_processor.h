/* The post-processor: which special tokens go around a text. */
#ifndef HR_TEXT_POST_PROCESSOR_H
#define HR_TEXT_POST_PROCESSOR_H

#include "base/error.h"
#include "format/json.h"
#include "text/bpe.h"

/* From the "post_processor" value of tokenizer.json, NULL or null for none: the ids before and
 * behind a single text. ERR_UNSUPPORTED names what is not known. prefix and suffix come in
 * zero-initialised; the caller frees their data in every case. */
hr_status hr_post_processor_read(const cJSON *node, hr_ids *prefix, hr_ids *suffix, hr_error *err);

#endif
