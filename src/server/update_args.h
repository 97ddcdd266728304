/* Arguments of the update and session routes: one object whether they came as a JSON body or in the
 * query string, read as laxly as SGLang reads them (a number or a boolean may be a string), and
 * checked as strictly as a guard asks for: a key that is not known is refused, because a misspelt
 * guard would guard nothing. */
#ifndef HR_SERVER_UPDATE_ARGS_H
#define HR_SERVER_UPDATE_ARGS_H

#include "base/error.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Refuses a key that stands in neither known (NULL at its end) nor the list of what SGLang's
 * clients send and has no meaning here, and a key that stands twice in one object. */
hr_status hr_args_check(const cJSON *args, const char *const *known, hr_error *err);

/* Adds a key of the query string as a string. One that is there already is refused as given twice,
 * and so is what is not UTF-8: no JSON could name it again. */
hr_status hr_args_add(cJSON *args, const char *key, const char *value, hr_error *err);

/* Members by key. One that is absent or null leaves *out as it was. Booleans are true and false, 1
 * and 0, or these as strings; numbers may be strings of digits. ERR_INVALID names the key. */
hr_status hr_args_bool(const cJSON *args, const char *key, bool *out, hr_error *err);
hr_status hr_args_u64(const cJSON *args, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                      hr_error *err);
hr_status hr_args_string(const cJSON *args, const char *key, const char **out, hr_error *err);
/* Seconds, at most a day, fractions too; as milliseconds. */
hr_status hr_args_seconds(const cJSON *args, const char *key, uint64_t *ms, hr_error *err);
/* An object, or a string that holds one as JSON: *text gets it as text, which the caller frees with
 * cJSON_free; NULL when absent. */
hr_status hr_args_object_text(const cJSON *args, const char *key, char **text, hr_error *err);

/* Which of several models an update is for: there is one, "all" and "target". */
hr_status hr_args_selector(const cJSON *args, hr_error *err);

#endif
