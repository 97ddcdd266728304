/* Stop strings and stop expressions in a stream of text: finds the first one, wherever the borders
 * of the pieces lie, and never lets out text that a match would take back. */
#ifndef HR_TEXT_STOP_H
#define HR_TEXT_STOP_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

#define HR_STOP_MAX_STRINGS 256
#define HR_STOP_MAX_BYTES 65536 /* of all strings of one request */
/* Most bytes held back because an expression may still match there. A match that is longer may be
 * missed: look-back is bounded. */
#define HR_STOP_REGEX_WINDOW 1024
#define HR_STOP_REGEX_CONTEXT 256 /* bytes already out that look-behind and \b can see */

/* One request's strings and stream. Not thread-safe. */
typedef struct hr_stop hr_stop;

/* Copies the strings (none may be empty). ERR_INVALID, ERR_LIMIT, ERR_NO_MEMORY. Free with
 * hr_stop_free. */
hr_status hr_stop_create(const char *const *strings, size_t count, hr_stop **out, hr_error *err);
void hr_stop_free(hr_stop *stop); /* NULL is fine */

/* Regular expressions (see text/stop_regex.h) that stop the stream too; expression i is reported as
 * match count + i. An expression counts as matched at the first end of a piece where it matches the
 * text so far, as SGLang does. Before the first push, once. ERR_INVALID, ERR_LIMIT, ERR_NO_MEMORY.
 */
hr_status hr_stop_add_regexes(hr_stop *stop, const char *const *patterns, size_t count,
                              hr_error *err);

/* Takes the next piece and appends to out the text that is certain. The match is the string whose
 * end comes first in the text; of several that end there, the longest: so the result does not
 * depend on how the text is cut into pieces. On a match *matched is its index in strings, the text
 * before it is out complete, and with keep it is out too; what follows it is dropped. Without one
 * *matched is -1. No push after a match. ERR_LIMIT (an expression takes too long), ERR_NO_MEMORY.
 */
hr_status hr_stop_push(hr_stop *stop, const char *text, size_t len, bool keep, hr_buf *out,
                       int *matched, hr_error *err);

/* Ends the stream without a match: appends the text held back. ERR_NO_MEMORY. */
hr_status hr_stop_flush(hr_stop *stop, hr_buf *out, hr_error *err);

#endif
