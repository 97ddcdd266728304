/* Prototypes of a tier's functions; HR_TIER(op) gives their names. */
#include "kernels/kernels.h"

void HR_TIER(gemm_bf16)(const hr_gemm_args *a);
void HR_TIER(gemm_f32)(const hr_gemm_args *a);
void HR_TIER(lora_split_bf16)(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves,
                              float scale, void *out, size_t ldout);
void HR_TIER(lora_split_f32)(const float *h, size_t ldh, uint32_t m, uint32_t n_leaves, float scale,
                             void *out, size_t ldout);
void HR_TIER(lora_expand_bf16)(const hr_lora_expand_args *a);
void HR_TIER(lora_expand_f32)(const hr_lora_expand_args *a);
void HR_TIER(attention_bf16)(const hr_attention_args *a);
void HR_TIER(attention_f32)(const hr_attention_args *a);
void HR_TIER(attention_merge_bf16)(const hr_attention_args *a);
void HR_TIER(attention_merge_f32)(const hr_attention_args *a);
void HR_TIER(kv_store_bf16)(const float *k, const float *v, uint32_t head_dim, uint32_t slot,
                            char *kv);
void HR_TIER(kv_store_f32)(const float *k, const float *v, uint32_t head_dim, uint32_t slot,
                           char *kv);
void HR_TIER(rmsnorm_bf16)(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                           void *out);
void HR_TIER(rmsnorm_f32)(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                          void *out);
void HR_TIER(rope)(float *x, const float *cos, const float *sin, uint32_t n);
void HR_TIER(store_bf16)(const float *x, uint32_t n, uint32_t n_padded, void *out);
void HR_TIER(store_f32)(const float *x, uint32_t n, uint32_t n_padded, void *out);
void HR_TIER(silu_mul_bf16)(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                            void *out);
void HR_TIER(silu_mul_f32)(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                           void *out);
void HR_TIER(unpack_row_bf16)(const void *w, uint32_t row, uint32_t k, float *out);
void HR_TIER(unpack_row_f32)(const void *w, uint32_t row, uint32_t k, float *out);
void HR_TIER(add)(float *y, const float *x, uint32_t n);
void HR_TIER(divide)(const float *x, float t, uint32_t n, float *y);
hr_lse HR_TIER(lse)(const float *x, uint32_t n);
void HR_TIER(exp_sub)(const float *x, float max, uint32_t n, float *out);
void HR_TIER(top_k)(const float *x, uint32_t n, uint32_t k, uint32_t *ids, float *values,
                    void *scratch);
