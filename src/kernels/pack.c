/* Packing of weights into panels, at load time and when a bucket arrives, and back for those who
 * read weights.
 *
 * A panel is a transpose of 4-byte words: a float, or a pair of bf16 that a dot product takes
 * together. It is done in blocks of 4 x 4 words, which keeps it at the speed of memory. Integer
 * operations only: the result does not depend on the floating-point mode of the thread. */
#include "kernels/kernels.h"

#include <emmintrin.h>
#include <string.h>

enum { WORD = 4, BLOCK = 4 };

static inline __m128i load(const char *from) {
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

static inline void store(char *to, __m128i words) {
    _mm_storeu_si128((__m128i *)(void *)to, words);
}

static inline void transpose(__m128i r[BLOCK]) {
    __m128i low01 = _mm_unpacklo_epi32(r[0], r[1]), high01 = _mm_unpackhi_epi32(r[0], r[1]);
    __m128i low23 = _mm_unpacklo_epi32(r[2], r[3]), high23 = _mm_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm_unpacklo_epi64(low01, low23);
    r[1] = _mm_unpackhi_epi64(low01, low23);
    r[2] = _mm_unpacklo_epi64(high01, high23);
    r[3] = _mm_unpackhi_epi64(high01, high23);
}

/* Four words of each of a panel's rows, which lie row_bytes apart, into four of its lines. */
static inline void pack_block(const char *src, size_t row_bytes, size_t n_rows, char *dst) {
    for (size_t first = 0; first < HR_PANEL; first += BLOCK) {
        __m128i r[BLOCK];
        for (size_t i = 0; i < BLOCK; i++)
            r[i] = first + i < n_rows ? load(src + (first + i) * row_bytes) : _mm_setzero_si128();
        transpose(r);
        for (size_t i = 0; i < BLOCK; i++)
            store(dst + (i * HR_PANEL + first) * WORD, r[i]);
    }
}

/* One panel of n_rows rows of row_bytes each; rows past them and bytes up to padded_bytes become
 * zero. */
static void pack_panel(const char *src, size_t row_bytes, size_t padded_bytes, size_t n_rows,
                       char *dst) {
    size_t blocks_end = row_bytes / (BLOCK * WORD) * (BLOCK * WORD), at = 0;
    if (n_rows == HR_PANEL) /* rows known to the compiler */
        for (; at < blocks_end; at += (size_t)BLOCK * WORD)
            pack_block(src + at, row_bytes, HR_PANEL, dst + at * HR_PANEL);
    for (; at < blocks_end; at += (size_t)BLOCK * WORD)
        pack_block(src + at, row_bytes, n_rows, dst + at * HR_PANEL);
    memset(dst + at * HR_PANEL, 0, (padded_bytes - at) * HR_PANEL);
    for (; at < row_bytes; at += WORD)
        for (size_t row = 0; row < n_rows; row++)
            memcpy(dst + at * HR_PANEL + row * WORD, src + row * row_bytes + at,
                   row_bytes - at < WORD ? row_bytes - at : WORD);
}

/* The n_rows rows of a panel, back to back. */
static void unpack_panel(const char *src, size_t row_bytes, size_t n_rows, char *dst) {
    size_t at = 0;
    for (; at + (size_t)BLOCK * WORD <= row_bytes; at += (size_t)BLOCK * WORD)
        for (size_t first = 0; first < n_rows; first += BLOCK) {
            __m128i r[BLOCK];
            for (size_t i = 0; i < BLOCK; i++)
                r[i] = load(src + at * HR_PANEL + (i * HR_PANEL + first) * WORD);
            transpose(r);
            for (size_t i = 0; i < BLOCK && first + i < n_rows; i++)
                store(dst + (first + i) * row_bytes + at, r[i]);
        }
    for (; at < row_bytes; at += WORD)
        for (size_t row = 0; row < n_rows; row++)
            memcpy(dst + row * row_bytes + at, src + at * HR_PANEL + row * WORD,
                   row_bytes - at < WORD ? row_bytes - at : WORD);
}

static size_t panel_rows(size_t row, size_t end) {
    return end - row < HR_PANEL ? end - row : HR_PANEL;
}

/* Rows [begin, end) of a matrix whose packed rows are padded_bytes long. */
static void pack_rows(const char *src, size_t row_bytes, size_t padded_bytes, size_t begin,
                      size_t end, char *dst) {
    for (size_t row = begin; row < end; row += HR_PANEL)
        pack_panel(src + row * row_bytes, row_bytes, padded_bytes, panel_rows(row, end),
                   dst + row * padded_bytes);
}

static void unpack_rows(const char *src, size_t row_bytes, size_t padded_bytes, size_t begin,
                        size_t end, char *dst) {
    for (size_t row = begin; row < end; row += HR_PANEL)
        unpack_panel(src + row * padded_bytes, row_bytes, panel_rows(row, end),
                     dst + (row - begin) * row_bytes);
}

void hr_pack_weight_bf16(const uint16_t *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                         void *dst) {
    (void)n;
    pack_rows((const char *)src, k * 2, hr_round_up(k, HR_LEAF) * 2, row_begin, row_end, dst);
}

void hr_pack_weight_f32(const float *src, size_t n, size_t k, size_t row_begin, size_t row_end,
                        void *dst) {
    (void)n;
    pack_rows((const char *)src, k * 4, hr_round_up(k, HR_LEAF) * 4, row_begin, row_end, dst);
}

void hr_unpack_weight(hr_compute c, const void *packed, size_t k, size_t row_begin, size_t row_end,
                      void *dst) {
    size_t element = hr_compute_bytes(c);
    unpack_rows(packed, k * element, hr_round_up(k, HR_LEAF) * element, row_begin, row_end, dst);
}

static size_t lora_ranks(size_t rank) {
    return hr_round_up(rank, HR_LORA_LEAF);
}

size_t hr_pack_lora_b_bytes(hr_compute c, size_t n, size_t rank) {
    return hr_round_up(n, HR_PANEL) * lora_ranks(rank) * hr_compute_bytes(c);
}

void hr_pack_lora_b_bf16(const uint16_t *src, size_t n, size_t rank, void *dst) {
    pack_rows((const char *)src, rank * 2, lora_ranks(rank) * 2, 0, n, dst);
}

void hr_pack_lora_b_f32(const float *src, size_t n, size_t rank, void *dst) {
    pack_rows((const char *)src, rank * 4, lora_ranks(rank) * 4, 0, n, dst);
}

void hr_unpack_lora_b(hr_compute c, const void *packed, size_t n, size_t rank, void *dst) {
    size_t element = hr_compute_bytes(c);
    unpack_rows(packed, rank * element, lora_ranks(rank) * element, 0, n, dst);
}
