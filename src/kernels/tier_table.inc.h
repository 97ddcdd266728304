/* The rows of a tier's op table that are not special to it: everything but the name and the bf16
 * GEMM. */
.gemm[HR_COMPUTE_F32] = HR_TIER(gemm_f32),
    .lora_split = {HR_TIER(lora_split_bf16), HR_TIER(lora_split_f32)},
    .lora_expand = {HR_TIER(lora_expand_bf16), HR_TIER(lora_expand_f32)},
    .attention = {HR_TIER(attention_bf16), HR_TIER(attention_f32)},
    .attention_merge = {HR_TIER(attention_merge_bf16), HR_TIER(attention_merge_f32)},
    .rmsnorm = {HR_TIER(rmsnorm_bf16), HR_TIER(rmsnorm_f32)}, .rope = HR_TIER(rope),
    .store = {HR_TIER(store_bf16), HR_TIER(store_f32)},
    .kv_store = {HR_TIER(kv_store_bf16), HR_TIER(kv_store_f32)},
    .silu_mul = {HR_TIER(silu_mul_bf16), HR_TIER(silu_mul_f32)},
    .unpack_row = {HR_TIER(unpack_row_bf16), HR_TIER(unpack_row_f32)}, .add = HR_TIER(add),
    .divide = HR_TIER(divide), .lse = HR_TIER(lse), .exp_sub = HR_TIER(exp_sub),
    .top_k = HR_TIER(top_k),
