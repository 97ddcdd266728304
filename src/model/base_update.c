/* A base update: which weights came, where they are packed to, and what of the shadow is stale.
 *
 * The shadow is the arena that was live before the last exchange, so most of it is old. What an
 * update did not bring is copied from the live weights when it is sealed, and only where the shadow
 * does not hold it already: an update of one tensor costs that tensor, twice. */
#include "model/base_update.h"

#include "model/layout.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/finite.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE_BYTES = 4096 };

/* What came of one weight. A call claims its weights first, so that a failure can undo it whole. */
typedef enum weight_state { NOT_THERE, CLAIMED, WRITTEN } weight_state;

struct hr_base_update {
    hr_model *model;
    bool to_shadow, sealed;
    bool touched_live; /* in place: some live weight is new */
    char *arena;       /* written to */
    weight_state *states;
    void *scratch;
    bool head_came; /* the head of a tied model; head: digest of its compute values */
    uint8_t head[HR_XXH3_SIZE];
};

/* ---- begin ---- */

static void fault_in(char *pages, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE_BYTES)
        ((volatile char *)pages)[at] = 0;
}

static hr_status ready_shadow(hr_model *model, hr_error *err) {
    if (model->shadow.arena != NULL)
        return hr_guard_wait_shadow(model->guard, err);
    HR_TRY(hr_weights_create(model, "the second copy of the weights, for updates,", &model->shadow,
                             err));
    fault_in(model->shadow.arena, model->shadow.arena_bytes);
    memset(model->shadow_fresh, 0, model->places.n * sizeof *model->shadow_fresh);
    return HR_OK;
}

static void update_free(hr_base_update *update) {
    atomic_store(&update->model->updating, false);
    free(update->states);
    free(update->scratch);
    free(update);
}

hr_status hr_base_update_begin(hr_model *model, bool shadow, hr_base_update **out, hr_error *err) {
    if (atomic_exchange(&model->updating, true))
        return hr_fail(err, HR_ERR_BUSY,
                       "an update of the base weights is under way; end or abort it first");
    hr_base_update *update = calloc(1, sizeof *update);
    if (update == NULL) {
        atomic_store(&model->updating, false);
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an update of the base weights");
    }
    update->model = model;
    update->to_shadow = shadow;
    update->states = calloc(model->places.n, sizeof *update->states);
    update->scratch = aligned_alloc(64, hr_place_scratch_bytes(&model->places));
    hr_status status = HR_OK;
    if (update->states == NULL || update->scratch == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for an update of the base weights");
    else if (shadow)
        status = ready_shadow(model, err);
    if (status != HR_OK) {
        update_free(update);
        return status;
    }
    update->arena = shadow ? model->shadow.arena : model->arena;
    *out = update;
    return HR_OK;
}

/* ---- what a tensor must be ---- */

static hr_status check_form(const hr_model *model, const hr_weight_name *name,
                            const hr_tensor *tensor, hr_error *err) {
    uint64_t want[2], elements = 1;
    char came[128], wanted[128];
    uint32_t ndim = hr_weight_shape(&model->places, name, want);
    hr_shape_format(tensor->shape, tensor->ndim, came, sizeof came);
    hr_shape_format(want, ndim, wanted, sizeof wanted);
    if (!hr_dtype_is_weight(tensor->dtype))
        return hr_fail(err, HR_ERR_DTYPE,
                       "tensor %.160s: wanted BF16, F16 or F32 %s, came %s %s; %s", tensor->name,
                       wanted, hr_dtype_name(tensor->dtype), came,
                       tensor->dtype == HR_DTYPE_F64
                           ? "cast it with .float()"
                           : "quantised weights are not supported: send them dequantised");
    if (tensor->ndim != ndim || memcmp(tensor->shape, want, ndim * sizeof want[0]) != 0)
        return hr_fail(err, HR_ERR_SHAPE, "tensor %.160s: wanted %s, came %s (%s)", tensor->name,
                       wanted, came, hr_dtype_name(tensor->dtype));
    for (uint32_t i = 0; i < ndim; i++)
        elements *= want[i];
    if (tensor->bytes != elements * hr_dtype_size(tensor->dtype))
        return hr_fail(err, HR_ERR_INVALID, "tensor %.160s: %s %s is %llu bytes, came %llu",
                       tensor->name, hr_dtype_name(tensor->dtype), wanted,
                       (unsigned long long)(elements * hr_dtype_size(tensor->dtype)),
                       (unsigned long long)tensor->bytes);
    return HR_OK;
}

static hr_status came_twice(const hr_tensor *tensor, const char *weight, hr_error *err) {
    return hr_fail(err, HR_ERR_INVALID, "tensor %.160s: %.160s came twice in one update",
                   tensor->name, weight);
}

static hr_status claim_places(hr_base_update *update, const hr_weight_name *name,
                              const hr_tensor *tensor, hr_error *err) {
    for (uint32_t i = 0; i < name->n_places; i++)
        if (update->states[name->places[i]] != NOT_THERE)
            return came_twice(tensor, update->model->places.items[name->places[i]].name, err);
    for (uint32_t i = 0; i < name->n_places; i++)
        update->states[name->places[i]] = CLAIMED;
    return HR_OK;
}

/* One tensor of a call that has claimed its places. */
typedef struct arrival {
    const hr_tensor *tensor;
    const hr_weight_name *name;
} arrival;

/* The arrivals of a call; head and embed: those of a tied model, or NULL. */
typedef struct arrivals {
    arrival *items;
    size_t n;
    const hr_tensor *head, *embed;
} arrivals;

static hr_status claim(hr_base_update *update, const hr_tensor *tensor, arrivals *all,
                       hr_error *err) {
    const hr_places *places = &update->model->places;
    const hr_weight_name *name = hr_places_find(places, tensor->name);
    if (name == NULL && hr_places_ignored(tensor->name))
        return HR_OK;
    if (name == NULL)
        return hr_fail(err, HR_ERR_NOT_FOUND,
                       "tensor %.160s is no weight of this model (%s); names are those of its "
                       "checkpoint, such as %s",
                       tensor->name, update->model->architecture->name, places->items[0].name);
    HR_TRY(check_form(update->model, name, tensor, err));
    if (name->tied_head) {
        if (update->head_came || all->head != NULL)
            return came_twice(tensor, name->text, err);
        all->head = tensor;
        return HR_OK;
    }
    HR_TRY(claim_places(update, name, tensor, err));
    if (places->tied_head[0] != '\0' && name->places[0] == 0)
        all->embed = tensor;
    all->items[all->n++] = (arrival){tensor, name};
    return HR_OK;
}

static hr_status claim_all(hr_base_update *update, const hr_tensor *tensors, size_t n,
                           arrivals *all, hr_error *err) {
    for (size_t i = 0; i < n; i++)
        HR_TRY(claim(update, &tensors[i], all, err));
    return HR_OK;
}

/* ---- the head of a tied model ---- */

/* Of the values as they will be held. */
static hr_status digest_tensor(const hr_base_update *update, const hr_tensor *tensor,
                               uint8_t out[HR_XXH3_SIZE], hr_error *err) {
    hr_dtype dtype = hr_compute_dtype(update->model->info.compute);
    hr_xxh3_stream *stream = hr_xxh3_stream_create();
    if (stream == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory to compare %.160s", tensor->name);
    size_t row = tensor->shape[1];
    for (uint64_t i = 0; i < tensor->shape[0]; i++) {
        const char *from = (const char *)tensor->data + i * row * hr_dtype_size(tensor->dtype);
        hr_convert(update->scratch, dtype, from, tensor->dtype, row, NULL);
        hr_xxh3_stream_update(stream, update->scratch, row * hr_dtype_size(dtype));
    }
    hr_xxh3_stream_digest(stream, out);
    hr_xxh3_stream_destroy(stream);
    return HR_OK;
}

static hr_status refuse_head(const hr_model *model, hr_error *err) {
    return hr_fail(err, HR_ERR_INVALID,
                   "tensor %s differs from %s, but config.json ties the two "
                   "(tie_word_embeddings); send the embedding alone or equal ones",
                   model->places.tied_head, model->places.items[0].name);
}

/* The embedding is place 0 of a tied model. */
static hr_status compare_held(const hr_base_update *update, const char *arena, hr_error *err) {
    const hr_model *model = update->model;
    const hr_place *embed = &model->places.items[0];
    uint8_t held[HR_XXH3_SIZE];
    HR_TRY(hr_place_digest(embed, model->info.compute, arena + embed->at, held, err));
    return memcmp(held, update->head, sizeof held) == 0 ? HR_OK : refuse_head(model, err);
}

/* Head and embedding may come in either order, in one call or in two. */
static hr_status check_head(hr_base_update *update, const arrivals *all, hr_error *err) {
    uint8_t embed[HR_XXH3_SIZE];
    if (all->head != NULL)
        HR_TRY(digest_tensor(update, all->head, update->head, err));
    if (all->embed != NULL && (all->head != NULL || update->head_came)) {
        HR_TRY(digest_tensor(update, all->embed, embed, err));
        return memcmp(embed, update->head, sizeof embed) == 0 ? HR_OK
                                                              : refuse_head(update->model, err);
    }
    if (all->head != NULL && update->states[0] == WRITTEN)
        return compare_held(update, update->arena, err);
    return HR_OK;
}

/* ---- writing ---- */

/* Packs one place from the rows of a tensor that begin at first_row; false for values that are not
 * finite, which only a shadow may find on the way. */
static bool pack_place(hr_base_update *update, uint32_t index, const hr_tensor *tensor,
                       size_t first_row) {
    hr_model *model = update->model;
    const hr_place *place = &model->places.items[index];
    char *to = update->arena + place->at;
    model->shadow_fresh[index] = false;
    if (update->to_shadow)
        return hr_place_pack_finite(place, model->info.compute, tensor, first_row, 0, place->n,
                                    update->scratch, to);
    hr_place_pack(place, model->info.compute, tensor, first_row, 0, place->n, update->scratch, to);
    return true;
}

/* As the tensor's places hold its values; they are of one kind. */
static hr_dtype held_as(const hr_base_update *update, const arrival *one) {
    return hr_place_dtype(&update->model->places.items[one->name->places[0]],
                          update->model->info.compute);
}

static hr_status pack_all(hr_base_update *update, const arrivals *all, hr_error *err) {
    for (size_t i = 0; i < all->n; i++) {
        const hr_weight_name *name = all->items[i].name;
        size_t row = 0;
        for (uint32_t part = 0; part < name->n_places; part++) {
            if (!pack_place(update, name->places[part], all->items[i].tensor, row))
                return hr_fail_not_finite(all->items[i].tensor, held_as(update, &all->items[i]),
                                          err);
            row += update->model->places.items[name->places[part]].n;
        }
    }
    return HR_OK;
}

/* In place nothing may fail after the first byte. */
static hr_status pack_live(hr_base_update *update, const arrivals *all, hr_error *err) {
    for (size_t i = 0; i < all->n; i++) {
        const hr_tensor *tensor = all->items[i].tensor;
        hr_dtype as = held_as(update, &all->items[i]);
        if (!hr_all_finite(tensor->data, tensor->dtype, as, hr_tensor_elements(tensor)))
            return hr_fail_not_finite(tensor, as, err);
    }
    HR_TRY(hr_guard_take_live(update->model->guard, err));
    update->touched_live = update->touched_live || all->n > 0;
    hr_status status = pack_all(update, all, err);
    hr_guard_release_live(update->model->guard);
    return status;
}

/* Ends a call: its claims become weights, or nothing. */
static void settle(hr_base_update *update, const arrivals *all, bool written) {
    for (size_t i = 0; i < all->n; i++)
        for (uint32_t part = 0; part < all->items[i].name->n_places; part++)
            update->states[all->items[i].name->places[part]] = written ? WRITTEN : NOT_THERE;
    update->head_came = update->head_came || (written && all->head != NULL);
}

hr_status hr_base_update_write(hr_base_update *update, const hr_tensor *tensors, size_t n,
                               hr_error *err) {
    if (update->sealed)
        return hr_fail(err, HR_ERR_INVALID, "the update is sealed; nothing can be added");
    arrivals all = {.items = calloc(n + 1, sizeof(arrival))};
    if (all.items == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    hr_status status = claim_all(update, tensors, n, &all, err);
    if (status == HR_OK)
        status = check_head(update, &all, err);
    if (status == HR_OK)
        status = update->to_shadow ? pack_all(update, &all, err) : pack_live(update, &all, err);
    settle(update, &all, status == HR_OK);
    free(all.items);
    return status;
}

/* ---- end ---- */

static hr_status check_complete(const hr_base_update *update, hr_error *err) {
    const hr_places *places = &update->model->places;
    size_t missing = 0, first = 0;
    for (size_t i = places->n; i-- > 0;) {
        if (update->states[i] == WRITTEN)
            continue;
        missing++;
        first = i;
    }
    if (missing == 0)
        return HR_OK;
    return hr_fail(err, HR_ERR_INVALID,
                   "%zu of %zu weights did not come, the first is %s; the update wants all",
                   missing, places->n, places->items[first].name);
}

static void copy_unwritten(hr_base_update *update) {
    hr_model *model = update->model;
    for (size_t i = 0; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        if (update->states[i] == WRITTEN || model->shadow_fresh[i])
            continue;
        memcpy(update->arena + place->at, model->arena + place->at, place->bytes);
        model->shadow_fresh[i] = true;
    }
}

hr_status hr_base_update_seal(hr_base_update *update, bool complete, hr_error *err) {
    if (complete)
        HR_TRY(check_complete(update, err));
    if (update->head_came && update->states[0] != WRITTEN)
        HR_TRY(compare_held(update, update->model->arena, err));
    if (update->to_shadow)
        copy_unwritten(update);
    update->sealed = true;
    return HR_OK;
}

size_t hr_base_update_weights(const hr_model *model) {
    return model->places.n;
}

void hr_base_update_written(const hr_base_update *update, bool *written) {
    for (size_t i = 0; i < update->model->places.n; i++)
        written[i] = update->states[i] == WRITTEN;
}

static void exchange(void *ctx) {
    hr_model *model = ctx;
    hr_weights_exchange(model, &model->shadow);
}

void hr_base_update_publish(hr_base_update *update) {
    HR_ASSERT(update->sealed);
    /* Weights that came are new here and stale there; shadow_fresh says so since they were packed.
     */
    if (update->to_shadow)
        hr_guard_exchange(update->model->guard, exchange, update->model);
    update_free(update);
}

bool hr_base_update_abandon(hr_base_update *update) {
    if (update == NULL)
        return true;
    bool untouched = !update->touched_live;
    update_free(update);
    return untouched;
}
