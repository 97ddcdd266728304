/* The table of routes: which handler answers which method and path. Everything that is not in the
 * table is answered 404 or 405 by the HTTP layer, so a handler only ever sees what it registered
 * for. */
#ifndef HR_SERVER_ROUTER_H
#define HR_SERVER_ROUTER_H

#include "server/auth.h"

#include <stddef.h>

typedef enum hr_method {
    HR_METHOD_GET = 1, /* HEAD too: the same answer without its body */
    HR_METHOD_POST = 2,
    HR_METHOD_PUT = 4,
    HR_METHOD_OPTIONS = 8, /* no route takes it: it is answered with what the path takes */
    HR_METHOD_OTHER = 0
} hr_method;

typedef struct hr_exchange hr_exchange;

/* Answers the exchange, or arranges that it is answered later; runs on an I/O thread (see
 * server/http.h). app is what the HTTP layer was started with. */
typedef void (*hr_handler)(hr_exchange *exchange, void *app);

typedef struct hr_route {
    unsigned methods; /* hr_method bits */
    const char *path; /* whole path, exact; one that ends with '/' takes every longer path too */
    hr_handler handler;
    hr_auth_level level; /* who may call it; there is no default */
    size_t max_body;     /* bytes of a request body; 0: the server's ordinary limit */
} hr_route;

hr_method hr_method_from_name(const char *name);

/* The route of path that takes method. NULL when there is none; *allowed then has the methods that
 * path takes, 0 for an unknown path. Thread-safe. */
const hr_route *hr_router_find(const hr_route *routes, size_t n_routes, hr_method method,
                               const char *path, unsigned *allowed);

/* "GET, HEAD, POST": the value of an Allow header, written into text. */
void hr_methods_format(unsigned methods, char *text, size_t size);

#endif
