/* Flags of a command as a table: parsing, and the help that lists them. */
#ifndef HR_CLI_OPTIONS_H
#define HR_CLI_OPTIONS_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define HR_CLI_MAX_ITEMS 1024

/* Values of a flag that may come more than once; the strings are argv's. */
typedef struct hr_cli_list {
    const char *items[HR_CLI_MAX_ITEMS];
    size_t n;
} hr_cli_list;

typedef enum hr_cli_kind {
    HR_CLI_FLAG,    /* bool: present */
    HR_CLI_TEXT,    /* const char *: one value */
    HR_CLI_LIST,    /* hr_cli_list: every value up to the next flag, added to those before */
    HR_CLI_NUMBER,  /* uint64_t: digits */
    HR_CLI_SIZE,    /* uint64_t: bytes, with K, M, G (powers of 1024) behind them if wanted */
    HR_CLI_DECIMAL, /* double */
    HR_CLI_HEADING  /* a line of the help alone */
} hr_cli_kind;

typedef struct hr_cli_option {
    const char *name; /* "--engine"; HR_CLI_HEADING: the line */
    hr_cli_kind kind;
    void *out;
    const char *value; /* "URL...", in the help */
    const char *help;
} hr_cli_option;

/* Takes argv apart; what is no flag goes to words (NULL: refused). "--name=value" and "--name
 * value" are the same. *help becomes true at --help or -h, and the rest is not looked at.
 * ERR_INVALID names the flag. */
hr_status hr_cli_parse(int argc, char **argv, const hr_cli_option *options, size_t n,
                       hr_cli_list *words, bool *help, hr_error *err);

/* "  --engine URL...   help" line by line. */
void hr_cli_print_options(FILE *out, const hr_cli_option *options, size_t n);

/* HEADRACE_API_KEY of the environment; NULL when it is empty or not set. */
const char *hr_cli_api_key(void);

/* A text from outside, which may hold anything: what would move the cursor becomes a space. */
void hr_cli_put_clean(FILE *out, const char *text);

/* "512 B", "65.5 KB", "269.0 MB" into out; returns it. */
typedef struct hr_cli_amount {
    char text[32];
} hr_cli_amount;
const char *hr_cli_format_bytes(uint64_t bytes, hr_cli_amount *out);

/* The milliseconds (at least 1) of a --timeout in seconds. ERR_INVALID: not above 0, or over a day.
 */
hr_status hr_cli_timeout(double seconds, uint64_t *ms, hr_error *err);

/* "1536", "512M", "2G". ERR_INVALID. */
hr_status hr_cli_size(const char *text, uint64_t *out, hr_error *err);

#endif
