#include "fake_trainer.h"

#include "tensor/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char config[] = "{\"r\":8,\"lora_alpha\":16}";

/* ---- one engine ---- */

static uint64_t read_clock(void *self) {
    return *(uint64_t *)self;
}

void engine_open(engine *e, uint64_t *now_ns) {
    *e = (engine){.memory = {.countdown = -1}, .now_ns = now_ns};
    fake_sink_init(&e->sink);
    hr_receiver_options options = {.instance = "engine-1",
                                   .base_mode = "shadow",
                                   .lease_ms = LEASE_MS,
                                   .now_ns = read_clock,
                                   .clock_self = now_ns,
                                   .alloc = fake_memory_alloc,
                                   .free = fake_memory_free,
                                   .alloc_self = &e->memory};
    hr_receiver_sink ops = fake_sink_ops(&e->sink);
    assert_int_equal(hr_receiver_create(&options, &ops, &e->receiver, NULL), HR_OK);
}

void engine_close(engine *e) {
    hr_receiver_destroy(e->receiver);
    fake_sink_check_idle(&e->sink);
    assert_int_equal(e->sink.n_rooms, 0);
    assert_int_equal(e->owners, 0);
    assert_int_equal(e->memory.live, 0);
}

void engine_pass_ms(engine *e, uint64_t ms) {
    *e->now_ns += ms * 1000000;
}

/* ---- what is seen ---- */

void reference_of(const engine *e, reference *out) {
    *out = (reference){.n_live = e->sink.n_live};
    memcpy(out->live, e->sink.live, sizeof out->live);
    memcpy(out->base, e->sink.base, sizeof out->base);
    memcpy(out->version, e->sink.version, sizeof out->version);
}

static const fake_live *find_live(const reference *r, const char *name) {
    for (size_t i = 0; i < r->n_live; i++)
        if (strcmp(r->live[i].name, name) == 0)
            return &r->live[i];
    return NULL;
}

bool reference_equals(const reference *a, const reference *b) {
    if (a->n_live != b->n_live || memcmp(a->base, b->base, sizeof a->base) != 0 ||
        strcmp(a->version, b->version) != 0)
        return false;
    for (size_t i = 0; i < a->n_live; i++) {
        const fake_live *other = find_live(b, a->live[i].name);
        if (other == NULL || other->value != a->live[i].value)
            return false;
    }
    return true;
}

/* ---- what is pushed ---- */

static void add_tensor(push *p, size_t adapter, const char *key, size_t size) {
    push_tensor *t = &p->tensors[p->n++];
    t->adapter = adapter;
    t->size = size;
    t->bytes = malloc(size);
    (void)snprintf(t->name, sizeof t->name, "%s%s%s",
                   adapter < MAX_ADAPTERS ? p->adapters[adapter] : "",
                   adapter < MAX_ADAPTERS ? ":" : "", key);
    uint64_t state = p->generation * 1000003 + p->n;
    for (size_t i = 0; i < size; i += sizeof state) { /* sizes are multiples of eight */
        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(t->bytes + i, &state, sizeof state);
    }
}

/* Keys in the order of their names; the first of a new adapter is larger than a slice of the copy.
 */
static void add_adapter(push *p, const char *name) {
    static const char *const keys[] = {"k_proj.lora_A.weight", "k_proj.lora_B.weight",
                                       "q_proj.lora_A.weight", "q_proj.lora_B.weight"};
    size_t adapter = p->n_adapters++;
    (void)snprintf(p->adapters[adapter], sizeof p->adapters[0], "%s", name);
    for (size_t i = 0; i < 4; i++)
        add_tensor(p, adapter, keys[i], i == 0 && p->defer ? 300 * 1024 : 48);
}

static void add_base(push *p, size_t n) {
    char key[32];
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(key, sizeof key, "layers.%zu.weight", i);
        add_tensor(p, MAX_ADAPTERS, key, 64);
    }
}

static void add_steps(push *p, step_kind kind, size_t n) {
    for (size_t i = 0; i < n; i++)
        p->steps[p->n_steps++] = (push_call){kind, i};
}

static void make_tensors(push *p) {
    char fresh[32];
    (void)snprintf(fresh, sizeof fresh, "a@%llu", (unsigned long long)p->generation);
    p->sync_base = p->plan == PLAN_FULL || p->plan == PLAN_BASE;
    if (p->plan == PLAN_FULL)
        add_base(p, FAKE_BASE);
    if (p->plan == PLAN_BASE)
        add_base(p, 2);
    if (p->plan == PLAN_FULL || p->plan == PLAN_ADAPTERS || p->plan == PLAN_UPSERT)
        add_adapter(p, "a");
    if (p->plan == PLAN_FULL || p->plan == PLAN_ADAPTERS)
        add_adapter(p, "b");
    if (p->plan == PLAN_STAGED || p->plan == PLAN_INSERT)
        add_adapter(p, fresh);
}

void push_make(push *p, push_plan plan, uint64_t generation) {
    *p = (push){.plan = plan, .generation = generation};
    (void)snprintf(p->session, sizeof p->session, "session-%llu", (unsigned long long)generation);
    (void)snprintf(p->version, sizeof p->version, "v%llu", (unsigned long long)generation);
    p->defer = plan == PLAN_STAGED;
    make_tensors(p);
    p->manifest = plan != PLAN_ADAPTERS && plan != PLAN_BASE;
    p->owned = generation % 2 == 1;
    p->per_bucket = plan == PLAN_FULL                            ? 4
                    : plan == PLAN_ADAPTERS || plan == PLAN_BASE ? 1
                    : plan == PLAN_STAGED                        ? 3
                                                                 : 8;
    if (plan == PLAN_VERSION) {
        add_steps(p, STEP_VERSION, 1);
    } else if (plan == PLAN_UPSERT || plan == PLAN_INSERT) {
        add_steps(p, STEP_APPLY, 1);
    } else {
        if (plan == PLAN_FULL || plan == PLAN_STAGED)
            add_steps(p, STEP_REGISTER, p->n_adapters);
        add_steps(p, STEP_BEGIN, 1);
        add_steps(p, STEP_BUCKET, (p->n + p->per_bucket - 1) / p->per_bucket);
        add_steps(p, plan == PLAN_FULL ? STEP_PREPARE : STEP_END, 1);
        add_steps(p, STEP_COMMIT, plan == PLAN_FULL);
    }
}

void push_free(push *p) {
    for (size_t i = 0; i < p->n; i++)
        free(p->tensors[i].bytes);
}

static hr_tensor view_of(const push_tensor *t) {
    return (hr_tensor){.name = t->name,
                       .dtype = HR_DTYPE_U8,
                       .ndim = 1,
                       .shape = {t->size},
                       .data = t->bytes,
                       .bytes = t->size};
}

void push_reference(const push *p, const reference *before, reference *after) {
    *after = *before;
    (void)snprintf(after->version, sizeof after->version, "%s", p->version);
    size_t n_base = 0;
    for (size_t i = 0; i < p->n; i++)
        if (p->tensors[i].adapter == MAX_ADAPTERS) {
            hr_tensor view = view_of(&p->tensors[i]);
            after->base[n_base++] = fake_base_value(&view);
        }
    for (size_t k = 0; k < p->n_adapters; k++) {
        hr_tensor views[MAX_TENSORS];
        size_t n = 0;
        for (size_t i = 0; i < p->n; i++)
            if (p->tensors[i].adapter == k) {
                views[n] = view_of(&p->tensors[i]);
                views[n++].name = strchr(p->tensors[i].name, ':') + 1;
            }
        fake_live *live = NULL;
        for (size_t i = 0; i < after->n_live; i++)
            if (strcmp(after->live[i].name, p->adapters[k]) == 0)
                live = &after->live[i];
        if (live == NULL) {
            live = &after->live[after->n_live++];
            (void)snprintf(live->name, sizeof live->name, "%s", p->adapters[k]);
        }
        live->value = fake_adapter_value(config, sizeof config - 1, views, n);
    }
}

/* ---- what is sent ---- */

/* The sender's memory of one bucket. */
typedef struct sent {
    engine *to;
    hr_tensor tensors[MAX_TENSORS];
    char extra[64];
    uint8_t *bytes;
    size_t n, size;
} sent;

/* From here on whoever reads it reads nonsense. */
static void overwrite(void *owner) {
    sent *s = owner;
    memset(s->bytes, 0xee, s->size);
    free(s->bytes);
    free(s);
}

static void release_owner(void *owner) {
    ((sent *)owner)->to->owners--;
    overwrite(owner);
}

static void do_damage(push *p, sent *s) {
    hr_tensor *last = &s->tensors[s->n - 1], *more = last + 1;
    if (p->damage == DAMAGE_BYTE) {
        s->bytes[0] ^= 1;
    } else if (p->damage == DAMAGE_SWAPPED) {
        hr_tensor *other = last - 1; /* of the same size */
        const void *data = last->data;
        last->data = other->data;
        other->data = data;
    } else if (p->damage == DAMAGE_MISSING) {
        s->n--;
    } else if (p->damage >= DAMAGE_EXTRA && p->damage <= DAMAGE_STRANGER) {
        *more = *last;
        more->name = s->extra;
        s->n++;
        if (p->damage == DAMAGE_EXTRA)
            (void)snprintf(s->extra, sizeof s->extra, "%s:v_proj.lora_A.weight", p->adapters[0]);
        else
            (void)snprintf(s->extra, sizeof s->extra, "%s",
                           p->damage == DAMAGE_BASE ? "layers.0.weight"
                                                    : "stranger:v_proj.lora_A.weight");
    }
}

static sent *pack(push *p, engine *e, size_t first, size_t n) {
    sent *s = calloc(1, sizeof *s);
    s->to = e;
    for (size_t i = 0; i < n; i++)
        s->size += p->tensors[first + i].size;
    s->bytes = malloc(s->size);
    uint8_t *at = s->bytes;
    for (size_t i = 0; i < n; i++) {
        const push_tensor *t = &p->tensors[first + i];
        memcpy(at, t->bytes, t->size);
        s->tensors[i] = view_of(t);
        s->tensors[i].data = at;
        at += t->size;
    }
    s->n = n;
    do_damage(p, s);
    return s;
}

static hr_bucket bucket_of(push *p, engine *e, sent *s) {
    hr_bucket bucket = {.tensors = s->tensors, .n = s->n, .session_id = p->session};
    if (p->owned) {
        bucket.owner = s;
        bucket.release = release_owner;
        e->owners++;
    }
    return bucket;
}

static void sent_done(push *p, sent *s) {
    if (!p->owned)
        overwrite(s);
}

static hr_status send_bucket(push *p, engine *e, size_t index) {
    size_t first = index * p->per_bucket;
    size_t n = p->n - first < p->per_bucket ? p->n - first : p->per_bucket;
    sent *s = pack(p, e, first, n);
    if (s->n == 0) { /* all of it is missing: it is never sent */
        overwrite(s);
        return HR_OK;
    }
    hr_bucket bucket = bucket_of(p, e, s);
    bucket.stream = "rank-0";
    bucket.index = index;
    bucket.flush_cache = p->damage == DAMAGE_FLUSH;
    if (p->plan == PLAN_BASE) {
        bucket.flush_cache = true;
        bucket.weight_version = p->version;
    }
    hr_status status = hr_receiver_bucket(e->receiver, &bucket, &p->err);
    sent_done(p, s);
    return status;
}

static hr_registration registration_of(const push *p, size_t adapter) {
    return (hr_registration){.name = p->adapters[adapter],
                             .config = config,
                             .config_len = sizeof config - 1,
                             .defer_publish = p->defer};
}

static hr_status begin(push *p, engine *e) {
    const char *names[MAX_ADAPTERS];
    for (size_t i = 0; i < p->n_adapters; i++)
        names[i] = p->adapters[i];
    hr_session_options options = {.session_id = p->session,
                                  .sync_base = p->sync_base,
                                  .adapters = p->defer || p->plan == PLAN_BASE ? NULL : names,
                                  .n_adapters = p->n_adapters,
                                  .audit = p->plan == PLAN_FULL};
    char id[HR_SESSION_ID_SIZE] = "";
    hr_status status = hr_receiver_begin(e->receiver, &options, id, &p->err);
    if (status == HR_OK)
        assert_string_equal(id, p->session);
    return status;
}

typedef struct listed {
    hr_manifest manifest;
    hr_manifest_entry entries[MAX_TENSORS];
    char xxh3[MAX_TENSORS][HR_XXH3_HEX], sha256[MAX_TENSORS][HR_SHA256_HEX];
} listed;

/* XXH3 for some tensors, SHA-256 for others. */
static void list(const push *p, listed *out) {
    for (size_t i = 0; i < p->n; i++) {
        const push_tensor *t = &p->tensors[i];
        uint8_t digest[HR_XXH3_SIZE];
        hr_xxh3(t->bytes, t->size, digest);
        hr_sha256_hex(t->bytes, t->size, out->sha256[i]);
        out->entries[i] = (hr_manifest_entry){.name = t->name};
        if (i % 2 == 0)
            out->entries[i].xxh3 = hr_xxh3_format(digest, out->xxh3[i]);
        else
            out->entries[i].sha256 = out->sha256[i];
    }
    out->manifest = (hr_manifest){out->entries, p->n, true};
}

static hr_end_options end_options(const push *p, listed *l) {
    hr_end_options options = {.session_id = p->session,
                              .weight_version = p->plan != PLAN_BASE ? p->version : NULL,
                              .complete_base = p->plan == PLAN_FULL,
                              .audit = p->plan == PLAN_FULL};
    if (p->manifest) {
        list(p, l);
        options.manifest = &l->manifest;
    }
    return options;
}

/* A receipt tells the truth: all tensors, and the ids that requests will see. */
static void check_receipt(push *p, const engine *e, hr_receipt *receipt) {
    assert_non_null(receipt);
    assert_string_equal(receipt->session_id, p->session);
    assert_string_equal(receipt->weight_version, p->version);
    assert_int_equal(receipt->tensors, p->n);
    assert_int_equal(receipt->n_adapters, p->n_adapters);
    for (size_t i = 0; i < p->n_adapters; i++) {
        assert_string_equal(receipt->adapters[i].name, p->adapters[i]);
        assert_int_equal(receipt->adapters[i].tensors, 4);
        if (receipt->state == HR_SESSION_PUBLISHED)
            assert_int_equal(receipt->adapters[i].id, fake_sink_id(&e->sink, p->adapters[i]));
    }
    assert_int_equal(receipt->n_audit, p->plan == PLAN_FULL ? p->n : 0);
    memcpy(p->digest, receipt->xxh3, sizeof p->digest);
    hr_receipt_free(receipt);
}

static hr_status apply(push *p, engine *e, const hr_end_options *options, hr_receipt **receipt) {
    hr_registration registration = registration_of(p, 0);
    sent *s = pack(p, e, 0, p->n);
    hr_bucket bucket = bucket_of(p, e, s);
    hr_status status =
        hr_receiver_apply(e->receiver, &registration, &bucket, options, receipt, &p->err);
    sent_done(p, s);
    return status;
}

static hr_status finish(push *p, engine *e, step_kind kind) {
    listed l;
    hr_receipt *receipt = NULL;
    hr_end_options options = end_options(p, &l);
    hr_status status;
    if (kind == STEP_PREPARE)
        status = hr_receiver_prepare(e->receiver, &options, &receipt, &p->err);
    else if (kind == STEP_COMMIT)
        status = hr_receiver_commit(e->receiver, p->session, &receipt, &p->err);
    else if (kind == STEP_END)
        status = hr_receiver_end(e->receiver, &options, &receipt, &p->err);
    else
        status = apply(p, e, &options, &receipt);
    if (status == HR_OK)
        check_receipt(p, e, receipt);
    else
        assert_null(receipt);
    return status;
}

hr_status push_step(push *p, engine *e, size_t index) {
    const push_call *s = &p->steps[index];
    switch (s->kind) {
    case STEP_REGISTER: {
        hr_registration registration = registration_of(p, s->index);
        bool pending = !p->defer;
        hr_status status = hr_receiver_register(e->receiver, &registration, &pending, &p->err);
        assert_int_equal(pending, status == HR_OK ? p->defer : !p->defer);
        return status;
    }
    case STEP_BEGIN:
        return begin(p, e);
    case STEP_BUCKET:
        return send_bucket(p, e, s->index);
    case STEP_VERSION:
        return hr_receiver_set_version(e->receiver, p->version, false, &p->err);
    default:
        return finish(p, e, s->kind);
    }
}

bool push_step_publishes(const push *p, size_t index) {
    step_kind kind = p->steps[index].kind;
    return kind == STEP_COMMIT || kind == STEP_END || kind == STEP_APPLY || kind == STEP_VERSION;
}

hr_status push_abort(push *p, engine *e) {
    return hr_receiver_abort(e->receiver, p->session, NULL);
}
