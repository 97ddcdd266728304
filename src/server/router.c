/* The table of routes. */
#include "server/router.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

hr_method hr_method_from_name(const char *name) {
    if (strcmp(name, "GET") == 0 || strcmp(name, "HEAD") == 0)
        return HR_METHOD_GET;
    if (strcmp(name, "POST") == 0)
        return HR_METHOD_POST;
    if (strcmp(name, "PUT") == 0)
        return HR_METHOD_PUT;
    if (strcmp(name, "OPTIONS") == 0)
        return HR_METHOD_OPTIONS;
    return HR_METHOD_OTHER;
}

static bool matches(const char *route, const char *path) {
    size_t len = strlen(route);
    bool longer = len > 0 && route[len - 1] == '/' && strncmp(route, path, len) == 0;
    return longer ? path[len] != '\0' : strcmp(route, path) == 0;
}

const hr_route *hr_router_find(const hr_route *routes, size_t n_routes, hr_method method,
                               const char *path, unsigned *allowed) {
    *allowed = 0;
    for (size_t i = 0; i < n_routes; i++) {
        if (!matches(routes[i].path, path))
            continue;
        if ((routes[i].methods & (unsigned)method) != 0)
            return &routes[i];
        *allowed |= routes[i].methods;
    }
    return NULL;
}

void hr_methods_format(unsigned methods, char *text, size_t size) {
    static const struct {
        unsigned bit;
        const char *name;
    } names[] = {{HR_METHOD_GET, "GET, HEAD"}, {HR_METHOD_POST, "POST"}, {HR_METHOD_PUT, "PUT"}};
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if ((methods & names[i].bit) == 0)
            continue;
        int n = snprintf(text + used, size - used, "%s%s", used > 0 ? ", " : "", names[i].name);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}
