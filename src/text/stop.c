/* Stop strings: one prefix automaton (Knuth-Morris-Pratt) per string, all fed byte by byte. The
 * text held back is the longest beginning of any string that the text so far ends with, or what an
 * expression may still match. */
#include "text/stop.h"

#include "text/stop_regex.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct pattern {
    const char *text;
    const uint32_t *border; /* border[i]: longest proper prefix of text that text[0..i] ends with */
    size_t len;
    size_t state; /* bytes of text that the stream ends with */
} pattern;

struct hr_stop {
    pattern *patterns;
    size_t count;
    char *bytes;
    uint32_t *borders;
    hr_stop_regex *regex; /* NULL: none */
    hr_buf held;          /* with expressions: some text that is out already, then what is held */
    size_t n_out;         /* bytes of held that are out */
    bool cut;             /* held does not begin where the stream did */
};

static void fill_border(const char *text, size_t len, uint32_t *border) {
    uint32_t k = 0;
    border[0] = 0;
    for (size_t i = 1; i < len; i++) {
        while (k > 0 && text[i] != text[k])
            k = border[k - 1];
        k += text[i] == text[k];
        border[i] = k;
    }
}

static hr_status total_length(const char *const *strings, size_t count, size_t *total,
                              hr_error *err) {
    if (count > HR_STOP_MAX_STRINGS)
        return hr_fail(err, HR_ERR_LIMIT, "%zu stop strings: at most %d are allowed", count,
                       HR_STOP_MAX_STRINGS);
    *total = 0;
    for (size_t i = 0; i < count; i++) {
        size_t len = strlen(strings[i]);
        if (len == 0)
            return hr_fail(err, HR_ERR_INVALID, "stop string %zu is empty; leave it out", i);
        *total += len;
        if (*total > HR_STOP_MAX_BYTES)
            return hr_fail(err, HR_ERR_LIMIT, "stop strings of more than %d bytes in all",
                           HR_STOP_MAX_BYTES);
    }
    return HR_OK;
}

hr_status hr_stop_create(const char *const *strings, size_t count, hr_stop **out, hr_error *err) {
    size_t total = 0, at = 0;
    HR_TRY(total_length(strings, count, &total, err));
    hr_stop *stop = calloc(1, sizeof *stop);
    if (stop != NULL) {
        stop->count = count;
        stop->patterns = calloc(count + 1, sizeof *stop->patterns);
        stop->bytes = malloc(total + 1);
        stop->borders = malloc((total + 1) * sizeof *stop->borders);
    }
    if (stop == NULL || stop->patterns == NULL || stop->bytes == NULL || stop->borders == NULL) {
        hr_stop_free(stop);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for %zu stop strings", count);
    }
    for (size_t i = 0; i < count; i++) {
        size_t len = strlen(strings[i]);
        memcpy(stop->bytes + at, strings[i], len);
        fill_border(stop->bytes + at, len, stop->borders + at);
        stop->patterns[i] = (pattern){stop->bytes + at, stop->borders + at, len, 0};
        at += len;
    }
    *out = stop;
    return HR_OK;
}

void hr_stop_free(hr_stop *stop) {
    if (stop == NULL)
        return;
    free(stop->patterns);
    free(stop->bytes);
    free(stop->borders);
    hr_stop_regex_free(stop->regex);
    hr_buf_free(&stop->held);
    free(stop);
}

hr_status hr_stop_add_regexes(hr_stop *stop, const char *const *patterns, size_t count,
                              hr_error *err) {
    return hr_stop_regex_create(patterns, count, &stop->regex, err);
}

/* Feeds one byte to every automaton; the longest string that ends here, -1 for none. *open becomes
 * the length of the longest beginning of a string that the text now ends with. */
static int feed(hr_stop *stop, char byte, size_t *open) {
    int hit = -1;
    *open = 0;
    for (size_t i = 0; i < stop->count; i++) {
        pattern *p = &stop->patterns[i];
        while (p->state > 0 && p->text[p->state] != byte)
            p->state = p->border[p->state - 1];
        p->state += p->text[p->state] == byte;
        if (p->state == p->len && (hit < 0 || p->len > stop->patterns[hit].len))
            hit = (int)i;
        *open = p->state > *open ? p->state : *open;
    }
    return hit;
}

static size_t back_to_character(const char *text, size_t at) {
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80)
        at--;
    return at;
}

/* Lets out what is held up to byte `to` of held and forgets what nobody can look back at. */
static void let_out(hr_stop *stop, size_t to, hr_buf *out) {
    if (to <= stop->n_out)
        return;
    hr_buf_append(out, stop->held.data + stop->n_out, to - stop->n_out);
    size_t keep = stop->regex != NULL ? HR_STOP_REGEX_CONTEXT : 0;
    size_t drop = to > keep ? to - keep : 0;
    if (keep > 0 && drop > 0)
        drop = back_to_character(stop->held.data, drop);
    stop->held.len -= drop;
    memmove(stop->held.data, stop->held.data + drop, stop->held.len);
    stop->n_out = to - drop;
    stop->cut |= drop > 0;
}

/* The expressions over what is held; *hit is changed when one ends before the string found there.
 */
static hr_status search(hr_stop *stop, int *hit, size_t *start, size_t *end, size_t *open_at,
                        hr_error *err) {
    hr_stop_regex_hit found;
    const char *text = stop->held.data != NULL ? stop->held.data : "";
    HR_TRY(hr_stop_regex_search(stop->regex, text, stop->held.len, stop->n_out, !stop->cut, &found,
                                err));
    if (found.which >= 0 && (*hit < 0 || found.end < *end)) {
        *hit = (int)stop->count + found.which;
        *start = found.start;
        *end = found.end;
        return HR_OK;
    }
    size_t oldest = stop->held.len > HR_STOP_REGEX_WINDOW + stop->n_out
                        ? back_to_character(text, stop->held.len - HR_STOP_REGEX_WINDOW)
                        : stop->n_out;
    size_t open = found.open > oldest ? found.open : oldest;
    *open_at = open < *open_at ? open : *open_at;
    return HR_OK;
}

hr_status hr_stop_push(hr_stop *stop, const char *text, size_t len, bool keep, hr_buf *out,
                       int *matched, hr_error *err) {
    int hit = -1;
    size_t open = 0, used = 0;
    for (size_t i = 0; i < stop->count; i++)
        open = stop->patterns[i].state > open ? stop->patterns[i].state : open;
    while (used < len && hit < 0)
        hit = feed(stop, text[used++], &open);
    hr_buf_append(&stop->held, text, used);
    if (stop->held.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to look for stop strings");
    size_t end = stop->held.len, open_at = end - open;
    size_t start = hit >= 0 ? end - stop->patterns[hit].len : end;
    if (stop->regex != NULL && used > 0)
        HR_TRY(search(stop, &hit, &start, &end, &open_at, err));
    if (stop->held.len > 0)
        let_out(stop, hit < 0 ? open_at : keep ? end : start, out);
    if (out->failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to look for stop strings");
    *matched = hit;
    return HR_OK;
}

hr_status hr_stop_flush(hr_stop *stop, hr_buf *out, hr_error *err) {
    for (size_t i = 0; i < stop->count; i++)
        stop->patterns[i].state = 0;
    let_out(stop, stop->held.len, out);
    return out->failed ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory to look for stop strings")
                       : HR_OK;
}
