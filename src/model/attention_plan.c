/* The plan is the best of three, by the time each would take. */
#include "model/attention_plan.h"

#include "kernels/kernels.h"

#include <string.h>

enum {
    TASKS_PER_WORKER = 4, /* only tiles above a worker's share / this are cut */
    RUNS_PER_WORKER = 8,  /* runs of blocks are of about a worker's share / this */
    /* Measured (Zen 5): a position costs a fixed part, the same for up to all lines, and one for
     * each line (a query head of a row); a task costs as much as some positions. */
    POSITION_COST = 4,
    TASK_POSITIONS = 64
};

typedef enum cut { CUT_NOTHING, CUT_HEADS, CUT_BLOCKS } cut;

static uint32_t blocks_of(uint32_t n_positions) {
    return (n_positions + HR_ATTN_BLOCK - 1) / HR_ATTN_BLOCK;
}

void hr_attention_plan_bound(hr_attention_plan *plan, unsigned n_workers, uint32_t n_kv_heads,
                             uint32_t group, uint32_t max_tiles, uint32_t max_seqs,
                             uint32_t context_length, uint64_t slot_bytes, uint64_t max_bytes) {
    /* Tasks above a worker's share / TASKS_PER_WORKER number less than all shares together hold. */
    uint32_t max_cut = TASKS_PER_WORKER * n_workers / n_kv_heads;
    max_cut = max_cut < max_tiles ? max_cut : max_tiles;
    uint64_t of_sequence = (uint64_t)blocks_of(context_length) * group * n_kv_heads;
    *plan = (hr_attention_plan){.n_workers = n_workers, .n_kv_heads = n_kv_heads, .group = group};
    plan->max_splits = max_cut < max_seqs ? max_cut : max_seqs;
    plan->max_shares =
        max_tiles + max_cut * (group + 1) + RUNS_PER_WORKER * n_workers / n_kv_heads + 1;
    plan->max_slots = plan->max_splits * of_sequence;
    if (plan->max_slots > max_bytes / slot_bytes)
        plan->max_slots = max_bytes / slot_bytes;
    if (plan->max_splits > 0 && plan->max_slots < of_sequence)
        plan->max_slots = of_sequence;
}

static uint64_t cost_of(uint32_t n_positions, uint32_t n_lines) {
    return ((uint64_t)n_positions + TASK_POSITIONS) * (POSITION_COST + n_lines);
}

static uint64_t cost_of_tile(const hr_attention_plan *plan, const hr_row_tile *tile) {
    return cost_of(tile->n_seen, tile->n * plan->group);
}

static void add_share(hr_attention_plan *plan, hr_attention_share share) {
    HR_ASSERT(plan->n_shares < plan->max_shares);
    plan->shares[plan->n_shares++] = share;
}

static void add_whole(hr_attention_plan *plan, const hr_row_tile *tile) {
    add_share(plan, (hr_attention_share){.tile = *tile,
                                         .n_heads = plan->group,
                                         .split = HR_NOT_SPLIT,
                                         .cost = cost_of_tile(plan, tile)});
}

static void add_heads(hr_attention_plan *plan, const hr_row_tile *tile) {
    for (uint32_t head = 0; head < plan->group; head++)
        add_share(plan, (hr_attention_share){.tile = *tile,
                                             .first_head = head,
                                             .n_heads = 1,
                                             .split = HR_NOT_SPLIT,
                                             .cost = cost_of(tile->n_seen, tile->n)});
}

/* A row in near-equal runs of whole blocks, each of about `grain` at least. */
static void add_runs(hr_attention_plan *plan, const hr_row_tile *tile, uint64_t grain) {
    uint32_t n_blocks = blocks_of(tile->n_seen);
    uint64_t n_runs = cost_of_tile(plan, tile) / grain + 1;
    n_runs = n_runs < n_blocks ? n_runs : n_blocks;
    HR_ASSERT(plan->n_splits < plan->max_splits);
    for (uint32_t run = 0; run < n_runs; run++) {
        uint32_t first = (uint32_t)(n_blocks * (uint64_t)run / n_runs);
        uint32_t end = (uint32_t)(n_blocks * (uint64_t)(run + 1) / n_runs);
        uint32_t last = end < n_blocks ? end * HR_ATTN_BLOCK : tile->n_seen;
        add_share(plan,
                  (hr_attention_share){.tile = *tile,
                                       .n_heads = plan->group,
                                       .split = plan->n_splits,
                                       .first_block = first,
                                       .end_block = end,
                                       .cost = cost_of(last - first * HR_ATTN_BLOCK, plan->group)});
    }
    plan->splits[plan->n_splits++] =
        (hr_attention_split){(uint32_t)n_runs, n_blocks, plan->n_slots};
    plan->n_slots += (uint64_t)n_blocks * plan->group * plan->n_kv_heads;
}

static bool can_split(const hr_attention_plan *plan, const hr_row_tile *tile) {
    uint32_t n_blocks = blocks_of(tile->n_seen);
    return tile->n == 1 && n_blocks > 1 &&
           (uint64_t)n_blocks * plan->group * plan->n_kv_heads <= plan->max_slots - plan->n_slots;
}

/* Shell's sort: short, without allocation, and the input is nearly in order as a rule. */
static void sort_by_cost(hr_attention_share *shares, uint32_t n) {
    static const uint32_t gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof gaps[0]; g++)
        for (uint32_t i = gaps[g]; i < n; i++) {
            hr_attention_share share = shares[i];
            uint32_t at = i;
            for (; at >= gaps[g] && shares[at - gaps[g]].cost < share.cost; at -= gaps[g])
                shares[at] = shares[at - gaps[g]];
            shares[at] = share;
        }
}

/* Shares of all tiles; total: cost of all tasks when nothing is cut. */
static void share_out(hr_attention_plan *plan, const hr_row_tile *tiles, uint32_t n_tiles, cut how,
                      uint64_t total) {
    plan->n_shares = plan->n_splits = 0;
    plan->n_slots = 0;
    for (uint32_t i = 0; i < n_tiles; i++) {
        const hr_row_tile *tile = &tiles[i];
        bool large = cost_of_tile(plan, tile) * TASKS_PER_WORKER * plan->n_workers > total;
        if (how == CUT_BLOCKS && large && can_split(plan, tile))
            add_runs(plan, tile, total / (RUNS_PER_WORKER * plan->n_workers) + 1);
        else if (large && (how == CUT_HEADS || (how == CUT_BLOCKS && tile->n > 1)))
            add_heads(plan, tile);
        else
            add_whole(plan, tile);
    }
    sort_by_cost(plan->shares, plan->n_shares);
}

/* loads is a heap, least first, whose top was raised. */
static void sink_top(uint64_t *loads, unsigned n) {
    for (unsigned at = 0, child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && loads[child + 1] < loads[child])
            child++;
        if (loads[at] <= loads[child])
            return;
        uint64_t load = loads[at];
        loads[at] = loads[child];
        loads[child] = load;
    }
}

/* When the busiest worker is done, if each takes the next task as soon as it is free. */
static uint64_t time_of(const hr_attention_plan *plan) {
    uint64_t time = 0;
    memset(plan->loads, 0, plan->n_workers * sizeof *plan->loads);
    for (uint32_t i = 0; i < plan->n_shares; i++)
        for (uint32_t head = 0; head < plan->n_kv_heads; head++) {
            plan->loads[0] += plan->shares[i].cost;
            time = plan->loads[0] > time ? plan->loads[0] : time;
            sink_top(plan->loads, plan->n_workers);
        }
    return time;
}

/* Worth a cut: more than one part in 32. */
static bool less_by_far(uint64_t time, uint64_t than) {
    return time + than / 32 < than;
}

void hr_attention_plan_make(hr_attention_plan *plan, const hr_row_tile *tiles, uint32_t n_tiles) {
    uint64_t total = 0, best_time = UINT64_MAX;
    cut best = CUT_NOTHING, made = CUT_NOTHING;
    for (uint32_t i = 0; i < n_tiles; i++)
        total += cost_of_tile(plan, &tiles[i]) * plan->n_kv_heads;
    for (cut how = CUT_NOTHING;
         how <= CUT_BLOCKS && less_by_far(total / plan->n_workers, best_time); how++) {
        share_out(plan, tiles, n_tiles, how, total);
        made = how;
        uint64_t time = time_of(plan);
        if (less_by_far(time, best_time)) {
            best_time = time;
            best = how;
        }
    }
    if (made != best)
        share_out(plan, tiles, n_tiles, best, total);
}
