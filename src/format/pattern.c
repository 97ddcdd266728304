/* Module-name patterns over PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "format/pattern.h"

#include "base/buf.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Names are short; a pattern that backtracks more than this over one of them is refused. */
#define MAX_STEPS 200000
#define MAX_HEAP_KIB 4096

struct hr_pattern {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    char *what; /* "target_modules: pattern \"...\"" */
};

static bool allocate(hr_pattern *pattern, const char *text, const char *what) {
    hr_buf label = {0};
    hr_buf_printf(&label, "%s: pattern \"%.200s\"", what, text);
    pattern->what = label.data;
    pattern->limits = pcre2_match_context_create(NULL);
    if (label.failed || pattern->limits == NULL)
        return false;
    pcre2_set_match_limit(pattern->limits, MAX_STEPS);
    pcre2_set_depth_limit(pattern->limits, MAX_STEPS);
    pcre2_set_heap_limit(pattern->limits, MAX_HEAP_KIB);
    return true;
}

static void put_form(hr_buf *full, const char *text, hr_pattern_form form) {
    static const char *const before[] = {"", "(.*\\.)?(", "(^|.*\\.)", "(?:^|.*?\\.)"};
    static const char *const after[] = {"", ")$", "($|\\..*)", "\\.(?P<idx>\\d+)\\."};
    hr_buf_puts(full, before[form]);
    hr_buf_puts(full, text);
    hr_buf_puts(full, after[form]);
}

static hr_status compile(hr_pattern *pattern, const char *text, hr_pattern_form form,
                         hr_error *err) {
    hr_buf full = {0};
    int code = 0;
    PCRE2_SIZE at = 0;
    put_form(&full, text, form);
    if (full.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", pattern->what);
    uint32_t options = PCRE2_ANCHORED | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C;
    if (form == HR_PATTERN_WHOLE)
        options |= PCRE2_ENDANCHORED;
    pattern->code = pcre2_compile((PCRE2_SPTR)full.data, full.len, options, &code, &at, NULL);
    hr_buf_free(&full);
    if (pattern->code == NULL) {
        PCRE2_UCHAR reason[128] = "";
        pcre2_get_error_message(code, reason, sizeof reason);
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "%s is not a regular expression: %s",
                       pattern->what, (const char *)reason);
    }
    pattern->match = pcre2_match_data_create_from_pattern(pattern->code, NULL);
    if (pattern->match == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", pattern->what);
    return HR_OK;
}

hr_status hr_pattern_create(const char *text, hr_pattern_form form, const char *what,
                            hr_pattern **out, hr_error *err) {
    if (strlen(text) > HR_PATTERN_MAX_BYTES)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG, "%s: a pattern is longer than %d bytes", what,
                       HR_PATTERN_MAX_BYTES);
    /* Python reads "{,3}" as a repeat, PCRE2 as text; "[[:" starts a class in PCRE2 only. */
    if (strstr(text, "{,") != NULL || strstr(text, "[[:") != NULL)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "%s: pattern \"%.200s\" uses {, or [[: whose meaning differs between "
                       "regular expression libraries; write it out",
                       what, text);
    hr_pattern *pattern = calloc(1, sizeof *pattern);
    if (pattern == NULL || !allocate(pattern, text, what)) {
        hr_pattern_destroy(pattern);
        return hr_fail(err, HR_ERR_NO_MEMORY, "%s: out of memory", what);
    }
    hr_status status = compile(pattern, text, form, err);
    if (status != HR_OK) {
        hr_pattern_destroy(pattern);
        return status;
    }
    *out = pattern;
    return HR_OK;
}

void hr_pattern_destroy(hr_pattern *pattern) {
    if (pattern == NULL)
        return;
    pcre2_match_data_free(pattern->match);
    pcre2_match_context_free(pattern->limits);
    pcre2_code_free(pattern->code);
    free(pattern->what);
    free(pattern);
}

hr_status hr_pattern_match(hr_pattern *pattern, const char *name, bool *hit, hr_error *err) {
    int found = pcre2_match(pattern->code, (PCRE2_SPTR)name, strlen(name), 0, 0, pattern->match,
                            pattern->limits);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH)
        return hr_fail(err, HR_ERR_ADAPTER_CONFIG,
                       "%s cannot be matched against %.200s within its limits (code %d)",
                       pattern->what, name, found);
    *hit = found >= 0;
    return HR_OK;
}

bool hr_pattern_layer(const hr_pattern *pattern, const char *name, uint32_t *out) {
    int group = pcre2_substring_number_from_name(pattern->code, (PCRE2_SPTR) "idx");
    if (group <= 0)
        return false;
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(pattern->match) + 2 * (size_t)group;
    uint64_t value = 0;
    for (PCRE2_SIZE i = span[0]; i < span[1]; i++) {
        value = value * 10 + (uint64_t)(name[i] - '0');
        if (value > UINT32_MAX)
            return false;
    }
    *out = (uint32_t)value;
    return true;
}
