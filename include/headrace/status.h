/* Status codes and the error object of every fallible call.
 *
 * Codes are grouped by what is lost, so that a caller knows how much to rebuild: the call, a
 * tensor, an adapter, a session, a peer, or the engine. The message says what was wanted, what came
 * and what to do. */
#ifndef HEADRACE_STATUS_H
#define HEADRACE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* One list gives the enum, the names and the texts: HR_STATUS_MAP(X) calls X(name, value, text). */
#define HR_STATUS_MAP(X)                                                                           \
    X(OK, 0, "success")                                                                            \
    /* the call is lost; everything else is as it was */                                           \
    X(ERR_INVALID, 100, "invalid argument or request")                                             \
    X(ERR_NOT_FOUND, 101, "not found")                                                             \
    X(ERR_LIMIT, 102, "over a limit")                                                              \
    X(ERR_BUSY, 103, "busy")                                                                       \
    X(ERR_TIMEOUT, 104, "deadline passed")                                                         \
    X(ERR_CANCELLED, 105, "cancelled")                                                             \
    X(ERR_UNSUPPORTED, 106, "not supported")                                                       \
    /* a tensor, or the file that carries it, is lost */                                           \
    X(ERR_CORRUPT, 200, "malformed bytes")                                                         \
    X(ERR_SHAPE, 201, "shape mismatch")                                                            \
    X(ERR_DTYPE, 202, "dtype mismatch")                                                            \
    X(ERR_VALUE, 203, "values that are not finite")                                                \
    /* an adapter is lost */                                                                       \
    X(ERR_ADAPTER_CONFIG, 300, "adapter config refused")                                           \
    X(ERR_ADAPTER_INCOMPATIBLE, 301, "adapter does not fit the model")                             \
    X(ERR_ADAPTER_EXISTS, 302, "adapter already loaded")                                           \
    X(ERR_ADAPTER_UNKNOWN, 303, "adapter not loaded")                                              \
    /* an update session is lost */                                                                \
    X(ERR_SESSION, 400, "update session refused")                                                  \
    X(ERR_DIGEST, 401, "digest mismatch")                                                          \
    /* a peer is lost */                                                                           \
    X(ERR_PEER, 500, "peer gone")                                                                  \
    /* the engine cannot start or go on */                                                         \
    X(ERR_IO, 600, "input/output error")                                                           \
    X(ERR_NO_MEMORY, 601, "out of memory")                                                         \
    X(ERR_MODEL, 602, "model refused")                                                             \
    X(ERR_CPU, 603, "processor lacks a needed instruction set")                                    \
    X(ERR_STOPPING, 604, "engine is stopping")                                                     \
    X(ERR_INTERNAL, 605, "internal error")                                                         \
    X(ERR_UNSERVABLE, 606, "base weights are incomplete")

typedef enum hr_status {
#define HR_STATUS_ENUM(name, value, text) HR_##name = (value),
    HR_STATUS_MAP(HR_STATUS_ENUM)
#undef HR_STATUS_ENUM
} hr_status;

/* Filled by a failing call, owned by the caller, who may pass NULL when the text is not wanted.
 * Untouched on success. */
typedef struct hr_error {
    hr_status status;
    char message[1024]; /* UTF-8, NUL-terminated, cut at a character border when longer */
} hr_error;

/* Name of a status ("ERR_SHAPE") and its one-line text. Static strings; "unknown" for a foreign
 * value. Thread-safe. */
const char *hr_status_name(hr_status status);
const char *hr_status_text(hr_status status);

#ifdef __cplusplus
}
#endif
#endif
