#include "weights/manifest.h"

#include "weights/names.h"

#include <string.h>
#include <strings.h>

static void compute_sha256(hr_stash_entry *e) {
    if (e->sha256[0] == '\0' && e->adapter != NULL)
        hr_sha256_hex(e->tensor.bytes > 0 ? e->tensor.data : "", e->tensor.bytes, e->sha256);
}

void hr_stash_sha256(hr_stash_entry *const *sorted, size_t n) {
    for (size_t i = 0; i < n; i++)
        compute_sha256(sorted[i]);
}

static bool is_sha256(const char *hex) {
    return strnlen(hex, HR_SHA256_HEX) == HR_SHA256_HEX - 1 &&
           strspn(hex, "0123456789abcdefABCDEF") == HR_SHA256_HEX - 1;
}

static hr_status fail_malformed(const char *name, const char *what, const char *hex,
                                hr_error *err) {
    return hr_fail(err, HR_ERR_INVALID, "[LORA-CHECK] tensor '%.200s': '%.80s' is not %s in hex",
                   name, hex, what);
}

static hr_status check_xxh3(const hr_stash_entry *e, const char *wanted, hr_error *err) {
    uint8_t digest[HR_XXH3_SIZE];
    char came[HR_XXH3_HEX];
    if (!hr_xxh3_parse(wanted, digest))
        return fail_malformed(e->name, "an XXH3-128", wanted, err);
    if (memcmp(digest, e->xxh3, sizeof digest) != 0)
        return hr_fail(
            err, HR_ERR_DIGEST,
            "[LORA-CHECK] tensor '%.200s': wanted XXH3-128 %s, came %s; nothing of the session "
            "was published and it is closed: push everything again in a new one",
            e->name, wanted, hr_xxh3_format(e->xxh3, came));
    return HR_OK;
}

static hr_status check_sha256(hr_stash_entry *e, const char *wanted, hr_error *err) {
    if (!is_sha256(wanted))
        return fail_malformed(e->name, "a SHA-256", wanted, err);
    compute_sha256(e);
    if (e->sha256[0] == '\0')
        return hr_fail(
            err, HR_ERR_INVALID,
            "[LORA-CHECK] base tensor '%.200s': its SHA-256 was not computed as it came; "
            "begin the session with audit, or list its XXH3-128",
            e->name);
    if (strcasecmp(e->sha256, wanted) != 0)
        return hr_fail(
            err, HR_ERR_DIGEST,
            "[LORA-CHECK] tensor '%.200s': wanted SHA-256 %s, came %s; nothing of the session "
            "was published and it is closed: push everything again in a new one",
            e->name, wanted, e->sha256);
    return HR_OK;
}

static hr_status check_entry(const hr_manifest_entry *wanted, hr_stash *stash, hr_error *err) {
    if (wanted->name == NULL)
        return hr_fail(err, HR_ERR_INVALID, "[LORA-CHECK] an entry of the manifest has no name");
    hr_stash_entry *e = hr_stash_find(stash, wanted->name);
    if (e == NULL)
        return hr_fail(err, HR_ERR_SESSION,
                       "[LORA-CHECK] tensor '%.200s' is in the manifest but did not come (%zu "
                       "tensors came)",
                       wanted->name, stash->n);
    if (e->listed)
        return hr_fail(err, HR_ERR_INVALID, "[LORA-CHECK] tensor '%.200s' is in the manifest twice",
                       wanted->name);
    e->listed = true;
    if (wanted->xxh3 != NULL)
        HR_TRY(check_xxh3(e, wanted->xxh3, err));
    if (wanted->sha256 != NULL)
        HR_TRY(check_sha256(e, wanted->sha256, err));
    return HR_OK;
}

hr_status hr_manifest_check(const hr_manifest *manifest, hr_stash *stash,
                            hr_stash_entry *const *sorted, hr_error *err) {
    for (size_t i = 0; i < manifest->n; i++)
        HR_TRY(check_entry(&manifest->entries[i], stash, err));
    for (size_t i = 0; i < stash->n; i++)
        if (!sorted[i]->listed && (sorted[i]->adapter != NULL || manifest->covers_base))
            return hr_fail(err, HR_ERR_SESSION,
                           "[LORA-CHECK] tensor '%.200s' came but is not in the manifest (%zu "
                           "entries)",
                           sorted[i]->name, manifest->n);
    return HR_OK;
}

static void add_text(hr_xxh3_stream *stream, const char *text) {
    const char *present = text != NULL ? text : "";
    hr_xxh3_stream_update(stream, text != NULL ? "+" : "-", 1);
    hr_xxh3_stream_update(stream, present, strlen(present) + 1);
}

void hr_manifest_fingerprint(const hr_manifest *manifest, hr_xxh3_stream *stream) {
    if (manifest == NULL)
        return;
    uint64_t head[2] = {manifest->n, manifest->covers_base};
    hr_xxh3_stream_update(stream, head, sizeof head);
    for (size_t i = 0; i < manifest->n; i++) {
        add_text(stream, manifest->entries[i].name);
        add_text(stream, manifest->entries[i].sha256);
        add_text(stream, manifest->entries[i].xxh3);
    }
}
