/* The table of the reference tier. */
#include "kernels/ref.h"
#include "kernels/tiers.h"

const hr_kernels hr_kernels_ref = {
    .name = "ref",
    .gemm = {ref_gemm_bf16, ref_gemm_f32},
    .lora_split = {ref_lora_split_bf16, ref_lora_split_f32},
    .lora_expand = {ref_lora_expand_bf16, ref_lora_expand_f32},
    .attention = {ref_attention_bf16, ref_attention_f32},
    .attention_merge = {ref_attention_merge_bf16, ref_attention_merge_f32},
    .rmsnorm = {ref_rmsnorm_bf16, ref_rmsnorm_f32},
    .rope = ref_rope,
    .store = {ref_store_bf16, ref_store_f32},
    .kv_store = {ref_kv_store_bf16, ref_kv_store_f32},
    .silu_mul = {ref_silu_mul_bf16, ref_silu_mul_f32},
    .unpack_row = {ref_unpack_row_bf16, ref_unpack_row_f32},
    .add = ref_add,
    .divide = ref_divide,
    .lse = ref_lse,
    .exp_sub = ref_exp_sub,
    .top_k = ref_top_k,
};
