/* A linear layer over the rows of a step: base weights for all, each adapter for its own run of
 * rows.
 *
 * An output element is one chain of leaves: those of the base, then those of the adapter
 * (docs/arithmetic.md). So who computes which panels, and in how many calls, changes no bit. */
#include "model/step.h"

#include "model/adapter.h"
#include "tensor/convert.h"

hr_panels hr_worker_panels(uint32_t n, unsigned worker, unsigned n_workers) {
    size_t begin, end;
    hr_split((n + 1) / 2, worker, n_workers, &begin, &end);
    begin *= 2;
    end *= 2;
    return (hr_panels){begin < n ? (uint32_t)begin : n, end < n ? (uint32_t)end : n};
}

static hr_panels common_panels(hr_panels a, hr_panels b) {
    hr_panels both = {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
    both.end = both.end > both.begin ? both.end : both.begin;
    return both;
}

static void base(const hr_step *step, unsigned worker, const hr_linear_args *args,
                 hr_panels panels) {
    if (panels.begin == panels.end)
        return;
    step->kernels->gemm[step->compute](&(hr_gemm_args){
        .x = args->x,
        .ldx = args->ldx,
        .m = args->m,
        .k = args->linear->k_padded,
        .w = args->linear->w,
        .panel_begin = panels.begin,
        .panel_end = panels.end,
        .y = args->y,
        .ldy = args->ldy,
        .scratch = step->ws->workers[worker].scratch,
    });
}

static void add_bias(const hr_step *step, const hr_linear_args *args, hr_panels panels) {
    if (args->linear->bias == NULL)
        return;
    size_t first = (size_t)panels.begin * HR_PANEL;
    for (uint32_t row = 0; row < args->m; row++)
        step->kernels->add(args->y + row * args->ldy + first, args->linear->bias + first,
                           (panels.end - panels.begin) * HR_PANEL);
}

/* The rows [begin, end) of x and y that are shrunk and expanded together, and where their h lies.
 */
typedef struct block {
    uint32_t begin, end;
    size_t ldh, part_stride; /* elements */
} block;

static size_t leaf_elements(hr_compute compute) {
    return compute == HR_COMPUTE_BF16 ? HR_LEAF : HR_LORA_LEAF;
}

static char *shrunk(const hr_step *step, const block *b, uint32_t part, uint32_t row,
                    uint32_t leaf) {
    size_t at =
        part * b->part_stride + (row - b->begin) * b->ldh + leaf * leaf_elements(step->compute);
    return step->ws->h + at * hr_compute_bytes(step->compute);
}

/* A segment's rows inside a block, in the numbering of x and y; n is 0 when there are none. */
static hr_segment rows_in(const hr_linear_args *args, const hr_segment *segment, const block *b) {
    uint32_t first = args->first_row + b->begin, last = args->first_row + b->end;
    uint32_t begin = segment->first > first ? segment->first : first;
    uint32_t end = segment->first + segment->n < last ? segment->first + segment->n : last;
    return (hr_segment){segment->lora, begin - args->first_row, end > begin ? end - begin : 0};
}

/* What an adapter's A's of a linear are together: one packed matrix (adapter.h). */
typedef struct joint_a {
    const char *w; /* NULL: the adapter has none of the linear's modules */
    uint32_t n_panels;
} joint_a;

static joint_a joint_a_of(const hr_lora *lora, const hr_linear *linear) {
    joint_a a = {0};
    for (uint32_t part = 0; part < linear->n_parts; part++) {
        const hr_lora_module *module = &lora->modules[linear->module + part];
        if (a.w == NULL)
            a.w = module->a;
        a.n_panels += module->n_leaves;
    }
    return a;
}

/* h = s * x A for some rows of one adapter and some panels of its joint A. */
static void shrink(const hr_step *step, unsigned worker, const hr_linear_args *args, const block *b,
                   const hr_lora *lora, hr_panels panels, uint32_t first, uint32_t n) {
    const hr_worker_buffers *mine = &step->ws->workers[worker];
    size_t ldy = (size_t)(panels.end - panels.begin) * HR_PANEL;
    step->kernels->gemm[step->compute](&(hr_gemm_args){
        .x = args->x + first * args->ldx * hr_compute_bytes(step->compute),
        .ldx = args->ldx,
        .m = n,
        .k = args->linear->k_padded,
        .w = joint_a_of(lora, args->linear).w +
             panels.begin * hr_packed_bytes(step->compute, HR_PANEL, args->linear->k),
        .panel_begin = 0,
        .panel_end = panels.end - panels.begin,
        .y = mine->shrink,
        .ldy = ldy,
        .scratch = mine->scratch,
    });
    uint32_t at = 0; /* the joint A's panel at which a part begins */
    for (uint32_t part = 0; part < args->linear->n_parts; part++) {
        const hr_lora_module *module = &lora->modules[args->linear->module + part];
        hr_panels own = common_panels(panels, (hr_panels){at, at + module->n_leaves});
        if (own.begin < own.end)
            step->kernels->lora_split[step->compute](
                mine->shrink + (size_t)(own.begin - panels.begin) * HR_PANEL, ldy, n,
                own.end - own.begin, module->scale, shrunk(step, b, part, first, own.begin - at),
                b->ldh);
        at += module->n_leaves;
    }
}
_Static_assert((int)HR_LORA_LEAF == (int)HR_PANEL, "an adapter's leaf is a panel of A");

/* The workers take the tasks (segment, some rows, some panels) in turn. Panels are shared only
 * where segments and rows are too few for all workers. */
static void shrink_block(const hr_step *step, unsigned worker, const hr_linear_args *args,
                         const block *b) {
    unsigned task = 0, n_workers = step->ws->n_workers;
    for (uint32_t s = 0; s < args->segments->n; s++) {
        hr_segment segment = rows_in(args, &args->segments->items[s], b);
        joint_a a = joint_a_of(segment.lora, args->linear);
        if (segment.n == 0 || a.w == NULL)
            continue;
        uint32_t tile = (segment.n + n_workers - 1) / n_workers;
        tile = tile < 4 ? 4 : tile > HR_SHRINK_ROWS ? HR_SHRINK_ROWS : tile;
        uint32_t tiles = (segment.n + tile - 1) / tile;
        uint32_t groups = n_workers / (tiles * args->segments->n);
        groups = groups < 1 ? 1 : groups > a.n_panels ? a.n_panels : groups;
        for (uint32_t i = 0; i < tiles * groups; i++, task++) {
            if (task % n_workers != worker)
                continue;
            size_t begin, end;
            hr_split(a.n_panels, i % groups, groups, &begin, &end);
            uint32_t done = i / groups * tile;
            uint32_t n = segment.n - done < tile ? segment.n - done : tile;
            shrink(step, worker, args, b, segment.lora, (hr_panels){(uint32_t)begin, (uint32_t)end},
                   segment.first + done, n);
        }
    }
}

static void expand_block(const hr_step *step, unsigned worker, const hr_linear_args *args,
                         const block *b, hr_panels range) {
    const hr_linear *linear = args->linear;
    for (uint32_t s = 0; s < args->segments->n; s++) {
        hr_segment segment = rows_in(args, &args->segments->items[s], b);
        for (uint32_t part = 0; part < linear->n_parts; part++) {
            const hr_lora_module *module = &segment.lora->modules[linear->module + part];
            uint32_t first_panel = linear->part_panel[part];
            hr_panels panels =
                common_panels(range, (hr_panels){first_panel, linear->part_panel[part + 1]});
            if (module->a == NULL || segment.n == 0 || panels.begin == panels.end)
                continue;
            step->kernels->lora_expand[step->compute](&(hr_lora_expand_args){
                .h = shrunk(step, b, part, segment.first, 0),
                .ldh = b->ldh,
                .m = segment.n,
                .n_leaves = module->n_leaves,
                .b = module->b,
                .panel_begin = panels.begin - first_panel,
                .panel_end = panels.end - first_panel,
                .y = args->y + segment.first * args->ldy + (size_t)first_panel * HR_PANEL,
                .ldy = args->ldy,
                .scratch = step->ws->workers[worker].scratch,
            });
        }
    }
}

/* Whether any row's adapter has one of this linear's modules; the same answer on every worker. */
static bool any_adapter(const hr_linear_args *args) {
    block all = {.begin = 0, .end = args->m};
    for (uint32_t s = 0; s < args->segments->n; s++) {
        hr_segment segment = rows_in(args, &args->segments->items[s], &all);
        for (uint32_t part = 0; part < args->linear->n_parts && segment.n > 0; part++)
            if (segment.lora->modules[args->linear->module + part].a != NULL)
                return true;
    }
    return false;
}

/* All rows at once, unless ranks are so large that h must be filled and used in turns. */
static void adapters(const hr_step *step, unsigned worker, const hr_linear_args *args,
                     const hr_panels *ranges, uint32_t n_ranges) {
    size_t ldh = args->segments->max_leaves * leaf_elements(step->compute);
    size_t most = step->ws->h_elements / (ldh * args->linear->n_parts);
    for (uint32_t begin = 0; begin < args->m;) {
        uint32_t n = args->m - begin < most ? args->m - begin : (uint32_t)most;
        block b = {begin, begin + n, ldh, n * ldh};
        if (begin > 0)
            hr_pool_barrier(step->pool, worker);
        shrink_block(step, worker, args, &b);
        hr_pool_barrier(step->pool, worker);
        for (uint32_t i = 0; i < n_ranges; i++)
            expand_block(step, worker, args, &b, ranges[i]);
        begin += n;
    }
}

void hr_linear_apply(const hr_step *step, unsigned worker, const hr_linear_args *args,
                     const hr_panels *ranges, uint32_t n_ranges) {
    for (uint32_t i = 0; i < n_ranges; i++)
        base(step, worker, args, ranges[i]);
    if (any_adapter(args))
        adapters(step, worker, args, ranges, n_ranges);
    for (uint32_t i = 0; i < n_ranges; i++)
        add_bias(step, args, ranges[i]);
}

void hr_lora_embed(const hr_step *step, unsigned worker, const hr_lora *lora, uint32_t token,
                   float *row) {
    const hr_lora_module *module = &lora->modules[step->model->embed_module];
    if (module->a == NULL)
        return;
    const hr_worker_buffers *mine = &step->ws->workers[worker];
    size_t rank = (size_t)module->n_leaves * HR_LORA_LEAF;
    hr_dtype dtype = step->compute == HR_COMPUTE_BF16 ? HR_DTYPE_BF16 : HR_DTYPE_F32;
    /* x is one-hot, so x A is a row of the table. */
    const char *from = module->a + token * rank * hr_compute_bytes(step->compute);
    float *h = mine->shrink, *split = h + rank;
    hr_convert(h, HR_DTYPE_F32, from, dtype, rank, NULL);
    step->kernels->lora_split[step->compute](h, rank, 1, module->n_leaves, module->scale, split,
                                             module->n_leaves * leaf_elements(step->compute));
    step->kernels->lora_expand[step->compute](&(hr_lora_expand_args){
        .h = split,
        .ldh = module->n_leaves * leaf_elements(step->compute),
        .m = 1,
        .n_leaves = module->n_leaves,
        .b = module->b,
        .panel_begin = 0,
        .panel_end = step->model->layers[0].o.n_panels, /* those of the hidden size */
        .y = row,
        .ldy = step->ws->ld_residual,
        .scratch = mine->scratch,
    });
}
