/* Nothing allocates, locks or calls the system on the step path.
 *
 * The kernel itself is the witness: after a warm-up every thread of a child process gets a seccomp
 * filter under which any system call but a waiting worker's futex, yield and move to another
 * core and the exit kills the process, and then steps are run. Calls that need no system (malloc
 * from its own pages, a free mutex) are counted by wrapping them at link time. */
#include "model/step.h"
#include "tiny_model.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static char dir[] = "/tmp/headrace-steps-XXXXXX";
static atomic_uint allocations, locks;

#define WRAP(type, name, counter, params, args)                                                    \
    type __real_##name params;                                                                     \
    type __wrap_##name params;                                                                     \
    type __wrap_##name params {                                                                    \
        atomic_fetch_add(&counter, 1);                                                             \
        return __real_##name args;                                                                 \
    }
WRAP(void *, malloc, allocations, (size_t n), (n))
WRAP(void *, calloc, allocations, (size_t n, size_t size), (n, size))
WRAP(void *, realloc, allocations, (void *p, size_t n), (p, n))
WRAP(void *, aligned_alloc, allocations, (size_t to, size_t n), (to, n))
WRAP(void, free, allocations, (void *p), (p))
WRAP(int, pthread_mutex_lock, locks, (pthread_mutex_t * m), (m))
WRAP(int, pthread_mutex_unlock, locks, (pthread_mutex_t * m), (m))

static bool forbid_system_calls(void) {
#define ALLOW(call)                                                                                \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_futex),
        ALLOW(SYS_sched_yield),
        ALLOW(SYS_sched_getaffinity),
        ALLOW(SYS_sched_setaffinity),
        ALLOW(SYS_exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

enum { SETUP_FAILED = 3, NO_FILTER = 4, COUNTED = 5, N_SEQS = 3, CHUNK = 40 };

typedef struct scene {
    hr_pool *pool;
    hr_model *model;
    hr_lora *lora;
    hr_model_workspace *ws;
    hr_kv kv;
    uint32_t pages[64], tokens[N_SEQS * CHUNK], logit_rows[N_SEQS * CHUNK];
} scene;

static void look_at_logits(void *ctx, uint32_t first, uint32_t n, float *logits, uint64_t ld,
                           void *scratch, unsigned worker, unsigned n_workers) {
    (void)first;
    const hr_kernels *k = hr_model_info_of(((scene *)ctx)->model)->kernels;
    for (uint32_t i = worker; i < n; i += n_workers) {
        uint32_t id;
        float value;
        k->lse(logits + i * ld, TINY_VOCAB);
        k->top_k(logits + i * ld, TINY_VOCAB, 1, &id, &value, scratch);
    }
}

/* Each of n_seqs sequences gets n more rows after pos; the second is the base, the others have an
 * adapter. */
static void step(scene *s, uint32_t n_seqs, uint32_t n, uint32_t pos) {
    hr_seq_view seqs[N_SEQS];
    for (uint32_t i = 0; i < n_seqs; i++)
        seqs[i] = (hr_seq_view){.first_row = i * n,
                                .n_rows = n,
                                .first_pos = pos,
                                .pages = s->pages + 20 * i,
                                .lora = i == 1 ? NULL : s->lora};
    hr_view view = {.n_rows = n_seqs * n,
                    .tokens = s->tokens,
                    .n_seqs = n_seqs,
                    .seqs = seqs,
                    .n_logit_rows = n_seqs * n,
                    .logit_rows = s->logit_rows};
    hr_model_forward(s->model, s->ws, s->pool, &s->kv, &view, look_at_logits, s);
}

static bool prepare(scene *s, const char *dtype) {
    char path[64];
    hr_error err;
    snprintf(path, sizeof path, "%s/model", dir);
    if (hr_pool_create(3, &s->pool, &err) != HR_OK)
        return false;
    hr_model_options options = {.dir = path, .dtype = dtype, .pool = s->pool};
    if (hr_model_load(&options, &s->model, &err) != HR_OK)
        return false;
    snprintf(path, sizeof path, "%s/adapter", dir);
    if (hr_lora_load(s->model, path, &s->lora, &err) != HR_OK ||
        hr_model_workspace_create(s->model, 3, N_SEQS * CHUNK, N_SEQS, &s->ws, &err) != HR_OK)
        return false;
    s->kv.n_pages = 64;
    s->kv.base = aligned_alloc(64, 64 * hr_model_info_of(s->model)->kv_page_bytes);
    for (uint32_t i = 0; i < 64; i++) {
        s->pages[i] = i;
        hr_model_kv_clear_page(s->model, &s->kv, i);
    }
    for (uint32_t i = 0; i < N_SEQS * CHUNK; i++) {
        s->tokens[i] = i * 7 % TINY_VOCAB;
        s->logit_rows[i] = i;
    }
    return true;
}

static void child(const char *dtype) {
    scene s = {0};
    if (!prepare(&s, dtype))
        _exit(SETUP_FAILED);
    step(&s, N_SEQS, CHUNK, 0); /* pages of stacks and tables are there afterwards */
    step(&s, N_SEQS, 1, CHUNK);
    step(&s, 1, 1, 560);
    if (s.ws->attention.n_splits == 0) /* a row's blocks shared by workers */
        _exit(SETUP_FAILED);
    if (!forbid_system_calls())
        _exit(NO_FILTER);
    atomic_store(&allocations, 0);
    atomic_store(&locks, 0);
    for (uint32_t pos = 0; pos < 560; pos += CHUNK)
        step(&s, N_SEQS, CHUNK, pos);
    for (uint32_t i = 0; i < 20; i++)
        step(&s, N_SEQS, 1, 560 + i);
    for (uint32_t i = 0; i < 20; i++)
        step(&s, 1, 1, 580 + i);
    syscall(SYS_exit_group, atomic_load(&allocations) + atomic_load(&locks) == 0 ? 0 : COUNTED);
}

/* What became of a child that runs body. */
static int status_of(void (*body)(const char *), const char *dtype) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        body(dtype);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void steps_run_without_system_calls_allocations_and_locks(void **state) {
    (void)state;
    const char *const dtypes[] = {"bfloat16", "float32"};
    for (size_t i = 0; i < 2; i++) {
        int status = status_of(child, dtypes[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}

static void call_under_filter(const char *unused) {
    (void)unused;
    if (forbid_system_calls())
        syscall(SYS_getppid);
    _exit(NO_FILTER);
}

static void the_filter_bites(void **state) {
    (void)state;
    int status = status_of(call_under_filter, NULL);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSYS);
}

static void the_wraps_count(void **state) {
    (void)state;
    unsigned before = atomic_load(&allocations);
    hr_pool *pool = NULL;
    assert_int_equal(hr_pool_create(1, &pool, NULL), HR_OK);
    hr_pool_destroy(pool);
    assert_true(atomic_load(&allocations) > before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_filter_bites),
        cmocka_unit_test(the_wraps_count),
        cmocka_unit_test(steps_run_without_system_calls_allocations_and_locks),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    tiny_model_write(dir);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    tiny_model_remove(dir);
    return rc;
}
