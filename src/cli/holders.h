/* Which engines still hold what was published on them. An engine that restarts comes up without it,
 * and nobody else tells. */
#ifndef HR_CLI_HOLDERS_H
#define HR_CLI_HOLDERS_H

#include "cli/options.h"

typedef struct hr_holder {
    char *url;
    char instance[65]; /* the process that published it; "": the engine does not say */
} hr_holder;

typedef struct hr_holders {
    hr_holder *items;
    size_t n;
} hr_holders;

/* What is looked for. */
typedef struct hr_held {
    const char *adapter; /* NULL: base weights */
    const char *label;   /* weight version */
    const char *api_key; /* NULL: none */
    uint64_t timeout_ms;
} hr_held;

/* Takes the engines over from the report of a push that succeeded; those known before stay. */
hr_status hr_holders_note(hr_holders *holders, const char *report, hr_error *err);

/* One call to each engine. *lost gets the URLs, which live in holders, of those that have lost it:
 * another process answers than the one that published. Where engines do not name their process:
 * the adapter is not listed, or the weight version is the one that engines start with. An engine
 * that does not answer has lost nothing yet. */
hr_status hr_holders_lost(const hr_holders *holders, const hr_held *held, hr_cli_list *lost,
                          hr_error *err);

/* Looks no more after an engine, until the next hr_holders_note. url may be the holder's own. */
void hr_holders_drop(hr_holders *holders, const char *url);

void hr_holders_free(hr_holders *holders);

#endif
