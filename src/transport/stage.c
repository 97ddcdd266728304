/* Names of stages. */
#include "transport/transport.h"

const char *hr_stage_name(hr_stage stage) {
    static const char *const names[HR_STAGE_COUNT] = {
        "pause", "flush", "register", "begin", "stream", "prepare", "commit", "abort", "continue"};
    return (unsigned)stage < HR_STAGE_COUNT ? names[stage] : "unknown";
}
