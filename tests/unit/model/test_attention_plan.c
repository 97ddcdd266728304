/* The plan of a step's attention: every query head of every row meets every block exactly once,
 * whatever is cut; what is cut pays; what is small or well divided stays whole. */
#include "model/attention_plan.h"

#include "kernels/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

enum { MAX_TILES = 80, CONTEXT = 20000, SLOT_BYTES = 320 };

static hr_attention_plan plan_for(unsigned n_workers, uint32_t kv_heads, uint32_t group,
                                  uint64_t max_bytes) {
    hr_attention_plan plan;
    hr_attention_plan_bound(&plan, n_workers, kv_heads, group, MAX_TILES, MAX_TILES, CONTEXT,
                            SLOT_BYTES, max_bytes);
    /* Exactly as long as promised, so that a sanitizer sees a step too far. */
    plan.shares = calloc(plan.max_shares, sizeof *plan.shares);
    plan.splits = calloc(plan.max_splits + 1, sizeof *plan.splits);
    plan.loads = calloc(n_workers, sizeof *plan.loads);
    return plan;
}

static void release(hr_attention_plan *plan) {
    free(plan->shares);
    free(plan->splits);
    free(plan->loads);
}

static hr_row_tile row_at(uint32_t seq, uint32_t n_seen) {
    return (hr_row_tile){.seq = seq, .first = 0, .n = 1, .n_seen = n_seen};
}

static uint32_t blocks_of(uint32_t n_seen) {
    return (n_seen + HR_ATTN_BLOCK - 1) / HR_ATTN_BLOCK;
}

/* Blocks that shares give each head of tile i, of which there must be each once. */
static void expect_tile_covered(const hr_attention_plan *plan, const hr_row_tile *tile) {
    static unsigned char met[64][CONTEXT / HR_ATTN_BLOCK + 1];
    uint32_t n_blocks = blocks_of(tile->n_seen);
    memset(met, 0, sizeof met);
    for (uint32_t i = 0; i < plan->n_shares; i++) {
        const hr_attention_share *s = &plan->shares[i];
        if (s->tile.seq != tile->seq)
            continue;
        assert_memory_equal(&s->tile, tile, sizeof *tile);
        bool whole = s->split == HR_NOT_SPLIT;
        assert_true(whole || (s->first_block < s->end_block && s->end_block <= n_blocks));
        for (uint32_t head = s->first_head; head < s->first_head + s->n_heads; head++)
            for (uint32_t b = whole ? 0 : s->first_block; b < (whole ? n_blocks : s->end_block);
                 b++)
                met[head][b]++;
    }
    for (uint32_t head = 0; head < plan->group; head++)
        for (uint32_t b = 0; b < n_blocks; b++)
            assert_int_equal(met[head][b], 1);
}

static void expect_splits_sound(const hr_attention_plan *plan) {
    uint64_t next_slot = 0;
    for (uint32_t split = 0; split < plan->n_splits; split++) {
        uint32_t runs = 0;
        for (uint32_t i = 0; i < plan->n_shares; i++) {
            const hr_attention_share *s = &plan->shares[i];
            if (s->split != split)
                continue;
            runs++;
            assert_int_equal(s->tile.n, 1);
            assert_int_equal(s->n_heads, plan->group);
            assert_int_equal(plan->splits[split].n_blocks, blocks_of(s->tile.n_seen));
        }
        assert_int_equal(plan->splits[split].n_runs, runs);
        assert_int_equal(plan->splits[split].first_slot, next_slot);
        next_slot += (uint64_t)plan->splits[split].n_blocks * plan->group * plan->n_kv_heads;
    }
    assert_true(next_slot <= plan->max_slots);
    for (uint32_t i = 1; i < plan->n_shares; i++)
        assert_true(plan->shares[i - 1].cost >= plan->shares[i].cost);
}

static uint32_t next_random(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}

static void every_head_meets_every_block_once(void **state) {
    (void)state;
    uint64_t random = 1;
    uint32_t n_split = 0, n_whole_long = 0;
    for (int round = 0; round < 3000; round++) {
        hr_attention_plan plan =
            plan_for(1 + next_random(&random, 9), 1 + next_random(&random, 8),
                     1 + next_random(&random, 7), round % 3 == 0 ? 1 : 1 << 24);
        hr_row_tile tiles[MAX_TILES];
        uint32_t n = next_random(&random, round % 2 == 0 ? 5 : MAX_TILES + 1);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t rows = next_random(&random, 4) == 0 ? 1 + next_random(&random, 32) : 1;
            uint32_t longest = next_random(&random, 3) == 0 ? CONTEXT : 600;
            tiles[i] = (hr_row_tile){i, 0, rows, 32 + next_random(&random, longest - 31)};
        }
        hr_attention_plan_make(&plan, tiles, n);
        for (uint32_t i = 0; i < n; i++)
            expect_tile_covered(&plan, &tiles[i]);
        expect_splits_sound(&plan);
        n_split += plan.n_splits;
        n_whole_long += n > 0 && plan.n_splits == 0;
        release(&plan);
    }
    assert_true(n_split > 300 && n_whole_long > 300); /* both kinds were met */
}

/* Tasks handed to whoever is free, as workers take them: the busiest worker's load against an equal
 * division, in percent. */
static uint64_t busiest_percent(const hr_attention_plan *plan) {
    uint64_t load[64] = {0}, sum = 0, most = 0;
    for (uint32_t task = 0; task < plan->n_shares * plan->n_kv_heads; task++) {
        unsigned free_one = 0;
        for (unsigned w = 1; w < plan->n_workers; w++)
            free_one = load[w] < load[free_one] ? w : free_one;
        load[free_one] += plan->shares[task / plan->n_kv_heads].cost;
        sum += plan->shares[task / plan->n_kv_heads].cost;
        most = load[free_one] > most ? load[free_one] : most;
    }
    return most * 100 * plan->n_workers / sum;
}

static void long_rows_are_divided_evenly(void **state) {
    (void)state;
    const struct {
        unsigned workers;
        uint32_t kv_heads, n, seen[3];
    } cases[] = {
        {2, 3, 1, {4001}},       {2, 3, 1, {8001}},     {2, 3, 1, {1001}},
        {4, 3, 1, {8001}},       {3, 8, 1, {16000}},    {16, 8, 1, {9000}},
        {2, 3, 2, {8001, 4001}}, {2, 1, 2, {65, 9000}}, {5, 2, 3, {80, 900, 12000}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hr_attention_plan plan = plan_for(cases[i].workers, cases[i].kv_heads, 3, 1 << 24);
        hr_row_tile tiles[3];
        for (uint32_t s = 0; s < cases[i].n; s++)
            tiles[s] = row_at(s, cases[i].seen[s]);
        hr_attention_plan_make(&plan, tiles, cases[i].n);
        assert_true(plan.n_splits > 0);
        assert_in_range(busiest_percent(&plan), 100, 115);
        release(&plan);
    }
}

static uint32_t splits_of(unsigned workers, uint32_t kv_heads, uint32_t n, uint32_t n_seen) {
    hr_attention_plan plan = plan_for(workers, kv_heads, 3, 1 << 24);
    hr_row_tile tiles[MAX_TILES];
    for (uint32_t i = 0; i < n; i++)
        tiles[i] = row_at(i, n_seen);
    hr_attention_plan_make(&plan, tiles, n);
    uint32_t n_splits = plan.n_splits;
    release(&plan);
    return n_splits;
}

static void rows_are_split_only_where_it_pays(void **state) {
    (void)state;
    assert_int_equal(splits_of(2, 3, 1, 4000), 1);
    assert_int_equal(splits_of(1, 3, 1, 4000), 0);  /* nobody to share with */
    assert_int_equal(splits_of(2, 3, 1, 512), 0);   /* one block */
    assert_int_equal(splits_of(2, 3, 1, 513), 0);   /* nothing worth sharing in the second */
    assert_int_equal(splits_of(2, 2, 1, 4000), 0);  /* a head each */
    assert_int_equal(splits_of(2, 3, 2, 4000), 0);  /* three tasks each */
    assert_int_equal(splits_of(2, 3, 16, 4000), 0); /* many tasks */
}

/* A row that does not fit into the slots stays whole. */
static void few_slots_bound_the_splits(void **state) {
    (void)state;
    const uint64_t max_bytes[] = {1 << 24, 1};
    for (uint32_t i = 0; i < 2; i++) {
        hr_attention_plan plan = plan_for(4, 1, 3, max_bytes[i]);
        hr_row_tile tiles[] = {row_at(0, CONTEXT), row_at(1, 8000)};
        hr_attention_plan_make(&plan, tiles, 2);
        assert_int_equal(plan.n_splits, i == 0 ? 2 : 1);
        expect_splits_sound(&plan);
        expect_tile_covered(&plan, &tiles[1]);
        release(&plan);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_meets_every_block_once),
        cmocka_unit_test(long_rows_are_divided_evenly),
        cmocka_unit_test(rows_are_split_only_where_it_pays),
        cmocka_unit_test(few_slots_bound_the_splits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
