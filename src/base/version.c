/* The version of the linked library. */
#include <headrace/version.h>

const char *hr_version(void) {
    return HR_VERSION_STRING;
}
