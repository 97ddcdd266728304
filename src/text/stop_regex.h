/* Stop expressions: where the regular expressions of one request match in a stream of text. They
 * come from clients, so every cost is bounded: length and number of patterns, steps of one search
 * and memory; and how far back a match may begin (see text/stop.h). */
#ifndef HR_TEXT_STOP_REGEX_H
#define HR_TEXT_STOP_REGEX_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

#define HR_STOP_REGEX_MAX 16
#define HR_STOP_REGEX_MAX_PATTERN 1024 /* bytes */

/* One request's expressions, with working memory: not thread-safe. */
typedef struct hr_stop_regex hr_stop_regex;

/* PCRE2's syntax with Unicode classes, which for ordinary expressions is Python's. ERR_INVALID with
 * what is wrong and where, also for an expression that matches the empty text; ERR_LIMIT,
 * ERR_NO_MEMORY. */
hr_status hr_stop_regex_create(const char *const *patterns, size_t count, hr_stop_regex **out,
                               hr_error *err);
void hr_stop_regex_free(hr_stop_regex *regex); /* NULL is fine */

typedef struct hr_stop_regex_hit {
    int which;         /* index into patterns; -1: no match */
    size_t start, end; /* of the match */
    size_t open; /* no match: where the first beginning of one stands that more text may complete,
                    len when there is none */
} hr_stop_regex_hit;

/* Looks for matches in text that begin at from or later; text before from is seen by look-behind.
 * at_start: text[0] is where the stream began. Of several expressions the one whose match ends
 * first wins. text is valid UTF-8. ERR_LIMIT when a search takes too many steps. */
hr_status hr_stop_regex_search(hr_stop_regex *regex, const char *text, size_t len, size_t from,
                               bool at_start, hr_stop_regex_hit *hit, hr_error *err);

#endif
