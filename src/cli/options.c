/* Flags of a command as a table. */
#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static hr_status read_number(const char *text, const char **end, uint64_t *out) {
    char *stop = NULL;
    if (*text < '0' || *text > '9')
        return HR_ERR_INVALID;
    errno = 0;
    unsigned long long value = strtoull(text, &stop, 10);
    if (errno != 0)
        return HR_ERR_INVALID;
    *out = value;
    *end = stop;
    return HR_OK;
}

hr_status hr_cli_size(const char *text, uint64_t *out, hr_error *err) {
    static const char units[] = "KMGT";
    uint64_t value = 0;
    const char *end = "?";
    hr_status status = read_number(text, &end, &value);
    const char *unit = *end != '\0' ? strchr(units, *end >= 'a' ? *end - 'a' + 'A' : *end) : NULL;
    if (unit != NULL) {
        unsigned shift = 10 * ((unsigned)(unit - units) + 1);
        if (value > UINT64_MAX >> shift)
            status = HR_ERR_INVALID;
        value <<= shift;
        end++;
        if (*end == 'B' || *end == 'b')
            end++;
    }
    if (status != HR_OK || *end != '\0')
        return hr_fail(err, HR_ERR_INVALID,
                       "\"%.100s\" is no size; wanted bytes, or a number with K, M, G or T", text);
    *out = value;
    return HR_OK;
}

const char *hr_cli_api_key(void) {
    const char *key = getenv("HEADRACE_API_KEY");
    return key != NULL && key[0] != '\0' ? key : NULL;
}

void hr_cli_put_clean(FILE *out, const char *text) {
    for (const char *c = text; *c != '\0'; c++)
        fputc((unsigned char)*c < 0x20 || *c == 0x7f ? ' ' : *c, out);
}

const char *hr_cli_format_bytes(uint64_t bytes, hr_cli_amount *out) {
    double value = (double)bytes;
    if (bytes < 1000)
        snprintf(out->text, sizeof out->text, "%u B", (unsigned)bytes);
    else
        snprintf(out->text, sizeof out->text, "%.1f %s", value < 1e6 ? value / 1e3 : value / 1e6,
                 value < 1e6 ? "KB" : "MB");
    return out->text;
}

hr_status hr_cli_timeout(double seconds, uint64_t *ms, hr_error *err) {
    if (!(seconds > 0 && seconds <= 86400))
        return hr_fail(err, HR_ERR_INVALID,
                       "--timeout: wanted more than 0 and at most 86400 seconds, came %g", seconds);
    *ms = seconds > 0.001 ? (uint64_t)(seconds * 1000) : 1;
    return HR_OK;
}

static hr_status read_decimal(const char *text, double *out) {
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || text[strspn(text, "0123456789.eE+-")] != '\0' || *end != '\0' ||
        errno != 0 || !isfinite(value))
        return HR_ERR_INVALID;
    *out = value;
    return HR_OK;
}

static hr_status take(const hr_cli_option *option, const char *value, hr_error *err) {
    const char *end = "";
    switch (option->kind) {
    case HR_CLI_TEXT:
        *(const char **)option->out = value;
        return HR_OK;
    case HR_CLI_LIST: {
        hr_cli_list *list = option->out;
        if (list->n == HR_CLI_MAX_ITEMS)
            return hr_fail(err, HR_ERR_LIMIT, "%s: more than %d values", option->name,
                           HR_CLI_MAX_ITEMS);
        list->items[list->n++] = value;
        return HR_OK;
    }
    case HR_CLI_NUMBER:
        if (read_number(value, &end, option->out) != HR_OK || *end != '\0')
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted a number, came \"%.100s\"",
                           option->name, value);
        return HR_OK;
    case HR_CLI_SIZE: {
        hr_status status = hr_cli_size(value, option->out, err);
        return status == HR_OK ? HR_OK : hr_fail_context(err, status, "%s", option->name);
    }
    default:
        if (read_decimal(value, option->out) != HR_OK)
            return hr_fail(err, HR_ERR_INVALID, "%s: wanted a number, came \"%.100s\"",
                           option->name, value);
        return HR_OK;
    }
}

static const hr_cli_option *find(const hr_cli_option *options, size_t n, const char *name,
                                 size_t len) {
    for (size_t i = 0; i < n; i++) {
        if (options[i].kind != HR_CLI_HEADING && strlen(options[i].name) == len &&
            memcmp(options[i].name, name, len) == 0)
            return &options[i];
    }
    return NULL;
}

static bool is_flag(const char *word) {
    return word[0] == '-' && word[1] == '-';
}

/* The values of a flag that stand behind it; *at goes to the last word taken. */
static hr_status take_following(const hr_cli_option *option, int argc, char **argv, int *at,
                                hr_error *err) {
    if (*at + 1 >= argc || (option->kind == HR_CLI_LIST && is_flag(argv[*at + 1])))
        return hr_fail(err, HR_ERR_INVALID, "%s needs a value: %s", option->name, option->value);
    HR_TRY(take(option, argv[++*at], err));
    while (option->kind == HR_CLI_LIST && *at + 1 < argc && !is_flag(argv[*at + 1]))
        HR_TRY(take(option, argv[++*at], err));
    return HR_OK;
}

hr_status hr_cli_parse(int argc, char **argv, const hr_cli_option *options, size_t n,
                       hr_cli_list *words, bool *help, hr_error *err) {
    *help = false;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            *help = true;
            return HR_OK;
        }
        if (!is_flag(argv[i])) {
            if (words == NULL || words->n == HR_CLI_MAX_ITEMS)
                return hr_fail(err, HR_ERR_INVALID, "\"%.200s\" is not expected here", argv[i]);
            words->items[words->n++] = argv[i];
            continue;
        }
        const char *equals = strchr(argv[i], '=');
        size_t len = equals != NULL ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        const hr_cli_option *option = find(options, n, argv[i], len);
        if (option == NULL)
            return hr_fail(err, HR_ERR_INVALID, "unknown option %.200s", argv[i]);
        if (option->kind == HR_CLI_FLAG && equals != NULL)
            return hr_fail(err, HR_ERR_INVALID, "%s takes no value", option->name);
        if (option->kind == HR_CLI_FLAG)
            *(bool *)option->out = true;
        else if (equals != NULL)
            HR_TRY(take(option, equals + 1, err));
        else
            HR_TRY(take_following(option, argc, argv, &i, err));
    }
    return HR_OK;
}

void hr_cli_print_options(FILE *out, const hr_cli_option *options, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char left[64];
        if (options[i].kind == HR_CLI_HEADING) {
            fprintf(out, "%s\n", options[i].name);
            continue;
        }
        snprintf(left, sizeof left, "%s%s%s", options[i].name, options[i].value != NULL ? " " : "",
                 options[i].value != NULL ? options[i].value : "");
        fprintf(out, "  %-28s %s\n", left, options[i].help);
    }
}
