/* Version of the library. */
#ifndef HEADRACE_VERSION_H
#define HEADRACE_VERSION_H

#define HR_VERSION_MAJOR 0
#define HR_VERSION_MINOR 1
#define HR_VERSION_PATCH 0
#define HR_VERSION_STRING "0.1.0"

/* Version of the library that is linked, "major.minor.patch". Static string, thread-safe. */
const char *hr_version(void);

#endif
