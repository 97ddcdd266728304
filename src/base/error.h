/* How a failure is made and handed on: fill the caller's hr_error once, where the failure is
 * decided, and return its status; everybody above only forwards it. */
#ifndef HR_BASE_ERROR_H
#define HR_BASE_ERROR_H

#include <headrace/status.h>
#include <stdnoreturn.h>

/* Writes status and the formatted message into err (when not NULL) and returns status. */
hr_status hr_fail(hr_error *err, hr_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "context: " before the message that err already holds; returns err's status, or status when
 * err is NULL. For callers that know a name (a file, an adapter) the failing callee did not. */
hr_status hr_fail_context(hr_error *err, hr_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Forwards a failure; use only where nothing is to be cleaned up, else goto. */
#define HR_TRY(call)                                                                               \
    do {                                                                                           \
        hr_status hr_try_status_ = (call);                                                         \
        if (hr_try_status_ != HR_OK)                                                               \
            return hr_try_status_;                                                                 \
    } while (0)

/* Internal corruption only, never for input from outside: prints the condition and aborts, in every
 * build type. */
#define HR_ASSERT(cond) ((cond) ? (void)0 : hr_assert_failed(#cond, __FILE__, __LINE__))
noreturn void hr_assert_failed(const char *cond, const char *file, int line);

#endif
