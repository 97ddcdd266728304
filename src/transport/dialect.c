/* What dialects share. */
#include "transport/dialect.h"

#include "format/json_writer.h"

#include <string.h>

bool hr_step_post(hr_step *step, const char *path) {
    hr_buf_puts(&step->path, path);
    if (step->text.len == 0 && step->body.read == NULL)
        hr_buf_puts(&step->text, "{}");
    return true;
}

bool hr_step_fail(hr_step *step, hr_status status, const char *message) {
    step->status = hr_fail(&step->err, status, "%s", message);
    return false;
}

static const char *mode_name(hr_push_pause pause) {
    switch (pause) {
    case HR_PUSH_PAUSE_IN_PLACE:
        return "in_place";
    case HR_PUSH_PAUSE_ABORT:
        return "abort";
    default:
        return "retract";
    }
}

bool hr_step_control(const hr_stage_request *request, hr_step *step) {
    if (step->number > 0)
        return false;
    if (request->stage == HR_STAGE_PAUSE) {
        hr_buf_printf(&step->text, "{\"mode\": \"%s\"}", mode_name(request->pause));
        return hr_step_post(step, "/pause_generation");
    }
    if (request->stage == HR_STAGE_FLUSH)
        return hr_step_post(step, "/flush_cache");
    if (request->stage == HR_STAGE_CONTINUE)
        return hr_step_post(step, "/continue_generation");
    return hr_step_fail(step, HR_ERR_INTERNAL, "no such stage in this transport");
}
