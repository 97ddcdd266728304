/* Stop expressions on PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/stop_regex.h"

#include "text/stop.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Some ten milliseconds: a search holds up everybody in the batch. */
#define MATCH_LIMIT 200000u
#define HEAP_LIMIT_KIB 4096u

struct hr_stop_regex {
    pcre2_code *codes[HR_STOP_REGEX_MAX];
    size_t count;
    pcre2_match_data *data;
    pcre2_match_context *context;
};

static hr_status refuse(hr_error *err, size_t which, int code, PCRE2_SIZE at) {
    char reason[128];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
    return hr_fail(err, HR_ERR_INVALID, "expression %zu: %s at byte %zu", which, reason,
                   (size_t)at);
}

static hr_status compile(hr_stop_regex *r, const char *pattern, hr_error *err) {
    size_t which = r->count, len = strlen(pattern);
    int code = 0;
    PCRE2_SIZE at = 0;
    if (len > HR_STOP_REGEX_MAX_PATTERN)
        return hr_fail(err, HR_ERR_LIMIT, "expression %zu has %zu bytes, at most %d are allowed",
                       which, len, HR_STOP_REGEX_MAX_PATTERN);
    pcre2_code *regex =
        pcre2_compile((PCRE2_SPTR)pattern, len, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                      &code, &at, NULL);
    if (regex == NULL)
        return refuse(err, which, code, at);
    r->codes[r->count++] = regex;
    uint32_t behind = 0;
    pcre2_pattern_info(regex, PCRE2_INFO_MAXLOOKBEHIND, &behind);
    if (behind > HR_STOP_REGEX_CONTEXT)
        return hr_fail(err, HR_ERR_INVALID,
                       "expression %zu looks %u characters behind, at most %d are kept", which,
                       behind, HR_STOP_REGEX_CONTEXT);
    code = pcre2_match(regex, (PCRE2_SPTR) "", 0, 0, 0, r->data, r->context);
    if (code != PCRE2_ERROR_NOMATCH)
        return hr_fail(err, HR_ERR_INVALID,
                       "expression %zu matches the empty text; it would stop at once", which);
    return HR_OK;
}

hr_status hr_stop_regex_create(const char *const *patterns, size_t count, hr_stop_regex **out,
                               hr_error *err) {
    if (count > HR_STOP_REGEX_MAX)
        return hr_fail(err, HR_ERR_LIMIT, "%zu expressions: at most %d are allowed", count,
                       HR_STOP_REGEX_MAX);
    hr_stop_regex *r = calloc(1, sizeof *r);
    if (r != NULL) {
        r->data = pcre2_match_data_create(1, NULL);
        r->context = pcre2_match_context_create(NULL);
    }
    if (r == NULL || r->data == NULL || r->context == NULL) {
        hr_stop_regex_free(r);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for stop expressions");
    }
    pcre2_set_match_limit(r->context, MATCH_LIMIT);
    pcre2_set_heap_limit(r->context, HEAP_LIMIT_KIB);
    for (size_t i = 0; i < count; i++) {
        hr_status status = compile(r, patterns[i], err);
        if (status != HR_OK) {
            hr_stop_regex_free(r);
            return status;
        }
    }
    *out = r;
    return HR_OK;
}

void hr_stop_regex_free(hr_stop_regex *r) {
    if (r == NULL)
        return;
    for (size_t i = 0; i < r->count; i++)
        pcre2_code_free(r->codes[i]);
    pcre2_match_data_free(r->data);
    pcre2_match_context_free(r->context);
    free(r);
}

hr_status hr_stop_regex_search(hr_stop_regex *r, const char *text, size_t len, size_t from,
                               bool at_start, hr_stop_regex_hit *hit, hr_error *err) {
    uint32_t options =
        PCRE2_NO_UTF_CHECK | PCRE2_PARTIAL_SOFT | PCRE2_NOTEMPTY | (at_start ? 0 : PCRE2_NOTBOL);
    *hit = (hr_stop_regex_hit){.which = -1, .open = len};
    for (size_t i = 0; i < r->count; i++) {
        int rc =
            pcre2_match(r->codes[i], (PCRE2_SPTR)text, len, from, options, r->data, r->context);
        if (rc == PCRE2_ERROR_NOMATCH)
            continue;
        const PCRE2_SIZE *span = pcre2_get_ovector_pointer(r->data);
        if (rc == PCRE2_ERROR_PARTIAL) {
            size_t open = span[0] > from ? span[0] : from;
            hit->open = open < hit->open ? open : hit->open;
        } else if (rc < 0) {
            return hr_fail(err, HR_ERR_LIMIT,
                           "stop_regex: expression %zu takes too many steps on this text; make it "
                           "simpler",
                           i);
        } else if (hit->which < 0 || span[1] < hit->end) {
            /* \K can put the start anywhere */
            size_t start = span[0] > from ? span[0] : from;
            hit->which = (int)i;
            hit->end = span[1] > from ? span[1] : from;
            hit->start = start < hit->end ? start : hit->end;
        }
    }
    return HR_OK;
}
