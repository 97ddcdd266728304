/* Cores and memory that this process is granted. */
#include "base/machine.h"

#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static bool read_line(const char *path, char *line, size_t size) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool ok = fgets(line, (int)size, file) != NULL;
    fclose(file);
    return ok;
}

static bool read_u64(const char *path, uint64_t *value) {
    char line[64], *end;
    if (!read_line(path, line, sizeof line))
        return false;
    *value = strtoull(line, &end, 10);
    return end != line;
}

/* Walks this process's cgroup from its own folder up to the root and calls visit on each: any level
 * may hold the limit that counts. version 2 uses one tree, version 1 one tree a controller. */
static void visit_cgroups(const char *controller,
                          void (*visit)(const char *dir, bool v2, void *arg), void *arg) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL)
        return;
    char line[1024];
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':');
        char *path = names != NULL ? strchr(names + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        names++;
        bool v2 = names[0] == '\0';
        bool mine = v2;
        for (char *save = NULL, *name = strtok_r(names, ",", &save); name != NULL;
             name = strtok_r(NULL, ",", &save))
            mine = mine || strcmp(name, controller) == 0;
        if (!mine)
            continue;
        char dir[1200];
        for (;;) {
            if (v2)
                snprintf(dir, sizeof dir, "/sys/fs/cgroup%s", path);
            else
                snprintf(dir, sizeof dir, "/sys/fs/cgroup/%s%s", controller, path);
            visit(dir, v2, arg);
            char *slash = strrchr(path, '/');
            if (slash == NULL || path[0] == '\0')
                break;
            *slash = '\0';
        }
    }
    fclose(file);
}

static void visit_cpu_quota(const char *dir, bool v2, void *arg) {
    double *cores = arg;
    char path[1300], line[128];
    double quota = 0, period = 0;
    if (v2) {
        snprintf(path, sizeof path, "%s/cpu.max", dir);
        if (!read_line(path, line, sizeof line) || sscanf(line, "%lf %lf", &quota, &period) != 2)
            return;
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir);
        if (!read_line(path, line, sizeof line) || sscanf(line, "%lf", &quota) != 1)
            return;
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
        if (!read_line(path, line, sizeof line) || sscanf(line, "%lf", &period) != 1)
            return;
    }
    if (quota > 0 && period > 0 && quota / period < *cores)
        *cores = quota / period;
}

unsigned hr_machine_threads(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    double cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    visit_cgroups("cpu", visit_cpu_quota, &cores);
    unsigned whole = (unsigned)cores;
    if ((double)whole < cores)
        whole++;
    return whole > 0 ? whole : 1;
}

void hr_machine_work_behind(void) {
    const struct sched_param none = {0};
    (void)sched_setscheduler(0, SCHED_BATCH, &none); /* refused: it goes on as it is */
}

typedef struct memory_bound {
    uint64_t bytes;
    const char *source;
} memory_bound;

static void visit_memory_limit(const char *dir, bool v2, void *arg) {
    memory_bound *bound = arg;
    char path[1300];
    uint64_t limit, used;
    snprintf(path, sizeof path, "%s/%s", dir, v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!read_u64(path, &limit))
        return; /* no file, or "max" */
    snprintf(path, sizeof path, "%s/%s", dir, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!read_u64(path, &used))
        used = 0;
    uint64_t left = limit > used ? limit - used : 0;
    if (left < bound->bytes)
        *bound = (memory_bound){left, "cgroup memory limit"};
}

static uint64_t proc_kib(const char *path, const char *key) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    char line[256];
    uint64_t kib = 0;
    size_t len = strlen(key);
    while (fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, key, len) == 0) {
            kib = strtoull(line + len, NULL, 10);
            break;
        }
    fclose(file);
    return kib;
}

uint64_t hr_machine_memory_available(const char **source) {
    memory_bound bound = {proc_kib("/proc/meminfo", "MemAvailable:") * 1024, "available memory"};
    visit_cgroups("memory", visit_memory_limit, &bound);
    if (source != NULL)
        *source = bound.source;
    return bound.bytes;
}

uint64_t hr_machine_resident_bytes(void) {
    return proc_kib("/proc/self/status", "VmRSS:") * 1024;
}

enum { HUGE_PAGE = 2 << 20 };

static size_t whole_huge_pages(size_t bytes) {
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

void *hr_pages_alloc(size_t bytes) {
    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return NULL;
    size_t size = whole_huge_pages(bytes);
    char *map =
        mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    size_t head = (HUGE_PAGE - (uintptr_t)map % HUGE_PAGE) % HUGE_PAGE;
    if (head > 0)
        munmap(map, head);
    if (head < HUGE_PAGE)
        munmap(map + head + size, HUGE_PAGE - head);
    madvise(map + head, size, MADV_HUGEPAGE);
    return map + head;
}

void hr_pages_free(void *pages, size_t bytes) {
    if (pages != NULL)
        munmap(pages, whole_huge_pages(bytes));
}
