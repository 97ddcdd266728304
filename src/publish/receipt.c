/* Receipts of a push. */
#include "publish/receipt.h"

#include "format/json_writer.h"

#include <stdlib.h>
#include <string.h>

typedef struct receipt_box {
    hr_push_receipt receipt; /* first: a receipt is a box */
    hr_buf json;
    char **strings; /* everything that the pointers of the receipt point at */
    size_t n_strings;
    hr_push_engine *engines;
} receipt_box;

void hr_push_receipt_free(hr_push_receipt *receipt) {
    receipt_box *box = (receipt_box *)receipt;
    if (box == NULL)
        return;
    for (size_t i = 0; i < box->n_strings; i++)
        free(box->strings[i]);
    free(box->strings);
    free(box->engines);
    hr_buf_free(&box->json);
    free(box);
}

const char *hr_push_receipt_json(const hr_push_receipt *receipt) {
    return ((const receipt_box *)receipt)->json.data;
}

/* ---- JSON ---- */

/* What a call did not come to, or does not know, is null, not 0. */
static void put_known(hr_json_writer *w, const char *key, uint64_t value, bool known) {
    if (known)
        hr_json_put_u64(w, key, value);
    else
        hr_json_put_null(w, key);
}

static void put_chosen(hr_json_writer *w, const char *key, const char *text) {
    if (text[0] != '\0')
        hr_json_put_string(w, key, text);
    else
        hr_json_put_null(w, key);
}

static void put_digest(hr_json_writer *w, const uint8_t digest[HR_XXH3_SIZE], bool known) {
    char hex[HR_XXH3_HEX];
    put_chosen(w, "xxh3", known ? hr_xxh3_format(digest, hex) : "");
}

static void put_ms(hr_json_writer *w, const char *key, uint64_t ns, bool all) {
    hr_json_key(w, key);
    if (!all && ns == 0)
        hr_json_write_null(w);
    else
        hr_json_write_f32(w, (float)((double)ns / 1e6));
}

static void write_engine(const hr_push_engine *e, const char *serves, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_put_string(w, "url", e->url);
    hr_json_put_string(w, "state", e->state);
    hr_json_put_string(w, "serves", serves);
    hr_json_put_u64(w, "retries", e->retries);
    if (e->error[0] != '\0')
        hr_json_put_string(w, "error", e->error);
    hr_json_key(w, "receipt");
    if (e->received[0] != '\0')
        hr_json_write_raw(w, e->received, strlen(e->received));
    else
        hr_json_write_null(w);
    hr_json_object_end(w);
}

/* all: the call came to every stage. */
static void write_times(const hr_push_receipt *r, bool all, hr_json_writer *w) {
    hr_json_key(w, "milliseconds");
    hr_json_object_begin(w);
    put_ms(w, "pause", r->pause_ns, all);
    put_ms(w, "register", r->register_ns, all);
    put_ms(w, "begin", r->begin_ns, all);
    put_ms(w, "stream", r->stream_ns, all);
    put_ms(w, "prepare", r->prepare_ns, all);
    put_ms(w, "commit", r->commit_ns, all);
    put_ms(w, "total", r->total_ns, all);
    hr_json_object_end(w);
}

/* Where the new weights are served: "all", "some" (and the others do not, or may not), "none", or
 * "unknown", when an engine may and none surely does. */
static const char *published_on(const hr_fleet *fleet) {
    size_t fresh = 0, old = 0;
    for (size_t i = 0; i < fleet->n; i++) {
        fresh += strcmp(fleet->engines[i].serves, "new") == 0;
        old += strcmp(fleet->engines[i].serves, "old") == 0;
    }
    if (fresh > 0)
        return fresh == fleet->n ? "all" : "some";
    return old == fleet->n ? "none" : "unknown";
}

static void write_receipt(const hr_push_receipt *r, const hr_fleet *fleet, const hr_error *failure,
                          hr_buf *out) {
    bool failed = failure != NULL;
    bool summed = r->tensors > 0; /* a resume does not know what was sent, nor who sent nothing */
    bool connected = r->transport[0] != '\0';
    hr_json_writer w;
    hr_json_writer_init(&w, out);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", !failed);
    if (failed) {
        hr_json_put_string(&w, "error", failure->message);
        hr_json_put_string(&w, "status", hr_status_name(failure->status));
    }
    put_chosen(&w, "published", fleet != NULL ? published_on(fleet) : "");
    put_chosen(&w, "session_id", r->session_id);
    put_chosen(&w, "transport", r->transport);
    hr_json_put_string(&w, "weight_version", r->weight_version);
    hr_json_put_bool(&w, "skipped", r->skipped);
    if (connected)
        hr_json_put_bool(&w, "atomic", r->atomic);
    else
        hr_json_put_null(&w, "atomic");
    hr_json_put_bool(&w, "commit_begun", r->commit_begun);
    hr_json_put_u64(&w, "rank", r->rank);
    hr_json_put_u64(&w, "ranks", r->ranks);
    put_known(&w, "tensors", r->tensors, summed);
    put_known(&w, "bytes", r->bytes, summed);
    put_digest(&w, r->xxh3, summed);
    hr_json_put_u64(&w, "sent_tensors", r->sent_tensors);
    hr_json_put_u64(&w, "sent_bytes", r->sent_bytes);
    hr_json_put_u64(&w, "buckets", r->buckets);
    write_times(r, !failed && summed, &w);
    hr_json_key(&w, "engines");
    hr_json_array_begin(&w);
    for (size_t i = 0; i < r->n_engines; i++)
        write_engine(&r->engines[i], fleet->engines[i].serves, &w);
    hr_json_array_end(&w);
    hr_json_object_end(&w);
}

/* ---- making one ---- */

/* NULL without memory, which the last step notices. */
static const char *keep(receipt_box *box, const char *text, bool *failed) {
    char **slot = &box->strings[box->n_strings];
    *slot = strdup(text != NULL ? text : "");
    if (*slot == NULL)
        *failed = true;
    else
        box->n_strings++;
    return *slot;
}

static void fill_engine(receipt_box *box, const hr_fleet_engine *from, hr_push_engine *e,
                        bool *failed) {
    const hr_engine_receipt *r = &from->receipt;
    bool connected = box->receipt.transport[0] != '\0'; /* before, no engine was asked */
    *e = (hr_push_engine){
        .url = keep(box, from->url, failed),
        .state = from->known && connected ? hr_session_state_name(from->state) : "unknown",
        .instance = keep(box, r->instance, failed),
        .weight_version = keep(box, r->weight_version, failed),
        .base_mode = keep(box, r->base_mode, failed),
        .ranks = r->ranks,
        .tensors = r->tensors,
        .bytes = r->bytes,
        .has_xxh3 = r->has_xxh3,
        .receive_ns = r->receive_ns,
        .verify_ns = r->verify_ns,
        .build_ns = r->build_ns,
        .publish_ns = r->publish_ns,
        .retries = from->retries,
        .error = keep(box, from->error, failed),
        .received = keep(box, r->json, failed),
    };
    memcpy(e->xxh3, r->xxh3, HR_XXH3_SIZE);
}

hr_status hr_push_receipt_make(const hr_push_receipt *facts, const hr_fleet *fleet,
                               const hr_error *failure, hr_push_receipt **out, hr_error *err) {
    size_t n = fleet != NULL ? fleet->n : 0;
    bool failed = false;
    receipt_box *box = calloc(1, sizeof *box);
    if (box == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receipt");
    box->engines = calloc(n + 1, sizeof *box->engines);
    box->strings = calloc(3 + 6 * n, sizeof *box->strings);
    if (box->engines == NULL || box->strings == NULL) {
        failed = true;
        goto out;
    }
    box->receipt = *facts;
    box->receipt.session_id = keep(box, facts->session_id, &failed);
    box->receipt.transport = keep(box, facts->transport, &failed);
    box->receipt.weight_version = keep(box, facts->weight_version, &failed);
    for (size_t i = 0; i < n && !failed; i++)
        fill_engine(box, &fleet->engines[i], &box->engines[i], &failed);
    box->receipt.engines = box->engines;
    box->receipt.n_engines = n;
    if (!failed)
        write_receipt(&box->receipt, fleet, failure, &box->json);
out:
    if (failed || box->json.failed) {
        hr_push_receipt_free(&box->receipt);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a receipt");
    }
    *out = &box->receipt;
    return HR_OK;
}
