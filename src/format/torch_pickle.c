/* The pickle machine: a closed list of opcodes over a table of values. */
#include "format/torch_pickle.h"

#include <stdlib.h>
#include <string.h>

typedef struct machine {
    hr_torch_reader *r;
    const unsigned char *bytes;
    size_t size, at;
    size_t stack_base, memo_base; /* a pickle inside a pickle uses the arrays above these */
    uint32_t marks[HR_TORCH_MAX_MARKS];
    uint32_t marks_n;
    bool stopped;
} machine;

hr_status hr_torch_grow(void *array, size_t want, size_t *cap, size_t size, size_t limit,
                        const char *what, hr_error *err) {
    void **memory = array;
    if (want <= *cap)
        return HR_OK;
    if (want > limit)
        return hr_fail(err, HR_ERR_LIMIT, "the payload has more than %zu %s", limit, what);
    size_t more = *cap + *cap / 2 + 64;
    size_t next = more > limit ? limit : more < want ? want : more;
    void *grown = realloc(*memory, next * size);
    if (grown == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu %s of a payload", next, what);
    *memory = grown;
    *cap = next;
    return HR_OK;
}

hr_status hr_torch_copy_room(hr_torch_reader *r, uint64_t n, const char *what, unsigned char **out,
                             hr_error *err) {
    if (n > r->max_bytes - r->copied)
        return hr_fail(err, HR_ERR_LIMIT,
                       "%s needs a copy of %llu bytes, which with %llu copied before is over the "
                       "limit of %llu for one payload",
                       what, (unsigned long long)n, (unsigned long long)r->copied,
                       (unsigned long long)r->max_bytes);
    HR_TRY(hr_torch_grow(&r->copies, r->copies_n + 1, &r->copies_cap, sizeof *r->copies,
                         HR_TORCH_MAX_VALUES, "copies", err));
    unsigned char *memory = malloc(n > 0 ? n : 1);
    if (memory == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the %llu bytes of %s",
                       (unsigned long long)n, what);
    r->copies[r->copies_n++] = memory;
    r->copied += n;
    *out = memory;
    return HR_OK;
}

void hr_torch_forget(hr_torch_reader *r, size_t n, size_t i) {
    r->values_n = n;
    r->items_n = i;
}

bool hr_torch_is_text(const hr_torch_value *value, const char *text) {
    size_t n = strlen(text);
    return value->kind == HR_TORCH_STR && value->count == n && memcmp(value->bytes, text, n) == 0;
}

/* A tuple's items lie together; those of a list or mapping in chunks: number of items, place of the
 * next chunk (0: none), items. No chunk is empty. */
bool hr_torch_next(const hr_torch_reader *r, const hr_torch_value *container, hr_torch_walk *walk,
                   uint32_t *item) {
    if (walk->seen == container->count)
        return false;
    if (walk->left == 0 && container->kind == HR_TORCH_TUPLE) {
        walk->left = container->count;
        walk->place = container->first;
    } else if (walk->left == 0) {
        walk->chunk = walk->seen == 0 ? container->first : r->items[walk->chunk + 1];
        walk->left = r->items[walk->chunk];
        walk->place = walk->chunk + 2;
    }
    *item = r->items[walk->place++];
    walk->left--;
    walk->seen++;
    return true;
}

const hr_torch_value *hr_torch_get(const hr_torch_reader *r, const hr_torch_value *mapping,
                                   const char *key) {
    const hr_torch_value *found = NULL;
    hr_torch_walk walk = {0};
    uint32_t name = 0, value = 0;
    if (mapping->kind != HR_TORCH_MAPPING || mapping->count > 2 * HR_TORCH_MAX_ATTRIBUTES)
        return NULL;
    while (hr_torch_next(r, mapping, &walk, &name) && hr_torch_next(r, mapping, &walk, &value))
        if (hr_torch_is_text(hr_torch_at(r, name), key))
            found = hr_torch_at(r, value);
    return found;
}

const char *hr_torch_kind_text(const hr_torch_value *value) {
    static const char *const texts[] = {
        [HR_TORCH_NONE] = "None",         [HR_TORCH_BOOL] = "a bool",
        [HR_TORCH_INT] = "an int",        [HR_TORCH_LONG] = "a huge int",
        [HR_TORCH_FLOAT] = "a float",     [HR_TORCH_STR] = "a str",
        [HR_TORCH_BYTES] = "bytes",       [HR_TORCH_TUPLE] = "a tuple",
        [HR_TORCH_LIST] = "a list",       [HR_TORCH_MAPPING] = "a dict",
        [HR_TORCH_GLOBAL] = "a class",    [HR_TORCH_OBJECT] = "an object of a data class",
        [HR_TORCH_STORAGE] = "a storage", [HR_TORCH_TENSOR] = "a tensor",
    };
    return texts[value->kind];
}

static hr_status corrupt(const char *what, hr_error *err) {
    return hr_fail(err, HR_ERR_CORRUPT, "%s", what);
}

/* n bytes of the pickle, or NULL when they are not all there. */
static const unsigned char *take(machine *m, uint64_t n) {
    if (n > m->size - m->at)
        return NULL;
    const unsigned char *bytes = m->bytes + m->at;
    m->at += n;
    return bytes;
}

/* A little-endian number of n <= 8 bytes; false at the end of the pickle. */
static bool take_number(machine *m, unsigned n, uint64_t *out) {
    const unsigned char *bytes = take(m, n);
    if (bytes == NULL)
        return false;
    *out = 0;
    for (unsigned i = 0; i < n; i++)
        *out |= (uint64_t)bytes[i] << (8 * i);
    return true;
}

static hr_status push_index(machine *m, uint32_t index, hr_error *err) {
    hr_torch_reader *r = m->r;
    HR_TRY(hr_torch_grow(&r->stack, r->stack_n + 1, &r->stack_cap, sizeof *r->stack,
                         HR_TORCH_MAX_ITEMS, "values on its stack", err));
    r->stack[r->stack_n++] = index;
    return HR_OK;
}

static hr_status push(machine *m, hr_torch_value value, hr_error *err) {
    hr_torch_reader *r = m->r;
    HR_TRY(hr_torch_grow(&r->values, r->values_n + 1, &r->values_cap, sizeof *r->values,
                         HR_TORCH_MAX_VALUES, "values", err));
    r->values[r->values_n] = value;
    return push_index(m, (uint32_t)r->values_n++, err);
}

/* The lowest place of the stack that may be popped now: above the last mark. */
static size_t floor_of(const machine *m) {
    return m->marks_n > 0 ? m->marks[m->marks_n - 1] : m->stack_base;
}

static bool pop(machine *m, uint32_t *index) {
    if (m->r->stack_n <= floor_of(m))
        return false;
    *index = m->r->stack[--m->r->stack_n];
    return true;
}

/* The value on top, to be changed in place. */
static hr_torch_value *top(machine *m) {
    return m->r->stack_n > floor_of(m) ? &m->r->values[m->r->stack[m->r->stack_n - 1]] : NULL;
}

static hr_status too_few(hr_error *err) {
    return corrupt("an opcode takes more values than the pickle has made", err);
}

/* The items above the last mark, which goes: their place on the stack and number. */
static hr_status take_marked(machine *m, size_t *from, size_t *n, hr_error *err) {
    if (m->marks_n == 0)
        return corrupt("an opcode takes the values since a mark, but there is no mark", err);
    *from = m->marks[--m->marks_n];
    *n = m->r->stack_n - *from;
    return HR_OK;
}

static hr_status push_mark(machine *m, hr_error *err) {
    if (m->marks_n == HR_TORCH_MAX_MARKS)
        return hr_fail(err, HR_ERR_LIMIT, "the payload nests deeper than %d", HR_TORCH_MAX_MARKS);
    m->marks[m->marks_n++] = (uint32_t)m->r->stack_n;
    return HR_OK;
}

/* Room for n more items; *place is where they go. */
static hr_status item_room(hr_torch_reader *r, size_t n, size_t *place, hr_error *err) {
    HR_TRY(hr_torch_grow(&r->items, r->items_n + n, &r->items_cap, sizeof *r->items,
                         HR_TORCH_MAX_ITEMS, "items in containers", err));
    *place = r->items_n;
    r->items_n += n;
    return HR_OK;
}

static void items_from_stack(hr_torch_reader *r, size_t place, size_t from, size_t n) {
    if (n > 0)
        memcpy(r->items + place, r->stack + from, n * sizeof *r->items);
    r->stack_n = from;
}

static hr_status make_tuple(machine *m, size_t from, size_t n, hr_error *err) {
    size_t place = 0;
    HR_TRY(item_room(m->r, n, &place, err));
    items_from_stack(m->r, place, from, n);
    return push(m, (hr_torch_value){.kind = HR_TORCH_TUPLE, .count = n, .first = (uint32_t)place},
                err);
}

static hr_status make_short_tuple(machine *m, size_t n, hr_error *err) {
    if (m->r->stack_n - floor_of(m) < n)
        return too_few(err);
    return make_tuple(m, m->r->stack_n - n, n, err);
}

/* Adds n items of the stack to the list or mapping below them. */
static hr_status add_items(machine *m, hr_torch_kind kind, size_t from, size_t n, hr_error *err) {
    hr_torch_reader *r = m->r;
    size_t place = 0;
    if (from <= floor_of(m))
        return too_few(err);
    hr_torch_value *container = &r->values[r->stack[from - 1]];
    if (container->kind != kind || (kind == HR_TORCH_MAPPING && n % 2 != 0))
        return hr_fail(err, HR_ERR_CORRUPT, "%zu items are added to %s", n,
                       hr_torch_kind_text(container));
    if (n == 0)
        return HR_OK;
    HR_TRY(item_room(r, n + 2, &place, err));
    r->items[place] = (uint32_t)n;
    r->items[place + 1] = 0;
    items_from_stack(r, place + 2, from, n);
    if (container->count == 0)
        container->first = (uint32_t)place;
    else
        r->items[container->last + 1] = (uint32_t)place;
    container->last = (uint32_t)place;
    container->count += n;
    return HR_OK;
}

static hr_status add_marked(machine *m, hr_torch_kind kind, hr_error *err) {
    size_t from = 0, n = 0;
    HR_TRY(take_marked(m, &from, &n, err));
    return add_items(m, kind, from, n, err);
}

static hr_status add_few(machine *m, hr_torch_kind kind, size_t n, hr_error *err) {
    if (m->r->stack_n - floor_of(m) < n)
        return too_few(err);
    return add_items(m, kind, m->r->stack_n - n, n, err);
}

static hr_status put_memo(machine *m, uint64_t index, hr_error *err) {
    hr_torch_reader *r = m->r;
    if (top(m) == NULL)
        return too_few(err);
    if (index > r->memo_n - m->memo_base)
        return corrupt("the memo is filled out of order", err);
    HR_TRY(hr_torch_grow(&r->memo, m->memo_base + index + 1, &r->memo_cap, sizeof *r->memo,
                         HR_TORCH_MAX_VALUES, "remembered values", err));
    r->memo[m->memo_base + index] = r->stack[r->stack_n - 1];
    if (index == r->memo_n - m->memo_base)
        r->memo_n++;
    return HR_OK;
}

static hr_status get_memo(machine *m, uint64_t index, hr_error *err) {
    if (index >= m->r->memo_n - m->memo_base)
        return corrupt("the memo is asked for a value that was never put there", err);
    return push_index(m, m->r->memo[m->memo_base + index], err);
}

static hr_status push_global(machine *m, hr_torch_name module, hr_torch_name name, hr_error *err) {
    hr_torch_global global;
    bool typed = false;
    hr_dtype dtype = 0;
    HR_TRY(hr_torch_global_find(module, name, &global, &typed, &dtype, err));
    return push(m,
                (hr_torch_value){.kind = HR_TORCH_GLOBAL,
                                 .count = global,
                                 .first = typed ? (uint32_t)dtype + 1 : 0},
                err);
}

static bool take_line(machine *m, hr_torch_name *out) {
    const unsigned char *from = m->bytes + m->at;
    const unsigned char *end = memchr(from, '\n', m->size - m->at);
    if (end == NULL)
        return false;
    *out = (hr_torch_name){from, (uint64_t)(end - from)};
    m->at += out->size + 1;
    return true;
}

static hr_status global_by_lines(machine *m, hr_error *err) {
    hr_torch_name module, name;
    if (!take_line(m, &module) || !take_line(m, &name))
        return corrupt("the pickle ends inside a name", err);
    return push_global(m, module, name, err);
}

static hr_status global_by_stack(machine *m, hr_error *err) {
    uint32_t name = 0, module = 0;
    if (!pop(m, &name) || !pop(m, &module))
        return too_few(err);
    const hr_torch_value *first = hr_torch_at(m->r, module), *second = hr_torch_at(m->r, name);
    if (first->kind != HR_TORCH_STR || second->kind != HR_TORCH_STR)
        return corrupt("the name of a class or function is not a str", err);
    return push_global(m, (hr_torch_name){first->bytes, first->count},
                       (hr_torch_name){second->bytes, second->count}, err);
}

static hr_status call(machine *m, hr_error *err) {
    uint32_t args = 0, callee = 0;
    hr_torch_value out = {0};
    if (!pop(m, &args) || !pop(m, &callee))
        return too_few(err);
    HR_TRY(hr_torch_call(m->r, *hr_torch_at(m->r, callee), *hr_torch_at(m->r, args), &out, err));
    return push(m, out, err);
}

/* cls.__new__(cls) of the two data classes; their attributes come with BUILD. */
static hr_status new_object(machine *m, hr_error *err) {
    uint32_t args = 0, callee = 0;
    if (!pop(m, &args) || !pop(m, &callee))
        return too_few(err);
    const hr_torch_value *cls = hr_torch_at(m->r, callee), *tuple = hr_torch_at(m->r, args);
    bool data_class =
        cls->kind == HR_TORCH_GLOBAL &&
        (cls->count == HR_TORCH_G_FLATTENED_METADATA || cls->count == HR_TORCH_G_LOCAL_SERIALIZED);
    if (!data_class || tuple->kind != HR_TORCH_TUPLE || tuple->count != 0)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "the payload makes an object of %s with %s, which no payload of weights "
                       "does; nothing of it was run",
                       hr_torch_kind_text(cls), hr_torch_kind_text(tuple));
    return push(m, (hr_torch_value){.kind = HR_TORCH_OBJECT, .count = cls->count}, err);
}

/* The attributes of an object; those of an OrderedDict (a state_dict's _metadata) are of no use. */
static hr_status build(machine *m, hr_error *err) {
    uint32_t state = 0;
    hr_torch_value *object = NULL;
    if (!pop(m, &state) || (object = top(m)) == NULL)
        return too_few(err);
    if (object->kind == HR_TORCH_MAPPING)
        return HR_OK;
    if (object->kind != HR_TORCH_OBJECT || hr_torch_at(m->r, state)->kind != HR_TORCH_MAPPING)
        return hr_fail(err, HR_ERR_UNSUPPORTED, "the payload gives %s the state of %s",
                       hr_torch_kind_text(object), hr_torch_kind_text(hr_torch_at(m->r, state)));
    object->first = state;
    return HR_OK;
}

static hr_status persistent(machine *m, hr_error *err) {
    uint32_t id = 0;
    hr_torch_value out = {0};
    if (!pop(m, &id))
        return too_few(err);
    HR_TRY(hr_torch_persistent(m->r, *hr_torch_at(m->r, id), &out, err));
    return push(m, out, err);
}

/* A str or bytes whose length stands in n bytes before it. */
static hr_status push_text(machine *m, hr_torch_kind kind, unsigned n, hr_error *err) {
    uint64_t size = 0;
    const unsigned char *bytes = NULL;
    if (!take_number(m, n, &size) || (bytes = take(m, size)) == NULL)
        return corrupt("the pickle ends inside a str or bytes", err);
    return push(m, (hr_torch_value){.kind = kind, .count = size, .bytes = bytes}, err);
}

/* Two's complement of n bytes. */
static hr_status push_long(machine *m, unsigned length_bytes, hr_error *err) {
    uint64_t n = 0, bits = 0;
    const unsigned char *bytes = NULL;
    if (!take_number(m, length_bytes, &n) || (bytes = take(m, n)) == NULL)
        return corrupt("the pickle ends inside an int", err);
    if (n > 8)
        return push(m, (hr_torch_value){.kind = HR_TORCH_LONG, .count = n, .bytes = bytes}, err);
    for (unsigned i = 0; i < n; i++)
        bits |= (uint64_t)bytes[i] << (8 * i);
    if (n > 0 && n < 8 && bytes[n - 1] & 0x80)
        bits |= UINT64_MAX << (8 * n);
    return push(m, (hr_torch_value){.kind = HR_TORCH_INT, .integer = (int64_t)bits}, err);
}

static hr_status push_int(machine *m, unsigned n, hr_error *err) {
    uint64_t bits = 0;
    if (!take_number(m, n, &bits))
        return corrupt("the pickle ends inside an int", err);
    int64_t value = n == 4 ? (int64_t)(int32_t)(uint32_t)bits : (int64_t)bits;
    return push(m, (hr_torch_value){.kind = HR_TORCH_INT, .integer = value}, err);
}

static hr_status push_float(machine *m, hr_error *err) {
    if (take(m, 8) == NULL)
        return corrupt("the pickle ends inside a float", err);
    return push(m, (hr_torch_value){.kind = HR_TORCH_FLOAT}, err);
}

static hr_status push_bool(machine *m, bool value, hr_error *err) {
    return push(m, (hr_torch_value){.kind = HR_TORCH_BOOL, .integer = value}, err);
}

static hr_status check_frame(machine *m, hr_error *err) {
    uint64_t n = 0;
    if (!take_number(m, 8, &n) || n > m->size - m->at)
        return corrupt("a frame is longer than the pickle", err);
    return HR_OK;
}

static hr_status memo_opcode(machine *m, unsigned n, bool put, hr_error *err) {
    uint64_t index = 0;
    if (!take_number(m, n, &index))
        return corrupt("the pickle ends inside a memo index", err);
    return put ? put_memo(m, index, err) : get_memo(m, index, err);
}

/* What Python calls the opcodes that are refused, for messages. */
static const char *refused_name(unsigned char op) {
    static const struct {
        unsigned char op;
        const char *name;
    } names[] = {
        {'0', "POP"},
        {'1', "POP_MARK"},
        {'2', "DUP"},
        {'F', "FLOAT"},
        {'I', "INT"},
        {'L', "LONG"},
        {'P', "PERSID"},
        {'S', "STRING"},
        {'T', "BINSTRING"},
        {'U', "SHORT_BINSTRING"},
        {'V', "UNICODE"},
        {'d', "DICT"},
        {'g', "GET"},
        {'i', "INST"},
        {'l', "LIST"},
        {'o', "OBJ"},
        {'p', "PUT"},
        {0x80, "PROTO"},
        {0x82, "EXT1"},
        {0x83, "EXT2"},
        {0x84, "EXT4"},
        {0x8f, "EMPTY_SET"},
        {0x90, "ADDITEMS"},
        {0x91, "FROZENSET"},
        {0x92, "NEWOBJ_EX"},
        {0x97, "NEXT_BUFFER"},
        {0x98, "READONLY_BUFFER"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].op == op)
            return names[i].name;
    return "unknown";
}

static hr_status refuse_opcode(unsigned char op, hr_error *err) {
    return hr_fail(err, HR_ERR_UNSUPPORTED,
                   "pickle opcode 0x%02x (%s) is not among those that a payload of weights needs%s",
                   op, refused_name(op),
                   op == 0x97 ? "; send buffers in-band, without a buffer_callback" : "");
}

static hr_status run_opcode(machine *m, unsigned char op, hr_error *err) {
    size_t from = 0, n = 0;
    switch (op) {
    case '(':
        return push_mark(m, err);
    case '.':
        m->stopped = true;
        return HR_OK;
    case 0x95:
        return check_frame(m, err);
    case 'N':
        return push(m, (hr_torch_value){.kind = HR_TORCH_NONE}, err);
    case 0x88:
    case 0x89:
        return push_bool(m, op == 0x88, err);
    case 'K':
        return push_int(m, 1, err);
    case 'M':
        return push_int(m, 2, err);
    case 'J':
        return push_int(m, 4, err);
    case 0x8a:
        return push_long(m, 1, err);
    case 0x8b:
        return push_long(m, 4, err);
    case 'G':
        return push_float(m, err);
    case 0x8c:
        return push_text(m, HR_TORCH_STR, 1, err);
    case 'X':
        return push_text(m, HR_TORCH_STR, 4, err);
    case 0x8d:
        return push_text(m, HR_TORCH_STR, 8, err);
    case 'C':
        return push_text(m, HR_TORCH_BYTES, 1, err);
    case 'B':
        return push_text(m, HR_TORCH_BYTES, 4, err);
    case 0x8e: /* BINBYTES8 */
    case 0x96: /* BYTEARRAY8 */
        return push_text(m, HR_TORCH_BYTES, 8, err);
    case ')':
        return make_tuple(m, m->r->stack_n, 0, err);
    case 0x85:
    case 0x86:
    case 0x87:
        return make_short_tuple(m, op - 0x84u, err);
    case 't':
        HR_TRY(take_marked(m, &from, &n, err));
        return make_tuple(m, from, n, err);
    case ']':
        return push(m, (hr_torch_value){.kind = HR_TORCH_LIST}, err);
    case 'a':
        return add_few(m, HR_TORCH_LIST, 1, err);
    case 'e':
        return add_marked(m, HR_TORCH_LIST, err);
    case '}':
        return push(m, (hr_torch_value){.kind = HR_TORCH_MAPPING}, err);
    case 's':
        return add_few(m, HR_TORCH_MAPPING, 2, err);
    case 'u':
        return add_marked(m, HR_TORCH_MAPPING, err);
    case 0x94:
        return put_memo(m, m->r->memo_n - m->memo_base, err);
    case 'q':
    case 'r':
        return memo_opcode(m, op == 'q' ? 1 : 4, true, err);
    case 'h':
    case 'j':
        return memo_opcode(m, op == 'h' ? 1 : 4, false, err);
    case 'c':
        return global_by_lines(m, err);
    case 0x93:
        return global_by_stack(m, err);
    case 'R':
        return call(m, err);
    case 0x81:
        return new_object(m, err);
    case 'b':
        return build(m, err);
    case 'Q':
        return persistent(m, err);
    default:
        return refuse_opcode(op, err);
    }
}

static hr_status check_protocol(machine *m, hr_error *err) {
    const unsigned char *head = take(m, 2);
    if (head == NULL || head[0] != 0x80)
        return corrupt("these bytes are not a pickle of protocol 2 to 5", err);
    if (head[1] < 2 || head[1] > 5)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "pickle protocol %u is not read; wanted is one of 2 to 5", head[1]);
    return HR_OK;
}

static hr_status run(machine *m, hr_error *err) {
    HR_TRY(check_protocol(m, err));
    while (!m->stopped) {
        const unsigned char *op = take(m, 1);
        if (op == NULL)
            return corrupt("the pickle ends without its STOP", err);
        if (++m->r->opcodes > HR_TORCH_MAX_OPCODES)
            return hr_fail(err, HR_ERR_LIMIT, "the payload has more than %llu pickle opcodes",
                           (unsigned long long)HR_TORCH_MAX_OPCODES);
        HR_TRY(run_opcode(m, *op, err));
    }
    if (m->marks_n != 0 || m->r->stack_n != m->stack_base + 1)
        return corrupt("the pickle stops with other than one value left", err);
    return HR_OK;
}

hr_status hr_torch_unpickle(hr_torch_reader *r, const unsigned char *bytes, size_t size, size_t *at,
                            uint32_t *out, hr_error *err) {
    machine m = {.r = r,
                 .bytes = bytes,
                 .size = size,
                 .at = *at,
                 .stack_base = r->stack_n,
                 .memo_base = r->memo_n};
    HR_TRY(run(&m, err));
    *out = r->stack[--r->stack_n];
    r->memo_n = m.memo_base;
    *at = m.at;
    return HR_OK;
}
