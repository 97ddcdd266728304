/* Who may call a route. */
#include "server/auth.h"

#include <stdbool.h>
#include <string.h>
#include <strings.h>

/* The key in "Bearer KEY", "" when there is none. */
static const char *bearer(const char *authorization) {
    if (authorization == NULL || strncasecmp(authorization, "bearer", 6) != 0 ||
        (authorization[6] != ' ' && authorization[6] != '\t'))
        return "";
    return authorization + 6 + strspn(authorization + 6, " \t");
}

/* Looks at every byte of what came, whatever the first differences say; only the length of what
 * came shows in the time. */
static bool same_key(const char *wanted, const char *came) {
    size_t n_wanted = strlen(wanted), n_came = strlen(came);
    volatile unsigned differ = n_wanted != n_came;
    for (size_t i = 0; i < n_came; i++)
        differ |= (unsigned char)came[i] ^ (unsigned char)wanted[n_wanted > 0 ? i % n_wanted : 0];
    return differ == 0;
}

static unsigned demand(const char *key, const char *authorization) {
    return same_key(key, bearer(authorization)) ? 0 : 401;
}

static bool is_admin(const hr_auth_keys *keys, const char *authorization) {
    return keys->admin_api_key != NULL && same_key(keys->admin_api_key, bearer(authorization));
}

unsigned hr_auth_check(const hr_auth_keys *keys, hr_auth_level level, const char *authorization) {
    switch (level) {
    case HR_AUTH_OPEN:
        return 0;
    case HR_AUTH_NORMAL: /* whoever may change the weights may ask what they say */
        if (keys->api_key == NULL || is_admin(keys, authorization))
            return 0;
        return demand(keys->api_key, authorization);
    case HR_AUTH_ADMIN_OPTIONAL:
        if (keys->admin_api_key != NULL)
            return demand(keys->admin_api_key, authorization);
        return keys->api_key != NULL ? demand(keys->api_key, authorization) : 0;
    case HR_AUTH_ADMIN_FORCE:
        return keys->admin_api_key != NULL ? demand(keys->admin_api_key, authorization) : 403;
    case HR_AUTH_UNSET:
        break;
    }
    return 403;
}

const char *hr_auth_level_name(hr_auth_level level) {
    static const char *const names[] = {"unset", "open", "normal", "admin_optional", "admin_force"};
    return names[level];
}
