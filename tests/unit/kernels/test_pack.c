/* Packing puts every element where the layout says, zeros where there is none, from any address;
 * unpacking is the way back. */
#include "kernels/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static const size_t rows_of[] = {1, 3, 4, 15, 16, 17, 31, 48, 50};
static const size_t columns_of[] = {1, 2, 3, 7, 8, 9, 15, 16, 31, 32, 33, 70, 129};
enum {
    N_ROWS = sizeof rows_of / sizeof *rows_of,
    N_COLUMNS = sizeof columns_of / sizeof *columns_of
};

/* Of element (row, column) in the packed matrix: panels of 16 rows; words of one float or two bf16,
 * a panel's 16 words of one place side by side. */
static size_t packed_at(hr_compute c, size_t padded, size_t row, size_t column) {
    size_t element = hr_compute_bytes(c), in_word = 4 / element;
    size_t panel = row / HR_PANEL * HR_PANEL * padded * element;
    size_t word = column / in_word * HR_PANEL + row % HR_PANEL;
    return panel + word * 4 + column % in_word * element;
}

typedef struct matrix {
    char *memory, *dense; /* dense: at an odd address */
    size_t n, k, element;
} matrix;

static matrix make(hr_compute c, size_t n, size_t k) {
    matrix m = {.n = n, .k = k, .element = hr_compute_bytes(c)};
    size_t bytes = n * k * m.element;
    m.memory = malloc(bytes + 1);
    m.dense = m.memory + 1;
    for (size_t i = 0; i < bytes; i++)
        m.dense[i] = (char)(i * 31 % 255 + 1); /* never zero */
    return m;
}

/* Every element at its place and zeros elsewhere: as many bytes differ from zero as went in. */
static void expect_packed(hr_compute c, const matrix *m, size_t padded, const char *packed) {
    size_t filled = 0, total = hr_round_up(m->n, HR_PANEL) * padded * m->element;
    for (size_t row = 0; row < m->n; row++)
        for (size_t column = 0; column < m->k; column++)
            assert_memory_equal(packed + packed_at(c, padded, row, column),
                                m->dense + (row * m->k + column) * m->element, m->element);
    for (size_t i = 0; i < total; i++)
        filled += packed[i] != 0;
    assert_int_equal(filled, m->n * m->k * m->element);
}

static const void *source(const matrix *m) {
    return m->dense;
}

static void check_weight(hr_compute c, const matrix *m) {
    size_t bytes = hr_packed_bytes(c, m->n, m->k);
    char *packed = malloc(bytes), *back = malloc(m->n * m->k * m->element);
    memset(packed, 0x55, bytes);
    if (c == HR_COMPUTE_BF16)
        hr_pack_weight_bf16(source(m), m->n, m->k, 0, m->n, packed);
    else
        hr_pack_weight_f32(source(m), m->n, m->k, 0, m->n, packed);
    expect_packed(c, m, hr_round_up(m->k, HR_LEAF), packed);
    for (size_t begin = 0; begin < m->n; begin += HR_PANEL) { /* from any panel on */
        hr_unpack_weight(c, packed, m->k, begin, m->n, back);
        assert_memory_equal(back, m->dense + begin * m->k * m->element,
                            (m->n - begin) * m->k * m->element);
    }
    free(packed);
    free(back);
}

static void check_lora_b(hr_compute c, const matrix *m) {
    size_t bytes = hr_pack_lora_b_bytes(c, m->n, m->k);
    char *packed = malloc(bytes), *back = malloc(m->n * m->k * m->element);
    memset(packed, 0x55, bytes);
    if (c == HR_COMPUTE_BF16)
        hr_pack_lora_b_bf16(source(m), m->n, m->k, packed);
    else
        hr_pack_lora_b_f32(source(m), m->n, m->k, packed);
    expect_packed(c, m, hr_round_up(m->k, HR_LORA_LEAF), packed);
    hr_unpack_lora_b(c, packed, m->n, m->k, back);
    assert_memory_equal(back, m->dense, m->n * m->k * m->element);
    free(packed);
    free(back);
}

static void for_all_sizes(void (*check)(hr_compute c, const matrix *m)) {
    for (int c = 0; c < HR_COMPUTE_COUNT; c++)
        for (size_t n = 0; n < N_ROWS; n++)
            for (size_t k = 0; k < N_COLUMNS; k++) {
                matrix m = make((hr_compute)c, rows_of[n], columns_of[k]);
                check((hr_compute)c, &m);
                free(m.memory);
            }
}

static void weights_are_packed_by_panels_and_come_back(void **state) {
    (void)state;
    for_all_sizes(check_weight);
}

static void lora_b_is_packed_by_panels_and_comes_back(void **state) {
    (void)state;
    for_all_sizes(check_lora_b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_packed_by_panels_and_come_back),
        cmocka_unit_test(lora_b_is_packed_by_panels_and_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
