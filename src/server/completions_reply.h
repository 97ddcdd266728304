/* The JSON of /v1/completions, as OpenAI shapes it, with SGLang's matched_stop and metadata. */
#ifndef HR_SERVER_COMPLETIONS_REPLY_H
#define HR_SERVER_COMPLETIONS_REPLY_H

#include "server/generate_job.h"

void hr_completions_reply_answer(const hr_job *job, hr_json_writer *w);
void hr_completions_reply_event(const hr_job *job, size_t index, const hr_generate_output *output,
                                bool first, const char *weight_version, hr_json_writer *w);
/* The event with the usage of the whole request, when it was asked for. */
void hr_completions_reply_last(const hr_job *job, hr_buf *out);

#endif
