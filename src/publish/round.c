/* Rounds: how the ranks of a group stay in step. */
#include "publish/round.h"

#include <stdio.h>
#include <string.h>

/* ---- values ---- */

void hr_round_put_u64(hr_buf *out, uint64_t value) {
    hr_buf_append(out, &value, sizeof value);
}

void hr_round_put_text(hr_buf *out, const char *text) {
    hr_round_put_u64(out, strlen(text));
    hr_buf_append(out, text, strlen(text) + 1);
}

void hr_round_put_bytes(hr_buf *out, const void *bytes, size_t n) {
    hr_buf_append(out, bytes, n);
}

const void *hr_round_get_bytes(hr_round_reader *reader, size_t n) {
    if (reader->bad || n > (size_t)(reader->end - reader->at)) {
        reader->bad = true;
        return NULL;
    }
    const void *bytes = reader->at;
    reader->at += n;
    return bytes;
}

uint64_t hr_round_get_u64(hr_round_reader *reader) {
    uint64_t value = 0;
    const void *bytes = hr_round_get_bytes(reader, sizeof value);
    if (bytes != NULL)
        memcpy(&value, bytes, sizeof value);
    return value;
}

const char *hr_round_get_text(hr_round_reader *reader) {
    uint64_t len = hr_round_get_u64(reader);
    const char *text = len < SIZE_MAX ? hr_round_get_bytes(reader, (size_t)len + 1) : NULL;
    if (text == NULL || text[len] != '\0' || strlen(text) != len) {
        reader->bad = true;
        return "";
    }
    return text;
}

/* ---- a round ---- */

typedef struct round_state {
    uint32_t size, heard; /* ranks, in order */
    hr_error first;       /* of the lowest rank that failed; HR_OK: none */
    bool told;            /* by that rank itself, so that all know it */
    hr_status status;     /* of reading */
    hr_error err;
    hr_status (*read)(void *ctx, uint32_t rank, hr_round_reader *reader, hr_error *err);
    void *ctx;
} round_state;

static void read_failure(round_state *r, uint32_t rank, hr_round_reader *reader) {
    hr_status status = (hr_status)hr_round_get_u64(reader);
    const char *message = hr_round_get_text(reader);
    if (r->first.status != HR_OK)
        return;
    r->told = !reader->bad && status != HR_OK;
    if (reader->bad)
        hr_fail(&r->first, HR_ERR_PEER, "rank %u sent a round that cannot be read", rank);
    else if (status != HR_OK && r->size > 1)
        hr_fail(&r->first, status, "rank %u: %s", rank, message);
    else if (status != HR_OK)
        hr_fail(&r->first, status, "%s", message);
}

static void hear(void *ctx, uint32_t rank, const void *bytes, size_t n) {
    round_state *r = ctx;
    hr_round_reader reader = {bytes, (const char *)bytes + n, false};
    if (rank != r->heard++ && r->status == HR_OK)
        r->status =
            hr_fail(&r->err, HR_ERR_PEER, "the group's allgather gave rank %u out of turn", rank);
    read_failure(r, rank, &reader);
    if (r->first.status != HR_OK || r->status != HR_OK || r->read == NULL)
        return;
    r->status = r->read(r->ctx, rank, &reader, &r->err);
    if (r->status == HR_OK && reader.bad)
        r->status = hr_fail(&r->err, HR_ERR_PEER, "rank %u sent a round that cannot be read", rank);
}

hr_status hr_round(const hr_group *group, const hr_error *failure, const hr_buf *mine,
                   hr_status (*read)(void *ctx, uint32_t rank, hr_round_reader *reader,
                                     hr_error *err),
                   void *ctx, bool *lost, hr_error *err) {
    round_state r = {.size = group != NULL ? group->size : 1, .read = read, .ctx = ctx};
    hr_buf message = {0};
    hr_status status = HR_OK;
    hr_round_put_u64(&message, (uint64_t)failure->status);
    hr_round_put_text(&message, failure->status != HR_OK ? failure->message : "");
    if (mine->len > 0)
        hr_round_put_bytes(&message, mine->data, mine->len);
    /* Without memory the others still need to hear from this rank: an empty round is a failure. */
    bool cut = message.failed || mine->failed;
    if (group == NULL)
        hear(&r, 0, message.data, cut ? 0 : message.len);
    else
        status = group->allgather(group->self, message.data, cut ? 0 : message.len, hear, &r, err);
    hr_buf_free(&message);
    if (lost != NULL)
        *lost = status != HR_OK;
    if (status != HR_OK)
        return hr_fail_context(err, status, "the trainer's group");
    if (r.first.status == HR_OK && r.status == HR_OK && r.heard != r.size)
        r.status = hr_fail(&r.err, HR_ERR_PEER, "the group's allgather gave %u of %u ranks",
                           r.heard, r.size);
    if (lost != NULL)
        *lost = !r.told && (r.first.status != HR_OK || r.status != HR_OK);
    const hr_error *cause = r.first.status != HR_OK ? &r.first : &r.err;
    return r.first.status != HR_OK || r.status != HR_OK
               ? hr_fail(err, cause->status, "%s", cause->message)
               : HR_OK;
}
