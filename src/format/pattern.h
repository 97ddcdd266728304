/* Regular expressions from outside, as Python's re understands them for module names. PCRE2 with
 * limits, so that no pattern can take the engine's time. Private to the room. */
#ifndef HR_FORMAT_PATTERN_H
#define HR_FORMAT_PATTERN_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hr_pattern hr_pattern;

#define HR_PATTERN_MAX_BYTES 8192

typedef enum hr_pattern_form {
    HR_PATTERN_WHOLE,  /* re.fullmatch(text, name) */
    HR_PATTERN_SUFFIX, /* the whole name or what follows a dot: (.*\.)?(text)$ */
    HR_PATTERN_WITHIN, /* text is some run of whole components: (^|.*\.)text($|\..*) */
    HR_PATTERN_LAYER   /* (?:^|.*?\.)text\.(?P<idx>\d+)\. */
} hr_pattern_form;

/* what names the pattern in messages ("target_modules"). ERR_ADAPTER_CONFIG, ERR_NO_MEMORY. */
hr_status hr_pattern_create(const char *text, hr_pattern_form form, const char *what,
                            hr_pattern **out, hr_error *err);
void hr_pattern_destroy(hr_pattern *pattern); /* NULL is allowed */

/* Whether name matches. ERR_ADAPTER_CONFIG when the pattern takes too many steps. Not for two
 * threads at once on one pattern. */
hr_status hr_pattern_match(hr_pattern *pattern, const char *name, bool *hit, hr_error *err);

/* The number of the last match of a LAYER pattern; false when it does not fit 32 bits. */
bool hr_pattern_layer(const hr_pattern *pattern, const char *name, uint32_t *out);

#endif
