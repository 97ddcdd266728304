/* Reading weights outside steps, and what a weights checker does to them. */
#include "base/machine.h"
#include "model/base_update.h"
#include "model/layout.h"
#include "tensor/convert.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- values ---- */

/* Rows [0, n) of a place, up to columns of each, as floats at out; panel: HR_PANEL rows. */
static void read_rows(const hr_model *model, const char *arena, const hr_place *place, size_t n,
                      size_t columns, void *panel, float *out) {
    hr_compute compute = model->info.compute;
    hr_dtype dtype = hr_place_dtype(place, compute);
    size_t row_bytes = hr_place_row_elements(place) * hr_dtype_size(dtype);
    for (size_t row = 0; row < n; row++) {
        if (row % HR_PANEL == 0)
            hr_place_unpack(place, compute, arena + place->at, row,
                            place->n - row < HR_PANEL ? place->n : row + HR_PANEL, panel);
        hr_convert(out + row * columns, HR_DTYPE_F32,
                   (const char *)panel + row % HR_PANEL * row_bytes, dtype, columns, NULL);
    }
}

static void read_name(const hr_model *model, const char *arena, const hr_weight_name *name,
                      size_t rows, size_t columns, void *panel, float *out) {
    for (uint32_t i = 0; i < name->n_places && rows > 0; i++) {
        const hr_place *place = &model->places.items[name->places[i]];
        size_t n = rows < place->n ? rows : place->n;
        read_rows(model, arena, place, n, columns, panel, out);
        out += n * columns;
        rows -= n;
    }
}

hr_status hr_model_weight_values(const hr_model *model, const char *name, size_t max_rows,
                                 float **out, size_t *rows, size_t *columns, bool *is_vector,
                                 hr_error *err) {
    const hr_weight_name *found = hr_places_find(&model->places, name);
    if (found == NULL)
        return hr_fail(err, HR_ERR_NOT_FOUND,
                       "%.160s is no weight of this model (%s); names are those of its "
                       "checkpoint, such as %s",
                       name, model->architecture->name, model->places.items[0].name);
    uint64_t shape[2];
    bool vector = hr_weight_shape(&model->places, found, shape) == 1;
    /* A vector lies as a column and is handed out as a row. */
    size_t n_rows = vector || shape[0] < max_rows ? shape[0] : max_rows;
    size_t n_columns = vector ? 1 : shape[1];
    float *values = malloc((n_rows * n_columns + 1) * sizeof *values);
    void *panel = malloc(hr_place_scratch_bytes(&model->places));
    hr_reading reading;
    hr_status status = values == NULL || panel == NULL
                           ? hr_fail(err, HR_ERR_NO_MEMORY, "no memory for values of %.160s", name)
                           : hr_guard_enter(model->guard, &model->arena, &reading, err);
    if (status == HR_OK) {
        read_name(model, reading.memory, found, n_rows, n_columns, panel, values);
        hr_guard_leave(model->guard, &reading);
    }
    free(panel);
    if (status != HR_OK) {
        free(values);
        return status;
    }
    *out = values;
    *rows = vector ? 1 : n_rows;
    *columns = vector ? n_rows : n_columns;
    *is_vector = vector;
    return HR_OK;
}

hr_status hr_model_weight_digests(const hr_model *model,
                                  void (*fn)(void *ctx, const char *name, hr_dtype dtype,
                                             const uint64_t *shape, uint32_t ndim,
                                             const uint8_t xxh3[16]),
                                  void *ctx, hr_error *err) {
    hr_compute compute = model->info.compute;
    for (size_t i = 0; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        uint64_t shape[] = {place->n, place->k};
        uint8_t digest[16];
        hr_reading reading;
        HR_TRY(hr_guard_enter(model->guard, &model->arena, &reading, err));
        hr_status status = hr_place_digest(place, compute, reading.memory + place->at, digest, err);
        hr_guard_leave(model->guard, &reading);
        if (status != HR_OK)
            return status;
        fn(ctx, place->name, hr_place_dtype(place, compute), shape,
           place->kind == HR_PLACE_VECTOR ? 1 : 2, digest);
    }
    return HR_OK;
}

/* ---- the weights checker ---- */

static hr_status refuse_during_update(const hr_model *model, hr_error *err) {
    return atomic_load(&model->updating)
               ? hr_fail(err, HR_ERR_BUSY, "an update of the base weights is under way")
               : HR_OK;
}

static hr_status take_snapshot(hr_model *model, hr_error *err) {
    const char *source;
    uint64_t available = hr_machine_memory_available(&source);
    if (model->snapshot == NULL && model->info.weight_bytes > available)
        return hr_fail(err, HR_ERR_NO_MEMORY,
                       "a snapshot needs %.2f GiB of memory, %.2f GiB are available (%s)",
                       (double)model->info.weight_bytes / (1 << 30), (double)available / (1 << 30),
                       source);
    hr_reading reading;
    HR_TRY(hr_guard_enter(model->guard, &model->arena, &reading, err));
    if (model->snapshot == NULL)
        model->snapshot = hr_pages_alloc(model->info.weight_bytes);
    if (model->snapshot != NULL)
        memcpy(model->snapshot, reading.memory, model->info.weight_bytes);
    hr_guard_leave(model->guard, &reading);
    if (model->snapshot == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "the system refuses %.2f GiB for a snapshot",
                       (double)model->info.weight_bytes / (1 << 30));
    return HR_OK;
}

hr_status hr_model_snapshot(hr_model *model, hr_error *err) {
    pthread_mutex_lock(&model->snapshot_lock);
    hr_status status = take_snapshot(model, err);
    pthread_mutex_unlock(&model->snapshot_lock);
    return status;
}

/* splitmix64's finish over a counter, as a float in [-1/32, 1/32). */
static float random_value(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (float)((int64_t)(x >> 40) - (1 << 23)) * 0x1p-28f;
}

static void randomize_place(hr_model *model, const hr_place *place, uint64_t *counter, float *rows,
                            void *scratch) {
    size_t k = hr_place_row_elements(place);
    for (size_t begin = 0; begin < place->n; begin += HR_PANEL) {
        size_t n = place->n - begin < HR_PANEL ? place->n - begin : HR_PANEL;
        for (size_t i = 0; i < n * k; i++)
            rows[i] = random_value((*counter)++);
        hr_place part = *place; /* of these rows alone */
        part.n = (uint32_t)n;
        hr_tensor tensor = {.dtype = HR_DTYPE_F32, .data = rows};
        size_t element = hr_dtype_size(hr_place_dtype(place, model->info.compute));
        char *to =
            model->arena + place->at +
            (place->kind == HR_PLACE_PACKED ? hr_packed_bytes(model->info.compute, begin, place->k)
                                            : begin * k * element);
        hr_place_pack(&part, model->info.compute, &tensor, 0, 0, n, scratch, to);
    }
}

hr_status hr_model_randomize(hr_model *model, uint64_t seed, hr_error *err) {
    HR_TRY(refuse_during_update(model, err));
    size_t scratch_bytes = hr_place_scratch_bytes(&model->places);
    float *rows = malloc(2 * scratch_bytes);
    if (rows == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for random weights");
    hr_status status = hr_guard_take_live(model->guard, err);
    uint64_t counter = seed << 40;
    for (size_t i = 0; status == HR_OK && i < model->places.n; i++) {
        randomize_place(model, &model->places.items[i], &counter, rows,
                        (char *)rows + scratch_bytes);
        model->shadow_fresh[i] = false;
    }
    if (status == HR_OK)
        hr_guard_release_live(model->guard);
    free(rows);
    return status;
}

/* Largest |x - y| over the elements of two memories of a place. */
static double max_difference(const hr_place *place, hr_compute compute, const char *x,
                             const char *y) {
    hr_dtype dtype = hr_place_dtype(place, compute);
    size_t element = hr_dtype_size(dtype);
    double most = 0;
    for (size_t at = 0; at < place->bytes; at += element) {
        float a, b;
        hr_convert(&a, HR_DTYPE_F32, x + at, dtype, 1, NULL);
        hr_convert(&b, HR_DTYPE_F32, y + at, dtype, 1, NULL);
        double difference = fabs((double)a - (double)b);
        most = difference > most ? difference : most;
    }
    return most;
}

static const hr_place *first_difference(const hr_model *model, const char *arena) {
    for (size_t i = 0; i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        if (memcmp(arena + place->at, model->snapshot + place->at, place->bytes) != 0)
            return place;
    }
    return NULL;
}

static hr_status compare_snapshot(const hr_model *model, char name[160], double *max_abs_err,
                                  bool *equal, hr_error *err) {
    if (model->snapshot == NULL)
        return hr_fail(err, HR_ERR_NOT_FOUND,
                       "there is no snapshot to compare with; take one first (action snapshot)");
    hr_reading reading;
    HR_TRY(hr_guard_enter(model->guard, &model->arena, &reading, err));
    const hr_place *differs = first_difference(model, reading.memory);
    double most = 0;
    for (size_t i = 0; differs != NULL && i < model->places.n; i++) {
        const hr_place *place = &model->places.items[i];
        if (strcmp(place->in_memory, differs->in_memory) != 0)
            continue;
        double here = max_difference(place, model->info.compute, reading.memory + place->at,
                                     model->snapshot + place->at);
        most = here > most ? here : most;
    }
    hr_guard_leave(model->guard, &reading);
    snprintf(name, HR_WEIGHT_NAME_SIZE, "%s", differs != NULL ? differs->in_memory : "");
    *max_abs_err = most;
    *equal = differs == NULL;
    return HR_OK;
}

hr_status hr_model_compare_snapshot(hr_model *model, char name[160], double *max_abs_err,
                                    bool *equal, hr_error *err) {
    pthread_mutex_lock(&model->snapshot_lock);
    hr_status status = compare_snapshot(model, name, max_abs_err, equal, err);
    pthread_mutex_unlock(&model->snapshot_lock);
    return status;
}

void hr_model_release_weights(hr_model *model) {
    /* The shadow is of no use to what comes next, which must bring every weight. */
    if (hr_guard_wait_shadow(model->guard, NULL) == HR_OK)
        hr_weights_destroy(&model->shadow);
    madvise(model->arena, model->info.weight_bytes, MADV_DONTNEED);
}
