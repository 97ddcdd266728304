/* Who may call a route: SGLang's levels, over two keys; unlike SGLang's, the admin key opens normal
 * routes too, so that one key is enough for a program that pushes and then looks. A key comes as
 * "Authorization: Bearer KEY"; what is compared takes the same time whether it is nearly right or
 * quite wrong, and no key is ever logged or shown. */
#ifndef HR_SERVER_AUTH_H
#define HR_SERVER_AUTH_H

typedef enum hr_auth_level {
    HR_AUTH_UNSET = 0,      /* a route without a level is a mistake: the server does not start */
    HR_AUTH_OPEN,           /* everybody */
    HR_AUTH_NORMAL,         /* the api key or the admin key, if an api key is set */
    HR_AUTH_ADMIN_OPTIONAL, /* the admin key if one is set, else the api key if one is set */
    HR_AUTH_ADMIN_FORCE,    /* the admin key; nobody when none is set */
} hr_auth_level;

/* NULL: not set. */
typedef struct hr_auth_keys {
    const char *api_key, *admin_api_key;
} hr_auth_keys;

/* 0 = allowed, else 401 or 403. authorization is the header's value, NULL when there is none.
 * Thread-safe. */
unsigned hr_auth_check(const hr_auth_keys *keys, hr_auth_level level, const char *authorization);

/* "open", "normal", "admin_optional", "admin_force". */
const char *hr_auth_level_name(hr_auth_level level);

#endif
