/* The two forms of torch.save: legacy, which is five pickles and the bytes of the storages, and a
 * zip archive of stored members. Tensors that are pickled carry their storage in the first. */
#include "format/torch_pickle.h"

#include <stdlib.h>
#include <string.h>

/* A payload, a value of a LocalSerializedTensor in it, and a storage in that. */
#define MAX_DEPTH 3

/* The number that is the first pickle of the legacy form, little-endian. */
static const unsigned char magic[] = {0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};

static hr_status corrupt(const char *what, hr_error *err) {
    return hr_fail(err, HR_ERR_CORRUPT, "torch.save bytes: %s", what);
}

static uint64_t little_endian(const unsigned char *bytes, unsigned n) {
    uint64_t out = 0;
    for (unsigned i = 0; i < n; i++)
        out |= (uint64_t)bytes[i] << (8 * i);
    return out;
}

/* The storages that an archive's pickle named, in the order of their keys: equal keys, which are
 * one storage, stand together. */
typedef struct keyed {
    hr_torch_storage **list;
    size_t n;
} keyed;

static int compare_text(const unsigned char *a, uint64_t a_size, const unsigned char *b,
                        uint64_t b_size) {
    uint64_t n = a_size < b_size ? a_size : b_size;
    int order = n > 0 ? memcmp(a, b, n) : 0;
    return order != 0 ? order : a_size < b_size ? -1 : a_size > b_size;
}

static int compare_keys(const void *a, const void *b) {
    const hr_torch_storage *x = *(hr_torch_storage *const *)a, *y = *(hr_torch_storage *const *)b;
    return compare_text(x->key, x->key_size, y->key, y->key_size);
}

/* Those without bytes among the storages from index `first` on. */
static hr_status sort_storages(hr_torch_reader *r, size_t first, keyed *out, hr_error *err) {
    out->list = malloc((r->storages_n - first + 1) * sizeof *out->list);
    out->n = 0;
    if (out->list == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of storages");
    for (size_t i = first; i < r->storages_n; i++)
        if (r->storages[i].data == NULL)
            out->list[out->n++] = &r->storages[i];
    if (out->n > 1)
        qsort(out->list, out->n, sizeof *out->list, compare_keys);
    return HR_OK;
}

/* Index of the first storage of that key; n when there is none. */
static size_t find_key(const keyed *k, const unsigned char *key, uint64_t size) {
    size_t low = 0, high = k->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const hr_torch_storage *s = k->list[middle];
        if (compare_text(s->key, s->key_size, key, size) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool found =
        low < k->n && compare_text(k->list[low]->key, k->list[low]->key_size, key, size) == 0;
    return found ? low : k->n;
}

/* Gives every storage of the key at index `at` its bytes. */
static hr_status give_bytes(keyed *k, size_t at, const unsigned char *data, uint64_t bytes,
                            hr_error *err) {
    const hr_torch_storage *first = k->list[at];
    for (size_t i = at; i < k->n && compare_keys(&k->list[i], &first) == 0; i++) {
        if (k->list[i]->bytes != bytes)
            return corrupt("a storage has another size than its tensors say", err);
        k->list[i]->data = data;
    }
    return HR_OK;
}

static hr_status check_all_given(const keyed *k, hr_error *err) {
    for (size_t i = 0; i < k->n; i++)
        if (k->list[i]->data == NULL)
            return corrupt("a storage is named but its bytes are missing", err);
    return HR_OK;
}

static hr_status unpickle_object(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                                 size_t *at, uint32_t *out, hr_error *err) {
    bool outer = r->archive;
    r->archive = true;
    hr_status status = hr_torch_unpickle(r, bytes, size, at, out, err);
    r->archive = outer;
    return status;
}

/* Version and byte order, the second and third pickle. */
static hr_status check_system(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                              size_t *at, hr_error *err) {
    uint32_t index = 0;
    HR_TRY(hr_torch_unpickle(r, bytes, size, at, &index, err));
    if (hr_torch_at(r, index)->kind != HR_TORCH_INT || hr_torch_at(r, index)->integer != 1001)
        return corrupt("another version of the legacy form than 1001", err);
    HR_TRY(hr_torch_unpickle(r, bytes, size, at, &index, err));
    const hr_torch_value *order = hr_torch_get(r, hr_torch_at(r, index), "little_endian");
    if (order == NULL || order->kind != HR_TORCH_BOOL)
        return corrupt("no byte order is given", err);
    if (!order->integer)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "the payload was written on a big-endian machine; only little-endian bytes "
                       "are taken");
    return HR_OK;
}

/* After the list of keys: for each, the number of elements and the elements. */
static hr_status read_legacy_storages(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                                      size_t at, uint32_t keys, keyed *k, hr_error *err) {
    hr_torch_walk walk = {0};
    uint32_t index = 0;
    if (hr_torch_at(r, keys)->kind != HR_TORCH_LIST)
        return corrupt("no list of storage keys", err);
    while (hr_torch_next(r, hr_torch_at(r, keys), &walk, &index)) {
        const hr_torch_value *key = hr_torch_at(r, index);
        size_t found = key->kind == HR_TORCH_STR ? find_key(k, key->bytes, key->count) : k->n;
        if (found == k->n)
            return corrupt("a storage key that no tensor uses", err);
        uint64_t n = k->list[found]->bytes, numel = 0;
        if (size - at < 8 || size - at - 8 < n)
            return corrupt("they end inside a storage", err);
        numel = little_endian(bytes + at, 8);
        if (numel > n || (n > 0 && (numel == 0 || n % numel != 0)))
            return corrupt("a storage has another size than its tensors say", err);
        HR_TRY(give_bytes(k, found, bytes + at + 8, n, err));
        at += 8 + n;
    }
    return check_all_given(k, err);
}

/* `at` stands behind the first pickle. */
static hr_status read_legacy(hr_torch_reader *r, const unsigned char *bytes, size_t size, size_t at,
                             uint32_t *out, hr_error *err) {
    size_t first = r->storages_n;
    keyed k = {0};
    uint32_t keys = 0;
    HR_TRY(check_system(r, bytes, size, &at, err));
    HR_TRY(unpickle_object(r, bytes, size, &at, out, err));
    HR_TRY(hr_torch_unpickle(r, bytes, size, &at, &keys, err));
    HR_TRY(sort_storages(r, first, &k, err));
    hr_status status = read_legacy_storages(r, bytes, size, at, keys, &k, err);
    free(k.list);
    return status;
}

/* A stored member of the zip form. */
typedef struct member {
    const unsigned char *name, *data;
    uint64_t name_size, size;
} member;

typedef struct archive {
    const unsigned char *bytes;
    uint64_t size;
    member *members; /* in the order of their names */
    size_t n;
    const unsigned char *prefix; /* of every name, with its slash */
    uint64_t prefix_size;
} archive;

static int compare_members(const void *a, const void *b) {
    const member *x = a, *y = b;
    return compare_text(x->name, x->name_size, y->name, y->name_size);
}

static bool has_signature(const archive *a, uint64_t at, uint64_t room, const char *signature) {
    return at <= a->size && a->size - at >= room && memcmp(a->bytes + at, signature, 4) == 0;
}

/* Where the directory lies and how many members it lists. torch writes no comment behind it. */
static hr_status find_directory(const archive *a, uint64_t *at, uint64_t *n, hr_error *err) {
    if (a->size < 22 || !has_signature(a, a->size - 22, 22, "PK\5\6"))
        return corrupt("the zip archive is cut or has a comment", err);
    const unsigned char *end = a->bytes + a->size - 22;
    *n = little_endian(end + 10, 2);
    *at = little_endian(end + 16, 4);
    if (a->size >= 42 && has_signature(a, a->size - 42, 20, "PK\6\7")) {
        uint64_t record = little_endian(a->bytes + a->size - 42 + 8, 8);
        if (!has_signature(a, record, 56, "PK\6\6"))
            return corrupt("the zip archive's long directory record is missing", err);
        *n = little_endian(a->bytes + record + 32, 8);
        *at = little_endian(a->bytes + record + 48, 8);
    }
    if (*at > a->size || *n > (a->size - *at) / 46 || *n > HR_TORCH_MAX_STRIDED + 16)
        return corrupt("the zip archive's directory is out of its bounds", err);
    return HR_OK;
}

/* Sizes of 2^32 and more stand in an extra field, those that are needed, in this order. */
static hr_status read_long_sizes(const unsigned char *extra, uint64_t n, uint64_t *values[3],
                                 hr_error *err) {
    for (uint64_t at = 0; n - at >= 4;) {
        uint64_t size = little_endian(extra + at + 2, 2), place = at + 4, end = place + size;
        if (end > n)
            break;
        if (little_endian(extra + at, 2) == 1) {
            for (int i = 0; i < 3; i++) {
                if (*values[i] != UINT32_MAX)
                    continue;
                if (end - place < 8)
                    return corrupt("a zip member's long size is cut", err);
                *values[i] = little_endian(extra + place, 8);
                place += 8;
            }
            return HR_OK;
        }
        at = end;
    }
    return HR_OK;
}

/* One directory entry at *at, moved behind it. */
static hr_status read_member(const archive *a, uint64_t *at, member *out, hr_error *err) {
    if (!has_signature(a, *at, 46, "PK\1\2"))
        return corrupt("a zip directory entry is cut", err);
    const unsigned char *entry = a->bytes + *at;
    uint64_t packed = little_endian(entry + 20, 4), size = little_endian(entry + 24, 4),
             local = little_endian(entry + 42, 4), name_size = little_endian(entry + 28, 2),
             extra_size = little_endian(entry + 30, 2), comment = little_endian(entry + 32, 2);
    if (name_size + extra_size + comment > a->size - *at - 46)
        return corrupt("a zip directory entry is cut", err);
    HR_TRY(read_long_sizes(entry + 46 + name_size, extra_size,
                           (uint64_t *[]){&size, &packed, &local}, err));
    if (little_endian(entry + 10, 2) != 0 || packed != size || little_endian(entry + 8, 2) & 1)
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "torch.save bytes: a zip member is compressed or encrypted, which torch "
                       "never writes");
    if (!has_signature(a, local, 30, "PK\3\4"))
        return corrupt("a zip member lies outside the archive", err);
    uint64_t data = local + 30 + little_endian(a->bytes + local + 26, 2) +
                    little_endian(a->bytes + local + 28, 2);
    if (data > a->size || size > a->size - data)
        return corrupt("a zip member lies outside the archive", err);
    *out = (member){entry + 46, a->bytes + data, name_size, size};
    *at += 46 + name_size + extra_size + comment;
    return HR_OK;
}

static hr_status read_directory(archive *a, hr_error *err) {
    uint64_t at = 0, n = 0;
    HR_TRY(find_directory(a, &at, &n, err));
    a->members = malloc((n + 1) * sizeof *a->members);
    if (a->members == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for the directory of a zip archive");
    for (a->n = 0; a->n < n; a->n++)
        HR_TRY(read_member(a, &at, &a->members[a->n], err));
    qsort(a->members, a->n, sizeof *a->members, compare_members);
    return HR_OK;
}

/* The member prefix + folder + name; NULL when absent. */
static const member *find_member(const archive *a, const char *folder, const unsigned char *name,
                                 uint64_t size) {
    unsigned char text[1024];
    uint64_t folder_size = strlen(folder);
    if (a->prefix_size + folder_size + size > sizeof text)
        return NULL;
    memcpy(text, a->prefix, a->prefix_size);
    memcpy(text + a->prefix_size, folder, folder_size);
    memcpy(text + a->prefix_size + folder_size, name, size);
    member wanted = {.name = text, .name_size = a->prefix_size + folder_size + size};
    return bsearch(&wanted, a->members, a->n, sizeof *a->members, compare_members);
}

static const member *find_named(const archive *a, const char *name) {
    return find_member(a, "", (const unsigned char *)name, strlen(name));
}

/* The folder that everything of the archive is in: the one that holds data.pkl. */
static bool find_prefix(archive *a) {
    static const char pickle[] = "/data.pkl";
    uint64_t n = sizeof pickle - 1;
    for (size_t i = 0; i < a->n; i++) {
        const member *m = &a->members[i];
        if (m->name_size > n && memcmp(m->name + m->name_size - n, pickle, n) == 0) {
            a->prefix = m->name;
            a->prefix_size = m->name_size - n + 1;
            return true;
        }
    }
    return false;
}

static hr_status read_members(hr_torch_reader *r, archive *a, uint32_t *out, keyed *k,
                              hr_error *err) {
    size_t at = 0, first = r->storages_n;
    HR_TRY(read_directory(a, err));
    r->opcodes += 16 * a->n; /* sorting them is work, too */
    const member *pickle = find_prefix(a) ? find_named(a, "data.pkl") : NULL;
    if (pickle == NULL)
        return corrupt("the zip archive holds no data.pkl", err);
    const member *order = find_named(a, "byteorder");
    if (order != NULL && (order->size != 6 || memcmp(order->data, "little", 6) != 0))
        return hr_fail(err, HR_ERR_UNSUPPORTED,
                       "the payload was written on a big-endian machine; only little-endian bytes "
                       "are taken");
    HR_TRY(unpickle_object(r, pickle->data, pickle->size, &at, out, err));
    HR_TRY(sort_storages(r, first, k, err));
    for (size_t i = 0; i < k->n; i++) {
        const member *m = find_member(a, "data/", k->list[i]->key, k->list[i]->key_size);
        if (k->list[i]->data != NULL)
            continue;
        if (m == NULL)
            return corrupt("a storage is named but its bytes are missing", err);
        HR_TRY(give_bytes(k, i, m->data, m->size, err));
    }
    return HR_OK;
}

static hr_status read_zip(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                          uint32_t *out, hr_error *err) {
    archive a = {.bytes = bytes, .size = size};
    keyed k = {0};
    hr_status status = read_members(r, &a, out, &k, err);
    free(k.list);
    free(a.members);
    return status;
}

static hr_status read_pickle(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                             uint32_t *out, hr_error *err) {
    size_t at = 0;
    HR_TRY(hr_torch_unpickle(r, bytes, size, &at, out, err));
    const hr_torch_value *first = hr_torch_at(r, *out);
    if (first->kind == HR_TORCH_LONG && first->count == sizeof magic &&
        memcmp(first->bytes, magic, sizeof magic) == 0)
        return read_legacy(r, bytes, size, at, out, err);
    if (at != size)
        return hr_fail(err, HR_ERR_CORRUPT, "%zu bytes follow the end of the pickle", size - at);
    return HR_OK;
}

hr_status hr_torch_read_object(hr_torch_reader *r, const unsigned char *bytes, size_t size,
                               uint32_t *out, hr_error *err) {
    if (r->depth == MAX_DEPTH)
        return hr_fail(err, HR_ERR_LIMIT, "the payload holds pickles in pickles deeper than %d",
                       MAX_DEPTH);
    r->depth++;
    hr_status status = size >= 4 && memcmp(bytes, "PK\3\4", 4) == 0
                           ? read_zip(r, bytes, size, out, err)
                           : read_pickle(r, bytes, size, out, err);
    r->depth--;
    return status;
}
