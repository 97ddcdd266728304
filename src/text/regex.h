/* The regular expressions of tokenizer files. They are written for Oniguruma; PCRE2 runs them, so a
 * pattern is translated where the two disagree and refused by name where no translation exists. */
#ifndef HR_TEXT_REGEX_H
#define HR_TEXT_REGEX_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

/* Immutable once compiled; safe for concurrent use with a matcher per thread. */
typedef struct hr_regex hr_regex;
/* Working memory of matching: one per thread at a time, any number of regexes. */
typedef struct hr_matcher hr_matcher;

typedef enum hr_regex_dialect {
    HR_REGEX_FROM_FILE, /* Oniguruma as tokenizer files use it; translated */
    HR_REGEX_LITERAL,   /* no character is special */
    HR_REGEX_OWN,       /* written here, for PCRE2 */
} hr_regex_dialect;

#define HR_REGEX_MAX_PATTERN 16384 /* bytes */

/* Pattern: valid UTF-8. ERR_UNSUPPORTED names the construct, ERR_LIMIT, ERR_NO_MEMORY. */
hr_status hr_regex_compile(hr_regex **out, const char *pattern, size_t len,
                           hr_regex_dialect dialect, hr_error *err);
void hr_regex_free(hr_regex *regex); /* NULL is fine */

hr_status hr_matcher_create(hr_matcher **out, hr_error *err);
void hr_matcher_free(hr_matcher *matcher); /* NULL is fine */

/* A walk over all matches of one text, left to right, not overlapping; an empty match right behind
 * another match does not count. */
typedef struct hr_match_walk {
    const hr_regex *regex;
    const char *text; /* valid UTF-8; look-behind and look-ahead see nothing outside it */
    size_t len;
    size_t from, last_end;
    bool any;
} hr_match_walk;
hr_match_walk hr_match_walk_start(const hr_regex *regex, const char *text, size_t len);
/* *found is false at the end. ERR_LIMIT when a match would take too long. */
hr_status hr_match_walk_next(hr_match_walk *walk, hr_matcher *matcher, bool *found, size_t *start,
                             size_t *end, hr_error *err);

#endif
