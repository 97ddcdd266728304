/* XXH3-128 as the including file's instruction set runs it: the library's own code, compiled here,
 * since the one that is linked knows the baseline only and takes twice as long. Digests and states
 * are the same in all of them. Private to the room. */
#define XXH_INLINE_ALL
#include "tensor/digest.h"

#include <string.h>
#include <xxhash.h>

typedef struct hr_xxh3_ops {
    void (*one)(const void *bytes, size_t size, uint8_t out[HR_XXH3_SIZE]);
    void (*update)(XXH3_state_t *state, const void *bytes, size_t size);
} hr_xxh3_ops;

extern const hr_xxh3_ops hr_xxh3_avx2;

static void put(XXH128_hash_t hash, uint8_t out[HR_XXH3_SIZE]) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(out, canonical.digest, HR_XXH3_SIZE);
}

static void one(const void *bytes, size_t size, uint8_t out[HR_XXH3_SIZE]) {
    put(XXH3_128bits(bytes, size), out);
}

static void update(XXH3_state_t *state, const void *bytes, size_t size) {
    XXH3_128bits_update(state, bytes, size);
}
