/* The inside of the payload reader, shared by its files and private to them: a pickle becomes a
 * table of values; what is called in it becomes a value only if the call is on the closed list.
 *
 * Values refer to each other by index and to the pickle by pointer, so a value costs 16 bytes
 * whatever its text or bytes are, and nothing here follows references deeper than one step: nesting
 * of any depth costs no stack. */
#ifndef HR_FORMAT_TORCH_PICKLE_H
#define HR_FORMAT_TORCH_PICKLE_H

#include "base/error.h"
#include "format/torch_globals.h"

#include <headrace/tensor.h>

/* Bounds of one payload, its inner pickles included. A payload of 100,000 tensors stays a factor of
 * four below them. */
#define HR_TORCH_MAX_OPCODES ((uint64_t)1 << 26)
#define HR_TORCH_MAX_VALUES ((size_t)1 << 24)
#define HR_TORCH_MAX_ITEMS ((size_t)1 << 25)
#define HR_TORCH_MAX_STRIDED ((size_t)1 << 20) /* tensors, and storages */
#define HR_TORCH_MAX_MARKS 256
#define HR_TORCH_MAX_ATTRIBUTES 16

typedef enum hr_torch_kind {
    HR_TORCH_NONE,
    HR_TORCH_BOOL,
    HR_TORCH_INT,
    HR_TORCH_LONG, /* more than 64 bits: `bytes`, little-endian two's complement */
    HR_TORCH_FLOAT,
    HR_TORCH_STR,
    HR_TORCH_BYTES,
    HR_TORCH_TUPLE, /* also torch.Size */
    HR_TORCH_LIST,
    HR_TORCH_MAPPING, /* dict, OrderedDict: keys and values alternate */
    HR_TORCH_GLOBAL,  /* count: the hr_torch_global; for a dtype or storage class also its dtype */
    HR_TORCH_OBJECT,  /* of a data class: count: its hr_torch_global, first: its attributes */
    HR_TORCH_STORAGE, /* count: dtype + 1 or 0 when untyped, first: index in storages */
    HR_TORCH_TENSOR   /* first: index in tensors */
} hr_torch_kind;

typedef struct hr_torch_value {
    uint64_t kind : 8, count : 56; /* count: of bytes or items */
    union {
        int64_t integer;
        const unsigned char *bytes;
        struct {
            uint32_t first, last; /* tuple: place of its items; list, mapping: of its chunks */
        };
    };
} hr_torch_value;

/* Bytes that tensors are views of. data is NULL until the archive that holds them has been read. */
typedef struct hr_torch_storage {
    const unsigned char *data;
    uint64_t bytes;
    const unsigned char *key; /* persistent id in its archive, or name of its shared memory */
    uint64_t key_size;
} hr_torch_storage;

typedef struct hr_torch_strided {
    uint32_t storage, ndim;
    hr_dtype dtype;
    uint64_t offset; /* in elements, as the strides */
    uint64_t shape[HR_TENSOR_MAX_DIMS], stride[HR_TENSOR_MAX_DIMS];
    const unsigned char *packed; /* its elements row-major, once somebody asked for them */
} hr_torch_strided;

/* Everything that one payload is made of. */
typedef struct hr_torch_reader {
    hr_torch_value *values;
    uint32_t *items, *stack, *memo;
    hr_torch_storage *storages;
    hr_torch_strided *tensors;
    size_t values_n, items_n, stack_n, memo_n, storages_n, tensors_n;
    size_t values_cap, items_cap, stack_cap, memo_cap, storages_cap, tensors_cap;
    uint64_t opcodes;

    void **copies; /* memory that tensors and storages point into, freed with the payload */
    size_t copies_n, copies_cap;
    uint64_t copied, max_bytes; /* bytes of them */
    uint64_t recoded, size;     /* bytes decoded from text; of the payload */

    size_t shared_n;  /* index of the last storage from shared memory, plus 1 */
    bool keep_shared; /* of the pickle that is being read */
    uint32_t depth;   /* of pickles inside pickles */
    bool archive;     /* the pickle is one of torch.save: persistent ids are storages */
} hr_torch_reader;

/* Reads one pickle that begins at *at (moved behind its end) and puts the index of its object into
 * *out. The values stay as long as the reader, or until hr_torch_forget. */
hr_status hr_torch_unpickle(hr_torch_reader *r, const unsigned char *bytes, size_t size, size_t *at,
                            uint32_t *out, hr_error *err);

/* Forgets the values made since n of them and i items were there; storages and tensors stay. */
void hr_torch_forget(hr_torch_reader *r, size_t n, size_t i);

/* Room for `want` elements of `size` bytes in an array (the address of its pointer); grows it by
 * half or more. ERR_LIMIT over limit elements. */
hr_status hr_torch_grow(void *array, size_t want, size_t *cap, size_t size, size_t limit,
                        const char *what, hr_error *err);

/* n bytes that live as long as the payload, within max_bytes. */
hr_status hr_torch_copy_room(hr_torch_reader *r, uint64_t n, const char *what, unsigned char **out,
                             hr_error *err);

static inline const hr_torch_value *hr_torch_at(const hr_torch_reader *r, uint32_t index) {
    return &r->values[index];
}

/* Index of item i of a tuple. i < count. */
static inline uint32_t hr_torch_item(const hr_torch_reader *r, const hr_torch_value *tuple,
                                     size_t i) {
    return r->items[tuple->first + i];
}

/* Walks the items of a tuple, list or mapping in order: false at the end. Start with zeros. */
typedef struct hr_torch_walk {
    size_t seen, left, place, chunk;
} hr_torch_walk;
bool hr_torch_next(const hr_torch_reader *r, const hr_torch_value *container, hr_torch_walk *walk,
                   uint32_t *item);

/* Whether a value is this ASCII text. */
bool hr_torch_is_text(const hr_torch_value *value, const char *text);

/* Value of a text key of a mapping of at most HR_TORCH_MAX_ATTRIBUTES entries; the last of equal
 * keys, NULL when absent. */
const hr_torch_value *hr_torch_get(const hr_torch_reader *r, const hr_torch_value *mapping,
                                   const char *key);

/* "a list", "a tensor", ... for messages. */
const char *hr_torch_kind_text(const hr_torch_value *value);

/* torch_rebuild.c: what the calls on the closed list make. `callee` is a GLOBAL, args a TUPLE. */
hr_status hr_torch_call(hr_torch_reader *r, hr_torch_value callee, hr_torch_value args,
                        hr_torch_value *out, hr_error *err);
/* A tuple of at most HR_TENSOR_MAX_DIMS ints from 0 up; `what` ("shape") is for messages. */
hr_status hr_torch_read_sizes(const hr_torch_reader *r, const hr_torch_value *tuple,
                              const char *what, uint64_t out[HR_TENSOR_MAX_DIMS], uint32_t *n,
                              hr_error *err);
/* The storage that a persistent id of an archive names. */
hr_status hr_torch_persistent(hr_torch_reader *r, hr_torch_value id, hr_torch_value *out,
                              hr_error *err);

/* torch_archive.c: the object in bytes that are a pickle or torch.save's legacy or zip form, of
 * which every storage has its bytes afterwards. */
hr_status hr_torch_read_object(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                               uint32_t *out, hr_error *err);

/* torch_shm.c: copies `bytes` bytes out of the shared memory object of that name and, unless `keep`
 * is true, gives one count of it back; data may be NULL when bytes is 0 or nothing but the count is
 * wanted. */
hr_status hr_torch_shm_take(const unsigned char *name, uint64_t name_size, void *data,
                            uint64_t bytes, bool keep, hr_error *err);

#endif
