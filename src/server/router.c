/* The table of routes. */
#include "server/router.h"

#include <stdio.h>
#include <string.h>

hr_method hr_method_from_name(const char *name) {
    if (strcmp(name, "GET") == 0 || strcmp(name, "HEAD") == 0)
        return HR_METHOD_GET;
    if (strcmp(name, "POST") == 0)
        return HR_METHOD_POST;
    if (strcmp(name, "PUT") == 0)
        return HR_METHOD_PUT;
    return HR_METHOD_OTHER;
}

const hr_route *hr_router_find(const hr_route *routes, size_t n_routes, hr_method method,
                               const char *path, unsigned *allowed) {
    *allowed = 0;
    for (size_t i = 0; i < n_routes; i++) {
        if (strcmp(routes[i].path, path) != 0)
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
