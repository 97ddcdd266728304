/* Who computes what of a step's attention: tasks of near-equal cost for the workers.
 *
 * A tile (some rows of one sequence) and a kv head make a task, unless that leaves workers idle:
 * few or very long sequences. Then a long tile is cut, either by its query heads or, when it is one
 * row, by blocks of positions, whose results are merged afterwards. No cut changes a bit
 * (docs/arithmetic.md, Attention); a cut by heads reads the cache once per head, one by blocks
 * costs a merge. */
#ifndef HR_MODEL_ATTENTION_PLAN_H
#define HR_MODEL_ATTENTION_PLAN_H

#include "base/error.h"

#include <stdint.h>

/* Some rows of one sequence. */
typedef struct hr_row_tile {
    uint32_t seq, first, n; /* first: row within the sequence */
    uint32_t n_seen;        /* positions that the last row sees */
} hr_row_tile;

enum { HR_NOT_SPLIT = UINT32_MAX };

/* A tile or a cut of it; with each kv head it makes a task. */
typedef struct hr_attention_share {
    hr_row_tile tile;
    uint32_t first_head, n_heads;    /* of the query heads that share the kv head */
    uint32_t split;                  /* which split it is a run of, or HR_NOT_SPLIT */
    uint32_t first_block, end_block; /* of a run */
    uint64_t cost;                   /* in no unit; of one task */
} hr_attention_share;

/* A row whose blocks are shared by several tasks for each kv head. */
typedef struct hr_attention_split {
    uint32_t n_runs, n_blocks;
    uint64_t first_slot; /* slots [kv head][block][query head of it]: one partial result each */
} hr_attention_split;

typedef struct hr_attention_plan {
    unsigned n_workers;
    uint32_t n_kv_heads, group;      /* group: query heads of a kv head */
    uint32_t max_shares, max_splits; /* lengths of the arrays below, */
    uint64_t max_slots;              /* and slots that the splits of a step may take */
    hr_attention_share *shares;      /* costliest first */
    hr_attention_split *splits;
    uint64_t *loads; /* [n_workers], for the planning */
    uint32_t n_shares, n_splits;
    uint64_t n_slots;
} hr_attention_plan;

/* Sets everything but the arrays, for steps of up to max_tiles tiles and max_seqs sequences of up
 * to context_length positions. max_bytes bounds the slots, of slot_bytes each, but one whole
 * sequence fits always. */
void hr_attention_plan_bound(hr_attention_plan *plan, unsigned n_workers, uint32_t n_kv_heads,
                             uint32_t group, uint32_t max_tiles, uint32_t max_seqs,
                             uint32_t context_length, uint64_t slot_bytes, uint64_t max_bytes);

/* Fills shares and splits for the tiles of a step. Allocates nothing. */
void hr_attention_plan_make(hr_attention_plan *plan, const hr_row_tile *tiles, uint32_t n_tiles);

#endif
