/* The JSON of /generate answers: one object per sequence, as SGLang shapes it. */
#ifndef HR_SERVER_GENERATE_REPLY_H
#define HR_SERVER_GENERATE_REPLY_H

#include "format/json_writer.h"
#include "server/generate_output.h"

typedef struct hr_reply_options {
    bool text_in_logprobs;
    const char *weight_version; /* while the sequence has not finished */
    int64_t index;              /* written as "index" when >= 0 (events of a batch) */
} hr_reply_options;

/* [{"version", "start", "end"}, ...] over the output tokens of a finished sequence. */
void hr_generate_reply_spans(const hr_generate_output *output, hr_json_writer *w);

/* {"text", "output_ids", "meta_info"}; finish_reason is null while the sequence is not finished,
 * and text is left out without a tokenizer. */
void hr_generate_reply_write(const hr_generate_output *output, const hr_reply_options *options,
                             hr_json_writer *w);

#endif
