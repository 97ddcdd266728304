#include "weights/registry.h"

#include <string.h>

void hr_registry_init(hr_registry *registry, const hr_memory *memory) {
    *registry = (hr_registry){.memory = *memory};
    pthread_mutex_init(&registry->lock, NULL);
}

void hr_registry_destroy(hr_registry *registry) {
    while (registry->first != NULL) {
        hr_registered *next = registry->first->next;
        hr_registered_destroy(&registry->memory, registry->first);
        registry->first = next;
    }
    pthread_mutex_destroy(&registry->lock);
}

bool hr_registered_is(const hr_registered *registered, const char *name, size_t name_len) {
    return strncmp(registered->registration.name, name, name_len) == 0 &&
           registered->registration.name[name_len] == '\0';
}

hr_registered *hr_registry_find(const hr_registry *registry, const char *name, size_t name_len) {
    for (hr_registered *r = registry->first; r != NULL; r = r->next)
        if (hr_registered_is(r, name, name_len))
            return r;
    return NULL;
}

hr_registered *hr_registered_create(const hr_memory *memory, const hr_registration *registration) {
    size_t name_size = strlen(registration->name) + 1;
    size_t path_size = registration->path != NULL ? strlen(registration->path) + 1 : 0;
    hr_registered *made = hr_memory_array(
        memory, sizeof *made + name_size + path_size + registration->config_len + 1, 1);
    if (made == NULL)
        return NULL;
    *made = (hr_registered){.registration = *registration};
    made->registration.config_digest = NULL;
    if (registration->config_digest != NULL)
        hr_xxh3_parse(registration->config_digest, made->config_digest);
    else
        hr_xxh3(registration->config, registration->config_len, made->config_digest);
    char *text = (char *)(made + 1);
    memcpy(text, registration->name, name_size);
    made->registration.name = text;
    text += name_size;
    if (path_size > 0) {
        memcpy(text, registration->path, path_size);
        made->registration.path = text;
        text += path_size;
    }
    if (registration->config_len > 0)
        memcpy(text, registration->config, registration->config_len);
    text[registration->config_len] = '\0';
    made->registration.config = text;
    return made;
}

void hr_registered_destroy(const hr_memory *memory, hr_registered *registered) {
    hr_memory_free(memory, registered);
}

void hr_registry_put(hr_registry *registry, hr_registered *registered) {
    pthread_mutex_lock(&registry->lock);
    registered->next = registry->first;
    registry->first = registered;
    registry->n++;
    registry->n_pending += registered->pending;
    pthread_mutex_unlock(&registry->lock);
}

void hr_registry_take(hr_registry *registry, hr_registered *registered) {
    pthread_mutex_lock(&registry->lock);
    hr_registered **link = &registry->first;
    while (*link != registered)
        link = &(*link)->next;
    *link = registered->next;
    registered->next = NULL;
    registry->n--;
    registry->n_pending -= registered->pending;
    pthread_mutex_unlock(&registry->lock);
}

void hr_registry_end_pending(hr_registry *registry, hr_registered *registered) {
    pthread_mutex_lock(&registry->lock);
    registry->n_pending -= registered->pending;
    registered->pending = false;
    pthread_mutex_unlock(&registry->lock);
}

bool hr_registry_is_pending(hr_registry *registry, const char *name) {
    pthread_mutex_lock(&registry->lock);
    const hr_registered *found = hr_registry_find(registry, name, strlen(name));
    bool pending = found != NULL && found->pending;
    pthread_mutex_unlock(&registry->lock);
    return pending;
}

void hr_registry_count(hr_registry *registry, uint32_t *registered, uint32_t *pending) {
    pthread_mutex_lock(&registry->lock);
    *registered = registry->n;
    *pending = registry->n_pending;
    pthread_mutex_unlock(&registry->lock);
}
