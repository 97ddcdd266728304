/* A manifest against what came. */
#ifndef HR_WEIGHTS_MANIFEST_H
#define HR_WEIGHTS_MANIFEST_H

#include "weights/stash.h"

/* Every tensor that is listed must have come, with the digests that are given; every adapter tensor
 * that came must be listed, and every base tensor when covers_base. Computes SHA-256 of adapters'
 * tensors where asked, from bytes that the stash must still hold. Messages begin with
 * "[LORA-CHECK]". HR_ERR_SESSION (missing or extra tensor), HR_ERR_DIGEST, HR_ERR_INVALID (a
 * malformed digest or entry; SHA-256 of a base tensor that was not computed as it came). */
hr_status hr_manifest_check(const hr_manifest *manifest, hr_stash *stash,
                            hr_stash_entry *const *sorted, hr_error *err);

/* SHA-256 of every adapter tensor that has none yet. */
void hr_stash_sha256(hr_stash_entry *const *sorted, size_t n);

/* One digest of all that a manifest says. NULL is allowed. */
void hr_manifest_fingerprint(const hr_manifest *manifest, hr_xxh3_stream *stream);

#endif
