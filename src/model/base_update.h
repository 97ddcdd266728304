/* Base weights written into a loaded model: the sink of a base update.
 *
 * Tensors are converted and packed as they come into a second set of arenas (the shadow), and one
 * exchange of pointers makes them live; or, where memory does not allow two, into the live arena
 * while no step runs. Names are those of the checkpoint; fused ones (qkv_proj, gate_up_proj, weight
 * and bias) are split by rows, and the head of a tied model may come again if it equals the
 * embedding.
 *
 * One update at a time; its functions are called by one thread. Reading functions may be called by
 * any thread at any time. */
#ifndef HR_MODEL_BASE_UPDATE_H
#define HR_MODEL_BASE_UPDATE_H

#include "model/model.h"

#include <headrace/tensor.h>

typedef struct hr_base_update hr_base_update;

/* shadow: false writes in place, and then no step may run from begin to end or abandon. The
 * shadow's memory is allocated and faulted in the first time and kept with the model.
 * ERR_NO_MEMORY, ERR_BUSY (another update is under way). */
hr_status hr_base_update_begin(hr_model *model, bool shadow, hr_base_update **out, hr_error *err);

/* Checks all tensors first (names, shapes, dtypes, finite values, twice in this update), then packs
 * them; the bytes are read only here. When it fails nothing of this call was written. ERR_NOT_FOUND
 * (unknown name), ERR_SHAPE, ERR_DTYPE, ERR_VALUE (not finite as held), ERR_INVALID. */
hr_status hr_base_update_write(hr_base_update *update, const hr_tensor *tensors, size_t n,
                               hr_error *err);

/* Everything is in. complete: refuses, naming one, when a weight of the model was not written;
 * otherwise such weights keep their present values. A tied head that came without its embedding
 * must equal the live one. */
hr_status hr_base_update_seal(hr_base_update *update, bool complete, hr_error *err);

/* Which weights came so far: written has hr_base_update_weights(model) entries, in layout order. */
size_t hr_base_update_weights(const hr_model *model);
void hr_base_update_written(const hr_base_update *update, bool *written);

/* Makes a sealed update live and frees it; the caller stands between two steps. Takes no longer
 * than some assignments. Cannot fail. */
void hr_base_update_publish(hr_base_update *update);

/* Gives the update up in any state. true: the live weights are as they were; false: it was writing
 * in place and had begun, so the model must not run before an update of every weight. NULL is
 * allowed. */
bool hr_base_update_abandon(hr_base_update *update);

/* ---- reading ---- */

/* Up to max_rows rows of a weight as floats (row-major; a vector is one row, always whole); rows
 * and columns get what was written. Takes HF names, fused ones too. Bytes are the compute values.
 * ERR_NOT_FOUND. *out is freed with free(). */
hr_status hr_model_weight_values(const hr_model *model, const char *name, size_t max_rows,
                                 float **out, size_t *rows, size_t *columns, bool *is_vector,
                                 hr_error *err);

/* XXH3-128 of a weight as row-major elements of the compute dtype (vectors: F32), calling fn for
 * each tensor of the checkpoint by its HF name, in layout order. The head of a tied model is not
 * listed. Each tensor is of one version; a publish waits for nobody, and who reads across one gets
 * the older version of some tensors. ERR_NO_MEMORY, ERR_BUSY (weights being written in place). */
hr_status hr_model_weight_digests(const hr_model *model,
                                  void (*fn)(void *ctx, const char *name, hr_dtype dtype,
                                             const uint64_t *shape, uint32_t ndim,
                                             const uint8_t xxh3[16]),
                                  void *ctx, hr_error *err);

/* The same of an adapter's pairs: names as PEFT saves them without the "base_model.model." prefix
 * ("model.layers.0.self_attn.q_proj.lora_A.weight", "model.embed_tokens.lora_embedding_A"), A
 * [rank, in] and B [out, rank]. Any thread. ERR_NO_MEMORY. */
hr_status hr_lora_digests(const hr_model *model, const hr_lora *lora,
                          void (*fn)(void *ctx, const char *name, hr_dtype dtype,
                                     const uint64_t *shape, uint32_t ndim, const uint8_t xxh3[16]),
                          void *ctx, hr_error *err);

/* For the weights checker: a copy of the live arena, random values into it (no step may run), and a
 * comparison that names the first weight that differs (fused, as it lies in memory:
 * "model.layers.0.mlp.gate_up_proj.weight") and its largest absolute difference. Snapshots and
 * comparisons go one after the other; a snapshot that fails leaves the one before, or none.
 * ERR_NO_MEMORY, ERR_BUSY, ERR_NOT_FOUND (no snapshot). */
hr_status hr_model_snapshot(hr_model *model, hr_error *err);
hr_status hr_model_randomize(hr_model *model, uint64_t seed, hr_error *err);
hr_status hr_model_compare_snapshot(hr_model *model, char name[160], double *max_abs_err,
                                    bool *equal, hr_error *err);

/* Gives the memory of the live weights back to the system, or takes it again with undefined
 * contents: a full update must follow. No step may run and no update be under way. */
void hr_model_release_weights(hr_model *model);

#endif
