/* Where each tensor of a checkpoint lies in an arena of weights, and what each name means. */
#ifndef HR_MODEL_PLACES_H
#define HR_MODEL_PLACES_H

#include "base/error.h"
#include "kernels/kernels.h"

#include <headrace/tensor.h>

typedef struct hr_model hr_model; /* model/model.h */

enum { HR_MAX_PARTS = 3, HR_WEIGHT_NAME_SIZE = 160 };

typedef enum hr_place_kind { HR_PLACE_PACKED, HR_PLACE_DENSE, HR_PLACE_VECTOR } hr_place_kind;

typedef struct hr_place {
    char name[HR_WEIGHT_NAME_SIZE];
    char in_memory[HR_WEIGHT_NAME_SIZE]; /* of the fused parameter that it is a part of, or name */
    hr_place_kind kind;
    uint32_t n, k;    /* shape [n, k]; a vector: [n], k = 0 */
    size_t at, bytes; /* in the arena, padding included */
} hr_place;

/* A name that a tensor may come under: one place, or those of a fused one, whose rows are theirs
 * one after the other. */
typedef struct hr_weight_name {
    const char *text;
    uint32_t places[HR_MAX_PARTS], n_places;
    bool tied_head; /* the head of a tied model: its only place is the embedding's */
} hr_weight_name;

typedef struct hr_places {
    hr_place *items; /* what a checkpoint must hold, each once */
    size_t n;
    hr_weight_name *names; /* sorted */
    size_t n_names;
    char tied_head[HR_WEIGHT_NAME_SIZE]; /* "" when the head is a weight of its own */
} hr_places;

/* From a model that is laid out and whose modules are named. ERR_NO_MEMORY. */
hr_status hr_places_build(const hr_model *model, hr_places *out, hr_error *err);
void hr_places_free(hr_places *places);

/* NULL when no weight has this name. Thread-safe. */
const hr_weight_name *hr_places_find(const hr_places *places, const char *name);

/* Buffers that old checkpoints hold and that the model computes itself. */
bool hr_places_ignored(const char *name);

/* The shape of the tensor that comes under this name; returns its dimensions. */
uint32_t hr_weight_shape(const hr_places *places, const hr_weight_name *name, uint64_t shape[2]);

hr_dtype hr_compute_dtype(hr_compute compute);

/* Converts and packs rows [begin, end) of a place from the tensor whose row first_row is the
 * place's row 0; begin is a multiple of HR_PANEL. to: the place's memory. scratch:
 * hr_place_scratch_bytes. Thread-safe. */
void hr_place_pack(const hr_place *place, hr_compute compute, const hr_tensor *tensor,
                   size_t first_row, size_t begin, size_t end, void *scratch, char *to);
/* The same, which stops, false, at values that are not finite as the place holds them: before it
 * packs them, but behind others. They are checked and packed while they are in a cache. */
bool hr_place_pack_finite(const hr_place *place, hr_compute compute, const hr_tensor *tensor,
                          size_t first_row, size_t begin, size_t end, void *scratch, char *to);
size_t hr_place_scratch_bytes(const hr_places *places);

/* Rows [begin, end) as dense elements of hr_place_dtype; begin is a multiple of HR_PANEL. A vector
 * is n rows of one element. from: the place's memory. */
void hr_place_unpack(const hr_place *place, hr_compute compute, const char *from, size_t begin,
                     size_t end, void *out);
hr_dtype hr_place_dtype(const hr_place *place, hr_compute compute);

/* XXH3-128 of all rows in that form. ERR_NO_MEMORY. Thread-safe. */
hr_status hr_place_digest(const hr_place *place, hr_compute compute, const char *from,
                          uint8_t out[16], hr_error *err);

static inline size_t hr_place_row_elements(const hr_place *place) {
    return place->kind == HR_PLACE_VECTOR ? 1 : place->k;
}

#endif
