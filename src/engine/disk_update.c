/* A checkpoint on disk, sent to the engine's own receiver bucket by bucket. */
#include "engine/disk_update.h"

#include "base/error.h"
#include "format/checkpoint.h"

#include <stdlib.h>
#include <string.h>

enum { BUCKET_BYTES = 512 << 20 };

/* ---- is it the same kind of model? ---- */

static hr_status check_number(const char *key, double came, double served, hr_error *err) {
    if (came == served)
        return HR_OK;
    return hr_fail(err, HR_ERR_MODEL,
                   "config.json: %s is %g, the engine serves a model with %g; start another engine "
                   "for it",
                   key, came, served);
}

static hr_status check_rope(const hr_rope_config *came, const hr_rope_config *served,
                            hr_error *err) {
    const struct {
        const char *key;
        double came, served;
    } numbers[] = {
        {"rope_scaling.rope_type (number of the type)", came->type, served->type},
        {"rope_theta", came->theta, served->theta},
        {"rope_scaling.factor", came->factor, served->factor},
        {"rope_scaling.original_max_position_embeddings", came->original_max_position_embeddings,
         served->original_max_position_embeddings},
        {"rope_scaling.low_freq_factor", came->low_freq_factor, served->low_freq_factor},
        {"rope_scaling.high_freq_factor", came->high_freq_factor, served->high_freq_factor},
        {"rope_scaling.beta_fast", came->beta_fast, served->beta_fast},
        {"rope_scaling.beta_slow", came->beta_slow, served->beta_slow},
        {"rope_scaling.attention_factor", came->attention_factor, served->attention_factor},
        {"rope_scaling.mscale", came->mscale, served->mscale},
        {"rope_scaling.mscale_all_dim", came->mscale_all_dim, served->mscale_all_dim},
        {"rope_scaling.truncate", came->truncate, served->truncate},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        HR_TRY(check_number(numbers[i].key, numbers[i].came, numbers[i].served, err));
    return HR_OK;
}

/* Everything that the forward pass takes from config.json and not from the weights. */
static hr_status check_config(const hr_hf_config *came, const hr_hf_config *served, hr_error *err) {
    if (strcmp(came->architecture, served->architecture) != 0)
        return hr_fail(err, HR_ERR_MODEL,
                       "config.json: architectures is %s, the engine serves %s; start another "
                       "engine for it",
                       came->architecture, served->architecture);
    const struct {
        const char *key;
        double came, served;
    } numbers[] = {
        {"hidden_size", came->hidden_size, served->hidden_size},
        {"intermediate_size", came->intermediate_size, served->intermediate_size},
        {"num_hidden_layers", came->num_hidden_layers, served->num_hidden_layers},
        {"num_attention_heads", came->num_attention_heads, served->num_attention_heads},
        {"num_key_value_heads", came->num_key_value_heads, served->num_key_value_heads},
        {"head_dim", came->head_dim, served->head_dim},
        {"vocab_size", came->vocab_size, served->vocab_size},
        {"rms_norm_eps", came->rms_norm_eps, served->rms_norm_eps},
        {"tie_word_embeddings", came->tie_word_embeddings, served->tie_word_embeddings},
        {"attention_bias", came->attention_bias, served->attention_bias},
        {"mlp_bias", came->mlp_bias, served->mlp_bias},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        HR_TRY(check_number(numbers[i].key, numbers[i].came, numbers[i].served, err));
    return check_rope(&came->rope, &served->rope, err);
}

/* ---- sending ---- */

/* The tensors [begin, end) that make the next bucket: at least one. */
static size_t bucket_end(const hr_checkpoint *checkpoint, size_t begin) {
    uint64_t bytes = hr_checkpoint_at(checkpoint, begin)->bytes;
    size_t end = begin + 1, n = hr_checkpoint_count(checkpoint);
    while (end < n && bytes + hr_checkpoint_at(checkpoint, end)->bytes <= BUCKET_BYTES)
        bytes += hr_checkpoint_at(checkpoint, end++)->bytes;
    return end;
}

static hr_status send_buckets(hr_receiver *receiver, const char *session_id,
                              const hr_checkpoint *checkpoint, hr_tensor *tensors, hr_error *err) {
    size_t n = hr_checkpoint_count(checkpoint);
    for (size_t begin = 0, end; begin < n; begin = end) {
        end = bucket_end(checkpoint, begin);
        for (size_t i = begin; i < end; i++) {
            HR_TRY(hr_checkpoint_fetch(checkpoint, hr_checkpoint_at(checkpoint, i), err));
            tensors[i - begin] = *hr_checkpoint_at(checkpoint, i);
        }
        hr_bucket bucket = {.tensors = tensors, .n = end - begin, .session_id = session_id};
        HR_TRY(hr_receiver_bucket(receiver, &bucket, err));
        for (size_t i = begin; i < end; i++)
            hr_checkpoint_drop(checkpoint, hr_checkpoint_at(checkpoint, i));
    }
    return HR_OK;
}

static hr_status send_session(hr_receiver *receiver, const hr_checkpoint *checkpoint,
                              hr_tensor *tensors, const hr_disk_update *update,
                              hr_receipt **receipt, hr_error *err) {
    char session_id[HR_SESSION_ID_SIZE];
    hr_session_options begin = {.sync_base = true, .timeout_ms = update->timeout_ms};
    HR_TRY(hr_receiver_begin(receiver, &begin, session_id, err));
    hr_status status = send_buckets(receiver, session_id, checkpoint, tensors, err);
    if (status != HR_OK) {
        (void)hr_receiver_abort(receiver, session_id, NULL);
        return status;
    }
    hr_end_options end = {.session_id = session_id,
                          .weight_version = update->weight_version,
                          .complete_base = true,
                          .flush_cache = update->flush_cache,
                          .abort_all_requests = update->abort_all_requests,
                          .timeout_ms = update->timeout_ms};
    return hr_receiver_end(receiver, &end, receipt, err);
}

static hr_status send_checkpoint(hr_receiver *receiver, const hr_disk_update *update,
                                 hr_receipt **receipt, hr_error *err) {
    hr_checkpoint *checkpoint = NULL;
    HR_TRY(hr_checkpoint_open_unread(update->model_path, &checkpoint, err));
    hr_tensor *tensors = calloc(hr_checkpoint_count(checkpoint) + 1, sizeof *tensors);
    hr_status status;
    if (tensors == NULL)
        status = hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a list of %zu tensors",
                         hr_checkpoint_count(checkpoint));
    else
        status = send_session(receiver, checkpoint, tensors, update, receipt, err);
    free(tensors);
    hr_checkpoint_close(checkpoint);
    return status;
}

hr_status hr_disk_update_run(hr_receiver *receiver, const hr_hf_config *served,
                             const hr_disk_update *update, hr_receipt **receipt, hr_error *err) {
    if (update->model_path == NULL || update->model_path[0] == '\0')
        return hr_fail(err, HR_ERR_INVALID,
                       "model_path is missing; name a Hugging Face model directory");
    hr_hf_config came;
    HR_TRY(hr_hf_config_load(update->model_path, &came, err));
    hr_status status = check_config(&came, served, err);
    if (status == HR_OK)
        status = send_checkpoint(receiver, update, receipt, err);
    return status == HR_OK ? HR_OK : hr_fail_context(err, status, "%s", update->model_path);
}
